"""Drafts as recorded: behind a prefill and behind each token after it, the likeliest next token and what is drafted of it."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.cache import Cache, init_cache
from dsv41.config import ModelConfig
from dsv41.dspark import draft, greedy, remember
from dsv41.numerics import Policy, Taps
from dsv41.params import DraftParams, TextParams
from dsv41.plan import draft_plans, layer_plans
from dsv41.quant import WINDOW_KV
from dsv41.site import quantized
from dsv41.verify_decode import extended, padded_rows


@partial(jax.jit, static_argnames=("config", "policy"))
def _remember(
    drafter: DraftParams, config: ModelConfig, policy: Policy, cache: Cache, inputs: jax.Array, count: jax.Array
) -> tuple[Cache, Taps]:
    """The cache with the rows of the last ``count`` tokens that it holds."""
    taps: Taps = {}
    before = cache.length - count
    cache = remember(drafter, config, policy, cache, inputs, before, jnp.broadcast_to(count, before.shape), taps)
    on, rows = policy.quantize_window, {}
    for plan in draft_plans(config):
        rows[f"prefill.{plan.name}.attn.main_kv"] = quantized(taps[f"{plan.name}.attn.swa_kv"], WINDOW_KV, on)
    return cache, {**rows, "prefill.mtp.main_x": taps["mtp.main_x"]}


@partial(jax.jit, static_argnames=("config", "policy"))
def _draft(
    params: TextParams, drafter: DraftParams, config: ModelConfig, policy: Policy, cache: Cache, token: jax.Array
) -> dict[str, jax.Array]:
    taps: Taps = {}
    live = jnp.ones(token.shape, bool)
    found = draft(drafter, params, config, policy, cache, token, live, greedy, taps)
    stages = lambda name: jnp.stack([taps[f"{plan.name}.{name}"] for plan in draft_plans(config)], axis=1)  # noqa: E731
    return {
        "draft.anchor": token,
        "draft.draft_ids": jnp.concatenate([token[:, None], found.tokens], axis=1),
        "draft.draft_logits": found.logits,
        "draft.confidence": found.confidence,
        "draft.head_hidden": taps["draft.head_hidden"],
        "draft.attn_out": stages("attn.out"),
        "draft.streams": stages("streams"),
        "draft.expert_ids": stages("ffn.expert_ids"),
    }


def draft_taps(
    params: TextParams,
    drafter: DraftParams,
    config: ModelConfig,
    policy: Policy,
    ids: np.ndarray,
    prefill: int,
    token_map: jax.Array,
    inputs: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """What a draft case records, under its names, from ``ids [B, T]`` of which the first ``prefill`` go in one chunk.

    inputs ``[B, T, M]``: what the stages read, in place of what the backbone gives them here.
    """
    padded, capacity = padded_rows(ids, config)
    cache = init_cache(config, policy, ids.shape[0], capacity, drafts=True)
    drafts, cache = cache.drafts, replace(cache, drafts=())

    def run(chunk: Any, at: int, count: int) -> tuple[jax.Array, Any, Taps]:
        """The program of decode cases, which knows of no drafts, and the stages' rows behind it."""
        logits, after, taps = extended(params, config, policy, cache, jnp.asarray(chunk), jnp.int32(count), token_map)
        read = taps["dspark_main_hidden"]
        if inputs is not None:
            read = jnp.zeros_like(read).at[:, :count].set(jnp.asarray(inputs[:, at : at + count]))
        after, more = _remember(drafter, config, policy, replace(after, drafts=drafts), read, jnp.int32(count))
        return logits, after, {**taps, **more}

    logits, held, taps = run(padded, 0, prefill)
    drafts, cache = held.drafts, replace(held, drafts=())
    found = {name: value[:, :prefill] for name, value in taps.items() if name.startswith("prefill.")}
    found |= {"prefill_logits": logits[:, :prefill], "prefill_main_hidden": taps["dspark_main_hidden"][:, :prefill]}
    steps = []
    for at in range(prefill, ids.shape[1]):
        logits, held, taps = run(ids[:, at : at + 1], at, 1)
        drafts, cache = held.drafts, replace(held, drafts=())
        experts = jnp.stack([taps[f"{plan.name}.ffn.expert_ids"] for plan in layer_plans(config)], axis=2)
        made = _draft(params, drafter, config, policy, held, greedy(0, logits[:, 0]))
        made |= {"draft.main_hidden": taps["dspark_main_hidden"], "draft.main_x": taps["prefill.mtp.main_x"]}
        steps.append({"step_logits": logits[:, 0], "step_expert_ids": experts[:, 0], **made})
    found |= {name: jnp.stack([step[name] for step in steps], axis=1) for name in steps[0]}
    return jax.device_get(found)
