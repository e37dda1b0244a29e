"""A block's attention site: what the layer publishes, what it selects, what it reads (architecture §4-§7).

`whole_row` is the site of a full sequence; `dsv41.cache.cached_site` the one of a chunk behind a cache. Both are made of the
functions here.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int

from dsv41 import attention, compress, context, indexer
from dsv41.config import ModelConfig
from dsv41.layout import Layout, visible_entries
from dsv41.numerics import Policy, Taps, record
from dsv41.pages import Pages, Rows, dense
from dsv41.params import AttentionParams
from dsv41.plan import LayerPlan
from dsv41.quant import INDEX_KEY, MAIN_KV, WINDOW_KV, Format, fake_quant, pack_rows
from dsv41.sharding import total
from kernels_pallas import registry
from kernels_pallas.index_topk.api import index_topk


@struct.dataclass
class Shared:
    """What a layer publishes for those that follow: main KV, index keys, selected ids, candidate pool.

    Carried from block to block, so that gradients of every reader sum at the owner. main_kv ``[B, S, K]``, index_k
    ``[B, S, KI]``: values, or the bytes that the cache stores, in pages or not. ids ``[B, T, k]``: entry numbers, -1 behind
    them. pool ``[B, T, n]``: numbers of candidate blocks, -1 behind them. student, mass ``[B, T, k]``: the selection's scores
    and the sum of its readers' `indexer.teacher`, where the policy wants the mean over them.
    """

    main_kv: Rows | None = None
    index_k: Rows | None = None
    ids: jax.Array | None = None
    pool: jax.Array | None = None
    student: jax.Array | None = None
    mass: jax.Array | None = None


# (x, params, plan, carried, layout, config, policy, taps) -> (output, carried, index loss)
Site = Callable[..., tuple[Any, Any, Any]]
Core = Callable[[jax.Array], tuple[Any, Any]]  # rotated queries [B, T, H, K] -> (outputs, probability of selected entries)
Former = Callable[[Any, Format, bool], Any]  # how rows are held: as values, or in the cache's stored form


def quantized(x: Float[Array, "*s n"], fmt: Format, on: bool) -> Float[Array, "*s n"]:
    """Values as the cache would give them back."""
    return fake_quant(x, fmt) if on else x


def window_rows(
    x: Float[Array, "B T D"],
    params: AttentionParams,
    plan: LayerPlan,
    layout: Layout,
    config: ModelConfig,
    policy: Policy,
    taps: Taps | None,
    form: Former = quantized,
) -> Array:
    """The layer's own window rows ``[B, T, K]`` (§4.2)."""
    kv = attention.window_kv(x, layout.positions, params, config, plan.ratio)
    name = f"{plan.name}.attn.swa_kv"
    record(taps, f"{name}_prequant", kv)
    kv = form(kv, WINDOW_KV, policy.quantize_window)
    record(taps, name, kv)
    return kv


def publish(
    latent: Float[Array, "B S K"],
    positions: Int[Array, "B S"],
    params: AttentionParams,
    plan: LayerPlan,
    config: ModelConfig,
    policy: Policy,
    taps: Taps | None,
    form: Former = quantized,
) -> tuple[Rows, Rows]:
    """Main KV entries ``[B, S, K]`` and index keys ``[B, S, KI]`` of new latents at their groups' positions (§5, §7)."""
    name = plan.name
    record(taps, f"{name}.attn.latent", latent)
    entries = compress.main_kv(latent, positions, config, plan.ratio)
    record(taps, f"{name}.attn.main_kv_prequant", entries)
    entries = form(entries, MAIN_KV, policy.quantize_main_kv)
    record(taps, f"{name}.attn.main_kv", entries)
    # Detached: the indexer learns from its own loss only.
    keys = indexer.index_keys(lax.stop_gradient(latent), positions, params.indexer, config, plan.ratio)
    record(taps, f"{name}.indexer.k_prequant", keys)
    keys = form(keys, INDEX_KEY, policy.quantize_index)
    record(taps, f"{name}.indexer.k", keys)
    return entries, keys


def choose(
    x: Float[Array, "B T D"],
    latent_q: Float[Array, "B T R"],
    params: AttentionParams,
    plan: LayerPlan,
    shared: Shared,
    layout: Layout,
    config: ModelConfig,
    policy: Policy,
    taps: Taps | None,
    gather: bool | None = None,
) -> tuple[Shared, Float32[Array, "B T k"]]:
    """Scores the published keys and publishes the selected ids, at the candidate source the pool too (§7).

    gather: see `indexer.selection`. Also the scores of what is selected, for the indexer's loss.
    """
    name = f"{plan.name}.indexer"
    # Detached inputs: the indexer learns from its own loss only, the model from the language loss only.
    detached = lax.stop_gradient((x, latent_q))
    queries = indexer.index_queries(*detached, layout.positions, params.indexer, config, policy, plan.ratio, taps, name)
    seen = visible_entries(layout, plan.ratio)
    keys: Any = shared.index_k
    table = keys.table if isinstance(keys, Pages) else None
    pool: Any = shared.pool if plan.pool == "consumes" and policy.candidate_pool else None
    keep = config.candidate_topk_blocks if plan.pool == "publishes" else 0
    options = {"k": config.index_topk, "keep": keep, "block": config.candidate_block_size}
    form = partial(stored_keys, on=policy.quantize_index)
    arrays = (*queries, jax.eval_shape(form, keys), *seen, table, pool)
    if taps is None and registry.choose("index_topk", "auto", *arrays, **options).impl != "reference":
        if pool is not None and pool.shape[-1] * options["block"] >= keys.shape[1]:
            pool = None  # Every visible block is in it.
        fixed = lax.stop_gradient((*queries, form(keys)))
        ids, blocks = checkpoint_name(index_topk(*fixed, *seen, table, pool, **options), indexer.SELECTED)
        picked = indexer.picked_scores(*queries, dense(keys), ids)
    else:
        options |= {"gather": gather, "taps": taps, "name": name}
        ids, blocks, picked = indexer.selection(*queries, dense(keys), *seen, pool, **options)
    return replace(shared, ids=ids, pool=blocks if keep else shared.pool), picked


