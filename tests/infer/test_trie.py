"""The tree of blocks against a plain table of prefixes: longest runs, leaves first, nothing that somebody holds."""

import hypothesis
import hypothesis.strategies as st

from infer.allocator import PageAllocator
from infer.trie import BlockTrie

PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=12)


def names(path):
    return [bytes(path[: n + 1]) for n in range(len(path))]


@hypothesis.given(PATHS, st.lists(st.integers(0, 3), max_size=12), st.integers(0, 11))
def test_pages_are_found_by_the_whole_path_and_leaves_go_first(paths, evictions, held):
    trie, pages, table = BlockTrie(), PageAllocator(60), {}
    for n, path in enumerate(paths):
        keys = names(path)
        known = trie.match(keys)
        assert known == [table[key] for key in keys[: len(known)]]
        assert len(known) == len(path) or keys[len(known)] not in table
        # A request shares what is there and brings the rest.
        pages.share(known)
        own = known + (pages.take(len(path) - len(known)) or [])
        kept = trie.add(keys, own)
        pages.share(kept)
        assert kept == own[len(known) :]
        table.update(zip(keys, own, strict=True))
        if n != held:
            pages.release(own)
        for count in evictions[n : n + 1]:
            idle = lambda page: pages.holders(page) == 1  # noqa: E731
            possible = sum(map(idle, table.values()))
            gone = trie.evict(count, idle)
            assert len(gone) == min(count, possible)
            pages.release(gone)
            table = {key: page for key, page in table.items() if page not in gone}
            # What is left is whole: no block without the one before.
            assert all(key[:-1] in table for key in table if len(key) > 1)
        assert len(trie) == len(table) and len({*table.values()}) == len(table)
    running = len(paths[held]) if held < len(paths) else 0
    assert pages.free == 60 - len({*table.values()}) and running <= len(table) + 5
    pages.release(trie.clear())
    assert len(trie) == 0 and pages.free >= 60 - running


def test_the_least_recently_used_goes_first_and_other_pages_of_known_blocks_are_not_kept():
    trie = BlockTrie()
    assert trie.add(names([1, 2]), [10, 11]) == [10, 11]
    assert trie.add(names([3]), [12]) == [12]
    assert trie.add(names([1, 4]), [20, 13]) == [13]
    assert trie.match(names([1, 2, 9])) == [10, 11]
    free = lambda page: True  # noqa: E731
    assert trie.evict(2, free) == [12, 13] and trie.evict(5, free) == [11, 10]
