"""Shapes that tests and benchmarks of `index_topk` share, and what they cost."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dsv41.indexer import select
from dsv41.quant import INDEX_KEY, row_values


@dataclass(frozen=True)
class Case:
    """``queries`` of each of ``batch`` requests of ``entries`` entries, in pages of ``page`` (0: one page a request).

    topk entries are wanted; keep: candidate blocks too; pool: each query is restricted to so many blocks of ``block``.
    """

    batch: int = 1
    queries: int = 1
    entries: int = 65536
    page: int = 0
    heads: int = 32
    width: int = 128
    topk: int = 512
    keep: int = 0
    pool: int = 0
    block: int = 8
    dtype: str = "bfloat16"
    start: bool = False  # queries of a packed row: what they see begins after entry 0
    spread: int = 4  # queries of a request end within the last such part of its entries
    values: bool = False  # keys are bfloat16 values
    selection: bool = False  # the best of given scores alone are timed
    levels: int = 0  # not 0: channels have so few values that scores tie


REAL = {
    "selection, 1 x 1M": Case(entries=1 << 20, selection=True),
    "selection, 64 x 128K": Case(batch=64, entries=1 << 17, selection=True),
    "selection, 128 x 16K": Case(batch=128, entries=1 << 14, selection=True),
    "1 query, 1M": Case(entries=1 << 20),
    "1 query, 1M, candidates": Case(entries=1 << 20, keep=2048),
    "6 queries, 1M": Case(queries=6, entries=1 << 20),
    "32 requests, 64K": Case(batch=32, page=128),
    "128 queries, 64K": Case(queries=128),
    "32 requests, 2048 candidates of 64K": Case(batch=32, pool=2048),
    "32 requests, 2048 candidates of 1M": Case(batch=32, entries=1 << 20, pool=2048),
    "prefill, 4096 queries, 64K": Case(queries=4096),
    "training, 4096 queries, 4096": Case(queries=4096, entries=4096, spread=1),
    "training, 4096 queries, 4096, values": Case(queries=4096, entries=4096, spread=1, values=True),
    "training, 8192 queries, 8192, values": Case(queries=8192, entries=8192, spread=1, values=True),
}
SMALL = {
    "one query": Case(entries=200, topk=32),
    "fewer entries than wanted": Case(batch=2, queries=3, entries=24, topk=32, keep=4),
    "several queries, ragged": Case(batch=2, queries=5, entries=328, topk=48, keep=8, start=True),
    "pages": Case(batch=2, queries=2, entries=256, page=32, topk=64),
    "ties": Case(queries=3, entries=520, topk=100, keep=12, levels=2),
    "blocks first, ties": Case(queries=3, entries=1304, topk=60, levels=2, start=True),
    "blocks first, candidates": Case(queries=2, entries=648, topk=12, keep=20),
    "blocks first, few candidates": Case(queries=3, entries=1200, topk=60, keep=8, levels=2),
    "values": Case(batch=2, queries=5, entries=200, topk=32, keep=8, start=True, values=True),
    "values, candidates": Case(batch=2, queries=2, entries=208, topk=40, pool=12, values=True),
    "candidates": Case(batch=2, queries=2, entries=400, topk=40, pool=12),
    "candidates in pages, float32": Case(batch=2, entries=384, page=48, topk=64, pool=16, dtype="float32", start=True),
}
CASES = {**SMALL, **REAL}


def _pages(case: Case) -> tuple[int, int]:
    """Pages of a request, and entries of one."""
    page = case.page or case.entries
    return -(-case.entries // page), page


def abstract(case: Case) -> tuple:
    """Shapes and dtypes of the op's arguments."""
    shape, (pages, page) = jax.ShapeDtypeStruct, _pages(case)
    rows, dtype = (case.batch, case.queries), jnp.dtype(case.dtype)
    ints = partial(shape, dtype=jnp.int32)
    return (
        shape((*rows, case.heads, case.width), dtype),
        shape((*rows, case.heads), dtype),
        shape((case.batch * pages, page, case.width), jnp.bfloat16)
        if case.values
        else shape((case.batch * pages, page, INDEX_KEY.row_bytes(case.width)), jnp.uint8),
        ints(rows),
        ints(rows),
        ints((case.batch, pages)) if case.page else None,
        ints((*rows, case.pool)) if case.pool else None,
    )


