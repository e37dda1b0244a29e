"""`index_topk` in plain XLA: every score in float32, `lax.top_k`."""

from typing import Any

import jax
import jax.numpy as jnp

from dsv41 import indexer


def run(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    first: jax.Array,
    count: jax.Array,
    table: jax.Array | None = None,
    pool: jax.Array | None = None,
    *,
    k: int,
    keep: int = 0,
    block: int = 8,
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array | None]:
    """See `kernels_pallas.index_topk.api.index_topk`. dtype: of the operands of the product with the keys."""
    if table is not None:
        # An absent page may be read, as nothing in it is visible.
        keys = keys[jnp.maximum(table, 0)].reshape(table.shape[0], -1, keys.shape[-1])
    ids, blocks, _ = indexer.selection(q, weights, keys, first, count, pool, k=k, keep=keep, block=block, dtype=dtype)
    return ids, blocks
