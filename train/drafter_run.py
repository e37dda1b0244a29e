"""A run that trains a drafter for the model of another run: data, steps, metrics, checkpoints, resume, calibration.

The folder it writes holds the model as it was and the drafter among the tensors carried by released names, so that
`dsv41 generate` drafts with it and `dsv41 convert` writes its ``mtp.*`` tensors.
"""

import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import struct

from dsv41.config import ModelConfig, replace, save_config
from dsv41.errors import UserError
from dsv41.files import locked, make_writable, read_json, write_text
from dsv41.hf.convert import SIDE_FILES
from dsv41.hf.draft import CARRIED, from_carried, has_draft, to_carried
from dsv41.numerics import Policy
from dsv41.params import abstract_params, text_specs
from infer.model import load_model
from infer.schedule import calibrate, calibration_error, probabilities, write_calibration
from train.checkpoint import Checkpoints
from train.corpus import STDLIB, check_paths, load_corpus, split_corpus
from train.data import TrainData, check_stream, to_batch
from train.drafter import DrafterState, acceptance, init_drafter, make_blocks, make_drafter_step, measure_blocks
from train.loop import check_diverged, skipped
from train.metrics import Log
from train.optim import warmup_hold_cosine
from train.packing import Packed, check_length, pack
from train.progress import Report
from train.tokenizer import encode_documents

STAGES = 3  # of a drafter for a model whose config has none, as the release's
FACTS = "drafter.json"
_HELDOUT_ROWS = 64


@dataclass(frozen=True)
class DrafterOptions:
    """source: the run whose model is drafted for. anchors: blocks of each row. Otherwise as `train.options.TrainOptions`."""

    source: Path
    out: Path = Path("runs/drafter")
    data: tuple[str, ...] = (STDLIB,)
    steps: int = 500
    batch_size: int = 4
    length: int = 256
    lr: float = 1e-2
    seed: int = 0
    checkpoint_every: int = 500
    keep: int = 2
    anchors: int = 64
    tensorboard: bool = False
    wandb: str | None = None


@dataclass(frozen=True)
class DrafterResult:
    """heldout: of held-out rows, what `train.drafter.measure_blocks` says, and ``error`` and ``calibrated_error`` of the running
    product of the confidences (`infer.schedule.calibration_error`), on rows that the temperatures were not fitted on."""

    steps: int
    resumed_from: int
    records: list[dict[str, Any]]
    heldout: dict[str, float]
    temperatures: tuple[float, ...]


@struct.dataclass
class _Stored:
    """A checkpoint's state; the drafter itself is carried beside it."""

    params: Any
    opt_state: Any
    step: jax.Array


def drafting_config(config: ModelConfig) -> ModelConfig:
    """``config`` with draft stages, its own where it has some."""
    if config.num_nextn_predict_layers:
        return config
    if not config.dspark_target_layer_ids:
        raise UserError("from: found a model whose config names no dspark_target_layer_ids, allowed is one that does")
    ratios = (*config.compress_ratios[: config.num_hidden_layers], *(0,) * STAGES)
    return replace(config, num_nextn_predict_layers=STAGES, compress_ratios=ratios)


def _check(options: DrafterOptions) -> None:
    for name in ("steps", "batch_size", "length", "checkpoint_every", "keep", "anchors"):
        if getattr(options, name) < 1:
            raise UserError(f"{name}: found {getattr(options, name)}, allowed is 1 or more; nearest is 1")
    if not (math.isfinite(options.lr) and options.lr > 0):
        raise UserError(f"lr: found {options.lr}, allowed is a finite number above 0")
    check_stream(options.batch_size, options.seed)
    check_paths(options.data)
    if options.out.resolve() == options.source.resolve():
        raise UserError(f"out: found {str(options.out)!r}, the run to draft for, allowed is another folder")
    make_writable(options.out)


def _facts(options: DrafterOptions, fingerprint: bytes) -> dict[str, Any]:
    """Whatever decides the run's numbers: a resume needs all of it unchanged."""
    kept = ("data", "steps", "batch_size", "length", "lr", "seed", "anchors")
    plain = {name: value for name, value in asdict(options).items() if name in kept}
    return json.loads(json.dumps({**plain, "source": fingerprint.hex()}))


def _check_same(file: Path, facts: dict[str, Any]) -> None:
    old = read_json(file) if file.exists() else None
    if not isinstance(old, dict):
        raise UserError(f"out: {str(file.parent)!r} holds checkpoints but no {FACTS}, allowed is a new folder")
    for name, value in facts.items():
        if old.get(name) != value:
            where = "from" if name == "source" else name
            raise UserError(f"{where}: found another than that of the run in {str(file.parent)!r}; resume with the same")


