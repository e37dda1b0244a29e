"""A folder of released weights, opened and checked as a whole: config.json, safetensors files, their index (architecture §14).

Whatever is wrong with it is collected and said in one `UserError`. Weights may be stored as the release stores them or
unquantised (BF16 or F32); no tensor's bytes are read here.
"""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from dsv41.config import ModelConfig, load_config, replace
from dsv41.errors import UserError, nearest
from dsv41.files import read_small
from dsv41.hf.names import PARTS, Part, Slot, key_table, tile
from dsv41.hf.safetensors import MAX_HEADER_BYTES, Entry, SafetensorsFile, json_object, open_safetensors

INDEX = "model.safetensors.index.json"
# Of released and of unquantised folders; where there is neither, every file counts.
_PATTERNS = ("model*.safetensors", "weights*.safetensors", "*.safetensors")
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_SHOWN = 20  # problems said in full
_CODES = {"fp8": ("F8_E4M3",), "fp8_rows": ("F8_E4M3",), "fp4": ("I8", "U8", "F4")}
_SCALES = ("F8_E8M0", "U8")
_PLAIN = {"f32": ("F32",), "i64": ("I64", "I32")}
_LEAVE_OUT: dict[Part, str] = {"draft": "--draft-stages 0", "vision": "--no-vision"}


@dataclass(frozen=True)
class Selection:
    """What of a model is meant. layers: the first so many (None: all); draft, vision: with those parts or without."""

    layers: int | None = None
    draft: bool = True
    vision: bool = True

    def config(self, config: ModelConfig) -> ModelConfig:
        """``config`` of the selected part alone. Raises `UserError` where that is no model."""
        changes: dict = {}
        stages = config.num_nextn_predict_layers if self.draft else 0
        count = config.num_hidden_layers if self.layers is None else self.layers
        if not 1 <= count <= config.num_hidden_layers:
            raise UserError(f"layers: found the first {count}, allowed is 0-0 to 0-{config.num_hidden_layers - 1}")
        if stages and max(config.dspark_target_layer_ids) >= count:
            targets = list(config.dspark_target_layer_ids)
            raise UserError(f"draft_stages: found {stages} with layers 0-{count - 1}, allowed is 0: they read layers {targets}")
        if count < config.num_hidden_layers:
            inside = lambda ids: tuple(n for n in ids if n < count)  # noqa: E731
            tables = inside(config.engram_layer_ids)
            changes = {
                "num_hidden_layers": count,
                "kv_source_layer_ids": inside(config.kv_source_layer_ids),
                "index_source_layer_ids": inside(config.index_source_layer_ids),
                "candidate_source_layer_id": -1
                if config.candidate_source_layer_id >= count
                else config.candidate_source_layer_id,
                "engram_layer_ids": tables,
                "engram_num_embeddings": config.engram_num_embeddings[: len(tables)],
                "num_hash_layers": min(config.num_hash_layers, count),
            }
        changes["compress_ratios"] = (*config.compress_ratios[:count], *(0,) * stages)
        changes["num_nextn_predict_layers"] = stages
        if not self.vision:
            changes["vision_config"] = None
        return replace(config, **changes)


