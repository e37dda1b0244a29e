"""`index_topk` for Hopper: scores of all entries or of a query's candidates, then the best of them (`score.py`, `select.py`).

Scores pass through device memory, of so many queries at a time that they take at most `BOUND` bytes and stay in the L2. Keys that
are values are scored by XLA, of so many queries at a time that the products of all heads take at most four times as much.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dsv41.indexer import by_queries, operand_dtype, selection
from kernels_pallas.index_topk.keys import BLOCK, HEADS, TILE, WARP, WIDTH
from kernels_pallas.index_topk.score import Keys, Scoring, scores
from kernels_pallas.index_topk.select import Slicing, top_k, top_k_of_blocks

BOUND = 32 << 20  # bytes of scores at once


@dataclass(frozen=True)
class Tiling:
    """Of both kernels; None: by the shapes."""

    scoring: Scoring | None = None
    slicing: Slicing | None = None
    bound: int = BOUND


def refusal(
    q: Any,
    weights: Any,
    keys: Any,
    first: Any,
    count: Any,
    table: Any = None,
    pool: Any = None,
    *,
    k: int,
    keep: int = 0,
    block: int = BLOCK,
    tiling: Tiling = Tiling(),
) -> str | None:
    """Why these shapes or dtypes cannot run here."""
    for name, array in (("q", q), ("weights", weights)):
        if array.dtype not in (jnp.bfloat16, jnp.float32):
            return f"{name} are {array.dtype}, allowed are bfloat16 and float32"
    if keep and pool is not None:
        return "a query is restricted to blocks and to find new ones"
    for name, number in (("k", k), ("keep", keep)):
        if number % 4 or number > 4096:
            return f"{name} is {number}, allowed are multiples of 4 up to 4096"
    return None


def left_to_xla(q: Any, keys: Any, table: Any, pool: Any, keep: int, block: int) -> str | None:
    """Why XLA scores these keys, and the kernels only select."""
    if keys.dtype != jnp.uint8 and (keys.dtype != jnp.bfloat16 or q.dtype != jnp.bfloat16):
        return f"keys are {keys.dtype} and queries {q.dtype}, the kernel takes packed keys and values that are both bfloat16"
    if q.shape[2:] != (HEADS, WIDTH):
        return f"queries have {q.shape[2]} heads of {q.shape[3]} channels, the kernel takes {HEADS} of {WIDTH}"
    page = keys.shape[1]
    if page % BLOCK or (table is not None and page % WARP):
        return f"a page has {page} entries, the kernel takes multiples of {BLOCK if table is None else WARP}"
    if block != BLOCK and (keep or pool is not None):
        return f"a candidate block has {block} entries, the kernel takes {BLOCK}"
    return None


def run(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    first: jax.Array,
    count: jax.Array,
    table: jax.Array | None = None,
    pool: jax.Array | None = None,
    *,
    k: int,
    keep: int = 0,
    block: int = BLOCK,
    tiling: Tiling = Tiling(),
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """See `kernels_pallas.index_topk.api.index_topk`. interpret: parameters of Pallas' interpreter."""
    batch, time, heads, _ = q.shape
    entries = keys.shape[1] * (1 if table is None else table.shape[1])
    size = entries if pool is None else pool.shape[-1] * block
    if not size:
        return jnp.zeros((batch, time, 0), jnp.int32), None
    queries = (q, weights, first, count, *([] if pool is None else [pool]))
    if left_to_xla(q, keys, table, pool, keep, block) is None:
        part = partial(_chunk, keys=keys, table=table, entries=entries, k=min(k, size), keep=min(keep, size // BLOCK))
        part = partial(part, tiling=tiling, interpret=interpret)
        return by_queries(part, queries, max(1, tiling.bound // (4 * size * batch)))

    rows = keys if table is None else keys[jnp.maximum(table, 0)].reshape(batch, entries, -1)
    own = partial(pick, tiling=tiling, interpret=interpret)

    def scored(queries: tuple) -> tuple[jax.Array, jax.Array | None]:
        q, weights, first, count, *pools = queries
        at = (q, weights, rows, first, count, pools[0] if pools else None)
        return selection(*at, k=k, keep=keep, block=block, dtype=operand_dtype(q, rows), pick=own)[:2]

    return by_queries(scored, queries, max(1, 4 * tiling.bound // (4 * heads * entries * batch)))


def pick(scores: jax.Array, k: int, tiling: Tiling = Tiling(), interpret: Any = None) -> jax.Array:
    """`dsv41.indexer.select` by the kernels."""
    *lead, size = scores.shape
    rows = jnp.pad(scores.reshape(-1, size), ((0, 0), (0, -size % 4)), constant_values=-jnp.inf)
    slicing = tiling.slicing or _slicing(*rows.shape)
    return top_k(rows, (), min(k, rows.shape[1]), slicing, interpret=interpret)[:, : min(k, size)].reshape(*lead, -1)


def _chunk(
    queries: tuple, *, keys: jax.Array, table: Any, entries: int, k: int, keep: int, tiling: Tiling, interpret: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Scores of some queries, and the best of them."""
    q, weights, first, count, *pools = queries
    batch, time = q.shape[:2]
    stored = _keys(keys, table, entries, pools[0] if pools else None, time)
    scoring = tiling.scoring or _scoring(batch, time, stored.size, bool(pools))
    values, best = scores(q, weights, stored, first, count, scoring, bool(keep), interpret)
    rows = batch * time
    values, best = values.reshape(rows, -1), best.reshape(rows, -1)
    limits = () if pools else (first.reshape(rows), count.reshape(rows))
    select = partial(top_k, interpret=interpret)
    blocks = None
    if keep:
        blocks = select(best, limits, keep, tiling.slicing or _slicing(rows, best.shape[1]), divisor=BLOCK)
    # An entry among the best k is in one of the best k blocks: were there k better ones, so were their best entries. One more for
    # the newest visible entry's, which is among them in any case where candidates are looked for.
    enough = k + 4 * bool(keep)
    if pools or best.shape[1] <= 2 * enough:
        ids = select(values, limits, k, tiling.slicing or _slicing(rows, stored.size), stored.pool)
    else:
        if blocks is not None and enough <= keep <= 2048:
            few = blocks
        else:
            few = select(best, limits, enough, tiling.slicing or _slicing(rows, best.shape[1]), divisor=BLOCK)
        threads = tiling.slicing.threads if tiling.slicing else 512 if few.shape[1] <= 512 else 1024
        ids = top_k_of_blocks(values, few, k, threads, interpret)
    return ids.reshape(batch, time, -1), None if blocks is None else blocks.reshape(batch, time, -1)


def _keys(keys: jax.Array, table: Any, entries: int, pool: Any, time: int) -> Keys:
    pages, page, _ = keys.shape
    rows = keys.reshape(pages * page, -1)
    starts = jnp.arange(pages, dtype=jnp.int32)[:, None] * page if table is None else jnp.where(table < 0, -1, table * page)
    if pool is None:
        return Keys(rows, starts, page, entries)
    flat = pool.reshape(-1, pool.shape[-1])
    extra = -flat.shape[1] % (TILE // BLOCK)
    flat = jnp.pad(flat, ((0, 0), (0, extra)), constant_values=-1) if extra else flat
    owner = jnp.arange(flat.shape[0], dtype=jnp.int32)[:, None] // time
    first = jnp.maximum(flat, 0) * BLOCK
    begins = owner * page + first if table is None else starts[owner, first // page] + first % page
    return Keys(rows, jnp.where(flat < 0, -1, begins), BLOCK, flat.shape[1] * BLOCK, flat)


def _scoring(batch: int, time: int, size: int, pooled: bool) -> Scoring:
    if pooled or time == 1:
        return Scoring(warpgroups=3, slots=4)
    queries = min(16, time + time % 2)
    return Scoring(queries=queries, at_once=2 if queries % 4 else 4, ctas=132)


def _slicing(rows: int, size: int) -> Slicing:
    if size <= 16384:
        return Slicing(1024, 16)
    return Slicing(1024, 8) if rows * size <= 1 << 21 else Slicing(512, 16)
