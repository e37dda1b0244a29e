"""Scores of queries against packed index keys on Hopper: ``sum_h w_h relu(q_h . k_s)``, and the largest of each block of 8.

A warpgroup takes tiles of 64 keys, each of its warps 16 keys by itself: bytes arrive by bulk copies some tiles ahead, are unpacked
in registers, and multiply every query that the CTA holds in shared memory. Warpgroups know nothing of each other: while one
unpacks, another multiplies.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from dsv41.quant import INDEX_KEY, row_values
from kernels_pallas.index_topk import keys
from kernels_pallas.index_topk.keys import BLOCK, CHANNELS, HEADS, ROW, TILE, WARP, WARP_BYTES, WIDTH
from kernels_pallas.mosaic import assembly, global_address, inline, shared_address, thread_number

TILED: Any = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
LAYOUT = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)


@dataclass(frozen=True)
class Scoring:
    """queries: of one CTA; at_once: of one product; warpgroups of a CTA; ctas of the grid; slots: tiles that copies run ahead."""

    queries: int = 1
    at_once: int = 1
    warpgroups: int = 4
    ctas: int = 264
    slots: int = 2


@dataclass(frozen=True)
class Keys:
    """Where stored keys lie. rows uint8 ``[R, 68]``; starts int32 ``[B, g]``, or ``[B * T, g]`` with pool: the row of each granule's
    first entry, a negative one where it is absent; granule: entries of one; size: entries. pool int32 ``[B * T, size / 8]``: which
    blocks of 8 entries a query's granules are, -1 for none; None where entries are numbered as they come."""

    rows: Any
    starts: Any
    granule: int
    size: int
    pool: Any = None


