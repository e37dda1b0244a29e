"""Decoder replay: decoder layers on chosen tokens alone, behind an encoder on all of them (training §6.2).

Of a prompt the decoder needs what its first layer compresses of the encoder's output, and for its windows the last W tokens.
`dsv41.model.features` with ``replay`` is the same on all tokens, by masks.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv41 import mhc
from dsv41.block import Tokens, block, first_mix
from dsv41.config import ModelConfig
from dsv41.engram import apply_engram
from dsv41.layout import Layout, replay_layout
from dsv41.model import Output, embed, final_hidden, make_tokens
from dsv41.numerics import Policy, rms_norm
from dsv41.params import LayerParams, TextParams, block_specs
from dsv41.plan import LayerPlan, layer_plans
from dsv41.sharding import gathered
from dsv41.site import Shared, publish_row, whole_row


def gather(index: Int[Array, "B K"], here: Array, value: Array) -> Array:
    """``value[b, index[b, i]]``, zeros where there is none."""
    spread = lambda a: a.reshape(*a.shape, *(1,) * (value.ndim - 2))  # noqa: E731
    taken = jnp.take_along_axis(value, spread(index), axis=1)
    return jnp.where(spread(here), taken, jnp.zeros((), value.dtype))


def decoder_input(
    residual: mhc.Residual, layer: LayerParams, plan: LayerPlan, tokens: Tokens, config: ModelConfig
) -> Float[Array, "B T D"]:
    """What the decoder's first layer compresses: of that layer no more than its attention's input is computed."""
    streams, pre = mhc.settle(residual, None), residual.pre
    if plan.engram is not None:
        rows = tokens.engram_rows[plan.engram]
        streams = apply_engram(streams, rows, tokens.layout, layer.engram, config, None, "")
    if not config.hc_single_pass:
        pre = mhc.coefficients(streams, layer.hc_attn, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)[0]
    return rms_norm(mhc.collapse(pre, streams), layer.attn_norm, config.rms_norm_eps)


def replayed_features(
    params: TextParams,
    config: ModelConfig,
    policy: Policy,
    ids: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    token_map: Int[Array, " V"],
    replay: Int[Array, "B T"],
    chosen: Int[Array, "B K"],
    rows: tuple[Int[Array, "B T C"], ...] | None = None,
) -> Output:
    """`features` of the tokens at indices ``chosen`` of each row; its ``hidden`` is ``[B, K, D]``.

    chosen: ascending, all of a document from position ``replay`` on or none of it; T where there is none. replay, rows: as
    `features` takes them. Losses of decoder layers are over the chosen tokens. The policy's ``remat`` and
    ``index_teacher`` are not looked at: an indexer learns from its own layer.
    """
    image = jnp.zeros(ids.shape, bool)
    tokens = make_tokens(ids, segments, image, token_map, config)
    tokens = tokens if rows is None else replace(tokens, engram_rows=rows)
    residual, carried = mhc.Residual(embed(params, ids, config, policy), first_mix(ids, config)), Shared()
    policy = replace(policy, index_teacher="own")
    plans, outs = layer_plans(config), []
    first = next(n for n, plan in enumerate(plans) if plan.half == "decoder")
    for n, (plan, layer) in enumerate(zip(plans, params.layers, strict=True)):
        if n == first:
            own = gathered(layer, block_specs(config, plan))
            x = decoder_input(residual, own, plan, tokens, config)
            carried = publish_row(x, own.attn, plan, Shared(), tokens.layout, config, policy, None)
            tokens, take = _choose(tokens, replay, chosen)
            residual = jax.tree.map(take, residual)
        site = partial(whole_row, publishes=n < first)
        out = block(residual, layer, plan, carried, tokens, config, policy, None, site)
        residual, carried = out.residual, out.carried
        outs.append(out)
    return Output(
        final_hidden(params, mhc.settle(residual, None), residual.pre, config, None),
        None,
        jnp.stack([out.load for out in outs]),
        jnp.stack([out.balance for out in outs]),
        jnp.stack([out.index_kl for out, plan in zip(outs, plans, strict=True) if plan.selects]),
    )


def _choose(tokens: Tokens, replay: Array, chosen: Array) -> tuple[Tokens, Any]:
    """The chosen tokens, with windows that end at the replay's start, and the function that takes them of any array."""
    time = tokens.ids.shape[1]
    take = partial(gather, jnp.minimum(chosen, time - 1), chosen < time)
    layout: Layout = jax.tree.map(take, replay_layout(tokens.layout, replay))
    return Tokens(take(tokens.ids), layout, tuple(take(rows) for rows in tokens.engram_rows)), take
