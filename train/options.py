"""What a run is asked to be, and whatever can be wrong with that before anything is read, compiled or written."""

import math
import os
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from dsv41.config import ModelConfig, load_config, preset
from dsv41.errors import UserError
from dsv41.files import make_writable
from dsv41.params import spec_leaves, text_specs
from dsv41.plan import layer_plans
from dsv41.sharding import check_mesh, make_mesh, parse_mesh, shard_bytes, torn
from train.corpus import STDLIB, check_paths
from train.data import check_stream
from train.layout import check_rows, check_tokens, state_leaves
from train.losses import MOST_LOGITS
from train.packing import check_length
from train.recipes import check_recipe, stages
from train.step import init_state

MOST = 2**31 - 1  # steps, rows and tokens are counted in int32
# What a run writes into its folder.
CHECKPOINTS, BEST, METRICS = "checkpoints", "best", "metrics.jsonl"
_FILES = ("run.json", "config.json", "tokenizer.json", METRICS, "loss.png", "wandb_id")
_FOLDERS = (BEST, "profile", "tensorboard")


@dataclass(frozen=True)
class TrainOptions:
    """What a run is.

    steps: 0 for as many as ``max_seconds`` allow. config: a config.json in place of ``preset``. recipe: what is on in which
    part of the run (`train.recipes`); its suggestions are the command line's to take. batch_size, length: of its first phase.
    dtype: of the passes, masters are float32. qat_weights: stored forms that its quantised phases train the weights in.
    engram_rows: rows of each table that keep momentum, 0 for all. synthetic: share of each batch's rows made into tasks.
    eval_every: steps between scores of the held-out text, 0 for none. profile: steps FIRST:LAST to trace. mesh: sizes of the
    mesh axes, as data=2,expert=4 (`dsv41.sharding`); it decides where numbers are computed, and a resume may have another.
    """

    out: Path = Path("runs/train")
    preset: str = "toy"
    config: Path | None = None
    data: tuple[str, ...] = (STDLIB,)
    steps: int = 1000
    batch_size: int = 4
    length: int = 256
    lr: float = 1.5e-2
    seed: int = 0
    checkpoint_every: int = 500
    keep: int = 2
    max_seconds: float | None = None
    evaluate: bool = True
    accumulate: int = 1
    recipe: str = "toy"
    dtype: str = "float32"
    remat: str = "none"
    index_teacher: str = "own"
    qat_weights: tuple[str, ...] = ()
    z_loss: float = 0.0
    engram_rows: int = 0
    synthetic: float = 0.0
    eval_every: int = 0
    profile: str | None = None
    tensorboard: bool = False
    wandb: str | None = None
    mesh: str | None = None


