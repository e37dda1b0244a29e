"""A request's cache taken apart and put together again: blocks of entries and keys, and where a replay begins (serving §3, §4).

A block is what ``n`` tokens leave in every source, entries and index keys, n a multiple of every ratio. It never changes, and
depends on the tokens up to its end alone, so it can be kept anywhere and given to any request that begins with them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dsv41.cache import Cache
from dsv41.config import ModelConfig
from dsv41.plan import layer_plans

# For each source its entries and its index keys, [m, n // r, row].
Blocks = tuple[tuple[Any, Any], ...]


def history_at(ids: Sequence[int], start: int, token_map: np.ndarray, config: ModelConfig) -> np.ndarray:
    """`Cache.history` of a request of text before token ``start``, int32 ``[n - 1]``: of its tokens, so that nobody keeps it."""
    depth = config.engram_max_ngram_size - 1 if config.engram_layer_ids else 0
    last = token_map[np.asarray(ids[max(start - depth, 0) : start], np.int32)]
    return np.concatenate([np.full(depth - len(last), -1, np.int32), last.astype(np.int32)])


def _paged(rows: Array, tokens: int, ratio: int) -> Array:
    """``[B, S, row]`` or ``[P, n, row]`` as pages of a block each."""
    return rows.reshape(-1, tokens // ratio, rows.shape[-1])


def _ratios(config: ModelConfig) -> list[int]:
    return [plan.ratio for plan in layer_plans(config) if plan.owns_kv]


def take_blocks(cache: Cache, places: Int[Array, " m"], tokens: int, config: ModelConfig) -> Blocks:
    """Copies of blocks of ``tokens``: of a pool by page; of rows one after another, each a multiple of blocks long, by number."""
    rows = zip(cache.sources, _ratios(config), strict=True)
    pick = lambda a, ratio: _paged(a, tokens, ratio)[places]  # noqa: E731
    return tuple((pick(source.main_kv, ratio), pick(source.index_k, ratio)) for source, ratio in rows)


def put_blocks(cache: Cache, places: Int[Array, " m"], blocks: Blocks, tokens: int, config: ModelConfig) -> Cache:
    """The cache with blocks at the places that `take_blocks` would take them from; places past the end are dropped."""

    def put(rows: Array, ratio: int, new: Array) -> Array:
        return _paged(rows, tokens, ratio).at[places].set(jnp.asarray(new), mode="drop").reshape(rows.shape)

    sources = zip(cache.sources, _ratios(config), blocks, strict=True)
    done = (
        replace(source, main_kv=put(source.main_kv, ratio, new[0]), index_k=put(source.index_k, ratio, new[1]))
        for source, ratio, new in sources
    )
    return replace(cache, sources=tuple(done))
