"""Prefill behind a restored prefix: exact with enough tokens again, bounded as the masks have it, no entry written twice."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41 import mhc
from dsv41.block import block, first_mix
from dsv41.cache import init_cache, ring_positions
from dsv41.model import embed, extend, make_tokens, unembed
from dsv41.plan import layer_plans
from dsv41.prefill import Restored, halo_rows, prefill, replay_start
from dsv41.restore import history_at, put_blocks, take_blocks
from dsv41.site import Shared, publish_row, whole_row
from tests.models import PLAIN, VOCAB, close, tiny_config, tiny_params

CONFIG = tiny_config()
WINDOW = CONFIG.sliding_window
FOLD = jnp.arange(VOCAB, dtype=jnp.int32)
CAPACITY, AFTER = 48, 3
CASES = [(kept, kept + more) for kept in (5, 6, 8, 9, 13, 16, 23, 30) for more in (0, 1, 3, 11)]
KEPT, END = (np.asarray(a, np.int32) for a in zip(*CASES, strict=True))
IDS = np.random.default_rng(11).integers(3, VOCAB, (len(CASES), CAPACITY)).astype(np.int32)
START = {exact: np.asarray([replay_start(CONFIG, end, kept, exact) for kept, end in CASES], np.int32) for exact in (True, False)}


@cache
def steppers(rows):
    def fill(params, cache, ids, live, end, restored):
        if rows is None:
            return extend(params, CONFIG, PLAIN, cache, ids, live, FOLD)
        return prefill(params, CONFIG, PLAIN, cache, ids, live, FOLD, end, rows, restored=restored)

    return jax.jit(fill)


def run(state, start, chunk, rows, restored=None):
    """Logits behind each prompt and behind `AFTER` tokens more ``[B, 1 + AFTER, V]``, and the cache behind the prompts."""
    params = tiny_params(CONFIG)
    last = np.zeros((len(CASES), VOCAB), np.float32)
    for offset in range(0, int((END - start).max()), chunk):
        at = start[:, None] + offset + np.arange(chunk)[None]
        live = at < END[:, None]
        ids = np.where(live, np.take_along_axis(IDS, np.minimum(at, CAPACITY - 1), axis=1), 2)
        logits, state = steppers(rows)(params, state, ids, live, END, restored)
        last = np.where(live.any(axis=1)[:, None], np.asarray(logits), last)
    filled, found = state, [last]
    for n in range(AFTER):
        ids = np.take_along_axis(IDS, END[:, None] + n, axis=1)
        logits, state = steppers(None)(params, state, ids, np.ones_like(ids, bool), END, None)
        found.append(np.asarray(logits))
    return np.stack(found, axis=1), filled


def fresh():
    return init_cache(CONFIG, PLAIN, len(CASES), CAPACITY)


@cache
def cold():
    return run(fresh(), np.zeros_like(KEPT), 8, None)


def restored(start):
    """The entries of the kept tokens alone: all else is NaN, or tokens of nobody."""
    state, nan = cold()[1], lambda a: jnp.full_like(a, jnp.nan)
    sources = []
    for source, ratio in zip(state.sources, (2, 1), strict=True):
        own = np.arange(CAPACITY // ratio)[None, :, None] < (KEPT // ratio)[:, None, None]
        only = lambda a, own=own: jnp.where(own, a, jnp.nan)  # noqa: E731
        tails = {name: nan(t) for name in ("tail_value", "tail_score") if (t := getattr(source, name)) is not None}
        sources.append(replace(source, main_kv=only(source.main_kv), index_k=only(source.index_k), **tails))
    rows = zip(IDS.tolist(), start.tolist(), strict=True)
    history = jnp.asarray(np.stack([history_at(ids, at, np.asarray(FOLD), CONFIG) for ids, at in rows]))
    windows = tuple(map(nan, state.windows))
    return replace(state, length=jnp.asarray(start), history=history, windows=windows, sources=tuple(sources))


def behind(exact, chunk, change=lambda state: state):
    start = START[exact]
    state = change(restored(start))
    rows = halo_rows(CONFIG) if exact else WINDOW
    return state, *run(state, start, chunk, rows, Restored(jnp.asarray(KEPT), jnp.asarray(start)))


def entries(state, kept):
    """Entries and keys of a cache, zeros where they are not of ``kept`` tokens of each request."""
    own = lambda a, r: np.where(np.arange(a.shape[1])[None, :, None] < (kept // r)[:, None, None], np.asarray(a), 0)  # noqa: E731
    return [own(a, r) for s, r in zip(state.sources, (2, 1), strict=True) for a in (s.main_kv, s.index_k)]


@pytest.mark.pitfall("C1", "C3", "C8", "C9")
def test_enough_tokens_again_are_exact():
    """Hits of odd and even lengths, of the whole prompt too; float32 sums in another order, as `close` allows."""
    before, logits, after = behind(True, 48)
    close(logits, cold()[0])
    for a, b, c in zip(entries(before, KEPT), entries(after, KEPT), entries(after, END), strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(c).all()
    for a, b in zip(entries(after, END), entries(cold()[1], END), strict=True):
        close(a, b)


def test_one_token_less_is_not(monkeypatch):
    shorter = np.where(START[True] > 0, START[True] + 1, 0).astype(np.int32)
    monkeypatch.setitem(START, True, shorter)
    wrong = np.abs(behind(True, 48)[1] - cold()[0]).max(axis=(1, 2))
    assert (shorter > 0).sum() >= 8 and wrong[shorter > 0].max() > 1e-4 and wrong[shorter == 0].max() < 1e-4


@cache
def masked():
    """The bounded form by masks over whole rows, with kept entries out of the cold run: logits, window rows, entries."""
    start, time = jnp.asarray(START[False]), CAPACITY

    def reference(params, kept, end, start, own):
        segments = (jnp.arange(time)[None] < end[:, None] + AFTER).astype(jnp.int32)
        ids = jnp.asarray(IDS)
        tokens = make_tokens(ids, segments, jnp.zeros(ids.shape, bool), FOLD, CONFIG)
        spread = lambda a: jnp.broadcast_to(a[:, None], ids.shape)  # noqa: E731
        taps, number = {}, 0

        def site(x, params, plan, shared, layout, *rest):
            nonlocal number
            floor = jnp.maximum(end - WINDOW, 0) if plan.half == "decoder" else start
            layout = replace(layout, floor=spread(floor))
            if plan.owns_kv:
                shared = publish_row(x, params, plan, shared, layout, *rest)
                old = (jnp.arange(time // plan.ratio)[None] < (kept // plan.ratio)[:, None])[..., None]
                main, keys = own[number]
                number += 1
                main, keys = jnp.where(old, main, shared.main_kv), jnp.where(old, keys, shared.index_k)
                shared = replace(shared, main_kv=main, index_k=keys)
                sources.append((shared.main_kv, shared.index_k))
            return whole_row(x, params, plan, shared, layout, *rest, publishes=False)

        sources = []
        residual, shared = mhc.Residual(embed(params, ids, CONFIG, PLAIN), first_mix(ids, CONFIG)), Shared()
        for plan, layer in zip(layer_plans(CONFIG), params.layers, strict=True):
            out = block(residual, layer, plan, shared, tokens, CONFIG, PLAIN, taps, site)
            residual, shared = out.residual, out.carried
        logits = unembed(params, mhc.settle(residual, None), residual.pre, CONFIG, None)
        at = end[:, None] - 1 + jnp.arange(AFTER + 1)[None]
        windows = [taps[f"layers.{n}.attn.swa_kv"] for n in range(CONFIG.num_hidden_layers)]
        return jnp.take_along_axis(logits, at[..., None], axis=1), windows, sources

    own = [(s.main_kv, s.index_k) for s in cold()[1].sources]
    return jax.tree.map(np.asarray, jax.jit(reference)(tiny_params(CONFIG), jnp.asarray(KEPT), jnp.asarray(END), start, own))


@pytest.mark.pitfall("C1", "C5", "C6", "C8", "D1")
@pytest.mark.parametrize("chunk", [1, 5])
def test_bounded_equals_the_masks_slot_by_slot_in_any_chunks(chunk):
    before, logits, after = behind(False, chunk)
    want, windows, sources = masked()
    close(logits, want)
    positions = np.asarray(ring_positions(jnp.asarray(END), WINDOW))
    for ring, rows in zip(after.windows, windows, strict=True):
        here = positions[..., None] >= 0
        close(np.where(here, ring, 0), np.where(here, np.take_along_axis(rows, np.maximum(positions, 0)[..., None], axis=1), 0))
    for n, (a, b, c) in enumerate(zip(entries(before, KEPT), entries(after, KEPT), entries(after, END), strict=True)):
        np.testing.assert_array_equal(a, b)
        rows, ratio = sources[n // 2][n % 2], (2, 1)[n // 2]
        close(c, np.where(np.arange(rows.shape[1])[None, :, None] < (END // ratio)[:, None, None], rows, 0))
    assert np.abs(want - cold()[0]).max() > 1e-4, "the bounded form is no approximation here"


@pytest.mark.pitfall("C1")
def test_the_replay_reads_the_kept_entries_and_not_its_own():
    def other(state):
        return replace(state, sources=tuple(replace(s, main_kv=s.main_kv + 0.5) for s in state.sources))

    before, logits, after = behind(False, 5, other)
    assert (np.abs(logits - masked()[0]).max(axis=(1, 2)) > 1e-3).all()
    for a, b in zip(entries(before, KEPT), entries(after, KEPT), strict=True):
        np.testing.assert_array_equal(a, b)


def test_blocks_go_out_and_in():
    state, places = cold()[1], jnp.asarray([7, 0, 12], jnp.int32)
    blocks = take_blocks(state, places, 8, CONFIG)
    assert [a.shape[:2] for pair in blocks for a in pair] == [(3, 4), (3, 4), (3, 8), (3, 8)]
    row, at = divmod(7, CAPACITY // 8)
    np.testing.assert_array_equal(blocks[0][0][0], np.asarray(state.sources[0].main_kv)[row, 4 * at : 4 * at + 4])
    empty = fresh()
    back = put_blocks(empty, jnp.asarray([7, 10**6, 12], jnp.int32), blocks, 8, CONFIG)
    again = take_blocks(back, places, 8, CONFIG)
    for pair, got in zip(blocks, again, strict=True):
        for a, b in zip(pair, got, strict=True):
            np.testing.assert_array_equal(np.asarray(a)[[0, 2]], np.asarray(b)[[0, 2]])
            assert not np.asarray(b)[1].any()
