"""Prefill with the decoder on the last rows alone: exact with a halo, in any chunks the same, bounded as the masks have it."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.compile_time import forty_layers
from dsv41.analyze import counted
from dsv41.cache import init_cache, kernel_arguments
from dsv41.model import extend, features
from dsv41.numerics import PACKED, linear
from dsv41.prefill import decoder_layers, halo_rows, prefill
from tests.models import PLAIN, VOCAB, close, tiny_config, tiny_params

CONFIG = tiny_config()
WINDOW = CONFIG.sliding_window
FOLD = jnp.arange(VOCAB, dtype=jnp.int32)
IDS = np.random.default_rng(7).integers(3, VOCAB, (20, 40)).astype(np.int32)
CAPACITY, AFTER = 40, 3


@cache
def steppers(policy, rows):
    def fill(params, cache, ids, live, end):
        if rows is None:
            return extend(params, CONFIG, policy, cache, ids, live, FOLD)
        return prefill(params, CONFIG, policy, cache, ids, live, FOLD, end, rows)

    return jax.jit(fill), jax.jit(lambda params, cache, ids, live: extend(params, CONFIG, policy, cache, ids, live, FOLD))


def run(lengths, chunk, rows, policy=PLAIN, poison=0.0):
    """Logits behind prompts of ``lengths`` and of `AFTER` tokens more ``[B, 1 + AFTER, V]``, and the cache behind the prompts."""
    params, (fill, step) = tiny_params(CONFIG), steppers(policy, rows)
    state = init_cache(CONFIG, policy, len(lengths), CAPACITY)
    dirty = lambda a: jnp.full_like(a, poison) if jnp.issubdtype(a.dtype, jnp.floating) else a  # noqa: E731
    state = state.replace(windows=jax.tree.map(dirty, state.windows)) if poison else state
    end = np.asarray(lengths, np.int32)
    last = np.zeros((len(lengths), VOCAB), np.float32)
    for start in range(0, max(lengths), chunk):
        live = start + np.arange(chunk)[None] < end[:, None]
        ids = np.where(live, np.pad(IDS[: len(end)], ((0, 0), (0, chunk)))[:, start : start + chunk], 2)
        logits, state = fill(params, state, ids, live, end)
        last = np.where(live.any(axis=1)[:, None], np.asarray(logits), last)
    filled, found = state, [last]
    for n in range(AFTER):
        ids = np.take_along_axis(IDS[: len(end)], end[:, None] + n, axis=1)
        logits, state = step(params, state, ids, np.ones_like(ids, bool))
        found.append(np.asarray(logits))
    return np.stack(found, axis=1), filled


@cache
def full(lengths):
    return run(lengths, 8, None)


LENGTHS = tuple(range(1, 5 * WINDOW + 1))


def test_a_halo_is_exact_at_every_length():
    """float32 sums in another order, as `close` allows; the cache's windows too, the next tokens tell."""
    close(run(LENGTHS, 8, halo_rows(CONFIG))[0], full(LENGTHS)[0])


def test_one_row_less_is_not():
    assert halo_rows(CONFIG) == 1 + 3 * (WINDOW - 1) and decoder_layers(CONFIG) == 3
    wrong = np.abs(run(LENGTHS, 8, halo_rows(CONFIG) - 1)[0] - full(LENGTHS)[0]).max()
    assert wrong > 1e-4 * np.abs(full(LENGTHS)[0]).max()


