"""`sparse_attention` of float rows for Hopper, forward and backward: the arrays that the kernels take and give."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.sparse_attention.backward import backward
from kernels_pallas.sparse_attention.forward import forward
from kernels_pallas.sparse_attention.gather import tile_ids
from kernels_pallas.sparse_attention.mass import mass as heads_mass
from kernels_pallas.sparse_attention.producer import HEADS
from kernels_pallas.sparse_attention.row_sums import segments, sums
from kernels_pallas.sparse_attention.unpack import KEYS


@dataclass(frozen=True)
class Device:
    """ctas: of the grids, one a multiprocessor. interpret: parameters of Pallas' interpreter."""

    ctas: int = 132
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
    return out, lse, _mass(*jax.lax.stop_gradient((q, entries)), entry_ids, *jax.lax.stop_gradient((lse, sink)), device)


def _padded(width: int) -> int:
    """Channels of a tile: a power of two from 128, so that two warpgroups have half of it each."""
    return max(128, 1 << (width - 1).bit_length())


def _wide(rows: jax.Array) -> jax.Array:
    width = rows.shape[-1]
    return jnp.pad(rows, ((0, 0),) * (rows.ndim - 1) + ((0, _padded(width) - width),)) if width != _padded(width) else rows


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
        g_sink = -jnp.sum(jnp.where(some, jnp.exp(sink.astype(jnp.float32)[None] - whole) * inner, 0.0), axis=0).astype(
            sink.dtype
        )
    jobs, pools, ids, entry_tiles = _arguments(q, entries, entry_ids, window, window_ids)
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
    blocks, slots = jobs.shape[0] // q.shape[0], parts.shape[1]
    flat = parts.reshape(-1, parts.shape[-1])

    def pool_gradient(pool: jax.Array, first: int, last: int) -> jax.Array:
        if first == last:
            return jnp.zeros_like(pool)
        places = jnp.repeat(ids.reshape(q.shape[0], -1)[:, first:last], blocks, axis=0)
        numbers = slots * jnp.arange(places.shape[0], dtype=jnp.int32)[:, None] + jnp.arange(first, last, dtype=jnp.int32)[None]
        order, bounds = segments(places.reshape(-1), numbers.reshape(-1), pool.shape[0])
        return sums(flat, order, bounds, pool.dtype, device.interpret)[:, : pool.shape[1]]

    split = entry_tiles * KEYS
    none = [np.zeros(a.shape, jax.dtypes.float0) for a in (entry_ids, window_ids)]
    g_entries, g_window = pool_gradient(entries, 0, split), pool_gradient(window, split, slots)
    return _whole(g_q, q), g_entries, none[0], g_window, none[1], g_sink


_attend: Any = jax.custom_vjp(_primal, nondiff_argnums=(6,))
_attend.defvjp(_forward, _backward)
