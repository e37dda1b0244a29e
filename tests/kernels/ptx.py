"""Runs blocks of PTX on integers: all threads of a CTA in step, one instruction at a time.

Branches must go the same way in every thread. Addresses are byte offsets into two arrays of words, one global, one shared. Knows
the instructions that this project's kernels use and nothing else.
"""

import re

import numpy as np

_COMPARE = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal}
_PLAIN = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
    "div": np.floor_divide,
}
_FLOATS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "abs": np.abs, "fma": lambda a, b, c: a * b + c, "cvt": None}


class Cta:
    """Registers of every thread, and the memories."""

    def __init__(self, threads: int, memory: np.ndarray, shared: np.ndarray):
        self.threads, self.memory, self.shared = threads, memory.view(np.uint32), shared.view(np.uint32)
        self.registers: dict[str, np.ndarray] = {}

    def run(self, ptx: str, operands: list) -> int:
        """Runs a block; operands are numbers or arrays of one number a thread. Returns how many instructions it took."""
        for i in reversed(range(len(operands))):
            ptx = re.sub(rf"\${i}(?!\d)", f"%{i}", ptx)
            wide = np.asarray(operands[i]).astype(np.uint64)
            self.registers[f"%{i}"] = np.broadcast_to(wide, self.threads).astype(np.uint64)
        body = ptx.strip()
        assert body[0] == "{" and body[-1] == "}"
        lines, labels = [], {}
        for line in body[1:-1].replace("\n", " ").split(";"):
            line = line.strip()
            while found := re.match(r"(\w+):\s*", line):
                labels[found[1]], line = len(lines), line[found.end() :]
            if line and not line.startswith(".reg"):
                lines.append(line)
        at = steps = 0
        while at < len(lines):
            target = self._step(lines[at])
            at = at + 1 if target is None else labels[target]
            steps += 1
        return steps

    def _value(self, text: str, kind: str = "u32") -> np.ndarray:
        bits = 64 if kind.endswith("64") else 32
        if text.startswith("0f"):
            text = f"0x{text[2:]}"
        if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|[0-9]+)", text):
            whole = np.full(self.threads, int(text, 0) & ((1 << bits) - 1), np.uint64)
        else:
            whole = self.registers[text].astype(np.uint64) & np.uint64((1 << bits) - 1)
        narrow = whole.astype(np.uint64 if bits == 64 else np.uint32)
        return narrow.view(np.int64 if bits == 64 else np.int32) if kind[0] == "s" else narrow

    def _float(self, op: str, args: list[str], kind: str) -> np.ndarray:
        values = [self._value(a) for a in args[1:]]
        if op == "cvt":  # to a pair, the second argument in the low half
            halves = [v.view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32) for v in values]
            return halves[0] << 16 | halves[1]
        if kind == "f16x2":
            halves = [v.view(np.float16).reshape(-1, 2) for v in values]
            return _FLOATS[op](*halves).astype(np.float16).reshape(-1).view(np.uint32)
        # float64 and one rounding, as an fma has; the others are exact before theirs.
        whole = _FLOATS[op](*(v.view(np.float32).astype(np.float64) for v in values))
        return whole.astype(np.float32).view(np.uint32)

    def _set(self, name: str, value: np.ndarray, where: np.ndarray) -> None:
        old = self.registers.get(name, np.zeros(self.threads, value.dtype))
        self.registers[name] = np.where(where, value, old.astype(value.dtype))

    def _place(self, text: str, size: int) -> np.ndarray:
        register, offset = (s.strip() for s in text.strip(" []").split("+"))
        address = self._value(register, "u64").astype(np.int64) + int(offset)
        unit = max(int(4 * size), 2)
        return np.where(address % unit, -(1 << 40), address // min(unit, 4))

    def _step(self, line: str) -> str | None:
        where = np.ones(self.threads, bool)
        if found := re.match(r"@(!?)(\w+)\s+", line):
            where, line = self.registers[found[2]].astype(bool) ^ bool(found[1]), line[found.end() :]
        name, _, rest = line.partition(" ")
        parts = name.split(".")
        op, kind = parts[0], parts[-1]
        args = [a.strip() for a in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,{}\[\]]+", rest) if a.strip()]
        if kind == "f32" and op in ("setp", "selp", "st"):
            kind = "u32"
        if op == "bra":
            assert where.all() or not where.any(), f"threads part at {line}"
            return args[0] if where.all() else None
        if op in ("bar", "fence"):
            assert where.all()
        elif kind in ("f32", "f16x2") and op in _FLOATS:
            self._set(args[0], self._float(op, args, kind), where)
        elif op in ("ld", "st"):
            memory = self.shared if "shared" in parts else self.memory
            register, place = (args[0], args[1]) if op == "ld" else (args[1], args[0])
            if kind == "u16":
                assert op == "ld"
                half = self.memory.view(np.uint16)
                address = self._place(place, 0.5)
                self._set(register, half[np.where(where, address, 0)].astype(np.uint32), where)
                return None
            names = [r.strip() for r in register.strip("{} ").split(",")]
            index = self._place(place, len(names))
            assert (index[where] >= 0).all() and (index[where] + len(names) <= len(memory)).all(), f"outside or crooked: {line}"
            for i, word in enumerate(names):
                if op == "ld":
                    self._set(word, memory[np.where(where, index + i, 0)], where)
                else:
                    slots = (index + i)[where]
                    values = self._value(word)[where]
                    order = np.argsort(slots, kind="stable")
                    same = slots[order][1:] == slots[order][:-1]
                    assert (values[order][1:] == values[order][:-1])[same].all(), f"threads disagree: {line}"
                    memory[slots] = values
        elif op == "red":
            index = self._place(args[0], 1)[where]
            assert (index >= 0).all() and (index < len(self.shared)).all(), f"outside: {line}"
            np.add.at(self.shared, index, self._value(args[1])[where])
        elif op == "mbarrier":
            if "try_wait" in parts:
                self._set(args[0], where, where)
        elif op == "cp":
            for thread in np.flatnonzero(where):
                to, source = (self._place(arg, 4)[thread] for arg in args[:2])
                words = int(self._value(args[2])[thread]) // 4
                assert min(to, source) >= 0 and source + words <= len(self.memory), f"outside or crooked: {line}"
                self.shared[to : to + words] = self.memory[source : source + words]
        elif op == "shfl":
            assert where.all()
            source, step = self._value(args[1]), int(args[2])
            lane = np.arange(self.threads) % 32
            inside = lane >= step if parts[2] == "up" else np.ones_like(where)
            target, _, predicate = args[0].partition("|")
            other = np.arange(self.threads) ^ step if parts[2] == "bfly" else np.arange(self.threads) - step
            moved = np.where(inside, source[other], source)
            self._set(target, moved, where)
            self._set(predicate, inside, where)
        elif op == "redux":
            assert where.all()
            sums = self._value(args[1]).reshape(-1, 32).sum(axis=1, dtype=np.uint32)
            self._set(args[0], np.repeat(sums, 32), where)
        elif op == "setp":
            a, b = self._value(args[1], kind.replace("b", "u")), self._value(args[2], kind.replace("b", "u"))
            result = _COMPARE[parts[1]](a, b)
            if "and" in parts:
                result &= self.registers[args[3]].astype(bool)
            self._set(args[0], result, where)
        elif op == "selp":
            self._set(args[0], np.where(self.registers[args[3]].astype(bool), self._value(args[1]), self._value(args[2])), where)
        elif op == "mov":
            self._set(args[0], self._value(args[1], "u64" if kind == "b64" else "u32"), where)
        elif op == "not":
            self._set(args[0], ~self._value(args[1]), where)
        elif op in ("shl", "shr"):
            a, count = self._value(args[1], kind.replace("b", "u")), self._value(args[2])
            count = count.astype(a.dtype)
            self._set(args[0], (a << count if op == "shl" else a >> count).view(np.uint32), where)
        elif op == "mad":
            kind = "u64" if "wide" in parts else "u32"
            a, b = self._value(args[1]), self._value(args[2])
            self._set(args[0], a.astype(kind.replace("u", "uint")) * b + self._value(args[3], kind), where)
        elif kind == "pred":
            self._set(args[0], _PLAIN[op](*(self.registers[a].astype(bool) for a in args[1:])), where)
        elif kind == "u16x2":
            a, b = (self._value(arg).view(np.uint16) for arg in args[1:])
            self._set(args[0], _PLAIN[op](a, b).view(np.uint32), where)
        else:
            a, b = (self._value(arg, kind.replace("b", "u")) for arg in args[1:])
            self._set(args[0], _PLAIN[op](a, b).view(np.uint32), where)
        return None
