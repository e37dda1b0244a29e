"""Rows of an Engram table from the devices that hold them, and their gradients back (training §2.6).

Numbers are sorted by owner and go to it alone; it answers with the rows.
"""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from dsv41.exchange import exchange
from dsv41.hf.stored import StoredWeight
from dsv41.moe import grouped
from dsv41.params import ParamSpec
from dsv41.sharding import cut_axes, size
from kernels_pallas.engram_gather.api import engram_gather


def parts(table: Any) -> tuple[Any, Any]:
    """Codes and scales of a `StoredWeight`; of a table of floats itself and None."""
    return (table.codes, table.scales) if isinstance(table, StoredWeight) else (table, None)


def fetch(table: Any, rows: Int[Array, "*s"], dtype: Any) -> Float[Array, "*s W"]:
    """Rows of a table of floats or of a `StoredWeight`, in ``dtype``."""
    return engram_gather(*parts(table), rows, dtype)


@struct.dataclass
class _Asked:
    """own int32 ``[n u]``: numbers in this device's part that were asked of it, zeros behind them; order, place: of this device's
    numbers by owner, as `grouped` gives them; pairs ``[n, n]``: how many each device asks of each."""

    own: Array
    order: Array
    place: Array
    pairs: Array


def _ask(axes: tuple[str, ...], held: int, ids: Int[Array, " u"]) -> _Asked:
    shards = size(*axes)
    # Numbers past the end are nobody's.
    order, place, sizes = grouped(jnp.minimum(ids // held, shards), shards)
    pairs: Any = lax.all_gather(sizes, axes)
    own = exchange(ids[order] % held, pairs, ids.size, shards * ids.size, axes)
    return _Asked(own, order, place, pairs)


def fetched_rows(spec: ParamSpec, table: Any, ids: Int[Array, " u"], dtype: Any = None) -> Float[Array, "u W"]:
    """Rows ``ids`` of a table ``[R, W]``, zeros for ids past its end, in ``dtype`` or the table's.

    table: this device's part of it, of floats or, on a mesh, a `StoredWeight`, for which ``dtype`` is given.
    """
    axes = cut_axes(spec)
    if not axes:
        return table.at[ids].get(mode="fill", fill_value=0)
    asked = _ask(axes, table.shape[0], ids)
    stored = isinstance(table, StoredWeight)
    rows = fetch(table, asked.own, dtype) if stored else table[asked.own].astype(dtype or table.dtype)
    back: Any = exchange(rows, asked.pairs.T, ids.size, ids.size, axes)
    return back[asked.place]


def returned_rows(spec: ParamSpec, ids: Int[Array, " u"], values: Float[Array, "u W"], table: Float[Array, "R W"]) -> Array:
    """The gradient of this device's part ``table`` by what each device has of its rows.

    Devices that hold copies of the part have each their share.
    """
    axes = cut_axes(spec)
    if axes:
        asked = _ask(axes, table.shape[0], ids)
        values = exchange(values[asked.order], asked.pairs, ids.size, asked.own.size, axes)
        ids = asked.own  # Behind what was asked, zeros are added to row 0.
    return jnp.zeros_like(table).at[ids].add(values, mode="drop")
