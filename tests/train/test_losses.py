"""The training objective: cross-entropy and its denominator, by hand and in chunks, and what is added to it."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from train.losses import total_loss, weighted_nll


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
