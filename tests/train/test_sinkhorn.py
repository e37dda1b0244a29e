"""Sinkhorn-balanced updates against their golden vectors and the dense float64 form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import sizes
from train.optim import sinkhorn as module
from train.optim.sinkhorn import Rows, sinkhorn

balance = jax.jit(module.balance)


def dense(n: np.ndarray) -> np.ndarray:
    """Algorithm 1 as written, on the whole matrix."""
    n = n.astype(np.float64)
    norms = np.linalg.norm(n, axis=1)
    u = np.where((norms <= 1e-3 * norms.mean())[:, None], 0.0, n)
    for k in range(1, 12):
        u = u / (np.linalg.norm(u, axis=k % 2, keepdims=True) + 1e-20)
    return np.sqrt(n.shape[1]) * u


def near(found, wanted, atol=1e-6):
    np.testing.assert_allclose(found, wanted, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("x", "golden"),
    [
        ([[1, 2], [3, 4], [0, 0]], [[0.89442717, 1.09544514], [1.09544509, 0.89442722], [0, 0]]),
        ([[1, -1], [-1, 1]], [[1, -1], [-1, 1]]),
        ([[1e-25, -1e-25], [-1e-25, 1e-25]], [[1, -1], [-1, 1]]),
        ([[1e25, -1e25], [-1e25, 1e25]], [[1, -1], [-1, 1]]),
        (
            [[1, 2], [3, -4], [1e-9, 0], [0.5, 0.25]],
            [[0.69735507, 1.2303235], [0.91604415, -1.07743358], [0, 0], [1.29394108, 0.57071576]],
        ),
        ([[1], [1999], [0], [0]], [[1], [1], [0], [0]]),
        ([[1], [1999]], [[0], [1]]),
    ],
    ids=["zero row", "signs", "tiny", "huge", "masked row", "mean over all rows", "inclusive mask"],
)
def test_golden_vectors(x, golden):
    near(balance(jnp.array(x, jnp.float32)), np.array(golden))


@pytest.mark.parametrize("shape", [(5, 3), (200, 32), (32, 200)])
def test_against_the_dense_form(shape):
    rng = np.random.default_rng(0)
    x = np.exp(rng.standard_normal(shape)) * rng.standard_normal(shape) * np.exp(3 * rng.standard_normal((shape[0], 1)))
    x[1] = 0
    x[2] *= 1e-6
    x = x.astype(np.float32)
    found = np.asarray(balance(jnp.asarray(x)))
    wanted = dense(x)
    assert np.linalg.norm(found - wanted) < 1e-6 * np.linalg.norm(wanted)
    live = np.any(wanted, axis=1)
    assert not live[1] and not np.any(found[~live])
    near(np.sqrt(np.mean(np.square(found[live]), axis=1)), 1.0)


def test_zeros():
    assert not np.any(balance(jnp.zeros((4, 3), jnp.float32)))
    x = np.random.default_rng(1).standard_normal((6, 4)).astype(np.float32)
    x[:, 2] = 0
    found = balance(jnp.asarray(x))
    near(found, dense(x))
    assert not np.any(found[:, 2])


def test_momentum_is_an_average_and_keeps_the_update_at_full_size():
    rule = sinkhorn()
    gradient = {"t": jnp.ones((2, 2), jnp.float32)}
    step = jax.jit(rule.update)
    first, state = step(gradient, rule.init(gradient))
    near(state.momentum["t"], np.full((2, 2), 0.05), 1e-8)
    second, state = step({"t": jnp.zeros((2, 2), jnp.float32)}, state)
    near(state.momentum["t"], np.full((2, 2), 0.0475), 1e-8)
    near(first["t"], np.full((2, 2), 0.18), 1e-7)
    near(second["t"], np.full((2, 2), 0.18), 1e-7)


def test_nesterov_looks_ahead():
    rng = np.random.default_rng(2)
    g = [rng.standard_normal((6, 4)).astype(np.float32) for _ in range(2)]
    rule = sinkhorn()
    state, step = rule.init({"t": jnp.zeros((6, 4), jnp.float32)}), jax.jit(rule.update)
    for gradient in g:
        update, state = step({"t": jnp.asarray(gradient)}, state)
    m = 0.05 * g[0].astype(np.float64)
    m = 0.95 * m + 0.05 * g[1]
    near(update["t"], 0.18 * dense(0.95 * m + 0.05 * g[1]))


def _touches(rng, count, rows):
    ids = np.sort(rng.permutation(rows)[:count]).astype(np.int32)
    return ids, (np.exp(2 * rng.standard_normal((count, 1))) * rng.standard_normal((count, 4))).astype(np.float32)


def test_rows_alone_do_what_the_whole_table_does():
    """Float32 in another order, of values of size 0.18; over 40 steps, in which rows fall under the mask and come back."""
    rows, rng = 60, np.random.default_rng(4)
    whole, some = sinkhorn(), sinkhorn({"t": 50})
    table = {"t": jnp.zeros((rows, 4), jnp.float32)}
    states = [rule.init(table) for rule in (whole, some)]
    steps = [jax.jit(rule.update) for rule in (whole, some)]
    for _ in range(40):
        ids, values = _touches(rng, 5, 40)  # at most 40 rows are ever touched: none is dropped
        gradient = {
            "t": Rows(jnp.append(jnp.asarray(ids), rows).astype(jnp.int32), jnp.pad(jnp.asarray(values), ((0, 1), (0, 0))))
        }
        (wanted, states[0]), (found, states[1]) = (step(gradient, state) for step, state in zip(steps, states, strict=True))
        near(module.dense(found["t"], rows), wanted["t"], 2e-6)
    active = states[1].momentum["t"]
    near(module.dense(active.rows, rows), states[0].momentum["t"], 1e-6)
    assert int(active.lost) == 0 and float(active.rest) == 0


def test_rows_that_are_dropped_still_count_in_the_mean():
    """Twelve rows are touched once, then one again and again, with room for four: their norms decay in a sum of them."""
    rows, rng = 30, np.random.default_rng(5)
    whole, some = sinkhorn(), sinkhorn({"t": 4})
    table = {"t": jnp.zeros((rows, 4), jnp.float32)}
    states, steps = [rule.init(table) for rule in (whole, some)], [jax.jit(rule.update) for rule in (whole, some)]
    first = _touches(rng, 12, rows - 10)
    touched = [(first[0] + 10, first[1])] + [(np.array([3], np.int32), np.full((1, 4), 50.0, np.float32))] * 3
    for ids, values in touched:
        gradient = {"t": Rows(jnp.asarray(ids), jnp.asarray(values))}
        _, states[0] = steps[0](gradient, states[0])
        _, states[1] = steps[1](gradient, states[1])
        active = states[1].momentum["t"]
        norms = np.linalg.norm(np.asarray(states[0].momentum["t"]), axis=1)
        kept = np.linalg.norm(np.asarray(active.rows.values), axis=1)
        np.testing.assert_allclose(kept.sum() + active.rest, norms.sum(), rtol=1e-5)
        assert int(active.lost) >= 12 - 4
    near(active.rows.values[0], states[0].momentum["t"][3], 1e-6)


def test_a_step_on_rows_makes_nothing_of_the_tables_size():
    rows = 10**6
    rule = sinkhorn({"t": 64})
    state = jax.eval_shape(rule.init, {"t": jax.ShapeDtypeStruct((rows, 4), jnp.float32)})
    gradient = {"t": Rows(jax.ShapeDtypeStruct((16,), jnp.int32), jax.ShapeDtypeStruct((16, 4), jnp.float32))}
    assert max(sizes(jax.make_jaxpr(rule.update)(gradient, state).jaxpr)) <= 4 * (64 + 16)