@dataclass(frozen=True, eq=False)
class ReleasedFolder:
    """An opened folder. config: of the selected part; slots: its weights by name; left_out: tensors not selected.

    `bytes_read` counts the bytes of tensors that loading has taken from the files.
    """

    path: Path
    config: ModelConfig
    slots: dict[str, Slot] = field(repr=False)
    files: dict[str, SafetensorsFile] = field(repr=False)
    left_out: tuple[str, ...] = field(repr=False)
    _count: list[int] = field(default_factory=lambda: [0], repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def bytes_read(self) -> int:
        return self._count[0]

    @property
    def tile(self) -> tuple[int, int]:
        return tile(self.config)

    def entry(self, name: str) -> Entry:
        """Dtype, shape and place of a tensor."""
        return self.files[name].entries[name]

    def quantized(self, slot: Slot) -> bool:
        """Whether a weight stands here with its scales, in the release's form."""
        return slot.scale is not None and slot.scale.name in self.files

    def names(self, slot: Slot) -> tuple[str, ...]:
        """The tensors that hold a weight here: itself and, where it is quantised, its scales."""
        return (slot.weight.name, slot.scale.name) if slot.scale is not None and self.quantized(slot) else (slot.weight.name,)

    def view(self, name: str) -> np.ndarray:
        """A tensor as a read-only view of its file; bytes taken from it go to `took`."""
        return self.files[name].array(name)

    def took(self, count: int) -> None:
        """Counts ``count`` bytes as read."""
        with self._lock:
            self._count[0] += count

    def tensors(self) -> Iterator[tuple[str, Entry]]:
        """Every selected tensor."""
        for slot in self.slots.values():
            for name in self.names(slot):
                yield name, self.entry(name)


def open_folder(
    path: str | Path, selection: Selection = Selection(), parts: tuple[Part, ...] = PARTS, config: ModelConfig | None = None
) -> ReleasedFolder:
    """Opens the weights in ``path`` and checks every name, dtype and shape against its config.json (or ``config``).

    Tensors that the config declares but ``selection`` or ``parts`` does not take may be absent. Raises one `UserError`
    with all problems: unreadable files, an index that disagrees with them, tensors that are missing, unknown, held
    twice, or of another dtype or shape.
    """
    path = Path(path)
    whole = config or load_config(path)
    selected = selection.config(whole)
    files, problems = _files(path)
    where: dict[str, SafetensorsFile] = {}
    for file in files:
        for name in file.keys():  # noqa: SIM118
            if name in where:
                problems.append(f"{name!r:.200} is both in {where[name].path.name} and in {file.path.name}")
            where[name] = file
    slots = {name: slot for name, slot in key_table(selected).items() if slot.part in parts}
    folder = ReleasedFolder(path, selected, slots, where, ())
    if files:
        problems += _check(folder, key_table(whole))
    refuse(path, problems)
    taken = {name for name, _ in folder.tensors()}
    return ReleasedFolder(path, selected, slots, where, tuple(sorted(set(where) - taken)))


def refuse(path: Path, problems: list[str]) -> None:
    """Raises one `UserError` with all problems, where there are any."""
    if problems:
        count = f"{len(problems)} problems: " if len(problems) > 1 else ""
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise UserError(f"{path}: {count}{'; '.join(problems[:_SHOWN])}{more}")


def _files(path: Path) -> tuple[list[SafetensorsFile], list[str]]:
    """The opened weight files, and what is wrong with them and with the index."""
    problems: list[str] = []
    listed: dict[str, str] | None = None
    index = path / INDEX
    if index.exists():
        try:
            listed = _read_index(index)
        except UserError as error:
            return [], [str(error).removeprefix(f"{path}/")]
        names = sorted(set(listed.values()))
        strays = sorted(p.name for p in path.glob("model-*.safetensors") if _SHARD.fullmatch(p.name) and p.name not in names)
        problems += [f"{name} is not in {INDEX}" for name in strays]
    else:
        names = next((found for p in _PATTERNS if (found := sorted(f.name for f in path.glob(p)))), [])
        if not names:
            return [], [f"found no weights, allowed are {INDEX} with its files, model*.safetensors or weights*.safetensors"]
    files = []
    for name in names:
        try:
            files.append(open_safetensors(path / name))
        except UserError as error:
            problems.append(str(error).removeprefix(f"{path}/"))
    if listed is not None and len(files) == len(names):
        found = {name: file.path.name for file in files for name in file.keys()}  # noqa: SIM118
        for name, file in listed.items():
            if found.get(name) != file:
                there = f"it is in {found[name]}" if name in found else f"it is not there{_nearest_name(name, found)}"
                problems.append(f"{INDEX} says {name!r:.200} is in {file}, but {there}")
        problems += [f"{name!r:.200} of {file} is not in {INDEX}" for name, file in found.items() if name not in listed]
    return files, problems


def _read_index(file: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    weights = json_object(file, "index", read_small(file, MAX_HEADER_BYTES)).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise UserError(f"{file}: weight_map: found none, allowed is an object of tensor names and their files")
    for name, value in weights.items():
        # A plain name: an index must not lead out of its folder.
        if not isinstance(value, str) or not re.fullmatch(r"[\w-][\w.-]{0,200}\.safetensors", value, re.ASCII):
            raise UserError(f"{file}: weight_map: found {value!r:.80} for {name!r:.80}, allowed is a safetensors file beside it")
    return weights


def _check(folder: ReleasedFolder, known: dict[str, Slot]) -> list[str]:
    """Missing, wrong and unknown tensors."""
    problems: list[str] = []
    allowed = set(known)
    allowed.update(slot.scale.name for slot in known.values() if slot.scale is not None)
    unknown = [name for name in folder.files if name not in allowed]
    absent = []
    for slot in folder.slots.values():
        if slot.weight.name not in folder.files:
            absent.append(slot)
        else:
            problems += _check_slot(folder, slot)
    problems += missing_parts(folder.slots, absent, unknown)
    hints = [_nearest_name(name, known) for name in unknown[:_SHOWN]]
    hints += [""] * (len(unknown) - len(hints))
    return problems + [f"{name!r:.200} is unknown{hint}" for name, hint in zip(unknown, hints, strict=True)]


def missing_parts(slots: dict[str, Slot], absent: list[Slot], unknown: list[str] | tuple[()] = ()) -> list[str]:
    """What to say of the ``absent`` ones of ``slots``: a part without any tensor in one line, others by name."""
    total, gone = Counter(slot.part for slot in slots.values()), Counter(slot.part for slot in absent)
    whole = [part for part in _LEAVE_OUT if 0 < gone[part] == total[part]]
    lines = [
        f"{part}: found none of the {total[part]} weights that config.json declares; {_LEAVE_OUT[part]} leaves it out"
        for part in whole
    ]
    names = [slot.weight.name for slot in absent if slot.part not in whole]
    lines += [f"{name!r} is missing{_nearest_name(name, unknown)}" for name in names[:_SHOWN]]
    return lines + [f"{name!r} is missing" for name in names[_SHOWN:]]


def _check_slot(folder: ReleasedFolder, slot: Slot) -> Iterator[str]:
    """Dtypes and shapes of a weight and its scales."""
    name, entry, stored = slot.weight.name, folder.entry(slot.weight.name), slot.spec.stored
    plain = _PLAIN.get(stored, ("BF16", "F32"))
    shape = slot.shape
    if slot.scale is not None:
        codes, scale = _CODES[stored], slot.scale.name
        if entry.dtype in codes:
            if entry.dtype != "F4":
                shape = slot.weight.shape
            if scale not in folder.files:
                yield f"{scale!r} is missing, the scales of {name!r}"
            else:
                found = folder.entry(scale)
                if found.dtype not in _SCALES:
                    yield f"{scale!r}: found dtype {found.dtype}, allowed is {' or '.join(_SCALES)}"
                if found.shape != slot.scale.shape:
                    yield f"{scale!r}: found shape {list(found.shape)}, allowed is {list(slot.scale.shape)}"
        elif scale in folder.files:
            yield f"{name!r}: found dtype {entry.dtype} beside scales, allowed is {' or '.join(codes)}"
            return
        plain = (*codes, *plain)
    if entry.dtype not in plain:
        yield f"{name!r}: found dtype {entry.dtype}, allowed is {' or '.join(plain)}{nearest(entry.dtype, plain)}"
    elif entry.shape != shape:
        yield f"{name!r}: found shape {list(entry.shape)}, allowed is {list(shape)}"


_NUMBER = re.compile(r"\d+")


def _nearest_name(name: str, others) -> str:
    """The suggestion for a name; numbers are compared apart, so that 96,000 names are about a hundred kinds."""
    kinds: dict[str, str] = {}
    for other in others:
        kinds.setdefault(_NUMBER.sub("#", other), other)
    close = get_close_matches(_NUMBER.sub("#", name[:200]), kinds, n=1, cutoff=0.75)
    if not close:
        return ""
    numbers = _NUMBER.findall(name)
    if numbers and len(numbers) == close[0].count("#"):
        spelled = close[0]
        for number in numbers:
            spelled = spelled.replace("#", number, 1)
        if spelled in others:
            return f"; did you mean {spelled!r}?"
    return f"; did you mean {kinds[close[0]]!r}?"
