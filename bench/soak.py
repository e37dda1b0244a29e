"""Random requests through the engine, with joins, aborts and preemptions: each must get the tokens that it gets alone.

`plain` asks over packed rows with a bounded replay: log-probabilities are the same to the bit where a product gives a row the
same bits in every slot. `prefix` asks with pages, a file and snapshots that requests begin with, over float32 rows and with an
exact replay, and compares with runs that have none of them: there, sums in another order may decide between two tokens that are
as good as one another, which is judged by the logits of a plain pass.

Run: python -m bench.soak [--requests 2000] [--seed 0] [--kinds plain prefix] [--out FILE.json]
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import program
from dsv41 import config
from dsv41.errors import UserError
from dsv41.files import check_outputs, write_text
from dsv41.model import forward
from dsv41.numerics import PACKED, Policy
from dsv41.params import init_params
from dsv41.tokenmap import token_map
from infer.engine import Engine
from infer.model import Model
from infer.prefix import PrefixCache
from infer.requests import Event, Request
from infer.reuse import Reuse
from infer.sampling import Sampling, sample, sampling_rows
from infer.store import BlockStore
from infer.windows import WindowPool
from train.tokenizer import train_tokenizer

KINDS = ("plain", "prefix")
TIE = 1e-4  # of a logit: float32 sums in another order move logits of order 1 by some 1e-6; headroom 100
BATCH = 200  # requests after which what was seen is told
STEMS = 4  # beginnings that requests share
STOPS = ((), (), ("e",), ("re", "a *"))


@dataclass
class Told:
    """The events of a request, joined."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    last: Event | None = None

    def hear(self, event: Event) -> None:
        """Takes the next event; nothing may follow the last."""
        assert self.last is None, event
        self.text += event.text
        self.ids += event.ids
        self.logprobs += event.logprobs
        self.likeliest += event.likeliest
        self.last = event if event.finish else None


@dataclass
class Soaked:
    """What a soak saw. ties: requests that said another token as good; found: requests by what they began with."""

    requests: int
    aborted: int = 0
    preempted: int = 0
    joined: int = 0
    wrong: list[str] = field(default_factory=list)
    ties: int = 0
    apart: float = 0.0
    free_pages: int = 0
    pages: int = 0
    compiled_later: int = 0
    found: dict[str, int] = field(default_factory=dict)

    def __add__(self, later: "Soaked") -> "Soaked":
        """Of both, one after the other on the same engine."""
        names = ("requests", "aborted", "preempted", "joined", "wrong", "ties", "compiled_later")
        added = {name: getattr(self, name) + getattr(later, name) for name in names}
        found = dict(Counter(self.found) + Counter(later.found))
        return replace(later, **added, apart=max(self.apart, later.apart), found=found)

    def line(self) -> str:
        """One line for people."""
        found = "".join(f", {count} began with {kind}" for kind, count in self.found.items())
        return (
            f"{self.requests} requests, {self.joined} joined others, {self.aborted} aborted, {self.preempted} preemptions{found};"
            f" {len(self.wrong)} differ from their solo runs, {self.ties} by a tie, log-probabilities by {self.apart:.1e};"
            f" {self.pages - self.free_pages} pages leaked; {self.compiled_later} programs compiled after warm-up"
        )


