"""A training run in a folder: data, steps, metrics, checkpoints, resume, scores and the loss curve."""

import json
import signal
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
from tokenizers import Tokenizer

from dsv41.config import ModelConfig, replace, save_config
from dsv41.errors import UserError
from dsv41.files import write_text
from dsv41.numerics import Policy
from dsv41.tokenmap import token_map
from train.checkpoint import Checkpoints
from train.curve import Score, plot_losses
from train.data import Batch, Prepared, TrainData, prepare, to_batch
from train.optim.schedule import warmup_hold_cosine
from train.options import TrainOptions, check_options
from train.packing import Packed
from train.progress import Report
from train.run import Run, check_options_same, check_same, identity, read_run, write_run
from train.step import EvalStep, TrainState, init_state, make_eval_step, make_train_step
from train.tokenizer import cache_root

# Steps timed before the length of a run that is given by seconds is fixed.
_TIMED_STEPS = 4
# Fewer than these teach the model little.
_FEW_STEPS = 50
# Part of the seconds kept for checkpoints and the plot.
_RESERVE = 0.95
# Held-out rows scored before the first step; the score after the last one takes all.
_FIRST_SCORE_ROWS = 64
CHECKPOINTS = "checkpoints"
# What is read of a record of metrics.jsonl.
_RECORD = {"step": int, "ce": float, "loss": float}


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    records: of every step, as in metrics.jsonl: ``loss`` is the whole training loss, ``ce`` the cross-entropy in it, nats
    per token. scores: of the held-out text at step 0 (its first rows alone) and at the end, where asked for.
    """

    state: TrainState
    config: ModelConfig
    prepared: Prepared
    steps: int
    resumed_from: int
    records: list[dict[str, Any]]
    tokens_per_second: float
    compile_seconds: float
    scores: list[Score]


def fit_vocabulary(config: ModelConfig, tokenizer: Tokenizer) -> tuple[ModelConfig, np.ndarray]:
    """``config`` with the tokenizer's vocabulary, and the tokenizer's folding map int32[V]."""
    fold, classes = token_map(tokenizer)
    vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    try:
        return replace(config, vocab_size=vocab, engram_compressed_vocab_size=classes), fold
    except UserError as error:
        raise UserError(f"config: does not fit the {vocab:,} tokens that the text gives: {error}; nearest is more text") from None


def _read_metrics(file: Path, last: int) -> list[dict[str, Any]]:
    """The records of steps up to ``last``; a line cut short by a crash, or of another form, ends them."""
    records = []
    if file.exists():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                break
            if not isinstance(record, dict) or not all(type(record.get(k)) is t for k, t in _RECORD.items()):
                break
            if record["step"] <= last:
                records.append(record)
    return records


def score(step: EvalStep, state: TrainState, packed: Packed, batch_size: int, token_bytes: np.ndarray, report: Report) -> Score:
    """Nats of the rows' every target, ends of documents among them, and the bytes of their text."""
    nats = tokens = 0.0
    for start in range(0, len(packed.ids), batch_size):
        rows = Packed(packed.ids[start : start + batch_size], packed.segments[start : start + batch_size])
        short = batch_size - len(rows.ids)
        # The last batch is filled with empty rows, so that one compiled shape serves all.
        batch = to_batch(Packed(*(np.pad(a, ((0, short), (0, 0))) for a in rows)))
        found = step(state.params, batch)
        nats, tokens = nats + float(found[0]), tokens + float(found[1])
        report.part(start + batch_size - short, len(packed.ids))
    return Score(int(state.step), nats, int(tokens), int(token_bytes[packed.ids].sum()))


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Gets the first Ctrl-C or SIGTERM, so that the run ends with a checkpoint; a second one of its kind ends it at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def handle(number: int, frame: Any) -> None:
        signal.signal(number, old[number])
        received.append(number)

    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _device_batch(batch: Batch) -> Batch:
    return jax.tree.map(jnp.asarray, batch)


def finished(options: TrainOptions) -> tuple[int, Score | None] | None:
    """The last step and its score of a run in ``options.out`` that has no step left, and the score where asked for; else None.

    Raises `UserError` for options that cannot be used, or are not those of that run, and, as a resume would, for a newest
    checkpoint that is damaged; the data are not read.
    """
    config = check_options(options)
    checkpoints = Checkpoints(options.out / CHECKPOINTS, options.keep)
    step = checkpoints.latest()
    if step is None:
        return None
    run = read_run(options.out)
    check_options_same(run, options, config)
    total = options.steps or run.total
    score = next((found for found in run.scores if found.step == step), None)
    left = not total or step < total or (options.evaluate and score is None)
    if left:
        return None
    checkpoints.check(step)
    return step, score


