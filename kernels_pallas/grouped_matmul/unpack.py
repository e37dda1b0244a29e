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
TURNS = 2  # in which a line is unpacked
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
    def turn(self) -> int:
        """Codes of a row that are unpacked at once: a 16-byte piece for each of the four threads that share it."""
        return self.depth // TURNS


FP4, FP8 = Codes(8, 1, 126), Codes(4, 32, 120)


def _in_order(x: jax.Array, codes: Codes) -> jax.Array:
    """``[.., K]`` with the contracted dimension in the order of the codes in registers."""
    lead = x.shape[:-1]
    parts = x.reshape(*lead, -1, 4, TURNS, 4, 2, codes.word // 2)  # thread of four, turn, word, half of the register, register
    order = *range(len(lead) + 1), *(len(lead) + axis for axis in (2, 3, 5, 1, 4))
    return parts.transpose(order).reshape(x.shape)


def permuted(x: jax.Array, codes: Codes) -> jax.Array:
    """The other operand ``[.., K]`` for weights in registers: in their order, times ``2**SHIFT``."""
    return _in_order(x, codes) * jnp.asarray(2.0**SHIFT, x.dtype)


def interpreted(stored: jax.Array, scales: jax.Array, codes: Codes) -> jax.Array:
    """The line that `registers` gives a block at a time, by array code, in float32. stored: uint8 ``[64, 128]``."""
    values = unpack(stored, scales, EXPERT_WEIGHT) if codes is FP4 else dequantize_tiles(stored, scales)
    return _in_order(values, codes) * 2.0**-SHIFT


SCALES: Any = plgpu.Layout.WG_STRIDED((256,), vec_size=1)  # of `load_scales`: a word for each of a thread's two rows
_WORDS: Any = plgpu.Layout.WG_STRIDED((1024,), vec_size=1)  # of `load_codes`: four words for each


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def constant(value: int) -> Any:
    return mgpu.c(value, i32())


def thread_number() -> Any:
    """In the warpgroup."""
    return arith.andi(utils.thread_idx(), constant(127))


def _thread() -> tuple[Any, Any, Any]:
    """Warp, row of eight and thread of the four that share a row."""
    thread = thread_number()
    return (
        arith.shrui(thread, constant(5)),
        arith.andi(arith.shrui(thread, constant(2)), constant(7)),
        arith.andi(thread, constant(3)),
    )


def asm(ptx: str, args: list[Any], count: int, effects: bool) -> list[Any]:
    """Runs ``ptx``, which gives ``count`` words; effects: it must stay in its place."""
    kinds = {"i32": "r", "i64": "l"}
    constraints = ",".join(["=r"] * count + [kinds[str(a.type)] for a in args])
    result = i32() if count == 1 else llvm.StructType.get_literal([i32()] * count)
    out = llvm.inline_asm(result, args, ptx, constraints, has_side_effects=effects)
    return [out] if count == 1 else [llvm.extractvalue(i32(), out, [i]) for i in range(count)]


def held(words: list[Any]) -> Any:
    """Words of each thread as an array."""
    vector = ir.VectorType.get((1,), i32())
    return mgpu.FragmentedArray(
        _registers=np.array([utils.vector_concat([utils.bitcast(w, vector)]) for w in words], dtype=object),
        _layout=fragments.WGStridedFragLayout((128 * len(words),), vec_size=1),
        _is_signed=True,
    )


def load_scales(scales_ref: Any, group: jax.Array, row: jax.Array, line: jax.Array, codes: Codes) -> jax.Array:
    """Starts loading the scales of 64 rows from ``row`` on, for one line. scales_ref: uint8 ``[E, N / rows, K / 32]``.

    Two neighbouring pieces are a thread's: of FP4 each is a group of 32, so they have two scales, of FP8 both are one.
    """
    _, rows, columns = scales_ref.shape
    size, kind = (2, "u16") if codes is FP4 else (1, "u8")

    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT(())] * 3),
        return_type=plgpu.ShapeDtypeStruct((256,), jnp.int32, layout=SCALES),
    )

    @inline
    def load(ctx: Any, ref: Any, group: Any, row: Any, line: Any) -> Any:
        group, row, line = (a.registers.item() for a in (group, row, line))
        i64 = ir.IntegerType.get_signless(64)
        base = llvm.ptrtoint(i64, utils.memref_ptr(ref))
        warp, inner, column = _thread()
        first, words = arith.muli(arith.addi(arith.muli(line, constant(4)), column), constant(size)), []
        for half in range(2):
            own = arith.addi(row, arith.addi(arith.muli(warp, constant(16)), arith.addi(inner, constant(8 * half))))
            own = arith.minui(arith.divui(own, constant(codes.rows)), constant(rows - 1))
            number = arith.addi(arith.muli(arith.extui(i64, group), mgpu.c(rows, i64)), arith.extui(i64, own))
            at = arith.addi(arith.muli(number, mgpu.c(columns, i64)), arith.extui(i64, first))
            load = f"{{ .reg .b16 s; ld.global.nc.{kind} s, [$1]; cvt.u32.u16 $0, s; }}"
            words += asm(load, [arith.addi(base, at)], 1, True)
        return held(words)

    return load(scales_ref, group, row, line)


