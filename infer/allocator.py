"""Which pages of a pool are free, and how many hold on to each of the others."""

from collections.abc import Iterable


class PageAllocator:
    """Pages 1 to ``pages`` of a pool, on the host; page 0 is nobody's. A page is free again when its last holder lets go."""

    def __init__(self, pages: int):
        self.pages = pages
        self._free = list(range(pages, 0, -1))
        self._holders = [0] * (pages + 1)

    @property
    def free(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders[page]

    def take(self, count: int) -> list[int] | None:
        """``count`` free pages, each held once; None where there are not so many."""
        if count > self.free:
            return None
        taken = [self._free.pop() for _ in range(count)]
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
                self._free.append(page)
