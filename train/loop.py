"""A training run in a folder: data, steps, metrics, checkpoints, resume, scores and the loss curve."""

import contextlib
import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer

from dsv41.config import ModelConfig, replace, save_config
from dsv41.errors import UserError
from dsv41.files import to_json, write_text
from dsv41.params import text_specs
from dsv41.tokenmap import token_map
from train.checkpoint import Checkpoints
from train.curve import Score, plot_losses
from train.data import Batch, Prepared, prepare
from train.devices import Devices
from train.metrics import Log, profile_steps, speed
from train.optim import optimizer_report, warmup_hold_cosine
from train.options import BEST, CHECKPOINTS, METRICS, TrainOptions, check_options
from train.processes import agreed, any_of, check_equal, leads, meet, together, written
from train.progress import Report
from train.recipes import stages
from train.run import Run, check_options_same, check_same, identity, model_option, read_run, sources, write_run
from train.stage import Examiner, StageData
from train.step import TrainState, make_train_step
from train.tokenizer import cache_root

# Steps timed before the length of a run that is given by seconds is fixed.
_TIMED_STEPS = 4
# Fewer than these teach the model little.
_FEW_STEPS = 50
# Part of the seconds kept for checkpoints and the plot.
_RESERVE = 0.95
# Held-out rows scored before the first step; the score after the last one takes all.
_FIRST_SCORE_ROWS = 64
# Steps skipped in a row after which a run has diverged, or half of a shorter run's.
_SKIPPED = 20
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
            if isinstance(record, dict):
                record = {name: math.nan if value is None else value for name, value in record.items()}
            if not isinstance(record, dict) or not all(type(record.get(k)) is t for k, t in _RECORD.items()):
                break
            if record["step"] <= last:
                records.append(record)
    return records


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
    that cannot be used, for a folder with a run of other options or one at work, and for a run that diverged.
    """
    began = time.monotonic()
    with together(), contextlib.ExitStack() as opened:
        with agreed("run"):
            config = check_options(options)
            out = opened.enter_context(written(options.out))
        return _train(options, config, out, opened.enter_context(Report()), began)


def _train(options: TrainOptions, config: ModelConfig, out: Path, report: Report, began: float) -> TrainResult:
    """out: where this process writes, beside checkpoints."""
    checkpoints, best = Checkpoints(options.out / CHECKPOINTS, options.keep), Checkpoints(options.out / BEST, 1)
    with agreed("text"):
        latest = checkpoints.latest()
        run = None if latest is None else read_run(options.out)
        if run is not None:
            check_options_same(run, options, config)
        total = options.steps or (run.total if run else 0)
        report.phase("reading the text and packing its tokens", quiet=True)
        prepared = prepare(options.data, config.vocab_size, options.length, config.document_alignment, cache_root())
        config, fold = fit_vocabulary(config, prepared.tokenizer)
        devices = Devices(options.mesh, config, options.engram_rows)
        plan = stages(options, config, total)
        facts = identity(options, config, prepared, [stage.first for stage in plan])
    check_equal([facts, total, latest, options.checkpoint_every, options.evaluate, options.eval_every, options.mesh])

    resumed = 0
    scores: list[Score] = []

    def keep_run() -> None:
        kept = total if run is None or total > resumed else run.total
        write_run(out, Run(facts, kept, tuple(scores), sources(options)))

    if run is not None and latest is not None:
        check_same(run, facts, options.out, model_option(options))
        report.phase(f"reading the checkpoint of step {latest}", quiet=True)
        state, _ = checkpoints.restore(latest, devices.target())
        state = devices.restored(state)
        resumed = int(state.step)
        if resumed != latest:
            raise UserError(f"checkpoint {str(options.out / CHECKPOINTS / str(latest))!r} is damaged: it holds step {resumed}")
        report.say(f"resumed from step {resumed}")
        if run.total and total > resumed and total != run.total:
            report.say(f"{total} steps in place of {run.total}: from here on the learning rate is that of a run of {total} steps")
        scores = [found for found in run.scores if found.step <= resumed]
    else:
        report.phase("drawing the initial weights", quiet=True)
        state = devices.init(options.seed)
        save_config(config, out / "config.json")
        write_text(out / "tokenizer.json", prepared.tokenizer.to_str())
    keep_run()
    report.phase(f"optimizer state: {_say_bytes(optimizer_report(text_specs(config), options.engram_rows))}")

    records = _read_metrics(options.out / METRICS, resumed) if resumed else []
    write_text(out / METRICS, "".join(to_json(r) + "\n" for r in records))
    schedule = warmup_hold_cosine(total, options.lr) if total else None
    done, saved, stopping = resumed, resumed, False
    tokens, training, compile_seconds, timed, due = 0, 0.0, 0.0, 0.0, False
    traced = profile_steps(options.profile)
    examiner: Examiner | None = None
    batches: Iterator[Batch] = iter(())
    train_step: Any = None

    def save() -> None:
        """A checkpoint of the step at hand; before the last one none of a state that skipped steps have left as it was."""
        nonlocal saved
        stale = done < total and all(skipped(record) for record in records if record["step"] > saved)
        if (saved != done and not stale) or (latest is None and done == 0):
            checkpoints.save_behind(done, devices.stored(state), {**facts, "total": total})
            saved = done

    def examine() -> Score:
        """The score of the held-out text at hand, kept where it is a number; the best so far beside the run's checkpoints."""
        nonlocal scores
        assert examiner is not None
        found = examiner.score(state)
        if not math.isfinite(found.nats):
            return found
        whole = [old.bits_per_byte for old in scores if 0 < old.step < done]
        scores = [*(old for old in scores if old.step < done), found]
        if options.eval_every and found.bits_per_byte < min(whole, default=math.inf):
            best.save_behind(done, devices.stored(state), {**facts, "total": total})
        keep_run()
        return found

    with (
        checkpoints,
        best,
        Log(out, options.tensorboard and leads(), options.wandb if leads() else None, facts) as log,
        _interruptible() as received,
        contextlib.ExitStack() as tracing,
    ):

        def halted() -> bool:
            # Of several processes one may be told alone; all of them ask, at the same places.
            nonlocal stopping
            stopping = stopping or any_of(bool(received))
            return stopping

        for number, stage in enumerate(plan):
            # The last one is opened even without a step of it left, for the score at the end.
            if (done >= stage.last and number + 1 < len(plan)) or halted():
                continue
            data = StageData(plan[: number + 1], prepared, options)
            examiner = Examiner(stage, data.prepared, fold, report, devices)
            if options.evaluate and not done:
                report.phase("scoring held-out text before training")
                before = examiner.score(state, _FIRST_SCORE_ROWS)
                scores += [before] if math.isfinite(before.nats) else []
                keep_run()
            if (not total or done < total) and done < stage.last:
                report.phase(f"compiling the training step{f' of phase {stage.name}' if len(plan) > 1 else ''}")
                compiling = time.monotonic()
                step = make_train_step(stage.config, stage.policy, fold, stage.step, mesh=devices.mesh)
                first = devices.place(data.batch(done), stage.step.accumulate)
                train_step = step.lower(state, first, np.float32(0)).compile()  # pyright: ignore
                meet(f"phase {number}")
                compile_seconds += time.monotonic() - compiling
                batches = data.iterator(done)
                report.phase("training")
            while (not total or done < total) and done < stage.last and not halted():
                now = time.monotonic()
                if options.max_seconds is not None and total and done and now - began > options.max_seconds:
                    break
                if done == traced.start and traced:
                    tracing.enter_context(jax.profiler.trace(str(out / "profile")))
                # Until the length is known, the rate is that of the start of any longer run.
                rate = schedule(done) if schedule else warmup_hold_cosine(1000, options.lr)(done)
                batch = next(batches)
                state, metrics = train_step(state, devices.place(batch, stage.step.accumulate), np.float32(rate))
                values = {name: float(value) for name, value in jax.device_get(metrics).items()}
                done += 1
                took = time.monotonic() - now
                if done == traced.stop and traced:
                    tracing.close()
                tokens, training = tokens + batch.ids.size, training + took
                record = {"step": done, **values, **speed(stage.config, batch.ids.size, stage.length, took)}
                if options.eval_every and done % options.eval_every == 0:
                    record |= {"heldout_bits_per_byte": examine().bits_per_byte, **examiner.diagnose(state)}
                records.append(record)
                log.write(record)
                if not total:
                    timed += took
                    left = (options.max_seconds or 0) * _RESERVE - (time.monotonic() - began)
                    if done >= _TIMED_STEPS:
                        total = done + max(int(left / (timed / done)), 1)
                        schedule = warmup_hold_cosine(total, options.lr)
                        keep_run()
                        if total < _FEW_STEPS:
                            report.say(f"only {total} steps fit in {options.max_seconds:g} s here: the model will learn little")
                report.step(done, total, values["loss"], tokens / max(training, 1e-9))
                due = due or done % options.checkpoint_every == 0
                if skipped(record):
                    # One after it would be of weights that give no number, and push out one of weights that do.
                    check_diverged(options.lr, records, total, None if latest is None and not saved else saved)
                elif due:
                    save()
                    due = False
            else:
                continue
            break  # out of time
        report.phase(f"writing the checkpoint of step {done}")
        save()
    if options.evaluate and not halted() and not any(found.step == done > 0 for found in scores):
        report.phase("scoring held-out text")
        if not math.isfinite(examine().nats):
            raise _diverged(options.lr, "the score after the last step is not a number")
    best.wait()
    keep_run()
    if records:
        plot_losses(records, scores, out / "loss.png", _name(options))
    if halted():
        if not received or received[0] == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt
    return TrainResult(
        state=state,
        config=config,
        prepared=prepared,
        steps=done,
        resumed_from=resumed,
        records=records,
        tokens_per_second=tokens / max(training, 1e-9),
        compile_seconds=compile_seconds,
        scores=scores,
    )


def skipped(record: dict[str, Any]) -> bool:
    return bool(record.get("skipped"))


def check_diverged(lr: float, records: list[dict[str, Any]], total: int, saved: int | None) -> None:
    """Raises `UserError` where the last steps were skipped in such a number that no more will be taken."""
    most = min(_SKIPPED, max(total // 2, 1)) if total else _SKIPPED
    if len(records) >= most and all(map(skipped, records[-most:])):
        first, last = records[-most]["step"], records[-1]["step"]
        kept = "no checkpoint is kept" if saved is None else f"the last checkpoint is that of step {saved}"
        raise _diverged(lr, f"the loss or gradient of steps {first} to {last} is not finite; {kept}")


def _diverged(lr: float, how: str) -> UserError:
    return UserError(f"lr: found {lr:g}, with which the run diverged: {how}; nearest is a lower rate in another folder")


def _say_bytes(report: dict[str, dict[str, int]]) -> str:
    families = {name: row["state_bytes"] for name, row in sorted(report.items()) if row["state_bytes"] and name != "schedule"}
    return ", ".join(f"{name} {size:,}" for name, size in families.items()) + " bytes"


def _name(options: TrainOptions) -> str:
    return options.preset if options.config is None else options.config.stem
