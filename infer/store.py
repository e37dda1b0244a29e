"""Named bytes in a SQLite file, for hours and for several processes: what is lost or damaged is not found (serving §4.6-§4.9).

Nothing here raises after the file was opened, whatever happens to it: reads find less, writes are dropped, both are counted.
"""

import contextlib
import math
import os
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from dsv41.errors import UserError

RETENTION = 72 * 3600.0  # seconds since it was last used for which a row is safe
QUOTA = 8 << 30
# Small beside a row, so that the part of its last page that stays empty is too.
_PAGE = 4096
_APPLICATION, _VERSION = 0x64734B56, 1
_LARGEST = 1 << 28
_SUFFIXES = (".db", ".sqlite")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (key BLOB PRIMARY KEY, depth INTEGER, used REAL, payload BLOB);
CREATE INDEX IF NOT EXISTS by_use ON blocks (used, depth DESC);
"""
# What may pass, or is no fault of the file's content: a lock, a full or broken disk, no rights.
_PASSING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_INTERRUPT,
}
Fault = (sqlite3.Error, OSError, MemoryError, OverflowError, ValueError, TypeError)


class BlockStore:
    """Rows of bytes by key, in ``file``, a .db or .sqlite; made where there is none, `UserError` where that is no place for one.

    quota: bytes of the file, of which what SQLite has not merged yet (a few MiB) is no part. on_full: whether new rows are
    dropped once all others are within ``retention`` seconds of their last use, or take the place of the least recently used.
    clock: seconds since the epoch; it may jump. A file that SQLite cannot read is put aside under another name and a new one
    begun; at the second one the store is off. Methods may be called from any thread.
    """

    def __init__(
        self,
        file: Path,
        quota: int = QUOTA,
        retention: float = RETENTION,
        on_full: Literal["reject", "evict"] = "reject",
        clock: Callable[[], float] = time.time,
    ):
        self.file, self.quota, self.retention, self.on_full, self._clock = file, quota, retention, on_full, clock
        self.counts: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._base: sqlite3.Connection | None = None
        self._bad = 0
        if not file.parent.is_dir():
            raise UserError(f"prefix_cache: found {str(file)!r}, allowed is a file in a folder that exists")
        if file.exists() and not file.is_file():
            raise UserError(f"prefix_cache: found a folder or device at {str(file)!r}, allowed is a file")
        if file.suffix not in _SUFFIXES:
            # What SQLite cannot read is put aside: that is to be no file of the user's.
            raise UserError(f"prefix_cache: found {file.name!r}, allowed is a name that ends with {' or '.join(_SUFFIXES)}")
        if quota < 64 * _PAGE:
            raise UserError(f"prefix_cache: found a quota of {quota} bytes, allowed is {64 * _PAGE} or more")
        self._open()
        self.sweep()

    @property
    def on(self) -> bool:
        """Whether there is a file to read."""
        return self._base is not None

    def _open(self) -> None:
        """Opens the file, or what can be read of it, or puts it aside; off where nothing helps."""
        for _ in range(2):
            try:
                self._base = self._connect()
                return
            except Fault as error:
                if isinstance(error, UserError):
                    raise
                if not _is_passing(error):
                    if not self._put_aside():
                        return
                    continue
                try:
                    self._base = self._connect_to_read()
                except Fault:
                    self.counts["off"] += 1
                return

    def _connect(self) -> sqlite3.Connection:
        base = sqlite3.connect(self.file, timeout=2.0, isolation_level=None, check_same_thread=False)
        try:
            base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LARGEST)
            base.execute(f"PRAGMA page_size = {_PAGE}")
            base.execute("PRAGMA cell_size_check = ON")
            owner = base.execute("PRAGMA application_id").fetchone()[0]
            tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if owner != _APPLICATION and tables and "blocks" not in tables:
                raise UserError(
                    f"prefix_cache: found the database of another program in {str(self.file)!r}, allowed is a new file"
                )
            version = base.execute("PRAGMA user_version").fetchone()[0]
            if tables and (owner, version) != (_APPLICATION, _VERSION):
                raise sqlite3.DatabaseError("of another version")
            base.execute("PRAGMA journal_mode = WAL")
            base.execute("PRAGMA synchronous = NORMAL")
            base.execute("PRAGMA journal_size_limit = 0")
            base.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA.split(";")[:2]:
                base.execute(statement)
            base.execute(f"PRAGMA application_id = {_APPLICATION}")
            base.execute(f"PRAGMA user_version = {_VERSION}")
            base.execute("COMMIT")
            base.execute("SELECT key, depth, used, payload FROM blocks LIMIT 1").fetchone()
        except BaseException:
            base.close()
            raise
        return base

    def _connect_to_read(self) -> sqlite3.Connection:
        """Where nothing can be written, not even beside the file."""
        base = sqlite3.connect(f"{self.file.resolve().as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False)
        try:
            base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LARGEST)
            base.execute("SELECT key, depth, used, payload FROM blocks LIMIT 1").fetchone()
        except BaseException:
            base.close()
            raise
        return base

    def _put_aside(self) -> bool:
        """Renames the file and begins anew; False where the store is off now."""
        self._shut()
        self.counts["put_aside"] += 1
        self._bad += 1
        aside = f"{self.file}.bad-{time.time_ns()}"
        try:
            for end in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(f"{self.file}{end}", f"{aside}{end}")
        except OSError:
            self._bad = 2
        said = "begun anew" if self._bad < 2 else "off"
        print(f"prefix cache {str(self.file)!r} is damaged, kept as {aside!r}; the cache is {said}", file=sys.stderr)
        self.counts["off"] += self._bad > 1
        return self._bad < 2

    def _shut(self) -> None:
        base, self._base = self._base, None
        if base is not None:
            with contextlib.suppress(*Fault):
                base.close()

    @contextlib.contextmanager
    def _trying(self, dropped: int = 0) -> Iterator[sqlite3.Connection | None]:
        """The connection, under the lock; None where the store is off. No error of it gets out; then so many are dropped."""
        with self._lock:
            try:
                if self._base is None:
                    self.counts["dropped"] += dropped
                yield self._base
            except Fault as error:
                self.counts["dropped"] += dropped
                self.counts["errors"] += 1
                with contextlib.suppress(*Fault):
                    if self._base is not None and self._base.in_transaction:
                        self._base.execute("ROLLBACK")
                if not _is_passing(error) and self._put_aside():
                    self._open()

    def get_run(self, keys: Sequence[bytes]) -> list[bytes]:
        """The rows of the first keys, up to the first that is not there."""
        found: list[bytes] = []
        with self._trying() as base:
            if base is None:
                return found
            for key in keys:
                row = base.execute("SELECT payload FROM blocks WHERE key = ?", (key,)).fetchone()
                if row is None:
                    break
                if not isinstance(row[0], bytes):
                    self.damaged(key)
                    break
                found.append(row[0])
        return found

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys that have no row."""
        with self._trying() as base:
            if base is not None:
                return [key for key in keys if not _has(base, key)]
        return list(keys)

    def put(self, rows: Iterable[tuple[bytes, int, bytes]]) -> None:
        """Adds rows of (key, number in its chain, bytes), all or none; one that is there stays as it is."""
        rows = list(rows)
        with self._trying(len(rows)) as base:
            if base is None:
                return
            now, added = self._clock(), 0
            base.execute("BEGIN IMMEDIATE")
            for key, depth, payload in rows:
                if self._make_room(base, len(payload)):
                    insert = "INSERT OR IGNORE INTO blocks (key, depth, used, payload) VALUES (?, ?, ?, ?)"
                    done = base.execute(insert, (key, depth, now, payload)).rowcount
                    if not done and not _has(base, key):
                        raise sqlite3.DatabaseError("a row that is in the index alone")
                    added += done
                else:
                    self.counts["dropped"] += 1
            base.execute("COMMIT")
            self.counts["written"] += added

    def touch(self, keys: Iterable[bytes]) -> None:
        """Marks rows as used now."""
        now = self._clock()
        self._change("UPDATE blocks SET used = ? WHERE key = ?", [(now, key) for key in keys])

    def delete(self, keys: Iterable[bytes]) -> None:
        """Removes rows."""
        self._change("DELETE FROM blocks WHERE key = ?", [(key,) for key in keys])

    def _change(self, statement: str, values: list[tuple]) -> None:
        with self._trying() as base:
            if base is not None and values:
                base.execute("BEGIN IMMEDIATE")
                base.executemany(statement, values)
                base.execute("COMMIT")

    def damaged(self, key: bytes) -> None:
        """Counts a row whose bytes are not what was written, and removes it."""
        self.counts["corrupt"] += 1
        self.delete([key])
        with self._trying() as base:
            if base is not None and _has(base, key):
                raise sqlite3.DatabaseError("a row that does not go")

    def sweep(self) -> None:
        """Removes rows past their time where the quota needs their room; rows of the future are of now."""
        with self._trying() as base:
            if base is not None:
                base.execute("BEGIN IMMEDIATE")
                # The clock was wrong when they were used, or is now.
                now = self._clock()
                base.execute("UPDATE blocks SET used = ? WHERE used > ?", (now, now))
                self._make_room(base, 0)
                base.execute("COMMIT")

    def size(self) -> int:
        """Bytes of the file that rows take."""
        with self._trying() as base:
            if base is not None:
                return self._used(base)
        return 0

    def __len__(self) -> int:
        with self._trying() as base:
            if base is not None:
                return base.execute("SELECT count(*) FROM blocks").fetchone()[0]
        return 0

    def _used(self, base: sqlite3.Connection) -> int:
        pages, free, size = (
            base.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    def _make_room(self, base: sqlite3.Connection, size: int) -> bool:
        """Whether there is room for a row of ``size`` bytes, where need be by removing others."""
        # Beside its own pages a row may split one of the table's and one of each index.
        need = (math.ceil(size / (_PAGE - 4)) + 8) * _PAGE if size else 0
        while (over := self._used(base) + need - self.quota) > 0:
            oldest = "SELECT key, used, length(payload) FROM blocks ORDER BY used, depth DESC LIMIT 64"
            freed = 0
            for key, used, length in base.execute(oldest).fetchall():
                if freed >= over:
                    break
                if self._clock() - used <= self.retention:
                    if self.on_full == "reject":
                        break
                    self.counts["retention_violations"] += 1
                base.execute("DELETE FROM blocks WHERE key = ?", (key,))
                self.counts["removed"] += 1
                freed += length
            if not freed:
                return False
        return True

    def close(self) -> None:
        """Merges what is written and closes the file."""
        with self._trying() as base:
            if base is not None:
                base.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with self._lock:
            self._shut()


def _has(base: sqlite3.Connection, key: bytes) -> bool:
    return base.execute("SELECT 1 FROM blocks WHERE key = ?", (key,)).fetchone() is not None


def _is_passing(error: BaseException) -> bool:
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF in _PASSING
    return isinstance(error, OSError)
