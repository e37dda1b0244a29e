"""Random requests through the engine, with joins, aborts and preemptions: each must get the tokens that it gets alone.

Log-probabilities are the same to the bit where a product gives a row the same bits in every slot; how far they are apart is told.

Run: python -m bench.soak [REQUESTS [SEED]]
"""

import sys
import time
from dataclasses import dataclass, field

import jax
import numpy as np

from dsv41.config import preset, replace
from dsv41.numerics import PACKED
from dsv41.params import init_params
from dsv41.tokenmap import token_map
from infer.engine import Engine, Event, Request
from infer.model import Model
from infer.sampling import Sampling
from train.tokenizer import train_tokenizer

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
    """What a soak saw."""

    requests: int
    aborted: int
    preempted: int
    joined: int
    wrong: list[str]
    apart: float
    free_pages: int
    pages: int
    compiled_later: int

    def line(self) -> str:
        """One line for people."""
        return (
            f"{self.requests} requests, {self.joined} joined others, {self.aborted} aborted, {self.preempted} preemptions;"
            f" {len(self.wrong)} differ from their solo runs, log-probabilities by {self.apart:.1e};"
            f" {self.pages - self.free_pages} pages leaked;"
            f" {self.compiled_later} programs compiled after warm-up"
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


def soak(engine: Engine, count: int, seed: int) -> Soaked:
    """``count`` random requests that come, are aborted and end at random; then each alone, in whatever slot and pages it gets."""
    rng = np.random.default_rng(seed)
    requests = [random_request(rng, engine.model.config.vocab_size, engine.longest) for _ in range(count)]
    told, ids, joined = [Told() for _ in requests], [], 0
    compiled, before = engine.device.compiled(), engine.metrics()
    while len(ids) < count or engine.step():
        for _ in range(int(rng.poisson(0.4))):
            if len(ids) < count:
                joined += engine.metrics().running > 0
                ids.append(engine.submit(requests[len(ids)], told[len(ids)].hear))
        if ids and rng.random() < 0.04:
            engine.abort(ids[-1 - int(rng.integers(0, min(len(ids), 8)))])
        engine.step()
    after, wrong, apart = engine.metrics(), [], 0.0
    for n, (request, one) in enumerate(zip(requests, told, strict=True)):
        alone = Told()
        engine.submit(request, alone.hear)
        while engine.step():
            pass
        if fault := differs(one, alone):
            wrong.append(f"request {n}: {fault}")
        else:
            pairs = zip(one.logprobs, alone.logprobs, strict=one.last is not None and one.last.finish != "abort")
            apart = max([apart, *(abs(a - b) for a, b in pairs)])
    return Soaked(
        count,
        after.finished["abort"] - before.finished["abort"],
        after.preempted - before.preempted,
        joined,
        wrong,
        apart,
        engine.metrics().free_pages,
        engine.metrics().pages,
        engine.device.compiled() - compiled,
    )


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


def small_model() -> Model:
    """The toy with a vocabulary of 300 and random weights."""
    tokenizer = train_tokenizer([f"def f{n}(a, b):\n    return a * {n} + b  # größer 🙂\n" for n in range(40)], 300)
    fold, classes = token_map(tokenizer)
    vocab = tokenizer.get_vocab_size()
    config = replace(preset("toy"), vocab_size=vocab, engram_compressed_vocab_size=classes, max_position_embeddings=512)
    return Model(jax.jit(init_params, static_argnums=0)(config, jax.random.key(0)), config, tokenizer, fold, 0)


def main() -> None:
    """Prints the line; exit code 1 where anything was wrong."""
    count, seed = (int(word) for word in (sys.argv[1:] + ["2000", "0"][len(sys.argv) - 1 :]))
    engine = Engine(
        small_model(), PACKED, decoder_replay="bounded", slots=6, longest=96, page=16, pages=20, chunks=(16, 64), block=8
    )
    began = time.perf_counter()
    engine.warm_up()
    print(f"warm-up: {engine.device.compiled()} programs in {time.perf_counter() - began:.0f} s", flush=True)
    found = soak(engine, count, seed)
    print(f"{found.line()}; {time.perf_counter() - began:.0f} s")
    for fault in found.wrong[:10]:
        print(fault)
    sys.exit(bool(found.wrong) or found.free_pages != found.pages or found.compiled_later > 0)


if __name__ == "__main__":
    main()
