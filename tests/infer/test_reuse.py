"""The engine with a prefix cache: pages, a file, snapshots; tokens are those of runs without one; no page is lost.

Of whatever befalls the file, the tokens tell nothing, the counts all.
"""

import contextlib
import os
import resource
import signal
import sqlite3
from functools import partial

import jax
import numpy as np
import pytest

from bench.kill_store import kill_rounds
from bench.soak import Told, soak
from dsv41.errors import UserError
from infer.engine import Engine
from infer.handoff import Prefiller
from infer.prefix import PrefixCache
from infer.requests import Request
from infer.reuse import Reuse
from infer.sampling import Sampling
from infer.store import BlockStore
from infer.windows import WindowPool
from tests.infer.test_engine import FOUR_LAYERS
from tests.infer.test_store import HOW, damage
from tests.models import PLAIN, tiny_model

MODEL = tiny_model(**FOUR_LAYERS)
PAGE = 8
RNG = np.random.default_rng(9)
SHARED = RNG.integers(3, 280, 60).tolist()
GREEDY = partial(Sampling, temperature=0.0)


def build(replay, prefix=None):
    options = {"slots": 2, "longest": 96, "page": PAGE, "pages": 26, "chunks": (16,), "block": 5}
    return Engine(MODEL, PLAIN, decoder_replay=replay, prefix=prefix, **options)


@pytest.fixture(scope="module")
def engine():
    """One for all tests of this file, as its programs are compiled once."""
    return build("halo", PrefixCache(MODEL, PLAIN, "halo", PAGE))


@pytest.fixture
def forgetful(engine):
    """The engine with nothing kept, and what sets the place where it keeps blocks and snapshots."""
    prefix = engine._reuse._prefix

    def keep(store=None, windows=None):
        engine._reuse.forget()
        engine.device.reset()
        prefix.store, prefix.windows = store, windows
        return prefix

    yield keep
    prefix.flush()
    keep()


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
def test_pages_file_and_snapshots_give_the_tokens_of_a_cold_run(engine, forgetful, tmp_path):
    store, windows = BlockStore(tmp_path / "a.db"), WindowPool(1 << 24)
    prefix = forgetful(store)
    ask = [(SHARED, 9), ([*SHARED[:53], 7, 8, 9], 6), ([*SHARED, 5], 4)]
    want = [run_cold(engine, one) for one in ask]
    others = [(RNG.integers(3, 280, 80).tolist(), 10) for _ in range(2)]
    longer = [([*SHARED, *want[0][:8], *[4] * turn], 5) for turn in range(2)]
    more = [run_cold(engine, one) for one in (*others, *longer)]
    assert run(engine, ask[0]) == (want[:1], [0])
    # Pages of the one before, also of one that still runs. What is in them stays to the bit, and so does what is in the file.
    keys = prefix.keys(SHARED)
    rows = lambda: (prefix.mover.take(engine.device.cache, engine._reuse._trie.match(keys)), store.get_run(keys))  # noqa: E731
    prefix.flush()
    before = rows()
    found, cached = run(engine, *ask)
    assert found == want and cached == [56, 48, 56]
    prefix.flush()
    jax.tree.map(np.testing.assert_array_equal, before, rows())
    assert len(before[0]) == len(before[1]) == 7
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
    store.close()
    assert run(engine, ask[1])[0] == want[1:2]


ASK = [(SHARED, 9), ([*SHARED[:53], 7, 8, 9], 6)]


@pytest.fixture(scope="module")
def cold(engine):
    return [run_cold(engine, one) for one in ASK]


@pytest.fixture(scope="module")
def pristine(engine, cold, tmp_path_factory):
    """A file with the blocks of `ASK`, and the rows in it."""
    file = tmp_path_factory.mktemp("pristine") / "a.db"
    prefix = engine._reuse._prefix
    prefix.store = BlockStore(file)
    assert run(engine, *ASK) == (cold, [0, 0])
    prefix.flush()
    keys = prefix.keys(SHARED)
    rows = [(key, n, payload) for n, (key, payload) in enumerate(zip(keys, prefix.store.get_run(keys), strict=True))]
    prefix.store.close()
    prefix.store = None
    return file.read_bytes(), rows


