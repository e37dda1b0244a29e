"""`quantize` in plain XLA: the codecs of `dsv41.quant`, then a scatter."""

from typing import Any

import jax
import jax.numpy as jnp

from dsv41.quant import Format, pack, pack_rows


def run(x: jax.Array, pool: jax.Array | None, slots: jax.Array | None, *, fmt: Format, apart: bool = False) -> Any:
    """See `kernels_pallas.quantize.api`: rows, with ``apart`` elements and scales, with a ``pool`` the pool."""
    if apart:
        return pack(x, fmt)
    rows = pack_rows(x, fmt)
    if pool is None or slots is None:
        return rows
    batch = jnp.arange(pool.shape[0], dtype=jnp.int32)[:, None]
    # A negative index would count from the end.
    return pool.at[batch, jnp.where(slots < 0, pool.shape[1], slots)].set(rows, mode="drop")
