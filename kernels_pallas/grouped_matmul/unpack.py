"""Stored weights to bfloat16 registers, as a matrix instruction takes its first operand: in PTX, for one warpgroup.

A code's bits are moved to where bfloat16 has sign, exponent and mantissa, two codes a register; as numbers they then are too
small by 2**126 (E2M1) or 2**120 (E4M3), subnormal ones too, and one multiplication puts that right together with the scale. The
power of two would be beyond bfloat16, so `SHIFT` of it is left to the other operand. Exact, as every code times a power of two
has at most four significant bits.

A thread takes whole words, so the contracted dimension is in another order than stored; `permuted` gives the other operand the
same order.
"""

from dataclasses import dataclass
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

from dsv41.quant import EXPERT_WEIGHT, dequantize_tiles, unpack

SHIFT = 64  # the other operand is multiplied by 2**SHIFT
LINE = 128  # bytes of a row that are in shared memory at once, one row of the swizzle
BLOCK = 64  # of the contracted dimension that one instruction group takes
_ROWS = 64


@dataclass(frozen=True)
class Codes:
    """A kind of stored weight. word: codes in 32 bits; rows: those that share a scale; bias: exponent's, of the codes."""

    word: int
    rows: int
    bias: int

    @property
    def depth(self) -> int:
        """Codes in a line."""
        return LINE // 4 * self.word

    @property
    def scale_words(self) -> int:
        """Words of scales that a row has for a line."""
        return self.depth // 32 // 4


FP4, FP8 = Codes(8, 1, 126), Codes(4, 32, 120)


def _in_order(x: jax.Array, codes: Codes) -> jax.Array:
    """``[.., K]`` with the contracted dimension in the order of the codes in registers."""
    lead = x.shape[:-1]
    parts = x.reshape(*lead, -1, 4, 4, 2, codes.word // 2)  # thread of four, word, half of the register, register
    order = *range(len(lead) + 1), *(len(lead) + axis for axis in (2, 4, 1, 3))
    return parts.transpose(order).reshape(x.shape)


def permuted(x: jax.Array, codes: Codes) -> jax.Array:
    """The other operand ``[.., K]`` for weights in registers: in their order, times ``2**SHIFT``."""
    return _in_order(x, codes) * jnp.asarray(2.0**SHIFT, x.dtype)


def interpreted(stored: jax.Array, scales: jax.Array, codes: Codes) -> jax.Array:
    """The line that `registers` gives a block at a time, by array code, in float32. stored: uint8 ``[64, 128]``."""
    values = unpack(stored, scales, EXPERT_WEIGHT) if codes is FP4 else dequantize_tiles(stored, scales)
    return _in_order(values, codes) * 2.0**-SHIFT


def scale_layout(codes: Codes) -> Any:
    """Layout of `load_scales`' words: those of a thread's two rows."""
    return plgpu.Layout.WG_STRIDED((128 * 2 * codes.scale_words,), vec_size=1)


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _c(value: int) -> Any:
    return mgpu.c(value, _i32())


def _thread() -> tuple[Any, Any, Any]:
    """Warp, row of eight and thread of the four that share a row."""
    thread = arith.andi(utils.thread_idx(), _c(127))
    return arith.shrui(thread, _c(5)), arith.andi(arith.shrui(thread, _c(2)), _c(7)), arith.andi(thread, _c(3))


def _asm(ptx: str, args: list[Any], count: int, effects: bool) -> list[Any]:
    """Runs ``ptx``, which gives ``count`` words; effects: it must stay in its place."""
    kinds = {"i32": "r", "i64": "l"}
    constraints = ",".join(["=r"] * count + [kinds[str(a.type)] for a in args])
    result = _i32() if count == 1 else llvm.StructType.get_literal([_i32()] * count)
    out = llvm.inline_asm(result, args, ptx, constraints, has_side_effects=effects)
    return [out] if count == 1 else [llvm.extractvalue(_i32(), out, [i]) for i in range(count)]


def load_scales(scales_ref: Any, group: jax.Array, row: jax.Array, line: jax.Array, codes: Codes) -> jax.Array:
    """Starts loading the scales of 64 rows from ``row`` on, for one line. scales_ref: uint8 ``[E, N / rows, K / 32]``."""
    _, rows, columns = scales_ref.shape
    size = 4 * codes.scale_words

    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT(())] * 3),
        return_type=plgpu.ShapeDtypeStruct((128 * 2 * codes.scale_words,), jnp.int32, layout=scale_layout(codes)),
    )

    @inline
    def load(ctx: Any, ref: Any, group: Any, row: Any, line: Any) -> Any:
        group, row, line = (a.registers.item() for a in (group, row, line))
        i64 = ir.IntegerType.get_signless(64)
        base = llvm.ptrtoint(i64, utils.memref_ptr(ref))
        warp, inner, _ = _thread()
        words = []
        for half in range(2):
            own = arith.addi(row, arith.addi(arith.muli(warp, _c(16)), arith.addi(inner, _c(8 * half))))
            own = arith.minui(arith.divui(own, _c(codes.rows)), _c(rows - 1))
            number = arith.addi(arith.muli(arith.extui(i64, group), mgpu.c(rows, i64)), arith.extui(i64, own))
            at = arith.addi(arith.muli(number, mgpu.c(columns, i64)), arith.extui(i64, arith.muli(line, _c(size))))
            count = codes.scale_words
            names = "{" + ", ".join(f"${i}" for i in range(count)) + "}" if count > 1 else "$0"
            kind = f".v{count}.b32" if count > 1 else ".b32"
            words += _asm(f"ld.global.nc{kind} {names}, [${count}];", [arith.addi(base, at)], count, True)
        vector = ir.VectorType.get((1,), _i32())
        return mgpu.FragmentedArray(
            _registers=np.array([utils.vector_concat([utils.bitcast(w, vector)]) for w in words], dtype=object),
            _layout=fragments.WGStridedFragLayout((128 * len(words),), vec_size=1),
            _is_signed=True,
        )

    return load(scales_ref, group, row, line)


