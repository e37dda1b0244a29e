"""One block: Engram, attention site, MoE site, each between an mHC collapse and an mHC update (architecture §10)."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from dsv41 import attention, compress, indexer, mhc
from dsv41.config import ModelConfig
from dsv41.engram import apply_engram
from dsv41.layout import Layout, causal_mask, visible_entries
from dsv41.moe import moe
from dsv41.numerics import Policy, Taps, record, rms_norm
from dsv41.params import HyperConnection, LayerParams
from dsv41.plan import LayerPlan


@struct.dataclass
class Shared:
    """What a layer publishes for those that follow: main KV, index keys, selected ids, candidate pool.

    Carried from block to block, so that gradients of every reader sum at the owner.
    """

    main_kv: jax.Array | None = None
    index_k: jax.Array | None = None
    ids: jax.Array | None = None
    pool: jax.Array | None = None


@struct.dataclass
class BlockOutput:
    """streams ``[B, T, N, D]``; pre ``[B, T, N]`` for the next collapse; shared; load ``[E]``; balance and index_kl scalars."""

    streams: jax.Array
    pre: jax.Array
    shared: Shared
    load: jax.Array
    balance: jax.Array
    index_kl: jax.Array


@struct.dataclass
class Tokens:
    """The batch as every layer sees it: ids ``[B, T]``, layout, and the Engram rows of each table."""

    ids: jax.Array
    layout: Layout
    engram_rows: tuple[Any, ...]


def _attention_site(
    x: Float[Array, "B T D"],
    params: LayerParams,
    plan: LayerPlan,
    shared: Shared,
    tokens: Tokens,
    config: ModelConfig,
    policy: Policy,
    taps: Taps | None,
) -> tuple[Float[Array, "B T D"], Shared, Float32[Array, ""]]:
    p, layout, ratio = params.attn, tokens.layout, plan.ratio
    name = f"layers.{plan.layer}"
    latent_q = attention.query_latent(x, p, config)
    rows = attention.window_kv(x, layout.positions, p, config, policy, ratio, taps, f"{name}.attn")
    scores = None
    if plan.owns_kv:
        latent = compress.latents(x, p.compressor, config, ratio)
        record(taps, f"{name}.attn.latent", latent)
        positions = compress.group_positions(layout.positions, ratio)
        entries = compress.main_kv(latent, positions, config, policy, ratio, taps, f"{name}.attn")
        keys = indexer.index_keys(lax.stop_gradient(latent), positions, p.indexer, config, policy, ratio, taps, f"{name}.indexer")
        shared = replace(shared, main_kv=entries, index_k=keys)
    if plan.selects:
        # Detached inputs: the indexer learns from its own loss only, the model from the language loss only.
        detached = lax.stop_gradient((x, latent_q))
        scores = indexer.index_scores(
            *detached, shared.index_k, layout.positions, p.indexer, config, policy, ratio, taps, f"{name}.indexer"
        )
        first, count = visible_entries(layout, ratio)
        masked = jnp.where(causal_mask(first, count, scores.shape[-1]), lax.stop_gradient(scores), -jnp.inf)
        record(taps, f"{name}.indexer.scores", masked)
        if plan.pool == "publishes":
            pool = indexer.candidate_mask(masked, first, count, config.candidate_block_size, config.candidate_topk_blocks)
            record(taps, f"{name}.indexer.candidates", pool)
            shared = replace(shared, pool=pool)
        if plan.pool == "consumes":
            masked = jnp.where(shared.pool, masked, -jnp.inf)
            record(taps, f"{name}.indexer.scores_masked", masked)
        ids = indexer.select(masked, config.index_topk)
        record(taps, f"{name}.indexer.topk", ids)
        shared = replace(shared, ids=ids)
    q = attention.queries(latent_q, layout.positions, p, config, ratio)
    entries, ids = (shared.main_kv, shared.ids) if ratio else (None, None)
    out, mass = attention.attend(q, rows, entries, ids, p.sink, layout, config.sliding_window)
    kl = jnp.zeros((), jnp.float32)
    if scores is not None and mass is not None:
        kl = indexer.index_kl(scores, mass, shared.ids, layout.live)
    y = attention.project_out(out, layout.positions, p, config, ratio, taps, f"{name}.attn")
    record(taps, f"{name}.attn.out", y)
    return y, shared, kl


def block(
    streams: Float[Array, "B T N D"],
    pre: Float32[Array, "B T N"],
    params: LayerParams,
    plan: LayerPlan,
    shared: Shared,
    tokens: Tokens,
    config: ModelConfig,
    policy: Policy,
    taps: Taps | None = None,
) -> BlockOutput:
    """Runs one layer. ``pre`` is the previous site's input mix, which this block's attention collapses with."""
    name = f"layers.{plan.layer}"

    def site(kind: str, hc: HyperConnection, x: Any, carried: Any) -> tuple[Any, Any, Any, Any]:
        own, post, comb = mhc.coefficients(x, hc, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)
        for part, value in (("pre", own), ("post", post), ("comb", comb)):
            record(taps, f"{name}.hc_{kind}.{part}", value)
        collapsed = mhc.collapse(carried if config.hc_single_pass else own, x)
        record(taps, f"{name}.{kind}_in", collapsed)
        return own, post, comb, collapsed

    if plan.engram is not None:
        with jax.named_scope("engram"):
            rows = tokens.engram_rows[plan.engram]
            streams = apply_engram(streams, rows, tokens.layout, params.engram, config, taps, f"{name}.engram")
    record(taps, f"{name}.input_mean", jnp.mean(streams.astype(jnp.float32), axis=2).astype(streams.dtype))
    pre, post, comb, x = site("attn", params.hc_attn, streams, pre)
    with jax.named_scope("attention"):
        x = rms_norm(x, params.attn_norm, config.rms_norm_eps)
        y, shared, kl = _attention_site(x, params, plan, shared, tokens, config, policy, taps)
    streams = mhc.expand(y, streams, post, comb)
    record(taps, f"{name}.streams_after_attn", streams)
    pre, post, comb, x = site("ffn", params.hc_ffn, streams, pre)
    with jax.named_scope("moe"):
        x = rms_norm(x, params.ffn_norm, config.rms_norm_eps)
        layout = tokens.layout
        y, load, balance = moe(x, params.ffn, config, tokens.ids, layout.live, layout.image, taps, f"{name}.ffn")
    record(taps, f"{name}.ffn.out", y)
    streams = mhc.expand(y, streams, post, comb)
    record(taps, f"{name}.streams", streams)
    return BlockOutput(streams, pre, shared, load, balance, kl)


def first_mix(ids: Int[Array, "B T"], config: ModelConfig) -> Float32[Array, "B T N"]:
    """The first block's input mix: one-hot on stream 0 (§3)."""
    one_hot = jnp.zeros((config.hc_mult,), jnp.float32).at[0].set(1.0)
    return jnp.broadcast_to(one_hot[None, None], (*ids.shape, config.hc_mult))
