"""The instructions by which one CTA picks the k best of a slice of scores, in PTX.

Scores become keys that are smaller for better ones, `key = s >= 0 ? bits ^ 0x7FFFFFFF : bits`. Up to three passes count digits
of the keys in shared memory, 11, 11 and 10 bits from the top; each narrows the k-th best key down to one digit more, and ends
the search where everything that shares the digits found is among the best. A last pass numbers the chosen ones by a prefix sum
over the threads, of which each has consecutive scores: so the result is in ascending order, does not depend on the order in
which threads run, and takes the lowest indices of those that tie.
"""

from typing import Literal

Names = Literal["places", "ids", "blocks", "fetched"]
BINS = 2048
_DIGITS = ((21, 11), (10, 11), (0, 10))  # shift and width of each pass
_NONE = 0xFF800000  # the key of -inf; everything finite is below


def _layout(k: int) -> tuple[int, int, int]:
    """Where in shared memory warps' totals and what a pass finds are, after the bins and later the chosen ones; its size."""
    totals = max(4 * BINS, 8 * k)
    return totals, totals + 4 * 32, totals + 4 * 32 + 16


def scratch_bytes(k: int) -> int:
    """Shared memory that `program` needs."""
    return _layout(k)[2]


def _scan(value: str, width: int = 32) -> list[str]:
    """``incl``: the sum of ``value`` over the lanes up to this one."""
    lines = [f"mov.b32 incl, {value};"]
    step = 1
    while step < width:
        lines.append(f"shfl.sync.up.b32 got|p, incl, {step}, 0, -1; @p add.u32 incl, incl, got;")
        step *= 2
    return lines


def _before(value: str) -> list[str]:
    """``excl``: the sum of ``value`` over all threads before this one; ``all``: over all. Meets the CTA once."""
    return [
        *_scan(value),
        "@last st.shared.b32 [totals + 0], incl;",
        "bar.sync 0;",
        "mov.b32 got, 0; @some ld.shared.b32 got, [every + 0];",
        "redux.sync.add.u32 all, got, -1;",
        "setp.lt.u32 p, lane, warp; selp.b32 got, got, 0, p;",
        "redux.sync.add.u32 excl, got, -1;",
        f"add.u32 excl, excl, incl; sub.u32 excl, excl, {value};",
    ]


def _fetch(each: int) -> list[str]:
    """Scores of the blocks that a thread has, from wherever they are."""
    lines = [
        f"mul.lo.u32 i0, tid, {each}; sub.s32 left, count, i0; shr.u32 got, i0, 3; mad.wide.u32 b, got, 4, ids; mov.b32 rest, 0;"
    ]
    for e in range(0, each, 8):
        lines.append(f"mov.b32 id{e}, -1; setp.gt.s32 p, left, {e}; @p ld.global.nc.b32 id{e}, [b + {e // 2}];")
    for e in range(0, each, 8):
        lines += [f"mov.b32 x{e + j}, -1;" for j in range(8)]
        lines.append(f"setp.ge.s32 p, id{e}, 0; mad.wide.u32 a, id{e}, 32, source;")
        for j in (0, 4):
            keys = ", ".join(f"x{e + j + n}" for n in range(4))
            lines.append(f"@p ld.global.nc.v4.b32 {{{keys}}}, [a + {4 * j}];")
    return lines + [_flip(f"x{e}", f"x{e}") for e in range(each)]


def _load(threads: int, each: int, names: Names) -> list[str]:
    if names == "fetched":
        return _fetch(each)
    lines = [f"mul.lo.u32 i0, tid, {each}; sub.s32 left, count, i0; mad.wide.u32 a, i0, 4, source;"]
    if names == "ids":
        lines.append("mad.wide.u32 b, i0, 4, ids;")
    if names == "blocks":
        lines.append("shr.u32 got, i0, 3; mad.wide.u32 b, got, 4, ids; and.b32 rest, i0, 7;")
    for e in range(0, each, 4):
        keys, ids = (", ".join(f"{name}{e + j}" for j in range(4)) for name in ("x", "id"))
        lines += [f"mov.b32 x{e + j}, -1;" for j in range(4)]
        lines.append(f"setp.gt.s32 p, left, {e}; @p ld.global.nc.v4.b32 {{{keys}}}, [a + {4 * e}];")
        if names == "ids":
            lines += [f"mov.b32 id{e + j}, -1;" for j in range(4)]
            lines.append(f"@p ld.global.nc.v4.b32 {{{ids}}}, [b + {4 * e}];")
        if names == "blocks" and e % 8 == 0:
            lines.append(f"@p ld.global.nc.b32 id{e}, [b + {e // 2}];")
    lines.append(f"setp.ge.s32 p, count, {threads * each}; @p bra WHOLE;")
    lines += [f"setp.gt.s32 p, left, {e}; @!p mov.b32 x{e}, -1;" for e in range(each) if e % 4]
    lines.append("WHOLE:")
    lines += [_flip(f"x{e}", f"x{e}") for e in range(each)]
    return lines


