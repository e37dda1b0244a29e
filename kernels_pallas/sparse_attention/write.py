"""Accumulators to device memory in whole sectors."""

from typing import Any

import jax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import c, utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import store

# Four lanes have two columns each of every eight: words $0-$3 of four such groups become one group for each lane, written to
# $4. $5: the lane's number among the four.
_TRANSPOSE = (
    "{ .reg .pred o, u; .reg .b32 x, y, a, b, c, d, n; and.b32 n, $5, 1; setp.ne.b32 o, n, 0; setp.gt.u32 u, $5, 1; "
    "selp.b32 x, $0, $1, o; selp.b32 y, $2, $3, o; "
    "shfl.sync.bfly.b32 x, x, 1, 31, -1; shfl.sync.bfly.b32 y, y, 1, 31, -1; "
    "selp.b32 a, x, $0, o; selp.b32 b, $1, x, o; selp.b32 c, y, $2, o; selp.b32 d, $3, y, o; "
    "selp.b32 x, a, c, u; selp.b32 y, b, d, u; "
    "shfl.sync.bfly.b32 x, x, 2, 31, -1; shfl.sync.bfly.b32 y, y, 2, 31, -1; "
    "selp.b32 a, x, a, u; selp.b32 b, y, b, u; selp.b32 c, c, x, u; selp.b32 d, d, y, u; "
)


def write(ref: Any, values: jax.Array, native: bool, hint: str = "") -> None:
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
                args = [utils.bitcast(word, i32) for word in words[first : first + 4, half]]
                at = 8 * pitch * half + 16 * first
                ptx = f"{_TRANSPOSE} st.global{hint}.v4.b32 [$4 + {at}], {{a, b, c, d}}; }}"
                llvm.inline_asm(ir.Type.parse("!llvm.void"), [*args, base, quarter], ptx, "r,r,r,r,l,r", has_side_effects=True)

    body(ref, values)
