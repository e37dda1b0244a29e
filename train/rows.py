"""Gradients of the rows of an Engram table that a batch reads, back to the devices that hold them (training §2.6)."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dsv41.params import ParamSpec
from dsv41.sharding import AXES, cut_axes, index, size
from train.optim import Rows


def returned_rows(
    spec: ParamSpec, ids: Int[Array, " u"], values: Float[Array, "u W"], table: Float[Array, "R W"]
) -> Rows | Array:
    """The gradient of a table by what each device has of its rows: `Rows` without a mesh, else of the part ``table``.

    Devices that hold copies of the part have each their share.
    """
    if size(*AXES) == 1:
        return Rows(ids, values)
    axes = cut_axes(spec)
    if axes:
        ids, values = (lax.all_gather(a, axes, tiled=True) for a in (ids, values))
        ids = ids - index(axes) * table.shape[0]
    return jnp.zeros_like(table).at[jnp.where(ids < 0, table.shape[0], ids)].add(values, mode="drop")
