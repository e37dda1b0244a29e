"""Bytes that a compiled program moves: operands and results of each of its kernels, read from the program's text.

A kernel reads every operand once and writes every result once, as far as this can tell: what it reads twice, or of an operand
only in part, is not seen, and neither is what a cache spares. cuBLAS's workspaces are left out.
Run: python -m bench.traffic    (on a GPU: mega_mhc beside the same in three programs)
"""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from dsv41.errors import UserError
from kernels_pallas.mega_mhc import cases, gpu

# What launches nothing.
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = (.+?) ([\w-]+)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+)(\d+)?(?:e\d+m\d+\w*)?\[([\d,]*)\]")


def shape_bytes(text: str) -> int:
    """Of all the arrays that a type names, ``bf16[4,8]{1,0}`` or a tuple of such."""
    total = 0
    for kind, bits, dims in _SHAPE.findall(text):
        width = 1 if kind == "pred" else int(bits or 0) / 8
        total += int(width * math.prod(int(size) for size in dims.split(",") if size))
    return total


def kernel_bytes(text: str) -> dict[str, int]:
    """Bytes by name of each kernel that ``compiled.as_text()`` runs; in a loop, of all its rounds."""
    computations = {
        m.group(2): (m.group(1), m.group(3)) for m in re.finditer(r"^(ENTRY )?%([\w.-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    }

    def of(body: str, rounds: int) -> dict[str, int]:
        types: dict[str, str] = {}
        found: dict[str, int] = {}
        for line in body.splitlines():
            match = _INSTRUCTION.match(line)
            if match is None:
                continue
            name, kind, opcode, rest = match.groups()
            types[name] = re.sub(r", s8\[\d+\]\{0\}\)$", ")", kind) if "__cublas" in rest else kind
            if opcode in ("while", "call"):
                count = re.search(r'"known_trip_count":\{"n":"(\d+)"', rest)
                inner = re.search(r"(?:body|to_apply)=%([\w.-]+)", rest)
                assert inner is not None
                found |= of(computations[inner.group(1)][1], rounds * (int(count.group(1)) if count else 1))
            elif opcode not in _FREE:
                operands = {o for o in re.findall(r"%([\w.-]+)", rest.split("), ")[0]) if o in types}
                found[name] = rounds * (shape_bytes(types[name]) + sum(shape_bytes(types[o]) for o in operands))
        return found

    return of(next(body for entry, body in computations.values() if entry), 1)


def lowered_kernel_bytes(text: str) -> list[int]:
    """Bytes of each Mosaic GPU kernel in a program that was lowered only; one in a function that is called twice counts once."""
    found = []
    for line in text.splitlines():
        if "custom_call @mosaic_gpu" in line:
            arrays = re.findall(r"tensor<((?:\d+x)*)[a-z]+(\d+)\w*>", line[line.rindex(" : (") :])
            found.append(sum(math.prod(int(n) for n in dims.split("x") if n) * int(bits) // 8 for dims, bits in arrays))
    return found


def compiled_bytes(run: Callable, *args: Any) -> int:
    """Bytes that ``run`` moves when compiled for ``args`` here."""
    return sum(kernel_bytes(jax.jit(run).lower(*args).compile().as_text()).values())


def main() -> None:
    """Prints each form's bytes on every real case of `mega_mhc`, and ours over theirs."""
    if jax.default_backend() != "gpu":
        raise UserError(f"backend: found {jax.default_backend()}, allowed is gpu: its programs are read")
    for name, case in cases.REAL.items():
        args = cases.abstract(case)
        ours = compiled_bytes(cases.timed(case, partial(gpu.run, **cases.options(case))), *args)
        print(f"{name:12} {'ours':32} {ours:14,} bytes, must move {cases.cost(case)[0]:14,}", flush=True)
        forms = {label: [(run, args)] for label, run in cases.peers(case).items()}
        if not case.backward:
            forms |= {"update; mix and project; norm": cases.three_parts(case)}
        for label, parts in forms.items():
            theirs = sum(compiled_bytes(run, *shapes) for run, shapes in parts)
            print(f"{name:12} {label:32} {theirs:14,} bytes, ours are {ours / theirs:.2f} of them", flush=True)


if __name__ == "__main__":
    main()
