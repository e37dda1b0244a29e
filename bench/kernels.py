"""Time of each kernel on its real shapes, beside its floor and its peers, on random data with a cold L2.

Device time of the kernels that a call launches, as the profiler reports it (no launch gaps). Between two calls a buffer larger
than the L2 is written. Bytes and FLOPs are those that the op cannot avoid (`cases.cost`); the floor is the larger of bytes over
the measured copy rate and FLOPs over the measured rate of a large bf16 product.
"""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench import program
from dsv41.errors import UserError, nearest
from dsv41.files import check_outputs, write_text
from kernels_pallas import registry

REPEATS = 9
FLUSH_BYTES = 256 << 20


@dataclass
class Timing:
    """Microseconds of one implementation on one case; error: largest difference to the reference over its largest value, or what
    the op's cases say it is."""

    op: str
    case: str
    name: str
    median: float
    low: float
    high: float
    kernels: int
    bytes: int
    flops: int
    floor: float = 0.0
    error: float | None = None
    note: str = ""


def profiled(call: Callable, args: tuple) -> tuple[Any, list[tuple[str, float]]]:
    """What a call gives, and name and microseconds of each kernel that it launches.

    `profiler.measure` of Mosaic GPU calls twice and times the second: that finds in the L2 what the first has left there, and
    no argument that the first has written its output over.
    """
    from jax._src.lib import mosaic_gpu

    cupti: Any = mosaic_gpu._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        out = jax.block_until_ready(call(*args))
    finally:
        found = cupti._cupti_get_timings(True)
    return out, [(name, 1e3 * ms) for name, ms in found or []]


