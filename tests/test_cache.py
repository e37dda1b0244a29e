"""Every way of filling the cache gives the same model: prefill in any chunks, decode, batches, poison, stored bytes."""

from functools import cache as memoize
from itertools import product

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41 import attention
from dsv41.cache import Cache, cache_bytes, chunk_layout, init_cache, ring_positions
from dsv41.config import preset
from dsv41.errors import UserError
from dsv41.indexer import candidate_entries
from dsv41.model import extend
from dsv41.numerics import PACKED
from dsv41.plan import cache_bytes_per_token, layer_plans
from dsv41.quant import INDEX_KEY, MAIN_KV, WINDOW_KV, fake_quant, pack_rows, quantize, row_values
from dsv41.site import Shared, choose
from kernels_pallas.registry import Choice
from kernels_pallas.sparse_attention import reference
from tests.models import PLAIN, VOCAB, close, jitted, tiny_config, tiny_params

CONFIG = tiny_config()
FOLD = np.arange(VOCAB, dtype=np.int32)
IDS = np.random.default_rng(5).integers(3, VOCAB, (2, 40)).astype(np.int32)
CAPACITY, WIDTH = 48, 12
SHORT = 12


@memoize
def stepper(policy=PLAIN, config=CONFIG):
    """``(params, cache, ids, live) -> (logits of every token, cache, selections and rows before their stored form)``."""

    @jax.jit
    def run(params, cache, ids, live):
        taps: dict = {}
        logits, cache = extend(params, config, policy, cache, ids, live, jnp.asarray(FOLD), taps=taps, every=True)
        wanted = ("topk", "prequant", "hash_ids", "gate", "indexer.q", "indexer.weights")
        return logits, cache, {name: value for name, value in taps.items() if name.endswith(wanted)}

    return run


def padded(ids, width, counts=None, left=False):
    """``ids [B, n]`` in chunks of ``width`` with padding on one side, and which tokens are real."""
    counts = np.full(len(ids), ids.shape[1]) if counts is None else counts
    place = np.arange(width)[None] - (width - counts[:, None] if left else 0)
    live = (place >= 0) & (place < counts[:, None])
    taken = np.take_along_axis(np.pad(ids, ((0, 0), (0, width))), np.where(live, place, 0), axis=1)
    return np.where(live, taken, 2).astype(np.int32), live


def take_chunks(ids, sizes, policy=PLAIN, cache=None, left=False):
    """Feeds each row its own chunk sizes, ``[rows, rounds]``; logits of all tokens, and the cache behind them."""
    sizes = np.asarray(sizes)
    total, width = int(sizes.sum(1).max()), max(int(sizes.max()), 1)
    width = WIDTH if 1 < width <= WIDTH else width
    cache = init_cache(CONFIG, policy, len(ids), CAPACITY) if cache is None else cache
    logits, at = np.full((len(ids), total, VOCAB), np.nan, np.float32), np.zeros(len(ids), int)
    for size in sizes.T:
        rest = np.take_along_axis(np.pad(ids, ((0, 0), (0, width))), at[:, None] + np.arange(width)[None], axis=1)
        chunk, live = padded(rest, width, size, left)
        out, cache, _ = stepper(policy)(tiny_params(CONFIG), cache, chunk, live)
        row, place = live.nonzero()
        first = live.argmax(1)
        logits[row, at[row] + place - first[row]] = np.asarray(out)[row, place]
        at = at + size
    return logits, cache


def whole(ids, policy=PLAIN):
    return jitted(CONFIG, policy)(tiny_params(CONFIG), ids)


def row_of(cache: Cache, n: int):
    return jax.tree.map(lambda a: np.asarray(a)[n], cache)


def same_state(a, b, config=CONFIG):
    for name, (x, y) in zip(
        ("length", "history", *(f"leaf {n}" for n in range(99))),
        zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True),
        strict=False,
    ):
        if np.asarray(x).dtype == np.float32:
            close(x, y)
        else:
            np.testing.assert_array_equal(x, y, err_msg=name)


def chunkings(n):
    """Every way to cut ``n`` tokens, one row each, padded with empty chunks."""
    rows = []
    for cuts in product((False, True), repeat=n - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), n]
        sizes = np.diff(edges)
        rows.append(np.pad(sizes, (0, n - len(sizes))))
    return np.stack(rows)