def registers(codes_ref: Any, scales: jax.Array, codes: Codes, block: int, transforms: Any) -> jax.Array:
    """``[64, 64]`` bfloat16 of one block of a line, times ``2**-SHIFT``, in the order of `permuted`.

    codes_ref: uint8 ``[64, 128]`` in shared memory with ``transforms``; scales: what `load_scales` gave.
    """

    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms), scale_layout(codes)),
        return_type=plgpu.ShapeDtypeStruct((_ROWS, BLOCK), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )

    @inline
    def take(ctx: Any, ref: Any, scales: Any) -> Any:
        warp, inner, column = _thread()
        base = llvm.ptrtoint(_i32(), utils.memref_ptr(ref))
        shape = fragments.WGMMA_LAYOUT.registers_shape((_ROWS, BLOCK))
        out = np.empty(shape, dtype=object)
        pairs = ir.VectorType.get((2,), ir.BF16Type.get())
        own_words = 8 // (codes.word // 2)  # words of a row in a block, two or four
        first, word = (block // 2 * 4, block % 2 * own_words) if codes is FP4 else (block * 4, 0)
        for half in range(2):
            row = arith.addi(arith.muli(warp, _c(16)), arith.addi(inner, _c(8 * half)))
            piece = arith.xori(arith.addi(column, _c(first)), inner)
            at = arith.addi(base, arith.addi(arith.muli(row, _c(LINE)), arith.muli(piece, _c(16))))
            names = "{" + ", ".join(f"${i}" for i in range(own_words)) + "}"
            words = _asm(f"ld.shared.v{own_words}.b32 {names}, [${own_words} + {4 * word}];", [at], own_words, True)
            held = [utils.bitcast(r, _i32()) for r in scales.registers.flat][half * codes.scale_words :][: codes.scale_words]
            # A group of 32: an FP4 thread's piece, or two neighbouring pieces of FP8.
            if codes is FP4:
                byte, number = held[block // 2], column
            else:
                byte, number = held[0], arith.addi(_c(2 * block), arith.shrui(column, _c(1)))
            factor = _factor(byte, number, codes)
            for i, own in enumerate(words):
                for j, pair in enumerate(_values(own, factor, codes)):
                    out[0, i * (codes.word // 2) + j, 0, 0, half, 0, 0, 0, 0] = utils.bitcast(pair, pairs)
        return mgpu.FragmentedArray(_registers=out, _layout=fragments.WGMMA_LAYOUT, _is_signed=None)

    return take(codes_ref, scales)


def _factor(word: Any, number: Any, codes: Codes) -> Any:
    """The ``number``-th byte of a word of scales as two bfloat16 that make codes' bits into values times ``2**-SHIFT``."""
    first = codes.bias - SHIFT  # the exponent's bits of 2**(byte - 127) times 2**(bias - SHIFT) are byte + first
    both = (first << 7) * 0x10001
    ptx = (
        "{ .reg .b32 s, b; prmt.b32 s, $1, 0, $2; and.b32 s, s, 255; "
        f"min.u32 b, s, {254 - first}; mad.lo.u32 $0, b, 0x00800080, {both:#x}; }}"
    )
    return _asm(ptx, [word, number], 1, False)[0]


def _values(word: Any, factor: Any, codes: Codes) -> list[Any]:
    """Products of a word's codes with ``factor``: registers i and i + n / 2 of n codes in one word each."""
    half = codes.word // 2
    bits = 32 // codes.word
    lines = []
    for i in range(half):
        # Sign to bits 15 and 31; the code's last bit to bit 6 (E2M1) or 4 (E4M3).
        sign, move = 16 - bits * (i + 1), (6 if codes is FP4 else 4) - bits * i
        mask = 0x01C001C0 if codes is FP4 else 0x07F007F0
        moved = f"shl.b32 m, ${half}, {move};" if move > 0 else f"shr.u32 m, ${half}, {-move};"
        lines.append(f"shl.b32 s, ${half}, {sign}; {moved} and.b32 m, m, {mask:#x}; lop3.b32 m, s, 0x80008000, m, 0xEA;")
        lines.append(f"mul.rn.bf16x2 ${i}, m, ${half + 1};")
    return _asm("{ .reg .b32 s, m; " + " ".join(lines) + " }", [word, factor], half, False)
