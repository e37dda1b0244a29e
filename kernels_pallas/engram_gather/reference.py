"""`engram_gather` in plain XLA; of a table in host memory by the host, which sends the rows' bytes alone."""

from typing import Any

import jax
from jax.experimental.compute_on import compute_on

from dsv41.quant import ENGRAM_ROW, unpack
from kernels_pallas.engram_gather.api import in_host_memory


def run(table: jax.Array, scales: jax.Array | None, ids: jax.Array, *, dtype: Any) -> jax.Array:
    """See `kernels_pallas.engram_gather.api.engram_gather`."""
    rows = _rows([table] if scales is None else [table, scales], ids)
    return (rows[0] if scales is None else unpack(rows[0], rows[1], ENGRAM_ROW)).astype(dtype)


def _rows(tables: list[jax.Array], ids: jax.Array) -> list[jax.Array]:
    if not in_host_memory(tables[0]):
        return [table[ids] for table in tables]
    there: Any = compute_on(compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    take = there(lambda ids, *tables: [table[ids] for table in tables])
    return jax.device_put(take(jax.device_put(ids, jax.memory.Space.Host), *tables), jax.memory.Space.Device)
