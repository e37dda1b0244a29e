"""The drafter: what its stages read and see, whatever the backbone's schedule; and its weights' place in a config."""

from dataclasses import replace as with_changes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.cache import init_cache
from dsv41.dspark import context_rows, draft
from dsv41.model import extend, features
from dsv41.plan import draft_plans, layer_plans
from tests.models import PLAIN, close, drafting_config, tiny_draft, tiny_params
from train.data import to_batch
from train.drafter import Blocks, blocks, draft_loss
from train.packing import Packed

CONFIG = drafting_config()
FOLD = jnp.arange(CONFIG.vocab_size, dtype=jnp.int32)
LONG = np.random.default_rng(3).integers(3, CONFIG.vocab_size, (2, 24)).astype(np.int32)
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
        cache = run(cache, jnp.asarray(LONG[:, cut]))
    return cache


@pytest.mark.pitfall("I6", "I11")
def test_training_sees_what_inference_sees(prefilled):
    """Rings hold rows of the means that enter the tapped layers, after Engram and before any collapse, of inputs not of outputs.

    A block at token 16 of a row, and of a document that begins later in its row, is what is drafted behind 16 tokens in a cache,
    where the Markov head is told the same tokens. Nothing of its loss reaches the backbone.
    """
    params, drafter = tiny_params(CONFIG), tiny_draft(CONFIG)
    ids, segments = np.zeros((2, 28), np.int32), np.zeros((2, 28), np.int32)
    ids[0, :24], segments[0, :24] = LONG[0], 1
    ids[1, :4], segments[1, :4] = LONG[0, 3:7], 1
    ids[1, 4:], segments[1, 4:] = LONG[1], 2
    batch = jax.tree.map(jnp.asarray, to_batch(Packed(ids, segments)))
    anchors, live = jnp.asarray([[16, 1], [20, 27]], jnp.int32), jnp.asarray([[True, True], [True, False]])

    def run(params, drafter):
        taps: dict = {}
        out = features(params, CONFIG, PLAIN, jnp.asarray(ids), jnp.asarray(segments), FOLD, taps)
        found = blocks(drafter, params, CONFIG, PLAIN, batch, out, anchors, live)
        return draft_loss(found)[0], (found, out.draft_input, taps)

    both = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True, allow_int=True))
    (_, (found, inputs, taps)), (backbone, own) = both(params, drafter)
    moved = [leaf for leaf in jax.tree.leaves(backbone) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert moved and all(not np.asarray(leaf).any() for leaf in moved)
    assert all(np.asarray(leaf).any() for leaf in (own.main_proj, own.stages[0].attn.wkv, own.markov_embed, own.confidence))

    for n, layer in enumerate(CONFIG.dspark_target_layer_ids):
        entering = taps[f"layers.{layer}.engram.streams"] if layer < 3 else taps[f"layers.{layer - 1}.streams"]
        close(inputs[..., n * 32 : (n + 1) * 32], entering.mean(axis=2))
    rows = jax.jit(lambda means: context_rows(drafter, CONFIG, PLAIN, means, jnp.broadcast_to(jnp.arange(28), (2, 28))))(inputs)
    for ring, row in zip(prefilled.drafts, rows, strict=True):
        close(ring[0, np.arange(12, 16) % 4], row[0, 12:16])

    token, told = jnp.asarray(LONG[:, 16]), jnp.asarray(LONG[:, 17:22])
    given = jax.jit(lambda cache: draft(drafter, params, CONFIG, PLAIN, cache, token, LIVE, lambda k, _: told[:, k]))(prefilled)
    for n, block in enumerate((0, 2)):
        close(given.logits[n], found.logits[block])
        close(given.confidence[n], found.confidence[block])
        np.testing.assert_array_equal(found.labels[block], told[n])
    assert found.counts.sum(axis=1).tolist() == [5, 5, 5, 0]


def test_the_loss_is_the_papers():
    """float64 by hand: slot weights of exp(-k / 5), what comes behind an unsupervised slot does not count."""
    rng = np.random.default_rng(4)
    mine, theirs = rng.standard_normal((2, 3, 5, 7))
    confidence, labels = rng.standard_normal((3, 5)), rng.integers(0, 7, (3, 5))
    counts = np.asarray([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], np.float64)
    p, q = (np.exp(a) / np.exp(a).sum(-1, keepdims=True) for a in (mine, theirs))
    far = np.abs(p - q).sum(-1)
    chance = 1 / (1 + np.exp(-confidence))
    truth = 1 - far / 2
    terms = 0.1 * -np.log(np.take_along_axis(p, labels[..., None], -1)[..., 0]) + 0.9 * far
    terms -= truth * np.log(chance) + (1 - truth) * np.log(1 - chance)
    weights = np.exp(-np.arange(5) / 5) * counts
    f32 = lambda a: jnp.asarray(a, jnp.float32)  # noqa: E731
    found = Blocks(f32(mine), f32(confidence), f32(theirs), jnp.asarray(labels, jnp.int32), f32(counts), f32(np.zeros((1, 2))))
    loss, metrics = draft_loss(found)
    # float32 sums of 15 terms of order 1: 1e-6, headroom 10.
    assert abs(float(loss) - (weights * terms).sum() / weights.sum()) < 1e-5
    assert abs(float(metrics["accepted"]) - (1 + np.cumprod(truth[0]).sum())) < 1e-5
    assert abs(float(metrics["accept.2"]) - truth[:2, 1].mean()) < 1e-5
    agree = (mine.argmax(-1) == theirs.argmax(-1))[0]
    assert abs(float(metrics["greedy_accepted"]) - (1 + np.cumprod(agree).sum())) < 1e-5


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
