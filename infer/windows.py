"""Snapshots of requests in host memory, for minutes: windows, pair tails and the block begun last (serving §4.7).

With one, a request that begins with the same tokens goes on from there to the bit; without one, its windows are computed again.
"""

import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from dsv41.errors import UserError

SECONDS = 300.0
SHARE = 0.10  # of the machine's memory


def machine_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass
class _Entry:
    state: Any
    size: int
    since: float


class WindowPool:
    """Snapshots by the name of their last complete block and the tokens behind it; the least recently used go first.

    capacity: bytes of all, a tenth of the machine's memory where not given. seconds: for which one is kept since it was put or
    last found. clock: seconds. Methods may be called from any thread.
    """

    def __init__(self, capacity: int | None = None, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic):
        self.capacity = int(SHARE * machine_bytes()) if capacity is None else capacity
        if self.capacity < 1 or seconds <= 0:
            raise UserError(f"windows: found {self.capacity} bytes and {seconds} seconds, allowed are more than 0")
        self.seconds, self._clock = seconds, clock
        self._entries: OrderedDict[tuple[bytes, tuple[int, ...]], _Entry] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes of all snapshots."""
        return self._bytes

    def put(self, key: bytes, tail: Sequence[int], state: Any) -> None:
        """Keeps the state behind block ``key`` and the tokens ``tail``; numpy arrays, of which views are copied and others kept.

        The one that is there stays. One larger than all there is room for is dropped.
        """
        size, name = sum(leaf.nbytes for leaf in jax.tree.leaves(state)), (key, tuple(tail))
        with self._lock:
            self._sweep()
            if name in self._entries or size > self.capacity:
                return
            while self._bytes + size > self.capacity:
                self._drop(next(iter(self._entries)), "evicted")
            # A view would keep all that it is a part of.
            state = jax.tree.map(lambda leaf: leaf if leaf.flags.owndata else leaf.copy(), state)
            self._entries[name] = _Entry(state, size, self._clock())
            self._bytes += size

    def find(self, keys: Sequence[bytes], ids: Sequence[int], block: int) -> tuple[int, Any] | None:
        """The longest snapshot that ``ids`` begin with: its tokens and state. keys: from the one before block 0 on."""
        with self._lock:
            self._sweep()
            places = {key: n * block for n, key in enumerate(keys)}
            found = [
                (places[key] + len(tail), key, tail)
                for key, tail in self._entries
                if key in places and tuple(ids[places[key] : places[key] + len(tail)]) == tail
            ]
            if not found:
                return None
            length, *name = max(found, key=lambda one: one[0])
            entry = self._entries[name[0], name[1]]
            entry.since = self._clock()
            self._entries.move_to_end((name[0], name[1]))
            return length, entry.state

    def drop(self, state: Any) -> None:
        """Drops a snapshot that `find` gave."""
        with self._lock:
            for name in [name for name, entry in self._entries.items() if entry.state is state]:
                self._drop(name, "failed")

    def clear(self) -> None:
        """Drops all."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def _sweep(self) -> None:
        """A clock that went back makes none older."""
        now = self._clock()
        while self._entries:
            # Least recently used is longest since used.
            name, entry = next(iter(self._entries.items()))
            if now - entry.since <= self.seconds:
                return
            self._drop(name, "expired")

    def _drop(self, name: tuple[bytes, tuple[int, ...]], why: str) -> None:
        self._bytes -= self._entries.pop(name).size
        self.counts[why] += 1
