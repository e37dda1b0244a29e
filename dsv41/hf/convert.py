"""`dsv41 convert`: a folder of released weights to a run folder that the trainer and the generator open, and back.

A run folder holds the text model as float32 masters; beside them, item ``carried`` keeps draft and vision tensors byte for
byte and item ``scales`` the scales of quantised masters, with which exporting gives the source's bytes again.
"""

import math
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from tokenizers import Tokenizer

from dsv41.commands import Convert
from dsv41.config import ModelConfig, load_config, save_config
from dsv41.errors import UserError
from dsv41.hf.draft import CARRIED
from dsv41.hf.folder import ReleasedFolder, Selection, missing_parts, open_folder, refuse
from dsv41.hf.load import ShardingRule, fsdp, load_carried, load_params, load_scales, one_device
from dsv41.hf.names import PARTS, Slot, key_table, text_leaves
from dsv41.hf.save import (
    Target,
    Unit,
    default_target,
    from_carried,
    from_master,
    leaf_reader,
    new_folder,
    shard_names,
    shard_units,
    target_config,
    write_weights,
)
from dsv41.params import TextParams, abstract_params, text_specs
from dsv41.tokenmap import token_map

CHECKPOINTS = "checkpoints"
# Copied as they are, where the source has them.
SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "engram_token_map.json")
_SCALES = "scales"
_PLAIN_SECONDS = 10.0


class Checkpoints(Protocol):
    """What is used of the trainer's checkpoints, which this package does not import."""

    def latest(self) -> int | None: ...
    def save(self, step: int, state: Any, meta: dict[str, Any], extra: dict[str, dict[str, Any]] | None = None) -> None: ...
    def restore_params(self, step: int, abstract_params: Any) -> Any: ...
    def restore_extra(self, step: int, item: str) -> dict[str, Any]: ...
    def described(self, step: int) -> dict[str, dict[str, Any]]: ...


OpenCheckpoints = Callable[[Path, int], Checkpoints]


@struct.dataclass
class Imported:
    """The state of a run that has weights but was never trained here."""

    params: TextParams
    step: jax.Array


def convert(options: Convert, checkpoints: OpenCheckpoints) -> None:
    """Converts, or prints the plan; the direction follows from what ``src`` is. Raises `UserError` for bad input."""
    src = options.src
    known = (src / CHECKPOINTS).is_dir() or (src / "config.json").exists()
    if known and src.resolve() in options.dst.resolve().parents:
        raise UserError(f"{options.dst}: found a folder inside the source, allowed is one outside {src}")
    if (src / CHECKPOINTS).is_dir():
        _export(options, checkpoints)
    elif (src / "config.json").exists():
        _import(options, checkpoints)
    else:
        found = "no config.json in it" if src.is_dir() else "something else" if src.exists() else "nothing there"
        raise UserError(f"{src}: found {found}, allowed is a folder of released weights or one that dsv41 train wrote")


def _selection(options: Convert, config: ModelConfig) -> Selection:
    layers = None
    if options.layers is not None:
        match = re.fullmatch(r"(?:0-)?(\d{1,6})", options.layers)
        if not match:
            found = f"layers: found {options.layers!r}, allowed is 0-N: later layers read what earlier ones publish"
            raise UserError(f"{found}; nearest is 0-{config.num_hidden_layers - 1}")
        layers = int(match[1]) + 1
    stages = config.num_nextn_predict_layers
    wanted = stages if options.draft_stages is None else options.draft_stages
    if wanted not in (0, stages):
        raise UserError(f"draft_stages: found {wanted}, allowed is 0 or all {stages}: the last stage holds their head")
    return Selection(layers, bool(wanted), options.vision)


def _rule() -> ShardingRule:
    """All devices share the weights."""
    return fsdp(jax.make_mesh((jax.device_count(),), ("fsdp",))) if jax.device_count() > 1 else one_device


