"""The training step: gradients of touched rows, biases of both modalities, what is computed again, replay, teachers."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dsv41.config import replace as configure
from dsv41.indexer import index_kl, teacher
from dsv41.layout import make_layout
from dsv41.model import features, forward
from dsv41.numerics import Policy
from dsv41.params import map_specs, text_specs
from dsv41.replay import replayed_features
from dsv41.site import Shared, _served, served_kl
from tests.models import VOCAB, close, equations, sizes, tiny_config, tiny_params
from train.data import to_batch
from train.losses import total_loss, weighted_nll
from train.optim import make_optimizer
from train.packing import Packed
from train.step import StepOptions, init_state, make_train_step

ROOT = Path(__file__).parents[2]
# Three layers: window alone with a table behind it, Full with a pool and a table of its own, Reindex.
CONFIG = configure(
    tiny_config(),
    num_hidden_layers=3,
    compress_ratios=(0, 1, 1),
    kv_source_layer_ids=(1,),
    index_source_layer_ids=(1, 2),
    candidate_source_layer_id=1,
    engram_layer_ids=(1,),
    engram_num_embeddings=tiny_config().engram_num_embeddings[:1],
    dspark_target_layer_ids=(0, 1, 2),
)
FOLD = jnp.arange(VOCAB, dtype=jnp.int32)
IDS = np.random.default_rng(1).integers(3, VOCAB, (2, 32)).astype(np.int32)
SEGMENTS = np.where(np.arange(32) < np.array([[32], [20]]), 1, 0).astype(np.int32)
SEGMENTS[0, 16:] = 2
BATCH = to_batch(Packed(IDS, SEGMENTS))
IDS_HERE, SEGMENTS_HERE = jnp.asarray(IDS), jnp.asarray(SEGMENTS)
RATE = jnp.float32(1e-3)


def start(active: int = 0):
    """A state of weights off their trivial values; copies, for a step takes what it is given."""
    return init_state(CONFIG, 0, active).replace(params=jax.tree.map(jnp.copy, tiny_params(CONFIG)))


@pytest.mark.pitfall("H3")
def test_touched_rows_of_tables_and_both_biases_against_the_plain_form():
    """The whole table differentiated and updated; float32 in another order, steps of up to 0.0009, of 1e-3 of those."""
    image = np.zeros(IDS.shape, bool)
    image[0, 3:9] = True
    batch = BATCH.replace(image=image)
    specs, state = text_specs(CONFIG), start()
    rule = make_optimizer(specs, lambda _: RATE)

    @jax.jit
    def plain(params, opt_state):
        def loss(p):
            out = forward(p, CONFIG, Policy(), IDS_HERE, SEGMENTS_HERE, FOLD, None, jnp.asarray(image))
            nats, weight = weighted_nll(out.logits, jnp.asarray(batch.targets), jnp.asarray(batch.weights))
            return total_loss(nats / weight, out.balance.sum(), out.index_kl.sum()), out.load

        (_, load), grads = jax.value_and_grad(loss, has_aux=True)(params)
        norm = optax.tree.norm(map_specs(lambda s, g: g if s.family != "sign" and "indexer" not in s.key else None, specs, grads))
        scale = jnp.minimum(1.0, 1.0 / norm)
        grads = map_specs(lambda s, g: g if "indexer" in s.key else g * scale, specs, grads)
        return optax.apply_updates(params, rule.update(grads, opt_state, params)[0]), load

    wanted, load = plain(state.params, rule.init(state.params))
    got, metrics = make_train_step(CONFIG, Policy(), FOLD)(start(), batch, RATE)
    before = tiny_params(CONFIG)
    for layer, (found, want, old) in enumerate(zip(got.params.layers, wanted.layers, before.layers, strict=True)):
        assert load[layer].sum(axis=-1).tolist() == [(46 - 0) * 2, 6 * 2]
        for bias, kind in (("bias", 0), ("bias_vl", 1)):
            moved = np.asarray(getattr(found.ffn, bias) - getattr(old.ffn, bias))
            # The difference of two biases of size 0.2 in float32.
            np.testing.assert_allclose(moved, 0.001 * np.sign(np.mean(load[layer, kind]) - load[layer, kind]), atol=5e-8)
        if found.engram is not None:
            assert np.any(found.engram.embed != old.engram.embed)
            np.testing.assert_allclose(found.engram.embed, want.engram.embed, atol=1e-6, rtol=0)
    np.testing.assert_allclose(got.params.embed, wanted.embed, atol=1e-6, rtol=0)
    assert {"update_rms.muon", "update_rms.adamw", "update_rms.sinkhorn", "sinkhorn_residual", "index_kl.1", "index_kl.2"} <= set(
        metrics
    )
    moved = map_specs(lambda s, new, old: (new - old).ravel() / RATE if s.family == "muon" else None, specs, wanted, before)
    # Differences of weights of size 0.2, over a rate of 1e-3.
    rms = np.sqrt(np.mean(np.square(np.concatenate(jax.tree.leaves(moved)))))
    np.testing.assert_allclose(metrics["update_rms.muon"], rms, rtol=1e-3)
    assert 0.18 < float(metrics["update_rms.sinkhorn"]) < 0.9  # the table's is five times that of embedding and head
    np.testing.assert_allclose(metrics["index_kl"], metrics["index_kl.1"] + metrics["index_kl.2"], rtol=1e-6)


@pytest.mark.pitfall("M1", "M3")
def test_a_step_with_active_rows_is_the_same_and_never_passes_over_the_table():
    """As long as no row is dropped; the same float32 sums in another order, over three steps, which compile once.

    That donated buffers cannot be used would be a warning, and so an error.
    """
    rows = CONFIG.engram_num_embeddings[0]
    some = jax.tree.map(lambda a: jnp.asarray(a[:1, :16]), BATCH)
    both = []
    for active in (0, rows - 1):
        step = make_train_step(CONFIG, Policy(), FOLD, StepOptions(active_rows=active))
        state = start(active)
        if active:
            made = equations(jax.make_jaxpr(step)(state, some, RATE).jaxpr)
            table = state.params.layers[1].engram.embed.shape
            full = [e.primitive.name for e in made if any(getattr(v.aval, "shape", None) == table for v in e.outvars)]
            assert full and set(full) <= {"scatter-add", "pjit", "jit"}
        for _ in range(3):
            given = state
            state, metrics = step(state, some, RATE)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
        assert step._cache_size() == 1  # pyright: ignore
        both.append(state)
    assert float(metrics["engram_lost"]) == 0
    tables = [state.params.layers[1].engram.embed for state in both]
    np.testing.assert_allclose(*tables, atol=2e-6, rtol=0)


def _loss(config, policy):
    def loss(params):
        out = features(params, config, policy, IDS_HERE, SEGMENTS_HERE, FOLD)
        return jnp.mean(jnp.square(out.hidden)) + out.index_kl.sum() + out.balance.sum()

    return jax.value_and_grad(loss)


def computed_again(seeds):
    """Selections in the program of each policy, and the most that computing again moves a leaf, over its largest value.

    That is over draws of weights: of some, gradients cancel a thousandfold.
    """
    counts, found, params = [], [], [tiny_params(CONFIG, seed) for seed in seeds]
    for remat in ("none", "attention", "block"):
        lowered = jax.jit(_loss(CONFIG, Policy(remat=remat))).lower(params[0])
        counts.append(lowered.as_text().count("chlo.top_k"))
        compiled = lowered.compile()
        found.append(jax.tree.leaves([compiled(each) for each in params]))
    apart = lambda a, b: float(jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), 1e-12))  # noqa: E731
    return counts, max(apart(a, b) for again in found[1:] for a, b in zip(again, found[0], strict=True))


DOUBLE = """
import json, jax, jax.numpy as jnp
jax.config.update("jax_enable_x64", True)
jnp.float32 = jnp.float64  # ahead of the imports that read it
from tests.train.test_step import computed_again
print(json.dumps(computed_again(range(6))))
"""


def test_what_is_computed_again_gives_the_same_gradients_and_selects_once():
    """With float64 in the place of float32, in which fusing in another way moves a gradient by less than any fault would."""
    run = subprocess.run([sys.executable, "-c", DOUBLE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    counts, apart = json.loads(run.stdout.splitlines()[-1])
    # Of the pool, two selections, and the experts of three layers.
    assert counts[1] == counts[0] and counts[2] <= counts[0] + 3
    # Sums of float64 in another order, of terms up to a thousand times what they leave; headroom 17.
    assert 0 < apart < 1e-12, apart


def test_the_teacher_is_the_mean_of_the_layers_that_read_a_selection():
    rng = np.random.default_rng(2)
    ids = jnp.asarray([[[0, 2, -1], [1, 2, 3]]], jnp.int32)
    masses = [jnp.asarray(rng.random((1, 2, 3)), jnp.float32) * size for size in (1.0, 9.0)]
    student = jnp.asarray(rng.standard_normal((1, 2, 3)), jnp.float32)
    layout = make_layout(jnp.ones((1, 2), jnp.int32))
    shared = Shared(ids=ids, student=student, mass=_served(_served(None, masses[0], ids), masses[1], ids))
    mean = (teacher(masses[0], ids) + teacher(masses[1], ids)) / 2
    np.testing.assert_allclose(served_kl(shared, layout), index_kl(student, mean, ids, layout.live), rtol=1e-6)

    config = tiny_config()
    own, served = (
        features(tiny_params(config), config, Policy(index_teacher=t), IDS_HERE, SEGMENTS_HERE, FOLD).index_kl
        for t in ("own", "served")
    )
    assert own.shape == served.shape == (3,)
    np.testing.assert_allclose(served[2], own[2], rtol=1e-5)  # no layer but its own reads the last selection
    assert np.all(np.abs(np.asarray(served - own))[:2] > 1e-6)


@pytest.mark.parametrize("single", [True, False], ids=["single pass", "unshifted"])
def test_both_forms_of_decoder_replay_give_the_response_the_same_logits_and_gradients(single):
    """All tokens by masks, and the replayed ones alone (training §6.2)."""
    config = configure(CONFIG, hc_single_pass=single)
    params, window = tiny_params(config), config.sliding_window
    ids = jnp.asarray(IDS)
    segments = np.ones((2, 32), np.int32)
    segments[0, 16:], segments[1, 24:] = 2, 0
    prompts = np.where(segments[0] == 1, 9, 11)[None] * np.ones((2, 1), np.int32)
    layout = make_layout(jnp.asarray(segments))
    replay = np.maximum(prompts - window, 0).astype(np.int32)
    kept = [np.flatnonzero((np.asarray(layout.positions[b]) >= replay[b]) & (segments[b] > 0)) for b in range(2)]
    chosen = np.full((2, 24), 32, np.int32)
    for b, index in enumerate(kept):
        chosen[b, : len(index)] = index
    response = (np.asarray(layout.positions) >= prompts) & (segments > 0)
    segments, replay, chosen = map(jnp.asarray, (segments, replay, chosen))

    @jax.jit
    def masked(params):
        def loss(p):
            hidden = features(p, config, Policy(), ids, segments, FOLD, replay=replay).hidden
            return jnp.sum(jnp.where(response[..., None], jnp.sin(hidden), 0.0)), hidden

        return jax.grad(loss, has_aux=True)(params)

    @jax.jit
    def gathered(params):
        def loss(p):
            out = replayed_features(
                p, config, Policy(), ids, jnp.asarray(segments), FOLD, jnp.asarray(replay), jnp.asarray(chosen)
            )
            hidden = jnp.zeros((2, 33, config.hidden_size)).at[jnp.arange(2)[:, None], chosen].set(out.hidden)[:, :32]
            return jnp.sum(jnp.where(response[..., None], jnp.sin(hidden), 0.0)), hidden

        return jax.grad(loss, has_aux=True)(params)

    (wanted, whole), (found, some) = masked(params), gathered(params)
    close(np.asarray(some)[response], np.asarray(whole)[response])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        # Of a scale the gradient is a sum over all tokens and streams, of float32 terms that cancel: 1e-4 of the leaf's
        # largest is what 1e4 terms in another order can make, headroom 3.
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-4 * float(jnp.abs(b).max()) + 1e-12)
    plain = features(params, config, Policy(), ids, segments, FOLD).hidden
    assert np.abs(np.asarray(plain - whole))[response].max() > 1e-3, "the replay must cut some window short"


def test_steps_of_every_kind_run():
    """bfloat16 with float32 masters, quantised weights, replay by gathering, no pool, a z-loss."""
    policy = Policy(jnp.bfloat16, quantize_main_kv=True, quantize_index=True, index_teacher="own", candidate_pool=False)
    options = StepOptions(1, ("fp4", "fp8", "fp8_rows"), 40, 1e-4, "gather")
    positions = np.arange(32)[None] * np.ones((2, 1), np.int32)
    chosen = np.where(np.arange(16) < 16, np.arange(16, 32), 32)[None] * np.ones((2, 1), np.int32)
    batch = to_batch(Packed(IDS, np.ones_like(IDS)))
    weights = (batch.weights * (positions >= 20)).astype(np.float32)
    batch = batch.replace(weights=weights, replay=np.full((2, 32), 16, np.int32), chosen=chosen.astype(np.int32))
    state = start(40)
    before = jax.tree.map(np.asarray, state.params)
    after, metrics = make_train_step(CONFIG, policy, FOLD, options)(state, batch, RATE)
    assert all(np.isfinite(value) for value in metrics.values()) and not metrics["skipped"]
    chex.assert_trees_all_equal_dtypes(before, after.params)
    changed = jax.tree.map(lambda a, b: bool(np.any(a != np.asarray(b))), before, after.params)
    assert all(jax.tree.leaves(replace(changed, layers=()))) and all(jax.tree.leaves(changed.layers[0].attn))


def test_a_large_table_is_nowhere_made_whole_by_a_gradient():
    """Only the rows that a batch reads: the gradient of a table of a million rows is of the size of a batch."""
    rows = 10**6
    specs = text_specs(CONFIG)
    params = map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs)
    layer = params.layers[1]
    big = jax.ShapeDtypeStruct((rows, CONFIG.engram_head_dim), jnp.float32)
    layers = (params.layers[0], layer.replace(engram=layer.engram.replace(embed=big)), params.layers[2])
    params = params.replace(layers=layers)

    def grads(params, small, rows):
        inner = params.layers[1].replace(engram=params.layers[1].engram.replace(embed=small))
        params = params.replace(layers=(params.layers[0], inner, params.layers[2]))
        return jnp.sum(features(params, CONFIG, Policy(), IDS_HERE, SEGMENTS_HERE, FOLD, rows=rows).hidden)

    small = jax.ShapeDtypeStruct((64, CONFIG.engram_head_dim), jnp.float32)
    ids = (jax.ShapeDtypeStruct((2, 32, CONFIG.engram_columns), jnp.int32),)
    assert max(sizes(jax.make_jaxpr(jax.grad(grads, 1))(params, small, ids).jaxpr)) < rows
