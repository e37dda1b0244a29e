"""`sparse_attention` of float rows for Hopper, forward and backward: the arrays that the kernels take and give."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas.sparse_attention.backward import backward
from kernels_pallas.sparse_attention.forward import forward
from kernels_pallas.sparse_attention.gather import tile_ids
from kernels_pallas.sparse_attention.mass import mass as heads_mass
from kernels_pallas.sparse_attention.producer import HEADS
from kernels_pallas.sparse_attention.row_sums import segments, sums
from kernels_pallas.sparse_attention.unpack import KEYS, padded_width


@dataclass(frozen=True)
class Device:
    """ctas: of the grids, one a multiprocessor. parts_bytes: memory for the rows' parts, of some queries after others.
    interpret: parameters of Pallas' interpreter."""

    ctas: int = 132
    parts_bytes: int = 4 << 30
    interpret: Any = None


def run(
    q: jax.Array,
    entries: jax.Array,
    entry_ids: jax.Array,
    window: jax.Array,
    window_ids: jax.Array,
    sink: jax.Array | None,
    mass: bool = False,
    device: Device = Device(),
) -> tuple[jax.Array, ...]:
    """See `kernels_pallas.sparse_attention.api.sparse_attention`. bfloat16 products of bfloat16 rows."""
    out, lse = _attend(q, entries, entry_ids, window, window_ids, sink, device)
    if not mass:
        return out, lse
    return out, lse, _mass(*lax.stop_gradient((q, entries)), entry_ids, *lax.stop_gradient((lse, sink)), device)


def _wide(rows: jax.Array) -> jax.Array:
    extra = padded_width(rows.shape[-1]) - rows.shape[-1]
    return jnp.pad(rows, ((0, 0),) * (rows.ndim - 1) + ((0, extra),)) if extra else rows


def _jobs(a: jax.Array, fill: float = 0.0) -> jax.Array:
    """``[N, H, ...]`` as ``[N * blocks, 64, ...]``: a query's blocks of heads side by side, ``fill`` behind the last head."""
    extra = -a.shape[1] % HEADS
    a = jnp.pad(a, ((0, 0), (0, extra)) + ((0, 0),) * (a.ndim - 2), constant_values=fill) if extra else a
    return a.reshape(-1, HEADS, *a.shape[2:])