def _import(options: Convert, checkpoints: OpenCheckpoints) -> None:
    config = load_config(options.src)
    if options.quantize is not None:
        raise UserError(
            f"quantize: found {options.quantize!r} for released weights as source, allowed is none: masters are float32"
        )
    folder = open_folder(options.src, _selection(options, config), config=config)
    _check_tokenizer(options.src / SIDE_FILES[0], folder.config)
    rule = _rule()
    if options.dry_run:
        _print(_import_plan(folder, rule))
        return
    total = sum(entry.stop - entry.start for _, entry in folder.tensors())
    with new_folder(options.dst) as partial, _progress("read", total) as progress:
        state = Imported(load_params(folder, sharding=rule, progress=progress), jnp.zeros((), jnp.int32))
        extra = {_SCALES: load_scales(folder, rule), CARRIED: load_carried(folder, rule)}
        checkpoints(partial / CHECKPOINTS, 1).save(0, state, {"source": "released"}, extra)
        save_config(folder.config, partial / "config.json")
        _copy_side_files(options.src, partial)
    count = sum(1 for _ in folder.tensors())
    print(f"read {count:,} tensors of {total:,} bytes; left out {len(folder.left_out):,}")
    print(f"run: {options.dst}")


def _check_tokenizer(file: Path, config: ModelConfig) -> None:
    """The tokenizer folds into as many classes as the Engram constants rest on (§11.1)."""
    if not file.is_file():
        return
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{file}: found no tokenizer ({' '.join(str(error).split())[:160]})") from None
    try:
        token_map(tokenizer, config.engram_compressed_vocab_size)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _import_plan(folder: ReleasedFolder, rule: ShardingRule) -> Iterator[str]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for slot in folder.slots.values():
        for name in folder.names(slot):
            entry, item, target = folder.entry(name), CARRIED, f"{CARRIED}.{name}"
            if slot.part == "text":
                item = "params" if name == slot.weight.name else _SCALES
                target = f"{item}.{slot.path}" + ("" if slot.expert is None else f"[{slot.expert}]")
            shape = ",".join(map(str, entry.shape))
            place = getattr(rule(slot.spec), "spec", "one device") if item == "params" else "with its weight"
            size = entry.stop - entry.start
            yield f"{name}  {entry.dtype}[{shape}]  {size} bytes  {folder.files[name].path.name} -> {target}  {place}"
            counts[slot.part] += 1
            sizes[slot.part] += size
    yield from (f"{name}  left out" for name in folder.left_out)
    yield from _totals(counts, sizes)
    masters = sum(spec.size * spec.dtype.dtype.itemsize for spec in text_leaves(folder.config).values())
    devices = f"{jax.device_count()} device{'s' if jax.device_count() > 1 else ''}"
    yield f"masters: {masters:,} bytes on {devices}; left out: {len(folder.left_out):,} tensors"


def _totals(counts: Counter[str], sizes: Counter[str]) -> Iterator[str]:
    for part in PARTS:
        if counts[part]:
            yield f"{part}: {counts[part]:,} tensors, {sizes[part]:,} bytes"
    yield f"total: {counts.total():,} tensors, {sizes.total():,} bytes"


def _export(options: Convert, checkpoints: OpenCheckpoints) -> None:
    store = checkpoints(options.src / CHECKPOINTS, 1)
    step = store.latest()
    if step is None:
        raise UserError(f"{options.src}: found no checkpoint, allowed is a folder that dsv41 train or convert wrote")
    config = load_config(options.src)
    selected = _selection(options, config).config(config)
    target = options.quantize or default_target(config)
    slots = key_table(selected)
    refuse(options.src, list(_misfits(store.described(step), config, slots)))
    if options.dry_run:
        _print(_export_plan(slots, list(_units(slots.values(), config, target, {}, {}, {})), f"checkpoint {step}"))
        return
    params = store.restore_params(step, _abstract(config))
    leaves = dict(zip(text_leaves(config), jax.tree.leaves(params), strict=True))
    scales = store.restore_extra(step, _SCALES)
    units = list(_units(slots.values(), config, target, leaves, scales, store.restore_extra(step, CARRIED)))
    tensors = [tensor for unit in units for tensor in unit.tensors]
    total = sum(tensor.bytes for tensor in tensors)
    with new_folder(options.dst) as partial, _progress("wrote", total) as progress:
        write_weights(partial, units, target_config(selected, target), progress=progress)
        _copy_side_files(options.src, partial)
    print(f"wrote {len(tensors):,} tensors of {total:,} bytes as {target}, from step {step}")
    print(f"weights: {options.dst}")


