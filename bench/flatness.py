"""A decode step by context, from 4K tokens to 1M: how little of it grows, through the kernels and with every op on its reference.

What runs is the engine's block of decode steps over packed rows in pages, random rows in scattered pages. The engine has a
program for each of a few widths of block tables: ``own`` is the narrowest for the context, ``widest`` the one of the longest, so
that there a short context runs the very program of the longest. Wall time and device time (the sum of a step's kernels) are of
one step of a block: a long block less a short one, over their difference.
Run: python -m bench.flatness [--preset slice] [--contexts 4k,1m] [--out FILE.json]
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import jax
import numpy as np

from bench import program, serving
from bench.kernels import profiled
from dsv41 import config
from dsv41.analyze.contexts import parse_contexts, spell
from dsv41.config import ModelConfig, preset
from dsv41.errors import UserError, nearest
from dsv41.files import check_outputs, write_text
from dsv41.hashing import table_primes
from infer.device import ENDS, Device
from infer.model import Model
from infer.sampling import Sampling
from infer.steps import BLOCK
from kernels_pallas import registry
from kernels_pallas.registry import Impl

PAGE, REPEATS, PROFILED = 128, 7, 5
Table = Literal["own", "widest"]


def _slice() -> ModelConfig:
    """Four layers of the release's widths; a token takes all of the experts, which are as many as it takes of the release's."""
    pool = preset("flash").candidate_topk_blocks
    return config.replace(preset("slice"), moe_intermediate_size=2304, candidate_topk_blocks=pool)


def _release() -> ModelConfig:
    """The release's 40 layers, with as many experts as a token takes, and small Engram tables."""
    release = preset("flash")
    primes = table_primes(len(release.engram_layer_ids), release.engram_max_ngram_size, release.engram_n_heads, 50_000)
    return config.replace(
        release,
        n_routed_experts=release.num_experts_per_tok,
        engram_vocab_size=50_000,
        engram_num_embeddings=tuple(map(sum, primes)),
        num_nextn_predict_layers=0,
        compress_ratios=release.compress_ratios[: release.num_hidden_layers],
        dspark_target_layer_ids=(),
        quantization_config=None,
        vision_config=None,
    )


CONFIGS: dict[str, Callable[[], ModelConfig]] = {"slice": _slice, "release": _release, "toy": partial(preset, "toy")}


@dataclass(frozen=True)
class Options:
    """Times decode steps by context."""

    preset: str = "slice"
    """slice: four layers of the release's widths. release: its 40 layers with a token's six experts. toy."""
    contexts: str = "4k,16k,64k,256k,1m"
    """Tokens in the cache."""
    batches: tuple[int, ...] = (1, 8)
    """Requests in a step."""
    impls: tuple[Impl, ...] = ("auto", "reference")
    """auto: the kernels that this machine can run. reference: plain XLA."""
    tables: tuple[Table, ...] = ("own", "widest")
    """own: as wide as the context needs. widest: as the longest needs."""
    out: Path | None = None
    """Also write what was found to this JSON file."""


@dataclass(frozen=True)
class Found:
    """A step: milliseconds of wall time; device microseconds and kernels, None where no GPU counts them; growing: of the kernels
    whose time differs most from the shortest context's of this table, the microseconds by which it does."""

    impl: str
    batch: int
    table: str
    context: int
    ms: float
    kernel_us: float | None = None
    kernels: int | None = None
    growing: dict[str, float] | None = None


