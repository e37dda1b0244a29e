"""One warpgroup's side of `score.py`: as PTX on the device, as plain array code under the interpreter."""

from dataclasses import dataclass
from typing import Any

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
from kernels_pallas.index_topk.keys import BLOCK, HEADS, TILE, WARP, WARP_BYTES, WIDTH
from kernels_pallas.mosaic import SCALAR, assembly, global_address, inline, shared_address, thread_number

TILED: Any = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]


@dataclass(frozen=True)
class Refs:
    """What a CTA of ``workers`` warpgroups reads and writes; the barrier is the interpreter's. Without slots, no copies."""

    stored: Any
    slots: int
    workers: int
    pin: bool
    q: Any
    weights: Any
    rows: Any
    starts: Any
    pool: Any
    out: Any
    best: Any
    q_smem: Any
    weights_smem: Any
    spans: Any
    ring: Any
    barriers: Any
    ready: Any


def _c(value: int) -> ir.Value:
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _mad(a: ir.Value, factor: int, b: ir.Value) -> ir.Value:
    return arith.addi(arith.muli(a, _c(factor)), b)


def _low(a: ir.Value, mask: int) -> ir.Value:
    return arith.andi(a, _c(mask))


def _warp() -> ir.Value:
    return arith.shrui(thread_number(), _c(5))


def _lane() -> ir.Value:
    return _low(thread_number(), 31)


def _place(tile: ir.Value) -> ir.Value:
    """Number of the first of the warp's keys in a tile."""
    return _mad(_low(_warp(), 3), WARP, _mad(tile, TILE, _c(0)))


