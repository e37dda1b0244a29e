"""Snapshots of requests: what goes on from one is what went on without."""

from functools import partial
from operator import attrgetter

import jax
import numpy as np
import pytest

from bench.soak import Told
from infer.engine import Engine
from infer.generate import Generator
from infer.prefix import PrefixCache
from infer.requests import Request
from infer.sampling import Sampling
from infer.store import BlockStore
from infer.windows import WindowPool
from tests.infer.test_engine import FOUR_LAYERS
from tests.models import PLAIN, tiny_model

IDS = np.random.default_rng(9).integers(3, 280, 48).tolist()
PAGE = 12  # a multiple of every ratio here
build = partial(Engine, policy=PLAIN, slots=2, longest=96, page=PAGE, pages=26, chunks=(16,), block=5, decoder_replay="halo")


def run(engine, ids, count=8):
    """Tokens, their log-probabilities, and how many of the prompt's were found."""
    told = Told()
    engine.submit(Request(ids, Sampling(max_new_tokens=count)), told.hear)
    while engine.step():
        pass
    assert told.last is not None and told.last.finish in ("length", "stop"), told.last
    assert told.last.usage is not None
    return told.ids, told.logprobs, told.last.usage.cached_tokens


@pytest.fixture(scope="module")
def engine():
    model = tiny_model(**FOUR_LAYERS)
    return build(model, prefix=PrefixCache(model, PLAIN, "halo", PAGE))


@pytest.fixture
def kept(engine, tmp_path):
    """The engine with a file and snapshots, all of them empty."""
    prefix = engine._reuse._prefix
    engine._reuse.forget()
    prefix.store, prefix.windows = BlockStore(tmp_path / "a.db"), WindowPool(1 << 24)
    yield engine
    prefix.flush()
    prefix.store.close()
    prefix.store = prefix.windows = None


@pytest.mark.pitfall("H1")
@pytest.mark.parametrize("at", [0, 3])
def test_what_led_to_no_number_is_left_to_nobody(kept, monkeypatch, at):
    """Neither of a prompt, nor of an answer, nor where a request that had to go comes back."""
    fill, decode, prefix = kept.device.fill, kept.device.decode, kept._reuse._prefix
    no_number = lambda drawn: drawn.replace(logprobs=np.full_like(drawn.logprobs, np.nan))  # noqa: E731
    want = run(kept, IDS)
    kept._reuse.forget()
    prefix.windows.clear()
    prefix.flush()
    prefix.drop(prefix.keys(IDS))
    told = Told()
    kept.submit(Request(IDS, Sampling(max_new_tokens=8)), told.hear)
    if at:
        monkeypatch.setattr(kept, "_block", 1)
        while len(told.ids) < at:
            kept.step()
        kept._preempt(kept._running()[0])
        kept._reuse.forget()
        prefix.windows.clear()
        prefix.flush()
        prefix.drop(prefix.keys(IDS))
    monkeypatch.setattr(kept.device, "decode", lambda *args: no_number(decode(*args)))
    monkeypatch.setattr(kept.device, "fill", lambda chunks: (lambda ends, drawn: (ends, no_number(drawn)))(*fill(chunks)))
    while kept.step():
        pass
    assert told.last is not None and told.last.finish == "error" and "NaN" in str(told.last.error)
    prefix.flush()
    assert (len(kept._reuse._trie), len(prefix.windows), len(prefix.store)) == (0, 0, 0)
    assert kept.allocator.free == kept.allocator.pages
    monkeypatch.undo()
    assert run(kept, IDS) == want


def test_the_pool_holds_no_more_memory_than_it_counts(kept):
    pool = WindowPool(1 << 20)
    whole = np.ones((64, 1000), np.float32)
    pool.put(b"a", [1], ([whole[3]], whole[5, ::2].copy(), None))
    found = pool.find([b"a"], [1], PAGE)
    assert found is not None and np.array_equal(found[1][0][0], whole[3]) and pool.size == 6000
    run(kept, IDS[:40])
    mine = kept._reuse._prefix.windows
    states = [entry.state for pool in (pool, mine) for entry in pool._entries.values()]
    assert len(states) == 3 and all(leaf.base is None for leaf in jax.tree.leaves(states))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(states)) == pool.size + mine.size


def test_a_batch_goes_on_from_blocks_alone(kept):
    """Beside snapshots that an engine has left, behind more tokens."""
    prefix = kept._reuse._prefix
    ids, _, _ = run(kept, IDS[:46])
    prefix.flush()
    assert run(kept, IDS[:46])[2] == 46
    done = Generator(kept.model, PLAIN, "halo", prefix).generate([IDS[:46]], [Sampling(max_new_tokens=8)])[0][0]
    assert (done.ids, done.cached_tokens) == (ids, 36)


MOVES = ("device.put_windows", "device.windows", "device.length", "_reuse._prefix.mover.take", "_reuse._prefix.mover.put")


@pytest.mark.pitfall("M3")
@pytest.mark.parametrize("name", MOVES)
def test_a_move_of_a_prefix_that_fails_costs_no_other_request_and_not_the_engine(kept, monkeypatch, name):
    """What begins a prompt ends its request alone; what an answer leaves behind ends none."""
    owner, _, name = name.rpartition(".")
    owner, begins = attrgetter(owner)(kept), name.startswith("put")
    want = [run(kept, ids)[0] for ids in (IDS[::-1], IDS)]
    if name == "put":
        # Blocks come out of the file.
        kept._reuse._prefix.flush()
        kept._reuse._prefix.windows.clear()
        kept._reuse.forget()
    elif not begins:
        kept._reuse.forget()
    calls = []

    def fail(*_):
        calls.append(name)
        if begins:
            monkeypatch.undo()
        jax.tree.map(lambda a: a.delete(), kept.device.cache)
        raise RuntimeError("no\ndevice")

    other, told = Told(), Told()
    kept.submit(Request(IDS[::-1], Sampling(max_new_tokens=8)), other.hear)
    while not other.ids:
        kept.step()
    monkeypatch.setattr(owner, name, fail)
    kept.submit(Request(IDS, Sampling(max_new_tokens=8)), told.hear)
    for _ in range(30):
        kept.step()
    monkeypatch.undo()
    assert calls and not kept.step() and kept.allocator.free + len(kept._reuse._trie) == kept.allocator.pages
    assert other.last is not None and (other.ids, other.last.finish) == (want[0], "length")
    assert told.last is not None and told.last.finish == ("error" if begins else "length")
    assert told.last.error == "RuntimeError: no device" if begins else told.ids == want[1]
    ids, _, cached = run(kept, IDS)
    # What failed it is not begun with again.
    assert ids == want[1] and not (begins and cached)


@pytest.mark.parametrize("ratio", [3, 4])
def test_a_prompt_asked_again_goes_on_from_within_its_last_group(ratio):
    model = tiny_model(**{**FOUR_LAYERS, "compress_ratios": (0, ratio, 1, 1)})
    engine = build(model, prefix=PrefixCache(model, PLAIN, "halo", PAGE, windows=WindowPool(1 << 24)))
    for size in range(36, 37 + ratio):
        ids, logprobs, cached = run(engine, IDS[:size])
        assert cached < size
        # To the bit: the same programs on the same rows.
        assert run(engine, IDS[:size]) == (ids, logprobs, size)
