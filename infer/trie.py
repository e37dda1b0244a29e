"""Which pages of a pool hold which block of tokens: a tree of chained names, whose leaves go first when pages are wanted."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Node:
    key: bytes
    page: int
    parent: "_Node | None"
    children: dict[bytes, "_Node"] = field(default_factory=dict)
    used: int = 0


class BlockTrie:
    """Pages by the names of their blocks (`infer.payload.BlockFormat.keys`); a name tells all blocks before its own.

    The tree counts no holders: who shares pages does (`infer.allocator.PageAllocator`), the tree being one of them.
    """

    def __init__(self):
        self._root = _Node(b"", 0, None)
        self._nodes: dict[bytes, _Node] = {}
        self._turn = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest run of blocks from the first on; they count as used now."""
        pages, node = [], self._root
        self._turn += 1
        for key in keys:
            if key not in node.children:
                break
            node = node.children[key]
            node.used = self._turn
            pages.append(node.page)
        return pages

    def add(self, keys: Sequence[bytes], pages: Sequence[int]) -> list[int]:
        """Names the pages of a request's first blocks; those of them that the tree keeps: it has others of known blocks."""
        kept, node = [], self._root
        self._turn += 1
        for key, page in zip(keys, pages, strict=True):
            if key not in node.children:
                self._nodes[key] = node.children[key] = _Node(key, page, node)
                kept.append(page)
            node = node.children[key]
            node.used = self._turn
        return kept

    def evict(self, count: int, idle: Callable[[int], bool]) -> list[int]:
        """Forgets up to ``count`` blocks that none follows and whose page is ``idle``, the least recently used first."""
        leaves = [(node.used, n, node) for n, node in enumerate(self._nodes.values()) if not node.children and idle(node.page)]
        heapq.heapify(leaves)
        pages, number = [], len(self._nodes)
        while leaves and len(pages) < count:
            node = heapq.heappop(leaves)[2]
            parent = node.parent
            assert parent is not None
            del parent.children[node.key], self._nodes[node.key]
            pages.append(node.page)
            if parent is not self._root and not parent.children and idle(parent.page):
                heapq.heappush(leaves, (parent.used, number, parent))
                number += 1
        return pages

    def clear(self) -> list[int]:
        """Forgets all; the pages that were kept."""
        pages = [node.page for node in self._nodes.values()]
        self._root.children.clear()
        self._nodes.clear()
        return pages
