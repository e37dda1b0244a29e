"""What a model does inside, on fixed rows: how much of attention the selections and the pool catch, gates, table rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from dsv41.attention import attend
from dsv41.config import ModelConfig
from dsv41.indexer import ids_to_mask, select
from dsv41.layout import Layout, causal_mask, make_layout, visible_entries
from dsv41.model import features
from dsv41.numerics import Policy, Taps
from dsv41.params import TextParams, init_std, text_specs
from dsv41.plan import LayerPlan, layer_plans

Diagnose = Callable[[TextParams, Any, Any], dict[str, jax.Array]]


def _mean(values: Array, where: Bool[Array, "*s"]) -> Float32[Array, ""]:
    """NaN where nothing is to be measured."""
    count = jnp.sum(where.astype(jnp.float32))
    return jnp.where(count > 0, jnp.sum(jnp.where(where, values, 0.0)) / jnp.maximum(count, 1.0), jnp.nan)


def attention_mass(
    taps: Taps, plan: LayerPlan, params: TextParams, layout: Layout, config: ModelConfig
) -> Float32[Array, "B T S"]:
    """A layer's attention if it read all visible entries: each one's probability, summed over heads (§4.5)."""
    name, at = f"layers.{plan.kv_source}.attn", f"layers.{plan.layer}.attn"
    entries = taps[f"{name}.main_kv"]
    first, count = visible_entries(layout, plan.ratio)
    index = jnp.broadcast_to(jnp.arange(entries.shape[1], dtype=jnp.int32), (*count.shape, entries.shape[1]))
    ids = jnp.where(causal_mask(first, count, entries.shape[1]), index, -1)
    sink = params.layers[plan.layer].attn.sink
    mass = attend(taps[f"{at}.q"], taps[f"{at}.swa_kv"], entries, ids, sink, layout, config.sliding_window, gather=False)[1]
    assert mass is not None
    return mass


def _selection(
    taps: Taps, plan: LayerPlan, params: TextParams, layout: Layout, config: ModelConfig
) -> dict[str, Float32[Array, ""]]:
    """Recall of one index source: of queries that see more entries than they may select."""
    name = f"layers.{plan.layer}.indexer"
    ids: Int[Array, "B T k"] = taps[f"{name}.topk"]
    mass = attention_mass(taps, plan, params, layout, config)
    bound = layout.live & (visible_entries(layout, plan.ratio)[1] > config.index_topk)
    caught = jnp.sum(jnp.where(ids_to_mask(ids, mass.shape[-1]), mass, 0.0), axis=-1)
    best = jnp.sum(jax.lax.top_k(mass, min(config.index_topk, mass.shape[-1]))[0], axis=-1)
    found = {
        f"index_recall.{plan.layer}": _mean(caught / jnp.maximum(jnp.sum(mass, axis=-1), 1e-30), bound),
        f"index_recall_of_best.{plan.layer}": _mean(caught / jnp.maximum(best, 1e-30), bound),
    }
    if plan.pool == "consumes":
        pool = taps[f"layers.{config.candidate_source_layer_id}.indexer.candidates"]
        free = ids_to_mask(select(taps[f"{name}.scores"], config.index_topk), pool.shape[-1])
        kept = jnp.sum((free & pool).astype(jnp.float32), axis=-1) / jnp.maximum(jnp.sum(free.astype(jnp.float32), axis=-1), 1.0)
        found[f"pool_recall.{plan.layer}"] = _mean(kept, bound)
        inside = jnp.sum(jnp.where(pool, mass, 0.0), axis=-1) / jnp.maximum(jnp.sum(mass, axis=-1), 1e-30)
        found[f"pool_mass.{plan.layer}"] = _mean(inside, bound)
    return found


def make_diagnose(config: ModelConfig, policy: Policy, token_map: Any) -> Diagnose:
    """``diagnose(params, ids, segments) -> values``, jitted; ids and segments int32[B, T]. float32[] under these names:

    ``index_recall.L``: of the attention that layer L, an index source, would pay all visible entries, the share that its
    selection catches; ``index_recall_of_best.L``: of what the best selection of that size would catch. ``pool_recall.L``: of
    what layer L would select without a pool, the share inside it; ``pool_mass.L``: of its attention. These are means over
    queries that see more entries than they select, NaN where there are none. ``engram_gate.L``: mean gate over live tokens and
    streams. ``engram_row_growth.L``: RMS of the table rows that were read, over that of initial ones.
    """
    fold = jnp.asarray(token_map, jnp.int32)

    def diagnose(params: TextParams, ids: Array, segments: Array) -> dict[str, jax.Array]:
        taps: Taps = {}
        features(params, config, policy, ids, segments, fold, taps)
        layout, found = make_layout(segments), {}
        for plan, layer, spec in zip(layer_plans(config), params.layers, text_specs(config).layers, strict=True):
            if plan.selects:
                found |= _selection(taps, plan, params, layout, config)
            if layer.engram is not None and spec.engram is not None:
                name = f"layers.{plan.layer}.engram"
                gate = jnp.mean(taps[f"{name}.gate"].astype(jnp.float32), axis=-1)
                found[f"engram_gate.{plan.layer}"] = _mean(gate, layout.live)
                rows = layer.engram.embed[taps[f"{name}.hash_ids"]]
                size = jnp.sqrt(_mean(jnp.mean(jnp.square(rows), axis=(-1, -2)), layout.live))
                found[f"engram_row_growth.{plan.layer}"] = size / init_std(config, spec.engram.embed)
        return found

    return jax.jit(diagnose)
