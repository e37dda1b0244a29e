"""From stored index keys to the first operand of a matrix product, and from its result to scores, in PTX.

A key's 128 channels are four groups of 32 E2M1 codes with an E8M0 scale each. A thread takes a quarter, one group, of two keys:
of a word of eight codes the pairs (i, i + 4) become two fp16 numbers at once, sign and magnitude bits moved to their places
(code 0eem is the fp16 number with those bits at its exponent's low end, times 2**14) and multiplied by the group's scale over
the key's largest. Those values are exact where the scales of a key differ by 2**23 at most. The largest scale itself multiplies
the score at the end.

Channels may be in any order that queries share, so a thread's codes stay where they are: `channel` gives that order.
"""

from typing import Any

WIDTH, ROW = 128, 68  # channels and bytes of a key
TILE, WARP = 64, 16  # keys of a tile, and of one of the four warps that take it
BLOCK = 8  # entries of a candidate block
WARP_BYTES = WARP * ROW
HEADS = 32


def channel(place: Any) -> Any:
    """Which channel of a query is at a place 0 .. 127 of the product's sum."""
    word, half, pair, group, side = place >> 5, (place >> 4) & 1, (place >> 3) & 1, (place >> 1) & 3, place & 1
    return 32 * group + 8 * word + 4 * side + 2 * half + pair


def block(lines: list[str], words: list[str] = [], other: str = "") -> str:  # noqa: B006
    """Lines as one block of PTX with its own registers."""
    declared = f".reg .b32 {', '.join(words)}; " if words else ""
    return "{ " + declared + other + "\n" + "\n".join(lines) + "\n}"


def prepare_barriers(count: int, arrivals: int) -> str:
    """Operands: $0 shared address of ``count`` barriers of 8 bytes, $1 the thread's number. The CTA meets."""
    return block(
        [
            f"setp.lt.u32 p, $1, {count}; mad.lo.u32 a, $1, 8, $0;",
            f"@p mbarrier.init.shared.b64 [a + 0], {arrivals};",
            "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta; bar.sync 0;",
        ],
        ["a"],
        ".reg .pred p;",
    )


def _locate(size: int, granule: int) -> str:
    """``g``: the granule of entry ``e``, which becomes its number in it."""
    if granule >= size:
        return "mov.b32 g, 0;"
    if granule & (granule - 1) == 0:
        return f"shr.u32 g, e, {granule.bit_length() - 1}; and.b32 e, e, {granule - 1};"
    return f"div.u32 g, e, {granule}; mul.lo.u32 x, g, {granule}; sub.u32 e, e, x;"


def start_copy(size: int, granule: int) -> str:
    """Starts the copy of a warp's 16 keys of a tile.

    Operands: $0 global address of all keys, $1 of the first rows of this query's or request's granules of ``granule`` entries (a
    negative one is absent), $2 shared address to copy to, $3 of its barrier, $4 number of the first entry, $5 lane. ``size``:
    entries there are. One lane copies, or two where a granule has 8 entries; each arrives once at the barrier.
    """
    lanes = 2 if granule == BLOCK else 1
    each = WARP // lanes
    lines = [
        f"setp.lt.u32 p, $5, {lanes}; mad.lo.u32 e, $5, {each}, $4; mad.lo.u32 d, $5, {each * ROW}, $2;",
        f"sub.s32 n, {size}, e; min.s32 n, n, {each}; max.s32 n, n, 0; mul.lo.u32 n, n, {ROW};",
        f"min.s32 e, e, {size - 1}; {_locate(size, granule)}",
        "mad.wide.u32 a, g, 4, $1; mov.b32 r, -1; @p ld.global.nc.b32 r, [a + 0];",
        "setp.lt.s32 q, r, 0; selp.b32 n, 0, n, q; add.u32 r, r, e;",
        f"mad.wide.u32 a, r, {ROW}, $0; setp.gt.and.s32 q, n, 0, p;",
        "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$3 + 0], n;",
        "@q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [d + 0], [a + 0], n, [$3 + 0];",
    ]
    return block(lines, ["e", "d", "n", "g", "x", "r"], ".reg .b64 a; .reg .pred p, q;")


