"""Stored rows to tiles of bfloat16 or fp16 in shared memory: the instructions of one warpgroup, in PTX.

Every product of an E2M1 code and an E4M3 scale has at most 6 significant bits, and every E4M3 code times a power of two at
most 4: both formats hold them exactly (fp16 for power-of-two scales of 2**-15 to 2**7; of smaller ones it loses only bits
below 2**-24).

A warp copies its own rows to shared memory asynchronously, neighbouring threads neighbouring bytes, takes them back a chunk
of 32 channels a thread and writes 16-byte pieces of the tile. The eight threads of one load or store have rows that differ,
or halves of a 64-column atom: they hit eight different bank groups, of the padded copies as of the 128-byte swizzle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import utils

KEYS = 64  # rows of a tile
Word = Any  # a value of MLIR, 32 bits unless said; a number where tests follow one thread


def padded_width(width: int) -> int:
    """Channels that a row of ``width`` has in a tile: a power of two, 128 or more."""
    return max(128, 1 << (width - 1).bit_length())


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
    def eight(self) -> int:
        """Bytes of eight rows in one half of a tile."""
        return self.padded // 128 * 1024


# Arithmetic on registers; a number stands for a constant.
def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _c(value: int) -> Word:
    return mgpu.c(value, _i32())


def low(a: Word, mask: int) -> Word:
    """a's bits that ``mask`` has."""
    return arith.andi(a, _c(mask))


def right(a: Word, count: int) -> Word:
    """a shifted right by ``count`` bits."""
    return arith.shrui(a, _c(count))


def constant(value: int) -> Word:
    """A 32-bit constant."""
    return _c(value)


def add(a: Word, b: Word) -> Word:
    """a + b."""
    return arith.addi(a, b)


def times(a: Word, factor: int) -> Word:
    """a times a constant."""
    return arith.muli(a, _c(factor))


def madd(a: Word, factor: int, b: Word) -> Word:
    """a times a constant, plus b."""
    return arith.addi(times(a, factor), b)


def below(a: Word, bound: int) -> Word:
    """a < bound, signed."""
    return arith.cmpi(arith.CmpIPredicate.slt, a, _c(bound))


def not_negative(a: Word) -> Word:
    """a >= 0."""
    return arith.cmpi(arith.CmpIPredicate.sge, a, _c(0))


def both(a: Word, b: Word) -> Word:
    """a and b."""
    return arith.andi(a, b)


def choose(condition: Word, a: Word, b: Word) -> Word:
    """a where ``condition``, else b."""
    return arith.select(condition, a, b)


def scalar(array: Any) -> Word:
    """The register of a scalar array."""
    return array.registers.item()