def stored_keys(keys: Rows, on: bool) -> Array:
    """Index keys, or their pool, as bytes where they are quantised but held as values, as in a full sequence."""
    if isinstance(keys, Pages):
        return keys.pool
    return pack_rows(keys, INDEX_KEY) if on and keys.dtype != jnp.uint8 else keys


def read(
    latent_q: Float[Array, "B T R"],
    core: Core,
    params: AttentionParams,
    plan: LayerPlan,
    layout: Layout,
    config: ModelConfig,
    taps: Taps | None,
) -> tuple[Float[Array, "B T D"], Float32[Array, "B T k"] | None]:
    """The site's output, and what ``core`` says of each selected entry's probability (§4)."""
    q = attention.queries(latent_q, layout.positions, params, config, plan.ratio)
    name = f"{plan.name}.attn"
    record(taps, f"{name}.q", q)
    out, mass = core(q)
    mass = None if mass is None else total(mass, "model")
    y = attention.project_out(out, layout.positions, params, config, plan.ratio, taps, name)
    record(taps, f"{name}.out", y)
    return y, mass


def visible(plan: LayerPlan, shared: Shared) -> tuple[Any, Any]:
    """The published entries and selected ids that a layer attends to; None in a layer with a window alone."""
    return (shared.main_kv, shared.ids) if plan.ratio else (None, None)


def publish_row(
    x: Float[Array, "B T D"],
    params: AttentionParams,
    plan: LayerPlan,
    shared: Shared,
    layout: Layout,
    config: ModelConfig,
    policy: Policy,
    taps: Taps | None,
) -> Shared:
    """What a kv source publishes of a full sequence, to every device that has a part of it."""
    latent = compress.latents(x, params.compressor, config, plan.ratio)
    positions = compress.group_positions(layout.positions, plan.ratio)
    published = publish(latent, positions, params, plan, config, policy, taps)
    entries, keys = (context.entries(a, x.shape[1], plan.ratio) for a in published)
    return replace(shared, main_kv=entries, index_k=keys)


def _served(total: Array | None, mass: Array | None, ids: Array | None) -> Array | None:
    if mass is None:
        return total
    own = indexer.teacher(mass, ids)
    return own if total is None else total + own


def served_kl(shared: Shared, layout: Layout) -> Float32[Array, ""]:
    """The loss of the selection at hand against the mean of its readers, so far; 0 where none is kept (training §4.3)."""
    if shared.student is None or shared.mass is None:
        return jnp.zeros((), jnp.float32)
    return indexer.index_kl(shared.student, shared.mass, shared.ids, layout.live)


def whole_row(
    x: Float[Array, "B T D"],
    params: AttentionParams,
    plan: LayerPlan,
    shared: Shared,
    layout: Layout,
    config: ModelConfig,
    policy: Policy,
    taps: Taps | None,
    publishes: bool = True,
) -> tuple[Float[Array, "B T D"], Shared, Float32[Array, ""]]:
    """The site of a full sequence: everything it may read is in the row. Also the indexer's loss (training §4.3).

    With the mean over a selection's readers as its teacher, the loss is that of the selection before, which ends here.
    publishes: False where a kv source's entries are in ``shared`` already.
    """
    latent_q = attention.query_latent(x, params, config)
    rows = window_rows(x, params, plan, layout, config, policy, taps)
    if plan.owns_kv and publishes:
        shared = publish_row(x, params, plan, shared, layout, config, policy, taps)
    picked, kl = None, jnp.zeros((), jnp.float32)
    if plan.selects:
        kl = served_kl(shared, layout)
        shared, picked = choose(x, latent_q, params, plan, shared, layout, config, policy, taps)
        if policy.index_teacher == "served":
            shared = replace(shared, student=picked, mass=None)
    core = lambda q: attention.attend_row(q, rows, *visible(plan, shared), params.sink, layout, config.sliding_window)  # noqa: E731
    y, mass = read(latent_q, core, params, plan, layout, config, taps)
    if policy.index_teacher == "served":
        return y, replace(shared, mass=_served(shared.mass, mass, shared.ids)), kl
    if picked is not None and mass is not None:
        kl = indexer.index_kl(picked, mass, shared.ids, layout.live)
    return y, shared, kl
