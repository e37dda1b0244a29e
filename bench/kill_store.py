"""Kills a writer of the prefix cache's file with SIGKILL, again and again: what is found afterwards must be what was written.

Run: python -m bench.kill_store [ROUNDS [SEED]]
"""

import pickle
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dsv41.config import preset
from dsv41.numerics import PACKED
from infer.payload import BlockFormat
from infer.store import BlockStore

Row = tuple[bytes, int, bytes]  # as `BlockStore.put` takes it
BLOCKS = 64
# Takes a while to write all, over and over: each round replaces what the one before wrote.
WRITER = """
import pickle, sys
from pathlib import Path
from infer.store import BlockStore
rows = pickle.loads(Path(sys.argv[2]).read_bytes())
store = BlockStore(Path(sys.argv[1]))
print("open", flush=True)
while True:
    for at in range(0, len(rows), 4):
        store.put(rows[at : at + 4])
        store.touch([key for key, *_ in rows[:at]])
    store.delete([key for key, *_ in rows[len(rows) // 2 :]])
"""


def random_rows(fmt: BlockFormat, blocks: int, rng: np.random.Generator) -> list[Row]:
    """Rows of a request of so many blocks, whose entries and keys are random bytes."""
    ids = rng.integers(0, 1000, fmt.tokens * blocks).tolist()
    keys, rows = fmt.keys(ids), []
    for n, key in enumerate(keys):
        arrays = [rng.integers(0, 256, shape, np.uint8) for shape, _ in fmt.sections]
        block = tuple(zip(arrays[::2], arrays[1::2], strict=True))
        part = ids[n * fmt.tokens : (n + 1) * fmt.tokens]
        rows.append((key, n, fmt.pack(key, keys[n - 1] if n else fmt.namespace, part, block)))
    return rows


def kill_rounds(file: Path, rows: Sequence[Row], rounds: int, seed: int = 0) -> Counter[str]:
    """Counts of what was found in ``file`` after each kill of a writer of ``rows``, which are the blocks of one request.

    Raises `AssertionError` where a row is not what was written.
    """
    rng, keys, given = np.random.default_rng(seed), [key for key, *_ in rows], file.with_suffix(".rows")
    given.write_bytes(pickle.dumps([*rows]))
    found: Counter[str] = Counter()
    for _ in range(rounds):
        command = [sys.executable, "-c", WRITER, str(file), str(given)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"open\n"
            try:
                writer.wait(float(rng.uniform(0.0, 0.25)))
            except subprocess.TimeoutExpired:
                writer.kill()
        assert writer.returncode == -9, "the writer ended by itself"
        store = BlockStore(file)
        run = store.get_run(keys)
        assert run == [payload for _, _, payload in rows[: len(run)]], "a row is not what was written"
        rest = [key for key in keys if key not in {*store.missing(keys)}]
        assert rest == keys[: len(run)] and len(store) == len(run), "a batch was written in part"
        found.update(rounds=1, rows=len(run), whole=len(run) == len(rows), put_aside=store.counts["put_aside"])
        store.close()
    return found


def main() -> int:
    """The entry point."""
    given = [int(word) for word in sys.argv[1:]]
    rounds, seed = given + [50, 0][len(given) :]
    rows = random_rows(BlockFormat(preset("toy"), PACKED, 128), BLOCKS, np.random.default_rng(seed))
    with tempfile.TemporaryDirectory() as folder:
        found = kill_rounds(Path(folder) / "killed.db", rows, rounds, seed)
    print(f"killed {found['rounds']} times, found {found['rows']} rows, all as written; put aside {found['put_aside']} files")
    return 1 if found["put_aside"] else 0


if __name__ == "__main__":
    sys.exit(main())
