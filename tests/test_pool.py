"""Steps over pages: bit for bit those over rows that lie together, whatever the pages and whoever had them before."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41 import attention
from dsv41.cache import init_cache
from dsv41.model import extend
from dsv41.numerics import PACKED
from dsv41.pages import Pages, dense
from dsv41.pool import bind, init_pool, slot_of, unbind, with_slot
from dsv41.prefill import prefill
from tests.models import VOCAB, tiny_config, tiny_params

CONFIG = tiny_config()
FOLD = jnp.arange(VOCAB, dtype=jnp.int32)
SLOTS, PAGE, PER_SLOT = 3, 8, 5
IDS = np.random.default_rng(3).integers(3, VOCAB, (SLOTS, PAGE * PER_SLOT)).astype(np.int32)
LENGTHS = np.asarray([29, 8, 17], np.int32)
CHUNK = 16
DIRT = {"uint8": 255, "float32": np.nan, "int32": 9}


@pytest.mark.pitfall("O2")
def test_pages_give_the_bits_of_rows_that_lie_together():
    """Each prompt filled alone in its slot, the last chunk by the decoder's last rows alone, then steps of all slots.

    The pool holds the bits of NaN at first, and the pages are in no order.
    """
    params, rows, policy = tiny_params(CONFIG), CONFIG.sliding_window, PACKED
    table = 1 + np.random.default_rng(4).permutation(SLOTS * PER_SLOT).reshape(SLOTS, PER_SLOT).astype(np.int32)
    pool = jax.jit(partial(init_pool, CONFIG, policy, SLOTS, 1 + SLOTS * PER_SLOT, PAGE))()
    pool = jax.tree.map(lambda a: jnp.full_like(a, DIRT[a.dtype.name]), pool)

    @jax.jit
    def fill(cache, ids, live, end):
        return prefill(params, CONFIG, policy, cache, ids, live, FOLD, end, rows)

    @jax.jit
    def fill_slot(pool, slot, fresh, table, ids, live, end):
        one = bind(slot_of(pool, slot, fresh), table)
        logits, one = fill(one, ids, live, end)
        return logits, with_slot(pool, slot, unbind(one))

    step = jax.jit(lambda cache, ids, live: extend(params, CONFIG, policy, cache, ids, live, FOLD))

    alone = []
    for slot, end in enumerate(LENGTHS):
        one = init_cache(CONFIG, policy, 1, PAGE * PER_SLOT)
        for at in range(0, end, CHUNK):
            ids, live = IDS[slot : slot + 1, at : at + CHUNK], (np.arange(at, at + CHUNK) < end)[None]
            want, one = fill(one, ids, live, end[None])
            got, pool = fill_slot(pool, np.int32(slot), np.bool(at == 0), table[slot : slot + 1], ids, live, end[None])
            np.testing.assert_array_equal(want, got)
        alone.append(one)
    together = jax.tree.map(lambda *a: jnp.concatenate(a), *alone)
    for n in range(4):
        ids = np.take_along_axis(IDS, LENGTHS[:, None] + n, axis=1)
        live = np.asarray([[True], [n != 1], [True]])
        want, together = step(together, ids, live)
        got, bound = step(bind(pool, jnp.asarray(table)), ids, live)
        pool = unbind(bound)
        np.testing.assert_array_equal(want[live[:, 0]], got[live[:, 0]])
    np.testing.assert_array_equal(together.length, pool.length)
    jax.tree.map(np.testing.assert_array_equal, (together.history, together.windows), (pool.history, pool.windows))
    for own, shared in zip(together.sources, bind(pool, jnp.asarray(table)).sources, strict=True):
        ratio = PAGE * PER_SLOT // own.main_kv.shape[1]
        for a, b in ((own.main_kv, dense(shared.main_kv)), (own.index_k, dense(shared.index_k))):
            for slot, length in enumerate(np.asarray(together.length)):
                written = length // ratio
                np.testing.assert_array_equal(a[slot, :written], b[slot, :written])
                np.testing.assert_array_equal(b[slot, written:], np.full_like(b[slot, written:], DIRT[b.dtype.name]))
    for source in pool.sources:
        np.testing.assert_array_equal(source.main_kv[0], np.full_like(source.main_kv[0], DIRT[source.main_kv.dtype.name]))


def test_places_of_rows():
    pages = Pages(jnp.arange(4 * 2 * 3).reshape(4, 2, 3), jnp.asarray([[3, 1, 0], [2, 0, 0]], jnp.int32))
    assert pages.shape == (2, 6, 3)
    ids = jnp.asarray([[0, 3, 4, 6, -1], [1, 2, -1, 0, 9]], jnp.int32)
    assert pages.places(ids).tolist() == [[6, 3, 8, 8, -1], [5, 8, -1, 4, 8]]
    assert dense(pages)[0, 3].tolist() == pages.take(ids)[0, 1].tolist() == [9, 10, 11]


def test_kernels_get_the_pool_and_row_numbers_in_it():
    pages = Pages(jnp.zeros((4, 2, 18), jnp.uint8), jnp.asarray([[3, 1], [2, 0]], jnp.int32))
    q, ring, sink = jnp.zeros((2, 1, 2, 32)), jnp.zeros((2, 4, 33), jnp.uint8), jnp.zeros((2,))
    ids = jnp.asarray([[[0, 3, -1]], [[1, 0, -1]]], jnp.int32)
    _, pool, numbers, *_ = attention.kernel_arguments(q, pages, ids, ring, jnp.zeros((2, 1, 4), jnp.int32), sink)
    assert pool.shape == (8, 18) and numbers.tolist() == [[6, 3, -1], [5, 4, -1]]
