"""Attention: low-rank query, one shared K=V latent, one softmax over window and selected entries (architecture §4).

Two forms of the same sum over the selected entries: gathered, whose cost does not grow with the context and which never
touches the other entries; and masked, which scores every entry of a short row (the gradient of a gather is a scatter,
2.5 times slower on CPU at 256 tokens).
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from dsv41 import context
from dsv41.config import ModelConfig
from dsv41.indexer import ids_to_mask
from dsv41.layout import Layout
from dsv41.numerics import Taps, linear, product, record, rms_norm, sink_softmax
from dsv41.pages import Pages, Rows, dense
from dsv41.params import AttentionParams
from dsv41.quant import MAIN_KV, row_values
from dsv41.rope import layer_frequencies, rotate, rotate_heads
from kernels_pallas import registry
from kernels_pallas.sparse_attention.api import sparse_attention


@struct.dataclass
class Before:
    """Window rows ahead of the ones at hand, in any order: rows ``[B, W, K]``, positions ``[B, W]``, -1 where there is none.

    segments ``[B, W]``: their documents; None where that is the first of the rows at hand.
    """

    rows: jax.Array
    positions: jax.Array
    segments: jax.Array | None = None


def rows_ahead(rows: Float[Array, "B t K"], layout: Layout, window: int) -> Before | None:
    """The ``window`` rows ahead of this device's part of a row, None where the row is whole."""
    if layout.before is None:
        return None
    # A long part's first block of queries has a block of ``window`` rows before it, the first of which none of them sees.
    return Before(jnp.pad(context.ahead(rows, window - 1), ((0, 0), (1, 0), (0, 0))), *layout.before)


def query_latent(x: Float[Array, "B T D"], params: AttentionParams, config: ModelConfig) -> Float[Array, "B T R"]:
    """``q_norm(x wq_a^T)``: the query latent, which the indexer reads too (§4.1)."""
    return rms_norm(linear(x, params.wq_a), params.q_norm, config.rms_norm_eps)


def window_kv(
    x: Float[Array, "B T D"], positions: Int[Array, "B T"], params: AttentionParams, config: ModelConfig, ratio: int
) -> Float[Array, "B T K"]:
    """The layer's own window rows before their FP8 form: kv_norm, RoPE (§4.2)."""
    kv = rms_norm(linear(x, params.wkv), params.kv_norm, config.rms_norm_eps)
    return rotate(kv, positions, layer_frequencies(config, ratio))


def _dot(equation: str, a: Array, b: Array) -> Float32[Array, "*s"]:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)


def _scores(q: Array, rows: Array) -> Array:
    """``[..., T, H, K]`` against ``[..., S, K]`` -> ``[..., T, H, S]``: heads share the rows, so that T and H are one axis."""
    flat = q.reshape(*q.shape[:-3], -1, q.shape[-1])
    return _dot("...qk,...sk->...qs", flat, rows).reshape(*q.shape[:-1], rows.shape[-2])


def _mix(probs: Array, rows: Array) -> Array:
    """``[..., T, H, S]`` times ``[..., S, K]`` -> ``[..., T, H, K]``."""
    flat = probs.astype(rows.dtype).reshape(*probs.shape[:-3], -1, probs.shape[-1])
    return _dot("...qs,...sk->...qk", flat, rows).reshape(*probs.shape[:-1], rows.shape[-1])


def _blocks(rows: Array, before: Array, size: int) -> Array:
    """``[B, n*size, ...]`` and the ``[B, W, ...]`` before it -> ``[B, n, W + size, ...]``: each block behind its W rows."""
    blocks = rows.reshape(rows.shape[0], -1, size, *rows.shape[2:])
    # With more than one block a block has W rows: those before it are the block before it.
    ahead = [before[:, None], blocks[:, :-1]] if blocks.shape[1] > 1 else [before[:, None]]
    return jnp.concatenate([jnp.concatenate(ahead, axis=1), blocks], axis=2)


def _in_window(at: Array, of: Array, key_at: Array, key_of: Array, window: int, floor: Array | None = None) -> Bool[Array, "*s"]:
    """Which keys a query sees by position and document (§4.5), none before ``floor``; padding, document 0, sees nothing."""
    seen = (key_at <= at) & (key_at > at - window) & (key_of == of) & (of > 0)
    return seen if floor is None else seen & (key_at >= floor)


