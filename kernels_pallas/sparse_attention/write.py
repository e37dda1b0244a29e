"""Accumulators to device memory in whole sectors."""

from typing import Any

import jax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import c, utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import store
from kernels_pallas.sparse_attention import unpack


def write(ref: Any, values: jax.Array, native: bool) -> None:
    """Writes ``values`` ``[64, n]``, n a multiple of 32, as products leave them, to device memory.

    A lane holds pairs of columns. Written as they lie, two bytes of bfloat16 each, eight rows would get half a sector at a time.
    """
    if not native or values.dtype.itemsize != 2:
        store(ref, values)
        return
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))

    @inline
    def body(ctx: Any, ref: Any, values: Any) -> None:
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
        pitch = 2 * strides[0]
        thread = arith.andi(utils.thread_idx(), c(127, i32))
        quarter = arith.andi(thread, c(3, i32))
        row = arith.addi(
            arith.muli(arith.shrui(thread, c(5, i32)), c(16, i32)),
            arith.andi(arith.shrui(thread, c(2, i32)), c(7, i32)),
        )
        offset = arith.addi(arith.muli(row, c(pitch, i32)), arith.muli(quarter, c(16, i32)))
        base = arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(ref)), arith.extui(i64, offset))
        groups = values.shape[1] // 8
        words = values.registers.reshape(groups, 2)  # of eight columns; of rows r and r + 8
        for half in range(2):
            for first in range(0, groups, 4):
                four = [unpack.bits(word) for word in words[first : first + 4, half]]
                unpack.store_piece(four, quarter, base, 8 * pitch * half + 16 * first)

    body(ref, values)
