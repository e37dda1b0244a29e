"""The small pieces against vectors worked by hand: hashing, Sinkhorn, codecs, routing, SwiGLU, sink, RoPE, pool."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv41 import mhc
from dsv41.attention import attend, attend_row
from dsv41.config import preset
from dsv41.hashing import hash_rows, hash_rows_host, lookback, table_hashes
from dsv41.indexer import candidate_blocks, candidate_entries, candidate_mask, ids_to_mask, index_kl, select
from dsv41.layout import make_layout
from dsv41.moe import by_expert, grouped_experts, route
from dsv41.numerics import linear, rms_norm, sink_softmax, swiglu
from dsv41.params import ExpertParams, HyperConnection, count_parameters, init_params, spec_leaves, text_specs
from dsv41.plan import cache_bytes_per_token, layer_plans
from dsv41.quant import MAIN_KV, e2m1_codes, e2m1_values, e4m3, fake_quant, pack, pack_nibbles, round_e4m3, unpack, unpack_nibbles
from dsv41.rope import layer_frequencies, rotate
from kernels_pallas.registry import Choice
from kernels_pallas.sparse_attention import reference
from tests.models import close, tiny_config, tiny_params

FLASH = preset("flash")


@pytest.mark.pitfall("D5")
def test_release_constants():
    first, second = FLASH.engram_hashes
    assert first.multipliers == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert second.multipliers == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    assert (first.primes[0], first.primes[-1], second.primes[0]) == (16000057, 16000463, 16000477)
    assert (first.rows, second.rows) == FLASH.engram_num_embeddings


@pytest.mark.pitfall("D2", "D1")
def test_hash_vectors_are_64_bit_exact_without_x64():
    toy = table_hashes((1,), 4, 2, 11, 32)[0]
    ids = np.array([[5, 7, 11, 13, 5, 7]], np.int32)
    positions, dead = np.arange(6, dtype=np.int32)[None], np.zeros((1, 6), bool)
    want = [
        [5, 17, 25, 56, 72, 96],
        [1, 19, 26, 51, 79, 105],
        [9, 14, 38, 52, 70, 106],
        [8, 19, 26, 46, 77, 98],
        [5, 20, 37, 55, 79, 105],
        [1, 19, 37, 45, 73, 83],
    ]
    rows = lookback(ids, positions, dead, 4, 2)
    np.testing.assert_array_equal(hash_rows_host(rows, toy)[0], want)
    device = jax.jit(lambda r: hash_rows(r, toy))(rows)
    np.testing.assert_array_equal(device[0], want)
    release = FLASH.engram_hashes[0]
    full = hash_rows_host(lookback(ids[:, :4], positions[:, :4], dead[:, :4], 4, 2), release) - np.array(release.offsets)
    assert full[0, 3, [0, 1, 8, 9, 16, 17]].tolist() == [4449004, 1571902, 589008, 5697715, 12269344, 11329719]
    rng = np.random.default_rng(0)
    many = rng.integers(0, 99092, (4, 3, 50)).astype(np.int32)
    np.testing.assert_array_equal(hash_rows(jnp.asarray(many), release), hash_rows_host(many, release))


@pytest.mark.pitfall("E2")
def test_sinkhorn_vectors():
    got = mhc.sinkhorn(jnp.array([[0.0, np.log(3.0)], [0.0, 0.0]], jnp.float32), 20, 1e-6)
    np.testing.assert_allclose(got, [[0.36603, 0.63397], [0.63397, 0.36603]], atol=1e-5)
    np.testing.assert_allclose(mhc.sinkhorn(jnp.zeros((4, 4)), 20, 1e-6), np.full((4, 4), 0.24999975), atol=1e-7)
    once = mhc.sinkhorn(jax.random.normal(jax.random.key(0), (4, 4)), 1, 1e-6)
    np.testing.assert_allclose(jnp.sum(once, axis=0), np.ones(4), atol=1e-5)


@pytest.mark.pitfall("E1", "E3", "E6")
def test_streams_are_mixed_from_source_to_target_with_one_site_of_lag():
    comb = jnp.zeros((4, 4)).at[jnp.arange(4), (jnp.arange(4) + 1) % 4].set(20.0)
    streams = jnp.broadcast_to(jnp.arange(1.0, 5.0)[:, None], (4, 2))
    mixed = mhc.expand(jnp.zeros(2), streams, jnp.zeros(4), mhc.sinkhorn(comb, 20, 1e-6))
    np.testing.assert_allclose(mixed[:, 0], [4, 1, 2, 3], atol=1e-4)
    zero = HyperConnection(fn=jnp.zeros((24, 8)), base=jnp.zeros(24), scale=jnp.ones(3))
    pre, post, _ = mhc.coefficients(streams, zero, 20, 1e-6, 1e-20)
    np.testing.assert_allclose(mhc.collapse(pre, streams), np.full(2, 0.500001 * 10), rtol=1e-6)
    np.testing.assert_allclose(post, np.ones(4))
    assert text_specs(FLASH).hc_head is None
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(init_params(tiny_config(), jax.random.key(0))))


@pytest.mark.pitfall("F1")
def test_e2m1_ties_go_to_the_even_code():
    x = jnp.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7], jnp.float32)
    want = np.array([0, 1, 1, 2, 2, 4, 4, 6, 6], np.float32)
    np.testing.assert_array_equal(e2m1_values(e2m1_codes(x)), want)
    np.testing.assert_array_equal(e2m1_values(e2m1_codes(-x)), -want)


@pytest.mark.pitfall("F1", "F2")
def test_e4m3_rounds_by_arithmetic_as_the_cast_does():
    """So that nothing is left to drop for a compiler that skips a conversion there and back."""
    x = np.arange(0, 1 << 32, 9973, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = x[np.isfinite(x)]
    want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    got = np.asarray(round_e4m3(jnp.asarray(x)))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.pitfall("F2", "F3")
def test_scales_saturate_and_zero_groups_stay_zero():
    assert float(e4m3(jnp.float32(465.0))) == 448
    for top in (2790.0, 3000.0):
        out = fake_quant(jnp.zeros(16).at[3].set(top), MAIN_KV)
        assert float(out[3]) == 2688
    assert not np.any(fake_quant(jnp.zeros(16), MAIN_KV))
    assert not np.any(fake_quant(jnp.zeros(16).at[2].set(1e-30), MAIN_KV))
    assert float(unpack(*pack(jnp.zeros(16), MAIN_KV), MAIN_KV).sum()) == 0
    assert int(pack(jnp.zeros(16), MAIN_KV)[1][0]) == 1  # the byte of 2**-9


@pytest.mark.pitfall("F6", "F7")
def test_packing_is_lossless_and_widths_must_divide():
    every = jnp.arange(256, dtype=jnp.uint8)
    codes = unpack_nibbles(every)
    assert codes.shape == (512,)
    np.testing.assert_array_equal(codes[0::2], np.arange(256) & 15)
    np.testing.assert_array_equal(pack_nibbles(codes), every)
    x = jax.random.normal(jax.random.key(1), (9, 64)) * 3
    np.testing.assert_array_equal(unpack(*pack(x, MAIN_KV), MAIN_KV), fake_quant(x, MAIN_KV))
    with pytest.raises(ValueError, match="multiple of 16"):
        fake_quant(jnp.zeros(24), MAIN_KV)
    np.testing.assert_array_equal(jax.grad(lambda v: jnp.sum(fake_quant(v, MAIN_KV) * 2))(x), np.full(x.shape, 2.0))


def _moe(config=None):
    config = config or tiny_config()
    return config, tiny_params(config).layers[0].ffn


@pytest.mark.pitfall("H2", "H5")
def test_bias_selects_and_never_weighs():
    config, params = _moe()
    x = jax.random.normal(jax.random.key(0), (6, 32))
    zero = jnp.zeros(6, jnp.int32)
    base = route(x, params, config, jnp.zeros(6, bool), zero)
    pushed = params.replace(bias=jnp.array([0.0, -9.0, 9.0, 0.0]))
    other = route(x, pushed, config, jnp.zeros(6, bool), zero)
    np.testing.assert_array_equal(base.scores, other.scores)
    assert (other.ids[:, 0] == 2).all() and not (other.ids == 1).any()
    picked = np.take_along_axis(np.asarray(other.scores), np.asarray(other.ids), -1)
    np.testing.assert_allclose(other.weights, 1.5 * picked / picked.sum(-1, keepdims=True), rtol=1e-6)
    flat = params.replace(gate=jnp.zeros_like(params.gate), bias=jnp.zeros(4))
    np.testing.assert_array_equal(route(x, flat, config, jnp.zeros(6, bool), zero).ids, np.tile([0, 1], (6, 1)))


@pytest.mark.pitfall("H6")
def test_swiglu_clamp():
    assert float(swiglu(jnp.full(1, 20.0), jnp.full(1, -20.0), 10.0)[0]) == pytest.approx(-99.99546, abs=1e-4)
    assert float(swiglu(jnp.full(1, -20.0), jnp.full(1, 1.0), 10.0)[0]) == pytest.approx(-20 / (1 + np.exp(20.0)), rel=1e-4)


@pytest.mark.pitfall("H7", "H10")
@pytest.mark.parametrize("case", ["spread", "one expert", "dead rows"])
def test_grouped_experts_equal_a_loop_over_experts(case):
    rng = np.random.default_rng(3)
    n, d, f, experts, k = 37, 8, 6, 5, 2
    w = ExpertParams(
        *(jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((experts, f, d), (experts, f, d), (experts, d, f)))
    )
    x = rng.standard_normal((n, d)).astype(np.float32)
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(n)]).astype(np.int32)
    if case == "one expert":
        ids[:] = [3, 1]
    live = np.ones(n, bool) if case != "dead rows" else rng.random(n) < 0.5
    weights = rng.random((n, k)).astype(np.float32)
    want = np.zeros((n, d))
    for t in np.flatnonzero(live):
        for e, g in zip(ids[t], weights[t], strict=True):
            hidden = np.asarray(swiglu(w.w1[e] @ x[t], w.w3[e] @ x[t], 10.0)) * g
            want[t] += np.asarray(w.w2[e], np.float64) @ hidden
    got = grouped_experts(jnp.asarray(x), jnp.asarray(ids), jnp.asarray(weights), jnp.asarray(live)[:, None], w, 10.0)
    # fp32 sums of at most 8 products of order 10 in another order; headroom 5.
    np.testing.assert_allclose(got, want, atol=1e-4)

    def each_item(x, weights, w):
        one = lambda equation, a, b: jnp.einsum(equation, a, b, precision="highest")  # noqa: E731
        hidden = swiglu(one("nd,nkfd->nkf", x, w.w1[ids]), one("nd,nkfd->nkf", x, w.w3[ids]), 10.0) * weights[..., None]
        return jnp.where(live[:, None], jnp.sum(one("nkf,nkdf->nkd", hidden, w.w2[ids]), axis=1), 0)

    cotangent = jnp.asarray(rng.standard_normal((n, d)), jnp.float32)

    def pull(run):
        return jax.tree.leaves(jax.vjp(run, jnp.asarray(x), jnp.asarray(weights), w)[1](cotangent))

    grouped = pull(lambda x, weights, w: grouped_experts(x, jnp.asarray(ids), weights, jnp.asarray(live)[:, None], w, 10.0))
    for got, want in zip(grouped, pull(each_item), strict=True):
        # fp32 sums of up to 37 items' products, as above.
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("items", [1, 6, 256, 257])
def test_items_by_expert_are_in_stable_order_counted_or_sorted(items):
    expert = np.random.default_rng(items).integers(0, 17, items).astype(np.int32)
    order, place = by_expert(jnp.asarray(expert))
    np.testing.assert_array_equal(order, np.argsort(expert, kind="stable"))
    np.testing.assert_array_equal(place[order], np.arange(items))


@pytest.mark.pitfall("G6", "G8", "L4")
def test_sink_and_one_softmax_over_both_sets():
    one = jnp.zeros((1, 1))
    yes = jnp.ones((1, 1), bool)
    assert float(sink_softmax(one, yes, jnp.zeros(1))[0, 0]) == 0.5
    assert float(sink_softmax(one, yes, jnp.full(1, -jnp.inf))[0, 0]) == 1.0
    assert float(sink_softmax(one, ~yes, jnp.zeros(1))[0, 0]) == 0.0
    layout = make_layout(jnp.ones((1, 1), jnp.int32))
    row = jnp.ones((1, 1, 32))
    out, mass = attend(jnp.zeros((1, 1, 1, 32)), row, row, jnp.zeros((1, 1, 1), jnp.int32), jnp.zeros(1), layout, 4)
    np.testing.assert_allclose(out[0, 0, 0], np.full(32, 2 / 3), rtol=1e-6)
    np.testing.assert_allclose(mass, [[[1 / 3]]], rtol=1e-6)
    grad = jax.grad(lambda s: jnp.sum(sink_softmax(s, jnp.array([[True, True, False]]), jnp.zeros(1)) ** 2))
    got = grad(jnp.array([[1.0, 1.0, 100.0]]))
    assert bool(jnp.isfinite(got).all()) and float(got[0, 2]) == 0


@pytest.mark.pitfall("B2", "L2")
def test_poison_in_entries_nobody_selected_changes_nothing():
    layout = make_layout(jnp.ones((1, 3), jnp.int32))
    q, kv = jax.random.normal(jax.random.key(0), (1, 3, 2, 32)), jax.random.normal(jax.random.key(1), (1, 3, 32))
    entries = jax.random.normal(jax.random.key(2), (1, 5, 32))
    ids = jnp.array([[[-1, -1], [0, -1], [0, 2]]], jnp.int32)
    poisoned = entries.at[:, jnp.array([1, 3, 4])].set(jnp.nan)
    for gather in (True, False):
        base = attend(q, kv, entries, ids, jnp.zeros(2), layout, 4, gather=gather)[0]
        np.testing.assert_array_equal(attend(q, kv, poisoned, ids, jnp.zeros(2), layout, 4, gather=gather)[0], base)
    # The sums run over another number of rows.
    close(attend(q[:, :1], kv[:, :1], None, None, jnp.zeros(2), make_layout(layout.segments[:, :1]), 4)[0], base[:, :1])


def test_gathered_and_masked_attention_agree_in_values_and_gradients():
    layout = make_layout(jnp.ones((2, 11), jnp.int32))
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, 11, 2, 32))
    kv, entries = (jax.random.normal(k, (2, 11, 32)) for k in keys[1:])
    rng = np.random.default_rng(0)
    ids = np.full((2, 11, 3), -1, np.int32)
    for b, t in np.ndindex(2, 11):
        picked = np.sort(rng.permutation(t + 1)[:3])
        ids[b, t, : len(picked)] = picked

    def run(gather, q, kv, entries):
        out, mass = attend(q, kv, entries, jnp.asarray(ids), jnp.array([0.3, -1.0]), layout, 4, gather=gather)
        return jnp.sum(jnp.sin(out)), (out, mass)

    both = [jax.value_and_grad(run, argnums=(1, 2, 3), has_aux=True)(gather, q, kv, entries) for gather in (True, False)]
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        # fp32 sums of at most 32 terms of order 1 in another order; headroom about 10.
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.pitfall("N6")
@pytest.mark.parametrize("selected", [True, False])
def test_whole_rows_through_the_kernels_arguments(monkeypatch, selected):
    """Documents of packed rows, padding between and behind them, a row shorter than the window: against `attend`.

    The reference of the kernel stands in for it; both sum in float32, in another order: 1e-5 of values of order 1.
    """
    segments = jnp.array([[1, 1, 1, 1, 1, 1, 0, 2, 2, 2, 2, 0], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2]], jnp.int32)
    layout = make_layout(segments)
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (2, 12, 2, 32))
    kv, entries = (jax.random.normal(k, (2, 12, 32)) for k in keys[1:3])
    rng = np.random.default_rng(0)
    ids = np.full((2, 12, 3), -1, np.int32)
    for b, t in np.ndindex(2, 12):
        picked = np.sort(rng.permutation(t + 1)[:3])
        ids[b, t, : len(picked)] = picked
    ids = jnp.where((segments > 0)[..., None], ids, -1)
    g = jax.random.normal(keys[3], q.shape)
    called = []

    def stand_in(*args, mass):
        called.append(args[0].shape)
        return reference.run(*args, mass=mass)

    def run(attend, window, q, kv, entries, sink):
        out, mass = attend(q, kv, entries if selected else None, ids if selected else None, sink, layout, window)
        return jnp.sum(out * g), (out, mass)

    monkeypatch.setattr("dsv41.attention.sparse_attention", stand_in)
    for window in (4, 20):
        results = []
        for form, impl in ((attend, "reference"), (attend_row, "gpu"), (attend_row, "reference")):
            monkeypatch.setattr("dsv41.attention.registry.choose", lambda *_, impl=impl, **__: Choice("", impl, {}))
            value = jax.value_and_grad(partial(run, form, window), argnums=(0, 1, 2, 3), has_aux=True)
            results.append(value(q, kv, entries, jnp.array([0.3, -1.0])))
        chex.assert_trees_all_close(results[1], results[0], rtol=0, atol=1e-5)
        chex.assert_trees_all_equal(results[2], results[0])
    assert called == [(24, 2, 32)] * 2


@pytest.mark.pitfall("G1", "G2", "G4")
def test_rope_tables_and_pairs():
    got = rotate(jnp.array([1.0, 0, 1, 0]), jnp.int32(1), np.float32(10000.0) ** -np.array([0, 0.5], np.float32))
    np.testing.assert_allclose(got, [0.540302, 0.841471, 0.999950, 0.010000], atol=1e-6)
    plain, compressed = layer_frequencies(FLASH, 0), layer_frequencies(FLASH, 2)
    np.testing.assert_allclose(plain, 10000.0 ** -(np.arange(32) / 32), rtol=1e-6)
    np.testing.assert_allclose(compressed[:15], 160000.0 ** -(np.arange(15) / 32), rtol=1e-6)
    np.testing.assert_allclose(compressed[25:], 160000.0 ** -(np.arange(25, 32) / 32) / 16, rtol=1e-6)
    x = jax.random.normal(jax.random.key(0), (5, 40))
    at = jnp.arange(5, dtype=jnp.int32) * 1000
    np.testing.assert_allclose(rotate(rotate(x, at, plain[:16]), at, plain[:16], inverse=True), x, atol=1e-6)
    np.testing.assert_array_equal(rotate(x, at, plain[:4])[:, :32], x[:, :32])


@pytest.mark.pitfall("B7")
def test_candidate_pool_vector():
    scores = jnp.array([5.0, 0, 0, 0, 9, 1, 1, 1, 7, 2, 2, 2, -3, 8])
    for visible, want in ((1, range(4)), (5, range(8)), (12, range(4, 12)), (13, [4, 5, 6, 7, 12, 13])):
        masked = jnp.where(jnp.arange(14) < visible, scores, -jnp.inf)[None, None]
        blocks = candidate_blocks(masked, jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), visible, jnp.int32), 4, 2)
        assert np.flatnonzero(candidate_mask(blocks, 4, 14)[0, 0]).tolist() == list(want)
        entries = np.asarray(candidate_entries(blocks, 4)[0, 0])
        assert entries[(entries >= 0) & (entries < 14)].tolist() == list(want)


@pytest.mark.pitfall("B5", "B6", "L8")
def test_selection_ties_and_exact_counts():
    ids = select(jnp.zeros((1, 1, 600)), 512)
    np.testing.assert_array_equal(ids[0, 0], np.arange(512))
    for visible in (3, 4, 5):
        scores = jnp.where(jnp.arange(8) < visible, jnp.arange(8.0), -jnp.inf)[None, None]
        got = np.asarray(select(scores, 4)[0, 0])
        assert sorted(got[got >= 0].tolist()) == list(range(visible))[-4:]
    assert select(jnp.zeros((1, 1, 0)), 4).shape == (1, 1, 0)
    np.testing.assert_array_equal(ids_to_mask(jnp.array([[[-1, 1]]]), 3), [[[False, True, False]]])


def test_index_kl_is_zero_at_the_teacher_and_ignores_short_rows():
    mass = jnp.array([[[0.3, 0.1], [0.5, 0.0]]])
    ids = jnp.array([[[0, 2], [1, -1]]], jnp.int32)
    picked = jnp.log(jnp.array([[[0.75, 0.25], [1.0, 1.0]]]))
    assert float(index_kl(picked, mass, ids, jnp.ones((1, 2), bool))) == pytest.approx(0, abs=1e-6)
    assert float(index_kl(picked * 2, mass, ids, jnp.ones((1, 2), bool))) > 1e-3


@pytest.mark.pitfall("L7")
def test_norm_statistics_are_float32_whatever_the_input():
    x = jnp.ones(4096, jnp.bfloat16)
    np.testing.assert_array_equal(rms_norm(x, jnp.ones(4096), 1e-20), x)


def test_release_counts_from_the_specs():
    specs = text_specs(FLASH)
    assert count_parameters(specs) == 748_494_684_784
    tables = sum(s.size for s in spec_leaves(specs) if s.stored == "fp8_rows")
    assert count_parameters(specs) - tables == 551_880_835_184
    names = [t.name for s in spec_leaves(specs) for t in s.released()]
    assert len(names) == len(set(names)) == 93_418
    assert cache_bytes_per_token(FLASH) == 890
    abstract = jax.eval_shape(lambda: init_params(FLASH, jax.random.key(0)))
    assert sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(abstract)) == 748_494_684_784


def test_release_plan():
    plans = layer_plans(FLASH)
    modes = ["swa"] * 2 + (["full"] + ["reuse"] * 5) * 3 + ["full"] + ["reuse"] * 3 + (["reindex"] + ["reuse"] * 3) * 4
    assert [p.mode for p in plans] == modes
    assert [p.kv_source for p in plans] == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    assert [p.index_source for p in plans] == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [
        s for s in (20, 24, 28, 32, 36) for _ in range(4)
    ]
    assert [p.layer for p in plans if p.pool == "publishes"] == [20]
    assert [p.layer for p in plans if p.pool == "consumes"] == [24, 28, 32, 36]
    assert {p.layer: p.engram for p in plans if p.engram is not None} == {1: 0, 14: 1}
    assert [p.half for p in plans] == ["encoder"] * 20 + ["decoder"] * 20


@pytest.mark.parametrize("out", [None, jnp.float32])
def test_gradients_of_bfloat16_products_are_sums_in_float32(out):
    """A master's gradient is off by the factors' rounding, 2**-9 of each of 64 terms, and not by a rounding of the sum to
    2**-9 of itself; no product of the gradient has float32 factors, whatever dtype its result asks for."""
    x, weight, ct = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate([(64, 24), (16, 24), (64, 16)]))
    narrow = x.astype(jnp.bfloat16)

    def pulled(weight):
        y, pull = jax.vjp(lambda x, w: linear(x, w, out=out), narrow, weight)
        return y, pull(ct.astype(y.dtype))

    y, (of_x, of_weight) = pulled(weight)
    assert y.dtype == (out or jnp.bfloat16) and of_x.dtype == jnp.bfloat16 and of_weight.dtype == jnp.float32
    exact = ct.astype(jnp.bfloat16).astype(jnp.float32).T @ narrow.astype(jnp.float32)
    np.testing.assert_allclose(of_weight, exact, atol=1e-5)
    assert jnp.any(of_weight != of_weight.astype(jnp.bfloat16).astype(jnp.float32))
    factors = [v.aval.dtype for e in jax.make_jaxpr(pulled)(weight).eqns if e.primitive.name == "dot_general" for v in e.invars]
    assert len(factors) >= 4 and set(factors) == {jnp.dtype(jnp.bfloat16)}