def scores(
    q: jax.Array,
    weights: jax.Array,
    stored: Keys,
    first: jax.Array | None,
    count: jax.Array,
    scoring: Scoring = Scoring(),
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Scores ``[B, T, size]`` and maxima of blocks of 8 ``[B, T, size / 8]`` in float32; tiles that no query sees stay unwritten.

    q ``[B, T, 32, 128]`` and weights ``[B, T, 32]`` bfloat16 or float32; entries first .. first + count - 1 are visible, others
    score -inf; None for first is zero.
    """
    batch, time = q.shape[:2]
    size, pooled = stored.size, stored.pool is not None
    queries = 1 if pooled else scoring.queries
    at_once = min(scoring.at_once, queries)
    groups = -(-time // queries)
    workers = scoring.warpgroups
    parts = max(1, min(scoring.ctas // (batch * groups), -(-size // (TILE * workers))))
    stride = parts * workers
    firsts = [] if first is None else [first]
    pools = [stored.pool] if pooled else []
    slots = scoring.slots
    warps = 4 * workers

    def body(q_ref, w_ref, rows_ref, starts_ref, count_ref, *others):
        first_ref = others[0] if firsts else None
        pool_ref = others[len(firsts)] if pooled else None
        out_ref, best_ref, q_smem, side, ring, barriers = others[len(firsts) + len(pools) :]
        group, part, own = lax.axis_index("group"), lax.axis_index("part"), lax.axis_index("warpgroup")
        request, begin = lax.div(group, groups), lax.rem(group, groups) * queries
        source = request * time + begin if pooled else request

        def span(j):
            at = jnp.minimum(begin + j, time - 1)
            start = 0 if first_ref is None else first_ref[request, at]
            return start, jnp.where(begin + j < time, count_ref[request, at], 0)

        spans = [span(j) for j in range(queries)]
        reach = 0
        for start, number in spans:
            reach = jnp.maximum(reach, start + number)
        tiles = lax.div((size if pooled else jnp.minimum(reach, size)) + (TILE - 1), TILE)
        worker = part * workers + own
        turns = jnp.maximum(lax.div(tiles - worker + (stride - 1), stride), 0)
        make = Native if interpret is None else Interpreted
        work = make(stored, slots, q_ref, w_ref, rows_ref, starts_ref, pool_ref, out_ref, best_ref, q_smem, side, ring, barriers)
        for j in range(queries):
            pl.when(own == j % workers)(lambda j=j: work.query(request * time + jnp.minimum(begin + j, time - 1), j))
        work.begin(workers)
        for slot in range(slots):
            pl.when(slot < turns)(lambda slot=slot: work.copy(source, worker + slot * stride, slot, own))

        def turn(i, _):
            tile, slot = worker + i * stride, lax.rem(i, slots)
            a, scale = work.keys(source, tile, i, slot, own)
            pl.when(i + slots < turns)(lambda: work.copy(source, tile + slots * stride, slot, own))
            for chunk in range(0, queries, at_once):
                columns = pl.ds(chunk * HEADS, at_once * HEADS)

                def product(acc, columns=columns):
                    plgpu.wgmma(acc, a, q_smem.at[columns].transpose((1, 0)))
                    return acc[...]

                acc = pl.run_scoped(product, plgpu.ACC((TILE, at_once * HEADS), jnp.float32))
                work.finish(acc, scale, chunk, tile, spans[chunk : chunk + at_once], request * time + begin, time - begin)
            return 0

        lax.fori_loop(0, turns, turn, 0)

    shape = jax.ShapeDtypeStruct
    out, best = plgpu.kernel(
        body,
        out_type=(shape((batch * time, size), jnp.float32), shape((batch * time, -(-size // BLOCK)), jnp.float32)),
        scratch_types=(
            plgpu.SMEM((queries * HEADS, WIDTH), jnp.float16, transforms=TILED),
            plgpu.SMEM((queries * HEADS,), jnp.float32),
            plgpu.SMEM((warps * slots * WARP_BYTES // 4,), jnp.int32),
            plgpu.SMEM((2 * warps * slots,), jnp.int32),
        ),
        grid=(batch * groups, parts),
        grid_names=("group", "part"),
        num_threads=workers,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(
        q.reshape(batch * time, HEADS, WIDTH),
        weights.reshape(batch * time, HEADS),
        stored.rows,
        stored.starts,
        count,
        *firsts,
        *pools,
    )
    return out.reshape(batch, time, size), best.reshape(batch, time, -1)


class _Side:
    """One warpgroup's side of the work."""

    def __init__(self, stored, slots, q, weights, rows, starts, pool, out, best, q_smem, side, ring, barriers):
        self.stored, self.slots = stored, slots
        self.q, self.weights, self.rows, self.starts, self.pool, self.out, self.best = q, weights, rows, starts, pool, out, best
        self.q_smem, self.side, self.ring, self.barriers = q_smem, side, ring, barriers


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _mad(a: ir.Value, factor: int, b: ir.Value) -> ir.Value:
    return arith.addi(arith.muli(a, mgpu.c(factor, _i32())), b)


def _and(a: ir.Value, mask: int) -> ir.Value:
    return arith.andi(a, mgpu.c(mask, _i32()))


def _lane() -> ir.Value:
    return _and(thread_number(), 31)


def _warp() -> ir.Value:
    return arith.shrui(thread_number(), mgpu.c(5, _i32()))


class Native(_Side):
    """As PTX."""

    def query(self, number: Any, place: int) -> None:
        """A warpgroup writes a query and its weights to their place in shared memory."""

        @inline(
            [self.q, self.weights, self.q_smem, self.side],
            [number],
            [plgpu.RefType(), plgpu.RefType(), plgpu.RefType(TILED), plgpu.RefType()],
        )
        def _(refs, numbers):
            q, weights, q_smem, side = refs
            wide, wide_weights = (a.dtype == jnp.float32 for a in (self.q, self.weights))
            args = [global_address(q, numbers[0], HEADS * WIDTH * (2 if wide else 1) // 2)]
            args.append(global_address(weights, numbers[0], HEADS * (2 if wide_weights else 1) // 2))
            args.append(arith.addi(shared_address(q_smem), mgpu.c(place * HEADS * WIDTH * 2, _i32())))
            args.append(arith.addi(shared_address(side), mgpu.c(place * HEADS * 4, _i32())))
            return keys.prepare_query(wide, wide_weights), [*args, _and(thread_number(), 127)]

    def begin(self, workers: int) -> None:
        """Barriers are set up, and the queries there for everyone."""
        lanes = 2 if self.stored.granule == BLOCK else 1

        @inline([self.barriers], [])
        def _(refs, numbers):
            return keys.prepare_barriers(4 * workers * self.slots, lanes), [shared_address(refs[0]), thread_number()]

    def _slot(self, ref: ir.Value, slot: ir.Value, size: int) -> ir.Value:
        return _mad(_mad(_warp(), self.slots, slot), size, shared_address(ref))

    def copy(self, source: Any, tile: Any, slot: Any, own: Any) -> None:
        """Starts the copy of the warp's keys of a tile."""

        @inline([self.rows, self.starts, self.ring, self.barriers], [source, tile, jnp.int32(slot)])
        def _(refs, numbers):
            rows, starts, ring, barriers = refs
            source, tile, slot = numbers
            first = _mad(_and(_warp(), 3), WARP, _mad(tile, TILE, mgpu.c(0, _i32())))
            args = [global_address(rows), global_address(starts, source, self.stored.starts.shape[1])]
            args += [self._slot(ring, slot, WARP_BYTES), self._slot(barriers, slot, 8), first, _lane()]
            return keys.start_copy(self.stored.size, self.stored.granule), args

    def keys(self, source: Any, tile: Any, turn: Any, slot: Any, own: Any) -> tuple[Any, Any]:
        """The tile's keys ``[64, 128]`` fp16 and their scales ``[64]``."""
        result = (
            plgpu.ShapeDtypeStruct((TILE, WIDTH), jnp.float16, layout=LAYOUT),
            plgpu.ShapeDtypeStruct((TILE,), jnp.float32, layout=ROWS),
        )
        scalar = plgpu.Layout.WG_SPLAT(())
        types = (plgpu.RefType(), plgpu.RefType(), scalar, scalar)

        @plgpu.inline_mgpu(arg_types=types, return_type=result)
        def build(ctx, ring, barriers, turn, slot):
            turn, slot = turn.registers.item(), slot.registers.item()
            parity = _and(arith.divui(turn, mgpu.c(self.slots, _i32())), 1)
            assembly(keys.wait(), [self._slot(barriers, slot, 8), parity], [])
            words = assembly(keys.unpack(), [self._slot(ring, slot, WARP_BYTES), _lane()], [_i32()] * 34)
            pair, single = (ir.VectorType.get((n,), t) for n, t in ((2, ir.F16Type.get()), (1, ir.F32Type.get())))
            a = np.array([llvm.bitcast(pair, w) for w in words[:32]], object)
            scale = np.array([llvm.bitcast(single, w) for w in words[32:]], object)
            return tuple(
                mgpu.FragmentedArray(_registers=r.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None)
                for r, layout, shape in ((a, mgpu.WGMMA_LAYOUT, (TILE, WIDTH)), (scale, mgpu.WGMMA_ROW_LAYOUT, (TILE,)))
            )

        return build(self.ring, self.barriers, turn, slot)

    def finish(self, acc: Any, scale: Any, chunk: int, tile: Any, spans: list, number: Any, left: Any) -> None:
        """Writes the scores of the queries that ``acc`` has."""
        refs = [self.side, self.out, self.best, *([] if self.pool is None else [self.pool])]
        scalar = plgpu.Layout.WG_SPLAT(())
        # A query past the last writes nowhere.
        ends = [jnp.where(chunk + j < left, 0, self.stored.size) for j in range(len(spans))]
        numbers = [jnp.int32(n) for (first, count), end in zip(spans, ends, strict=True) for n in (first, count, end)]
        types = (LAYOUT, ROWS, [plgpu.RefType() for _ in refs], [scalar] * (len(numbers) + 2))

        @plgpu.inline_mgpu(arg_types=types)
        def build(ctx, acc, scale, refs, numbers):
            tile, number, *spans = (array.registers.item() for array in numbers)
            side, out, best, *pool = refs
            single = ir.F32Type.get()
            zero = mgpu.c(0, _i32())
            columns = [llvm.extractelement(r, mgpu.c(i, _i32())) for r in acc.registers.flat for i in range(2)]
            scales = [llvm.bitcast(single, r) for r in scale.registers.flat]
            place = _mad(_and(_warp(), 3), WARP, _mad(tile, TILE, zero))
            size = self.stored.size
            for j in range(len(spans) // 3):
                row = arith.addi(number, mgpu.c(chunk + j, _i32()))
                args = [*columns[16 * j : 16 * (j + 1)], *scales]
                args.append(arith.addi(shared_address(side), mgpu.c((chunk + j) * HEADS * 4, _i32())))
                first, count, end = spans[3 * j : 3 * j + 3]
                args += [first, count, arith.maxsi(place, end), _lane()]
                args += [global_address(out, row, size), global_address(best, row, -(-size // BLOCK))]
                args += [global_address(ref, row, -(-size // BLOCK)) for ref in pool]
                assembly(keys.finish(size, bool(pool)), args, [])

        build(acc, scale, refs, [tile, number, *numbers])


class Interpreted(_Side):
    """The same by array code, for Pallas' interpreter: the keys come straight from global memory."""

    def query(self, number: Any, place: int) -> None:
        q = self.q[number].astype(jnp.float32)
        exponent = jnp.frexp(jnp.max(jnp.abs(q), axis=1))[1] - 15
        rows = pl.ds(place * HEADS, HEADS)
        self.q_smem[rows] = jnp.ldexp(q, -exponent[:, None])[:, CHANNELS].astype(jnp.float16)
        self.side[rows] = jnp.ldexp(self.weights[number].astype(jnp.float32), exponent)

    def begin(self, workers: int) -> None:
        """The warpgroups meet."""

    def copy(self, source: Any, tile: Any, slot: Any, own: Any) -> None:
        """Nothing runs ahead."""

    def keys(self, source: Any, tile: Any, turn: Any, slot: Any, own: Any) -> tuple[Any, Any]:
        entry = tile * TILE + jnp.arange(TILE, dtype=jnp.int32)
        place = jnp.minimum(entry, self.stored.size - 1)
        start = self.starts[source][place // self.stored.granule]
        there = (start >= 0) & (entry < self.stored.size)
        rows = self.rows[...][jnp.where(there, start + place % self.stored.granule, 0)]
        top = jnp.where(there, jnp.max(rows[:, WIDTH // 2 :], axis=1).astype(jnp.int32), 127)
        values = jnp.ldexp(row_values(rows, INDEX_KEY, jnp.float32), 127 - top[:, None])
        return jnp.where(there[:, None], values, 0.0)[:, CHANNELS].astype(jnp.float16), jnp.ldexp(jnp.float32(1), top - 127)

    def finish(self, acc: Any, scale: Any, chunk: int, tile: Any, spans: list, number: Any, left: Any) -> None:
        size = self.stored.size
        entry = tile * TILE + jnp.arange(TILE, dtype=jnp.int32)
        for j, (first, count) in enumerate(spans):

            @pl.when(chunk + j < left)
            def _(j=j, first=first, count=count):
                weights = self.side[pl.ds((chunk + j) * HEADS, HEADS)]
                values = jnp.sum(jnp.maximum(acc[:, j * HEADS : (j + 1) * HEADS], 0) * weights[None], axis=1) * scale
                name, row = entry, number + chunk + j
                if self.pool is not None:
                    block = self.pool[row][jnp.minimum(entry, size - 1) // BLOCK]
                    name = jnp.where(block < 0, -1, block * BLOCK + entry % BLOCK)
                seen = (name >= first) & (name < first + count)
                values = jnp.where(seen, values, -jnp.inf)
                inside = min(size, TILE)
                at = jnp.minimum(tile * TILE, size - inside)
                # The last tile may reach past the end: its part is written with what the tile before has left there.
                old = self.out[row, pl.ds(at, inside)]
                shifted = jnp.roll(jnp.pad(values, (0, 0)), tile * TILE - at)[:inside]
                self.out[row, pl.ds(at, inside)] = jnp.where(at + jnp.arange(inside) >= tile * TILE, shifted, old)
                best = jnp.max(values.reshape(-1, BLOCK), axis=1)
                start = tile * (TILE // BLOCK)
                for b in range(TILE // BLOCK):
                    pl.when((start + b) * BLOCK < size)(
                        lambda b=b: self.best.__setitem__((row, pl.ds(start + b, 1)), best[b : b + 1])
                    )
