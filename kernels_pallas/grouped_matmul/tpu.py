"""`grouped_matmul` on TPU: jax's own grouped product (megablox), forward and both gradients; SwiGLU in XLA."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm

from dsv41.hf.stored import StoredWeight
from dsv41.numerics import swiglu

LANES = 128
_ROWS, _SIDE = 128, 1024  # of a tile, at most: the rows, and the weight's sides


def refusal(
    x: Any, weights: tuple[Any, ...], sizes: Any, scale: Any = None, *, limit: float = 0.0, interpret: bool = False
) -> str | None:
    """Why these shapes or dtypes cannot run here."""
    groups, width, depth = weights[0].shape
    if isinstance(weights[0], StoredWeight):
        return "weights are stored, allowed are arrays"
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"x is {x.dtype}, allowed are bfloat16 and float32"
    if width % LANES or depth % LANES:
        return f"a weight is {width} x {depth}, allowed are multiples of {LANES}"
    return "there are no rows or no groups" if x.shape[0] == 0 or groups == 0 else None


def run(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    sizes: jax.Array,
    scale: jax.Array | None = None,
    *,
    limit: float = 0.0,
    interpret: bool = False,
) -> jax.Array:
    """See `kernels_pallas.grouped_matmul.api`. interpret: whether to run in Pallas' interpreter."""
    rows = x.shape[0]
    # The kernel writes no row that is in no group, of the product or of its gradient.
    named = (jnp.arange(rows, dtype=jnp.int32) < jnp.sum(sizes))[:, None]
    whole = jnp.pad(jnp.where(named, x, 0), ((0, -rows % _ROWS), (0, 0)))

    def product(w: jax.Array) -> jax.Array:
        _, width, depth = w.shape
        tiling = (_ROWS, min(depth, _SIDE), min(width, _SIDE))
        out = gmm(whole, w.astype(x.dtype), sizes, x.dtype, tiling, None, None, True, interpret)
        return jnp.where(named, out[:rows], 0)

    products = [product(w) for w in weights]
    if scale is None:
        return products[0]
    return (swiglu(products[0], products[1], limit) * scale[:, None]).astype(x.dtype)