def _whole(a: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of `_jobs` and `_wide`, for queries ``like``."""
    queries, heads, width = like.shape
    a = a.reshape(queries, -1, *a.shape[2:])[:, :heads]
    return a[..., :width] if a.ndim == 3 else a


def _arguments(
    q: jax.Array, entries: jax.Array, entry_ids: jax.Array, window: jax.Array, window_ids: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], jax.Array, int]:
    """Queries, pools, ids and tiles of entries, as the kernels take them."""
    lists = tile_ids(entry_ids), tile_ids(window_ids)
    return (
        _jobs(_wide(q.astype(jnp.bfloat16))),
        (_wide(entries), _wide(window)),
        jnp.concatenate(lists, axis=1),
        lists[0].shape[1],
    )


def _with_sink(lse: jax.Array, sink: jax.Array | None) -> jax.Array:
    """Logarithm of a query's whole denominator; 0 where it has no keys."""
    some = jnp.isfinite(lse)
    known = jnp.where(some, lse, 0.0)
    return known if sink is None else jnp.where(some, jnp.logaddexp(known, sink.astype(jnp.float32)[None]), 0.0)


def _mass(
    q: jax.Array, entries: jax.Array, entry_ids: jax.Array, lse: jax.Array, sink: jax.Array | None, device: Device
) -> jax.Array:
    queries, count = entry_ids.shape
    if count == 0:
        return jnp.zeros((queries, 0), jnp.float32)
    ids = tile_ids(entry_ids)
    whole = _jobs(_with_sink(lse, sink), jnp.inf)
    parts = heads_mass(
        _jobs(_wide(q.astype(jnp.bfloat16))),
        _wide(entries),
        ids,
        whole,
        scale=q.shape[-1] ** -0.5,
        ctas=device.ctas,
        interpret=device.interpret,
    )
    return jnp.sum(parts.reshape(queries, -1, ids.shape[1] * KEYS), axis=1)[:, :count]


def _primal(
    q: jax.Array,
    entries: jax.Array,
    entry_ids: jax.Array,
    window: jax.Array,
    window_ids: jax.Array,
    sink: jax.Array | None,
    device: Device,
) -> tuple[jax.Array, jax.Array]:
    sinks = None if sink is None else _jobs(sink.astype(jnp.float32)[None])
    args = _arguments(q, entries, entry_ids, window, window_ids)
    out, lse = forward(*args, sinks, scale=q.shape[-1] ** -0.5, out_dtype=q.dtype, ctas=device.ctas, interpret=device.interpret)
    return _whole(out, q), _whole(lse, q)


def _forward(q: Any, entries: Any, entry_ids: Any, window: Any, window_ids: Any, sink: Any, device: Device) -> tuple:
    out, lse = _primal(q, entries, entry_ids, window, window_ids, sink, device)
    return (out, lse), (q, entries, entry_ids, window, window_ids, sink, out, lse)


def _backward(device: Device, kept: tuple, cotangents: tuple) -> tuple:
    q, entries, entry_ids, window, window_ids, sink, out, lse = kept
    g, g_lse = cotangents
    some, whole = jnp.isfinite(lse), _with_sink(lse, sink)
    inner = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    # The log-sum-exp leaves the sink out: its probabilities are these times exp(whole - lse).
    shift = jnp.where(some, g_lse * jnp.exp(jnp.minimum(whole - lse, 80.0)) - inner, 0.0)
    g_sink = None
    if sink is not None:
        below = jnp.exp(sink.astype(jnp.float32)[None] - whole)
        g_sink = -jnp.sum(jnp.where(some, below * inner, 0.0), axis=0).astype(sink.dtype)
    slots = sum(-(-a.shape[1] // KEYS) * KEYS for a in (entry_ids, window_ids))
    parts_bytes = len(q) * -(-q.shape[1] // HEADS) * slots * 2 * padded_width(q.shape[2])
    chunks = -(-parts_bytes // device.parts_bytes)
    size = -(-len(q) // chunks)
    heads, lists = (q, g, whole, shift), (entry_ids, window_ids)
    if chunks == 1:
        g_q, *g_rows = _gradients(heads, lists, entries, window, device, entries.dtype)
    else:

        def split(a: jax.Array, fill: int) -> jax.Array:
            a = jnp.pad(a, ((0, chunks * size - len(a)),) + ((0, 0),) * (a.ndim - 1), constant_values=fill)
            return a.reshape(chunks, size, *a.shape[1:])

        def chunk(sums: list[jax.Array], args: tuple) -> tuple[list[jax.Array], jax.Array]:
            g_q, *g_rows = _gradients(args[0], args[1], entries, window, device, jnp.float32)
            return [a + b for a, b in zip(sums, g_rows, strict=True)], g_q

        each = tuple(split(a, 0) for a in heads), tuple(split(a, -1) for a in lists)
        g_rows, g_q = lax.scan(chunk, [jnp.zeros(a.shape, jnp.float32) for a in (entries, window)], each)
        g_q = g_q.reshape(-1, *q.shape[1:])[: len(q)]
    g_entries, g_window = (a.astype(entries.dtype) for a in g_rows)
    none = [np.zeros(a.shape, jax.dtypes.float0) for a in lists]
    return g_q, g_entries, none[0], g_window, none[1], g_sink


def _gradients(
    heads: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    lists: tuple[jax.Array, jax.Array],
    entries: jax.Array,
    window: jax.Array,
    device: Device,
    dtype: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of some queries, and what they add to those of entries and window, in ``dtype``.

    heads: queries, their outputs' cotangents, logarithms of denominators, what is added to the probabilities' gradients.
    """
    q, g, whole, shift = heads
    jobs, pools, ids, entry_tiles = _arguments(q, entries, lists[0], window, lists[1])
    g_q, parts = backward(
        jobs,
        _jobs(_wide(g.astype(jnp.bfloat16))),
        pools,
        ids,
        entry_tiles,
        _jobs(whole),
        _jobs(shift),
        scale=q.shape[-1] ** -0.5,
        out_dtype=q.dtype,
        ctas=device.ctas,
        interpret=device.interpret,
    )
    blocks, slots = jobs.shape[0] // len(q), parts.shape[1]
    flat = parts.reshape(-1, parts.shape[-1])

    def rows(pool: jax.Array, first: int, last: int) -> jax.Array:
        if first == last:
            return jnp.zeros(pool.shape, dtype)
        places = jnp.repeat(ids.reshape(len(q), -1)[:, first:last], blocks, axis=0)
        numbers = slots * jnp.arange(len(places), dtype=jnp.int32)[:, None] + jnp.arange(first, last, dtype=jnp.int32)[None]
        ordered = segments(places.reshape(-1), numbers.reshape(-1), len(pool))
        return sums(flat, *ordered, dtype, device.interpret)[:, : pool.shape[1]]

    split = entry_tiles * KEYS
    return _whole(g_q, q), rows(entries, 0, split), rows(window, split, slots)


_attend: Any = jax.custom_vjp(_primal, nondiff_argnums=(6,))
_attend.defvjp(_forward, _backward)
