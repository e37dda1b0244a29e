"""A training run in a folder: data, steps, metrics, checkpoints, resume, scores and the loss curve."""

import hashlib
import json
import math
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from dsv41.config import ModelConfig, load_config, preset, replace, save_config, to_released
from dsv41.errors import UserError
from dsv41.numerics import Policy
from dsv41.tokenmap import token_map
from train.checkpoint import Checkpoints
from train.corpus import STDLIB
from train.data import Batch, Prepared, TrainData, prepare, to_batch
from train.optim.schedule import warmup_hold_cosine
from train.packing import Packed
from train.step import EvalStep, TrainState, init_state, make_eval_step, make_train_step
from train.tokenizer import cache_root

# Steps timed before the length of a run that is given by seconds is fixed.
_TIMED_STEPS = 4
# Part of the seconds kept for checkpoints and the plot.
_RESERVE = 0.95
_PLAIN_SECONDS = 10.0
# Held-out rows scored before the first step; the score after the last one takes all.
_FIRST_SCORE_ROWS = 64
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class TrainOptions:
    """What a run is. steps: 0 for as many as ``max_seconds`` allow. config: a config.json in place of ``preset``."""

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


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. Bits per byte are None where not scored; ``first_bits_per_byte`` is of the initial weights."""

    state: TrainState
    config: ModelConfig
    prepared: Prepared
    steps: int
    resumed_from: int
    loss: float
    tokens_per_second: float
    compile_seconds: float
    first_bits_per_byte: float | None
    bits_per_byte: float | None


def _check(options: TrainOptions) -> None:
    for name, low in (("steps", 0), ("batch_size", 1), ("checkpoint_every", 1), ("keep", 1)):
        value = getattr(options, name)
        if value < low:
            raise UserError(f"{name}: found {value}, allowed is {low} or more; nearest is {low}")
    if not (math.isfinite(options.lr) and options.lr > 0):
        raise UserError(f"lr: found {options.lr}, allowed is a finite number above 0")
    if options.max_seconds is not None and not options.max_seconds > 0:
        raise UserError(f"max_seconds: found {options.max_seconds}, allowed is a number above 0")
    if options.steps == 0 and options.max_seconds is None:
        raise UserError("steps: found 0 without max_seconds, allowed is 1 or more; nearest is 1")


def make_writable(folder: Path) -> None:
    """Makes ``folder`` and proves that it can be written; raises `UserError` when not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-"):
            pass
    except OSError as error:
        raise UserError(
            f"out: cannot write {str(folder)!r} ({error.strerror}), allowed is a folder that can be written"
        ) from error


def fit_vocabulary(config: ModelConfig, tokenizer: Tokenizer) -> tuple[ModelConfig, np.ndarray]:
    """``config`` with the tokenizer's vocabulary, and the tokenizer's folding map int32[V]."""
    fold, classes = token_map(tokenizer)
    vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    return replace(config, vocab_size=vocab, engram_compressed_vocab_size=classes), fold


def _identity(options: TrainOptions, config: ModelConfig, prepared: Prepared) -> dict[str, Any]:
    """Whatever decides a run's numbers, as JSON: a resume needs all of it unchanged."""
    digest = hashlib.sha256()
    for array in (*prepared.train, *prepared.heldout):
        digest.update(np.ascontiguousarray(array).tobytes())
    return {
        "config": to_released(config),
        "data": digest.hexdigest(),
        "batch_size": options.batch_size,
        "length": options.length,
        "lr": options.lr,
        "seed": options.seed,
    }


def _check_same(found: dict[str, Any], wanted: dict[str, Any], out: Path) -> None:
    for name, value in wanted.items():
        old = found.get(name)
        if old == value:
            continue
        say = f"found {value!r}, the run in {str(out)!r} has {old!r}"
        if name in ("config", "data"):
            say = f"found another {name} than that of the run in {str(out)!r}"
        raise UserError(f"{name}: {say}; resume with the same, or name another out")


