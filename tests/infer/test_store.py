"""Blocks as bytes and in a file: nothing wrong is ever found, whatever befalls it; quota, retention, a clock that jumps."""

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.config import preset, replace
from dsv41.errors import UserError
from dsv41.numerics import PACKED, Policy
from infer.payload import BlockFormat
from infer.store import BlockStore
from infer.windows import WindowPool
from tests.models import tiny_config

CONFIG = tiny_config()
FORMAT = BlockFormat(CONFIG, PACKED, 8)
IDS = np.random.default_rng(0).integers(3, 60, 8 * 40).tolist()
KEYS = FORMAT.keys(IDS)


OPENED = []


def opened(file, **options):
    OPENED.append(BlockStore(file, **options))
    return OPENED[-1]


@pytest.fixture(autouse=True)
def _close():
    yield
    while OPENED:
        OPENED.pop().close()


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def rows_of(fmt, seed):
    rng = np.random.default_rng(seed)
    arrays = [
        rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8).view(dtype) for shape, dtype in fmt.sections
    ]
    return tuple(zip(arrays[::2], arrays[1::2], strict=True))


def packed(n, fmt=FORMAT, keys=KEYS, ids=IDS):
    return fmt.pack(keys[n], keys[n - 1] if n else fmt.namespace, ids[n * fmt.tokens : (n + 1) * fmt.tokens], rows_of(fmt, n))


def unpacked(payload, n):
    return FORMAT.unpack(payload, KEYS[n], KEYS[n - 1] if n else FORMAT.namespace, IDS[8 * n : 8 * n + 8])


def filled(file, count=30, **options):
    store = opened(file, **options)
    store.put([(KEYS[n], n, packed(n)) for n in range(count)])
    return store


