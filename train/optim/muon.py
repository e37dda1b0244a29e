"""Muon: momentum, orthogonalised by a hybrid Newton-Schulz iteration (training §1.2; arXiv 2512.24880 eq. 28)."""

import math
from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float

from dsv41.params import ParamSpec, map_specs, spec_leaves

MOMENTUM = 0.95
UPDATE_RMS = 0.18
WEIGHT_DECAY = 0.1
# Eight steps that pull every singular value towards 1, two that settle on it: p(1) = 1, p'(1) = 0.
_COEFFICIENTS = np.array([(3.4445, -4.7750, 2.0315)] * 8 + [(2.0, -1.5, 0.5)] * 2, np.float32)


class MuonState(NamedTuple):
    """``momentum``: float32, the tree and shapes of the weights."""

    momentum: Any


def orthogonalize(x: Float[Array, "*n a b"]) -> Float[Array, "*n a b"]:
    """About ``U V^T`` of each matrix's ``U S V^T``, in float32 (training §1.2).

    Singular values of 1e-3 of the Frobenius norm or more land in [1.0000, 1.0007]. A zero matrix gives exactly zero.
    """
    dtype = x.dtype
    x = x.astype(jnp.float32)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else jnp.swapaxes(x, -1, -2)
    # Scaled by the largest entry first: the squares of a tiny matrix would vanish.
    for size in (
        lambda m: jnp.max(jnp.abs(m), axis=(-2, -1), keepdims=True),
        lambda m: jnp.sqrt(jnp.sum(jnp.square(m), axis=(-2, -1), keepdims=True)),
    ):
        norm = size(x)
        x = x / jnp.where(norm > 0, norm, 1.0)

    def dot(equation: str, a: Array, b: Array) -> Array:
        return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST)

    def step(x: Array, coefficients: Array) -> tuple[Array, None]:
        a, b, c = coefficients
        gram = dot("...ik,...jk->...ij", x, x)
        return a * x + dot("...ij,...jk->...ik", b * gram + c * dot("...ij,...jk->...ik", gram, gram), x), None

    x, _ = lax.scan(step, x, jnp.asarray(_COEFFICIENTS))
    return (x if wide else jnp.swapaxes(x, -1, -2)).astype(dtype)


def matrix_shape(spec: ParamSpec) -> tuple[int, int]:
    """Rows and columns of the matrices that a weight consists of: ``[out / blocks, in]``."""
    return spec.shape[-2] // spec.blocks, spec.shape[-1]


def _orthogonalize_all(specs: list[ParamSpec], leaves: list[Array]) -> list[Array]:
    """`orthogonalize` of every matrix of every leaf, one batch for each shape, so that few loops are compiled."""
    groups = defaultdict(list)
    for i, spec in enumerate(specs):
        groups[tuple(sorted(matrix_shape(spec)))].append(i)
    results: list[Any] = [None] * len(specs)
    for indices in groups.values():
        batch = []
        for i in indices:
            rows, columns = matrix_shape(specs[i])
            matrices = leaves[i].reshape(-1, rows, columns)
            batch.append(matrices if rows <= columns else jnp.swapaxes(matrices, -1, -2))
        ends = np.cumsum([len(matrices) for matrices in batch]).tolist()
        for i, done in zip(indices, jnp.split(orthogonalize(jnp.concatenate(batch)), ends[:-1]), strict=True):
            rows, columns = matrix_shape(specs[i])
            results[i] = (done if rows <= columns else jnp.swapaxes(done, -1, -2)).reshape(specs[i].shape)
    return results


def muon(specs: Any) -> optax.GradientTransformation:
    """Muon over a tree of weights ``[*lead, out, in]`` float32 described by a like tree of `ParamSpec` (training §1.2).

    A weight is ``lead * blocks`` matrices ``[out / blocks, in]``, each orthogonalised on its own. The update is the
    direction to descend, to be multiplied by minus the learning rate: ``0.18 sqrt(max(rows, columns)) O`` of RMS 0.18,
    plus 0.1 of the weight where the spec says decay.
    """
    flat = spec_leaves(specs)

    def init(params: Any) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(gradients: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, state.momentum, gradients)
        ahead = jax.tree.leaves(jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum, gradients))
        done = iter(_orthogonalize_all(flat, ahead))

        def direction(spec: ParamSpec, weight: Array) -> Array:
            scaled = UPDATE_RMS * math.sqrt(max(matrix_shape(spec))) * next(done)
            return scaled + WEIGHT_DECAY * weight if spec.decay else scaled

        return map_specs(direction, specs, params), MuonState(momentum)

    return optax.GradientTransformation(init, update)