def load_factors(factors_ref: Any, row: jax.Array, rows: int) -> jax.Array:
    """Columns' factors ``[64, rows]`` from number ``row`` on, of float32 ``[T]``; past the last one, that one."""
    total, layout = factors_ref.shape[0], plgpu.Layout.WGMMA
    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((_ROWS, rows), jnp.float32, layout=layout),
    )

    @inline
    def load(ctx: Any, ref: Any, row: Any) -> Any:
        i64 = ir.IntegerType.get_signless(64)
        base, column = llvm.ptrtoint(i64, utils.memref_ptr(ref)), _thread()[2]
        out = np.empty(fragments.WGMMA_LAYOUT.registers_shape((_ROWS, rows)), dtype=object)
        for tile in range(rows // 8):
            both = []
            for side in range(2):
                own = arith.addi(row.registers.item(), arith.addi(arith.muli(column, constant(2)), constant(8 * tile + side)))
                at = arith.muli(arith.extui(i64, arith.minui(own, constant(total - 1))), mgpu.c(4, i64))
                both += asm("ld.global.nc.b32 $0, [$1];", [arith.addi(base, at)], 1, True)
            pair = utils.vector_concat([utils.bitcast(w, ir.VectorType.get((1,), ir.F32Type.get())) for w in both])
            out[0, tile, 0, 0, :, 0, 0, 0, 0] = pair
        return mgpu.FragmentedArray(_registers=out, _layout=fragments.WGMMA_LAYOUT, _is_signed=None)

    return load(factors_ref, row)


def interpreted_factors(factors_ref: Any, row: jax.Array, rows: int) -> jax.Array:
    """`load_factors` by array code."""
    return factors_ref[...][jnp.minimum(row + jnp.arange(rows), factors_ref.shape[0] - 1)][None]


def load_codes(codes_ref: Any, turn: int, transforms: Any) -> jax.Array:
    """A turn's codes. codes_ref: uint8 ``[64, 128]`` in shared memory with ``transforms``, a line of 64 rows."""

    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms),), return_type=plgpu.ShapeDtypeStruct((1024,), jnp.int32, layout=_WORDS)
    )

    @inline
    def load(ctx: Any, ref: Any) -> Any:
        base = llvm.ptrtoint(i32(), utils.memref_ptr(ref))
        words = []
        for half in range(2):
            words += asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", [place(base, turn, half)], 4, True)
        return held(words)

    return load(codes_ref)


