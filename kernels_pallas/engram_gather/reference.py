"""`engram_gather` in plain XLA."""

from typing import Any

import jax

from dsv41.quant import ENGRAM_ROW, unpack


def run(table: jax.Array, scales: jax.Array | None, ids: jax.Array, *, dtype: Any) -> jax.Array:
    """See `kernels_pallas.engram_gather.api.engram_gather`."""
    return (table[ids] if scales is None else unpack(table[ids], scales[ids], ENGRAM_ROW)).astype(dtype)
