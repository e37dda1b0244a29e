"""Stored rows to fp16 tiles in shared memory: the instructions of one warpgroup, in PTX.

Every product of an E2M1 code and an E4M3 scale has at most 6 significant bits, and every E4M3 code times a power of two at
most 4: fp16 holds them exactly (for power-of-two scales of 2**-15 to 2**7; smaller ones lose only bits below 2**-24).

A thread copies its own chunks of rows to shared memory asynchronously, some steps ahead, takes them back and writes 16-byte
pieces of the tile: thread t has row ``t % 8`` of its group of eight, so that the eight threads of one store hit eight
different bank groups of the 128-byte swizzle.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import utils

KEYS = 64  # rows of a tile


@dataclass(frozen=True)
class Geometry:
    """Where a row's channels go. width: channels of a row; padded: of a tile, a power of two from 128 to 512."""

    width: int
    padded: int

    @property
    def chunks(self) -> int:
        """Pieces of 32 channels in a padded row."""
        return self.padded // 32

    @property
    def groups(self) -> int:
        """Groups of eight rows that the warpgroup handles at once."""
        return 128 // (8 * self.chunks)

    @property
    def rounds(self) -> int:
        """Rows of a tile that a thread has a chunk of."""
        return KEYS // (8 * self.groups)

    @property
    def eight(self) -> int:
        """Bytes of eight rows in one half of a tile."""
        return self.padded // 128 * 1024


# Arithmetic on registers; a number stands for a constant.
def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _c(value: int) -> ir.Value:
    return mgpu.c(value, _i32())


def half(word: ir.Value, number: ir.Value) -> ir.Value:
    """The ``number``-th (0 or 1) half of a word, in its low 16 bits."""
    return arith.shrui(word, times(number, 16))


def byte(word: ir.Value, number: ir.Value) -> ir.Value:
    """The ``number``-th byte of a word, in its low 8 bits."""
    return arith.shrui(word, times(number, 8))


def low(a: ir.Value, mask: int) -> ir.Value:
    """a's bits that ``mask`` has."""
    return arith.andi(a, _c(mask))


def right(a: ir.Value, count: int) -> ir.Value:
    """a shifted right by ``count`` bits."""
    return arith.shrui(a, _c(count))


def remainder(a: ir.Value, divisor: int) -> ir.Value:
    """a modulo a constant, unsigned."""
    return arith.remui(a, _c(divisor))


def constant(value: int) -> ir.Value:
    """A 32-bit constant."""
    return _c(value)


def add(a: ir.Value, b: ir.Value) -> ir.Value:
    """a + b."""
    return arith.addi(a, b)


def times(a: ir.Value, factor: int) -> ir.Value:
    """a times a constant."""
    return arith.muli(a, _c(factor))


def madd(a: ir.Value, factor: int, b: ir.Value) -> ir.Value:
    """a times a constant, plus b."""
    return arith.addi(times(a, factor), b)


def below(a: ir.Value, bound: int) -> ir.Value:
    """a < bound, signed."""
    return arith.cmpi(arith.CmpIPredicate.slt, a, _c(bound))


def not_negative(a: ir.Value) -> ir.Value:
    """a >= 0."""
    return arith.cmpi(arith.CmpIPredicate.sge, a, _c(0))


def both(a: ir.Value, b: ir.Value) -> ir.Value:
    """a and b."""
    return arith.andi(a, b)


