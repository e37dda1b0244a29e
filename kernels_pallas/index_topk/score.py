"""Scores of queries against packed index keys on Hopper: ``sum_h w_h relu(q_h . k_s)``, and the largest of each block of 8.

A warpgroup takes tiles of 64 keys, each of its warps 16 keys by itself: bytes arrive by bulk copies some tiles ahead, are
unpacked in registers, and multiply every query that the CTA holds in shared memory. Warpgroups know nothing of each other:
while one unpacks, another multiplies.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.index_topk.keys import BLOCK, HEADS, TILE, WARP_BYTES, WIDTH
from kernels_pallas.index_topk.sides import TILED, Interpreted, Native, Refs


@dataclass(frozen=True)
class Scoring:
    """queries: of one CTA; at_once: of one product, 1, 2 or 4, of which ``queries`` is a multiple; warpgroups of a CTA; ctas of
    the grid; slots: tiles that copies run ahead.
    """

    queries: int = 1
    at_once: int = 1
    warpgroups: int = 4
    ctas: int = 264
    slots: int = 2


@dataclass(frozen=True)
class Keys:
    """Where keys lie: rows uint8 ``[R, 68]`` or bfloat16 ``[R, 128]``; queries have ``size`` entries in granules of ``granule``.

    starts int32 ``[B, g]``, or ``[B * T, g]`` with pool: the row of each granule's first entry, negative where it is absent. pool
    int32 ``[B * T, size / 8]``: which blocks of 8 entries a query's granules are, -1 for none, size a multiple of 64; None where
    entries are numbered as they come.
    """

    rows: Any
    starts: Any
    granule: int
    size: int
    pool: Any = None


def scores(
    q: jax.Array,
    weights: jax.Array,
    stored: Keys,
    first: jax.Array,
    count: jax.Array,
    scoring: Scoring = Scoring(),
    pin: bool = True,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Scores ``[B, T, n]`` and maxima of blocks of 8 ``[B, T, n / 8]`` in float32, n the next multiple of 64 from size on.

    q ``[B, T, 32, 128]`` and weights ``[B, T, 32]`` bfloat16 or float32; entries first .. first + count - 1 are visible, others
    score -inf, and with ``pin`` the newest visible entry's block +inf; with a pool there are no maxima. What lies past the last
    visible entry of a CTA's queries, rounded up to a tile, stays unwritten.
    """
    batch, time = q.shape[:2]
    pooled = stored.pool is not None
    queries = 1 if pooled else scoring.queries
    at_once = min(scoring.at_once, queries)
    if at_once not in (1, 2, 4) or queries % at_once:
        raise ValueError(f"at_once: found {at_once}, allowed are 1, 2 and 4, of which {queries} queries are a multiple")
    groups = -(-time // queries)
    # Values are read from device memory as they are needed: their bytes would not leave room for queries.
    workers, slots = scoring.warpgroups, scoring.slots if stored.rows.dtype == jnp.uint8 else 0
    parts = max(1, min(scoring.ctas // (batch * groups), -(-stored.size // (TILE * workers))))
    stride = parts * workers
    pitch = -(-stored.size // TILE) * TILE
    pools = [stored.pool] if pooled else []

    def body(q_ref, w_ref, rows_ref, starts_ref, first_ref, count_ref, *others):
        pool_ref, (out_ref, best_ref, *scratch) = others[0] if pooled else None, others[len(pools) :]
        group, part, own = lax.axis_index("group"), lax.axis_index("part"), lax.axis_index("warpgroup")
        request, begin = lax.div(group, groups), lax.rem(group, groups) * queries
        row, left = request * time + begin, time - begin
        source = row if pooled else request

        def span(j):
            at = jnp.minimum(begin + j, time - 1)
            return first_ref[request, at], jnp.where(j < left, count_ref[request, at], 0)

        spans = [span(j) for j in range(queries)]
        reach = jnp.int32(0)
        for start, number in spans:
            reach = jnp.maximum(reach, start + number)
        tiles = lax.div((stored.size if pooled else jnp.minimum(reach, stored.size)) + (TILE - 1), TILE)
        worker = part * workers + own
        turns = jnp.maximum(lax.div(tiles - worker + (stride - 1), stride), 0)
        refs = Refs(stored, slots, workers, pin, q_ref, w_ref, rows_ref, starts_ref, pool_ref, out_ref, best_ref, *scratch)
        side = Native(refs) if interpret is None else Interpreted(refs)
        for j in range(queries):
            number, there = row + jnp.minimum(j, left - 1), jnp.where(j < left, row + j, -1)
            pl.when(own == j % workers)(lambda args=(number, j, spans[j], there): side.query(*args))
        side.begin()
        for slot in range(slots):
            pl.when(slot < turns)(lambda slot=slot: side.copy(source, worker + slot * stride, jnp.int32(slot)))

        def turn(i, _):
            tile, slot = worker + i * stride, lax.rem(i, max(slots, 1))
            a, scale = side.keys(source, tile, i, slot)
            if slots:
                pl.when(i + slots < turns)(lambda: side.copy(source, tile + slots * stride, slot))

            def some(chunk, _):
                acc = side.product(a, refs.q_smem.at[chunk])
                side.finish(acc, scale, chunk, tile, spans, row, left)
                return 0

            # A loop: unrolled, the compiler spills zeros for the products to come, and waits after each instruction.
            return lax.fori_loop(0, queries // at_once, some, 0)

        lax.fori_loop(0, turns, turn, 0)

    shape, warps = jax.ShapeDtypeStruct, 4 * workers
    out, best = plgpu.kernel(
        body,
        out_type=(shape((batch * time, pitch), jnp.float32), shape((batch * time, pitch // BLOCK), jnp.float32)),
        scratch_types=(
            plgpu.SMEM((queries // at_once, at_once * HEADS, WIDTH), jnp.float16, transforms=TILED),
            plgpu.SMEM((queries * HEADS,), jnp.float32),
            plgpu.SMEM((4 * queries,), jnp.int32),
            plgpu.SMEM((max(warps * slots * WARP_BYTES // 4, 4),), jnp.int32),
            plgpu.SMEM((max(2 * warps * slots, 4),), jnp.int32),
            plgpu.Barrier(num_arrivals=workers),
        ),
        grid=(batch * groups, parts),
        grid_names=("group", "part"),
        num_threads=workers,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(q.reshape(-1, HEADS, WIDTH), weights.reshape(-1, HEADS), stored.rows, stored.starts, first, count, *pools)
    return out.reshape(batch, time, pitch), best.reshape(batch, time, -1)
