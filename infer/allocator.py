"""Which pages of a pool are free, and how many hold on to each of the others."""

from collections.abc import Iterable


class PageAllocator:
    """The pages of a pool, on the host, in equal shards; a page is free again when its last holder lets go.

    Numbers of pages count through the shards, each of which has a first page that is nobody's: page 0, and of n pages a shard
    also n + 1 and so on. pages: of all shards, the others not counted.
    """

    def __init__(self, pages: int, shards: int = 1):
        self.pages, self.shards = pages, shards
        self._size = 1 + pages // shards
        self._free = [list(range(first + self._size - 1, first, -1)) for first in range(0, shards * self._size, self._size)]
        self._holders = [0] * (shards * self._size)

    @property
    def most(self) -> int:
        """Pages of one shard, held or not."""
        return self._size - 1

    @property
    def free(self) -> int:
        """How many pages nobody holds."""
        return sum(map(len, self._free))

    def free_in(self, shard: int) -> int:
        """How many of them are in a shard."""
        return len(self._free[shard])

    def shard(self, page: int) -> int:
        """Where a page is."""
        return page // self._size

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders[page]

    def take(self, count: int, shard: int = 0) -> list[int] | None:
        """``count`` free pages of a shard, each held once; None where there are not so many."""
        if count > self.free_in(shard):
            return None
        taken = [self._free[shard].pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holder of each page; raises `ValueError` for one that nobody holds."""
        pages = list(pages)
        for page in pages:
            if page < 1 or not self._holders[page]:
                raise ValueError(f"page: found {page}, which nobody holds, allowed is one that somebody holds")
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less of each page; raises `ValueError` for one that nobody holds."""
        for page in pages:
            if page < 1 or not self._holders[page]:
                raise ValueError(f"page: found {page}, which nobody holds, allowed is one that somebody holds")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free[self.shard(page)].append(page)
