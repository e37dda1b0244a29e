"""`index_topk` for Hopper: scores of all entries or of a query's candidates, then the best of them (`score.py`, `select.py`).

Scores pass through device memory, of so many queries at a time that they take at most `BOUND` bytes and stay in the L2.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv41.quant import INDEX_KEY
from kernels_pallas.index_topk.keys import BLOCK, HEADS, ROW, TILE, WARP, WIDTH
from kernels_pallas.index_topk.score import Keys, Scoring, scores
from kernels_pallas.index_topk.select import Slicing, top_k

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
    if keys.dtype != jnp.uint8:
        return f"keys are {keys.dtype}, allowed is the packed form"
    if q.shape[2:] != (HEADS, WIDTH):
        return f"queries have {q.shape[2]} heads of {q.shape[3]} channels, allowed are {HEADS} of {WIDTH}"
    if keys.shape[-1] != INDEX_KEY.row_bytes(WIDTH):
        return f"keys have rows of {keys.shape[-1]} bytes, allowed are {ROW}"
    for name, array in (("q", q), ("weights", weights)):
        if array.dtype not in (jnp.bfloat16, jnp.float32):
            return f"{name} are {array.dtype}, allowed are bfloat16 and float32"
    page = keys.shape[1]
    if page % BLOCK or (table is not None and page % WARP):
        return f"a page has {page} entries, allowed are multiples of {BLOCK if table is None else WARP}"
    if block != BLOCK and (keep or pool is not None):
        return f"a candidate block has {block} entries, allowed are {BLOCK}"
    if keep and pool is not None:
        return "a query is restricted to blocks and to find new ones"
    for name, number in (("k", k), ("keep", keep)):
        if number % 4 or number > 4096:
            return f"{name} is {number}, allowed are multiples of 4 up to 4096"
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
    batch, time = q.shape[:2]
    entries = keys.shape[1] * (1 if table is None else table.shape[1])
    size = entries if pool is None else pool.shape[-1] * BLOCK
    if not size:
        return jnp.zeros((batch, time, 0), jnp.int32), None
    shared = (keys, table, entries, min(k, size), min(keep, size // BLOCK), tiling, interpret)
    queries = (q, weights, first, count, *([] if pool is None else [pool]))
    at_once = max(1, tiling.bound // (4 * size * batch))
    if at_once >= time:
        return _chunk(queries, *shared)
    at_once = -(-time // -(-time // at_once))
    chunks = -(-time // at_once)
    # A query past the last sees nothing.
    padded = [jnp.pad(a, ((0, 0), (0, chunks * at_once - time), *((0, 0),) * (a.ndim - 2))) for a in queries]
    split = [jnp.moveaxis(a.reshape(batch, chunks, at_once, *a.shape[2:]), 1, 0) for a in padded]
    ids, blocks = lax.map(lambda part: _chunk(part, *shared), tuple(split))
    join = lambda a: jnp.moveaxis(a, 0, 1).reshape(batch, chunks * at_once, -1)[:, :time]  # noqa: E731
    return join(ids), None if blocks is None else join(blocks)


def _chunk(
    queries: tuple, keys: jax.Array, table: Any, entries: int, k: int, keep: int, tiling: Tiling, interpret: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Scores of some queries, and the best of them."""
    q, weights, first, count, *pools = queries
    batch, time = q.shape[:2]
    stored = _keys(keys, table, entries, pools[0] if pools else None, time)
    scoring = tiling.scoring or _scoring(batch, time, stored.size, bool(pools))
    values, best = scores(q, weights, stored, first, count, scoring, interpret)
    rows = batch * time
    limits = () if pools else (first.reshape(rows), count.reshape(rows))
    slicing = tiling.slicing or _slicing(rows, stored.size)
    ids = top_k(values.reshape(rows, -1), limits, k, slicing, stored.pool, interpret=interpret)
    blocks = None
    if keep:
        slicing = tiling.slicing or Slicing(1024, 16 if stored.size // BLOCK > 16384 or keep < 1024 else 8)
        blocks = top_k(best.reshape(rows, -1), limits, keep, slicing, divisor=BLOCK, interpret=interpret)
    return ids.reshape(batch, time, -1), None if blocks is None else blocks.reshape(batch, time, -1)


def _keys(keys: jax.Array, table: Any, entries: int, pool: Any, time: int) -> Keys:
    pages, page, _ = keys.shape
    rows = keys.reshape(pages * page, ROW)
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
        return Scoring()
    if time < 16:
        return Scoring(queries=time, at_once=2 if time % 2 == 0 else 1, ctas=132)
    return Scoring(queries=16, at_once=4, ctas=132)


def _slicing(rows: int, size: int) -> Slicing:
    if size <= 16384:
        return Slicing(1024, 16)
    return Slicing(1024, 8) if rows * size <= 1 << 21 else Slicing(512, 16)
