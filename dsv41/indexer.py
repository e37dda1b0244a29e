"""The indexer: keys, scores, the candidate pool and stable top-k, as pure functions (architecture §7)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int

from dsv41 import context
from dsv41.config import ModelConfig
from dsv41.layout import causal_mask
from dsv41.numerics import Policy, Taps, linear, product, record, rms_norm
from dsv41.params import IndexerParams
from dsv41.quant import INDEX_KEY, fake_quant, row_values
from dsv41.rope import layer_frequencies, rotate, rotate_heads

Select = Callable[[Array, int], Array]  # `select` or what does the same
SELECTED = "selected"  # what a backward pass that computes a layer again takes from the forward pass
PICKED_BYTES = 64 << 20  # of selected keys, or of scores of a head, at once, as float32
ALL_KEYS = 32  # one of so many keys selected, or more: all are scored


def index_keys(
    latent: Float[Array, "B S K"], positions: Int[Array, "B S"], params: IndexerParams, config: ModelConfig, ratio: int
) -> Float[Array, "B S KI"]:
    """Keys before their FP4 form, from the pre-RoPE, un-quantised latent: wk, k_norm, RoPE at the group's position (§7)."""
    key = rms_norm(linear(latent, params.wk), params.k_norm, config.rms_norm_eps)
    return rotate(key, positions, layer_frequencies(config, ratio))


@jax.named_scope("indexer")
def index_queries(
    x: Float[Array, "B T D"],
    latent_q: Float[Array, "B T R"],
    positions: Int[Array, "B T"],
    params: IndexerParams,
    config: ModelConfig,
    policy: Policy,
    ratio: int,
    taps: Taps | None,
    name: str,
) -> tuple[Float[Array, "B T H KI"], Float[Array, "B T H"]]:
    """Queries in their FP4 form's values, and each head's weight with both scales in it (§7)."""
    heads, width = config.index_n_heads, config.index_head_dim
    q: Any = linear(latent_q, params.wq_b).reshape(*x.shape[:2], heads, width)
    q = rotate_heads(q, positions, layer_frequencies(config, ratio))
    record(taps, f"{name}.q_prequant", q)
    if policy.quantize_index:
        q = fake_quant(q, INDEX_KEY)
    record(taps, f"{name}.q", q)
    weights = linear(x, params.weights_proj) * jnp.asarray(width**-0.5 * heads**-0.5, x.dtype)
    record(taps, f"{name}.weights", weights)
    return q, weights


@jax.named_scope("indexer")
def key_scores(
    q: Float[Array, "B T H KI"], weights: Float[Array, "B T H"], keys: Array, dtype: Any = jnp.float32
) -> Float32[Array, "B T S"]:
    """``sum_h w_h relu(q_h . k_s)`` in float32, unmasked.

    keys: values or stored bytes, ``[B, S, KI]`` for all queries or ``[B, T, S, KI]`` for each its own; dtype: of q and k.
    """
    values, q = row_values(keys, INDEX_KEY, dtype), q.astype(dtype)
    equation = "bthk,bsk->bths" if keys.ndim == 3 else "bthk,btsk->bths"
    dots = product(equation, q, values, jnp.float32)
    return jnp.einsum("bths,bth->bts", jax.nn.relu(dots), weights.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def candidate_blocks(
    scores: Float32[Array, "B T S"],
    first: Int[Array, "B T"],
    count: Int[Array, "B T"],
    block: int,
    keep: int,
    pick: Select | None = None,
) -> Int[Array, "B T n"]:
    """The ``keep`` best blocks, ascending, -1 behind them; a block scores its best entry, and the newest visible is pinned.

    scores: causally masked with -inf. pick: in the place of `select`.
    """
    size = scores.shape[-1]
    blocks = -(-size // block)
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, blocks * block - size)), constant_values=-jnp.inf)
    best = jnp.max(padded.reshape(*scores.shape[:2], blocks, block), axis=-1)
    index = jnp.arange(blocks, dtype=jnp.int32)[None, None]
    newest = (first + count - 1) // block
    best = jnp.where((index == newest[..., None]) & (count > 0)[..., None], jnp.inf, best)
    return (pick or select)(best, keep)