class Clock:
    """Measures calls on this device and knows its two ceilings."""

    def __init__(self) -> None:
        self._flush = jax.jit(lambda x: x + jnp.uint32(1))
        self._buffer = jnp.zeros((FLUSH_BYTES // 4,), jnp.uint32)
        n, m = 1 << 28, 8192
        words = jnp.arange(n, dtype=jnp.uint32)
        copy = self.time(jax.jit(lambda x: x ^ jnp.uint32(1)), (words,))[0]
        a, b = (jax.random.normal(jax.random.key(i), (m, m), jnp.bfloat16) for i in range(2))
        product = self.time(jax.jit(lambda a, b: a @ b), (a, b))[0]
        self.bytes_per_us, self.flops_per_us = 2 * 4 * n / copy, 2 * m**3 / product

    def time(
        self, call: Callable, args: tuple, repeats: int = REPEATS, replaced: int | None = None
    ) -> tuple[float, float, float, int]:
        """Median, least and most device microseconds, and kernels a call. replaced: the argument that the output is next."""
        follow = lambda args, out: args if replaced is None else (*args[:replaced], out, *args[replaced + 1 :])  # noqa: E731
        args = follow(args, jax.block_until_ready(call(*args)))
        spans, count = [], 0
        for _ in range(repeats):
            self._buffer = jax.block_until_ready(self._flush(self._buffer))
            out, kernels = profiled(call, args)
            args = follow(args, out)
            spans.append(sum(us for _, us in kernels))
            count = len(kernels)
        return statistics.median(spans), min(spans), max(spans), count

    def floor(self, cost: tuple[int, int]) -> float:
        """Microseconds that ``cost`` (bytes, FLOPs) takes at the ceilings."""
        return max(cost[0] / self.bytes_per_us, cost[1] / self.flops_per_us)


def _error(got: Any, want: Any) -> float:
    worst = 0.0
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = g.astype(jnp.float32), w.astype(jnp.float32)
        finite = jnp.isfinite(w)
        if not bool(jnp.all(jnp.isfinite(g) == finite)):
            return float("nan")
        largest = jnp.max(jnp.where(finite, jnp.abs(w), 0))
        worst = max(worst, float(jnp.max(jnp.where(finite, jnp.abs(g - w), 0)) / jnp.where(largest > 0, largest, 1)))
    return worst


def _compiled(runs: dict[str, Callable], args: tuple, replaced: int | None) -> dict[str, Any]:
    """Each run compiled for ``args``, at once, and to write its output over one of them; the exception of one that cannot be."""
    donated = () if replaced is None else replaced

    def compile_one(run: Callable) -> Any:
        try:
            return jax.jit(run, donate_argnums=donated).lower(*args).compile()
        except Exception as problem:
            return problem

    with ThreadPoolExecutor() as pool:
        return dict(zip(runs, pool.map(compile_one, runs.values()), strict=True))


def bench_op(op: str, clock: Clock) -> list[Timing]:
    """Every implementation and peer of ``op`` on its real cases."""
    cases, results = registry.module(op, "cases"), []
    for name, case in cases.REAL.items():
        args, options, cost = cases.arguments(case), cases.options(case), cases.cost(case)
        timed = getattr(cases, "timed", lambda case, run: run)
        impls = {"XLA, float32": "reference", "ours": "gpu"}
        runs: dict[str, Callable] = {
            label: timed(case, partial(registry.module(op, impl).run, **options)) for label, impl in impls.items()
        }
        replaced = getattr(cases, "replaced", lambda case: None)(case)
        compiled = _compiled({**runs, **cases.peers(case)}, args, replaced)
        # A call may take an argument's buffer for its output.
        fresh = lambda args=args, kept=replaced is None: args if kept else jax.tree.map(jnp.copy, args)  # noqa: E731
        want = jax.block_until_ready(compiled["XLA, float32"](*fresh()))
        for label, run in compiled.items():
            try:
                if isinstance(run, Exception):
                    raise run
                values = getattr(cases, "values", lambda outputs: outputs)
                error = getattr(cases, "error", _error)(values(run(*fresh())), values(want))
                median, low, high, kernels = clock.time(run, fresh(), replaced=replaced)
                result = Timing(op, name, label, median, low, high, kernels, cost[0], cost[1], clock.floor(cost), error)
            except Exception as problem:
                text = str(problem).strip().splitlines() or [""]
                note = f"{type(problem).__name__}: {text[-1][:160]}"
                result = Timing(op, name, label, 0, 0, 0, 0, cost[0], cost[1], note=note)
            results.append(result)
            print(line(result), flush=True)
    return results


def line(t: Timing) -> str:
    """One result as a row of text."""
    head = f"{t.op:17} {t.case:30} {t.name:24}"
    if t.note:
        return f"{head} {t.note}"
    rate = f"{t.bytes / t.median / 1e6:5.2f} TB/s {t.flops / t.median / 1e6:5.0f} TFLOP/s"
    share = f"floor {t.floor:7.1f} ratio {t.median / t.floor:5.2f}"
    return f"{head} {t.median:8.1f} us ({t.low:.1f}-{t.high:.1f}) {t.kernels:2} kernels {rate} {share} error {t.error:.1e}"


def _named(words: Sequence[str]) -> list[str]:
    for word in words:
        if word not in registry.OPS:
            raise UserError(f"op: found {word!r}, allowed are {', '.join(registry.OPS)}{nearest(word, registry.OPS)}")
    return list(words)


def _field(op: str, name: str, text: str) -> Any:
    """The value that ``text`` gives a case's field; `UserError` for one that no case can have."""
    known: list[Any] = [getattr(case, name) for case in registry.module(op, "cases").CASES.values()]
    kind = type(known[0])
    if kind in (bool, str):
        words = {"true": True, "false": False} if kind is bool else {value: value for value in sorted(set(known))}
        if text.lower() in words:
            return words[text.lower()]
        raise UserError(f"{op}: {name}: found {text!r}, allowed is {' or '.join(words)}{nearest(text, words)}")
    low, high, whole = (min(1, *known), 2**30, "whole ") if kind is int else (0, 1, "")
    with suppress(ValueError):
        if low <= (value := int(text) if whole else float(text)) <= high:
            return value
    raise UserError(f"{op}: {name}: found {text!r}, allowed is a {whole}number from {low} to {high}")


def explain(words: Sequence[str]) -> None:
    """Prints what runs ``op field=value ...`` on each backend, and what the case costs; `UserError` for one that cannot be."""
    if not words:
        raise UserError(f"op: found none, allowed are {', '.join(registry.OPS)}")
    op = _named(words[:1])[0]
    cases = registry.module(op, "cases")
    case = next(iter(cases.REAL.values()))
    names = [f.name for f in fields(case)]
    for word in words[1:]:
        name, _, text = word.partition("=")
        if name not in names:
            raise UserError(f"{op}: found {word!r}, allowed is one of {', '.join(names)} and = and a value{nearest(name, names)}")
        case = replace(case, **{name: _field(op, name, text)})
    args, options = cases.abstract(case), cases.options(case)
    try:
        jax.eval_shape(partial(registry.module(op, "reference").run, **options), *args)
    except (TypeError, ValueError, OverflowError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{op}: found {' '.join(words[1:])}, which even the reference cannot run: {why[:160]}") from None
    print(f"{op}: {', '.join(f'{name}={getattr(case, name)}' for name in names)}")
    cost = cases.cost(case)
    print(f"at least {cost[0]:,} bytes to and from device memory, {cost[1]:,} FLOPs")
    for backend in ("cpu", "gpu", "tpu"):
        choice = registry.choose(op, "auto", *args, backend=backend, **options)
        runs = "the reference" if choice.impl == "reference" else f"the {choice.impl} kernel"
        why = "".join(f", not the {name} kernel: {reason}" for name, reason in choice.refusals.items() if name == backend)
        print(f"on {backend}: runs {runs}{why}")


def run(ops: Sequence[str], out: Path | None) -> None:
    """Times ``ops``, all without a name, and writes ``out``; `UserError` without a GPU."""
    ops = _named(ops) or list(registry.OPS)
    if jax.default_backend() != "gpu":
        raise UserError(f"backend: found {jax.default_backend()}, allowed is gpu: times of interpreted kernels say nothing")
    check_outputs({"out": out})
    clock = Clock()
    device = program.device()
    device |= {"copy_TB_s": clock.bytes_per_us / 1e6, "bf16_TFLOP_s": clock.flops_per_us / 1e6}
    print(device, flush=True)
    results: list[Timing] = []
    for op in ops:
        results += bench_op(op, clock)
        if out is not None:
            write_text(out, json.dumps({"device": device, "results": [asdict(t) for t in results]}, indent=1) + "\n")


if __name__ == "__main__":
    run(sys.argv[2:], Path(sys.argv[1]) if sys.argv[1:] else None)
