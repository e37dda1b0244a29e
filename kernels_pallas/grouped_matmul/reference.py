"""`grouped_matmul` in plain XLA: groups padded to whole blocks, each of which meets one weight in a batched product."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv41.hf.stored import StoredWeight
from dsv41.numerics import swiglu


def values(weight: Any, dtype: Any) -> jax.Array:
    """A weight in ``dtype``, dequantised where it is stored."""
    return (weight.dequantize() if isinstance(weight, StoredWeight) else weight).astype(dtype)


def run(
    x: jax.Array, weights: tuple[Any, ...], sizes: jax.Array, scale: jax.Array | None = None, *, limit: float = 0.0
) -> jax.Array:
    """See `kernels_pallas.grouped_matmul.api`: the product with one weight, or with two the scaled SwiGLU of both.

    Static shapes for any sizes: at most one block a group is wasted.
    """
    rows, groups = x.shape[0], sizes.shape[0]
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    block = 8
    while block < 64 and block * groups * 2 <= rows:
        block *= 2
    blocks = -(-rows // block) + groups
    # As one masked sum each: a cumulative sum is a kernel a doubling.
    earlier = jnp.tri(groups, dtype=jnp.int32)
    ends = jnp.sum(earlier * -(-sizes // block)[None], axis=1)  # in blocks
    row_ends = jnp.sum(earlier * sizes[None], axis=1)
    begin, first = (ends + (-sizes // block)) * block, row_ends - sizes
    numbers = jnp.arange(rows, dtype=jnp.int32)
    own = jnp.sum((numbers[:, None] >= row_ends[None]).astype(jnp.int32), axis=1)
    group = jnp.minimum(own, groups - 1)
    slot = jnp.where(own < groups, begin[group] + numbers - first[group], blocks * block)

    def spread(a: jax.Array) -> jax.Array:
        """Rows in their blocks, zeros between groups."""
        padded = jnp.zeros((blocks * block, *a.shape[1:]), a.dtype).at[slot].set(a, mode="drop")
        return padded.reshape(blocks, block, *a.shape[1:])

    owner = jnp.sum((jnp.arange(blocks, dtype=jnp.int32)[:, None] >= ends[None]).astype(jnp.int32), axis=1)
    owner = jnp.minimum(owner, groups - 1)
    spread_x = spread(x)
    products = [jnp.einsum("nbi,noi->nbo", spread_x, values(w, x.dtype)[owner], precision=precision) for w in weights]
    out = products[0]
    if scale is not None:
        out = (swiglu(products[0], products[1], limit) * spread(scale)[..., None]).astype(x.dtype)
    out = out.reshape(blocks * block, -1)
    return jnp.concatenate([out, jnp.zeros((1, out.shape[1]), out.dtype)])[slot]
