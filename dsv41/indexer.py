"""The indexer: keys, scores, the candidate pool and stable top-k, as pure functions (architecture §7)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from dsv41.config import ModelConfig
from dsv41.numerics import Policy, Taps, linear, record, rms_norm
from dsv41.params import IndexerParams
from dsv41.quant import INDEX_KEY, fake_quant, row_values
from dsv41.rope import layer_frequencies, rotate, rotate_heads


def index_keys(
    latent: Float[Array, "B S K"], positions: Int[Array, "B S"], params: IndexerParams, config: ModelConfig, ratio: int
) -> Float[Array, "B S KI"]:
    """Keys before their FP4 form, from the pre-RoPE, un-quantised latent: wk, k_norm, RoPE at the group's position (§7)."""
    key = rms_norm(linear(latent, params.wk), params.k_norm, config.rms_norm_eps)
    return rotate(key, positions, layer_frequencies(config, ratio))


@jax.named_scope("indexer")
def index_scores(
    x: Float[Array, "B T D"],
    latent_q: Float[Array, "B T R"],
    keys: Array,
    positions: Int[Array, "B T"],
    params: IndexerParams,
    config: ModelConfig,
    policy: Policy,
    ratio: int,
    taps: Taps | None,
    name: str,
) -> Float32[Array, "B T S"]:
    """``sum_h w_h relu(q_h . k_s)`` in float32, unmasked.

    keys: values or stored bytes, ``[B, S, KI]`` for all queries or ``[B, T, S, KI]`` for each its own.
    """
    heads, width = config.index_n_heads, config.index_head_dim
    q: Any = linear(latent_q, params.wq_b).reshape(*x.shape[:2], heads, width)
    q = rotate_heads(q, positions, layer_frequencies(config, ratio))
    record(taps, f"{name}.q_prequant", q)
    if policy.quantize_index:
        q = fake_quant(q, INDEX_KEY)
    record(taps, f"{name}.q", q)
    weights = linear(x, params.weights_proj) * jnp.asarray(width**-0.5 * heads**-0.5, x.dtype)
    record(taps, f"{name}.weights", weights)
    keys = row_values(keys, INDEX_KEY, jnp.float32)
    equation = "bthk,bsk->bths" if keys.ndim == 3 else "bthk,btsk->bths"
    dots = jnp.einsum(equation, q.astype(jnp.float32), keys, precision=lax.Precision.HIGHEST)
    return jnp.einsum("bths,bth->bts", jax.nn.relu(dots), weights.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def candidate_blocks(
    scores: Float32[Array, "B T S"], first: Int[Array, "B T"], count: Int[Array, "B T"], block: int, keep: int
) -> Int[Array, "B T n"]:
    """The ``keep`` best blocks, ascending, -1 behind them; a block scores its best entry, and the newest visible is pinned.

    scores: causally masked with -inf.
    """
    size = scores.shape[-1]
    blocks = -(-size // block)
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, blocks * block - size)), constant_values=-jnp.inf)
    best = jnp.max(padded.reshape(*scores.shape[:2], blocks, block), axis=-1)
    index = jnp.arange(blocks, dtype=jnp.int32)[None, None]
    newest = (first + count - 1) // block
    best = jnp.where((index == newest[..., None]) & (count > 0)[..., None], jnp.inf, best)
    return select(best, keep)


def candidate_mask(blocks: Int[Array, "B T n"], block: int, size: int) -> Bool[Array, "B T S"]:
    """Membership of each of ``size`` entries in the blocks; those of the pinned block may not be visible yet."""
    kept = ids_to_mask(blocks, -(-size // block))
    return jnp.repeat(kept, block, axis=-1)[..., :size]


def candidate_entries(blocks: Int[Array, "B T n"], block: int) -> Int[Array, "B T m"]:
    """Numbers of the blocks' entries, ascending, -1 behind them; the last may lie past the end."""
    entries = blocks[..., None] * block + jnp.arange(block, dtype=jnp.int32)[None, None, None]
    return jnp.where(blocks[..., None] < 0, -1, entries).reshape(*blocks.shape[:2], -1)


def select(scores: Float32[Array, "B T S"], k: int) -> Int[Array, "B T k"]:
    """Ids of the ``min(k, S)`` best scores above -inf, ascending, -1 behind them; ties take the lowest index."""
    size = scores.shape[-1]
    value, ids = lax.top_k(scores, min(k, size))
    # The sentinel sorts behind every id.
    ordered = jnp.sort(jnp.where(value > -jnp.inf, ids, size), axis=-1)
    return jnp.where(ordered == size, -1, ordered)


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
    student: Float32[Array, "B T S"], mass: Float32[Array, "B T k"], ids: Int[Array, "B T k"], live: Bool[Array, "B T"]
) -> Float32[Array, ""]:
    """KL from the attention's own mass over the selected entries to the indexer's softmax over them (training §4.3).

    mass: attention probability of each selected entry summed over heads, with window and sink in the denominator; or a
    sum over layers of `teacher`.
    Averaged over live queries with two candidates or more.
    """
    valid = ids >= 0
    rows = live & (jnp.sum(valid, axis=-1) > 1)
    picked = jnp.take_along_axis(student, jnp.maximum(ids, 0), axis=-1)
    log_q = jax.nn.log_softmax(jnp.where(valid, picked, -1e30), axis=-1)
    p = teacher(mass, ids)
    terms = p * (jnp.log(jnp.maximum(p, 1e-30)) - log_q)
    per_query = jnp.sum(jnp.where(valid, terms, 0.0), axis=-1)
    return jnp.sum(jnp.where(rows, per_query, 0.0)) / jnp.maximum(jnp.sum(rows.astype(jnp.float32)), 1.0)
