"""The cache of a batch of requests, and the attention site of a chunk of new tokens behind it (serving §1).

What grows with the context is main KV and index keys, at the kv sources alone; windows, pair tails, n-gram history and
lengths do not. A slot that a query cannot reach (past the length, older than the window, an empty ring slot) may hold
anything. Rows are stored as bytes where the policy's quantiser is on, else in the compute dtype.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Float32, Int

from dsv41 import attention, compress
from dsv41.config import ModelConfig
from dsv41.errors import UserError
from dsv41.layout import Layout
from dsv41.numerics import Policy, Taps
from dsv41.pages import Pages, Rows
from dsv41.params import AttentionParams
from dsv41.plan import LayerPlan, layer_plans
from dsv41.quant import INDEX_KEY, MAIN_KV, WINDOW_KV, Format, row_values
from dsv41.site import Shared, choose, publish, read, visible, window_rows
from kernels_pallas import registry
from kernels_pallas.quantize.api import quantize_append, quantize_rows
from kernels_pallas.sparse_attention.api import sparse_attention


@struct.dataclass
class SourceCache:
    """What one kv source keeps of each request, until the request ends.

    main_kv ``[B, S, row]``, index_k ``[B, S, row]``, or pages of them: entry g, of tokens ``g r .. g r + r - 1``, is
    row g; written once, when its group is complete, and read by every layer of the source. tail_value, tail_score float32
    ``[B, r - 1, K]``: the compressor's projections of the last r - 1 tokens, oldest first, which the next token's group may
    need; float32 because the group's softmax is; None at ratio 1.
    """

    main_kv: Rows
    index_k: Rows
    tail_value: jax.Array | None
    tail_score: jax.Array | None


@struct.dataclass
class Cache:
    """The state of B requests between chunks.

    length int32 ``[B]``: tokens consumed. history int32 ``[B, n - 1]``: folded ids of the last tokens, oldest first, for
    Engram's look-back; -1 where the look-back ends (image tokens). windows: one ring ``[B, W, row]`` a layer, the row of
    position p in slot p mod W, so that a new row takes the place of the one that leaves the window. sources: one
    `SourceCache` a kv source. drafts: one ring a draft stage of the rows that it makes of these tokens, where
    there is a drafter.
    """

    length: jax.Array
    history: jax.Array
    windows: tuple[jax.Array, ...]
    sources: tuple[SourceCache, ...]
    drafts: tuple[jax.Array, ...] = ()


@struct.dataclass
class Deferred:
    """A window ring ``[B, W, row]`` with a chunk's rows ``[B, T, row]`` beside it, until it is known which of them stay."""

    ring: jax.Array
    rows: jax.Array


def stored(x: Float[Array, "*s n"], fmt: Format, on: bool) -> Array:
    """Rows as the cache holds them: bytes of ``fmt``, or ``x`` itself."""
    return quantize_rows(x, fmt) if on else x


def init_cache(config: ModelConfig, policy: Policy, batch: int, capacity: int, drafts: bool = False) -> Cache:
    """An empty cache for requests of up to ``capacity`` tokens; raises `UserError` for an impossible size.

    capacity: tokens, a multiple of every compression ratio. drafts: with rings for the draft stages.
    """
    plans = layer_plans(config)
    step = math.lcm(*(plan.ratio for plan in plans if plan.owns_kv))
    if capacity < 1 or capacity % step:
        near = max(1, round(capacity / step)) * step
        raise UserError(f"capacity: found {capacity}, allowed is a positive multiple of {step}; nearest is {near}")

    def rows(count: int, width: int, fmt: Format, on: bool) -> jax.Array:
        shape = (batch, count, fmt.row_bytes(width) if on else width)
        return jnp.zeros(shape, jnp.uint8 if on else policy.compute_dtype)

    def ring() -> jax.Array:
        return rows(config.sliding_window, config.head_dim, WINDOW_KV, policy.quantize_window)

    def source(plan: LayerPlan) -> SourceCache:
        count = capacity // plan.ratio
        # Two arrays: a donated buffer must not stand in a pytree twice.
        tail = lambda: jnp.zeros((batch, plan.ratio - 1, config.head_dim), jnp.float32) if plan.ratio > 1 else None  # noqa: E731
        return SourceCache(
            rows(count, config.head_dim, MAIN_KV, policy.quantize_main_kv),
            rows(count, config.index_head_dim, INDEX_KEY, policy.quantize_index),
            tail(),
            tail(),
        )

    return Cache(
        jnp.zeros((batch,), jnp.int32),
        jnp.full((batch, config.engram_max_ngram_size - 1 if config.engram_layer_ids else 0), -1, jnp.int32),
        tuple(ring() for _ in plans),
        tuple(source(plan) for plan in plans if plan.owns_kv),
        tuple(ring() for _ in range(config.num_nextn_predict_layers if drafts else 0)),
    )