def choose(condition: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """a where ``condition``, else b."""
    return arith.select(condition, a, b)


def scalar(array: Any) -> ir.Value:
    """The register of a scalar array."""
    return array.registers.item()


class Lane:
    """A thread's place in its warpgroup: its row of eight, its chunk of 32 channels, its group of eight rows."""

    def __init__(self, geometry: Geometry):
        self.geometry = geometry
        self.thread = arith.andi(utils.thread_idx(), _c(127))
        self.row = arith.andi(self.thread, _c(7))
        unit = arith.shrui(self.thread, _c(3))
        self.chunk = arith.andi(unit, _c(geometry.chunks - 1))
        self.group = arith.shrui(unit, _c(geometry.chunks.bit_length() - 1))
        self.live = arith.cmpi(arith.CmpIPredicate.ult, self.chunk, _c(geometry.width // 32))
        # A piece of eight channels is at its 64-column atom's row, at its own number xor the row's.
        half_chunks = geometry.chunks // 2
        half, inner = arith.divui(self.chunk, _c(half_chunks)), arith.remui(self.chunk, _c(half_chunks))
        atom = arith.addi(arith.muli(arith.shrui(inner, _c(1)), _c(1024)), arith.muli(self.row, _c(128)))
        self.atom = arith.addi(arith.muli(half, _c(KEYS * geometry.padded)), atom)
        self.first_piece = arith.muli(arith.andi(inner, _c(1)), _c(4))

    def pieces(self, base: ir.Value) -> list[ir.Value]:
        """Shared addresses of the thread's four 16-byte pieces in its first row; the others follow at `stride`."""
        start = add(add(base, self.atom), times(self.group, self.geometry.eight))
        numbers = [arith.xori(add(self.first_piece, _c(piece)), self.row) for piece in range(4)]
        return [madd(number, 16, start) for number in numbers]

    @property
    def stride(self) -> int:
        """Bytes of shared memory from a thread's row to its next."""
        return self.geometry.groups * self.geometry.eight

    def store_bias(self, base: ir.Value, index: int, number: ir.Value, masked: float) -> None:
        """What is added to the scores of the thread's ``index``-th row: 0, or ``masked`` where its id is negative."""
        bits = int(np.float32(masked).view(np.int32))
        value = arith.select(not_negative(number), _c(0), _c(bits))
        first = arith.cmpi(arith.CmpIPredicate.eq, self.chunk, _c(0))
        store_flag(add(base, times(self.place(index), 4)), value, first)

    def place(self, index: int) -> ir.Value:
        """The thread's ``index``-th row of the tile."""
        return madd(add(self.group, _c(index * self.geometry.groups)), 8, self.row)


def shared_address(ref: ir.Value) -> ir.Value:
    """32-bit shared address of a reference."""
    return llvm.ptrtoint(_i32(), utils.memref_ptr(ref))


def global_address(ref: ir.Value) -> ir.Value:
    """64-bit global address of a reference."""
    return llvm.ptrtoint(_i64(), utils.memref_ptr(ref))


def step(address: ir.Value, number: ir.Value, stride: int) -> ir.Value:
    """``address + number * stride`` in bytes."""
    return arith.addi(address, arith.muli(arith.extsi(_i64(), number), mgpu.c(stride, _i64())))


def shift(address: ir.Value, count: int) -> ir.Value:
    """``address + count`` in bytes."""
    return arith.addi(address, mgpu.c(count, _i64()))


def load_words(address: ir.Value, alive: ir.Value, count: int) -> list[ir.Value]:
    """``count`` 32-bit words, a multiple of four, from a 16-byte aligned ``address``; zeros where not ``alive``."""
    zero = "".join(f"mov.b32 ${i}, 0; " for i in range(count))
    where, when = f"${count}", f"${count + 1}"
    lines = [zero, ".reg .pred p; setp.ne.b32 p, ", when, ", 0; "]
    lines += [
        f"@p ld.global.nc.L1::no_allocate.v4.b32 {{${i}, ${i + 1}, ${i + 2}, ${i + 3}}}, [{where} + {4 * i}]; "
        for i in range(0, count, 4)
    ]
    # Early clobber: the zeros are written before the address is read for the last time.
    return _asm("{ " + "".join(lines) + "}", [address, arith.extui(_i32(), alive)], [_i32()] * count, early=True)


def stage(shared: ir.Value, source: ir.Value, size: int, alive: ir.Value, align: int) -> None:
    """Starts a copy of ``size`` bytes, 4 or 16, from device memory to shared memory; zeros where not ``alive``.

    align: bytes that divide the source's address. Copies need 4; what has less goes through registers.
    """
    flag = arith.extui(_i32(), alive)
    if align % 4 == 0:
        piece = math.gcd(size, align)
        kind = "cg" if piece == 16 else "ca"
        lines = [f"cp.async.{kind}.shared.global [$0 + {at}], [$1 + {at}], {piece}, n;" for at in range(0, size, piece)]
        _asm(_lines([f"mul.lo.u32 n, $2, {piece};", *lines], ["n"]), [shared, source, flag], [])
        return
    lines = ["setp.ne.b32 p, $2, 0;"]
    for at in range(0, size, 2):
        lines.append(f"mov.b16 h, 0; @p ld.global.nc.b16 h, [$1 + {at}]; st.shared.b16 [$0 + {at}], h;")
    _asm(_lines([".reg .pred p; .reg .b16 h;", *lines], []), [shared, source, flag], [])


def stage_id(shared: ir.Value, source: ir.Value, own: ir.Value, inside: ir.Value) -> None:
    """Starts the copy of a word from the threads that ``own`` names; -1 at once where not ``inside``."""
    lines = [
        "setp.ne.b32 p, $2, 0; setp.ne.and.b32 q, $3, 0, p; setp.eq.and.b32 r, $3, 0, p;",
        "mov.b32 x, -1; @r st.shared.b32 [$0], x; @q cp.async.ca.shared.global [$0], [$1], 4;",
    ]
    args = [shared, source, arith.extui(_i32(), own), arith.extui(_i32(), inside)]
    _asm(_lines([".reg .pred p, q, r;", *lines], ["x"]), args, [])


def when(condition: ir.Value, wanted: bool = True) -> Any:
    """Context of what runs where ``condition`` is ``wanted``; all threads of a warp agree on it."""
    true = mgpu.c(1, ir.IntegerType.get_signless(1))
    return utils.when(condition if wanted else arith.xori(condition, true))


def fence(together: bool) -> None:
    """Orders a thread's writes to shared memory before later reads by the tensor cores, or the warpgroup's ``together``."""
    _asm("fence.proxy.async.shared::cta;", [], [])
    if together:
        utils.warpgroup_barrier()


def commit() -> None:
    """Ends a thread's group of copies."""
    _asm("cp.async.commit_group;", [], [])


def wait(pending: int) -> None:
    """Until at most the last ``pending`` groups are under way."""
    _asm(f"cp.async.wait_group {pending};", [], [])


def take(shared: ir.Value, count: int) -> list[ir.Value]:
    """``count`` words, 1 or 4, of shared memory."""
    if count == 1:
        return _asm("ld.shared.b32 $0, [$1];", [shared], [_i32()])
    return _asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", [shared], [_i32()] * 4)


def _asm(ptx: str, args: Sequence[ir.Value], results: Sequence[ir.Type], early: bool = False) -> list[ir.Value]:
    kinds = {"i32": "r", "i64": "l"}
    outs = ["=" + ("&" if early else "") + kinds[str(t)] for t in results]
    constraints = ",".join(outs + [kinds[str(a.type)] for a in args])
    result = results[0] if len(results) == 1 else llvm.StructType.get_literal(list(results)) if results else None
    kind = result if result is not None else ir.Type.parse("!llvm.void")
    out = llvm.inline_asm(kind, list(args), ptx, constraints, has_side_effects=True)
    if not results:
        return []
    return [out] if len(results) == 1 else [llvm.extractvalue(t, out, [i]) for i, t in enumerate(results)]


def _lines(lines: Sequence[str], declared: Sequence[str]) -> str:
    registers = f".reg .b32 {', '.join(declared)}; " if declared else ""
    return "{ " + registers + " ".join(lines) + " }"


def store_e2m1(words: Sequence[ir.Value], scales: ir.Value, pieces: Sequence[ir.Value], offset: int) -> None:
    """32 E2M1 codes (four words) times two E4M3 scales (low 16 bits) to four 16-byte pieces of fp16.

    A code's magnitude picks the high byte of its fp16 value from a table of eight; its low byte is zero.
    """
    lines = [
        # Both scales at once, then each in both halves.
        "cvt.u16.u32 sb, $4; cvt.rn.f16x2.e4m3x2 sc, sb;",
        "prmt.b32 s0, sc, sc, 0x1010; prmt.b32 s1, sc, sc, 0x3232;",
        "mov.b32 t0, 0x3E3C3800; mov.b32 t1, 0x46444240; mov.b32 n1, 0x80808080; mov.b32 z, 0;",
    ]
    # Every word has registers of its own: a store holds on to those that it reads.
    declared = ["sc", "s0", "s1", "t0", "t1", "n1", "z"]
    for w in range(4):
        declared += [f"{name}{w}_{half}" for name in "mgvs" for half in range(2)] + [f"o{w}_{i}" for i in range(4)]
        lines.append(f"and.b32 m{w}_0, ${w}, 0x77777777; shr.u32 g{w}_0, ${w}, 1; and.b32 g{w}_0, g{w}_0, 0x44444444;")
        lines.append(f"shr.u32 m{w}_1, m{w}_0, 16; shr.u32 g{w}_1, g{w}_0, 16;")
        for half in range(2):
            v, s = f"v{w}_{half}", f"s{w}_{half}"
            lines.append(f"prmt.b32 {v}, t0, t1, m{w}_{half}; prmt.b32 {s}, z, n1, g{w}_{half}; or.b32 {v}, {v}, {s};")
            for pair, pick in enumerate((0x1404, 0x3424)):
                out = f"o{w}_{2 * half + pair}"
                lines.append(f"prmt.b32 {out}, {v}, z, {pick:#x}; mul.rn.f16x2 {out}, {out}, s{w // 2};")
        outs = ", ".join(f"o{w}_{i}" for i in range(4))
        lines.append(f"st.shared.v4.b32 [${5 + w} + {offset}], {{{outs}}};")
    _asm(_lines([".reg .b16 sb;", *lines], declared), [*words, scales, *pieces], [])


def store_e4m3(words: Sequence[ir.Value], exponent: ir.Value, pieces: Sequence[ir.Value], offset: int) -> None:
    """32 E4M3 codes (eight words) times ``2**(exponent - 127)`` (low 8 bits) to four 16-byte pieces of fp16."""
    lines = ["shl.b32 x, $8, 23; and.b32 x, x, 0x7F800000; mov.b32 f, x; cvt.rn.f16.f32 hs, f; mov.b32 sc, {hs, hs};"]
    declared = ["x", "sc"]
    for piece in range(4):
        declared += [f"o{piece}_{i}" for i in range(4)]
        for word in range(2):
            lines.append(f"mov.b32 {{lo, hi}}, ${2 * piece + word};")
            for half, source in enumerate(("lo", "hi")):
                out = f"o{piece}_{2 * word + half}"
                lines.append(f"cvt.rn.f16x2.e4m3x2 {out}, {source}; mul.rn.f16x2 {out}, {out}, sc;")
        outs = ", ".join(f"o{piece}_{i}" for i in range(4))
        lines.append(f"st.shared.v4.b32 [${9 + piece} + {offset}], {{{outs}}};")
    _asm(_lines([".reg .b16 hs, lo, hi; .reg .f32 f;", *lines], declared), [*words, exponent, *pieces], [])


def store_query(words: Sequence[ir.Value], pieces: Sequence[ir.Value], offset: int, wide: bool) -> None:
    """32 query channels, bf16 pairs (16 words) or float32 (32 words), to four 16-byte pieces of fp16."""
    lines, declared, at = [], ["x"], len(words)
    for piece in range(4):
        declared += [f"o{piece}_{i}" for i in range(4)]
        for pair in range(4):
            n = 4 * piece + pair
            if wide:
                lines.append(f"mov.b32 a, ${2 * n}; mov.b32 b, ${2 * n + 1};")
            else:
                lines.append(f"shl.b32 x, ${n}, 16; mov.b32 a, x; and.b32 x, ${n}, 0xFFFF0000; mov.b32 b, x;")
            lines.append(f"cvt.rn.f16x2.f32 o{piece}_{pair}, b, a;")
        outs = ", ".join(f"o{piece}_{i}" for i in range(4))
        lines.append(f"st.shared.v4.b32 [${at + piece} + {offset}], {{{outs}}};")
    _asm(_lines([".reg .f32 a, b;", *lines], declared), [*words, *pieces], [])


def store_flag(address: ir.Value, value: ir.Value, when: ir.Value) -> None:
    """A 32-bit word to shared memory from the threads that ``when`` names."""
    ptx = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.shared.b32 [$0], $1; }"
    _asm(ptx, [address, value, arith.extui(_i32(), when)], [])
