"""How many of its drafts each request has verified: all, those above a threshold, or what pays in a batch (serving §5.4)."""

import bisect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from dsv41.config import ModelConfig
from dsv41.errors import UserError
from dsv41.files import read_json, write_text

Mode = Literal["off", "fixed", "threshold", "scheduled"]
Rate = Callable[[int], float]  # tokens of a batch -> its steps a second
CALIBRATION = "draft.json"
_GRID = np.exp(np.linspace(np.log(0.2), np.log(5.0), 81))
_BINS = 10


@dataclass(frozen=True)
class Drafting:
    """How drafts are used.

    length: of ``fixed``, the drafts verified, all of a block where not given. threshold: of ``threshold``, the least probability
    that the drafter gives a draft that is verified. temperatures: of each slot's confidence, from `calibrate`.
    """

    mode: Mode = "off"
    length: int | None = None
    threshold: float = 0.5
    temperatures: tuple[float, ...] = ()

    def check(self, config: ModelConfig) -> None:
        """Raises `UserError` for what the drafter of ``config`` cannot do."""
        slots = config.dspark_block_size
        # A block of another length than the drafter was trained on loses every slot's acceptance.
        if self.length is not None and not 1 <= self.length <= slots:
            raise UserError(
                f"draft_length: found {self.length}, allowed is 1 to {slots}, the block that the drafter was trained on;"
                f" nearest is {min(max(self.length, 1), slots)}"
            )
        if not 0 <= self.threshold <= 1:
            raise UserError(f"draft_threshold: found {self.threshold}, allowed is 0 to 1")


NO_DRAFTS = Drafting()


def drafting_of(run: Path, config: ModelConfig, mode: Mode, length: int | None, threshold: float) -> Drafting:
    """`Drafting` with the temperatures that a run's folder keeps; `UserError` for what its drafter cannot do."""
    found = Drafting(mode, length, threshold, read_calibration(run, config.dspark_block_size))
    found.check(config)
    return found


def probabilities(confidence: np.ndarray, temperatures: Sequence[float] = ()) -> np.ndarray:
    """Of confidence logits ``[..., G]``: that a draft is accepted where those before it are."""
    scaled = np.asarray(confidence, np.float64) / (np.asarray(temperatures) if len(temperatures) else 1.0)
    return 1 / (1 + np.exp(-np.clip(scaled, -60, 60)))


def schedule(chances: np.ndarray, rate: Rate) -> np.ndarray:
    """Drafts to verify of each of R requests: the greedy maximum of expected tokens a second (§12.8).

    chances ``[R, G]``: of `probabilities`. Drafts are admitted by the probability that all up to them are accepted, one at a
    time while that raises the rate; the first that does not ends it, so that no decision looks at a draft behind it.
    """
    requests, slots = chances.shape
    lengths = np.zeros(requests, np.int64)
    survival = np.cumprod(chances, axis=1)
    order = sorted((-survival[r, j], j, r) for r in range(requests) for j in range(slots))
    tokens, expected = requests, float(requests)
    best = expected * rate(tokens) if requests else 0.0
    for negative, j, r in order:
        value = (expected - negative) * rate(tokens + 1)
        if value <= best:
            break
        best, tokens, expected, lengths[r] = value, tokens + 1, expected - negative, j + 1
    return lengths


def choose_lengths(drafting: Drafting, confidence: np.ndarray, live: np.ndarray, rate: Rate) -> np.ndarray:
    """Drafts to verify of each row int32 ``[B]``; none of rows that are not live. confidence: logits ``[B, G]``."""
    slots = confidence.shape[1]
    lengths = np.zeros(len(live), np.int32)
    if drafting.mode == "fixed":
        lengths[:] = slots if drafting.length is None else drafting.length
    elif drafting.mode != "off" and live.any():
        chances = probabilities(confidence, drafting.temperatures)
        if drafting.mode == "threshold":
            lengths[:] = np.cumprod(chances >= drafting.threshold, axis=1).sum(axis=1)
        else:
            lengths[live] = schedule(chances[live], rate)
    return np.where(live, lengths, 0).astype(np.int32)


def rate_of(seconds: dict[int, float], rows: int) -> Rate:
    """Steps a second of a batch by its tokens, from the seconds of steps ``rows`` rows high and so many tokens wide.

    Between two widths seconds are interpolated; beyond the widest they go on as they did.
    """
    widths = sorted(seconds)
    at, took = [rows * width for width in widths], [seconds[width] for width in widths]

    def rate(tokens: int) -> float:
        n = min(max(bisect.bisect_left(at, tokens), 1), len(at) - 1) if len(at) > 1 else 0
        if not n:
            return 1 / took[0]
        slope = (took[n] - took[n - 1]) / (at[n] - at[n - 1])
        return 1 / max(took[n - 1] + slope * max(tokens - at[n - 1], 0), 1e-9)

    return rate


def calibration_error(chances: np.ndarray, accepted: np.ndarray) -> float:
    """Expected calibration error of ``chances [N]`` against ``accepted [N]``, 0 to 1 each, in ten equal bins."""
    bins = np.minimum((chances * _BINS).astype(int), _BINS - 1)
    gaps = [np.abs(np.sum(chances[bins == n] - accepted[bins == n])) for n in range(_BINS)]
    return float(np.sum(gaps) / max(len(chances), 1))


def calibrate(confidence: np.ndarray, accepted: np.ndarray) -> tuple[float, ...]:
    """A temperature for each slot's confidence, from left to right, by the error of the running product (§12.8).

    confidence ``[N, G]``: logits; accepted ``[N, G]``: the probability of each draft's acceptance where those before it are.
    """
    found: list[float] = []
    product, truth = np.ones(len(confidence)), np.ones(len(confidence))
    for slot in range(confidence.shape[1]):
        truth = truth * accepted[:, slot]
        errors = [calibration_error(product * probabilities(confidence[:, slot], (t,)), truth) for t in _GRID]
        # Of equal errors the one nearest to no change.
        best = min(range(len(_GRID)), key=lambda n: (errors[n], abs(np.log(_GRID[n]))))
        found.append(float(_GRID[best]))
        product = product * probabilities(confidence[:, slot], (found[-1],))
    return tuple(found)


def write_calibration(folder: Path, temperatures: Sequence[float]) -> None:
    """Keeps temperatures in a run's folder."""
    write_text(folder / CALIBRATION, json.dumps({"temperatures": list(temperatures)}) + "\n")


def read_calibration(folder: Path, slots: int) -> tuple[float, ...]:
    """The temperatures in a run's folder, none where there are none; `UserError` for a damaged file."""
    file = folder / CALIBRATION
    if not file.exists():
        return ()
    value = read_json(file)
    found = value.get("temperatures") if isinstance(value, dict) else None
    if not isinstance(found, list) or len(found) != slots or not all(isinstance(t, int | float) and 0 < t < 1e6 for t in found):
        raise UserError(f'{file}: allowed is {{"temperatures": [...]}} with {slots} numbers above 0')
    return tuple(map(float, found))