@cache
def masked(lengths):
    """The same by masks over whole rows: a decoder token from ``end - W`` on sees no window key before that."""
    time = max(lengths) + AFTER
    floor = np.maximum(np.asarray(lengths) - WINDOW, 0)
    replay = jnp.asarray(np.broadcast_to(floor[:, None], (len(lengths), time)), jnp.int32)
    segments = jnp.asarray(np.arange(time)[None] < np.asarray(lengths)[:, None] + AFTER, jnp.int32)
    params, ids = tiny_params(CONFIG), jnp.asarray(IDS[: len(lengths), :time])
    out = jax.jit(partial(features, config=CONFIG, policy=PLAIN))(
        params, ids=ids, segments=segments, token_map=FOLD, replay=replay
    )
    logits = np.asarray(linear(out.hidden, params.head, jnp.float32))
    at = np.asarray(lengths)[:, None] - 1 + np.arange(AFTER + 1)[None]
    return np.take_along_axis(logits, at[..., None], axis=1)


@pytest.mark.parametrize("chunk", [1, 3, 8, 24])
def test_bounded_equals_the_masks_in_any_chunks(chunk):
    """Windows hold NaN at first: what is before the replay's start is never read."""
    close(run(LENGTHS, chunk, WINDOW, poison=float("nan"))[0], masked(LENGTHS))


def test_of_a_short_prompt_nothing_is_left_out():
    close(run(LENGTHS, 8, WINDOW)[0][:WINDOW], full(LENGTHS)[0][:WINDOW])


def test_every_slot_is_the_same_in_any_chunks():
    """Encoder windows, entries and keys are those of the whole prefill; decoder windows those of other chunks, slot by slot."""
    whole, chunked = (run(LENGTHS, chunk, WINDOW)[1] for chunk in (8, 3))
    exact = full(LENGTHS)[1]
    same = lambda a, b: close(a, b) if a.dtype == jnp.float32 else np.testing.assert_array_equal(a, b)  # noqa: E731
    jax.tree.map(same, whole, chunked)
    first = CONFIG.num_hidden_layers - decoder_layers(CONFIG)
    jax.tree.map(
        same, (exact.windows[:first], exact.sources, exact.history), (whole.windows[:first], whole.sources, whole.history)
    )
    assert (np.asarray(exact.windows[-1]) != np.asarray(whole.windows[-1])).any()


def test_kernels_name_no_row_below_the_floor():
    ring, rows = jnp.zeros((1, 4, 33), jnp.uint8), jnp.zeros((1, 3, 33), jnp.uint8)
    q, sink = jnp.zeros((1, 3, 2, 32)), jnp.zeros((2,))
    length, count, floor = jnp.asarray([6]), jnp.asarray([3]), jnp.full((1, 3), 5)
    ids = lambda floor: kernel_arguments(q, ring, ring, rows, length, count, None, None, sink, floor)[4]  # noqa: E731
    # Position 6 in the chunk's first row, 5 in slot 1, 4 in slot 0, 3 in slot 3.
    assert np.asarray(ids(None)).reshape(3, 4).tolist() == [[4, 1, 0, 3], [5, 4, 1, 0], [6, 5, 4, 1]]
    assert np.asarray(ids(floor)).reshape(3, 4).tolist() == [[4, 1, -1, -1], [5, 4, 1, -1], [6, 5, 4, 1]]


def test_a_long_prompt_takes_half_the_work():
    """FLOPs of products, 40-layer plan at toy widths, 16K tokens in chunks of 2,048; decoder keys are more, so 0.30."""
    config, tokens, chunk = forty_layers(), 1 << 14, 1 << 11
    params, state, ids, live, fold = counted.step_arguments(config, chunk, tokens)
    end = jax.ShapeDtypeStruct((1,), jnp.int32)

    macs = lambda run: counted.counted_total(run, params, state, ids, live, fold, end)  # noqa: E731
    replayed = lambda rows: lambda p, c, i, a, f, e: prefill(p, config, PACKED, c, i, a, f, e, rows)  # noqa: E731
    chunks = tokens // chunk
    bounded = (chunks - 1) * macs(replayed(0)) + macs(replayed(config.sliding_window))
    ratio = bounded / (chunks * macs(lambda p, c, i, a, f, e: extend(p, config, PACKED, c, i, a, f)))
    print(f"{ratio:.3f}")
    assert 0.2 < ratio <= 0.53