def test_a_block_comes_back_to_the_bit_and_no_other_does():
    payload = packed(3)
    for pair, got in zip(rows_of(FORMAT, 3), unpacked(payload, 3), strict=True):
        for a, b in zip(pair, got, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    for at in range(len(payload)):
        for bit in (0, 7):
            wrong = bytearray(payload)
            wrong[at] ^= 1 << bit
            assert unpacked(bytes(wrong), 3) is None
    for wrong in (b"", payload[:-1], payload + b"\0", bytes(len(payload)), packed(4)):
        assert unpacked(wrong, 3) is None
    assert FORMAT.unpack(payload, KEYS[3], KEYS[2], IDS[25:33]) is None


def test_names_tell_everything_that_rows_depend_on():
    assert FORMAT.keys(IDS[:23]) == KEYS[:2] and FORMAT.keys(IDS[:7]) == []
    changed = [*IDS]
    changed[9] += 1
    other = FORMAT.keys(changed)
    assert other[0] == KEYS[0] and not {*other[1:]} & {*KEYS}
    forms = [
        FORMAT,
        BlockFormat(CONFIG, PACKED, 8, exact=True),
        BlockFormat(CONFIG, PACKED, 8, b"other weights"),
        BlockFormat(CONFIG, PACKED, 16),
        BlockFormat(CONFIG, Policy(), 8),
        BlockFormat(CONFIG, Policy(compute_dtype=jnp.bfloat16), 8),
        BlockFormat(replace(CONFIG, rope_theta=5000.0), PACKED, 8),
    ]
    assert len({form.namespace for form in forms}) == len(forms)
    assert BlockFormat(CONFIG, PACKED, 8).namespace == FORMAT.namespace
    with pytest.raises(UserError, match="block: found 7, allowed is a positive multiple of 2"):
        BlockFormat(CONFIG, PACKED, 7)


def test_bytes_of_a_token_on_disk(tmp_path):
    """The release's rows: 890 bytes a token, and 3 % more at most with tokens, digests, SQLite's pages and index."""
    fmt = BlockFormat(preset("flash"), PACKED, 128)
    assert fmt.row_bytes == 890 * 128
    ids = np.random.default_rng(1).integers(0, 129280, 128 * 64).tolist()
    keys, file = fmt.keys(ids), tmp_path / "flash.db"
    store = opened(file)
    for n in range(64):
        store.put([(keys[n], n, packed(n, fmt, keys, ids))])
    used = store.size()
    store.close()
    print(f"{os.path.getsize(file) / len(ids):.1f} bytes a token")
    assert used == os.path.getsize(file) and 890 < used / len(ids) < 890 * 1.03
    assert sorted(os.listdir(tmp_path)) == ["flash.db"]
    again = opened(file).get_run(keys)
    assert len(again) == 64 and again[63] == packed(63, fmt, keys, ids)


def test_what_is_there_stays_and_runs_end_at_the_first_gap(tmp_path):
    store = filled(tmp_path / "a.db", 10)
    store.put([(KEYS[2], 2, b"another"), (KEYS[12], 12, packed(12))])
    assert store.get_run(KEYS) == [packed(n) for n in range(10)]
    assert store.missing(KEYS[8:14]) == [KEYS[10], KEYS[11], KEYS[13]]
    store.damaged(KEYS[4])
    assert len(store.get_run(KEYS)) == 4 and store.counts["corrupt"] == 1
    assert store.get_run(KEYS[10:]) == [] and len(store) == 10


def test_two_writers_of_one_file(tmp_path):
    """Two connections, two threads each, the same keys with other bytes: each row is one of both, whole, and stays."""
    stores = [opened(tmp_path / "a.db"), opened(tmp_path / "a.db")]

    def write(store, mark):
        for n in range(20):
            store.put([(KEYS[n], n, packed(n) + mark)])

    threads = [threading.Thread(target=write, args=(stores[n % 2], bytes([n]))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = stores[0].get_run(KEYS)
    assert len(found) + sum(s.counts["dropped"] for s in stores) >= 20
    assert all(row[:-1] == packed(n) and row[-1] < 4 for n, row in enumerate(found))
    assert stores[1].get_run(KEYS) == found


def test_quota_and_retention(tmp_path):
    clock, quota = Clock(), 64 * 4096
    size = len(packed(0))
    rows = lambda first, count: [((first + n).to_bytes(32), n, bytes(8192)) for n in range(count)]  # noqa: E731
    store = opened(tmp_path / "a.db", quota=quota, retention=100.0, clock=clock)
    store.put(rows(0, 60))
    kept = len(store)
    assert 10 < kept < 60 and store.counts["dropped"] == 60 - kept and store.size() <= quota and size < 8192
    clock.now += 90
    store.touch([rows(0, 1)[0][0]])
    clock.now += 20
    store.put(rows(100, 3))
    assert store.size() <= quota and len(store.get_run([key for key, *_ in rows(100, 3)])) == 3
    # The one just used is safe; of the others the last of a chain went first.
    assert store.get_run([rows(0, 1)[0][0]]) and not store.get_run([rows(0, 60)[kept - 1][0]])
    # A clock far ahead and back again: nothing is older for it, nothing younger.
    clock.now = 10.0**9
    store.touch([rows(100, 1)[0][0]])
    clock.now = 1110.0
    store.sweep()
    clock.now += 101
    store.put(rows(200, 60))
    assert not store.get_run([rows(100, 1)[0][0]]) and store.size() <= quota
    store.close()
    greedy = opened(tmp_path / "b.db", quota=quota, retention=100.0, on_full="evict", clock=clock)
    greedy.put(rows(0, 30))
    greedy.put(rows(50, 30))
    assert greedy.counts["retention_violations"] > 10 and greedy.counts["dropped"] == 0 and greedy.size() <= quota
    greedy.close()
    assert os.path.getsize(tmp_path / "b.db") <= quota
    with pytest.raises(UserError, match="found a quota of 5 bytes, allowed is 262144 or more"):
        BlockStore(tmp_path / "b.db", quota=5)


def damage(file, how):
    data = bytearray(file.read_bytes())
    rng = np.random.default_rng(3)
    if how == "cut":
        data = data[: len(data) // 2]
    elif how == "short":
        data = data[:100]
    elif how == "empty":
        data = bytearray()
    elif how == "zeros":
        data = bytearray(len(data))
    elif how == "zero pages":
        data[8192 : len(data) // 2] = bytes(len(data) // 2 - 8192)
    elif how == "garbage":
        data = bytearray(rng.bytes(len(data)))
    elif how == "garbage header":
        data[:100] = rng.bytes(100)
    elif how.startswith("flips"):
        rng = np.random.default_rng(int(how[5:]))
        for at in rng.integers(0, len(data), 40):
            data[at] ^= 1 << int(rng.integers(8))
    file.write_bytes(data)


HOW = ("cut", "short", "empty", "zeros", "zero pages", "garbage", "garbage header", *(f"flips{n}" for n in (0, 3, 8, 14, 15, 18)))


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_file_gives_less_and_never_something_else(tmp_path, how):
    """What is found passes its digest or is counted as corrupt; row by row, or begun anew, the store mends."""
    file = tmp_path / "a.db"
    filled(file).close()
    damage(file, how)
    store, wrong, good = opened(file), 0, 0
    for _ in range(60):
        found = store.get_run(KEYS)
        good = next((n for n, payload in enumerate(found) if unpacked(payload, n) is None), len(found))
        assert found[:good] == [packed(n) for n in range(good)]
        if good < len(found):
            wrong += 1
            store.damaged(KEYS[good])
        elif good == 30:
            break
        store.put([(KEYS[n], n, packed(n)) for n in range(30)])
    assert good == 30 and store.counts["corrupt"] == wrong
    if how in ("short", "zeros", "garbage", "garbage header"):
        assert store.counts["put_aside"] == 1
        assert [name for name in os.listdir(tmp_path) if ".bad-" in name]
    assert how not in ("zero pages", "flips0") or wrong or store.counts["put_aside"]
    store.close()


def test_damage_under_an_open_store(tmp_path):
    """Found while it runs: begun anew once, off at the second time, and quiet all along."""
    file = tmp_path / "a.db"
    store = filled(file)
    for turn in (1, 2):
        for name in (f"{file}-wal", file):
            Path(name).write_bytes(b"\xff" * 5000)
        # SQLite reads what others wrote: another connection's change makes it look.
        store._shut()
        store._open()
        store.put([(KEYS[0], 0, packed(0))])
        assert store.counts["put_aside"] == turn and store.on == (turn == 1)
        assert store.get_run(KEYS) == ([packed(0)] if turn == 1 else [])
    assert store.counts["off"] == 1 and store.counts["dropped"] == 1
    store.sweep()
    store.touch(KEYS)
    store.delete(KEYS)
    store.close()
    assert len(store) == 0 and store.size() == 0 and store.missing(KEYS) == KEYS


def test_a_file_that_went_away(tmp_path):
    file = tmp_path / "a.db"
    store = filled(file)
    for name in os.listdir(tmp_path):
        (tmp_path / name).unlink()
    store.put([(KEYS[31], 31, packed(31))])
    assert all(unpacked(p, n) is not None for n, p in enumerate(store.get_run(KEYS)))
    store.close()
    assert len(opened(file)) in (0, 31)


def test_a_full_disk_drops_what_is_new_and_keeps_what_is_there(tmp_path):
    file = tmp_path / "a.db"
    filled(file, 5).close()
    store = opened(file)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(file) + 4096, hard))
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for _ in range(3):
            store.put([(KEYS[n], n, packed(n)) for n in range(5, 40)])
        assert store.get_run(KEYS) == [packed(n) for n in range(5)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert store.counts["dropped"] == 3 * 35 and store.counts["put_aside"] == 0
    store.put([(KEYS[n], n, packed(n)) for n in range(5, 10)])
    assert len(store.get_run(KEYS)) == 10


READER = """
import os, sys, urllib.parse
from pathlib import Path
from infer.store import BlockStore
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
store = BlockStore(Path(sys.argv[1]))
keys = [bytes.fromhex(line) for line in sys.stdin.read().split()]
found = store.get_run(keys)
store.put([(bytes(32), 0, b"x")])
store.touch(keys), store.sweep(), store.delete(keys)
print(len(found), store.counts["dropped"], store.counts["put_aside"], len(store.get_run(keys)))
"""


@pytest.mark.parametrize("folder", [0o555, 0o777])
def test_a_file_that_cannot_be_written_is_read(tmp_path, folder):
    place = tmp_path / "place"
    place.mkdir()
    filled(place / "a.db").close()
    (place / "a.db").chmod(0o444)
    place.chmod(folder)
    for parent in [*place.parents][:4]:
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    keys = "\n".join(key.hex() for key in KEYS)
    done = subprocess.run(
        [sys.executable, "-c", READER, str(place / "a.db")], input=keys, capture_output=True, text=True, cwd=Path.cwd()
    )
    place.chmod(0o755)
    assert done.stdout.split() == ["30", "1", "0", "30"], done.stderr


def test_what_is_no_place_for_a_store(tmp_path):
    with pytest.raises(UserError, match="allowed is a file in a folder that exists"):
        BlockStore(tmp_path / "none" / "a.db")
    with pytest.raises(UserError, match="found a folder or device"):
        BlockStore(tmp_path)
    base = sqlite3.connect(tmp_path / "notes.db")
    base.execute("CREATE TABLE notes (text)")
    base.commit()
    base.close()
    with pytest.raises(UserError, match="database of another program"):
        BlockStore(tmp_path / "notes.db")
    text = tmp_path / "tokenizer.json"
    text.write_text("{}")
    with pytest.raises(UserError, match=r"found 'tokenizer\.json', allowed is a name that ends with"):
        BlockStore(text)
    assert sorted(os.listdir(tmp_path)) == ["notes.db", "tokenizer.json"] and text.read_text() == "{}"


def test_snapshots_age_and_make_room():
    clock, ids = Clock(), list(range(40))
    keys = [bytes([n]) for n in range(6)]
    pool = WindowPool(1000, 60.0, clock)
    state = lambda n: {"a": np.full(100, n, np.uint8)}  # noqa: E731
    for block, tail in ((0, 3), (2, 0), (2, 5), (3, 1)):
        pool.put(keys[block], ids[8 * block : 8 * block + tail], state(8 * block + tail))
    find = lambda ids, blocks: (pool.find(keys[: blocks + 1], ids, 8) or (0,))[0]  # noqa: E731
    found_state = lambda: (pool.find(keys, ids, 8) or (0, {}))[1]  # noqa: E731
    assert [find(ids, 5), find(ids, 2), find(ids[:20], 2), find(ids[:15], 1), find(ids[:2], 0)] == [25, 21, 16, 3, 0]
    assert find([*ids[:24], 99], 3) == 21 and find([9], 0) == 0
    assert found_state()["a"][0] == 25
    pool.put(keys[3], ids[24:25], state(0))
    assert found_state()["a"][0] == 25 and pool.size == 400
    clock.now += 50
    find(ids[:15], 1)
    clock.now += 20
    assert (find(ids, 5), pool.counts["expired"], len(pool)) == (3, 3, 1)
    clock.now -= 10**6
    for n in range(20):
        pool.put(keys[4], [n], state(n))
    assert pool.size == 1000 and len(pool) == 10 and pool.counts["evicted"] == 11
    pool.put(keys[5], [], {"a": np.zeros(1001, np.uint8)})
    assert len(pool) == 10
    with pytest.raises(UserError, match="windows: found 0 bytes"):
        WindowPool(0)
    assert 0.09 < WindowPool().capacity / (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) < 0.11