def capacity(cache: Cache, config: ModelConfig) -> int | None:
    """Tokens a request may have; None where nothing grows."""
    plans = [plan for plan in layer_plans(config) if plan.owns_kv]
    return min((s.main_kv.shape[1] * p.ratio for s, p in zip(cache.sources, plans, strict=True)), default=None)


def take(rows: Array, index: Int[Array, "B n"]) -> Array:
    """``rows[b, index[b, i]]`` of ``[B, m, ...]``; indices past the end read the last row."""
    index = jnp.clip(index, 0, rows.shape[1] - 1)
    return jnp.take_along_axis(rows, index.reshape(*index.shape, *(1,) * (rows.ndim - 2)), axis=1)


def put(rows: Array, new: Array, slots: Int[Array, "B n"]) -> Array:
    """``rows`` with ``new[b, i]`` in slot ``slots[b, i]``; a slot past the end is dropped."""
    batch = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    return rows.at[batch, slots].set(new, mode="drop")


def append(rows: Rows, x: Float[Array, "B n K"], slots: Int[Array, "B n"], fmt: Format, on: bool) -> Rows:
    """`put` of `stored` values, in pages too."""
    if isinstance(rows, Pages):
        one = lambda a: a.reshape(1, -1, *a.shape[2:])  # noqa: E731
        pool = append(rows.flat()[None], one(x), one(rows.places(slots)), fmt, on)
        return replace(rows, pool=jnp.reshape(pool, rows.pool.shape))
    return quantize_append(rows, x, slots, fmt) if on else put(rows, x, slots)


def _span(start: Int[Array, " B"], count: int) -> Int[Array, "B n"]:
    return start[:, None] + jnp.arange(count, dtype=jnp.int32)[None]


def chunk_layout(length: Int[Array, " B"], count: Int[Array, " B"], time: int, image: Array | None) -> Layout:
    """A chunk of ``count`` tokens a row, padded to ``time``, at positions from ``length`` on."""
    live = _span(jnp.zeros_like(count), time) < count[:, None]
    image = jnp.zeros(live.shape, bool) if image is None else image & live
    positions = _span(length, time)
    return Layout(live.astype(jnp.int32), jnp.zeros_like(positions), positions, live, image)


def ring_positions(length: Int[Array, " B"], window: int) -> Int[Array, "B W"]:
    """Position of the row in each ring slot after ``length`` tokens; negative where there is none yet."""
    last = length[:, None] - 1
    return last - (last - jnp.arange(window, dtype=jnp.int32)[None]) % window


def ring_slots(length: Int[Array, " B"], count: Int[Array, " B"], time: int, window: int) -> Int[Array, "B T"]:
    """Slots that a chunk's rows take: those of its last W rows, past the end for others."""
    index = _span(jnp.zeros_like(count), time)
    kept = (index < count[:, None]) & (index >= count[:, None] - window)
    return jnp.where(kept, _span(length, time) % window, window)