def train_drafter(options: DrafterOptions) -> DrafterResult:
    """Trains, or goes on with the run in ``out``; `UserError` for options that cannot be used and a folder at work."""
    _check(options)
    with Report() as report, locked(options.out):
        report.phase("opening the model", quiet=True)
        if not (options.source / "checkpoints").is_dir():
            raise UserError(f"from: found no checkpoint in {str(options.source)!r}, allowed is what dsv41 train or convert wrote")
        model = load_model(options.source)
        config = drafting_config(model.config)
        check_length(options.length, config.document_alignment)
        out, facts = options.out, _facts(options, model.fingerprint)
        checkpoints = Checkpoints(out / "checkpoints", options.keep)
        latest = checkpoints.latest()
        train, heldout = (
            pack(encode_documents(model.tokenizer, part), options.length, config.document_alignment)
            for part in split_corpus(load_corpus(options.data))
        )
        carried = _carried(options.source)
        known = from_carried(config, carried) if has_draft(carried) else None
        state, resumed = init_drafter(config, options.seed, known), 0
        if latest is not None:
            _check_same(out / FACTS, facts)
            state, resumed = _restore(checkpoints, latest, config, state), latest
        else:
            save_config(config, out / "config.json")
            for name in (*SIDE_FILES, "run.json"):
                if (options.source / name).is_file():
                    shutil.copyfile(options.source / name, out / name)
            write_text(out / FACTS, json.dumps(facts) + "\n")
        others = {name: array for name, array in carried.items() if not has_draft([name])}

        def save(step: int) -> None:
            whole = _Stored(model.params, state.opt_state, state.step)
            extra = {CARRIED: {**others, **to_carried(config, state.draft)}}
            checkpoints.save(step, whole, {"recipe": "dspark"}, extra)

        data = TrainData(train, options.batch_size, options.seed)
        step = make_drafter_step(config, Policy(), model.token_map, options.anchors, options.seed)
        rate, records = warmup_hold_cosine(options.steps, options.lr), []
        report.phase("compiling the step")
        with Log(out, options.tensorboard, options.wandb, facts) as log:
            for done in range(resumed, options.steps):
                began = time.monotonic()
                batch = data.batch(done)
                state, metrics = step(state, model.params, batch, np.float32(rate(done)))
                values = {name: float(value) for name, value in jax.device_get(metrics).items()}
                took = time.monotonic() - began
                records.append({"step": done + 1, **values, "seconds": round(took, 4)})
                log.write(records[-1])
                report.step(done + 1, options.steps, values["loss"], batch.ids.size / max(took, 1e-9))
                check_diverged(options.lr, records, options.steps, checkpoints.latest())
                if (done + 1) % options.checkpoint_every == 0 and done + 1 < options.steps and not skipped(records[-1]):
                    save(done + 1)
            report.phase("scoring held-out text")
            found, temperatures = examine(state, model.params, config, model.token_map, heldout, options)
            log.write({"step": options.steps, **{f"heldout.{name}": value for name, value in found.items()}})
        write_calibration(out, temperatures)
        if resumed < options.steps:
            report.phase(f"writing the checkpoint of step {options.steps}")
            save(options.steps)
    return DrafterResult(options.steps, resumed, records, found, temperatures)


def _carried(run: Path) -> dict[str, Any]:
    """The tensors that a run carries beside its model."""
    checkpoints = Checkpoints(run / "checkpoints", 1)
    return checkpoints.restore_extra(checkpoints.latest() or 0, CARRIED)


def _restore(checkpoints: Checkpoints, step: int, config: ModelConfig, state: DrafterState) -> DrafterState:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = _Stored(abstract_params(text_specs(config)), state.opt_state, state.step)
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), abstract)
    kept, _ = checkpoints.restore(step, abstract)
    draft = from_carried(config, checkpoints.restore_extra(step, CARRIED))
    return DrafterState(draft, kept.opt_state, kept.step)


def examine(
    state: DrafterState, params: Any, config: ModelConfig, token_map: Any, heldout: Packed, options: DrafterOptions
) -> tuple[dict[str, float], tuple[float, ...]]:
    """`DrafterResult.heldout` of the first held-out rows, and the temperatures: fitted on half of them, tried on the others."""
    run = make_blocks(config, Policy(), token_map, options.anchors)

    @jax.jit
    def one(draft: Any, params: Any, batch: Any, key: jax.Array) -> Any:
        found = run(draft, params, batch, key)
        return measure_blocks(found), found.confidence, acceptance(found)[0], found.counts[:, -1]

    size, sums, seen = options.batch_size, [], []
    rows = min(_HELDOUT_ROWS, len(heldout.ids)) // size * size
    for start in range(0, max(rows, size), size):
        batch = to_batch(Packed(*(np.resize(a[start : start + size], (size, a.shape[1])) for a in heldout)))
        measured, *arrays = jax.device_get(one(state.draft, params, batch, jax.random.fold_in(jax.random.key(1), start)))
        whole = arrays[-1] > 0
        sums.append({name: float(value) for name, value in measured.items()})
        seen.append([a[whole] for a in arrays[:2]])
    found = {name: float(np.mean([one[name] for one in sums])) for name in sums[0]}
    fitted, tried = ([np.concatenate(parts) for parts in zip(*half, strict=True)] for half in (seen[::2], seen[1::2] or seen))
    temperatures = calibrate(fitted[0], fitted[1])
    for name, used in (("error", ()), ("calibrated_error", temperatures)):
        found[name] = product_error(tried[0], tried[1], used)
    return found, temperatures


def product_error(confidence: np.ndarray, accepted: np.ndarray, temperatures: Sequence[float] = ()) -> float:
    """Mean over slots of the calibration error of the probability that all drafts up to the slot are accepted."""
    mine, truth = np.cumprod(probabilities(confidence, temperatures), axis=1), np.cumprod(accepted, axis=1)
    return float(np.mean([calibration_error(mine[:, k], truth[:, k]) for k in range(mine.shape[1])]))
