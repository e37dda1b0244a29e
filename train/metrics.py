"""Where a run's numbers go: JSON lines always, TensorBoard and Weights & Biases where asked; and speed and memory."""

import importlib
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from dsv41.config import ModelConfig
from dsv41.errors import UserError, cause
from dsv41.files import to_json
from dsv41.params import spec_leaves, text_specs
from dsv41.plan import layer_plans

# Dense bf16 operations a second of one chip, by what its name contains.
_PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
# Of a record, what differs between two runs of the same numbers.
MEASURED = ("seconds", "tokens_per_second", "mfu", "memory_bytes")


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Operations that a training step needs for each token of rows of ``length``, nothing computed twice.

    Six for each weight that a token meets; attention over its window and selected entries, indexer scores over half the
    row, each in head width; the backward pass of a product is twice the forward one.
    """
    total = 0.0
    for spec in spec_leaves(text_specs(config)):
        matrix = spec.family in ("muon", "sinkhorn") and spec.axes[0] not in ("table_rows",) and spec.key != "embed.weight"
        if matrix:
            share = config.num_experts_per_tok / config.n_routed_experts if spec.stacked else 1.0
            total += 6 * spec.size * share
    for plan in layer_plans(config):
        keys = min(config.sliding_window, length)
        if plan.ratio:
            keys += min(config.index_topk, length // plan.ratio)
        total += 12 * config.q_width * keys
        if plan.selects:
            total += 6 * config.index_n_heads * config.index_head_dim * length / plan.ratio / 2
    return total


def peak_flops() -> float | None:
    """Of this device, None where it is not known."""
    kind = jax.local_devices()[0].device_kind
    return next((peak for name, peak in _PEAK_FLOPS.items() if name in kind), None)


def memory_bytes() -> int:
    """The most memory taken so far: of the device, or where it does not say, of this process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def speed(config: ModelConfig, tokens: int, length: int, seconds: float) -> dict[str, float]:
    """What a step of ``tokens`` tokens that took ``seconds`` says of the machine; no ``mfu`` where its peak is not known."""
    rate = tokens / max(seconds, 1e-9)
    found = {"seconds": round(seconds, 4), "tokens_per_second": round(rate, 1), "memory_bytes": memory_bytes()}
    peak = peak_flops()
    if peak:
        found["mfu"] = round(rate * flops_per_token(config, length) / peak, 4)
    return found


def _load(module: str, option: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(
            f"{option}: found no package {module}, allowed where it is installed; pip install 'dsv41[logs]' brings it"
        ) from None


class Log:
    """The open log of a run in ``folder``; `metrics.jsonl` is written a line a record, and flushed.

    tensorboard: also events in ``folder/tensorboard``. wandb: also a run of that project, the same one after a resume.
    """

    def __init__(self, folder: Path, tensorboard: bool, wandb: str | None, config: dict[str, Any]):
        self._board = _load("tensorboardX", "tensorboard").SummaryWriter(str(folder / "tensorboard")) if tensorboard else None
        self._wandb = None
        if wandb is not None:
            kept = folder / "wandb_id"
            name = kept.read_text(encoding="utf-8").strip() if kept.exists() else None
            self._wandb = _load("wandb", "wandb").init(
                project=wandb, dir=str(folder), id=name, resume="allow" if name else None, config=config
            )
            kept.write_text(f"{self._wandb.id}\n", encoding="utf-8")
        self._file = open(folder / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # of what `write` could not write
            self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def write(self, record: dict[str, Any]) -> None:
        """One record, which has a ``step``; JSON lines have null in place of a number that is not finite."""
        try:
            self._file.write(to_json(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"out: cannot write {self._file.name!r} ({cause(error)})") from error
        values = {name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"}
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(values, step=record["step"])


def check_logs(tensorboard: bool, wandb: str | None) -> None:
    """Raises `UserError` where a log is asked for whose package is not there."""
    if tensorboard:
        _load("tensorboardX", "tensorboard")
    if wandb is not None:
        _load("wandb", "wandb")


def profile_steps(text: str | None) -> range:
    """The steps of ``"20:23"``, 20 to 22; none where nothing is given. Raises `UserError` for another form."""
    if text is None:
        return range(0)
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise UserError(
            f"profile: found {text!r}, allowed is FIRST:LAST, two whole numbers of which the second is larger, as 20:23"
        )
    return range(int(first), int(last))