def kernel_arguments(
    q: Float[Array, "B T H K"],
    before: Array,
    ring: Array,
    rows: Array,
    length: Int[Array, " B"],
    count: Int[Array, " B"],
    entries: Rows | None,
    ids: Int[Array, "B T k"] | None,
    sink: Float[Array, " H"],
    floor: Int[Array, "B T"] | None = None,
) -> tuple | None:
    """A chunk's attention as `sparse_attention` takes it, row numbers into the batch's pools; None where rows are no bytes.

    before, ring: the window ring ``[B, W, row]`` without and with the chunk's rows ``[B, T, row]``. floor: as `Layout` has it.
    """
    time, window = q.shape[1], ring.shape[1]
    if rows.dtype != jnp.uint8 or (entries is not None and entries.dtype != jnp.uint8):
        return None
    # One new token is in the ring already, and the row that it takes the place of has left the window.
    pool = ring if time == 1 else jnp.concatenate([before, rows], axis=1)
    back = jnp.arange(window, dtype=jnp.int32)[None, None]
    at = _span(length, time)[..., None] - back
    own = (window if time > 1 else 0) + at - length[:, None, None]
    slots = jnp.where((at >= length[:, None, None]) & (time > 1), own, at % window)
    live = _span(jnp.zeros_like(count), time)[..., None] < count[:, None, None]
    window_ids = jnp.where((at >= (0 if floor is None else floor[..., None])) & live, slots, -1)
    return attention.kernel_arguments(q, entries, ids, pool, window_ids, sink)


def _groups(tail: Array, new: Array, length: Int[Array, " B"], ratio: int) -> Float[Array, "B S r K"]:
    """Groups that a chunk may complete: the first is the one that position ``length`` is in."""
    rows = jnp.concatenate([tail, new], axis=1)
    count = rows.shape[1] // ratio
    index = _span(ratio - 1 - length % ratio, count * ratio)
    return take(rows, index).reshape(rows.shape[0], count, ratio, rows.shape[-1])