def _window_scores(
    q: Float[Array, "B T H K"], kv: Float[Array, "B T K"], layout: Layout, window: int, before: Before | None
) -> tuple[Float32[Array, "B n W H W2"], Bool[Array, "B n W 1 W2"], Float[Array, "B n W2 K"]]:
    """Blocked scores: a block of up to ``window`` queries against its own rows and the ``window`` rows before it."""
    batch, time = q.shape[:2]
    size = min(time, window)
    extra = -time % size
    pad = lambda a: jnp.pad(a, ((0, 0), (0, extra)) + ((0, 0),) * (a.ndim - 2))  # noqa: E731
    block = lambda a: pad(a).reshape(batch, -1, size, *a.shape[2:])  # noqa: E731
    if before is None:
        # The first block of a long row has a block of nothing before it; a short row needs none.
        nothing = 0 if time <= window else window
        before = Before(jnp.zeros((batch, nothing, kv.shape[-1]), kv.dtype), jnp.full((batch, nothing), -1, jnp.int32))
    # A row too old for the first query may hold anything; zero times NaN would not be zero.
    known = (before.positions >= 0) & (before.positions > layout.positions[:, :1] - window)
    rows = jnp.where(known[..., None], before.rows, jnp.zeros((), kv.dtype))
    keys = _blocks(pad(kv), rows, size)
    key_at = _blocks(pad(layout.positions), before.positions, size)[:, :, None]
    documents = known.astype(layout.segments.dtype) if before.segments is None else jnp.where(known, before.segments, 0)
    key_of = _blocks(pad(layout.segments), documents, size)[:, :, None]
    at, of = block(layout.positions)[..., None], block(layout.segments)[..., None]
    floor = None if layout.floor is None else block(layout.floor)[..., None]
    mask = _in_window(at, of, key_at, key_of, window, floor)
    return _scores(block(q), keys), mask[:, :, :, None], keys


def attend(
    q: Float[Array, "B T H K"],
    window_rows: Float[Array, "B T K"],
    entries: Rows | None,
    ids: Int[Array, "B T k"] | None,
    sink: Float[Array, " H"],
    layout: Layout,
    window: int,
    before: Before | None = None,
    gather: bool | None = None,
) -> tuple[Float[Array, "B T H K"], Float32[Array, "B T k"] | None]:
    """Outputs before the inverse RoPE, and each selected entry's probability summed over heads (§4.5).

    entries: ``[B, S, K]`` values or stored bytes, or pages of them. ids: -1 padded entry numbers, each visible to its query.
    before: the window's rows ahead of these. gather: which form; by shape if None.
    """
    batch, time, heads, width = q.shape
    scale = width**-0.5
    scores, mask, keys = _window_scores(q, window_rows, layout, window, before)
    blocks = scores.shape[:3]
    flat = lambda a: a.reshape(batch, -1, *a.shape[3:])[:, :time]  # noqa: E731
    local, local_mask = flat(scores), flat(mask)
    span = local.shape[-1]
    if entries is None or ids is None or ids.shape[-1] == 0:
        probs, selected, mass = sink_softmax(local * scale, local_mask, sink), None, None
    else:
        size, k = entries.shape[1], ids.shape[-1]
        gather = (size > 8 * k or time * k <= size) if gather is None else gather
        valid = ids >= 0 if gather else ids_to_mask(ids, entries.shape[1])
        if gather:
            real = jnp.maximum(ids, 0)
            rows = entries.take(real) if isinstance(entries, Pages) else jax.vmap(lambda e, i: e[i])(entries, real)
            rows = jnp.where(valid[..., None], row_values(rows, MAIN_KV, q.dtype), jnp.zeros((), q.dtype))
            far = _scores(q[:, :, None], rows)[:, :, 0]
        else:
            # An entry that no query selected may hold anything; zero times NaN would not be zero.
            used = jnp.any(valid, axis=1)[..., None]
            rows = jnp.where(used, row_values(dense(entries), MAIN_KV, q.dtype), jnp.zeros((), q.dtype))
            far = _scores(q, rows)
        both = jnp.concatenate([local, far], axis=-1) * scale
        probs = sink_softmax(both, jnp.concatenate([local_mask, valid[:, :, None]], axis=-1), sink)
        far_probs = probs[..., span:]
        selected = _mix(far_probs[:, :, None], rows)[:, :, 0] if gather else _mix(far_probs, rows)
        mass = jnp.sum(lax.stop_gradient(far_probs), axis=2)
        if not gather:
            mass = jnp.where(ids >= 0, jnp.take_along_axis(mass, jnp.maximum(ids, 0), axis=-1), 0.0)
    near = jnp.pad(probs[..., :span], ((0, 0), (0, blocks[1] * blocks[2] - time), (0, 0), (0, 0)))
    near = near.reshape(*blocks, heads, span)
    out = flat(_mix(near, keys))
    return (out if selected is None else out + selected).astype(q.dtype), mass


