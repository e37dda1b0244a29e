"""The PTX of a kernel of independent threads, run on the CPU: every register is an array with one value a thread."""

import re

import ml_dtypes
import numpy as np

U32, U64, F32 = np.uint32, np.uint64, np.float32
SPACE = 40  # bits of an address inside a buffer; the rest is the buffer's number


def _f(a):
    return np.asarray(a, U32).view(F32)


def _b(a):
    return np.asarray(a, F32).view(U32)


def _e4m3(a):
    """Nearest, ties to even, saturating; NaN stays."""
    return np.clip(_f(a), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.uint16)


def _fma(a, b, c):
    wide = np.longdouble
    return _b((_f(a).astype(wide) * _f(b).astype(wide) + _f(c).astype(wide)).astype(F32))


PLAIN = {
    "add.u32": lambda a, b: (a + b).astype(U32),
    "sub.u32": lambda a, b: (a - b).astype(U32),
    "add.u64": lambda a, b: a.astype(U64) + b.astype(U64),
    "mul.lo.u32": lambda a, b: (a * b).astype(U32),
    "mad.lo.u32": lambda a, b, c: (a * b + c).astype(U32),
    "mul.wide.u32": lambda a, b: a.astype(U64) * b.astype(U64),
    "mad.wide.u32": lambda a, b, c: a.astype(U64) * b.astype(U64) + c.astype(U64),
    "div.u32": lambda a, b: a // b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "and.pred": lambda a, b: a & b,
    "min.u32": np.minimum,
    "max.u32": np.maximum,
    "min.s32": lambda a, b: np.minimum(a.view(np.int32), b.view(np.int32)).view(U32),
    "max.s32": lambda a, b: np.maximum(a.view(np.int32), b.view(np.int32)).view(U32),
    "setp.lt.u32": lambda a, b: a < b,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.ne.u32": lambda a, b: a != b,
    "selp.b32": lambda a, b, p: np.where(p, a, b),
    "cvt.u64.u32": lambda a: a.astype(U64),
    "cvt.u32.u16": lambda a: a.astype(U32),
    "abs.f32": lambda a: a & U32(0x7FFFFFFF),
    "neg.f32": lambda a: a ^ U32(0x80000000),
    "max.f32": lambda a, b: _b(np.fmax(_f(a), _f(b))),
    "min.f32": lambda a, b: _b(np.fmin(_f(a), _f(b))),
    "mul.rn.f32": lambda a, b: _b(_f(a) * _f(b)),
    "add.rn.f32": lambda a, b: _b(_f(a) + _f(b)),
    "div.rn.f32": lambda a, b: _b(_f(a) / _f(b)),
    "rcp.rn.f32": lambda a: _b(F32(1) / _f(a)),
    "fma.rn.f32": _fma,
    "cvt.f32.f16": lambda a: _b(a.astype(np.uint16).view(np.float16).astype(F32)),
    "cvt.rn.satfinite.e4m3x2.f32": lambda high, low: _e4m3(high) << np.uint16(8) | _e4m3(low),
    "cvt.rn.bf16x2.f32": lambda high, low: sum(
        _f(a).astype(ml_dtypes.bfloat16).view(np.uint16).astype(U32) << U32(n) for a, n in ((high, 16), (low, 0))
    ),
    "cvt.rn.f16x2.e4m3x2": lambda a: sum(
        ((a >> np.uint16(n)) & 255).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float16).view(np.uint16).astype(U32)
        << U32(2 * n)
        for n in (0, 8)
    ),
}


class Memory:
    """Buffers of bytes, each in an address space of its own; an access outside one fails."""

    def __init__(self, arrays):
        self.buffers = [np.ascontiguousarray(a).reshape(-1).view(np.uint8).copy() for a in arrays]
        self.written = [np.zeros(b.size, np.int32) for b in self.buffers]

    def places(self, addresses, size):
        kinds = np.unique(addresses >> U64(SPACE))
        assert kinds.size == 1, "one instruction of all threads reads or writes one array"
        number = int(kinds[0])
        at = (addresses & U64((1 << SPACE) - 1)).astype(np.int64)
        assert at.min() >= 0 and at.max() + size <= self.buffers[number].size, "outside its array"
        assert (at % size == 0).all(), "not aligned"
        return number, at[:, None] + np.arange(size)

    def load(self, addresses, size):
        number, at = self.places(addresses, size)
        return self.buffers[number][at]

    def store(self, addresses, values):
        number, at = self.places(addresses, values.shape[1])
        self.buffers[number][at] = values
        np.add.at(self.written[number], at, 1)


def execute(ptx, arrays, threads, blocks):
    """Runs ``ptx`` in all threads; gives each array's bytes afterwards, and how often each byte was written."""
    total = threads * blocks
    memory, ids = Memory(arrays), np.arange(total, dtype=U32)
    names = {"%tid.x": ids % U32(threads), "%ctaid.x": ids // U32(threads)}
    names |= {f"${i}": np.full(total, i << SPACE, U64) for i in range(len(arrays))}

    def value(word):
        if word in names:
            return names[word]
        number = int(word[2:], 16) if word.startswith("0f") else int(word, 0)
        return np.full(total, number & 0xFFFFFFFF, U32)

    def address(text):
        base, _, offset = text.partition(" + ")
        return value(base).astype(U64) + U64(int(offset or 0))

    def assign(name, new, where):
        names[name] = new if where is None else np.where(where, new, names[name])

    for line in (line.strip() for line in ptx.split(";")):
        if not line or line.startswith(".reg"):
            continue
        guard = re.match(r"@(\w+) (.*)", line)
        where, line = (names[guard[1]], guard[2]) if guard else (None, line)
        op, rest = line.split(" ", 1)
        words = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)
        lists = [w[1:-1].split(", ") if w[0] == "{" else [w] for w in words]
        if op.startswith(("ld.global", "st.global")):
            size = 1 if op.endswith("u8") else 4
            load = op.startswith("ld")
            registers, place = (lists[0], words[1]) if load else (lists[1], words[0])
            active = np.ones(total, bool) if where is None else where
            if not active.any():
                continue
            at = address(place[1:-1])[active]
            if load:
                raw = memory.load(at, size * len(registers))
                for n, register in enumerate(registers):
                    part = raw[:, n * size : (n + 1) * size]
                    new = np.zeros(total, U32) if where is None else names[register].copy()
                    new[active] = part[:, 0] if size == 1 else np.ascontiguousarray(part).view(U32)[:, 0]
                    names[register] = new
            else:
                parts = [np.ascontiguousarray(value(r)[active].astype(U32)[:, None]).view(np.uint8)[:, :size] for r in registers]
                memory.store(at, np.concatenate(parts, axis=1))
        elif op.startswith("shfl.sync.bfly"):
            names[words[0]] = value(words[1])[ids ^ U32(int(words[2]))]
        elif op.startswith("mov") and words[0][0] == "{":
            low, high = lists[0]
            source = value(words[1])
            names[low], names[high] = (source & 0xFFFF).astype(np.uint16), (source >> U32(16)).astype(np.uint16)
        elif op.startswith("mov") and words[1][0] == "{":
            low, high = (value(w).astype(U32) for w in lists[1])
            names[words[0]] = low | high << U32(16)
        elif op.startswith("mov"):
            assign(words[0], value(words[1]), where)
        else:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                assign(words[0], PLAIN[op](*(value(w) for w in words[1:])), where)
    return memory.buffers, memory.written