def random_request(rng: np.random.Generator, vocab: int, longest: int) -> Request:
    """Any length up to ``longest`` with its continuation; greedy or drawn, some with stops, log-probabilities or priority."""
    new = int(rng.integers(0, longest // 2))
    size = int(rng.integers(1, longest - new + 1))
    drawn = rng.random() < 0.7
    sampling = Sampling(
        temperature=float(rng.uniform(0.3, 2.0)) if drawn else 0.0,
        top_k=int(rng.integers(0, 50)) if drawn else 0,
        top_p=float(rng.uniform(0.5, 1.0)) if drawn else 1.0,
        seed=int(rng.integers(1 << 30)),
        max_new_tokens=new,
        stop=STOPS[rng.integers(len(STOPS))],
        stop_ids=tuple(rng.integers(3, vocab, rng.integers(0, 3)).tolist()),
    )
    ids = [0, *rng.integers(3, vocab, size - 1).tolist()]
    return Request(ids, sampling, int(rng.integers(0, 4)) * int(rng.random() < 0.3), int(rng.integers(0, 3)))


def beginning_alike(rng: np.random.Generator, request: Request, longest: int, begun: list[tuple[list[int], Told]]) -> Request:
    """A request with the beginning of another: of one of `STEMS` texts, or of one before and what that was told so far."""
    # Prompts, not answers, are what these are about.
    request = replace(request, sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens // 3))
    ids, rest = [*request.ids], longest - request.sampling.max_new_tokens
    if begun and rng.random() < 0.5:
        before, told = begun[-1 - int(rng.integers(0, min(len(begun), 30)))]
        stem = [*before, *told.ids]
    else:
        stem = [0, *np.random.default_rng(int(rng.integers(STEMS))).integers(3, 280, longest).tolist()]
        stem = stem[: int(rng.integers(1, longest))]
    return replace(request, ids=[*stem[:rest], *ids[: int(rng.integers(0, 20))]][:rest] if rest > 0 else ids)


@contextlib.contextmanager
def _watched(engine: Engine) -> Iterator[tuple[list[str], Counter[str]]]:
    """What is compiled meanwhile, and what requests begin with."""
    compiled: list[str] = []
    found: Counter[str] = Counter()
    listen = lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None  # noqa: E731
    reuse, begin = engine._reuse, engine._reuse.begin

    def counted(start: Any, slot: int, pages: list[int], shared: int) -> None:
        whole = start.hit.kept // engine.page
        found.update(pages=shared > 0, file=whole > shared, snapshots=start.hit.windows is not None)
        begin(start, slot, pages, shared)

    jax.monitoring.register_event_duration_secs_listener(listen)
    reuse.begin = counted
    try:
        yield compiled, found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
        reuse.begin = begin


def soak(engine: Engine, count: int, seed: int, alike: bool = False) -> Soaked:
    """``count`` random requests that come, are aborted and end at random; then each alone, in whatever slot and pages it gets.

    alike: requests begin alike, and the engine has a prefix cache, which the runs alone do without.
    """
    rng, vocab = np.random.default_rng(seed), engine.model.config.vocab_size
    asked: list[tuple[Request, Told]] = []
    ids, done, before = [], Soaked(count), engine.metrics()
    with _watched(engine) as (compiled, found):
        while len(ids) < count or engine.step():
            for _ in range(int(rng.poisson(0.8 if alike else 0.4))):
                if len(ids) < count:
                    request, told = random_request(rng, vocab, engine.longest), Told()
                    if alike:
                        request = beginning_alike(rng, request, engine.longest, [([*r.ids], t) for r, t in asked[-30:]])
                    done.joined += engine.metrics().running > 0
                    asked.append((request, told))
                    ids.append(engine.submit(request, told.hear))
            if ids and rng.random() < 0.04:
                engine.abort(ids[-1 - int(rng.integers(0, min(len(ids), 8)))])
            engine.step()
        after, reuse = engine.metrics(), engine._reuse
        if alike:
            reuse.forget()
            engine._reuse = Reuse(None, engine.device, engine.allocator)
        alone = [Told() for _ in asked]
        for (request, _), one in zip(asked, alone, strict=True):
            engine.submit(request, one.hear)
            while engine.step():
                pass
        engine._reuse = reuse
    done.compiled_later, done.found = len(compiled), dict(found) if alike else {}
    done.aborted = after.finished["abort"] - before.finished["abort"]
    done.preempted = after.preempted - before.preempted
    done.free_pages, done.pages = engine.metrics().free_pages, engine.metrics().pages
    ties = Ties(engine.model, engine.longest) if alike else None
    for n, ((request, one), other) in enumerate(zip(asked, alone, strict=True)):
        same = _alike(one.ids, other.ids)
        pairs = zip(one.logprobs[:same], other.logprobs[:same], strict=True)
        done.apart = max([done.apart, *(abs(a - b) for a, b in pairs)])
        if fault := differs(one, other):
            if ties is not None and one.last and other.last and ties.as_good(request, one, other):
                done.ties += 1
            else:
                done.wrong.append(f"request {n}: {fault}")
    return done


def _alike(one: list[int], other: list[int]) -> int:
    """How many ids two begin with alike."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def differs(one: Told, alone: Told) -> str | None:
    """How a request's outcome differs from that of its solo run; one that was aborted has the beginning of it."""
    if one.last is None or alone.last is None:
        return "no last event"
    made = len(one.ids)
    if one.last.finish == "abort":
        same = one.ids == alone.ids[:made] and alone.text.startswith(one.text)
        return None if same else "not the beginning of the solo run"
    if (one.ids, one.text) != (alone.ids, alone.text) or one.last.finish != alone.last.finish:
        return f"{one.last.finish} {one.ids} {one.text!r}, alone {alone.last.finish} {alone.ids} {alone.text!r}"
    return None


class Ties:
    """Whether two continuations part at tokens of which a change of logits by `TIE` makes either, by a pass without a cache."""

    def __init__(self, model: Model, longest: int):
        width = -(-longest // model.config.document_alignment) * model.config.document_alignment
        fold, self._width = jnp.asarray(model.token_map, jnp.int32), width
        self._params, self._eos = model.params, model.config.eos_token_id

        def logits(params: Any, ids: jax.Array, count: jax.Array) -> jax.Array:
            segments = (jnp.arange(width, dtype=jnp.int32) < count).astype(jnp.int32)[None]
            out = forward(params, model.config, Policy(), ids, segments, fold).logits
            return jax.lax.dynamic_index_in_dim(out, count - 1, 1, keepdims=False)

        self._logits = jax.jit(logits)

    def as_good(self, request: Request, one: Told, other: Told) -> bool:
        """Of two outcomes of a request."""
        at = _alike(one.ids, other.ids)
        known = [*request.ids, *one.ids[:at]]
        buffer = np.zeros((1, self._width), np.int32)
        buffer[0, : len(known)] = known
        logits = self._logits(self._params, buffer, np.int32(len(known)))
        ends = (self._eos, *request.sampling.stop_ids)
        first, second = ((told.ids[at],) if at < len(told.ids) else ends for told in (one, other))
        draws = lambda a, b: self._draws(request, logits.at[0, a].add(TIE).at[0, b].add(-TIE), len(known)) == a  # noqa: E731
        return any(draws(a, b) and draws(b, a) for a in first for b in second)

    def _draws(self, request: Request, logits: jax.Array, at: int) -> int:
        return int(sample(logits, jnp.asarray([at], jnp.int32), sampling_rows([request.sampling]))[0][0])


def small_model(**changes: Any) -> Model:
    """The toy with a vocabulary of 300 and random weights."""
    tokenizer = train_tokenizer([f"def f{n}(a, b):\n    return a * {n} + b  # größer 🙂\n" for n in range(40)], 300)
    fold, classes = token_map(tokenizer)
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "engram_compressed_vocab_size": classes, "max_position_embeddings": 512}
    made = config.replace(config.preset("toy"), **sizes, **changes)
    return Model(jax.jit(init_params, static_argnums=0)(made, jax.random.key(0)), made, tokenizer, fold, 0)


@dataclass(frozen=True)
class Options:
    """Sends random requests through engines of the toy."""

    requests: int = 2000
    """Of each kind."""
    seed: int = 0
    """Of the requests, and of when they come and go."""
    kinds: tuple[str, ...] = KINDS
    """plain: no prefix cache. prefix: pages, file and snapshots."""
    out: Path | None = None
    """Also write what was seen to this JSON file."""


def _batches(kind: str, options: Options, folder: Path) -> Iterator[Soaked]:
    """What was seen up to the end of each batch of requests."""
    sizes = {"slots": 6, "page": 16, "chunks": (16, 64), "block": 8}
    with contextlib.ExitStack() as stack:
        if kind == "plain":
            engine = Engine(small_model(), PACKED, decoder_replay="bounded", longest=96, pages=20, **sizes)
        else:
            # With a window of 8 the exact replay is short enough for prompts of a hundred tokens to gain by a prefix.
            model = small_model(sliding_window=8)
            store, windows = BlockStore(folder / "blocks.db"), WindowPool(1 << 20)
            prefix = stack.enter_context(contextlib.closing(PrefixCache(model, Policy(), "halo", sizes["page"], store, windows)))
            engine = Engine(model, Policy(), decoder_replay="halo", longest=144, pages=36, prefix=prefix, **sizes)
        engine.warm_up()
        done = Soaked(0)
        while done.requests < options.requests:
            count = min(BATCH, options.requests - done.requests)
            done += soak(engine, count, options.seed + done.requests, alike=kind == "prefix")
            yield done


def main(options: Options) -> None:
    """Prints a line a batch and writes ``out`` behind each; exit code 1 where anything was wrong."""
    for kind in options.kinds:
        if kind not in KINDS:
            raise UserError(f"kinds: found {kind!r}, allowed are {', '.join(KINDS)}")
    if options.requests < 1:
        raise UserError(f"requests: found {options.requests}, allowed is 1 or more; nearest is 1")
    if options.out is not None:
        check_outputs({"out": options.out})
    seen: dict[str, Any] = {"device": program.device(), "cores": os.cpu_count(), "seed": options.seed}
    wrong = False
    for kind in options.kinds:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            for found in _batches(kind, options, Path(folder)):
                seen[kind] = {**asdict(found), "seconds": round(time.perf_counter() - began)}
                print(f"{kind}: {found.line()}; {seen[kind]['seconds']} s", flush=True)
                for fault in found.wrong[:10]:
                    print(fault, flush=True)
                if options.out is not None:
                    write_text(options.out, json.dumps(seen, indent=1) + "\n")
                wrong |= bool(found.wrong) or found.free_pages != found.pages or found.compiled_later > 0
    sys.exit(wrong)


if __name__ == "__main__":
    program.run(main, Options)
