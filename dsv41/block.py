"""One block: Engram, attention site, MoE site, each between an mHC collapse and an mHC update (architecture §10)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Float32, Int

from dsv41 import mhc
from dsv41.config import ModelConfig
from dsv41.engram import apply_engram
from dsv41.layout import Layout
from dsv41.moe import moe
from dsv41.numerics import Policy, Taps, record, rms_norm
from dsv41.params import HyperConnection, LayerParams
from dsv41.plan import LayerPlan
from dsv41.site import Site, whole_row


@struct.dataclass
class BlockOutput:
    """streams ``[B, T, N, D]``; pre ``[B, T, N]`` for the next collapse; what the attention site hands on; load
    ``[2, E]`` of text and image tokens; balance and index_kl scalars."""

    streams: jax.Array
    pre: jax.Array
    carried: Any
    load: jax.Array
    balance: jax.Array
    index_kl: jax.Array


@struct.dataclass
class Tokens:
    """The batch as every layer sees it: ids ``[B, T]``, layout, and the Engram rows of each table."""

    ids: jax.Array
    layout: Layout
    engram_rows: tuple[Any, ...]


def block(
    streams: Float[Array, "B T N D"],
    pre: Float32[Array, "B T N"],
    params: LayerParams,
    plan: LayerPlan,
    carried: Any,
    tokens: Tokens,
    config: ModelConfig,
    policy: Policy,
    taps: Taps | None = None,
    attention_site: Site = whole_row,
) -> BlockOutput:
    """Runs one layer. ``pre`` is the previous site's input mix, which this block's attention collapses with.

    carried: what ``attention_site`` takes from the layer before and hands to the next; `dsv41.site.Shared` for a whole row.
    """
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
        y, carried, kl = attention_site(x, params.attn, plan, carried, tokens.layout, config, policy, taps)
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
    return BlockOutput(streams, pre, carried, load, balance, kl)


def first_mix(ids: Int[Array, "B T"], config: ModelConfig) -> Float32[Array, "B T N"]:
    """The first block's input mix: one-hot on stream 0 (§3)."""
    one_hot = jnp.zeros((config.hc_mult,), jnp.float32).at[0].set(1.0)
    return jnp.broadcast_to(one_hot[None, None], (*ids.shape, config.hc_mult))