def train(options: TrainOptions) -> TrainResult:
    """Trains, or goes on with, the run in ``options.out``; a checkpoint of the last step is always there at the end.

    A run that was stopped and resumed ends with the same numbers as one that was not. Raises `UserError` for options
    that cannot be used, and for a folder with a run of other options.
    """
    with Report() as report:
        return _train(options, report)


def _train(options: TrainOptions, report: Report) -> TrainResult:
    began = time.monotonic()
    config = check_options(options)
    out = options.out
    checkpoints = Checkpoints(out / CHECKPOINTS, options.keep)
    latest = checkpoints.latest()
    if latest is not None:
        check_options_same(read_run(out), options, config)
    report.phase("reading the text and packing its tokens", quiet=True)
    prepared = prepare(options.data, config.vocab_size, options.length, config.document_alignment, cache_root())
    data = TrainData(prepared.train, options.batch_size, options.seed)
    config, fold = fit_vocabulary(config, prepared.tokenizer)
    facts = identity(options, config, prepared)

    report.phase("drawing the initial weights", quiet=True)
    state = init_state(config, options.seed)
    resumed, total = 0, options.steps
    scores: list[Score] = []
    if latest is not None:
        run = read_run(out)
        check_same(run, facts, out)
        abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
        report.phase(f"reading the checkpoint of step {latest}", quiet=True)
        state, _ = checkpoints.restore(latest, abstract)
        resumed, total = int(state.step), total or run.total
        scores = [found for found in run.scores if found.step <= resumed]
    else:
        out.mkdir(parents=True, exist_ok=True)
        save_config(config, out / "config.json")
        write_text(out / "tokenizer.json", prepared.tokenizer.to_str())
        write_run(out, Run(facts, total))

    policy = Policy()
    eval_step, part = make_eval_step(config, policy, fold), options.batch_size // options.accumulate
    if options.evaluate and not resumed:
        report.phase("scoring held-out text before training")
        some = Packed(*(a[:_FIRST_SCORE_ROWS] for a in prepared.heldout))
        scores.append(score(eval_step, state, some, part, prepared.token_bytes, report))
        write_run(out, Run(facts, total, tuple(scores)))

    report.phase("compiling the training step")
    compiling = time.monotonic()
    example = _device_batch(data.batch(0))
    train_step = make_train_step(config, policy, fold, options.accumulate).lower(state, example, jnp.float32(0)).compile()  # pyright: ignore
    compile_seconds = time.monotonic() - compiling

    records = _read_metrics(out / "metrics.jsonl", resumed) if resumed else []
    write_text(out / "metrics.jsonl", "".join(json.dumps(r) + "\n" for r in records))
    schedule = warmup_hold_cosine(total, options.lr) if total else None
    done = saved = resumed
    tokens, started = 0, time.monotonic()
    timed = 0.0

    def save() -> None:
        nonlocal saved
        if saved != done or (latest is None and done == 0):
            checkpoints.save(done, state, {**facts, "total": total})
            saved = done

    batches = data.iterator(done)
    with open(out / "metrics.jsonl", "a", encoding="utf-8") as log, _interruptible() as received:
        report.phase("training")
        while (not total or done < total) and not received:
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
                    write_run(out, Run(facts, total, tuple(scores)))
                    if total < _FEW_STEPS:
                        report.say(f"only {total} steps fit in {options.max_seconds:g} s here: the model will learn little")
            report.step(done, total, values["loss"], tokens / max(time.monotonic() - started, 1e-9))
            if done % options.checkpoint_every == 0:
                save()
        speed = tokens / max(time.monotonic() - started, 1e-9)
        report.phase(f"writing the checkpoint of step {done}")
        save()
    if options.evaluate and not received:
        report.phase("scoring held-out text")
        scores = [found for found in scores if found.step < done]
        scores.append(score(eval_step, state, prepared.heldout, part, prepared.token_bytes, report))
    write_run(out, Run(facts, total, tuple(scores)))
    if records:
        plot_losses(records, scores, out / "loss.png", _name(options))
    if received:
        if received[0] == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt
    return TrainResult(
        state=state,
        config=config,
        prepared=prepared,
        steps=done,
        resumed_from=resumed,
        records=records,
        tokens_per_second=speed,
        compile_seconds=compile_seconds,
        scores=scores,
    )


def _name(options: TrainOptions) -> str:
    return options.preset if options.config is None else options.config.stem
