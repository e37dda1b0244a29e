"""One block: Engram, attention site, MoE site; `dsv41.mhc.enter` leads from each sub-block to the next (architecture §10)."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Float32, Int

from dsv41.config import ModelConfig
from dsv41.engram import apply_engram
from dsv41.layout import Layout
from dsv41.mhc import Residual, enter, settle
from dsv41.moe import moe
from dsv41.numerics import Policy, Taps, record
from dsv41.params import LayerParams, TextParams, block_specs, text_specs
from dsv41.plan import LayerPlan
from dsv41.sharding import gathered
from dsv41.site import Site, whole_row
from dsv41.vocabulary import embedded


@struct.dataclass
class BlockOutput:
    """residual: the streams, the MoE output still to be added; what the attention site hands on; load ``[2, E]`` of text and
    image tokens; balance and index_kl scalars; mean ``[B, T, D]`` over the streams that entered, where the plan is tapped."""

    residual: Residual
    carried: Any
    load: jax.Array
    balance: jax.Array
    index_kl: jax.Array
    mean: jax.Array | None = None


@struct.dataclass
class Tokens:
    """The batch as every layer sees it: ids ``[B, T]``, layout, and the Engram rows of each table, by number or fetched."""

    ids: jax.Array
    layout: Layout
    engram_rows: tuple[Any, ...]


def block(
    residual: Residual,
    params: LayerParams,
    plan: LayerPlan,
    carried: Any,
    tokens: Tokens,
    config: ModelConfig,
    policy: Policy,
    taps: Taps | None = None,
    attention_site: Site = whole_row,
) -> BlockOutput:
    """Runs one layer on the streams that the layer before left.

    carried: what ``attention_site`` takes from the layer before and hands to the next; `dsv41.site.Shared` for a whole row.
    """
    params = gathered(params, block_specs(config, plan))
    name = plan.name
    if plan.engram is not None:
        with jax.named_scope("engram"):
            rows = tokens.engram_rows[plan.engram]
            streams = settle(residual, taps)
            streams = apply_engram(streams, rows, tokens.layout, params.engram, config, taps, f"{name}.engram")
            residual = Residual(streams, residual.pre)
    x, residual = enter(residual, params.hc_attn, params.attn_norm, config, taps, name, "attn")
    streams = residual.streams
    mean = jnp.mean(streams.astype(jnp.float32), axis=2).astype(streams.dtype) if plan.tapped else None
    with jax.named_scope("attention"):
        y, carried, kl = attention_site(x, params.attn, plan, carried, tokens.layout, config, policy, taps)
    residual = replace(residual, y=y, name=f"{name}.streams_after_attn")
    x, residual = enter(residual, params.hc_ffn, params.ffn_norm, config, taps, name, "ffn")
    with jax.named_scope("moe"):
        layout = tokens.layout
        y, load, balance = moe(x, params.ffn, config, tokens.ids, layout.live, layout.image, taps, f"{name}.ffn")
    record(taps, f"{name}.ffn.out", y)
    return BlockOutput(replace(residual, y=y, name=f"{name}.streams"), carried, load, balance, kl, mean)


def first_mix(ids: Int[Array, "B T"], config: ModelConfig) -> Float32[Array, "B T N"]:
    """The first block's input mix: one-hot on stream 0 (§3)."""
    one_hot = jnp.zeros((config.hc_mult,), jnp.float32).at[0].set(1.0)
    return jnp.broadcast_to(one_hot[None, None], (*ids.shape, config.hc_mult))


def embed(params: TextParams, ids: Int[Array, "B T"], config: ModelConfig, policy: Policy) -> Float[Array, "B T N D"]:
    """Embedding rows copied to every residual stream (§3)."""
    table = gathered(params.embed, text_specs(config).embed)
    rows = embedded(table, jnp.clip(ids, 0, config.vocab_size - 1)).astype(policy.compute_dtype)
    return jnp.broadcast_to(rows[:, :, None], (*ids.shape, config.hc_mult, config.hidden_size))
