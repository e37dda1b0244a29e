"""What a stage of a run works on: its batches by the step alone, and the held-out text it is scored with."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from train.curve import Score
from train.data import Batch, Prepared, TrainData, prepare, to_batch
from train.devices import Devices
from train.diagnose import make_diagnose
from train.packing import Packed
from train.progress import Report
from train.recipes import Stage
from train.replay import replayed
from train.step import EvalStep, TrainState, make_eval_step
from train.synthetic import mixed
from train.tokenizer import cache_root

# Held-out rows that a model's inside is looked at with: dense attention of every head over them is held at once.
_DIAGNOSED_TOKENS = 4096


def origin(stages: Sequence[Stage]) -> int:
    """The step at which the stream of the last stage's data began: that of the first stage in a row of the same shape."""
    first = stages[-1].first
    for stage in reversed(stages):
        if (stage.rows, stage.length) != (stages[-1].rows, stages[-1].length):
            break
        first = stage.first
    return first


class StageData:
    """The batches of the last of ``stages``, those up to it in a run; step numbers are the run's.

    options: the run's. What is drawn for a batch is drawn of the run's seed and the step, so that a resume has it too.
    """

    def __init__(self, stages: Sequence[Stage], prepared: Prepared, options: Any):
        stage = self._stage = stages[-1]
        if stage.length != options.length:
            align = stage.config.document_alignment
            prepared = prepare(options.data, stage.config.vocab_size, stage.length, align, cache_root())
        self.prepared = prepared
        self._seed, self._share = options.seed, options.synthetic
        self._origin = origin(stages)
        self._data = TrainData(prepared.train, stage.rows, options.seed)

    def batch(self, step: int) -> Batch:
        """The batch of ``step``."""
        return self._made(self._data.batch(step - self._origin), step)

    def iterator(self, step: int) -> Iterator[Batch]:
        """``batch(step)``, ``batch(step + 1)``... without end."""
        for n, batch in enumerate(self._data.iterator(step - self._origin)):
            yield self._made(batch, step + n)

    def _made(self, batch: Batch, step: int) -> Batch:
        draw = lambda purpose: np.random.default_rng((self._seed, step, purpose))  # noqa: E731
        if self._share:
            batch = mixed(batch, self._share, self._stage.config.vocab_size, draw(1))
        if self._stage.step.replay != "off":
            config, half = self._stage.config, self._stage.step.replay == "gather"
            batch = replayed(batch, config.sliding_window, half, draw(2))
        return batch


class Examiner:
    """Scores and diagnoses a stage's model on held-out text."""

    def __init__(self, stage: Stage, prepared: Prepared, token_map: np.ndarray, report: Report, devices: Devices):
        # By the parts that a training step is computed in: what fits there fits here.
        self._rows = stage.rows // stage.step.accumulate
        self._prepared, self._report = prepared, report
        step = make_eval_step(stage.config, stage.policy, token_map, stage.step.weights, devices.mesh)
        self._score: EvalStep = lambda params, batch: step(params, devices.place(batch))
        self._diagnose = make_diagnose(stage.config, stage.policy, token_map)
        self._few = max(1, min(_DIAGNOSED_TOKENS // stage.length, len(prepared.heldout.ids)))

    def score(self, state: TrainState, rows: int | None = None) -> Score:
        """Of all held-out rows, or the first ``rows``."""
        some = Packed(*(a[:rows] for a in self._prepared.heldout))
        return score(self._score, state, some, self._rows, self._prepared.token_bytes, self._report.part)

    def diagnose(self, state: TrainState) -> dict[str, float]:
        """`train.diagnose` of the first held-out rows."""
        found = self._diagnose(state.params, *(a[: self._few] for a in self._prepared.heldout))
        return {name: float(value) for name, value in jax.device_get(found).items()}


def score(
    step: EvalStep,
    state: TrainState,
    packed: Packed,
    batch_size: int,
    token_bytes: np.ndarray,
    part: Callable[[int, int], object] = lambda done, total: None,
) -> Score:
    """Nats of the rows' every target, ends of documents among them, and the bytes of their text; ``part`` hears of progress."""
    nats = tokens = 0.0
    for start in range(0, len(packed.ids), batch_size):
        rows = Packed(packed.ids[start : start + batch_size], packed.segments[start : start + batch_size])
        short = batch_size - len(rows.ids)
        # The last batch is filled with empty rows, so that one compiled shape serves all.
        batch = to_batch(Packed(*(np.pad(a, ((0, short), (0, 0))) for a in rows)))
        found = step(state.params, batch)
        nats, tokens = nats + float(found[0]), tokens + float(found[1])
        part(start + batch_size - short, len(packed.ids))
    return Score(int(state.step), nats, int(tokens), int(token_bytes[packed.ids].sum()))