def kernel_arguments(
    q: Float[Array, "B T H K"],
    entries: Rows | None,
    ids: Int[Array, "B T k"] | None,
    rows: Array,
    row_ids: Int[Array, "B T w"],
    sink: Float[Array, " H"],
) -> tuple:
    """A batch's attention as `sparse_attention` takes it: B T queries, and ids into pools of the whole batch.

    entries ``[B, S, row]`` or pages, rows ``[B, R, row]``: values or stored bytes; ids into a row's own, -1 where there is none.
    """
    batch, time = q.shape[:2]
    if entries is None or ids is None:
        width = MAIN_KV.row_bytes(q.shape[-1]) if rows.dtype == jnp.uint8 else q.shape[-1]
        entries, ids = jnp.zeros((batch, 1, width), rows.dtype), jnp.zeros((batch, time, 0), jnp.int32)
    flat = lambda a: a.reshape(batch * a.shape[1], *a.shape[2:])  # noqa: E731

    def numbered(numbers: Array, pool: Array) -> Array:
        first = jnp.arange(batch, dtype=jnp.int32)[:, None, None] * pool.shape[1]
        return flat(jnp.where(numbers >= 0, numbers + first, -1))

    of_pages = isinstance(entries, Pages)
    selected = (entries.flat(), flat(entries.places(ids))) if of_pages else (flat(entries), numbered(ids, entries))
    return flat(q), *selected, flat(rows), numbered(row_ids, rows), sink


def attend_row(
    q: Float[Array, "B T H K"],
    window_rows: Float[Array, "B T K"],
    entries: Float[Array, "B S K"] | None,
    ids: Int[Array, "B T k"] | None,
    sink: Float[Array, " H"],
    layout: Layout,
    window: int,
) -> tuple[Float[Array, "B T H K"], Float32[Array, "B T k"] | None]:
    """`attend` of whole rows or this device's parts of them, by the kernel where one can run: no array of scores, which is T
    times S times H."""
    before = rows_ahead(window_rows, layout, window)
    rows, key_at, key_of = window_rows, layout.positions, layout.segments
    if before is not None:
        pairs = ((before.rows, rows), (before.positions, key_at), (before.segments, key_of))
        rows, key_at, key_of = (jnp.concatenate(pair, axis=1) for pair in pairs)
    time, most = q.shape[1], min(window, rows.shape[1])
    back = jnp.arange(rows.shape[1] - time, rows.shape[1], dtype=jnp.int32)[:, None] - jnp.arange(most, dtype=jnp.int32)[None]
    key = jnp.maximum(back, 0)
    at, of = layout.positions[..., None], layout.segments[..., None]
    floor = None if layout.floor is None else layout.floor[..., None]
    seen = (back >= 0)[None] & _in_window(at, of, key_at[:, key], key_of[:, key], window, floor)
    args = kernel_arguments(q, entries, ids, rows, jnp.where(seen, back[None], -1), sink)
    if registry.choose("sparse_attention", "auto", *args, mass=True).impl == "reference":
        return attend(q, window_rows, entries, ids, sink, layout, window, before)
    # Where nobody reads the probabilities, compilation drops their kernel.
    out, _, mass = sparse_attention(*args, mass=True)
    return out.reshape(q.shape), None if ids is None else mass.reshape(ids.shape)


def queries(
    latent_q: Float[Array, "B T R"],
    positions: Int[Array, "B T"],
    params: AttentionParams,
    config: ModelConfig,
    ratio: int,
) -> Float[Array, "B T H K"]:
    """Heads of the query, rotated; no per-head norm (§4.1)."""
    q = linear(latent_q, params.wq_b).reshape(*latent_q.shape[:2], config.num_attention_heads, config.head_dim)
    return rotate_heads(q, positions, layer_frequencies(config, ratio))


def project_out(
    heads_out: Float[Array, "B T H K"],
    positions: Int[Array, "B T"],
    params: AttentionParams,
    config: ModelConfig,
    ratio: int,
    taps: Taps | None,
    name: str,
) -> Float[Array, "B T D"]:
    """Inverse RoPE at the query's position, then the grouped low-rank output projection (§4.7, §4.8)."""
    o = rotate_heads(heads_out, positions, layer_frequencies(config, ratio), inverse=True)
    record(taps, f"{name}.core", o)
    groups, rank = config.o_groups, config.o_lora_rank
    grouped = o.reshape(*o.shape[:2], groups, config.q_width // groups)
    u = product("btgi,gri->btgr", grouped, params.wo_a.reshape(groups, rank, -1))
    return linear(u.reshape(*o.shape[:2], groups * rank), params.wo_b)