class Steps:
    """The engine's decode steps of ``batch`` requests whose cache has room for ``longest`` tokens each."""

    def __init__(self, model: Model, batch: int, longest: int):
        self._most, self._batch = -(-longest // PAGE), batch
        pages = batch * self._most
        self._device = Device(model, serving.policy(), "full", batch, pages, PAGE, longest, (serving.CHUNK,), 0)
        self._device.cache = jax.jit(partial(serving.filled, length=0), donate_argnums=0)(self._device.cache)
        random = np.random.default_rng(0)
        self._pages = (1 + random.permutation(pages)).reshape(batch, -1).tolist()
        self._ids = random.integers(3, model.config.vocab_size, (1 + BLOCK, batch)).astype(np.int32)

    def run(self, context: int, table: Table, steps: int) -> Any:
        """A block of steps of random tokens, the last at the end of ``context`` at most."""
        device, batch = self._device, self._batch
        own = -(-context // PAGE)
        # Page 0 is nobody's.
        pages = [row[:own] + [0] * ((self._most if table == "widest" else own) - own) for row in self._pages]
        length = jax.device_put(np.full(batch, context - BLOCK, np.int32), jax.devices()[0])
        device.cache = replace(device.cache, length=length)
        left, ends = np.full(batch, BLOCK, np.int32), np.full((batch, ENDS), -1, np.int32)
        return device.decode(pages, self._ids[0], left, ends, [Sampling()] * batch, steps, self._ids[1:], False)


def seconds(run: Callable[[int], Any]) -> float:
    """Of one step, by the wall."""

    def timed(steps: int) -> float:
        began = perf_counter()
        run(steps)
        return perf_counter() - began

    return median((timed(BLOCK) - timed(1)) / (BLOCK - 1) for _ in range(REPEATS))


def kernels(run: Callable[[int], Any]) -> tuple[int, Counter[str]]:
    """How many one step launches, and microseconds of them by name."""
    count, spent = 0, Counter()
    for steps, sign in ((PROFILED, 1), (1, -1)):
        _, found = profiled(run, (steps,))
        count += sign * len(found)
        for name, us in found:
            spent[name] += sign * us
    return count // (PROFILED - 1), Counter({name: us / (PROFILED - 1) for name, us in spent.items()})


def measure(steps: Steps, impl: Impl, batch: int, contexts: Sequence[int], tables: Sequence[Table]) -> list[Found]:
    """Each context with each kind of table; all is compiled before."""
    found = []
    for table in tables:
        shortest: Counter[str] = Counter()
        for context in contexts:
            run = partial(steps.run, context, table)
            one = Found(impl, batch, table, context, 1e3 * seconds(run))
            if jax.default_backend() == "gpu":
                count, spent = kernels(run)
                shortest = shortest or spent
                more = Counter(spent)
                more.subtract(shortest)
                growing = {name: round(us, 1) for name, us in more.most_common(8) if us >= 1}
                one = replace(one, kernel_us=sum(spent.values()), kernels=count, growing=growing)
            print(line(one), flush=True)
            found.append(one)
    return found


def line(one: Found) -> str:
    """One step as a row of text."""
    device = f"  {one.kernel_us:9.1f} us of {one.kernels} kernels  {one.growing}" if one.kernel_us is not None else ""
    head = f"{one.impl:9} {one.batch:3} requests  {one.table:6} table  {spell(one.context):>5}"
    return f"{head}  {one.ms:9.3f} ms a step{device}"


def ratios(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Of each implementation, batch and table: the longest context's step over the shortest's."""
    told = []
    for key in dict.fromkeys((one.impl, one.batch, one.table) for one in found):
        own = [one for one in found if (one.impl, one.batch, one.table) == key]
        low, high = (pick(own, key=lambda one: one.context) for pick in (min, max))
        device = high.kernel_us / low.kernel_us if high.kernel_us and low.kernel_us else None
        told.append({**dict(zip(("impl", "batch", "table"), key, strict=True)), "wall": high.ms / low.ms, "device": device})
    return told


def open_model(name: str, longest: int) -> Model:
    """Random weights of a config of `CONFIGS`."""
    return serving.random_model(config.replace(CONFIGS[name](), max_position_embeddings=longest))


def warmed(model: Model, impl: Impl, batch: int, contexts: Sequence[int], tables: Sequence[Table]) -> Steps:
    """Steps whose programs are compiled, all with ``impl``."""
    with registry.automatic(impl):
        steps = Steps(model, batch, max(contexts))
        for table in tables:
            for context in contexts:
                steps.run(context, table, 1)
    return steps


def main(options: Options) -> None:
    """Prints a line a step, and writes ``out`` behind each batch."""
    if options.preset not in CONFIGS:
        raise UserError(f"preset: found {options.preset!r}, allowed are {', '.join(CONFIGS)}{nearest(options.preset, CONFIGS)}")
    contexts = parse_contexts(options.contexts)
    if contexts[0] < BLOCK:
        raise UserError(f"contexts: found {contexts[0]}, allowed is {BLOCK} or more")
    for batch in options.batches:
        if not 1 <= batch <= 256:
            raise UserError(f"batches: found {batch}, allowed is 1 to 256")
    check_outputs({"out": options.out})
    model = open_model(options.preset, contexts[-1])
    facts = {"device": program.device(), "preset": options.preset, "layers": model.config.num_hidden_layers}
    facts["xla_flags"] = os.environ.get("XLA_FLAGS", "")
    found: list[Found] = []
    for impl in options.impls:
        for batch in options.batches:
            common = impl, batch, contexts, options.tables
            found += measure(warmed(model, *common), *common)
            if options.out is not None:
                told = {**facts, "ratios": ratios(found), "results": [asdict(one) for one in found]}
                write_text(options.out, json.dumps(told, indent=1) + "\n")
    for one in ratios(found):
        device = f", device time {one['device']:.3f}" if one["device"] else ""
        print(f"{one['impl']}, {one['batch']} requests, {one['table']} table: x{one['wall']:.3f} by the wall{device}")


if __name__ == "__main__":
    program.run(main, Options)