class Native:
    """Everything that a matrix instruction is not, as PTX."""

    def __init__(self, refs: Refs):
        self.refs = refs

    def _slot(self, ref: ir.Value, slot: ir.Value, size: int) -> ir.Value:
        """Shared address of one of the warp's slots of ``size`` bytes."""
        return _mad(_mad(_warp(), self.refs.slots, slot), size, shared_address(ref))

    def query(self, number: Any, place: int, span: tuple, row: Any) -> None:
        """The warpgroup writes a query, its weights, its span and its row of the output to their places in shared memory."""
        refs = self.refs
        wide, wide_weights = (a.dtype == jnp.float32 for a in (refs.q, refs.weights))
        kinds = [plgpu.RefType(), plgpu.RefType(), plgpu.RefType(TILED), plgpu.RefType(), plgpu.RefType()]

        @inline([refs.q, refs.weights, refs.q_smem, refs.weights_smem, refs.spans], [number, *span, row], kinds)
        def _(refs: Any, numbers: Any) -> tuple[str, list]:
            q, weights, q_smem, weights_smem, spans = refs
            args = [global_address(q, (numbers[0], HEADS * WIDTH // (1 if wide else 2)))]
            args.append(global_address(weights, (numbers[0], HEADS // (1 if wide_weights else 2))))
            args.append(arith.addi(shared_address(q_smem), _c(2 * place * HEADS * WIDTH)))
            args.append(arith.addi(shared_address(weights_smem), _c(4 * place * HEADS)))
            args += [_low(thread_number(), 127), arith.addi(shared_address(spans), _c(16 * place)), *numbers[1:]]
            return keys.prepare_query(wide, wide_weights), args

    def begin(self) -> None:
        """Sets up barriers; after it the queries are there for everyone."""
        count, lanes = 4 * self.refs.workers * self.refs.slots, 2 if self.refs.stored.granule == BLOCK else 1

        @inline([self.refs.barriers], [])
        def _(refs: Any, numbers: Any) -> tuple[str, list]:
            return keys.prepare_barriers(count, lanes), [shared_address(refs[0]), thread_number()]

    def copy(self, source: Any, tile: Any, slot: Any) -> None:
        """Starts the copy of the warp's keys of a tile."""
        stored = self.refs.stored

        @inline([self.refs.rows, self.refs.starts, self.refs.ring, self.refs.barriers], [source, tile, slot])
        def _(refs: Any, numbers: Any) -> tuple[str, list]:
            rows, starts, ring, barriers = refs
            source, tile, slot = numbers
            args = [global_address(rows), global_address(starts, (source, stored.starts.shape[1]))]
            args += [self._slot(ring, slot, WARP_BYTES), self._slot(barriers, slot, 8), _place(tile), _lane()]
            return keys.start_copy(stored.size, stored.granule), args

    def keys(self, source: Any, tile: Any, turn: Any, slot: Any) -> tuple[Any, Any]:
        """The tile's keys ``[64, 128]`` fp16 and their scales ``[64]``, once they are there."""
        layouts = (plgpu.Layout.WGMMA, mgpu.WGMMA_LAYOUT), (plgpu.Layout.WGMMA.reduce(1), mgpu.WGMMA_ROW_LAYOUT)
        shapes, dtypes = ((TILE, WIDTH), (TILE,)), (jnp.float16, jnp.float32)
        result = tuple(
            plgpu.ShapeDtypeStruct(shape, dtype, layout=layout[0])
            for shape, dtype, layout in zip(shapes, dtypes, layouts, strict=True)
        )
        place: Any = plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 4, *[SCALAR] * 4), return_type=result)

        def build(ctx: Any, ring: Any, barriers: Any, rows: Any, starts: Any, *numbers: Any) -> tuple:
            source, tile, turn, slot = (number.registers.item() for number in numbers)
            types = [ir.IntegerType.get_signless(32)] * 34
            if self.refs.slots:
                parity = _low(arith.divui(turn, _c(self.refs.slots)), 1)
                assembly(keys.wait(), [self._slot(barriers, slot, 8), parity], [])
                words = assembly(keys.unpack(), [self._slot(ring, slot, WARP_BYTES), _lane()], types)
            else:
                stored = self.refs.stored
                args = [global_address(rows), global_address(starts, (source, stored.starts.shape[1])), _place(tile), _lane()]
                words = assembly(keys.load(stored.size, stored.granule), args, types)
            kinds = ir.VectorType.get((2,), ir.F16Type.get()), ir.VectorType.get((1,), ir.F32Type.get())
            arrays = []
            for part, kind, shape, layout in zip((words[:32], words[32:]), kinds, shapes, layouts, strict=True):
                registers = np.array([llvm.bitcast(kind, word) for word in part], object).reshape(
                    layout[1].registers_shape(shape)
                )
                arrays.append(mgpu.FragmentedArray(_registers=registers, _layout=layout[1], _is_signed=None))
            return tuple(arrays)

        refs = self.refs
        return place(build)(refs.ring, refs.barriers, refs.rows, refs.starts, source, tile, turn, slot)

    def product(self, a: Any, q: Any) -> Any:
        """Keys times queries, ``[64, heads]`` float32."""

        def multiply(acc: Any) -> Any:
            plgpu.wgmma(acc, a, q.transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((TILE, q.shape[0]), jnp.float32))

    def finish(self, acc: Any, scale: Any, chunk: Any, tile: Any, spans: list, row: Any, left: Any) -> None:
        """Writes the scores of the queries that ``acc`` has: the CTA's, which begin at ``row``, in parts of so many."""
        refs, pool = self.refs, self.refs.pool
        inputs = [refs.weights_smem, refs.spans, refs.out, refs.best, *([] if pool is None else [pool])]
        arrays = (plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1))
        place: Any = plgpu.inline_mgpu(arg_types=(*arrays, [plgpu.RefType() for _ in inputs], SCALAR, SCALAR))
        queries = acc.shape[1] // HEADS

        def build(ctx: Any, acc: Any, scale: Any, inputs: Any, chunk: Any, tile: Any) -> None:
            weights, held, *outputs = inputs
            chunk = chunk.registers.item()
            args = [llvm.extractelement(register, _c(i)) for register in acc.registers.flat for i in range(2)]
            args += [llvm.bitcast(ir.F32Type.get(), register) for register in scale.registers.flat]
            args.append(_mad(chunk, 4 * queries * HEADS, shared_address(weights)))
            args.append(_mad(chunk, 16 * queries, shared_address(held)))
            args += [_place(tile.registers.item()), _lane(), *(global_address(ref) for ref in outputs)]
            assembly(keys.finish(refs.out.shape[1], pool is not None, queries, refs.pin), args, [])

        place(build)(acc, scale, inputs, chunk, tile)


class Interpreted:
    """The same by array code, for Pallas' interpreter: the keys come straight from global memory."""

    def __init__(self, refs: Refs):
        self.refs = refs

    def query(self, number: Any, place: int, span: tuple, row: Any) -> None:
        q = self.refs.q[number].astype(jnp.float32)
        exponent = jnp.frexp(jnp.max(jnp.abs(q), axis=1))[1] - 15
        order = keys.channel(jnp.arange(WIDTH, dtype=jnp.int32))
        chunk, at = divmod(place * HEADS, self.refs.q_smem.shape[1])
        self.refs.q_smem[chunk, pl.ds(at, HEADS)] = jnp.ldexp(q, -exponent[:, None])[:, order].astype(jnp.float16)
        weights = jnp.ldexp(self.refs.weights[number].astype(jnp.float32), exponent)
        self.refs.weights_smem[pl.ds(place * HEADS, HEADS)] = weights

    def begin(self) -> None:
        plgpu.barrier_arrive(self.refs.ready)
        plgpu.barrier_wait(self.refs.ready)

    def copy(self, source: Any, tile: Any, slot: Any) -> None:
        """Nothing runs ahead."""

    def keys(self, source: Any, tile: Any, turn: Any, slot: Any) -> tuple[Any, Any]:
        stored = self.refs.stored
        entry = tile * TILE + jnp.arange(TILE, dtype=jnp.int32)
        place = jnp.minimum(entry, stored.size - 1)
        start = self.refs.starts[source][place // stored.granule]
        there = (start >= 0) & (entry < stored.size)
        rows = self.refs.rows[...][jnp.where(there, start + place % stored.granule, 0)]
        if rows.dtype == jnp.uint8:
            top = jnp.where(there, jnp.max(rows[:, WIDTH // 2 :], axis=1).astype(jnp.int32) - 127, 0)
        else:
            top = jnp.frexp(jnp.max(jnp.abs(rows.astype(jnp.float32)), axis=1))[1] - 15
        values = jnp.ldexp(row_values(rows, INDEX_KEY, jnp.float32), -top[:, None])
        order = keys.channel(jnp.arange(WIDTH, dtype=jnp.int32))
        return jnp.where(there[:, None], values, 0.0)[:, order].astype(jnp.float16), jnp.ldexp(jnp.float32(1), top)

    def product(self, a: Any, q: Any) -> Any:
        # The interpreter's matrix instruction takes no operand in registers.
        return jnp.dot(a.astype(jnp.float32), q[...].astype(jnp.float32).T, precision=lax.Precision.HIGHEST)

    def finish(self, acc: Any, scale: Any, chunk: Any, tile: Any, spans: list, row: Any, left: Any) -> None:
        refs = self.refs
        entry = tile * TILE + jnp.arange(TILE, dtype=jnp.int32)
        queries = acc.shape[1] // HEADS
        firsts, counts = (jnp.stack(numbers) for numbers in zip(*spans, strict=True))
        for j in range(queries):
            place = chunk * queries + j

            @pl.when(place < left)
            def _(j: int = j, place: Any = place) -> None:
                number, first, count = row + place, firsts[place], counts[place]
                weights = refs.weights_smem[pl.ds(place * HEADS, HEADS)]
                values = jnp.sum(jnp.maximum(acc[:, j * HEADS : (j + 1) * HEADS], 0) * weights[None], axis=1) * scale
                name = entry
                if refs.pool is not None:
                    block = refs.pool[number][entry // BLOCK]
                    name = jnp.where(block < 0, -1, block * BLOCK + entry % BLOCK)
                values = jnp.where((name >= first) & (name < first + count), values, -jnp.inf)
                best = jnp.max(values.reshape(-1, BLOCK), axis=1)
                block = tile * (TILE // BLOCK) + jnp.arange(TILE // BLOCK, dtype=jnp.int32)
                if refs.pin:
                    best = jnp.where((block == (first + count - 1) // BLOCK) & (count > 0), jnp.inf, best)
                refs.out[number, pl.ds(tile * TILE, TILE)] = values
                refs.best[number, pl.ds(tile * (TILE // BLOCK), TILE // BLOCK)] = best
