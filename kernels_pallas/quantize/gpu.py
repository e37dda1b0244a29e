"""`quantize` on Hopper: a thread turns sixteen neighbouring channels into bytes and writes them where they belong."""

import struct
from typing import Any

import jax
import jax.numpy as jnp

from dsv41.quant import Format
from kernels_pallas.simt import THREADS, launch

CHANNELS = 16  # of a thread
FORMATS = (("e2m1", "e4m3", 16), ("e2m1", "e8m0", 32), ("e4m3", "e8m0", 32))
MOST = 1 << 31  # values that 32-bit numbers of threads reach


def _elements(fmt: Format, width: int) -> int:
    return fmt.row_bytes(width) - width // fmt.group


def _bits(value: float) -> str:
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"


def _max(names: list[str]) -> list[str]:
    """PTX that leaves the largest of ``names`` in the first."""
    lines = []
    while len(names) > 1:
        lines += [f"max.f32 {a}, {a}, {b};" for a, b in zip(names[0::2], names[1::2], strict=False)]
        names = names[0::2]
    return lines


def _load(dtype: Any) -> list[str]:
    """PTX from ``source`` to the float registers x0..x15."""
    lines, size = [], jnp.dtype(dtype).itemsize
    for n in range(size):
        words = [f"w{4 * n + i}" for i in range(4)]
        lines.append(f"ld.global.nc.v4.b32 {{{', '.join(words)}}}, [source + {16 * n}];")
    if size == 4:
        return [*lines, *(f"mov.b32 x{i}, w{i};" for i in range(CHANNELS))]
    for i in range(CHANNELS // 2):
        lines.append(f"shl.b32 t, w{i}, 16; mov.b32 x{2 * i}, t; and.b32 t, w{i}, 0xFFFF0000; mov.b32 x{2 * i + 1}, t;")
    return lines


def _scale(fmt: Format) -> list[str]:
    """PTX from the group's largest magnitude ``m0`` to its scale's byte, and what dividing by it takes."""
    lines = [f"max.f32 m0, m0, {_bits(fmt.floor)};"]
    if fmt.scale == "e4m3":
        return [
            *lines,
            # A rounded quotient is a tie only where the exact one is: the dividend's neighbours are more than half an ulp away.
            f"div.rn.f32 m0, m0, {_bits(fmt.max)}; cvt.rn.satfinite.e4m3x2.f32 h, {_bits(0)}, m0; cvt.u32.u16 byte, h;",
            "cvt.rn.f16x2.e4m3x2 t, h; mov.b32 {f, g}, t; cvt.f32.f16 s, f; rcp.rn.f32 r, s; neg.f32 s, s;",
        ]
    return [
        *lines,
        f"mul.rn.f32 m0, m0, {_bits(1 / fmt.max)}; mov.b32 t, m0; shr.u32 byte, t, 23; and.b32 t, t, 0x7FFFFF;",
        "setp.ne.u32 q, t, 0; @q add.u32 byte, byte, 1;",
        # The reciprocal of a power of two is exact; that of the largest is subnormal.
        f"sub.u32 t, 254, byte; shl.b32 t, t, 23; max.u32 t, t, {1 << 22}; mov.b32 r, t;",
    ]


def _e2m1(fmt: Format) -> list[str]:
    """PTX from x0..x15 to two words o0, o1 of eight codes each."""
    lines = []
    for i in reversed(range(CHANNELS)):
        word = f"o{i // 8}"
        lines.append(f"abs.f32 a, x{i}; mul.rn.f32 y, a, r;")
        if fmt.scale == "e4m3":
            # One correction of a product with the rounded reciprocal is the rounded quotient.
            lines.append("fma.rn.f32 e, y, s, a; fma.rn.f32 y, e, r, y;")
        lines += [
            # Adding 2**22 times its own power of two, at least 1, rounds a number to its two leading bits.
            f"min.f32 y, y, {_bits(fmt.max)}; mov.b32 t, y; max.u32 t, t, 0x3F800000; and.b32 t, t, 0x7F800000;",
            "add.u32 v, t, 0x0B000000; mov.b32 e, v; add.rn.f32 y, y, e; mov.b32 c, y; sub.u32 c, c, v;",
            f"shr.u32 t, t, 22; add.u32 c, c, t; sub.u32 c, c, 254; mov.b32 t, x{i}; shr.u32 t, t, 28; and.b32 t, t, 8;",
            "or.b32 c, c, t;",
            f"shl.b32 {word}, {word}, 4; or.b32 {word}, {word}, c;" if i % 8 != 7 else f"mov.b32 {word}, c;",
        ]
    return lines


def _e4m3() -> list[str]:
    """PTX from x0..x15 to four words o0..o3 of four elements each."""
    lines = [f"mul.rn.f32 x{i}, x{i}, r;" for i in range(CHANNELS)]
    for i in range(0, CHANNELS, 4):
        lines.append(f"cvt.rn.satfinite.e4m3x2.f32 h, x{i + 1}, x{i}; cvt.rn.satfinite.e4m3x2.f32 f, x{i + 3}, x{i + 2};")
        lines.append(f"mov.b32 o{i // 4}, {{h, f}};")
    return lines


def _store(words: int, pitch: int) -> list[str]:
    """PTX that writes o0.. to ``target``, in pieces that rows of ``pitch`` bytes align."""
    size = next(size for size in (4, 2, 1) if size <= words and pitch % (4 * size) == 0)
    lines = []
    for i in range(0, words, size):
        value = f"o{i}" if size == 1 else "{" + ", ".join(f"o{i + j}" for j in range(size)) + "}"
        lines.append(f"@p st.global{f'.v{size}' if size > 1 else ''}.b32 [target + {4 * i}], {value};")
    return lines


def program(fmt: Format, width: int, rows: int, dtype: Any, slots: tuple[int, int] | None, apart: bool = False) -> str:
    """One thread's PTX: $0 values ``[rows, width]``, then slots (where given), then what is written.

    slots: rows of a request and slots of its pool; None: row i is written to row i. apart: scales go to an array of their
    own, the last operand.
    """
    pieces, elements = width // CHANNELS, _elements(fmt, width)
    pitch = elements if apart else fmt.row_bytes(width)
    own = elements // pieces
    out = "$1" if slots is None else "$2"
    lines = [
        ".reg .b32 unit, row, piece, slot, batch, t, v, c, byte; .reg .b64 source, target, scale, at; .reg .pred p, q;",
        f".reg .b32 {', '.join(f'w{i}' for i in range(CHANNELS))}, o0, o1, o2, o3; .reg .b16 h, f, g;",
        f".reg .f32 {', '.join(f'x{i}, m{i}' for i in range(CHANNELS))}, s, r, a, y, e;",
        f"mov.u32 unit, %ctaid.x; mov.u32 t, %tid.x; mad.lo.u32 unit, unit, {THREADS}, t;",
        # Threads past the end do the last one's work, so that whole warps trade values, and write nothing.
        f"setp.lt.u32 p, unit, {rows * pieces}; min.u32 unit, unit, {rows * pieces - 1};",
        f"div.u32 row, unit, {pieces}; mul.lo.u32 t, row, {pieces}; sub.u32 piece, unit, t;",
        f"mul.wide.u32 at, unit, {CHANNELS * jnp.dtype(dtype).itemsize}; add.u64 source, $0, at;",
    ]
    if slots is not None:
        lines.append("mul.wide.u32 at, row, 4; add.u64 at, $1, at; ld.global.nc.b32 slot, [at];")
    lines += _load(dtype)
    if slots is not None:
        time, count = slots
        lines += [
            f"setp.lt.u32 q, slot, {count}; and.pred p, p, q; selp.b32 slot, slot, 0, q;",
            f"div.u32 batch, row, {time}; mad.lo.u32 row, batch, {count}, slot;",
        ]
    lines += [
        f"mad.wide.u32 target, row, {pitch}, {out}; mul.wide.u32 at, piece, {own};",
        f"add.u64 scale, target, {elements}; add.u64 target, target, at;"
        if not apart
        else f"add.u64 target, target, at; mad.wide.u32 scale, row, {width // fmt.group}, $2;",
        *(f"abs.f32 m{i}, x{i};" for i in range(CHANNELS)),
        *_max([f"m{i}" for i in range(CHANNELS)]),
    ]
    if fmt.group == 2 * CHANNELS:
        lines.append("mov.b32 t, m0; shfl.sync.bfly.b32 v, t, 1, 31, -1; mov.b32 m1, v; max.f32 m0, m0, m1;")
    lines += _scale(fmt)
    e2m1 = fmt.element == "e2m1"
    lines += _e2m1(fmt) if e2m1 else _e4m3()
    lines += _store(2 if e2m1 else 4, pitch)
    if fmt.group == 2 * CHANNELS:
        lines.append("and.b32 t, piece, 1; setp.eq.u32 q, t, 0; and.pred p, p, q; shr.u32 piece, piece, 1;")
    lines.append("cvt.u64.u32 at, piece; add.u64 scale, scale, at; @p st.global.u8 [scale], byte;")
    return " ".join(lines)


def refusal(x: Any, pool: Any, slots: Any, *, fmt: Format, apart: bool = False) -> str | None:
    """Why these shapes or dtypes cannot run here."""
    width = x.shape[-1]
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"values are {x.dtype}, allowed is one of bfloat16 and float32"
    if (fmt.element, fmt.scale, fmt.group) not in FORMATS:
        return f"{fmt.name} has no kernel: {fmt.element} with {fmt.scale} per {fmt.group}"
    if width % fmt.group:
        return f"a row has {width} channels, allowed are multiples of {fmt.group}"
    pitch = _elements(fmt, width) if apart else fmt.row_bytes(width)
    if pitch % 4:
        return f"a row takes {pitch} bytes, allowed are multiples of 4"
    if not 0 < x.size <= MOST:
        return f"there are {x.size} values, allowed are 1 to {MOST}"
    return None


def run(x: jax.Array, pool: jax.Array | None, slots: jax.Array | None, *, fmt: Format, apart: bool = False) -> Any:
    """See `kernels_pallas.quantize.api`."""
    *lead, width = x.shape
    rows, byte = x.size // width, lambda *shape: jax.ShapeDtypeStruct(shape, jnp.uint8)
    blocks = -(-x.size // (CHANNELS * THREADS))
    if pool is not None and slots is not None:
        ptx = program(fmt, width, rows, x.dtype, (x.shape[1], pool.shape[1]))
        return launch("quantize", ptx, (x, slots), (pool,), blocks)[0]
    sizes = (_elements(fmt, width), width // fmt.group) if apart else (fmt.row_bytes(width),)
    outs = [byte(*lead, size) for size in sizes]
    made = launch("quantize", program(fmt, width, rows, x.dtype, None, apart), (x,), outs, blocks)
    return tuple(made) if apart else made[0]
