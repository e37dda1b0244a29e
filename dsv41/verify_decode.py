"""Incremental decode as recorded: a prefill of the first tokens, then one token at a time through the cache."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.cache import Cache, init_cache
from dsv41.config import ModelConfig
from dsv41.model import extend
from dsv41.numerics import Policy, Taps
from dsv41.params import TextParams
from dsv41.plan import layer_plans
from dsv41.quant import INDEX_KEY, MAIN_KV, row_values

WIDTH = 64  # chunks and capacities are padded to powers of two from here on: few programs for all cases


@partial(jax.jit, static_argnames=("config", "policy"))
def extended(
    params: TextParams, config: ModelConfig, policy: Policy, cache: Cache, ids: jax.Array, count: jax.Array, token_map: jax.Array
) -> tuple[jax.Array, Cache, Taps]:
    """Logits of a chunk's every token, the cache behind its first ``count`` tokens, and what cases record of it."""
    taps: Taps = {}
    live = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None] < count, ids.shape)
    logits, cache = extend(params, config, policy, cache, ids, live, token_map, taps=taps, every=True)
    wanted = ("indexer.topk", "expert_ids", "dspark_main_hidden")
    return logits, cache, {name: value for name, value in taps.items() if name.endswith(wanted)}


def padded_rows(ids: np.ndarray, config: ModelConfig) -> tuple[jax.Array, int]:
    """``ids [B, T]`` in as wide a chunk as other cases', and the capacity of a cache for it."""
    width = max(WIDTH, 1 << (ids.shape[1] - 1).bit_length(), config.document_alignment)
    padded = np.pad(ids, ((0, 0), (0, width - ids.shape[1])))
    return jnp.asarray(padded), -(-width // config.document_alignment) * config.document_alignment


def decode_taps(
    params: TextParams, config: ModelConfig, policy: Policy, ids: np.ndarray, prefill: int, token_map: jax.Array
) -> dict[str, np.ndarray]:
    """What a decode case records, under its names, from ``ids [B, T]`` of which the first ``prefill`` go in one chunk."""
    plans, time = layer_plans(config), ids.shape[1]
    padded, capacity = padded_rows(ids, config)
    empty = init_cache(config, policy, ids.shape[0], capacity)
    run = partial(extended, params, config, policy, token_map=token_map)
    logits, cache, taps = run(cache=empty, ids=padded, count=jnp.int32(prefill))
    found = {"prefill_logits": logits[:, :prefill]}
    if "dspark_main_hidden" in taps:
        found["prefill_main_hidden"] = taps["dspark_main_hidden"][:, :prefill]
    steps = []
    for at in range(prefill, time):
        logits, cache, taps = run(cache=cache, ids=jnp.asarray(ids[:, at : at + 1]), count=jnp.int32(1))
        experts = jnp.stack([taps[f"layers.{plan.layer}.ffn.expert_ids"] for plan in plans], axis=2)
        selected = {f"step.layers.{p.layer}.indexer.topk": taps[f"layers.{p.layer}.indexer.topk"] for p in plans if p.selects}
        steps.append({"step_logits": logits, "step_expert_ids": experts, **selected})
    found |= {name: jnp.concatenate([step[name] for step in steps], axis=1) for name in steps[0]}
    sources = [plan for plan in plans if plan.owns_kv]
    for plan, source in zip(sources, cache.sources, strict=True):
        for name, rows, fmt in (("main_kv", source.main_kv, MAIN_KV), ("index_k", source.index_k, INDEX_KEY)):
            found[f"final.layers.{plan.layer}.{name}"] = row_values(rows[:, : time // plan.ratio], fmt, jnp.float32)
    found["full_forward_logits"] = run(cache=empty, ids=padded, count=jnp.int32(time))[0][:, :time]
    return jax.device_get(found)
