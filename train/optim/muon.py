"""Muon: momentum, orthogonalised by a hybrid Newton-Schulz iteration (training §1.2)."""

import math
from collections import defaultdict
from collections.abc import Sequence
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
    """``momentum``: the tree, shapes and dtypes of the weights."""

    momentum: Any


def orthogonalize(x: Float[Array, "*n a b"], products: Any = jnp.float32) -> Float[Array, "*n a b"]:
    """``U V^T`` of each matrix's singular value decomposition ``U S V^T``, nearly, in float32 (training §1.2).

    Singular values from 1e-3 of the Frobenius norm upwards land in [1.0000, 1.0007]; with factors of the products in
    bfloat16, as V4 has them, in [0.99, 1.01]. A zero matrix gives exactly zero.
    """
    dtype, wide = x.dtype, x.shape[-2] <= x.shape[-1]

    # Asked for more than their own precision, bfloat16 factors would be multiplied as float32.
    precision = lax.Precision.HIGHEST if products == jnp.float32 else None

    def dot(equation: str, a: Array, b: Array) -> Array:
        a, b = a.astype(products), b.astype(products)
        return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)

    x = x.astype(jnp.float32)
    # By the largest entry first: the squares of a tiny matrix would vanish.
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
    x = x / jnp.where(largest > 0, largest, 1.0)
    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
    x = x / jnp.where(norm > 0, norm, 1.0)

    def step(x: Array, coefficients: Array) -> tuple[Array, None]:
        a, b, c = coefficients
        # The smaller of X X^T and X^T X: both ways are the same polynomial in X.
        gram = dot("...ik,...jk->...ij", x, x) if wide else dot("...ki,...kj->...ij", x, x)
        mix = b * gram + c * dot("...ij,...jk->...ik", gram, gram)
        return a * x + (dot("...ij,...jk->...ik", mix, x) if wide else dot("...ij,...jk->...ik", x, mix)), None

    x, _ = lax.scan(step, x, jnp.asarray(_COEFFICIENTS))
    return x.astype(dtype)


def matrix_shape(spec: ParamSpec) -> tuple[int, int]:
    """Rows and columns of the matrices that a weight is made of: ``[out / blocks, in]``."""
    return spec.shape[-2] // spec.blocks, spec.shape[-1]


def _orthogonalize_all(specs: Sequence[ParamSpec], leaves: Sequence[Array], products: Any) -> list[Array]:
    """`orthogonalize` of every matrix of every leaf: one batch, hence one compiled loop, for each shape of matrix."""
    groups = defaultdict(list)
    for i, spec in enumerate(specs):
        groups[matrix_shape(spec)].append(i)
    results: dict[int, Array] = {}
    for shape, members in groups.items():
        batches = [leaves[i].reshape(-1, *shape) for i in members]
        done = orthogonalize(jnp.concatenate(batches), products)
        start = 0
        for i, batch in zip(members, batches, strict=True):
            # An offset that XLA cannot see makes the slices of equal leaves one kernel, which halves the compile time.
            offset = lax.optimization_barrier(jnp.int32(start))
            results[i] = lax.dynamic_slice_in_dim(done, offset, len(batch)).reshape(specs[i].shape)
            start += len(batch)
    return [results[i] for i in range(len(specs))]


def muon(specs: Any, products: Any = jnp.float32) -> optax.GradientTransformation:
    """Muon over a tree of float32 weights ``[*lead, out, in]``, described by a like tree of `ParamSpec` (training §1.2).

    A weight is ``lead * blocks`` matrices ``[out / blocks, in]``, each orthogonalised on its own. The update is the
    direction to subtract, learning rate aside: ``0.18 sqrt(max(rows, columns)) O``, of RMS 0.18, and 0.1 of the weight
    where the spec says decay. products: as for `orthogonalize`.
    """
    flat = spec_leaves(specs)

    def init(params: Any) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(gradients: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, state.momentum, gradients)
        ahead = jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum, gradients)
        matrices = iter(_orthogonalize_all(flat, jax.tree.leaves(ahead), products))

        def direction(spec: ParamSpec, weight: Array) -> Array:
            scaled = UPDATE_RMS * math.sqrt(max(matrix_shape(spec))) * next(matrices)
            return scaled + WEIGHT_DECAY * weight if spec.decay else scaled

        return map_specs(direction, specs, params), MuonState(momentum)

    return optax.GradientTransformation(init, update)