def arguments(case: Case, seed: int = 0) -> tuple:
    """Random arguments; queries see what is theirs of a causal row, the last one all of it. Of a selection alone, scores."""
    keys = jax.random.split(jax.random.key(seed), 8)
    if case.selection:
        return (jax.random.normal(keys[0], (case.batch, case.queries, case.entries)),)
    pages, page = _pages(case)
    rows = (case.batch, case.queries)
    stored = (case.batch * pages, page)
    if case.levels:
        elements = jax.random.randint(keys[0], (*stored, case.width // 2), 0, case.levels, jnp.int32).astype(jnp.uint8) * 0x22
        scales = jnp.full((*stored, case.width // INDEX_KEY.group), 127, jnp.uint8)
    else:
        elements = jax.random.bits(keys[0], (*stored, case.width // 2), jnp.uint8)
        scales = jax.random.randint(keys[1], (*stored, case.width // INDEX_KEY.group), 119, 125, jnp.int32).astype(jnp.uint8)
    q = jax.random.normal(keys[2], (*rows, case.heads, case.width), jnp.float32)
    weights = jnp.abs(jax.random.normal(keys[3], (*rows, case.heads), jnp.float32))
    if case.levels:
        q, weights = jnp.where(jax.random.uniform(keys[5], q.shape) < 0.05, jnp.round(q), 0.0), jnp.ones_like(weights)
    index = partial(jnp.arange, dtype=jnp.int32)
    back = index(case.queries)[None, ::-1] * (case.entries // (case.spread * case.queries)) + index(case.batch)[:, None] * 5 % 16
    last = jnp.maximum(case.entries - back, 0)
    first = jnp.minimum(case.entries // 5 // 16 * 16 if case.start else 0, last)
    table = pool = None
    if case.page:
        table = jax.random.permutation(keys[4], case.batch * pages).reshape(case.batch, pages).astype(jnp.int32)
    if case.pool:
        blocks = case.entries // case.block
        # A stride without a common factor with the number of blocks visits each once.
        step = next(s for s in (7919, 104729, 1) if blocks % s)
        start = jax.random.randint(keys[6], (*rows, 1), 0, blocks, jnp.int32)
        pool = jnp.sort((start + step * index(case.pool)[None, None]) % blocks, axis=-1)
        pool = jnp.where(index(case.pool)[None, None] < case.pool - (3 if case.pool < 64 else 0), pool, -1)
    dtype = jnp.dtype(case.dtype)
    rows = jnp.concatenate([elements, scales], axis=-1)
    rows = row_values(rows, INDEX_KEY, jnp.bfloat16) if case.values else rows
    return q.astype(dtype), weights.astype(dtype), rows, first, last - first, table, pool


def timed(case: Case, run: Any) -> Any:
    """What a benchmark times: the op, or the selection that it does on given scores."""
    if not case.selection:
        return run
    from kernels_pallas.index_topk import gpu

    return partial(gpu.pick if run.func is gpu.run else select, k=case.topk)


def options(case: Case) -> dict:
    """Static options of the op."""
    return {"k": case.topk, "keep": case.keep, "block": case.block}


def cost(case: Case) -> tuple[int, int]:
    """Bytes that must move (each key once a request, or each candidate once a query, queries, ids), FLOPs of what is visible."""
    queries = case.batch * case.queries
    if case.selection:
        return 4 * queries * (case.entries + case.topk), 0
    row = 2 * case.width if case.values else INDEX_KEY.row_bytes(case.width)
    back = case.entries // (case.spread * case.queries) * (case.queries - 1) // 2
    seen = case.pool * case.block if case.pool else case.entries
    keys = (queries * seen if case.pool else case.batch * seen) * row
    io = queries * (case.heads * (case.width + 1) * jnp.dtype(case.dtype).itemsize + 4 * (case.topk + case.keep + case.pool))
    return keys + io, queries * (seen if case.pool else seen - back) * case.heads * case.width * 2


def error(got: tuple, want: tuple) -> float:
    """Share of the wanted ids and blocks that are not there."""
    missing = total = 0
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        mine, theirs = (a.reshape(-1, a.shape[-1]) for a in (mine, theirs))
        found = jax.vmap(jnp.isin)(theirs, mine)
        missing += int(jnp.sum((theirs >= 0) & ~found))
        total += int(jnp.sum(theirs >= 0))
    return missing / max(total, 1)


def peers(case: Case) -> dict:
    """Other forms to time beside the kernel, of the op's signature."""
    from kernels_pallas.index_topk.reference import run

    if case.selection:
        return {}
    return {"XLA, bf16": jax.jit(partial(run, dtype=jnp.bfloat16, **options(case)))}
