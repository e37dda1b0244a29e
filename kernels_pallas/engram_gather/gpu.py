"""`engram_gather` on Hopper: a thread dequantises eight neighbouring channels of each of its rows."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compute_on import compute_on

from kernels_pallas.engram_gather.api import in_host_memory
from kernels_pallas.simt import THREADS, launch

CHANNELS = 8  # of a thread in each of its rows: eight bytes in, one or two pieces of sixteen out
DEPTH = 2  # rows that a thread has under way
WIDTHS = (32, 64, 128, 256, 512, 1024)  # that a block's threads cover in whole rows


def program(rows: int, count: int, width: int, dtype: Any, depth: int) -> str:
    """One thread's PTX: $0 element bytes ``[rows, width]``, $1 scale bytes, $2 ids ``[count]``, $3 out ``[count, width]``."""
    pieces = width // CHANNELS
    across, shift = THREADS // pieces, pieces.bit_length() - 1
    half = jnp.dtype(dtype) == jnp.bfloat16
    lines = [
        ".reg .b32 first, piece, block, row, id, group;",
        ".reg .b64 codes, scales, ids, out, at;",
        ".reg .b16 low, high, f, g; .reg .f32 x, y, s;",
        ".reg .b32 h, o0, o1, o2, o3, o4, o5, o6, o7;",
        f"mov.u32 first, %tid.x; mov.u32 block, %ctaid.x; and.b32 piece, first, {pieces - 1};",
        f"shr.u32 first, first, {shift}; mad.lo.u32 first, block, {across * depth}, first; shr.u32 group, piece, 2;",
        "mul.wide.u32 at, first, 4; add.u64 ids, $2, at;",
        "mul.wide.u32 at, piece, 8; add.u64 codes, $0, at; cvt.u64.u32 at, group; add.u64 scales, $1, at;",
        f"mul.wide.u32 at, piece, {16 if half else 32}; add.u64 out, $3, at;",
        f"mul.wide.u32 at, first, {width * (2 if half else 4)}; add.u64 out, out, at;",
    ]
    for i in range(depth):
        lines += [
            f".reg .pred p{i}; .reg .b32 id{i}, a{i}, b{i}, s{i}; .reg .b64 c{i}, t{i};",
            f"add.u32 row, first, {i * across}; setp.lt.u32 p{i}, row, {count}; mov.b32 id{i}, 0;",
            f"@p{i} ld.global.nc.b32 id{i}, [ids + {4 * i * across}];",
        ]
    for i in range(depth):
        lines += [
            f"max.s32 id{i}, id{i}, 0; min.s32 id{i}, id{i}, {rows - 1};",
            f"mad.wide.u32 c{i}, id{i}, {width}, codes; mad.wide.u32 t{i}, id{i}, {width // 32}, scales;",
            f"ld.global.nc.L1::no_allocate.v2.b32 {{a{i}, b{i}}}, [c{i}];",
            f"ld.global.nc.u8 s{i}, [t{i}];",
        ]
    for i in range(depth):
        # The scale's byte is the exponent of a power of two; byte 0 stands for a subnormal one.
        lines += [f"shl.b32 h, s{i}, 23; max.u32 h, h, {1 << 22}; mov.b32 s, h;"]
        for n, word in enumerate((f"a{i}", f"b{i}")):
            lines.append(f"mov.b32 {{low, high}}, {word};")
            for m, part in enumerate(("low", "high")):
                pair = 2 * n + m
                lines.append(f"cvt.rn.f16x2.e4m3x2 h, {part}; mov.b32 {{f, g}}, h; cvt.f32.f16 x, f; cvt.f32.f16 y, g;")
                lines.append("mul.rn.f32 x, x, s; mul.rn.f32 y, y, s;")
                if half:
                    lines.append(f"cvt.rn.bf16x2.f32 o{pair}, y, x;")
                else:
                    lines.append(f"mov.b32 o{2 * pair}, x; mov.b32 o{2 * pair + 1}, y;")
        place = i * across * width * (2 if half else 4)
        for n in range(1 if half else 2):
            words = ", ".join(f"o{4 * n + j}" for j in range(4))
            lines.append(f"@p{i} st.global.v4.b32 [out + {place + 16 * n}], {{{words}}};")
    return " ".join(lines)


def refusal(table: Any, scales: Any, ids: Any, *, dtype: Any, depth: int = DEPTH) -> str | None:
    """Why these shapes or dtypes cannot run here."""
    width = table.shape[1]
    if scales is None:
        return f"rows are {table.dtype}: XLA gathers and converts floats in one pass"
    if width not in WIDTHS:
        return f"a row has {width} channels, allowed are {', '.join(map(str, WIDTHS))}"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"values are wanted as {jnp.dtype(dtype)}, allowed is one of bfloat16 and float32"
    if ids.size == 0:
        return "there are no ids"
    return None


def run(table: jax.Array, scales: jax.Array, ids: jax.Array, *, dtype: Any, depth: int = DEPTH) -> jax.Array:
    """See `kernels_pallas.engram_gather.api.engram_gather`. depth: rows that a thread has under way."""
    rows, width = table.shape
    out = jax.ShapeDtypeStruct((*ids.shape, width), dtype)
    blocks = -(-ids.size * width // (THREADS * CHANNELS * depth))
    ptx = program(rows, ids.size, width, dtype, depth)

    def gather(*args: jax.Array) -> jax.Array:
        return launch("engram_gather", ptx, args, (out,), blocks)[0]

    if not in_host_memory(table):
        return gather(table, scales, ids)
    beside: Any = compute_on(compute_type="gpu_stream:1", out_memory_spaces=jax.memory.Space.Device)
    return beside(gather)(table, scales, ids)
