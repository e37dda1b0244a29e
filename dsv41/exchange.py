"""Rows to the devices along mesh axes that they are meant for, as many as there are, in two forms.

`lax.ragged_all_to_all` moves those rows and no others; XLA's CPU backend has none. The dense twin pads every pair of devices to
the most rows that it may have and moves the padding too. Both put the rows in the same places, bit for bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from dsv41.sharding import index

Axes = str | tuple[str, ...]
Form = Literal["ragged", "dense"]
_form: ContextVar[Form | None] = ContextVar("form", default=None)


def form() -> Form:
    """Which form calls traced here take: what `using` says, else dense on CPU and ragged elsewhere."""
    return _form.get() or ("dense" if jax.default_backend() == "cpu" else "ragged")


@contextmanager
def using(name: Form) -> Iterator[None]:
    """The form of calls traced inside, such as those lowered for another platform than this one."""
    before = _form.set(name)
    try:
        yield
    finally:
        _form.reset(before)


def _starts(sizes: Array) -> Array:
    return jnp.cumsum(sizes, axis=0) - sizes


def _ragged(rows: Array, sizes: Array, count: int, axes: Axes) -> Array:
    me = index(axes)
    out = jnp.zeros((count, *rows.shape[1:]), rows.dtype)
    # Offsets into the buffers of the receivers: what devices before this one send to each.
    places = _starts(sizes)[me]
    return lax.ragged_all_to_all(rows, out, _starts(sizes[me]), sizes[me], places, sizes[:, me], axis_name=axes)


def _dense(rows: Array, sizes: Array, most: int, count: int, axes: Axes) -> Array:
    me = index(axes)
    slot = jnp.arange(most, dtype=jnp.int32)[None]
    at = _starts(sizes[me])[:, None] + slot
    padded = rows.at[jnp.where(slot < sizes[me][:, None], at, rows.shape[0])].get(mode="fill", fill_value=0)
    got = lax.all_to_all(padded, axes, 0, 0, tiled=True)
    arrived = sizes[:, me]
    ends, number = jnp.cumsum(arrived), jnp.arange(count, dtype=jnp.int32)
    source = jnp.searchsorted(ends, number, side="right").astype(jnp.int32)
    inside = number - _starts(arrived)[jnp.minimum(source, arrived.size - 1)]
    flat = jnp.where(source < arrived.size, source * most + inside, arrived.size * most)
    return got.reshape(-1, *rows.shape[1:]).at[flat].get(mode="fill", fill_value=0)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def exchange(rows: Array, sizes: Int[Array, "P P"], most: int, count: int, axes: Axes = "expert") -> Array:
    """Rows ``[R, ...]``, ordered by the device that they are for, to those devices: ``[count, ...]``, ordered by the one they
    come from, zeros behind them.

    sizes: rows from each device to each, the same everywhere; rows behind those stay. most: no pair has more, which only
    the dense form needs. axes: of the mesh, along which the devices are numbered. The gradient goes the same way back.
    """
    return _ragged(rows, sizes, count, axes) if form() == "ragged" else _dense(rows, sizes, most, count, axes)


def _forward(rows: Array, sizes: Array, most: int, count: int, axes: Axes) -> tuple[Array, Any]:
    return exchange(rows, sizes, most, count, axes), (sizes, rows.shape[0])


def _backward(most: int, count: int, axes: Axes, kept: Any, g: Array) -> tuple:
    sizes, rows = kept
    return exchange(g, sizes.T, most, rows, axes), None


exchange.defvjp(_forward, _backward)
