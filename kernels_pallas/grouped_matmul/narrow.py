"""Products of unpacked weights with few rows by every warp's own matrix instruction, in PTX.

The warpgroup's instruction takes its least time however few rows there are, and a warp waits for it before it unpacks on; this
one has 8 rows at a time and is waited for by whoever needs its result.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.grouped_matmul.unpack import BLOCK, asm, constant, held, i32, thread_number

ROWS = 8  # of one instruction
_WEIGHTS = 64  # output columns of a warpgroup
_STEPS = BLOCK // 16  # instructions along a block


def _layout(rows: int) -> Any:
    """Of `load_rows`: a word for each 8 of a block's depth and 8 rows."""
    return plgpu.Layout.WG_STRIDED((128 * rows,), vec_size=1)


def load_rows(x_ref: Any, transforms: Any) -> jax.Array:
    """A block as the second operand, all of it in every warp. x_ref: bfloat16 ``[rows, 64]`` in shared memory."""
    rows = x_ref.shape[0]
    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms),),
        return_type=plgpu.ShapeDtypeStruct((128 * rows,), jnp.int32, layout=_layout(rows)),
    )

    @inline
    def load(ctx: Any, ref: Any) -> Any:
        base, words = llvm.ptrtoint(i32(), utils.memref_ptr(ref)), []
        lane = arith.andi(thread_number(), constant(31))
        for first in range(0, rows, ROWS):
            for half in range(2):
                at = place(base, lane, first, half)
                words += asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];", [at], 4, True)
        return held(words)

    return load(x_ref)


def place(base: Any, lane: Any, first: int, half: int) -> Any:
    """Where 16 bytes of a row are that ``lane`` names to a load of four matrices, 8 rows from ``first`` on by half a block.

    Eight lanes name the rows of a matrix; a piece of 16 bytes is at its number xor the row's, by the 128-byte swizzle.
    """
    inner, matrix = arith.andi(lane, constant(7)), arith.shrui(lane, constant(3))
    piece = arith.xori(arith.addi(matrix, constant(4 * half)), inner)
    start = arith.addi(base, arith.muli(arith.addi(inner, constant(first)), constant(2 * BLOCK)))
    return arith.addi(start, arith.muli(piece, constant(16)))


def products(sums: list[Any], weights: Callable[[int, int], Any], blocks: list[list[Any]], instruction: Callable) -> list[Any]:
    """``sums``, one for each 8 rows, with what ``instruction`` adds to them.

    weights: a thread's words of the first operand by number of 8 of the depth and half of the rows; blocks: words of `load_rows`.
    """
    for step in range(_STEPS * len(blocks)):
        own = [weights(2 * step + side, half) for side in range(2) for half in range(2)]
        for tile, old in enumerate(sums):
            at = 2 * (tile * _STEPS + step % _STEPS)
            sums = [*sums[:tile], instruction(old, own, blocks[step // _STEPS][at : at + 2]), *sums[tile + 1 :]]
    return sums


def multiply(acc: jax.Array, a: jax.Array, blocks: list[jax.Array]) -> jax.Array:
    """``acc`` float32 ``[64, rows]`` and the product of ``a`` ``[64, K]`` bfloat16 with what `load_rows` gave of K's blocks."""
    rows, layout = acc.shape[1], plgpu.Layout.WGMMA
    inline: Any = plgpu.inline_mgpu(
        arg_types=(layout, layout, *[_layout(rows)] * len(blocks)),
        return_type=plgpu.ShapeDtypeStruct((_WEIGHTS, rows), jnp.float32, layout=layout),
    )

    @inline
    def take(ctx: Any, acc: Any, a: Any, *blocks: Any) -> Any:
        pair = ir.VectorType.get((2,), ir.F32Type.get())

        def weights(eight: int, half: int) -> Any:
            return utils.bitcast(a.registers[0, eight, 0, 0, half, 0, 0, 0, 0], i32())

        def pairs(tile: int) -> list[Any]:
            return [acc.registers[0, tile, 0, 0, half, 0, 0, 0, 0] for half in range(2)]

        sums = [[llvm.extractelement(p, constant(i)) for p in pairs(tile) for i in range(2)] for tile in range(rows // ROWS)]
        out = np.empty(acc.registers.shape, dtype=object)
        for tile, values in enumerate(products(sums, weights, [[*b.registers.flat] for b in blocks], _instruction)):
            for half in range(2):
                both = llvm.mlir_undef(pair)
                for i in range(2):
                    both = llvm.insertelement(both, values[2 * half + i], constant(i))
                out[0, tile, 0, 0, half, 0, 0, 0, 0] = both
        return mgpu.FragmentedArray(_registers=out, _layout=fragments.WGMMA_LAYOUT, _is_signed=None)

    return take(acc, a, *blocks)


def _instruction(acc: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
    f32, b = ir.F32Type.get(), [utils.bitcast(word, i32()) for word in b]
    ptx = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    out = llvm.inline_asm(llvm.StructType.get_literal([f32] * 4), [*a, *b, *acc], ptx, constraints, has_side_effects=False)
    return [llvm.extractvalue(f32, out, [i]) for i in range(4)]
