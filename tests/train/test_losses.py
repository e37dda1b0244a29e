"""The training objective: cross-entropy and its denominator, by hand and in chunks, and what is added to it."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from tests.models import sizes
from train.losses import chunked_sums, total_loss, weighted_nll


def test_losses():
    logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [jnp.nan] * 3]], jnp.float32))
    targets, weights = jnp.array([[0, 1, 2]], jnp.int32), jnp.array([[1.0, 3.0, 0.0]], jnp.float32)
    nats, count = weighted_nll(logits, targets, weights)
    ce = nats / count
    np.testing.assert_allclose(ce, -(math.log(0.5) + 3 * math.log(0.8)) / 4, rtol=1e-6)
    np.testing.assert_allclose(total_loss(ce, jnp.float32(2), jnp.float32(0.5)), float(ce) + 2e-4 + 0.5, rtol=1e-6)


def test_parts_of_unequal_weight_make_one_mean():
    """The derivatives of two parts, one token of 2 and three of 4 each, average to 3.5; a mean of the parts' means is 3."""
    parts = [np.array([[1, 0, 0]], np.float32), np.ones((1, 3), np.float32)]
    slopes = [np.full((1, 3), 2, np.float32), np.full((1, 3), 4, np.float32)]
    total = sum(part.sum() for part in parts)
    targets = jnp.zeros((1, 3), jnp.int32)

    def loss(x):
        # Nats of x times the slope: logits (0, log(e^n - 1)) make target 0 cost n.
        nats = [x * slope + 1 for slope in slopes]
        logits = [jnp.stack([jnp.zeros_like(n), jnp.log(jnp.expm1(n))], axis=-1) for n in nats]
        return sum(weighted_nll(z, targets, jnp.asarray(w))[0] for z, w in zip(logits, parts, strict=True)) / total

    np.testing.assert_allclose(jax.grad(loss)(jnp.float32(0)), 3.5, rtol=1e-6)


def test_chunks_give_the_whole_sum_and_never_hold_the_whole_logits():
    """float32 sums of 26 positions in another order, of size 100: 2e-6 of them, headroom about 10."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((2, 13, 8), dtype=np.float32))
    head = jnp.asarray(rng.standard_normal((50, 8), dtype=np.float32))
    targets = jnp.asarray(rng.integers(0, 50, (2, 13)), jnp.int32)
    weights = jnp.asarray(rng.integers(0, 3, (2, 13)), jnp.float32)

    def loss(hidden, head, most):
        sums = chunked_sums(hidden, head, targets, weights, most)
        return sums.nats + 0.1 * sums.squared_log_z, sums

    both = [jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, head, most) for most in (10**6, 200)]
    for found, wanted in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
    (_, sums), _ = both[1]
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T
    log_z = np.log(np.exp(logits).sum(-1))
    nats = log_z - np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(sums.nats, (weights * nats).sum(), rtol=2e-6)
    np.testing.assert_allclose(sums.squared_log_z, (weights * log_z**2).sum(), rtol=2e-6)
    assert float(sums.weight) == float(weights.sum())
    made = jax.make_jaxpr(jax.grad(lambda *a: loss(*a, 200)[0], (0, 1)))(hidden, head)
    assert max(sizes(made.jaxpr)) <= max(head.size, hidden.size + 8 * 8)


def test_z_loss_is_off_unless_asked_for():
    parts = jnp.float32(1), jnp.float32(0), jnp.float32(0), jnp.float32(4)
    assert float(total_loss(*parts)) == 1.0
    np.testing.assert_allclose(total_loss(*parts, 1e-2), 1.04, rtol=1e-6)