def extend_source(
    x: Float[Array, "B T D"],
    params: AttentionParams,
    plan: LayerPlan,
    source: SourceCache,
    length: Int[Array, " B"],
    count: Int[Array, " B"],
    config: ModelConfig,
    policy: Policy,
    taps: Taps | None,
    kept: Int[Array, " B"] | None = None,
    defer: bool = False,
) -> SourceCache:
    """The source's cache with the entries that a chunk completes (§5, decode state), but those of ``kept`` tokens.

    defer: its tails are then the old ones and all of the chunk's rows, for `commit`.
    """
    ratio, eps = plan.ratio, config.rms_norm_eps
    value, score = compress.project(x, params.compressor)
    if score is None:
        groups, scores = value[:, :, None], None
    else:
        tails = source.tail_value, source.tail_score
        groups, scores = (_groups(tail, new, length, ratio) for tail, new in zip(tails, (value, score), strict=True))
        tails = [jnp.concatenate([tail, new], axis=1) for tail, new in zip(tails, (value, score), strict=True)]
        tails = tails if defer else [latest(tail, count, ratio - 1) for tail in tails]
        source = replace(source, tail_value=tails[0], tail_score=tails[1])
    latent = compress.pool(groups, scores, params.compressor, eps, x.dtype)
    number = _span(length // ratio, latent.shape[1])
    complete = (number + 1) * ratio <= (length + count)[:, None]
    if kept is not None:
        complete &= number >= (kept // ratio)[:, None]
    slots = jnp.where(complete, number, source.main_kv.shape[1])
    pools = {MAIN_KV: source.main_kv, INDEX_KEY: source.index_k}
    into = lambda x, fmt, on: append(pools[fmt], x, slots, fmt, on)  # noqa: E731
    entries, keys = publish(latent, number * ratio, params, plan, config, policy, taps, into)
    return replace(source, main_kv=entries, index_k=keys)


def latest(rows: Array, count: Int[Array, " B"], depth: int) -> Array:
    """Of ``depth`` rows of before and a chunk's behind them, the last ``depth`` up to the chunk's first ``count``."""
    return take(rows, _span(count, depth))


def commit(cache: Cache, count: Int[Array, " B"], config: ModelConfig) -> Cache:
    """The cache behind the first ``count`` tokens of a chunk that was deferred; what came of the others is gone.

    Entries that those have completed stay where they are: past the length, where nobody sees them, until others take their place.
    """

    def ring(held: Any) -> Array:
        return put(held.ring, held.rows, ring_slots(cache.length, count, held.rows.shape[1], config.sliding_window))

    def source(held: SourceCache, ratio: int) -> SourceCache:
        tails = (held.tail_value, held.tail_score)
        value, score = (None if tail is None else latest(tail, count, ratio - 1) for tail in tails)
        return replace(held, tail_value=value, tail_score=score)

    ratios = [plan.ratio for plan in layer_plans(config) if plan.owns_kv]
    depth = config.engram_max_ngram_size - 1 if config.engram_layer_ids else 0
    return replace(
        cache,
        length=cache.length + count,
        history=latest(cache.history, count, depth),
        windows=tuple(map(ring, cache.windows)),
        sources=tuple(map(source, cache.sources, ratios)),
    )


@struct.dataclass
class Carried:
    """What `cached_site` hands on: the layers' shared values and the cache as far as it is written."""

    shared: Shared
    cache: Cache


def cached_site(
    x: Float[Array, "B T D"],
    params: AttentionParams,
    plan: LayerPlan,
    carried: Carried,
    layout: Layout,
    config: ModelConfig,
    policy: Policy,
    taps: Taps | None,
    publishes: bool = True,
    kept: Int[Array, " B"] | None = None,
    defer: bool = False,
) -> tuple[Float[Array, "B T D"], Carried, Float32[Array, ""]]:
    """The attention site of a chunk: reads the cache and the chunk, and writes the chunk's rows. The length stays.

    publishes: False where a kv source's entries are in the cache and in ``carried`` already. defer: windows and tails are left
    for `commit`; of a chunk of two tokens or more.
    """
    shared, cache = carried.shared, carried.cache
    length, count = cache.length, jnp.sum(layout.segments, axis=1)
    latent_q = attention.query_latent(x, params, config)
    before, time, on = cache.windows[plan.layer], x.shape[1], policy.quantize_window
    kv = window_rows(x, params, plan, layout, config, policy, taps, lambda kv, fmt, on: kv)
    rows, slots = stored(kv, WINDOW_KV, on), ring_slots(length, count, time, config.sliding_window)
    # One token's row is read in the ring alone where a kernel attends: packing it there is one launch less.
    ring = append(before, kv, slots, WINDOW_KV, on) if time == 1 else put(before, rows, slots)
    window: Any = Deferred(before, rows) if defer else ring
    cache = replace(cache, windows=(*cache.windows[: plan.layer], window, *cache.windows[plan.layer + 1 :]))
    if plan.owns_kv and publishes:
        n = config.kv_source_layer_ids.index(plan.layer)
        source = extend_source(x, params, plan, cache.sources[n], length, count, config, policy, taps, kept, defer)
        cache = replace(cache, sources=(*cache.sources[:n], source, *cache.sources[n + 1 :]))
        shared = replace(shared, main_kv=source.main_kv, index_k=source.index_k)
    if plan.selects:
        shared, _ = choose(x, latent_q, params, plan, shared, layout, config, policy, taps)
    entries, ids = visible(plan, shared)

    def core(q: jax.Array) -> tuple[Array, Array | None]:
        pools = kernel_arguments(q, before, ring, rows, length, count, entries, ids, params.sink, layout.floor)
        if pools is not None and registry.choose("sparse_attention", "auto", *pools).impl != "reference":
            return sparse_attention(*pools)[0].reshape(q.shape), None
        values = lambda a: row_values(a, WINDOW_KV, q.dtype)  # noqa: E731
        positions = ring_positions(length, config.sliding_window)
        if layout.floor is not None:
            # A row that no query of the chunk may see may hold anything.
            positions = jnp.where(positions >= jnp.min(layout.floor, axis=1, keepdims=True), positions, -1)
        ahead = attention.Before(values(before), positions)
        return attention.attend(q, values(rows), entries, ids, params.sink, layout, config.sliding_window, ahead)

    y, _ = read(latent_q, core, params, plan, layout, config, taps)
    return y, Carried(shared, cache), jnp.zeros((), jnp.float32)


def cache_bytes(cache: Any) -> int:
    """Bytes of a cache, or of its abstract form."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