def _pass(number: int, threads: int, each: int) -> list[str]:
    shift, width = _DIGITS[number]
    own = BINS // threads
    lines = []
    for e in range(each):
        if number:
            lines.append(f"shr.u32 got, x{e}, {shift + width}; setp.eq.u32 p, got, prefix;")
        if shift >= 2:
            lines.append(f"shr.u32 got, x{e}, {shift - 2};")
        else:
            lines.append(f"shl.b32 got, x{e}, {2 - shift};")
        lines.append(f"and.b32 got, got, {((1 << width) - 1) << 2:#x}; add.u32 got, got, shared;")
        lines.append(f"{'@p ' if number else ''}red.shared.add.u32 [got + 0], 1;")
    lines.append("bar.sync 0;")
    step = min(own, 4)
    for at in range(0, own, step):
        bins = [f"h{at + j}" for j in range(step)]
        lines.append(f"ld.shared.v{step}.b32 {{{', '.join(bins)}}}, [mine + {4 * at}];")
        lines.append(f"st.shared.v{step}.b32 [mine + {4 * at}], {{{', '.join(['zero'] * step)}}};")
    lines.append("mov.b32 sum, h0;")
    lines += [f"add.u32 sum, sum, h{j};" for j in range(1, own)]
    lines += _before("sum")
    lines.append(f"mul.lo.u32 digit, tid, {own};")
    for j in range(own):
        lines.append(f"add.u32 next, excl, h{j}; setp.lt.u32 p, excl, need; setp.ge.and.u32 p, next, need, p;")
        lines.append(
            f"@p st.shared.v4.b32 [found + 0], {{digit, excl, h{j}, zero}}; mov.b32 excl, next; add.u32 digit, digit, 1;"
        )
    lines.append("bar.sync 0; ld.shared.v4.b32 {digit, excl, got, next}, [found + 0];")
    if number == 0:
        # Those of -inf have bins too; where the k-th is one of them, or there is none, everything finite is chosen.
        lines.append(f"setp.ge.u32 p, digit, {_NONE >> shift}; mov.b32 bound, {_NONE:#x}; mov.b32 ties, 0; @p bra CLEAR;")
    lines.append(f"sub.u32 need, need, excl; shl.b32 prefix, prefix, {width}; or.b32 prefix, prefix, digit;")
    if shift:
        lines.append(f"add.u32 bound, prefix, 1; shl.b32 bound, bound, {shift}; setp.eq.u32 p, got, need; @p bra CLEAR;")
    else:
        lines.append("mov.b32 bound, prefix; mov.b32 ties, need;")
    return lines


def _compact(each: int, names: Names, scores: bool, ties: bool) -> list[str]:
    """``need``: how many are chosen; their ids, and keys with ``scores``, in order in the place of the bins."""
    lines = ["mov.b32 sum, 0;"]
    for e in range(each):
        lines.append(f"setp.lt.u32 p, x{e}, bound; @p add.u32 sum, sum, 1;")
        if ties:
            lines.append(f"setp.eq.u32 q, x{e}, bound; @q add.u32 sum, sum, 0x10000;")
    lines += _before("sum")
    for whole, better, tied in (("all", "need", "got"), ("excl", "next", "prefix")):
        lines.append(f"and.b32 {better}, {whole}, 0xFFFF; shr.u32 {tied}, {whole}, 16;")
        lines.append(f"min.u32 got, {tied}, ties; add.u32 {better}, {better}, got;")
    # next: where this thread's first goes; prefix: ties before it.
    size = 8 if scores else 4
    lines.append(f"mad.lo.u32 next, next, {size}, shared;")
    if names == "places":
        lines.append("add.u32 rest, i0, first;")
    for e in range(each):
        lines.append(f"setp.lt.u32 p, x{e}, bound;")
        if ties:
            lines.append(f"setp.eq.u32 q, x{e}, bound; setp.lt.and.u32 r, prefix, ties, q;")
            lines.append("@q add.u32 prefix, prefix, 1; or.pred p, p, r;")
        if names == "ids":
            lines.append(f"mov.b32 got, id{e};")
        elif names in ("blocks", "fetched"):
            lines.append(f"mad.lo.u32 got, id{e - e % 8}, 8, rest; add.u32 got, got, {e % 8};")
        else:
            lines.append(f"add.u32 got, rest, {e};")
        lines.append(f"@p st.shared.v2.b32 [next + 0], {{got, x{e}}};" if scores else "@p st.shared.b32 [next + 0], got;")
        lines.append(f"@p add.u32 next, next, {size};")
    return lines