def _misfits(described: dict[str, dict[str, Any]], config: ModelConfig, slots: dict[str, Slot]) -> Iterator[str]:
    """What in a checkpoint, told by its arrays' shapes and dtypes, is not of the model of ``config``.

    slots: those to write, all of whose weights must be there.
    """
    say = lambda shape, dtype: f"{dtype}[{', '.join(map(str, shape))}]"  # noqa: E731
    leaves = zip(text_leaves(config), jax.tree.leaves(abstract_params(text_specs(config))), strict=True)
    params, held = {path: say(leaf.shape, leaf.dtype) for path, leaf in leaves}, described.get("params", {})
    for path, allowed in params.items():
        if path not in held:
            yield f"{path!r} is missing from its checkpoint"
        elif (found := say(*held[path])) != allowed:
            yield f"{path!r}: found {found}, allowed by config.json is {allowed}"
    yield from (f"{path!r} is unknown to config.json" for path in held if path not in params)

    shapes: dict[str, dict[str, set[tuple[int, ...]]]] = {_SCALES: {}, CARRIED: {}}
    for slot in key_table(config).values():
        if slot.part != "text":
            shapes[CARRIED].update({tensor.name: {tensor.shape} for tensor in slot.tensors})
            shapes[CARRIED][slot.weight.name].add(slot.shape)  # where it is not packed
        elif slot.scale is not None:
            stack = () if slot.expert is None else slot.spec.shape[:1]
            shapes[_SCALES][slot.path] = {(*stack, *slot.scale.shape)}
    for item, known in shapes.items():
        for name, (shape, _) in described.get(item, {}).items():
            if name not in known:
                yield f"{item} {name!r} is unknown to config.json"
            elif tuple(shape) not in known[name]:
                yield f"{item} {name!r}: found shape {shape}, allowed by config.json is {list(min(known[name]))}"
    carried = described.get(CARRIED, {})
    yield from missing_parts(slots, [slot for slot in slots.values() if slot.part != "text" and slot.weight.name not in carried])


def _abstract(config: ModelConfig) -> Any:
    specs, rule = text_specs(config), _rule()
    leaves, tree = jax.tree.flatten(abstract_params(specs))
    shardings = map(rule, text_leaves(config).values())
    sharded = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in zip(leaves, shardings, strict=True)]
    return jax.tree.unflatten(tree, sharded)


def _units(
    slots: Iterable[Slot], config: ModelConfig, target: Target, leaves: Any, scales: dict[str, Any], carried: dict[str, Any]
) -> Iterator[Unit]:
    weight, scale, other = leaf_reader(leaves), leaf_reader(scales), leaf_reader(carried)
    for slot in slots:
        if slot.part != "text":
            yield from_carried(slot, config, target, lambda name: other(name, None))
            continue
        kept = (lambda slot=slot: scale(slot.path, slot.expert)) if slot.path in scales else None
        yield from_master(slot, config, target, lambda slot=slot: weight(slot.path, slot.expert), kept)


def _export_plan(slots: dict[str, Slot], units: list[Unit], source: str) -> Iterator[str]:
    shards = shard_units(units)
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for file, shard in zip(shard_names(len(shards)), shards, strict=True):
        for unit in shard:
            part = slots[unit.tensors[0].name].part
            for tensor in unit.tensors:
                shape = ",".join(map(str, tensor.shape))
                yield f"{tensor.name}  {tensor.dtype}[{shape}]  {tensor.bytes} bytes  {source} -> {file}"
                counts[part] += 1
                sizes[part] += tensor.bytes
    yield from _totals(counts, sizes)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _copy_side_files(source: Path, target: Path) -> None:
    for name in SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


@contextmanager
def _progress(verb: str, total: int) -> Iterator[Callable[[int], None]]:
    """Bytes done, as a bar on a terminal and else as a line every few seconds, on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    bar = Progress(TextColumn(verb), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console)
    task = bar.add_task(verb, total=total)
    said = time.monotonic()

    def plain(done: int) -> None:
        nonlocal said
        if time.monotonic() - said > _PLAIN_SECONDS:
            said = time.monotonic()
            print(f"{verb} {done:,} of {total:,} bytes ({math.floor(100 * done / max(total, 1))}%)", file=sys.stderr, flush=True)

    if not console.is_terminal:
        yield plain
        return
    with bar:
        yield lambda done: bar.update(task, completed=done)