def wait() -> str:
    """Operands: $0 shared address of a barrier, $1 parity of the phase to wait for."""
    lines = ["WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$0 + 0], $1; @!p bra WAIT;"]
    return block(lines, [], ".reg .pred p;")


def unpack() -> str:
    """A thread's part of 16 keys in shared memory.

    Results: $0-$31 fp16 pairs, the registers of the product's first operand in order; $32, $33 the largest scale of either key as
    float32. Operands: $34 shared address of the warp's keys, $35 lane. The warp meets when all have read.
    """
    lines = ["shr.u32 r, $35, 2; and.b32 c, $35, 3; mad.lo.u32 a, r, 68, $34; mad.lo.u32 g, c, 16, a;"]
    words = ["r", "c", "a", "g", "x", "y", "t"]
    for key in range(2):
        base = key * 8 * ROW
        words += [f"s{key}", f"m{key}", *(f"w{key}{i}" for i in range(4))]
        lines += [f"ld.shared.b32 w{key}{i}, [g + {base + 4 * i}];" for i in range(4)]
        lines.append(f"ld.shared.b32 s{key}, [a + {base + 64}];")
    lines.append("bar.warp.sync -1; shl.b32 c, c, 3;")
    for key in range(2):
        lines.append(f"and.b32 m{key}, s{key}, 0xFF; shr.u32 x, s{key}, 24; max.u32 m{key}, m{key}, x;")
        for at in (8, 16):
            lines.append(f"shr.u32 x, s{key}, {at}; and.b32 x, x, 0xFF; max.u32 m{key}, m{key}, x;")
        # The scale over the largest and times 2**14, in both halves; nothing where that is below fp16's normal numbers.
        lines.append(f"shr.u32 x, s{key}, c; and.b32 x, x, 0xFF; sub.s32 x, x, m{key}; add.s32 x, x, 29; max.s32 x, x, 0;")
        lines.append(f"mul.lo.u32 s{key}, x, 0x04000400; shl.b32 m{key}, m{key}, 23; max.u32 ${32 + key}, m{key}, 0x00400000;")
    shifts = (("shl.b32", 9, 12), ("shl.b32", 5, 8), ("shl.b32", 1, 4), ("shr.u32", 3, 0))
    for i in range(4):
        for key in range(2):
            for pair, (move, magnitude, sign) in enumerate(shifts):
                word = f"w{key}{i}"
                lines.append(f"{move} x, {word}, {magnitude}; and.b32 x, x, 0x0E000E00;")
                lines.append(f"shl.b32 y, {word}, {sign};" if sign else f"mov.b32 y, {word};")
                out = 4 * (2 * i + pair // 2) + 2 * (pair % 2) + key
                lines.append(f"and.b32 y, y, 0x80008000; or.b32 x, x, y; mul.rn.f16x2 ${out}, x, s{key};")
    return block(lines, words)


def load(size: int, granule: int) -> str:
    """A thread's part of 16 keys that are bfloat16 values, brought to fp16's range by a power of two each.

    Results as `unpack`'s. Operands from $34 on: as `start_copy`'s first two, number of the first entry, lane.
    """
    lines = ["shr.u32 r, $37, 2; and.b32 c, $37, 3;"]
    words = ["r", "c", "e", "g", "x", "y", "z", "most"]
    for key in range(2):
        words += [f"w{key}{i}" for i in range(16)]
        lines += [f"mov.b32 w{key}{i}, 0;" for i in range(16)]
        lines += [
            f"add.u32 e, $36, r; {'add.u32 e, e, 8;' if key else ''} setp.lt.u32 p, e, {size};",
            f"{_locate(size, granule)} mad.wide.u32 a, g, 4, $35;",
            "mov.b32 x, -1; @p ld.global.nc.b32 x, [a + 0]; setp.ge.s32 p, x, 0; add.u32 x, x, e;",
            f"mad.wide.u32 a, x, {2 * WIDTH}, $34; mad.wide.u32 a, c, {WIDTH // 2}, a;",
        ]
        for i in range(4):
            lines.append(f"@p ld.global.nc.v4.b32 {{{', '.join(f'w{key}{4 * i + j}' for j in range(4))}}}, [a + {16 * i}];")
    for key in range(2):
        lines.append("mov.b32 most, 0;")
        lines += [f"and.b32 x, w{key}{i}, 0x7FFF7FFF; max.u16x2 most, most, x;" for i in range(16)]
        lines.append("shr.u32 x, most, 16; and.b32 most, most, 0xFFFF; max.u32 most, most, x;")
        lines += [f"shfl.sync.bfly.b32 x|p, most, {step}, 31, -1; max.u32 most, most, x;" for step in (1, 2)]
        lines.append("shr.u32 most, most, 7; max.u32 most, most, 16; sub.u32 x, 268, most; shl.b32 x, x, 23; mov.b32 f, x;")
        lines.append(f"sub.u32 x, most, 14; shl.b32 ${32 + key}, x, 23;")
        for i in range(4):
            for pair in range(4):
                for name, word in (("y", pair // 2), ("z", pair // 2 + 2)):
                    half = (
                        f"and.b32 {name}, w{key}{4 * i + word}, 0xFFFF0000;"
                        if pair % 2
                        else f"shl.b32 {name}, w{key}{4 * i + word}, 16;"
                    )
                    lines.append(half)
                out = 4 * (2 * i + pair // 2) + 2 * (pair % 2) + key
                lines.append(f"mov.b32 v, y; mul.f32 v, v, f; mov.b32 u, z; mul.f32 u, u, f; cvt.rn.f16x2.f32 ${out}, u, v;")
    return block(lines, words, ".reg .b64 a; .reg .pred p; .reg .f32 f, u, v;")


def prepare_query(wide: bool, wide_weights: bool) -> str:
    """A warpgroup writes a query's 32 heads as the product's second operand, each head brought to 2**14 .. 2**15, and weights.

    Operands: $0 global address of the query ``[32, 128]``, $1 of its weights ``[32]`` (float32 where ``wide``, else bfloat16), $2
    shared address of its 32 rows (128-byte swizzle, in the order of `channel`), $3 of its 32 float32 weights, $4 the thread's
    number in the warpgroup, $5 shared address for $6, $7 and $8: its first visible entry, how many there are, and its row of the
    output or -1. A weight takes what its head was divided by, and a half.
    """
    lines = ["setp.eq.u32 p, $4, 0; mov.b32 x, 0; @p st.shared.v4.b32 [$5 + 0], {$6, $7, $8, x};"]
    lines.append("shr.u32 n, $4, 2; and.b32 c, $4, 3;")
    words = ["n", "c", "x", "y", "t", "most", "other", "place", "swap", "d"]
    size = 4 if wide else 2
    lines.append(f"mul.lo.u32 x, n, {WIDTH * size}; mad.lo.u32 x, c, {32 * size}, x; mad.wide.u32 a, x, 1, $0;")
    count = 8 * size
    for at in range(0, count, 4):
        lines.append(f"ld.global.nc.v4.b32 {{{', '.join(f'w{at + i}' for i in range(4))}}}, [a + {4 * at}];")
    words += [f"w{i}" for i in range(count)]
    if not wide:
        words += [f"e{i}" for i in range(32)]
        for i in range(16):
            lines.append(f"shl.b32 e{2 * i}, w{i}, 16; and.b32 e{2 * i + 1}, w{i}, 0xFFFF0000;")
    name = "w" if wide else "e"
    lines.append("mov.b32 most, 0;")
    lines += [f"and.b32 x, {name}{i}, 0x7FFFFFFF; max.u32 most, most, x;" for i in range(32)]
    lines += [f"shfl.sync.bfly.b32 other|p, most, {step}, 31, -1; max.u32 most, most, other;" for step in (1, 2)]
    lines.append("shr.u32 most, most, 23; max.u32 most, most, 16; sub.u32 x, 268, most; shl.b32 x, x, 23; mov.b32 f, x;")
    lines.append("sub.u32 x, most, 15; shl.b32 most, x, 23;")
    # Row n of eight; a 16-byte piece is at its own number xor the row's.
    lines.append("shr.u32 place, n, 3; mul.lo.u32 place, place, 2048; and.b32 swap, n, 7; mad.lo.u32 place, swap, 128, place;")
    lines.append("add.u32 place, place, $2; mad.lo.u32 place, c, 4, place;")
    for i in range(4):
        for h in range(2):
            for j in range(2):
                low = 8 * i + 2 * h + j
                lines.append(f"mov.b32 g, {name}{low}; mul.f32 g, g, f; mov.b32 k, {name}{low + 4}; mul.f32 k, k, f;")
                lines.append(f"cvt.rn.f16x2.f32 d, k, g; xor.b32 t, swap, {4 * (i % 2) + 2 * h + j}; mad.lo.u32 t, t, 16, place;")
                lines.append(f"st.shared.b32 [t + {1024 * (i // 2)}], d;")
    lines.append(f"setp.eq.u32 p, c, 0; mad.wide.u32 a, n, {4 if wide_weights else 2}, $1; mad.lo.u32 t, n, 4, $3;")
    if wide_weights:
        lines.append("ld.global.nc.b32 x, [a + 0];")
    else:
        lines.append("ld.global.nc.u16 x, [a + 0]; shl.b32 x, x, 16;")
    lines.append("mov.b32 g, x; mov.b32 f, most; mul.f32 g, g, f; mov.b32 x, g; @p st.shared.b32 [t + 0], x;")
    return block(lines, words, ".reg .b64 a; .reg .f32 f, g, k; .reg .pred p;")


def finish(size: int, pool: bool, queries: int, pin: bool) -> str:
    """Scores of a tile for ``queries`` (1, 2 or 4), and without ``pool`` the largest of each block of 8, with ``pin`` +inf for
    that of the newest visible entry.

    Operands: the product's 16 registers of each query; the two keys' scales (float32); shared addresses of the first query's
    weights and of what `prepare_query` says of it; first place of the warp's 16 keys; lane; global addresses of the scores (rows
    of ``size``, a multiple of 64), of their blocks' maxima and (``pool``) of their blocks' numbers; else an entry's number is its
    place. What is not visible scores -inf.
    """
    of = 16 * queries
    scales, (weights, spans, place, lane, out, best, numbers) = (f"${of}", f"${of + 1}"), (f"${of + i}" for i in range(2, 9))
    lines = [f"and.b32 c, {lane}, 3; shr.u32 r, {lane}, 2; mad.lo.u32 a, c, 8, {weights};"]
    sums = [[f"s{j}{key}" for key in range(2)] for j in range(queries)]
    for j in range(queries):
        for column in range(4):
            lines.append(f"ld.shared.v2.f32 {{w0, w1}}, [a + {128 * j + 32 * column}];")
            for key in range(2):
                for side in range(2):
                    # Twice the rectified value is x + |x|, exactly; both run where multiplications do.
                    x = f"${16 * j + 4 * column + 2 * key + side}"
                    lines.append(f"abs.f32 t, {x}; add.f32 t, t, {x};")
                    first = column == side == 0
                    lines.append(
                        f"mul.f32 {sums[j][key]}, t, w0;" if first else f"fma.rn.f32 {sums[j][key]}, t, w{side}, {sums[j][key]};"
                    )

    def split(step: int, low: list[str], high: list[str]) -> list[str]:
        """Sums over lanes that differ in ``step``: of ``low`` where the lane's own is 0, of ``high`` where it is 1."""
        lines.append(f"and.b32 x, {lane}, {step}; setp.ne.u32 q, x, 0;")
        for a, b in zip(low, high, strict=True):
            lines.append(f"selp.f32 t, {a}, {b}, q; selp.f32 {a}, {b}, {a}, q; shfl.sync.bfly.b32 t|p, t, {step}, 31, -1;")
            lines.append(f"add.f32 {a}, {a}, t;")
        return low

    # Each lane of a quad ends up with one query's sums of both keys, of one key, or twice so.
    if queries == 4:
        mine = split(1, split(2, sums[0] + sums[1], sums[2] + sums[3])[:2], (sums[0] + sums[1])[2:])
    else:
        mine = split(2, sums[0], sums[1]) if queries == 2 else sums[0]
        mine = split(1, mine[:1], mine[1:])
        lines.append(f"and.b32 x, {lane}, 1; setp.ne.u32 q, x, 0; selp.f32 t, {scales[1]}, {scales[0]}, q;")
        lines.append("mad.lo.u32 r, x, 8, r;")
        scales = ("t",)
    if queries == 1:
        lines.append(f"shfl.sync.bfly.b32 w0|p, {mine[0]}, 2, 31, -1; add.f32 {mine[0]}, {mine[0]}, w0;")
    lines.append({1: "mov.b32 c, 0;", 2: "shr.u32 c, c, 1;", 4: ""}[queries])
    lines.append(f"mad.lo.u32 a, c, 16, {spans}; ld.shared.v4.b32 {{first, count, row, x}}, [a + 0];")
    lines.append(f"mad.wide.u32 at, row, {4 * size}, {out}; mad.wide.u32 block, row, {size // 2}, {best};")
    if pin:
        lines.append("add.u32 newest, first, count; sub.u32 newest, newest, 1; shr.u32 newest, newest, 3;")
    lines.append(
        f"setp.ge.s32 live, row, 0; {f'and.b32 x, {lane}, 2; setp.eq.and.u32 live, x, 0, live;' if queries == 1 else ''}"
    )
    for i, (v, scale) in enumerate(zip(mine, scales, strict=True)):
        lines.append(f"mul.f32 {v}, {v}, {scale}; add.u32 e, r, {place}; {'add.u32 e, e, 8;' if i else ''}")
        lines.append(f"setp.lt.and.u32 p, e, {size}, live; shr.u32 b, e, 3;")
        if pool:
            lines += [
                f"mov.b32 x, -1; mad.wide.u32 m, row, {size // 2}, {numbers}; mad.wide.u32 m, b, 4, m;",
                "@p ld.global.nc.b32 x, [m + 0]; setp.ge.s32 q, x, 0; and.b32 n, e, 7; mad.lo.u32 x, x, 8, n;",
                "sub.u32 x, x, first; setp.lt.and.u32 q, x, count, q;",
            ]
        else:
            lines.append("sub.u32 x, e, first; setp.lt.u32 q, x, count;")
        lines.append(f"selp.f32 {v}, {v}, 0fFF800000, q; mad.wide.u32 m, e, 4, at; @p st.global.f32 [m + 0], {v};")
        if pool:
            continue
        lines += [f"shfl.sync.bfly.b32 w0|q, {v}, {step}, 31, -1; max.f32 {v}, {v}, w0;" for step in (4, 8, 16)]
        if pin:
            lines.append(f"setp.eq.u32 q, newest, b; setp.gt.and.s32 q, count, 0, q; selp.f32 {v}, 0f7F800000, {v}, q;")
        lines.append("and.b32 x, e, 7; setp.eq.and.u32 p, x, 0, p;")
        lines.append(f"mad.wide.u32 m, b, 4, block; @p st.global.f32 [m + 0], {v};")
    words = ["a", "c", "r", "e", "x", "b", "n", "first", "count", "row", "newest"]
    floats = ", ".join(["t", "w0", "w1", *(v for pair in sums for v in pair)])
    return block(lines, words, f".reg .f32 {floats}; .reg .b64 m, at, block; .reg .pred p, q, live;")
