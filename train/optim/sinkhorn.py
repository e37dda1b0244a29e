"""Sinkhorn-balanced updates of embeddings, the head and n-gram tables (training §2.1-2.2)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

MOMENTUM = 0.95
UPDATE_RMS = 0.18
# Odd, so that the last normalisation is of rows.
_NORMALISATIONS = 11
_LIVE = 1e-3
_EPS = 1e-20


class SinkhornState(NamedTuple):
    """``momentum``: float32, the tree and shapes of the weights."""

    momentum: Any


def balance(x: Float[Array, "m n"]) -> Float[Array, "m n"]:
    """Rows and columns of ``x`` scaled to RMS 1, ending on rows, as ``sqrt(n) diag(r) x diag(c)`` (training §2.2).

    Rows whose norm is at most 1e-3 of the mean norm over all rows, zero rows included, become zero.
    """
    largest = jnp.max(jnp.abs(x))
    x = x / jnp.where(largest > 0, largest, 1.0)
    norms = jnp.sqrt(jnp.sum(jnp.square(x), axis=1))
    r = jnp.where(norms > _LIVE * jnp.mean(norms), 1.0, 0.0)
    c = jnp.ones(x.shape[1], jnp.float32)

    def rescale(scale: Array, r: Array, c: Array, axis: int) -> Array:
        norm = jnp.sqrt(jnp.sum(jnp.square(r[:, None] * x * c[None, :]), axis=axis))
        # A column of zeros stays zero under any scale, and 1/eps twice in a row is not a float32.
        return jnp.where(norm > 0, scale / (norm + _EPS), 0.0)

    def pair(_: Array, scales: tuple[Array, Array]) -> tuple[Array, Array]:
        r, c = scales
        r = rescale(r, r, c, 1)
        return r, rescale(c, r, c, 0)

    r, c = lax.fori_loop(0, _NORMALISATIONS // 2, pair, (r, c))
    r = rescale(r, r, c, 1)
    return x.shape[1] ** 0.5 * r[:, None] * x * c[None, :]


def sinkhorn() -> optax.GradientTransformation:
    """Balanced Nesterov momentum over a tree of tables ``[rows, width]`` float32 (training §2.1).

    The update is the direction to descend, to be multiplied by minus the learning rate: live rows have RMS 0.18. There
    is no decay.
    """

    def init(params: Any) -> SinkhornState:
        return SinkhornState(jax.tree.map(jnp.zeros_like, params))

    def update(gradients: Any, state: SinkhornState, params: Any = None) -> tuple[Any, SinkhornState]:
        def average(m: Array, g: Array) -> Array:
            return MOMENTUM * m + (1 - MOMENTUM) * g

        momentum = jax.tree.map(average, state.momentum, gradients)
        ahead = jax.tree.map(average, momentum, gradients)
        return jax.tree.map(lambda x: UPDATE_RMS * balance(x), ahead), SinkhornState(momentum)

    return optax.GradientTransformation(init, update)