@pytest.mark.pitfall("A1", "A8", "A9", "D1")
def test_every_chunking_of_ten_tokens_equals_one_shot():
    """All 512 cuts, prefill(n) + decode(m) among them, as rows of one batch; cache leaves included.

    Ten tokens go around the window of 4 twice; selections of 4 bind at both ratios, and so does the pool of 6.
    """
    sizes = chunkings(10)
    ids = np.broadcast_to(IDS[:1, :10], (len(sizes), 10))
    logits, cache = take_chunks(ids, sizes)
    close(logits, np.broadcast_to(whole(IDS[:1, :10])["logits"], logits.shape))
    _, once = take_chunks(IDS[:1, :10], [[10]])
    same_state(cache, jax.tree.map(lambda a: np.broadcast_to(a, (len(sizes), *a.shape[1:])), once))


@pytest.mark.pitfall("A8", "J7")
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 16, 37])
def test_beyond_the_windows(size):
    """37 tokens, nine windows of 4, against the full forward pass: the error does not grow with the position."""
    sizes = [[size] * (37 // size) + [37 % size]] * 2
    logits, _ = take_chunks(IDS[:, :37], sizes)
    want = whole(IDS[:, :37])["logits"]
    close(logits, want)
    error = np.abs(logits - want).max(axis=(0, 2))
    assert error[-8:].max() <= 2e-5 * np.abs(want).max()


@pytest.mark.pitfall("O1", "A4")
@pytest.mark.parametrize("left", [False, True])
def test_a_batch_equals_its_rows_alone(left):
    """Rows of different lengths, in any order, with their padding on either side."""
    lengths = [3, 11, 8, 1, 12, 6]
    ids = np.random.default_rng(9).integers(3, VOCAB, (6, 12)).astype(np.int32)
    sizes = [[n // 2, n - n // 2] for n in lengths]
    logits, cache = take_chunks(ids, sizes, left=left)
    order = [4, 0, 5, 2, 1, 3]
    turned, turned_cache = take_chunks(ids[order], np.asarray(sizes)[order], left=left)
    for place, n in enumerate(order):
        np.testing.assert_array_equal(turned[place], logits[n])
        same_state(row_of(turned_cache, place), row_of(cache, n))
    for n, length in enumerate(lengths):
        alone, alone_cache = take_chunks(ids[n : n + 1], [sizes[n]])
        close(alone[0, :length], logits[n, :length])
        same_state(row_of(alone_cache, 0), row_of(cache, n))


@pytest.mark.pitfall("A9")
def test_a_chunk_completes_only_its_own_groups():
    """Tokens 5..7 behind 0..4: groups (4, 5) and (6, 7), rotated at positions 4 and 6."""
    params = tiny_params(CONFIG)
    _, before = take_chunks(IDS, [[5]] * 2)
    chunk, live = padded(IDS[:, 5:8], WIDTH)
    _, after, taps = stepper()(params, before, chunk, live)
    want = whole(IDS[:, :8])
    for name in ("attn.main_kv_prequant", "indexer.k_prequant"):
        close(taps[f"layers.1.{name}"][:, :2], want[f"layers.1.{name}"][:, 2:4])
    old, new = np.asarray(before.sources[0].main_kv), np.asarray(after.sources[0].main_kv)
    changed = (old != new).any((0, 2))
    assert changed.nonzero()[0].tolist() == [2, 3]


@pytest.mark.pitfall("A3", "D1")
def test_a_prompt_shorter_than_the_window_makes_groups_and_reads_engram():
    ids = IDS[:, :3]
    params, cache = tiny_params(CONFIG), init_cache(CONFIG, PLAIN, 2, CAPACITY)
    chunk, live = padded(ids, WIDTH)
    _, cache, taps = stepper()(params, cache, chunk, live)
    rows = np.asarray(cache.sources[0].main_kv)
    assert (rows != 0).any((0, 2)).nonzero()[0].tolist() == [0]
    assert (np.asarray(taps["layers.1.engram.gate"])[:, :3] > 0).all()
    np.testing.assert_array_equal(taps["layers.1.engram.hash_ids"][:, :3], whole(ids)["layers.1.engram.hash_ids"])


def best_key(taps, token):
    """An index key that layer 3's query of ``token`` scores far above ordinary ones, per row ``[B, KI]``."""
    q, weights = (np.asarray(taps[f"layers.3.indexer.{name}"])[:, token] for name in ("q", "weights"))
    scores = np.einsum("bhj,bh->bj", np.maximum(np.einsum("bhk,bjk->bhj", q, q), 0), weights)
    return 1e3 * q[np.arange(len(q)), scores.argmax(1)]


@pytest.mark.pitfall("A6")
def test_what_an_early_chunk_stored_is_found_from_the_last():
    """Three chunks of eight and a decode step; entries 0 and 1 get the keys that the last two queries score best."""
    want = whole(IDS[:, :25])
    _, cache = take_chunks(IDS, [[8, 8]] * 2)
    keys = cache.sources[1].index_k
    for entry, token in enumerate((23, 24)):
        keys = keys.at[:, entry].set(best_key(want, token))
    cache = cache.replace(sources=(cache.sources[0], cache.sources[1].replace(index_k=keys)))
    for entry, (begin, end) in enumerate(((16, 24), (24, 25))):
        chunk, live = padded(IDS[:, begin:end], WIDTH if end - begin > 1 else 1)
        _, cache, taps = stepper()(tiny_params(CONFIG), cache, chunk, live)
        last = np.asarray(taps["layers.3.indexer.topk"])[:, end - begin - 1]
        assert (last == entry).any(axis=1).all()
    stored = [(np.asarray(s.main_kv) != 0).any(-1).sum(1).tolist() for s in cache.sources]
    assert stored == [(np.asarray(s.index_k) != 0).any(-1).sum(1).tolist() for s in cache.sources] == [[12, 12], [25, 25]]


@pytest.mark.pitfall("B7", "L5")
@pytest.mark.parametrize("policy", [PLAIN, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("time", [1, 5])
def test_keys_of_the_pool_alone_give_the_selection_of_all_keys(policy, time):
    """Equal keys in two blocks make ties; an entry outside the pool, or not visible yet, may hold anything."""
    plans, params = layer_plans(CONFIG), tiny_params(CONFIG)
    rng = np.random.default_rng(time)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    length = jnp.array([17, 2], jnp.int32)
    layout = chunk_layout(length, jnp.array([time, max(time - 1, 1)], jnp.int32), time, None)
    x, latent, values = draw(2, time, CONFIG.hidden_size), draw(2, time, CONFIG.q_lora_rank), draw(2, 24, CONFIG.index_head_dim)
    values = values.at[:, 8:10].set(values[:, 4:6])
    dead = 0x7F if policy is PACKED else jnp.nan
    keys = pack_rows(values, INDEX_KEY) if policy is PACKED else values
    keys = jnp.where((jnp.arange(24)[None] >= (length + time)[:, None])[..., None], jnp.asarray(dead, keys.dtype), keys)
    publisher, consumer = (next(p for p in plans if p.pool == role) for role in ("publishes", "consumes"))
    shared = Shared(index_k=keys)
    shared, _ = choose(x, latent, params.layers[publisher.layer].attn, publisher, shared, layout, CONFIG, policy, None)
    kept = candidate_entries(shared.pool, CONFIG.candidate_block_size)
    assert (np.asarray(kept).max(-1) < np.asarray(layout.positions + 2)).all() and shared.pool.shape[-1] == 3
    arguments = x, latent, params.layers[consumer.layer].attn, consumer
    (all_keys, scores), (pooled, again) = (
        choose(*arguments, shared, layout, CONFIG, policy, None, gather=gather) for gather in (False, True)
    )
    np.testing.assert_array_equal(all_keys.ids, pooled.ids)
    some = np.asarray(pooled.ids) >= 0
    assert some.any(-1)[0].all()
    # float32 sums of 16 and of 4 products in another order: 1e-5 of scores of order one.
    np.testing.assert_allclose(np.where(some, again, 0), np.where(some, scores, 0), rtol=0, atol=1e-5)


def poisoned(cache: Cache, value: float) -> Cache:
    """The cache with everything that no query may reach set to ``value``."""
    length = np.asarray(cache.length)
    window, plans = CONFIG.sliding_window, [p for p in layer_plans(CONFIG) if p.owns_kv]
    # The oldest of W rows is one step too old for the next query.
    positions = np.asarray(ring_positions(cache.length, window))
    gone = (positions < 0) | (positions <= length[:, None] - window)
    windows = tuple(jnp.where(gone[..., None], value, ring) for ring in cache.windows)
    sources = []
    for plan, source in zip(plans, cache.sources, strict=True):
        beyond = np.arange(source.main_kv.shape[1])[None] >= length[:, None] // plan.ratio
        dead = lambda a, mask=beyond: jnp.where(mask[..., None], value, a)  # noqa: E731
        source = source.replace(main_kv=dead(source.main_kv), index_k=dead(source.index_k))
        if source.tail_value is not None:
            idle = (length % plan.ratio == 0)[:, None]
            source = source.replace(tail_value=dead(source.tail_value, idle), tail_score=dead(source.tail_score, idle))
        sources.append(source)
    return cache.replace(windows=windows, sources=tuple(sources))


@pytest.mark.pitfall("B2", "L1", "L2")
@pytest.mark.parametrize("value", [np.nan, 1e4])
def test_slots_that_no_query_reaches_may_hold_anything(value):
    """At every length from 0, odd and even, for one token and for a chunk."""
    params, lengths = tiny_params(CONFIG), np.arange(14)
    ids = np.broadcast_to(IDS[:1], (len(lengths), 40))
    _, cache = take_chunks(ids, lengths[:, None])
    bad = poisoned(cache, value)
    for width, n in ((1, 1), (WIDTH, 7)):
        chunk, live = padded(np.stack([row[length : length + n] for row, length in zip(ids, lengths, strict=True)]), width)
        clean, after, _ = stepper()(params, cache, chunk, live)
        out, poisoned_after, _ = stepper()(params, bad, chunk, live)
        np.testing.assert_array_equal(np.asarray(out)[live], np.asarray(clean)[live])
        same_state(poisoned(poisoned_after, 0.0), poisoned(after, 0.0))


def test_the_kernels_arguments_describe_the_same_attention(monkeypatch):
    """Packed rows by number in the batch's pools, at every length, for one token and for padded chunks, against `attend`.

    The reference of the kernel stands in for it; both sum in float32, in another order: 2e-5 of the largest logit.
    """
    params, lengths = tiny_params(CONFIG), np.arange(14)
    ids = np.broadcast_to(IDS[:1], (len(lengths), 40))
    _, cache = take_chunks(ids, lengths[:, None], PACKED)
    called = []

    def stand_in(*args):
        called.append(args[0].shape)
        return reference.run(*args)

    def chosen(op, impl, *args, **options):
        return Choice(op, "gpu" if op == "sparse_attention" else "reference", {})

    monkeypatch.setattr("dsv41.cache.registry.choose", chosen)
    monkeypatch.setattr("dsv41.cache.sparse_attention", stand_in)
    run = stepper.__wrapped__(PACKED)
    for width, n in ((1, 1), (WIDTH, 7)):
        chunk, live = padded(np.stack([row[length : length + n] for row, length in zip(ids, lengths, strict=True)]), width)
        want, want_after, want_taps = stepper(PACKED)(params, cache, chunk, live)
        out, after, taps = run(params, cache, chunk, live)
        moved = [k for k in taps if k.endswith("topk") and not np.array_equal(taps[k], want_taps[k])]
        assert not moved
        close(np.asarray(out)[live], np.asarray(want)[live])
        assert [a.shape for a in jax.tree.leaves(after)] == [a.shape for a in jax.tree.leaves(want_after)]
    assert {shape[0] for shape in called} == {len(lengths), len(lengths) * WIDTH}


def robust(x, fmt):
    """Which elements of ``[..., n]`` are further than 1e-5 from a rounding midpoint, their group's scale included."""
    codes, scales = (np.asarray(a) for a in quantize(jnp.asarray(x), fmt))
    same = np.ones(x.shape, bool)
    for sign in (-1, 1):
        for relative in (False, True):
            moved = x * (1 + sign * 1e-5) if relative else x + sign * 1e-5 * np.abs(x).max()
            c, s = (np.asarray(a) for a in quantize(jnp.asarray(moved, jnp.float32), fmt))
            same &= (c == codes) & np.repeat(s == scales, fmt.group, axis=-1)
    return same


def test_with_the_quantisers_on_the_stored_codes_are_those_of_one_shot():
    sizes = chunkings(SHORT)[::64]
    ids = np.random.default_rng(3).integers(3, VOCAB, (len(sizes), SHORT)).astype(np.int32)
    logits, cache = take_chunks(ids, sizes, PACKED)
    once_logits, _ = take_chunks(ids, [[SHORT]] * len(ids), PACKED)
    want = whole(ids, PACKED)
    # A code that moved at a midpoint is at most one part in seven of a value, in one channel of one row.
    for got in (logits, once_logits):
        np.testing.assert_allclose(got, want["logits"], rtol=0, atol=5e-3 * np.abs(want["logits"]).max())
    for source, layer, ratio in zip(cache.sources, (1, 3), (2, 1), strict=True):
        for field, name, fmt in (("main_kv", "attn.main_kv", MAIN_KV), ("index_k", "indexer.k", INDEX_KEY)):
            x = want[f"layers.{layer}.{name}_prequant"]
            got = np.asarray(getattr(source, field))[:, : SHORT // ratio]
            assert got.dtype == np.uint8
            assert got.shape[-1] == fmt.row_bytes(x.shape[-1])
            stored = np.asarray(row_values(jnp.asarray(got), fmt, jnp.float32))
            full = want[f"layers.{layer}.{name}"]
            sure = robust(x, fmt)
            assert sure.mean() > 0.98
            np.testing.assert_array_equal(stored[sure], full[sure])


@pytest.mark.pitfall("F6")
@given(st.sampled_from([MAIN_KV, WINDOW_KV, INDEX_KEY]), st.sampled_from(["float32", "bfloat16"]), st.integers(0, 2**32 - 1))
def test_stored_bytes_give_back_the_fake_quantised_values(fmt, dtype, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((3, 5, 64)) * 10.0 ** rng.integers(-8, 5, (3, 5, 1))
    x[rng.random(x.shape) < 0.1] = 0
    x = jnp.asarray(x, dtype)
    rows = pack_rows(x, fmt)
    assert rows.shape == (3, 5, fmt.row_bytes(64))
    a, b = np.asarray(row_values(rows, fmt, x.dtype)), np.asarray(fake_quant(x, fmt))
    np.testing.assert_array_equal(a, b)


@pytest.mark.pitfall("M7")
def test_890_bytes_a_token_and_a_window_that_does_not_grow():
    config = preset("flash")
    sizes = {n: jax.eval_shape(lambda n=n: init_cache(config, PACKED, 1, n)) for n in (1024, 2048, 1 << 20)}
    total = {n: cache_bytes(cache) for n, cache in sizes.items()}
    assert (total[2048] - total[1024]) / 1024 == 890 == cache_bytes_per_token(config)
    assert (total[1 << 20] - total[1024]) / ((1 << 20) - 1024) == 890
    windows = [cache_bytes(cache.windows) for cache in sizes.values()]
    assert windows == [40 * 128 * 528] * 3
    tails = [cache_bytes([(s.tail_value, s.tail_score) for s in cache.sources]) for cache in sizes.values()]
    assert tails == [3 * 4096] * 3
    rows = {leaf.shape[-1] for source in sizes[1024].sources for leaf in (source.main_kv, source.index_k)}
    assert rows == {288, 68}


@pytest.mark.pitfall("B12")
def test_temporary_memory_of_a_step_is_linear_in_the_capacity():
    config = tiny_config(
        num_hidden_layers=3,
        compress_ratios=(0, 1, 1),
        kv_source_layer_ids=(1,),
        index_source_layer_ids=(1, 2),
        candidate_source_layer_id=1,
        dspark_target_layer_ids=(0, 1, 2),
    )
    params, fold = jax.eval_shape(lambda: tiny_params(config)), jnp.asarray(FOLD)
    run = jax.jit(lambda p, c, i: extend(p, config, PLAIN, c, i, i >= 0, fold), donate_argnums=1)

    def temporary(capacity):
        cache = jax.eval_shape(lambda: init_cache(config, PLAIN, 1, capacity))
        return run.lower(params, cache, jnp.zeros((1, 8), jnp.int32)).compile().memory_analysis().temp_size_in_bytes

    small, middle, large = (temporary(n) for n in (2048, 4096, 8192))
    assert large - middle <= 2.2 * (middle - small) + 1e5


@pytest.mark.pitfall("B14", "B6")
def test_attention_with_no_selected_entry_is_that_of_the_window():
    rng = np.random.default_rng(2)
    q, rows, entries = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((1, 5, 2, 32), (1, 5, 32), (1, 9, 32)))
    count = jnp.asarray([5], jnp.int32)
    layout = chunk_layout(jnp.zeros_like(count), count, 5, None)
    sink = jnp.zeros((2,), jnp.float32)
    for gather in (False, True):
        none = attention.attend(q, rows, entries * jnp.nan, jnp.full((1, 5, 4), -1, jnp.int32), sink, layout, 4, None, gather)[0]
        close(none, attention.attend(q, rows, None, None, sink, layout, 4)[0])
        some = jnp.full((1, 5, 4), -1, jnp.int32).at[:, :, 2:].set(jnp.asarray([3, 5], jnp.int32))
        front = jnp.full((1, 5, 4), -1, jnp.int32).at[:, :, :2].set(jnp.asarray([3, 5], jnp.int32))
        results = [attention.attend(q, rows, entries, ids, sink, layout, 4, None, gather)[0] for ids in (some, front)]
        close(*results)
    dead = chunk_layout(jnp.zeros_like(count), jnp.zeros_like(count), 5, None)
    nothing = attention.attend(q, rows, entries, jnp.full((1, 5, 4), -1, jnp.int32), sink, dead, 4)[0]
    assert not np.asarray(nothing).any()


@pytest.mark.pitfall("B15")
def test_reuse_layers_read_the_latest_index_source():
    """Full (1), Reuse (2), Full (3), Reuse (4), Reindex (5), Reuse (6)."""
    config = tiny_config(num_hidden_layers=7, compress_ratios=(0, 2, 2, 1, 1, 1, 1), dspark_target_layer_ids=(4, 5, 6))
    readers = {p.layer: p.index_source for p in layer_plans(config) if p.mode == "reuse"}
    assert readers == {2: 1, 4: 3, 6: 5}
    params = tiny_params(config)
    base = jitted(config)(params, IDS[:, :16])
    layers = list(params.layers)
    indexer = layers[5].attn.indexer
    blind = indexer.replace(wq_b=jnp.zeros_like(indexer.wq_b))
    layers[5] = layers[5].replace(attn=layers[5].attn.replace(indexer=blind))
    other = jitted(config)(params.replace(layers=tuple(layers)), IDS[:, :16])
    assert (base["layers.5.indexer.topk"] != other["layers.5.indexer.topk"]).any()
    for layer in range(7):
        same = np.array_equal(base[f"layers.{layer}.attn.out"], other[f"layers.{layer}.attn.out"])
        assert same == (layer < 5)


@pytest.mark.pitfall("B8", "B16", "O2")
def test_requests_taken_in_turns_do_not_meet():
    """A, B, A again: the same bits, and two requests stepped in turns as alone."""
    first, again = (take_chunks(IDS, [[5, 1, 6]] * 2) for _ in range(2))
    np.testing.assert_array_equal(first[0], again[0])
    same_state(first[1], again[1])
    caches = [init_cache(CONFIG, PLAIN, 1, CAPACITY)] * 2
    for at in range(0, 12, 3):
        for n in range(2):
            _, caches[n] = take_chunks(IDS[n : n + 1, at : at + 3], [[3]], cache=caches[n])
    for n in range(2):
        same_state(row_of(caches[n], 0), row_of(take_chunks(IDS[n : n + 1, :12], [[12]])[1], 0))


def test_the_state_of_a_row_without_new_tokens_stays():
    _, cache = take_chunks(IDS, [[5], [7]])
    chunk, live = padded(IDS[:, 5:9], WIDTH, np.array([4, 0]))
    _, after, _ = stepper()(tiny_params(CONFIG), cache, chunk, live)
    chex.assert_trees_all_equal(row_of(cache, 1), row_of(after, 1))


def test_impossible_capacities():
    for capacity in (0, -2, 7):
        with pytest.raises(UserError, match="capacity"):
            init_cache(CONFIG, PLAIN, 1, capacity)
