"""The engine with a prefix cache: pages, a file, snapshots; tokens are those of runs without one; no page is lost."""

from functools import partial

import jax
import numpy as np
import pytest

from bench.soak import Told
from dsv41.errors import UserError
from infer.engine import Engine, Request
from infer.handoff import Prefiller
from infer.prefix import PrefixCache
from infer.reuse import Reuse
from infer.sampling import Sampling
from infer.store import BlockStore
from infer.windows import WindowPool
from tests.infer.test_engine import FOUR_LAYERS
from tests.models import PLAIN, tiny_model

MODEL = tiny_model(**FOUR_LAYERS)
PAGE = 8
RNG = np.random.default_rng(9)
SHARED = RNG.integers(3, 280, 60).tolist()
GREEDY = partial(Sampling, temperature=0.0)


def build(replay, prefix=None):
    options = {"slots": 2, "longest": 96, "page": PAGE, "pages": 26, "chunks": (16,), "block": 5}
    return Engine(MODEL, PLAIN, decoder_replay=replay, prefix=prefix, **options)


def run(engine, *requests):
    told = [Told() for _ in requests]
    for one, (ids, count) in zip(told, requests, strict=True):
        engine.submit(Request(ids, GREEDY(max_new_tokens=count)), one.hear)
    for _ in range(100_000):
        if not engine.step():
            break
    assert all(one.last is not None and one.last.finish in ("length", "stop") for one in told)
    return [one.ids for one in told], [one.last.usage.cached_tokens for one in told]


def run_cold(engine, request):
    """What the engine says where it has no prefix cache: one engine, whose programs are compiled once."""
    reuse, engine._reuse = engine._reuse, Reuse(None, engine.device, engine.allocator)
    try:
        return run(engine, request)[0][0]
    finally:
        engine._reuse = reuse


def broken(*_):
    raise RuntimeError("no device")


@pytest.mark.pitfall("C1", "C8", "C9", "O1", "O4")
def test_pages_file_and_snapshots_give_the_tokens_of_a_cold_run(tmp_path):
    store, windows = BlockStore(tmp_path / "a.db"), WindowPool(1 << 24)
    prefix = PrefixCache(MODEL, PLAIN, "halo", PAGE, store)
    engine = build("halo", prefix)
    ask = [(SHARED, 9), ([*SHARED[:53], 7, 8, 9], 6), ([*SHARED, 5], 4)]
    want = [run_cold(engine, one) for one in ask]
    others = [(RNG.integers(3, 280, 80).tolist(), 10) for _ in range(2)]
    longer = [([*SHARED, *want[0][:8], *[4] * turn], 5) for turn in range(2)]
    more = [run_cold(engine, one) for one in (*others, *longer)]
    assert run(engine, ask[0]) == (want[:1], [0])
    # Pages of the one before, also of one that still runs.
    found, cached = run(engine, *ask)
    assert found == want and cached == [56, 48, 56]
    held = engine.allocator.pages - engine.metrics().free_pages
    assert held == len(engine._reuse._trie) > 8
    # Room is made of them, not of requests.
    assert run(engine, *others)[0] == more[:2]
    assert engine.metrics().preempted == 0
    prefix.flush()
    # The device forgets: blocks come out of the file.
    engine.device.reset()
    engine._reuse.forget()
    assert engine.metrics().pages == engine.allocator.free
    assert run(engine, *ask) == (want, [56, 56, 56])
    # With a snapshot no token runs again, at odd lengths too, and the whole prompt may be known.
    prefix.windows = windows
    for one, tokens in zip(longer, more[2:], strict=True):
        assert run(engine, ask[0])[0] == want[:1]
        assert run(engine, one) == ([tokens], [68])
    # Prefilled elsewhere, by the encoder alone: what is handed over is what a cold run would have left, and found as that is.
    prefix.flush()
    other = BlockStore(tmp_path / "b.db")
    prefiller = Prefiller(MODEL, PLAIN, prefix)
    other.put(prefiller.run(ask[1][0]))
    mine = prefix.load(prefix.keys(ask[1][0]), ask[1][0])
    prefix.store, prefix.windows = other, None
    theirs = prefix.load(prefix.keys(ask[1][0]), ask[1][0])
    assert len(mine) == len(theirs) == 7
    # fp32 sums in another order on values of order 1, two layers deep.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-4), mine, theirs)
    found = []
    for _ in range(2):
        engine.device.reset()
        engine._reuse.forget()
        told = Told()
        engine.submit(Request(ask[1][0], GREEDY(max_new_tokens=6)), told.hear)
        while engine.step():
            pass
        found.append((told.ids, told.logprobs))
    assert found[0] == found[1] and found[0][0] == want[1] and told.last is not None and told.last.usage.cached_tokens == 56
    other.close()
    prefix.store, prefix.windows = store, windows
    engine._reuse.forget()
    # A row that changed on disk is not used, and counted.
    base = store._base
    assert base is not None
    base.execute("UPDATE blocks SET payload = zeroblob(length(payload))")
    windows.clear()
    engine.device.reset()
    engine._reuse.forget()
    found, cached = run(engine, ask[1])
    assert found == want[1:2] and cached == [0] and engine.metrics().corrupt_blocks == 1
    # What a failed step leaves is not begun with again.
    prefix.flush()
    assert run(engine, ask[1])[0] == want[1:2]
    assert run(engine, ask[1]) == (want[1:2], [56])
    fill, engine.device.fill = engine.device.fill, broken
    told = Told()
    engine.submit(Request(ask[1][0], GREEDY(max_new_tokens=6)), told.hear)
    engine.step()
    engine.device.fill = fill
    assert told.last is not None and told.last.finish == "error"
    assert engine.allocator.free == engine.allocator.pages and store.missing(prefix.keys(ask[1][0])) != []
    assert run(engine, ask[1]) == (want[1:2], [0])
    prefix.close()
    assert run(engine, ask[1])[0] == want[1:2]


def test_a_page_of_another_size_is_refused():
    with pytest.raises(UserError, match="page: found 8 beside blocks of 16"):
        build("halo", PrefixCache(MODEL, PLAIN, "halo", 16))
