"""What a run is asked to be, and whatever can be wrong with that before anything is read, compiled or written."""

import math
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from dsv41.config import ModelConfig, load_config, preset
from dsv41.errors import UserError, cause
from train.corpus import STDLIB, check_paths
from train.data import check_stream
from train.packing import check_length
from train.recipes import check_recipe
from train.step import init_state

MOST_STEPS = 2**31 - 1  # steps are counted in int32


@dataclass(frozen=True)
class TrainOptions:
    """What a run is.

    steps: 0 for as many as ``max_seconds`` allow. config: a config.json in place of ``preset``. recipe: what is on in which
    part of the run (`train.recipes`); its suggestions are the command line's to take. batch_size, length: of its first phase.
    dtype: of the passes, masters are float32. qat_weights: stored forms that its quantised phases train the weights in.
    engram_rows: rows of each table that keep momentum, 0 for all. synthetic: share of each batch's rows made into tasks.
    eval_every: steps between scores of the held-out text, 0 for none. profile: steps FIRST:LAST to trace.
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


def check_options(options: TrainOptions) -> ModelConfig:
    """The config, its vocabulary not yet fitted; raises `UserError` for options that no run can have on this machine."""
    for name, low in (("steps", 0), ("batch_size", 1), ("checkpoint_every", 1), ("keep", 1)):
        value = getattr(options, name)
        if value < low:
            raise UserError(f"{name}: found {value}, allowed is {low} or more; nearest is {low}")
    if not (math.isfinite(options.lr) and options.lr > 0):
        raise UserError(f"lr: found {options.lr}, allowed is a finite number above 0")
    if options.max_seconds is not None and not 0 < options.max_seconds < math.inf:
        raise UserError(f"max_seconds: found {options.max_seconds}, allowed is a finite number above 0")
    if options.steps > MOST_STEPS:
        raise UserError(f"steps: found {options.steps}, allowed are at most {MOST_STEPS}")
    if options.steps == 0 and options.max_seconds is None:
        raise UserError("steps: found 0 without max_seconds, allowed is 1 or more; nearest is 1")
    check_stream(options.batch_size, options.seed)
    rows, parts = options.batch_size, options.accumulate
    if parts < 1 or rows % parts:
        close = min((n for n in range(1, rows + 1) if rows % n == 0), key=lambda n: abs(n - parts))
        raise UserError(f"accumulate: found {parts}, allowed is a divisor of the {rows} rows of a batch; nearest is {close}")
    check_paths(options.data)
    config = preset(options.preset) if options.config is None else load_config(options.config)
    config = check_recipe(options, config)
    check_length(options.length, config.document_alignment)
    _check_room("preset" if options.config is None else "config", config)
    make_writable(options.out)
    return config


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def memory() -> int:
    """Bytes that one device has for arrays, or where it does not say, this machine."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_room(name: str, config: ModelConfig) -> None:
    state = jax.eval_shape(lambda: init_state(config, 0))
    needed, room = _bytes(state) + _bytes(state.params), memory()
    if needed > room:
        raise UserError(
            f"{name}: found a model that does not fit: its weights, gradients and optimizer state take {needed / 1e9:,.1f} GB,"
            f" allowed is what the {room / 1e9:,.1f} GB here hold; nearest is preset=toy"
        )


def make_writable(folder: Path) -> None:
    """Proves that ``folder`` can be made and written, and leaves nothing behind; raises `UserError` when not."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-"):
            pass
    except OSError as error:
        raise UserError(f"out: cannot write {str(folder)!r} ({cause(error)}), allowed is a folder that can be written") from error
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()