class Lane:
    """A thread's part of ``rows`` (8 or 4) rows that its warp unpacks at once: one row, and every so many chunks of it."""

    def __init__(self, geometry: Geometry, rows: int):
        self.geometry, self.rows = geometry, rows
        thread = own_thread()
        self.warp, self.number = right(thread, 5), low(thread, 31)
        self.row, column = low(self.number, rows - 1), right(self.number, rows.bit_length() - 1)
        # Eight rows: neighbouring chunks are one thread's, and so are their scales. Four: neighbours have neighbours.
        self.per_thread = max(1, geometry.chunks * rows // 32)
        self.first = times(column, self.per_thread) if rows == 8 else column
        self.step = 1 if rows == 8 else 8
        half_chunks = geometry.chunks // 2
        self._inner = arith.remui(self.first, _c(half_chunks))
        self._half = arith.divui(self.first, _c(half_chunks))

    def chunk(self, index: int) -> Word:
        """The thread's ``index``-th chunk."""
        return add(self.first, _c(self.step * index))

    @property
    def covers(self) -> bool:
        """Whether every thread's chunks are of the padded row."""
        return self.geometry.chunks * self.rows >= 32

    def pieces(self, base: Word, inside: int) -> list[Word]:
        """Shared addresses in the tile at ``base`` of the four 16-byte pieces of the thread's even chunks, then of its odd ones,
        at the first atom of the warp's rows from ``inside`` (0 or 4) on; `offset` bytes further they are where they belong.

        A piece of eight channels is at its 64-column atom's row, at its own number xor the row's.
        """
        geometry = self.geometry
        row = add(self.row, _c(inside)) if inside else self.row
        start = madd(self._half, KEYS * geometry.padded, madd(right(self._inner, 1), 1024, madd(row, 128, base)))
        start = madd(self.warp, KEYS // 32 * geometry.eight, start)
        first = times(low(self._inner, 1), 4)
        parities = 2 if self.per_thread > 1 and self.step == 1 else 1
        numbers = [arith.xori(add(first, _c(piece)), row) for piece in range(4 * parities)]
        return [madd(number, 16, start) for number in numbers]

    def offset(self, unit: int, index: int) -> int:
        """Bytes from where `pieces` points to the thread's ``index``-th chunk in its warp's ``unit``-th turn."""
        geometry, moved = self.geometry, self.step * index
        half_chunks = geometry.chunks // 2
        atoms = moved // half_chunks * KEYS * geometry.padded + moved % half_chunks // 2 * 1024
        return self.rows * unit // 8 * geometry.eight + atoms


def own_thread() -> Word:
    """The thread's number in its warpgroup, computed anew: what follows from it is not kept in registers from tile to tile."""
    return arith.andi(_asm("mov.u32 $0, %tid.x;", [], [_i32()])[0], _c(127))


def shared_address(ref: Word) -> Word:
    """32-bit shared address of a reference."""
    return llvm.ptrtoint(_i32(), utils.memref_ptr(ref))


def global_address(ref: Word) -> Word:
    """64-bit global address of a reference."""
    return llvm.ptrtoint(_i64(), utils.memref_ptr(ref))


def step(address: Word, number: Word, stride: int) -> Word:
    """``address + number * stride`` in bytes."""
    return arith.addi(address, arith.muli(arith.extsi(_i64(), number), mgpu.c(stride, _i64())))


def shift(address: Word, count: int) -> Word:
    """``address + count`` in bytes."""
    return arith.addi(address, mgpu.c(count, _i64()))


def stage(shared: Word, source: Word, offset: int, size: int, alive: Word, inside: Word | None) -> None:
    """Starts a copy of 2, 4, 8 or 16 bytes from device memory to shared memory, both ``offset`` bytes further on and aligned to
    their number, in the threads that ``inside`` names, None for all; zeros where not ``alive``. Copies have at least 4: two
    bytes go through a register, at once."""
    flags = [arith.extui(_i32(), alive), _c(1) if inside is None else arith.extui(_i32(), inside)]
    to, of = f"[$0 + {offset}]", f"[$1 + {offset}]"
    if size >= 4:
        kind, where = "cg" if size == 16 else "ca", "" if inside is None else "@p "
        lines = [f"setp.ne.b32 p, $3, 0; mul.lo.u32 n, $2, {size}; {where}cp.async.{kind}.shared.global {to}, {of}, {size}, n;"]
        _asm(_lines([".reg .pred p;", *lines], ["n"]), [shared, source, *flags], [])
        return
    lines = [".reg .pred p, q; .reg .b16 h; setp.ne.b32 p, $3, 0; setp.ne.and.b32 q, $2, 0, p;"]
    lines.append(f"mov.b16 h, 0; @q ld.global.nc.b16 h, {of}; @p st.shared.b16 {to}, h;")
    _asm(_lines(lines, []), [shared, source, *flags], [])


def stage_id(shared: Word, source: Word, own: Word, inside: Word) -> None:
    """Starts the copy of a word from the threads that ``own`` names; -1 at once where not ``inside``."""
    lines = [
        "setp.ne.b32 p, $2, 0; setp.ne.and.b32 q, $3, 0, p; setp.eq.and.b32 r, $3, 0, p;",
        "mov.b32 x, -1; @r st.shared.b32 [$0], x; @q cp.async.ca.shared.global [$0], [$1], 4;",
    ]
    args = [shared, source, arith.extui(_i32(), own), arith.extui(_i32(), inside)]
    _asm(_lines([".reg .pred p, q, r;", *lines], ["x"]), args, [])


def when(condition: Word, wanted: bool = True) -> Any:
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


def take(shared: Word, count: int) -> list[Word]:
    """``count`` words, 1, 2 or 4, of shared memory."""
    names = ", ".join(f"${i}" for i in range(count))
    kind, where = (f".v{count}", f"{{{names}}}") if count > 1 else ("", names)
    return _asm(f"ld.shared{kind}.b32 {where}, [${count}];", [shared], [_i32()] * count)


def take_half(shared: Word) -> Word:
    """Two bytes of shared memory in the low half of a word."""
    return _asm(_lines([".reg .b16 h; ld.shared.b16 h, [$1]; cvt.u32.u16 $0, h;"], []), [shared], [_i32()])[0]


def take_byte(shared: Word) -> Word:
    """A byte of shared memory in a word."""
    return _asm("ld.shared.u8 $0, [$1];", [shared], [_i32()])[0]


def meet() -> None:
    """Until the warp's threads have all come here; what each has written to shared memory is then the others' to read."""
    _asm("bar.warp.sync 0xffffffff;", [], [])


def _asm(ptx: str, args: Sequence[Word], results: Sequence[ir.Type]) -> list[Word]:
    kinds = {"i32": "r", "i64": "l"}
    outs = ["=" + kinds[str(t)] for t in results]
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


def store_e2m1(words: Sequence[Word], scales: Word, pieces: Sequence[Word], offset: int, bf16: bool) -> None:
    """32 E2M1 codes (four words) times two E4M3 scales (low 16 bits) to four 16-byte pieces ``offset`` bytes further on.

    A code's magnitude picks the high byte of its value, and the low one where that is not zero, from a table of eight.
    """
    high, low_byte = ((0x3F3F3F00, 0x40404040), (0xC0800000, 0xC0804000)) if bf16 else ((0x3E3C3800, 0x46444240), None)
    lines = ["cvt.u16.u32 sb, $4; cvt.rn.f16x2.e4m3x2 sc, sb;", *(_BF16_PAIR if bf16 else ())]
    lines.append("prmt.b32 s0, sc, sc, 0x1010; prmt.b32 s1, sc, sc, 0x3232;")
    lines.append(f"mov.b32 t0, {high[0]:#x}; mov.b32 t1, {high[1]:#x}; mov.b32 n1, 0x80808080; mov.b32 z, 0;")
    if low_byte is not None:
        lines.append(f"mov.b32 l0, {low_byte[0]:#x}; mov.b32 l1, {low_byte[1]:#x};")
    kind, picks = ("bf16x2", (0x5140, 0x7362)) if bf16 else ("f16x2", (0x1404, 0x3424))
    # Every word has registers of its own: a store holds on to those that it reads.
    declared = ["sc", "s0", "s1", "t0", "t1", "l0", "l1", "n1", "z"]
    for w in range(4):
        declared += [f"{name}{w}_{half}" for name in "mgvsu" for half in range(2)] + [f"o{w}_{i}" for i in range(4)]
        lines.append(f"and.b32 m{w}_0, ${w}, 0x77777777; shr.u32 g{w}_0, ${w}, 1; and.b32 g{w}_0, g{w}_0, 0x44444444;")
        lines.append(f"shr.u32 m{w}_1, m{w}_0, 16; shr.u32 g{w}_1, g{w}_0, 16;")
        for half in range(2):
            v, s, u = f"v{w}_{half}", f"s{w}_{half}", f"u{w}_{half}"
            lines.append(f"prmt.b32 {v}, t0, t1, m{w}_{half}; prmt.b32 {s}, z, n1, g{w}_{half}; or.b32 {v}, {v}, {s};")
            if low_byte is not None:
                lines.append(f"prmt.b32 {u}, l0, l1, m{w}_{half};")
            for pair in range(2):
                out = f"o{w}_{2 * half + pair}"
                sources = f"{u}, {v}" if bf16 else f"{v}, z"
                lines.append(f"prmt.b32 {out}, {sources}, {picks[pair]:#x}; mul.rn.{kind} {out}, {out}, s{w // 2};")
        outs = ", ".join(f"o{w}_{i}" for i in range(4))
        lines.append(f"st.shared.v4.b32 [${5 + w} + {offset}], {{{outs}}};")
    _asm(_lines([_HALVES, *lines], declared), [*words, scales, *pieces], [])


# fp16 pair ``sc`` to bfloat16.
_HALVES = ".reg .b16 sb, lo, hi; .reg .f32 a, b;"
_BF16_PAIR = ("mov.b32 {lo, hi}, sc; cvt.f32.f16 a, lo; cvt.f32.f16 b, hi; cvt.rn.bf16x2.f32 sc, b, a;",)


def store_e4m3(words: Sequence[Word], exponent: Word, pieces: Sequence[Word], offset: int, bf16: bool) -> None:
    """32 E4M3 codes (eight words) times ``2**(exponent - 127)`` (low 8 bits) to four 16-byte pieces ``offset`` further on."""
    lines = ["shl.b32 x, $8, 23; and.b32 x, x, 0x7F800000; mov.b32 f, x;"]
    lines.append("cvt.rn.bf16x2.f32 sc, f, f;" if bf16 else "cvt.rn.f16x2.f32 sc, f, f;")
    kind = "bf16x2" if bf16 else "f16x2"
    declared = ["x", "sc"]
    for piece in range(4):
        declared += [f"o{piece}_{i}" for i in range(4)]
        for word in range(2):
            lines.append(f"mov.b32 {{c0, c1}}, ${2 * piece + word};")
            for half in range(2):
                out = f"o{piece}_{2 * word + half}"
                lines.append(f"cvt.rn.f16x2.e4m3x2 {out}, c{half};")
                lines += [step.replace("sc", out) for step in _BF16_PAIR] if bf16 else []
                lines.append(f"mul.rn.{kind} {out}, {out}, sc;")
        outs = ", ".join(f"o{piece}_{i}" for i in range(4))
        lines.append(f"st.shared.v4.b32 [${9 + piece} + {offset}], {{{outs}}};")
    _asm(_lines([_HALVES, ".reg .b16 c0, c1; .reg .f32 f;", *lines], declared), [*words, exponent, *pieces], [])


def store_piece(words: Sequence[Word], lane: Word, address: Word, offset: int) -> None:
    """Four words of a matrix product's layout, in which each of four neighbouring threads has two columns of four groups of
    eight, to device memory: the threads trade, and each writes the 16 bytes of one group, ``offset`` bytes further on."""
    lines = [".reg .pred p1, p2; .reg .b32 b; and.b32 b, $4, 1; setp.ne.b32 p1, b, 0; and.b32 b, $4, 2; setp.ne.b32 p2, b, 0;"]
    lines += [f"mov.b32 r{i}, ${i};" for i in range(4)]
    for apart, flag, pairs in ((1, "p1", ((0, 1), (2, 3))), (2, "p2", ((0, 2), (1, 3)))):
        for a, b in pairs:
            lines.append(f"selp.b32 s, r{a}, r{b}, {flag}; shfl.sync.bfly.b32 t, s, {apart}, 0x1f, 0xffffffff;")
            lines.append(f"selp.b32 r{a}, t, r{a}, {flag}; selp.b32 r{b}, r{b}, t, {flag};")
    lines.append(f"st.global.v4.b32 [$5 + {offset}], {{r0, r1, r2, r3}};")
    _asm(_lines(lines, ["r0", "r1", "r2", "r3", "s", "t"]), [*words, lane, address], [])


def bits(pair: Word) -> Word:
    """A pair of 16-bit numbers as a word."""
    return utils.bitcast(pair, _i32())


def store_bias(address: Word, number: Word, own: Word, masked: float) -> None:
    """0, or ``masked`` where an id is negative, to shared memory from the threads that ``own`` names."""
    value = arith.select(not_negative(number), _c(0), _c(int(np.float32(masked).view(np.int32))))
    ptx = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.shared.b32 [$0], $1; }"
    _asm(ptx, [address, value, arith.extui(_i32(), own)], [])