def locked(self):
    error = sqlite3.OperationalError("attempt to write a readonly database")
    error.sqlite_errorcode = sqlite3.SQLITE_READONLY
    raise error


@contextlib.contextmanager
def full_disk(file):
    """No file of this process grows beyond that one's size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(file), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


CHANGED = {
    "zeroed row": "UPDATE blocks SET payload = zeroblob(length(payload)) WHERE depth = 3",
    "a row of another": "UPDATE blocks SET payload = (SELECT payload FROM blocks WHERE depth = 2) WHERE depth = 3",
    "cut row": "UPDATE blocks SET payload = substr(payload, 1, length(payload) / 2) WHERE depth = 3",
    "a row of text": "UPDATE blocks SET payload = 'text' WHERE depth = 3",
    "missing row": "DELETE FROM blocks WHERE depth = 3",
}


@pytest.mark.parametrize("how", [*HOW, *CHANGED, "missing", "read-only", "full disk", "killed"])
def test_a_fault_of_the_file_shortens_a_hit_and_changes_no_token(engine, forgetful, cold, pristine, tmp_path, monkeypatch, how):
    """Truncated, zeroed, flipped, garbage, missing, read-only, full and killed (serving §4.9): each is counted, and mends."""
    data, rows = pristine
    file, wholly = tmp_path / "a.db", [56, 56]
    if how == "killed":
        assert kill_rounds(file, rows, 3)["put_aside"] == 0
    elif how == "full disk":
        # The first two blocks, and no room for more.
        with contextlib.closing(BlockStore(file)) as store:
            store.put(rows[:2])
    elif how != "missing":
        file.write_bytes(data)
    if how in HOW:
        damage(file, how)
    elif how in CHANGED:
        with contextlib.closing(sqlite3.connect(file)) as base, base:
            base.execute(CHANGED[how])
    if how == "read-only":
        monkeypatch.setattr(BlockStore, "_connect", locked)
    store = BlockStore(file)
    prefix = forgetful(store)
    with full_disk(file) if how == "full disk" else contextlib.nullcontext():
        # One after the other, as the second would begin with the first's pages before it asks the file.
        for turn in range(30):
            found = []
            for one, want in zip(ASK, cold, strict=True):
                told, cached = run(engine, one)
                assert told == [want]
                found += cached
                prefix.flush()
                engine._reuse.forget()
                engine.device.reset()
            if turn == 0:
                first, counts = found, store.counts.copy()
            elif found == wholly or how == "full disk":
                break
    seen = counts["corrupt"] + counts["put_aside"] + counts["errors"]
    if how in ("missing", "missing row", "killed", "empty"):
        assert seen == 0
    elif how == "read-only":
        # That rows were used is what could not be written.
        assert first == found == wholly and counts["errors"] > 0
    elif how == "full disk":
        assert first == found == [16, 16] and counts["dropped"] > 0 and counts["put_aside"] == 0
    else:
        assert first == wholly or seen > 0
    assert how not in CHANGED or (first == [24, 56] and counts["corrupt"] == (how != "missing row"))
    # Mended by what the runs themselves left, a row at a time.
    assert how == "full disk" or found == wholly
    store.close()


@pytest.mark.pitfall("O1", "O2", "M1")
def test_a_soak_with_prefixes_leaves_nothing_behind_and_nothing_wrong(engine, forgetful, tmp_path):
    store = BlockStore(tmp_path / "a.db")
    forgetful(store, WindowPool(1 << 19))
    engine.warm_up()
    found = soak(engine, 40, 1, alike=True)
    print(found.line())
    # float32 sums in another order on log-probabilities of order 10.
    assert not found.wrong and found.apart < 1e-4 and found.ties < 3
    assert found.free_pages == found.pages and not found.compiled_later
    assert found.aborted and found.preempted and min(found.found.values()) > 0
    store.close()


def test_a_page_of_another_size_is_refused():
    with pytest.raises(UserError, match="page: found 8 beside blocks of 16"):
        build("halo", PrefixCache(MODEL, PLAIN, "halo", 16))
