"""The drafter: what its stages read and see, whatever the backbone's schedule; and its weights' place in a config."""

from dataclasses import replace as with_changes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.cache import init_cache
from dsv41.dspark import context_rows, draft
from dsv41.model import extend, forward
from dsv41.plan import draft_plans, layer_plans
from tests.models import PLAIN, close, drafting_config, tiny_draft, tiny_params

CONFIG = drafting_config()
FOLD = jnp.arange(CONFIG.vocab_size, dtype=jnp.int32)
IDS = np.random.default_rng(3).integers(3, CONFIG.vocab_size, (2, 16)).astype(np.int32)
LIVE = jnp.ones((2,), bool)


@pytest.fixture(scope="module")
def prefilled():
    """The cache behind 16 tokens in two chunks."""
    params, drafter = tiny_params(CONFIG), tiny_draft(CONFIG)

    @jax.jit
    def run(cache, ids):
        return extend(params, CONFIG, PLAIN, cache, ids, jnp.ones(ids.shape, bool), FOLD, draft=drafter)[1]

    cache = init_cache(CONFIG, PLAIN, 2, 32, drafts=True)
    for cut in (slice(0, 8), slice(8, 16)):
        cache = run(cache, jnp.asarray(IDS[:, cut]))
    return cache


@pytest.mark.pitfall("I6")
def test_rings_hold_rows_of_the_means_that_enter_the_tapped_layers(prefilled):
    """Means of the streams after Engram and before any collapse, of inputs and not of outputs."""
    taps: dict = {}
    params, drafter = tiny_params(CONFIG), tiny_draft(CONFIG)
    out = jax.jit(lambda ids: (forward(params, CONFIG, PLAIN, ids, None, FOLD, taps := {}).draft_input, taps))
    inputs, taps = out(jnp.asarray(IDS))
    for n, layer in enumerate(CONFIG.dspark_target_layer_ids):
        entering = taps[f"layers.{layer}.engram.streams"] if layer < 3 else taps[f"layers.{layer - 1}.streams"]
        close(inputs[..., n * 32 : (n + 1) * 32], entering.mean(axis=2))
    rows = jax.jit(lambda means: context_rows(drafter, CONFIG, PLAIN, means, jnp.broadcast_to(jnp.arange(16), (2, 16))))(inputs)
    for ring, row in zip(prefilled.drafts, rows, strict=True):
        close(ring[:, np.arange(12, 16) % 4], row[:, 12:])


def test_a_block_sees_its_window_and_itself_and_nothing_else(prefilled):
    """Rows of positions 12 to 15, W of them; each slot the slots behind it too; another request's nothing."""
    params, drafter = tiny_params(CONFIG), tiny_draft(CONFIG)
    run = jax.jit(lambda cache, token, drafter, text: draft(drafter, text, CONFIG, PLAIN, cache, token, LIVE))
    cache, token = prefilled, jnp.asarray([5, 9], jnp.int32)
    found = run(cache, token, drafter, params)
    assert found.tokens.shape == (2, 5) and found.logits.shape == (2, 5, CONFIG.vocab_size)
    poisoned = with_changes(cache, windows=jax.tree.map(lambda a: a * jnp.nan, cache.windows))
    np.testing.assert_array_equal(run(poisoned, token, drafter, params).logits, found.logits)
    for slot in range(4):
        moved = with_changes(cache, drafts=tuple(ring.at[0, slot].add(0.5) for ring in cache.drafts))
        other = run(moved, token, drafter, params)
        assert float(jnp.abs(other.logits - found.logits)[0].min(axis=-1).max()) > 0
        np.testing.assert_array_equal(other.logits[1], found.logits[1])
    # Fewer tokens than the window: slots without a row may hold anything.
    few = with_changes(cache, length=jnp.asarray([2, 16], jnp.int32))
    bad = with_changes(few, drafts=tuple(ring.at[0, 2:].set(jnp.nan) for ring in few.drafts))
    np.testing.assert_array_equal(run(bad, token, drafter, params).logits, run(few, token, drafter, params).logits)
    # The first slot sees the noise behind it.
    other = with_changes(params, embed=params.embed.at[CONFIG.dspark_noise_token_id].add(0.5))
    assert float(jnp.abs(run(cache, token, drafter, other).logits - found.logits)[:, 0].max()) > 1e-3
    # The Markov head adds what the token before says; the confidence of a slot reads it too.
    free = with_changes(drafter, markov_head=jnp.zeros_like(drafter.markov_head))
    base = run(cache, token, free, params).logits
    before = jnp.concatenate([token[:, None], found.tokens[:, :-1]], axis=1)
    close(found.logits - base, drafter.markov_embed[before] @ drafter.markov_head.T)


@pytest.mark.pitfall("I4")
def test_stages_are_windows_with_plain_rope_whatever_the_backbone_does():
    for config in (CONFIG, drafting_config(num_hash_layers=2), drafting_config(candidate_source_layer_id=-1)):
        plans = draft_plans(config)
        assert [(p.ratio, p.mode, p.engram, p.routing, p.name) for p in plans] == [
            (0, "swa", None, "score", f"mtp.{n}") for n in range(2)
        ]
        assert len(config.compress_ratios) == len(layer_plans(config)) + len(plans)
        assert [p.layer for p in layer_plans(config) if p.tapped] == list(config.dspark_target_layer_ids)
