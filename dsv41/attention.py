"""Attention: low-rank query, one shared K=V latent, one softmax over window and selected entries (architecture §4).

Two forms of the same sum over the selected entries: gathered, whose cost does not grow with the context and which never
touches the other entries; and masked, which scores every entry of a short row (the gradient of a gather is a scatter,
2.5 times slower on CPU at 256 tokens).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from dsv41.config import ModelConfig
from dsv41.indexer import ids_to_mask
from dsv41.layout import Layout
from dsv41.numerics import Policy, Taps, linear, record, rms_norm, sink_softmax
from dsv41.params import AttentionParams
from dsv41.quant import WINDOW_KV, fake_quant
from dsv41.rope import layer_frequencies, rotate, rotate_heads


def query_latent(x: Float[Array, "B T D"], params: AttentionParams, config: ModelConfig) -> Float[Array, "B T R"]:
    """``q_norm(x wq_a^T)``: the query latent, which the indexer reads too (§4.1)."""
    return rms_norm(linear(x, params.wq_a), params.q_norm, config.rms_norm_eps)


def window_kv(
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    params: AttentionParams,
    config: ModelConfig,
    policy: Policy,
    ratio: int,
    taps: Taps | None,
    name: str,
) -> Float[Array, "B T K"]:
    """The layer's own window rows: kv_norm, RoPE, FP8 over the whole vector (§4.2)."""
    kv = rms_norm(linear(x, params.wkv), params.kv_norm, config.rms_norm_eps)
    kv = rotate(kv, positions, layer_frequencies(config, ratio))
    record(taps, f"{name}.swa_kv_prequant", kv)
    if policy.quantize_window:
        kv = fake_quant(kv, WINDOW_KV)
    record(taps, f"{name}.swa_kv", kv)
    return kv


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


def _pairs_of_blocks(rows: Array, window: int) -> Array:
    """``[B, n*W, ...]`` -> ``[B, n, 2W, ...]``: each block behind its predecessor (zeros before the first)."""
    blocks = rows.reshape(rows.shape[0], -1, window, *rows.shape[2:])
    before = jnp.concatenate([jnp.zeros_like(blocks[:, :1]), blocks[:, :-1]], axis=1)
    return jnp.concatenate([before, blocks], axis=2)


def _window_scores(
    q: Float[Array, "B T H K"], kv: Float[Array, "B T K"], layout: Layout, window: int
) -> tuple[Float32[Array, "B n W H W2"], Bool[Array, "B n W 1 W2"], Float[Array, "B n W2 K"]]:
    """Blocked scores: queries of a block of ``window`` tokens against their own and the previous block."""
    time = q.shape[1]
    extra = -time % window
    pad = lambda a: jnp.pad(a, ((0, 0), (0, extra)) + ((0, 0),) * (a.ndim - 2))  # noqa: E731
    index = jnp.broadcast_to(jnp.arange(time + extra, dtype=jnp.int32)[None], (q.shape[0], time + extra))
    segments = pad(layout.segments)
    queries = pad(q).reshape(q.shape[0], -1, window, *q.shape[2:])
    keys = _pairs_of_blocks(pad(kv), window)
    at, of = index.reshape(queries.shape[:3])[..., None], segments.reshape(queries.shape[:3])[..., None]
    key_at = _pairs_of_blocks(index, window)[:, :, None]
    key_of = _pairs_of_blocks(segments, window)[:, :, None]
    mask = (key_at <= at) & (key_at > at - window) & (key_of == of) & (of > 0)
    return _scores(queries, keys), mask[:, :, :, None], keys


def attend(
    q: Float[Array, "B T H K"],
    window_rows: Float[Array, "B T K"],
    entries: Float[Array, "B S K"] | None,
    ids: Int[Array, "B T k"] | None,
    sink: Float[Array, " H"],
    layout: Layout,
    window: int,
    gather: bool | None = None,
) -> tuple[Float[Array, "B T H K"], Float32[Array, "B T k"] | None]:
    """Outputs before the inverse RoPE, and each selected entry's probability summed over heads (§4.5).

    ids: -1 padded entry numbers, each visible to its query. gather: which form; by shape if None.
    """
    batch, time, heads, width = q.shape
    scale = width**-0.5
    scores, mask, keys = _window_scores(q, window_rows, layout, window)
    blocks = scores.shape[:3]
    flat = lambda a: a.reshape(batch, -1, *a.shape[3:])[:, :time]  # noqa: E731
    local, local_mask = flat(scores), flat(mask)
    span = local.shape[-1]
    if entries is None or ids is None or ids.shape[-1] == 0:
        probs, selected, mass = sink_softmax(local * scale, local_mask, sink), None, None
    else:
        gather = entries.shape[1] > 8 * ids.shape[-1] if gather is None else gather
        valid = ids >= 0 if gather else ids_to_mask(ids, entries.shape[1])
        if gather:
            rows = jax.vmap(lambda e, i: e[i])(entries, jnp.maximum(ids, 0))
            rows = jnp.where(valid[..., None], rows, jnp.zeros((), rows.dtype))
            far = _scores(q[:, :, None], rows)[:, :, 0]
        else:
            # An entry that no query selected may hold anything; zero times NaN would not be zero.
            rows = jnp.where(jnp.any(valid, axis=1)[..., None], entries, jnp.zeros((), entries.dtype))
            far = _scores(q, rows)
        both = jnp.concatenate([local, far], axis=-1) * scale
        probs = sink_softmax(both, jnp.concatenate([local_mask, valid[:, :, None]], axis=-1), sink)
        far_probs = probs[..., span:]
        selected = _mix(far_probs[:, :, None], rows)[:, :, 0] if gather else _mix(far_probs, rows)
        mass = jnp.sum(lax.stop_gradient(far_probs), axis=2)
        if not gather:
            mass = jnp.where(ids >= 0, jnp.take_along_axis(mass, jnp.maximum(ids, 0), axis=-1), 0.0)
    near = jnp.pad(probs[..., :span], ((0, 0), (0, blocks[1] * window - time), (0, 0), (0, 0)))
    near = near.reshape(*blocks, heads, span)
    out = flat(_mix(near, keys))
    return (out if selected is None else out + selected).astype(q.dtype), mass


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
    wo_a = params.wo_a.astype(o.dtype).reshape(groups, rank, -1)
    u = _dot("btgi,gri->btgr", grouped, wo_a).astype(o.dtype)
    return linear(u.reshape(*o.shape[:2], groups * rank), params.wo_b)