def _write(file: Path, text: str) -> None:
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def _read_metrics(file: Path, last: int) -> list[dict[str, Any]]:
    """The records of steps up to ``last``; a line cut short by a crash ends them."""
    records = []
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break
            if record["step"] <= last:
                records.append(record)
    return records


def score(step: EvalStep, params: Any, packed: Packed, batch_size: int, token_bytes: np.ndarray) -> float:
    """Bits per byte of the rows: nats of every target, ends of documents among them, over the bytes of their text."""
    nats = 0.0
    for start in range(0, len(packed.ids), batch_size):
        rows = Packed(packed.ids[start : start + batch_size], packed.segments[start : start + batch_size])
        short = batch_size - len(rows.ids)
        # The last batch is filled with empty rows, so that one compiled shape serves all.
        batch = to_batch(Packed(*(np.pad(a, ((0, short), (0, 0))) for a in rows)))
        nats += float(step(params, batch)[0])
    return nats / math.log(2) / max(int(token_bytes[packed.ids].sum()), 1)


def plot_losses(records: list[dict[str, Any]], file: Path) -> None:
    """Draws loss over steps, with a running mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [r["step"] for r in records]
    losses = [r["ce"] for r in records]
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=110)
    axes.plot(steps, losses, color="0.75", linewidth=0.8, label="step")
    mean, smooth = None, []
    for loss in losses:
        mean = loss if mean is None or not math.isfinite(mean) else 0.95 * mean + 0.05 * loss
        smooth.append(mean)
    axes.plot(steps, smooth, color="C0", label="running mean")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets, so that the run ends with a checkpoint; a second one interrupts."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, old)
        stop.set()

    old = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, old)


class _Report:
    """The progress line on a terminal, or a plain line every few seconds elsewhere."""

    def __init__(self, total: int, done: int):
        self.console = Console(stderr=True)
        columns = (
            "step {task.completed}/{task.total}",
            "loss {task.fields[loss]:.3f}",
            "{task.fields[rate]:.0f} tok/s",
        )
        self._progress = Progress(*(TextColumn(c) for c in columns), BarColumn(), TimeRemainingColumn(), console=self.console)
        self._task = self._progress.add_task("train", total=total, completed=done, loss=math.nan, rate=0.0)
        self._said = -math.inf

    def __enter__(self) -> "_Report":
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._progress.stop()

    def step(self, done: int, total: int, loss: float, rate: float) -> None:
        self._progress.update(self._task, completed=done, total=total, loss=loss, rate=rate)
        now = time.monotonic()
        if not self.console.is_terminal and (now - self._said > _PLAIN_SECONDS or done == total):
            self._said = now
            self.console.print(f"step {done}/{total}  loss {loss:.4f}  {rate:.0f} tokens/s", highlight=False)


def _device_batch(batch: Batch) -> Batch:
    return jax.tree.map(jnp.asarray, batch)


def train(options: TrainOptions) -> TrainResult:
    """Trains, or goes on with, the run in ``options.out``; a checkpoint of the last step is always there at the end.

    A run that was stopped and resumed ends with the same numbers as one that was not. Raises `UserError` for options
    that cannot be used, and for a folder with a run of other options.
    """
    began = time.monotonic()
    _check(options)
    config = preset(options.preset) if options.config is None else load_config(options.config)
    make_writable(options.out)
    out = options.out
    checkpoints = Checkpoints(out / CHECKPOINTS, options.keep)
    latest = checkpoints.latest()
    vocab = config.vocab_size
    prepared = prepare(options.data, vocab, options.length, config.document_alignment, cache_root())
    data = TrainData(prepared.train, options.batch_size, options.seed)
    config, fold = fit_vocabulary(config, prepared.tokenizer)
    identity = _identity(options, config, prepared)

    state = init_state(config, options.seed)
    resumed, total = 0, options.steps
    if latest is not None:
        run_file = out / "run.json"
        try:
            run = json.loads(run_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(f"out: {str(out)!r} holds checkpoints but no {run_file.name}, allowed is a new folder") from None
        _check_same(run, identity, out)
        abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
        state, _ = checkpoints.restore(latest, abstract)
        resumed, total = int(state.step), total or int(run.get("total", 0))
    else:
        save_config(config, out / "config.json")
        _write(out / "tokenizer.json", prepared.tokenizer.to_str())
        _write(out / "run.json", json.dumps({**identity, "total": total}) + "\n")

    policy = Policy()
    eval_step = make_eval_step(config, policy, fold)
    first_score = last_score = None
    if options.evaluate and not resumed:
        some = Packed(*(a[:_FIRST_SCORE_ROWS] for a in prepared.heldout))
        first_score = score(eval_step, state.params, some, options.batch_size, prepared.token_bytes)

    compiling = time.monotonic()
    example = _device_batch(data.batch(0))
    train_step = make_train_step(config, policy, fold).lower(state, example, jnp.float32(0)).compile()  # pyright: ignore
    compile_seconds = time.monotonic() - compiling

    records = _read_metrics(out / "metrics.jsonl", resumed) if resumed else []
    _write(out / "metrics.jsonl", "".join(json.dumps(r) + "\n" for r in records))
    schedule = warmup_hold_cosine(total, options.lr) if total else None
    done = saved = resumed
    tokens, started = 0, time.monotonic()
    timed = 0.0
    loss = records[-1]["loss"] if records else math.nan

    def save() -> None:
        nonlocal saved
        if saved != done or (latest is None and done == 0):
            checkpoints.save(done, state, {**identity, "total": total})
            saved = done

    batches = data.iterator(done)
    with (
        open(out / "metrics.jsonl", "a", encoding="utf-8") as log,
        _Report(total, done) as report,
        _interruptible() as stop,
    ):
        while (not total or done < total) and not stop.is_set():
            now = time.monotonic()
            if options.max_seconds is not None and total and done and now - began > options.max_seconds:
                break
            # Until the length is known, the rate is that of the start of any longer run.
            rate = schedule(done) if schedule else warmup_hold_cosine(1000, options.lr)(done)
            batch = next(batches)
            state, metrics = train_step(state, _device_batch(batch), jnp.asarray(rate, jnp.float32))
            values = {name: float(value) for name, value in jax.device_get(metrics).items()}
            done += 1
            took = time.monotonic() - now
            tokens += batch.ids.size
            loss = values["loss"]
            record = {"step": done, **values, "seconds": round(took, 4)}
            records.append(record)
            log.write(json.dumps(record) + "\n")
            log.flush()
            if not total:
                timed += took
                left = (options.max_seconds or 0) * _RESERVE - (time.monotonic() - began)
                if done >= _TIMED_STEPS:
                    total = done + max(int(left / (timed / done)), 1)
                    schedule = warmup_hold_cosine(total, options.lr)
                    _write(out / "run.json", json.dumps({**identity, "total": total}) + "\n")
            report.step(done, total or done, loss, tokens / max(time.monotonic() - started, 1e-9))
            if done % options.checkpoint_every == 0:
                save()
        speed = tokens / max(time.monotonic() - started, 1e-9)
        save()
        interrupted = stop.is_set()
    if records:
        plot_losses(records, out / "loss.png")
    if interrupted:
        raise KeyboardInterrupt
    if options.evaluate:
        last_score = score(eval_step, state.params, prepared.heldout, options.batch_size, prepared.token_bytes)
    return TrainResult(
        state=state,
        config=config,
        prepared=prepared,
        steps=done,
        resumed_from=resumed,
        loss=loss,
        tokens_per_second=speed,
        compile_seconds=compile_seconds,
        first_bits_per_byte=first_score,
        bits_per_byte=last_score,
    )