def place(base: Any, turn: int, half: int) -> Any:
    """Where in a line of 64 rows at ``base`` a thread's piece of a turn is, for its row in the upper or lower ``half``.

    A piece is at its number xor the row's, by the 128-byte swizzle. A turn takes every other piece, so that two rows of four
    threads each read from all banks.
    """
    warp, inner, column = _thread()
    row = arith.addi(arith.muli(warp, constant(16)), arith.addi(inner, constant(8 * half)))
    piece = arith.xori(arith.addi(arith.muli(column, constant(2)), constant(turn)), inner)
    return arith.addi(base, arith.addi(arith.muli(row, constant(LINE)), arith.muli(piece, constant(16))))


def registers(words: jax.Array, scales: jax.Array, codes: Codes, turn: int) -> jax.Array:
    """``[64, turn]`` bfloat16, times ``2**-SHIFT``, in the order of `permuted`, of what `load_codes` and `load_scales` gave."""

    inline: Any = plgpu.inline_mgpu(
        arg_types=(_WORDS, SCALES),
        return_type=plgpu.ShapeDtypeStruct((_ROWS, codes.turn), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )

    @inline
    def take(ctx: Any, words: Any, scales: Any) -> Any:
        out = np.empty(fragments.WGMMA_LAYOUT.registers_shape((_ROWS, codes.turn)), dtype=object)
        pairs = ir.VectorType.get((2,), ir.BF16Type.get())
        held, bytes_ = ([utils.bitcast(r, i32()) for r in a.registers.flat] for a in (words, scales))
        for half in range(2):
            factor = _factor(bytes_[half], codes, turn)
            own = held[4 * half : 4 * half + 4]
            for tile, pair in enumerate(pair for word in own for pair in _values(word, factor, codes)):
                out[0, tile, 0, 0, half, 0, 0, 0, 0] = utils.bitcast(pair, pairs)
        return mgpu.FragmentedArray(_registers=out, _layout=fragments.WGMMA_LAYOUT, _is_signed=None)

    return take(words, scales)


def _factor(word: Any, codes: Codes, turn: int) -> Any:
    """A turn's scale as two bfloat16 that make codes' bits into values times ``2**-SHIFT``."""
    first = codes.bias - SHIFT  # the exponent's bits of 2**(byte - 127) times 2**(bias - SHIFT) are byte + first
    both = (first << 7) * 0x10001
    own = "and.b32 s, $1, 255;" if turn == 0 or codes is FP8 else "shr.u32 s, $1, 8;"
    ptx = f"{{ .reg .b32 s, b; {own} min.u32 b, s, {254 - first}; mad.lo.u32 $0, b, 0x00800080, {both:#x}; }}"
    return asm(ptx, [word], 1, False)[0]


def _values(word: Any, factor: Any, codes: Codes) -> list[Any]:
    """Products of a word's codes with ``factor``: registers i and i + n / 2 of n codes in one word each."""
    half = codes.word // 2
    lines = []
    for i in range(half):
        if codes is FP4:
            # One product moves the sign to bits 15 and 31 and the rest to 6 and 22, with copies at 9 and 12 that are cleared.
            nibble, source = i % 2 * 4, f"${half}" if i < 2 else "h"
            lines.append(f"and.b32 m, {source}, {0x000F000F << nibble:#x}; mul.lo.u32 m, m, {0x1040 >> nibble:#x};")
            lines.append(f"and.b32 m, m, 0x81C081C0; mul.rn.bf16x2 ${i}, m, ${half + 1};")
        else:
            # The sign to bits 15 and 31, the rest to 4 and 20.
            sign, move = (f"shl.b32 s, ${half}, 8;", "shl.b32") if i == 0 else (f"mov.b32 s, ${half};", "shr.u32")
            lines.append(f"{sign} {move} m, ${half}, 4; and.b32 m, m, 0x07F007F0; lop3.b32 m, s, 0x80008000, m, 0xEA;")
            lines.append(f"mul.rn.bf16x2 ${i}, m, ${half + 1};")
    first = f"shr.u32 h, ${half}, 8; " if codes is FP4 else ""
    return asm("{ .reg .b32 s, m, h; " + first + " ".join(lines) + " }", [word, factor], half, False)
