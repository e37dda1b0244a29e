"""The options around the model: V4's mHC and hash routing, other ratios, bfloat16, image tokens, recompute, precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41 import attention
from dsv41.engram import apply_engram, engram_rows
from dsv41.layout import make_layout
from dsv41.model import forward
from dsv41.numerics import Policy
from dsv41.params import EngramParams, init_params, text_specs
from tests.models import VOCAB, close, jitted, tiny_config, tiny_params

RNG = np.random.default_rng(5)
IDS = RNG.integers(3, VOCAB, (2, 24))


def _dots(config, policy):
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    ids = jax.ShapeDtypeStruct((1, 24), jnp.int32)
    fold = jnp.arange(config.vocab_size, dtype=jnp.int32)
    jaxpr = jax.make_jaxpr(lambda p, i: forward(p, config, policy, i, None, fold).logits)(params, ids)

    def walk(j):
        for equation in j.eqns:
            yield equation
            for value in equation.params.values():
                for inner in value if isinstance(value, list | tuple) else (value,):
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        yield from walk(inner)

    return list(walk(jaxpr.jaxpr))


@pytest.mark.pitfall("L6", "L8")
def test_float32_products_ask_for_full_precision_and_selection_is_exact():
    for policy in (Policy(), Policy(compute_dtype=jnp.bfloat16)):
        equations = _dots(tiny_config(), policy)
        products = [e for e in equations if e.primitive.name == "dot_general"]
        assert len(products) > 50
        for e in products:
            if all(v.aval.dtype == jnp.float32 for v in e.invars):
                assert e.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2, e
        assert not any("approx" in e.primitive.name for e in equations)


def test_unshifted_mhc_collapses_with_its_own_coefficients():
    config = tiny_config(hc_single_pass=False)
    taps = jitted(config)(tiny_params(config), IDS)
    for layer, previous in ((0, "embed_streams"), (3, "layers.2.streams")):
        own = np.einsum("btn,btnd->btd", taps[f"layers.{layer}.hc_attn.pre"], taps[previous])
        close(taps[f"layers.{layer}.attn_in"], own)
    assert text_specs(config).hc_head is not None
    single = tiny_config()
    assert np.abs(jitted(single)(tiny_params(single), IDS)["logits"] - taps["logits"]).max() > 1e-3


def test_single_pass_lags_by_one_site():
    config = tiny_config()
    taps = jitted(config)(tiny_params(config), IDS)
    close(taps["layers.0.attn_in"], taps["embed_streams"][:, :, 0])
    carried = np.einsum("btn,btnd->btd", taps["layers.2.hc_ffn.pre"], taps["layers.2.streams"])
    close(taps["layers.3.attn_in"], carried)
    last = np.einsum("btn,btnd->btd", taps["layers.5.hc_ffn.pre"], taps["layers.5.streams"])
    close(taps["final_hidden"], last)


def test_hash_layers_take_their_experts_from_a_balanced_table():
    config = tiny_config(num_hash_layers=2)
    params = tiny_params(config)
    table = np.asarray(params.layers[1].ffn.tid2eid)
    assert (np.sort(table, axis=1)[:, 1:] != np.sort(table, axis=1)[:, :-1]).all()
    assert np.ptp(np.bincount(table.ravel(), minlength=4)) <= 1
    assert params.layers[1].ffn.bias is None
    assert params.layers[2].ffn.tid2eid is None
    taps = jitted(config)(params, IDS)
    np.testing.assert_array_equal(taps["layers.1.ffn.expert_ids"], table[IDS])
    np.testing.assert_allclose(taps["layers.1.ffn.expert_weights"].sum(-1), 1.5, rtol=1e-6)


@pytest.mark.parametrize("ratio", [3, 4])
def test_other_ratios_stay_causal(ratio):
    config = tiny_config(compress_ratios=(0, ratio, ratio, 1, 1, 1))
    run = jitted(config)
    base = run(tiny_params(config), IDS)
    assert base["layers.1.attn.main_kv"].shape[1] == 24 // ratio
    for n in (ratio - 1, ratio, 2 * ratio + 1):
        segments = np.broadcast_to(np.arange(24) < n, IDS.shape)
        close(run(tiny_params(config), IDS, segments)["logits"][:, :n], base["logits"][:, :n])


def test_bfloat16_stays_near_float32():
    config = tiny_config()
    exact = jitted(config)(tiny_params(config), IDS)
    low = jitted(config, Policy(compute_dtype=jnp.bfloat16))(tiny_params(config), IDS)
    assert low["layers.3.streams"].dtype == jnp.bfloat16
    assert low["layers.3.hc_attn.comb"].dtype == low["logits"].dtype == np.float32
    # bf16 keeps 8 bits (2**-9 relative) at each of about 30 roundings on the way to the first selection, sqrt(30) * 2**-9
    # is 1e-2 of the largest value; headroom 5. Later layers may choose other entries and are not compared.
    first = exact["layers.0.streams"]
    assert np.abs(low["layers.0.streams"].astype(np.float32) - first).max() < 5e-2 * np.abs(first).max()
    assert np.isfinite(low["logits"]).all()


def test_image_tokens_route_by_their_own_bias_and_are_dead_to_engram():
    config = tiny_config()
    image = np.zeros(IDS.shape, bool)
    image[:, 6:9] = True
    params = tiny_params(config)
    text, taps = jitted(config)(params, IDS), jitted(config)(params, IDS, None, image)
    np.testing.assert_array_equal(taps["layers.1.engram.gate"][image], 0)
    pad = jitted(config)(params, np.where(image, config.engram_pad_token_id, IDS))["layers.1.engram.hash_ids"]
    np.testing.assert_array_equal(taps["layers.1.engram.hash_ids"][:, 6:9], np.repeat(pad[:, 8:9], 3, axis=1))
    close(taps["logits"][:, :6], text["logits"][:, :6])
    scores = params.layers[0].ffn.bias_vl - params.layers[0].ffn.bias
    assert np.abs(scores).max() > 0


@pytest.mark.pitfall("D3")
def test_ids_outside_the_vocabulary_are_dead():
    config = tiny_config()
    fold = jnp.arange(VOCAB, dtype=jnp.int32)
    layout = make_layout(jnp.ones((1, 4), jnp.int32))
    rows = lambda ids: np.asarray(engram_rows(jnp.array([ids], jnp.int32), layout, fold, config)[0])[0]  # noqa: E731
    dead = rows([5, -1, 7, 8])
    np.testing.assert_array_equal(dead, rows([5, VOCAB, 7, 8]))
    alone = np.asarray(engram_rows(jnp.array([[7, 8]], jnp.int32), make_layout(jnp.ones((1, 2), jnp.int32)), fold, config)[0])
    np.testing.assert_array_equal(dead[2:], alone[0])
    assert (dead[1] != rows([5, VOCAB - 1, 7, 8])[1]).any()


@pytest.mark.pitfall("D7")
def test_engram_gate_vector():
    config = tiny_config(hidden_size=32, hc_mult=4)
    d, n, columns = 32, 4, config.engram_columns * config.engram_head_dim
    unit = jnp.zeros((1, 1, n, d)).at[..., 0].set(1.0)
    layout = make_layout(jnp.ones((1, 1), jnp.int32))
    ones = jnp.ones((n, d))
    rows = jnp.zeros((1, 1, config.engram_columns), jnp.int32)

    def gate(scale, taps=None):
        # The table's only read channel carries the key: dot = d / sqrt(d) * sign, shrunk to 4 by the gain.
        wkv = jnp.zeros(((n + 1) * d, columns)).at[jnp.arange(n) * d, 0].set(1.0)
        embed = jnp.zeros((config.engram_num_embeddings[0], config.engram_head_dim)).at[0, 0].set(scale)
        params = EngramParams(embed, wkv, ones * 4 / d**0.5, ones)
        taps = {}
        out = apply_engram(unit, rows, layout, params, config, taps, "e")
        return jnp.sum(out), taps["e.gate"][0, 0]

    for scale, want in ((1.0, 0.880797), (-1.0, 0.119203), (0.0, 0.500250)):
        np.testing.assert_allclose(gate(scale)[1], np.full(n, want), atol=1e-6)
    assert bool(jnp.isfinite(jax.grad(lambda s: gate(s)[0])(0.0)))


@pytest.mark.pitfall("G5")
def test_no_norm_on_query_heads():
    config = tiny_config()
    p = tiny_params(config).layers[0].attn
    latent = jax.random.normal(jax.random.key(0), (1, 3, config.q_lora_rank))
    at = jnp.arange(3, dtype=jnp.int32)[None]
    one = attention.queries(latent, at, p, config, 0)
    two = attention.queries(latent, at, p.replace(wq_b=2 * p.wq_b), config, 0)
    np.testing.assert_allclose(two, 2 * one, rtol=1e-6)


@pytest.mark.pitfall("G2")
def test_a_single_visible_key_comes_back_unrotated():
    config = tiny_config()
    params = tiny_params(config)
    layers = tuple(layer.replace(attn=layer.attn.replace(sink=jnp.full_like(layer.attn.sink, -1e9))) for layer in params.layers)
    taps = jitted(config)(params.replace(layers=layers), IDS[:, :1])
    # Position 0 is the identity rotation: its only key is its own row.
    close(taps["layers.0.attn.core"][:, 0, 0], taps["layers.0.attn.swa_kv"][:, 0])


@pytest.mark.pitfall("E7")
def test_recompute_changes_no_gradient():
    config = tiny_config()
    params, ids = tiny_params(config), jnp.asarray(IDS, jnp.int32)
    fold = jnp.arange(VOCAB, dtype=jnp.int32)

    def loss(p):
        return jnp.mean(jnp.square(jax.nn.log_softmax(forward(p, config, Policy(), ids, None, fold).logits)))

    plain = jax.jit(jax.value_and_grad(loss))(params)
    again = jax.jit(jax.value_and_grad(jax.checkpoint(loss)))(params)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * max(1.0, float(jnp.abs(a).max())))