def candidate_mask(blocks: Int[Array, "B T n"], block: int, size: int) -> Bool[Array, "B T S"]:
    """Membership of each of ``size`` entries in the blocks; those of the pinned block may not be visible yet."""
    kept = ids_to_mask(blocks, -(-size // block))
    return jnp.repeat(kept, block, axis=-1)[..., :size]


def candidate_entries(blocks: Int[Array, "B T n"], block: int) -> Int[Array, "B T m"]:
    """Numbers of the blocks' entries, ascending, -1 behind them; the last may lie past the end."""
    entries = blocks[..., None] * block + jnp.arange(block, dtype=jnp.int32)[None, None, None]
    return jnp.where(blocks[..., None] < 0, -1, entries).reshape(*blocks.shape[:2], -1)


def selection(
    q: Float[Array, "B T H KI"],
    weights: Float[Array, "B T H"],
    keys: Array,
    first: Int[Array, "B T"],
    count: Int[Array, "B T"],
    pool: Int[Array, "B T n"] | None,
    *,
    k: int,
    keep: int,
    block: int,
    gather: bool | None = None,
    dtype: Any = jnp.float32,
    taps: Taps | None = None,
    name: str = "",
    pick: Select | None = None,
) -> tuple[Int[Array, "B T k"], Int[Array, "B T keep"] | None, Float32[Array, "B T k"]]:
    """Selected entries, candidate blocks (None where ``keep`` is 0) and the scores of what is selected (§7).

    pool: the blocks that the selection is restricted to, None for none. gather: whether their keys are fetched and scored alone,
    at a cost that does not grow with the context, or every key is scored; by shape if None. dtype: see `key_scores`.
    pick: in the place of `select`.
    """
    pick = pick or select
    size = keys.shape[1]
    if pool is not None:
        gather = q.shape[1] * pool.shape[-1] * block <= size if gather is None else gather
        if gather:
            entries = candidate_entries(pool, block)
            rows = jax.vmap(lambda k, e: k[e])(keys, jnp.clip(entries, 0, size - 1))
            scores = key_scores(q, weights, rows, dtype)
            seen = (entries >= first[..., None]) & (entries < (first + count)[..., None])
            places = pick(jnp.where(seen, lax.stop_gradient(scores), -jnp.inf), k)
            ids = jnp.where(places < 0, -1, jnp.take_along_axis(entries, jnp.maximum(places, 0), axis=-1))
            record(taps, f"{name}.topk", ids)
            return ids, None, jnp.take_along_axis(scores, jnp.maximum(places, 0), axis=-1)
    scores = key_scores(q, weights, keys, dtype)
    masked = jnp.where(causal_mask(first, count, size), lax.stop_gradient(scores), -jnp.inf)
    record(taps, f"{name}.scores", masked)
    blocks = None
    if keep:
        blocks = candidate_blocks(masked, first, count, block, keep, pick)
        record(taps, f"{name}.candidates", candidate_mask(blocks, block, size))
    if pool is not None:
        masked = jnp.where(candidate_mask(pool, block, size), masked, -jnp.inf)
        record(taps, f"{name}.scores_masked", masked)
    ids = pick(masked, k)
    record(taps, f"{name}.topk", ids)
    return ids, blocks, jnp.take_along_axis(scores, jnp.maximum(ids, 0), axis=-1)


def picked_scores(
    q: Float[Array, "B T H KI"], weights: Float[Array, "B T H"], keys: Array, ids: Int[Array, "B T k"]
) -> Float32[Array, "B T k"]:
    """`key_scores` of the entries that ``ids`` names; -1 reads entry 0. Some queries at a time, scored anew for gradients.

    A selection of more than 1 in `ALL_KEYS` is taken from the scores of all entries: fetched keys' gradients go back by additions
    to one memory that wait for one another, the gradient of all keys is a product.
    """
    fetch = ids.shape[2] * ALL_KEYS < keys.shape[1]
    dtype = operand_dtype(q, keys)
    # So that the parts' gradients are summed in float32.
    keys = keys if keys.dtype == jnp.uint8 else keys.astype(jnp.float32)

    @jax.checkpoint
    def part(keys: Array, queries: tuple[Array, Array, Array]) -> Array:
        q, weights, ids = queries
        ids = jnp.maximum(ids, 0)
        if fetch:
            return key_scores(q, weights, jax.vmap(lambda k, i: k[i])(keys, ids), dtype)
        return jnp.take_along_axis(key_scores(q, weights, keys, dtype), ids, axis=-1)

    row = ids.shape[0] * 4 * (ids.shape[2] * q.shape[3] if fetch else q.shape[2] * keys.shape[1])
    return by_queries(partial(part, keys), (q, weights, ids), max(1, PICKED_BYTES // max(row, 1)))


def operand_dtype(q: Array, keys: Array) -> Any:
    """Of the operands of the product with the keys: bfloat16 where that holds both exactly."""
    return jnp.bfloat16 if q.dtype == jnp.bfloat16 and keys.dtype in (jnp.uint8, jnp.bfloat16) else jnp.float32


def by_queries(function: Callable[[Any], Any], queries: Any, at_once: int) -> Any:
    """``function`` of arrays ``[B, T, ...]``, ``at_once`` queries or somewhat fewer at a time, one part after the other."""
    batch, time = jax.tree.leaves(queries)[0].shape[:2]
    if at_once >= time:
        return function(queries)
    chunks = -(-time // at_once)
    size = -(-time // chunks)

    def split(a: Array) -> Array:
        padded = jnp.pad(a, ((0, 0), (0, chunks * size - time), *((0, 0),) * (a.ndim - 2)))
        return jnp.moveaxis(padded.reshape(batch, chunks, size, *a.shape[2:]), 1, 0)

    def join(a: Array) -> Array:
        return jnp.moveaxis(a, 0, 1).reshape(batch, chunks * size, *a.shape[3:])[:, :time]

    return jax.tree.map(join, lax.map(function, jax.tree.map(split, queries)))


def select(scores: Float32[Array, "B T S"], k: int) -> Int[Array, "B T k"]:
    """Ids of the ``min(k, S)`` best scores above -inf, ascending, -1 behind them; ties take the lowest index."""
    size = scores.shape[-1]
    value, ids = lax.top_k(scores, min(k, size))
    # The sentinel sorts behind every id.
    ordered = jnp.sort(jnp.where(value > -jnp.inf, ids, size), axis=-1)
    return checkpoint_name(jnp.where(ordered == size, -1, ordered), SELECTED)


def ids_to_mask(ids: Int[Array, "B T k"], size: int) -> Bool[Array, "B T S"]:
    """Membership mask of -1-padded ids; -1 goes to a slot past the end, since scatters wrap negative ids."""
    batch, time = (jnp.arange(n, dtype=jnp.int32) for n in ids.shape[:2])
    slots = jnp.where(ids < 0, size, ids)
    mask = jnp.zeros((*ids.shape[:2], size + 1), bool)
    return mask.at[batch[:, None, None], time[None, :, None], slots].set(True)[..., :size]


def teacher(mass: Float32[Array, "B T k"], ids: Int[Array, "B T k"]) -> Float32[Array, "B T k"]:
    """Attention mass of the selected entries as a distribution over them, detached; zeros where there is none."""
    mass = jnp.where(ids >= 0, lax.stop_gradient(mass), 0.0)
    return mass / jnp.maximum(jnp.sum(mass, axis=-1, keepdims=True), 1e-30)


def index_kl(
    picked: Float32[Array, "B T k"], mass: Float32[Array, "B T k"], ids: Int[Array, "B T k"], live: Bool[Array, "B T"]
) -> Float32[Array, ""]:
    """KL from the attention's own mass over the selected entries to the indexer's softmax over them (training §4.3).

    picked: the indexer's scores of the selected entries.
    mass: attention probability of each selected entry summed over heads, with window and sink in the denominator; or a
    sum over layers of `teacher`.
    Averaged over live queries with two candidates or more; of a row in parts, this device's share of that.
    """
    valid = ids >= 0
    rows = live & (jnp.sum(valid, axis=-1) > 1)
    log_q = jax.nn.log_softmax(jnp.where(valid, picked, -1e30), axis=-1)
    p = teacher(mass, ids)
    terms = p * (jnp.log(jnp.maximum(p, 1e-30)) - log_q)
    per_query = jnp.sum(jnp.where(valid, terms, 0.0), axis=-1)
    count = context.total(jnp.sum(rows.astype(jnp.float32)))
    return jnp.sum(jnp.where(rows, per_query, 0.0)) / jnp.maximum(count, 1.0)
