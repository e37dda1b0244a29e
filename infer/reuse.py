"""What the engine's requests take over from earlier ones, and leave to later ones (serving §4): pages, blocks, windows."""

from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import takewhile

import jax
import numpy as np

from dsv41.restore import Blocks
from infer.allocator import PageAllocator
from infer.device import Device
from infer.prefix import NO_HIT, Hit, PrefixCache
from infer.trie import BlockTrie


@dataclass(eq=False)
class Start:
    """Where a prompt goes on. keys: of its blocks; found: those from number ``ahead`` on, as they are read from the store."""

    keys: list[bytes] = field(default_factory=list)
    ahead: int = 0
    found: Future[list[Blocks]] | None = None
    hit: Hit = NO_HIT
    history: np.ndarray | None = None

    @property
    def reading(self) -> bool:
        """Whether the store has not answered yet."""
        return self.found is not None and not self.found.done()

    def wait(self, seconds: float) -> None:
        """Waits for the store's answer, at most so long."""
        if self.found is not None:
            wait([self.found], seconds)

    def loaded(self) -> list[Blocks]:
        """Blocks from number ``ahead`` on; those that have not come, or failed to, are not waited for."""
        return [] if self.found is None or self.reading or self.found.exception() else self.found.result()


class Reuse:
    """Blocks in pages that stay until they are wanted, in the store and the snapshots of ``prefix``; without it, nothing."""

    def __init__(self, prefix: PrefixCache | None, device: Device, allocator: PageAllocator):
        self._prefix, self._device, self._allocator = prefix, device, allocator
        self._trie = BlockTrie()

    def look_up(self, prompt: list[int]) -> Start:
        """Begins to read what the store has of a prompt beyond the pages that are there."""
        if self._prefix is None:
            return Start()
        keys = self._prefix.keys(prompt)
        ahead = len(self._trie.match(keys))
        return Start(keys, ahead, self._prefix.load_behind(keys, prompt, ahead))

    def held(self, start: Start, shard: int) -> list[int]:
        """Pages in a shard that a prompt begins with."""
        return list(takewhile(lambda page: self._allocator.shard(page) == shard, self._trie.match(start.keys)))

    def adopt(self, start: Start, prompt: list[int], shard: int = 0) -> list[int]:
        """Decides where a prompt goes on in a shard; the pages of others there that it begins with, held for it."""
        if self._prefix is None:
            return []
        shared = self.held(start, shard)
        # Pages may have gone since it came; then what was read has no place to go on from.
        blocks = max(len(shared), start.ahead + len(start.loaded())) if len(shared) >= start.ahead else len(shared)
        start.hit = self._prefix.hit(start.keys, prompt, blocks)
        start.history = self._prefix.history(prompt, start.hit)
        shared = shared[: start.hit.kept // self._prefix.block]
        self._allocator.share(shared)
        return shared

    def begin(self, start: Start, slot: int, pages: list[int], shared: int) -> None:
        """Puts what a prompt begins with, beyond its first ``shared`` pages, into its slot and its other pages."""
        prefix, device, hit = self._prefix, self._device, start.hit
        if prefix is None or not hit.kept:
            return
        whole = hit.kept // prefix.block
        blocks, places = start.loaded()[shared - start.ahead : whole - start.ahead], pages[shared:whole]
        if hit.windows is not None:
            (windows, tails), begun = hit.windows
            # Those behind the token that runs again, as it enters them once more; the row before them is of no open group.
            again = hit.kept - hit.start
            tails = jax.tree.map(lambda tail: np.roll(tail, again, axis=1), tails)
            device.put_windows(slot, (windows, tails))
            if begun is not None:
                blocks, places = [*blocks, begun], [*places, pages[whole]]
        if places:
            device.cache = prefix.mover.put(device.cache, places, blocks)

    def publish(self, start: Start, slot: int, pages: list[int], ids: list[int]) -> bool:
        """Leaves what a slot holds of ``ids``, tokens of a request from its first on, to those that begin so; whether it does."""
        if (prefix := self._prefix) is None:
            return False
        # Behind a stop string a slot may have run on, and its windows with it.
        consumed = self._device.length(slot)
        done = ids[:consumed]
        keys = prefix.keys(done)
        kept = self._trie.add(keys, pages[: len(keys)])
        self._allocator.share(kept)
        first = max(len(keys) - len(kept), start.hit.kept // prefix.block)
        if prefix.store is not None and prefix.store.on:
            prefix.save(keys, done, first, prefix.mover.take(self._device.cache, pages[first : len(keys)]))
        if prefix.windows is not None and consumed <= len(ids):
            begun = pages[len(keys) : len(keys) + 1] if consumed % prefix.block else []
            blocks = prefix.mover.take(self._device.cache, begun)
            prefix.keep_windows(done, (self._device.windows(slot), blocks[0] if blocks else None))
        return True

    def free(self, count: int, shard: int = 0) -> bool:
        """Whether so many pages of a shard are free, need be for giving up blocks that no request holds."""
        pages = self._allocator
        if (lacking := count - pages.free_in(shard)) > 0:
            pages.release(self._trie.evict(lacking, lambda page: pages.holders(page) == 1 and pages.shard(page) == shard))
        return pages.free_in(shard) >= count

    def counts(self) -> dict[str, int]:
        """Of the store, blocks that were damaged and blocks that were not written."""
        counts = self._prefix.store.counts if self._prefix and self._prefix.store else {}
        return {"corrupt_blocks": counts.get("corrupt", 0), "dropped_blocks": counts.get("dropped", 0)}

    def warm_up(self) -> None:
        """Compiles what moves blocks and windows, by moving those of nobody."""
        if (prefix := self._prefix) is not None:
            device = self._device
            device.cache = prefix.mover.put(device.cache, [0], prefix.mover.take(device.cache, [0]))
            device.put_windows(0, device.windows(0))

    def failed(self, start: Start) -> None:
        """Removes what a prompt began with from the store and the snapshots, as its prefill failed."""
        if self._prefix is not None and start.hit.kept:
            self._prefix.drop(start.keys[: start.hit.kept // self._prefix.block], start.hit.windows)

    def forget(self) -> None:
        """Gives up all pages: their rows are lost."""
        self._allocator.release(self._trie.clear())
