"""What must hold whatever the weights: causality, batch, padding and packing invariance, poison, shared gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.model import forward
from dsv41.numerics import Policy
from tests.models import VOCAB, close, jitted, tiny_config, tiny_params

CONFIG = tiny_config()
RNG = np.random.default_rng(7)
IDS = RNG.integers(3, VOCAB, (2, 40))


def run(ids, segments=None, image=None, params=None):
    return jitted(CONFIG)(tiny_params(CONFIG) if params is None else params, ids, segments, image)


@pytest.mark.pitfall("B1", "B2")
def test_later_tokens_change_nothing_before_them():
    base = run(IDS)
    for t in (0, 1, 2, 3, 7, 8, 15, 22, 31):
        changed = IDS.copy()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + 11) % VOCAB
        other = run(changed)
        close(other["logits"][:, : t + 1], base["logits"][:, : t + 1])
        for layer in (1, 3, 5):
            np.testing.assert_array_equal(
                other[f"layers.{layer}.indexer.topk"][:, : t + 1], base[f"layers.{layer}.indexer.topk"][:, : t + 1]
            )
        visible = np.tril(np.ones((t + 1, t + 1), bool))
        for taps in (other, base):
            taps["pool"] = taps["layers.3.indexer.candidates"][:, : t + 1, : t + 1] & visible
        np.testing.assert_array_equal(other["pool"], base["pool"])
        close(other["layers.1.attn.main_kv"][:, : (t + 1) // 2], base["layers.1.attn.main_kv"][:, : (t + 1) // 2])


@pytest.mark.pitfall("B1")
def test_pool_binds_and_selection_keeps_its_contract():
    taps = run(IDS)
    candidates, scores = taps["layers.3.indexer.candidates"], taps["layers.5.indexer.scores"]
    assert (np.isfinite(scores) & ~candidates).any(), "the pool must bind, or Reindex is not tested"
    for layer, ratio in ((1, 2), (3, 1), (5, 1)):
        ids = taps[f"layers.{layer}.indexer.topk"]
        for t in range(ids.shape[1]):
            for row in ids[:, t]:
                picked = row[row >= 0]
                assert (np.diff(picked) > 0).all()
                assert (picked < (t + 1) // ratio).all()
                assert (row[len(picked) :] == -1).all()
                assert len(picked) == min(CONFIG.index_topk, (t + 1) // ratio)


def test_rows_do_not_meet():
    base = run(IDS)
    alone = run(IDS[1:2])
    close(alone["logits"][0], base["logits"][1])
    swapped = run(IDS[::-1])
    close(swapped["logits"][::-1], base["logits"])


@pytest.mark.pitfall("A4", "D8", "H10", "H5")
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_padding_on_either_side_changes_nothing(n):
    whole = run(IDS[:1, :n])["logits"]
    padded = np.full((1, 40), 2)
    for at in (0, 1, 3, 4, 13):
        ids, segments = padded.copy(), np.zeros((1, 40), np.int32)
        ids[:, at : at + n], segments[:, at : at + n] = IDS[:1, :n], 1
        taps = run(ids, segments)
        close(taps["logits"][:, at : at + n], whole)


@pytest.mark.pitfall("N6")
@pytest.mark.parametrize("lengths", [(3, 4), (9, 16, 5), (1, 1, 1), (12, 20)])
def test_packed_documents_equal_separate_runs(lengths):
    align = CONFIG.document_alignment
    row, segments, places, at = np.full((1, 40), 2), np.zeros((1, 40), np.int32), [], 0
    for number, n in enumerate(lengths):
        document = RNG.integers(3, VOCAB, (1, n))
        row[:, at : at + n], segments[:, at : at + n] = document, number + 1
        places.append((at, n, document))
        at += -(-n // align) * align
    packed = run(row, segments)["logits"]
    for at, n, document in places:
        close(packed[:, at : at + n], run(document)["logits"])


@pytest.mark.pitfall("D9", "L1", "L2")
def test_poisoned_table_rows_past_the_primes_are_never_read():
    params = tiny_params(CONFIG)
    layers = list(params.layers)
    for index, table in ((1, 0), (2, 1)):
        used = CONFIG.engram_hashes[table].rows
        embed = layers[index].engram.embed
        assert embed.shape[0] > used
        layers[index] = layers[index].replace(engram=layers[index].engram.replace(embed=embed.at[used:].set(jnp.nan)))
    close(run(IDS, params=params.replace(layers=tuple(layers)))["logits"], run(IDS)["logits"])


@pytest.mark.pitfall("A10", "A1", "L5")
@pytest.mark.parametrize("n", range(1, 10))
def test_every_length_is_finite_and_a_prefix_of_the_next(n):
    taps = run(IDS[:, :n])
    assert taps["layers.1.attn.main_kv"].shape[1] == n // 2
    close(taps["logits"], run(IDS[:, : n + 1])["logits"][:, :n])


@pytest.mark.pitfall("D9")
def test_a_table_row_moves_only_the_positions_that_read_it():
    params = tiny_params(CONFIG)
    base = run(IDS)
    row = int(base["layers.1.engram.hash_ids"][0, 20, 0])
    embed = params.layers[1].engram.embed
    layer = params.layers[1].replace(engram=params.layers[1].engram.replace(embed=embed.at[row].add(3.0)))
    moved = run(IDS, params=params.replace(layers=(params.layers[0], layer, *params.layers[2:])))
    reads = (base["layers.1.engram.hash_ids"] == row).any(-1)
    changed = (moved["layers.1.engram.streams"] != base["layers.1.engram.streams"]).any((-1, -2))
    np.testing.assert_array_equal(changed, reads)


@pytest.mark.pitfall("N5", "E7", "L4")
def test_gradients_reach_what_they_should_and_stay_finite():
    params, ids = tiny_params(CONFIG), jnp.asarray(IDS, jnp.int32)
    segments = jnp.ones_like(ids).at[:, 30:].set(0)
    token_map = jnp.arange(VOCAB, dtype=jnp.int32)

    @jax.jit
    def grads(params):
        def language(p):
            out = forward(p, CONFIG, Policy(), ids, segments, token_map)
            return jnp.mean(jnp.square(jax.nn.log_softmax(out.logits)[:, :30]))

        def index(p):
            return forward(p, CONFIG, Policy(), ids, segments, token_map).index_kl.sum()

        return jax.grad(language)(params), jax.grad(index)(params)

    language, index = grads(params)
    for tree in (language, index):
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(tree))
    for path, leaf in jax.tree_util.tree_leaves_with_path(language):
        name = jax.tree_util.keystr(path)
        unused = ".indexer." in name or ".bias" in name
        assert bool(jnp.any(leaf != 0)) != unused, name
    for path, leaf in jax.tree_util.tree_leaves_with_path(index):
        name = jax.tree_util.keystr(path)
        assert bool(jnp.any(leaf != 0)) == (".indexer." in name), name


def test_the_quantisers_change_the_caches():
    quantised = jitted(CONFIG, Policy(quantize_main_kv=True, quantize_index=True, quantize_window=True))
    taps = quantised(tiny_params(CONFIG), IDS)
    for name in ("layers.0.attn.swa_kv", "layers.1.attn.main_kv", "layers.1.indexer.k", "layers.5.indexer.q"):
        assert (taps[name] != taps[f"{name}_prequant"]).any(), name