def check_alone(options: TrainOptions) -> ModelConfig:
    """The config, its vocabulary not yet fitted; raises `UserError` for options that no run can have. Asks for no device."""
    if options.steps < 1 and options.max_seconds is None:
        raise UserError(f"steps: found {options.steps} without max_seconds, allowed is 1 or more; nearest is 1")
    for name, low in (("steps", 0), ("batch_size", 1), ("checkpoint_every", 1), ("keep", 1)):
        value = getattr(options, name)
        if not low <= value <= MOST:
            raise UserError(f"{name}: found {value}, allowed is {low} to {MOST}; nearest is {min(max(value, low), MOST)}")
    if not (math.isfinite(options.lr) and options.lr > 0):
        raise UserError(f"lr: found {options.lr}, allowed is a finite number above 0")
    if options.max_seconds is not None and not 0 < options.max_seconds < math.inf:
        raise UserError(f"max_seconds: found {options.max_seconds}, allowed is a finite number above 0")
    check_stream(options.batch_size, options.seed)
    rows, parts = options.batch_size, options.accumulate
    if parts < 1 or rows % parts:
        divisors = {d for n in range(1, math.isqrt(rows) + 1) if rows % n == 0 for d in (n, rows // n)}
        close = min(sorted(divisors), key=lambda n: abs(n - parts))
        raise UserError(f"accumulate: found {parts}, allowed is a divisor of the {rows} rows of a batch; nearest is {close}")
    config = preset(options.preset) if options.config is None else load_config(options.config)
    check_length(options.length, config.document_alignment)
    config = check_recipe(options, config)
    if options.mesh is not None:
        check_mesh(config, parse_mesh(options.mesh))
    return config


def check_options(options: TrainOptions) -> ModelConfig:
    """As `check_alone`; raises `UserError` for options that no run can have on this machine too."""
    config = check_alone(options)
    check_paths(options.data)
    _check_mesh(options, config)
    _check_room(options, config)
    make_writable(options.out)
    _check_kinds(options.out)
    return config


def _check_kinds(out: Path) -> None:
    """Raises `UserError` where something else has the name of a file or folder that a run writes."""
    for name in (*_FILES, *_FOLDERS):
        path = out / name
        allowed = "a file" if name in _FILES else "a folder"
        if path.exists() and not (path.is_file() if name in _FILES else path.is_dir()):
            raise UserError(f"out: found something else at {str(path)!r}, allowed is {allowed} or nothing there")


def _check_mesh(options: TrainOptions, config: ModelConfig) -> None:
    """Raises `UserError` for a mesh that this machine, the model or a phase's batch does not allow."""
    count = jax.process_count()
    if count > 1 and options.max_seconds is not None:
        raise UserError(
            f"max_seconds: found {options.max_seconds}, allowed in one of {count} processes is none; nearest is steps"
        )
    if options.mesh is None:
        if count > 1:
            raise UserError(f"mesh: found none in one of {count} processes, allowed is one of their {jax.device_count()} devices")
        return
    sizes = parse_mesh(options.mesh)
    make_mesh(sizes)
    if options.engram_rows:
        raise UserError(f"engram_rows: found {options.engram_rows}, allowed on a mesh is 0; nearest is 0")
    for stage in stages(options, config, options.steps):
        check_rows(sizes, stage.rows, stage.step.accumulate)
        check_tokens(sizes, stage.length, config.document_alignment, stage.step.replay)
    unit = next(
        (spec for spec in spec_leaves(text_specs(config)) if spec.stored in options.qat_weights and torn(spec, sizes)), None
    )
    if unit:
        raise UserError(
            f"mesh: found 'model={sizes['model']}', which cuts {unit.key} through its {unit.stored} tiles, allowed is 'model=1'"
        )


def tree_bytes(tree: Any) -> int:
    """Of all arrays, or their shapes, in ``tree``."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def memory() -> int:
    """Bytes that one device has for arrays, or where it does not say, this machine."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _step_bytes(config: ModelConfig, rows: int, length: int, parts: int) -> int:
    """Of a batch (three int32 and a float32 a token), and of one part's float32 logits and one indexer's products: a floor."""
    part = -(-rows // parts) * length
    entries = max((length // plan.ratio for plan in layer_plans(config) if plan.selects), default=0)
    return 16 * rows * length + 4 * (min(part * config.vocab_size, MOST_LOGITS) + part * config.index_n_heads * entries)


def _check_room(options: TrainOptions, config: ModelConfig) -> None:
    """Raises `UserError`, with the numbers, where the model alone or with the batch cannot fit into memory."""
    state = jax.eval_shape(lambda: init_state(config, 0))
    model, room = tree_bytes(state) + tree_bytes(state.params), memory()
    if options.mesh is not None:
        sizes = parse_mesh(options.mesh)
        devices = math.prod(sizes.values())
        leaves = state_leaves(init_state, config)
        model = devices * (shard_bytes(leaves, sizes) + shard_bytes(leaves.params, sizes))
        room *= devices if jax.local_devices()[0].memory_stats() else 1
    if model > room:
        raise UserError(
            f"{'preset' if options.config is None else 'config'}: found a model that does not fit: its weights, gradients and"
            f" optimizer state take {model / 1e9:,.1f} GB, {_allowed(room)}; nearest is preset=toy"
        )
    check_batch(config, model, room, options.batch_size, options.length, options.accumulate)


def check_batch(config: ModelConfig, model: int, room: int, rows: int, length: int, parts: int = 1, name: str = "length") -> None:
    """Raises `UserError`, with the numbers, where a batch cannot fit into ``room`` bytes beside the ``model``'s.

    parts: of the batch, one at a time. name: the option that ``length`` is of.
    """
    needed, align = _step_bytes(config, rows, length, parts), config.document_alignment
    if model + needed <= room:
        return
    found, option = rows, "batch_size"
    close = bisect_right(range(1, rows), room - model, key=lambda n: _step_bytes(config, n, length, parts))
    if not close:
        found, option, lengths = length, name, range(align, length, align)
        close = align * max(1, bisect_right(lengths, room - model, key=lambda n: _step_bytes(config, 1, n, 1)))
    raise UserError(
        f"{option}: found {found}, which does not fit: a step's batch, logits and index scores take"
        f" {needed / 1e9:,.1f} GB or more beside the model's {model / 1e9:,.1f} GB, {_allowed(room)}; nearest that may fit is"
        f" {close}"
    )


def _allowed(room: int) -> str:
    return f"allowed is what the {room / 1e9:,.1f} GB here hold"
