"""The learning rate over a run (training §3.1)."""

import math

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from dsv41.errors import UserError

# Of 45T tokens the release held the peak to 28T and ended the cosine at 40T.
HOLD_END = 28 / 45
DECAY_END = 40 / 45
FINAL = 0.1


def warmup_steps(total_steps: int) -> int:
    """1 % of the run, at least 50 steps, but never more than a quarter of it."""
    return max(1, min(max(50, total_steps // 100), total_steps // 4))


def warmup_hold_cosine(total_steps: int, peak: float) -> optax.Schedule:
    """Linear warm-up, ``peak`` to 28/45 of the run, cosine to a tenth of it at 40/45, then constant (training §3.1).

    The schedule takes the number of steps done, int32[], and gives float32[]. The first step already moves.

    Raises `UserError` for fewer than 1 step and for a peak that is not positive and finite.
    """
    if total_steps < 1:
        raise UserError(f"steps: found {total_steps}, allowed is 1 or more")
    if not (peak > 0 and math.isfinite(peak)):
        raise UserError(f"learning rate: found {peak}, allowed is a positive number")
    warmup = warmup_steps(total_steps)

    def schedule(count: ArrayLike) -> Array:
        step = jnp.asarray(count).astype(jnp.float32)
        rise = jnp.minimum((step + 1) / warmup, 1.0)
        fall = jnp.clip((step / total_steps - HOLD_END) / (DECAY_END - HOLD_END), 0.0, 1.0)
        return peak * rise * (FINAL + (1 - FINAL) * 0.5 * (1 + jnp.cos(math.pi * fall)))

    return schedule
