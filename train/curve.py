"""The picture of a run's loss."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dsv41.files import replacing

_SMOOTHING = 0.95


class Score(NamedTuple):
    """Held-out text under the model of ``step``: nats of all its ``tokens``, and the ``bytes`` of their text."""

    step: int
    nats: float
    tokens: int
    bytes: int

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / max(self.bytes, 1)

    @property
    def nats_per_token(self) -> float:
        return self.nats / max(self.tokens, 1)


def running_mean(values: Sequence[float]) -> list[float]:
    """For each value the mean of the finite ones so far, each weighing 0.95 of the next; NaN before the first.

    Divided by the sum of the weights: without that the first value would weigh twenty times as much as it should.
    """
    total = weight = 0.0
    means = []
    for value in values:
        if math.isfinite(value):
            total, weight = _SMOOTHING * total + value, _SMOOTHING * weight + 1
        means.append(total / weight if weight else math.nan)
    return means


def plot_losses(
    records: Sequence[dict[str, Any]], scores: Sequence[Score], file: Path, name: str, byte_model: float | None = None
) -> None:
    """Draws the cross-entropy of every training step, its running mean, and the held-out ``scores``.

    name: of the model, for the title. byte_model: bits per byte of the baseline on the held-out text, a line.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [record["step"] for record in records]
    losses = [record["ce"] for record in records]
    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=110)
    axes.plot(steps, losses, color="0.75", linewidth=0.8, label="training, each step's batch")
    axes.plot(steps, running_mean(losses), color="C0", label="training, running mean")
    axes.set(title=f"{name}: loss over {steps[-1]:,} steps", xlabel="step", ylabel="cross-entropy (nats per token)")
    axes.margins(x=0.03)
    if scores:
        last = scores[-1]
        nats = math.log(2) * last.bytes / max(last.tokens, 1)  # per token, of one bit per byte
        at = [score.step for score in scores], [score.nats_per_token for score in scores]
        axes.plot(*at, "o", color="C3", label=f"held-out ({last.bits_per_byte:.2f} bits per byte at the end)")
        if byte_model is not None:
            said = f"held-out, order-2 byte model ({byte_model:.2f} bits per byte)"
            axes.axhline(byte_model * nats, color="C2", linestyle="--", linewidth=1.2, label=said)
        right = axes.secondary_yaxis("right", functions=(lambda y: np.divide(y, nats), lambda y: np.multiply(y, nats)))
        right.set_ylabel("the same in bits per byte of held-out text")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    with replacing(file) as partial:
        figure.savefig(partial, format=file.suffix[1:])
    pyplot.close(figure)
