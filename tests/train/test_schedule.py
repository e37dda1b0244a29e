"""The learning rate's shape over runs of every length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.errors import UserError
from train.optim.schedule import warmup_hold_cosine, warmup_steps


def rates(total: int, peak: float = 2e-3) -> np.ndarray:
    # Of one shape for all runs, which compiles once.
    return np.asarray(warmup_hold_cosine(total, peak)(jnp.arange(9000)))[:total]


def test_fractions_of_the_run():
    found = rates(9000) / 2e-3
    assert warmup_steps(9000) == 90
    np.testing.assert_allclose(found[[0, 44, 89, 90, 5600]], [1 / 90, 0.5, 1, 1, 1], rtol=1e-6)
    assert found[5610] < 1
    np.testing.assert_allclose(found[6800], 0.55, rtol=1e-5)
    np.testing.assert_allclose(found[[8000, 8999]], 0.1, rtol=1e-5)
    assert np.all(np.diff(found[90:]) <= 1e-7)


@pytest.mark.parametrize("total", [1, 2, 3, 7, 50, 199, 200, 1000])
def test_short_runs_warm_up_in_a_quarter_at_most(total):
    found = rates(total, 1.0)
    assert np.all((found > 0) & (found <= 1)) and found.max() == 1
    assert np.argmax(found) + 1 == warmup_steps(total) <= max(1, min(total // 4, 50))


def test_counts_of_every_kind_give_one_float32():
    schedule = warmup_hold_cosine(100, 1e-3)
    values = [schedule(3), schedule(jnp.int32(3)), jax.jit(schedule)(jnp.int32(3)), schedule(np.int64(3))]
    assert all(v.dtype == jnp.float32 and v.shape == () for v in values)
    np.testing.assert_allclose(np.stack(values), 1e-3 * 4 / 25, rtol=1e-6)


@pytest.mark.parametrize(
    ("total", "peak", "says"),
    [
        (0, 1e-3, "steps: found 0"),
        (10, 0.0, "learning rate: found 0"),
        (10, float("nan"), "found nan"),
        (10, float("inf"), "found inf"),
    ],
)
def test_bad_input(total, peak, says):
    with pytest.raises(UserError, match=says):
        warmup_hold_cosine(total, peak)