def _flip(key: str, score: str) -> str:
    """The key of a score, or the score of a key."""
    return f"shr.s32 got, {score}, 31; not.b32 got, got; and.b32 got, got, 0x7FFFFFFF; xor.b32 {key}, {score}, got;"


def _write(threads: int, k: int, scores: bool) -> list[str]:
    """Copies the chosen to where they go; -1 and -inf for what is missing."""
    size = 8 if scores else 4
    lines = ["bar.sync 0; mov.b32 next, tid;"]
    for start in range(0, k, threads):
        lines.append(f"mad.lo.u32 i0, next, {size}, shared; setp.lt.u32 p, next, need; setp.lt.u32 q, next, {k};")
        lines.append(f"mov.b32 prefix, -1; mov.b32 bound, {_NONE:#x};")
        lines.append("@p ld.shared.v2.b32 {prefix, bound}, [i0 + 0];" if scores else "@p ld.shared.b32 prefix, [i0 + 0];")
        lines.append("mad.wide.u32 a, next, 4, chosen; @q st.global.b32 [a + 0], prefix;")
        if scores:
            lines.append(f"{_flip('bound', 'bound')} mad.wide.u32 b, next, 4, best; @q st.global.b32 [b + 0], bound;")
        lines.append(f"add.u32 next, next, {threads};" if start + threads < k else "")
    return lines


def program(threads: int, each: int, k: int, names: Names, scores: bool) -> str:
    """PTX that picks the ``k`` best of a slice of ``threads * each`` scores, ``each`` 4 or a multiple of 8.

    Operands: $0 scores (global address, 16-byte aligned), $1 how many there are, $2 `scratch_bytes` of shared memory (address),
    $3 the thread's number, $4 where ids go (global address), $5 what the scores are called: the first one's number ("places"),
    the address of everyone's ("ids"), or of those of blocks of 8 ("blocks"), of which "fetched" also gets the scores from there
    in a row of scores at $0 (-1: none); $6 where the scores go (with ``scores``). What is
    missing of k gets id -1 and score -inf; a score of -inf is never chosen.
    """
    own = BINS // threads
    totals, found, _ = _layout(k)
    lines = [
        "mov.b64 source, $0; mov.b32 count, $1; mov.b32 shared, $2; mov.b32 tid, $3; mov.b64 chosen, $4;",
        "mov.b32 first, $5;" if names == "places" else "mov.b64 ids, $5;",
        "mov.b64 best, $6;" if scores else "",
        "and.b32 lane, tid, 31; shr.u32 warp, tid, 5; setp.eq.u32 last, lane, 31;",
        f"setp.lt.u32 some, lane, {threads // 32}; mov.b32 zero, 0;",
        f"add.u32 totals, shared, {totals}; mad.lo.u32 every, lane, 4, totals; mad.lo.u32 totals, warp, 4, totals;",
        f"add.u32 found, shared, {found}; mad.lo.u32 mine, tid, {4 * own}, shared;",
        *_load(threads, each, names),
    ]
    step = min(own, 4)
    lines += [f"st.shared.v{step}.b32 [mine + {4 * at}], {{{', '.join(['zero'] * step)}}};" for at in range(0, own, step)]
    lines.append("mov.b32 got, -1; setp.eq.u32 p, tid, 0; @p st.shared.v4.b32 [found + 0], {got, zero, zero, zero};")
    lines.append(f"bar.sync 0; mov.b32 prefix, 0; mov.b32 need, {k};")
    for number in range(len(_DIGITS)):
        lines += _pass(number, threads, each)
    lines += [*_compact(each, names, scores, True), "bra WRITE;", "CLEAR:", *_compact(each, names, scores, False), "WRITE:"]
    lines += _write(threads, k, scores)
    words = ["rest", "count", "shared", "tid", "first", "lane", "warp", "zero", "totals", "every", "found", "mine", "i0", "left"]
    words += ["got", "incl", "excl", "all", "sum", "need", "prefix", "digit", "next", "bound", "ties"]
    words += [f"x{e}" for e in range(each)] + [f"h{j}" for j in range(own)]
    words += [f"id{e}" for e in range(each)] if names != "places" else []
    declared = f".reg .b32 {', '.join(words)}; .reg .b64 source, chosen, ids, best, a, b; .reg .pred p, q, r, last, some;"
    return "{ " + declared + "\n" + "\n".join(line for line in lines if line) + "\n}"
