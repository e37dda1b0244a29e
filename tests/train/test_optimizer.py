"""The whole optimizer: who owns which weight, what it costs, and what leaves weights alone."""

import re
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dsv41.config import preset
from dsv41.errors import UserError
from dsv41.params import ParamSpec, map_specs, spec_leaves, text_specs
from train.optim import clip, make_optimizer, optimizer_report, update_biases
from train.optim.muon import matrix_shape


def random_like(specs, seed: int, scale: float = 1.0):
    rng = np.random.default_rng(seed)

    def leaf(spec):
        if spec.family == "frozen":
            return jnp.asarray(rng.integers(0, 4, spec.shape), jnp.int32)
        return jnp.asarray(rng.standard_normal(spec.shape, dtype=np.float32) * scale)

    return map_specs(leaf, specs)


def constant(rate: float):
    return lambda _: jnp.float32(rate)


SMALL = {
    "muon": ParamSpec((8, 6), (None, None), "layers.0.attn.wq_b.weight", "f32", "muon", blocks=2),
    "indexer": ParamSpec((4, 6), (None, None), "layers.0.attn.indexer.wq_b.weight", "f32", "muon"),
    "gain": ParamSpec((6,), (None,), "layers.0.attn_norm.weight", "f32", "adamw"),
    "sink": ParamSpec((2,), (None,), "layers.0.attn.attn_sink", "f32", "adamw", decay=False),
    "embed": ParamSpec((10, 6), (None, None), "embed.weight", "f32", "sinkhorn", decay=False),
    "engram": ParamSpec((12, 6), (None, None), "layers.1.engram.embed.weight", "f32", "sinkhorn", decay=False, lr_scale=5.0),
    "bias": ParamSpec((4,), (None,), "layers.0.ffn.gate.bias", "f32", "sign", "zeros", decay=False),
    "ids": ParamSpec((5, 2), (None, None), "layers.0.ffn.gate.tid2eid", "i64", "frozen", decay=False),
}


def run(specs, params, gradients, rate=0.01, steps=1):
    rule = make_optimizer(specs, constant(rate))
    state, step = rule.init(params), jax.jit(rule.update)
    for _ in range(steps):
        updates, state = step(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


FAMILIES = [
    (r"(embed|head|layers\.\d+\.engram\.embed)\.weight", "sinkhorn"),
    (r".*\.engram\.wkv\.weight", "muon"),
    (r".*\.engram\.[qk]_weight", "adamw"),
    (r".*\.(wq_a|wq_b|wkv|wgate|wk|weights_proj|wo_a|wo_b|w1|w2|w3)\.weight", "muon"),
    (r".*\.gate\.weight|.*hc_(attn|ffn|head)_fn", "muon"),
    (r"(.*\.)?(attn_norm|ffn_norm|q_norm|kv_norm|k_norm|norm)\.weight", "adamw"),
    (r".*hc_(attn|ffn|head)_(base|scale)|.*\.attn_sink", "adamw"),
    (r".*\.gate\.(bias|bias_vl)", "sign"),
    (r".*\.gate\.tid2eid", "frozen"),
]


@pytest.mark.pitfall("N1")
@pytest.mark.parametrize("name", ["toy", "flash", "hash"])
def test_every_weight_has_the_family_of_its_role(name):
    config = preset("toy" if name == "hash" else name)
    specs = spec_leaves(text_specs(replace(config, num_hash_layers=2) if name == "hash" else config))
    seen = set()
    for spec in specs:
        wanted = {family for pattern, family in FAMILIES if re.fullmatch(pattern, spec.key)}
        assert wanted == {spec.family}, spec.key
        seen |= wanted
        none = spec.family in ("sinkhorn", "sign", "frozen") or spec.key.endswith(("_base", "_scale", "attn_sink"))
        assert spec.decay is not none, spec.key
        assert spec.lr_scale == (5.0 if spec.key.endswith("engram.embed.weight") else 1.0)
    assert seen == {"muon", "adamw", "sinkhorn", "sign", *(["frozen"] if name == "hash" else [])}
    blocks = {spec.key.split(".", 2)[2]: spec.blocks for spec in specs if spec.blocks > 1}
    assert blocks == {
        "attn.wq_b.weight": config.num_attention_heads,
        "attn.wo_a.weight": config.o_groups,
        "attn.indexer.wq_b.weight": config.index_n_heads,
    }


@pytest.mark.pitfall("N1")
@pytest.mark.parametrize("family", ["adafactor", None])
def test_a_weight_without_a_family_is_an_error(family):
    spec = replace(SMALL["gain"])
    object.__setattr__(spec, "family", family)
    for use in (lambda specs: make_optimizer(specs, constant(1.0)), optimizer_report):
        with pytest.raises(UserError, match=re.escape(f"optimizer of {spec.key}: found {family!r}, allowed are muon")):
            use({**SMALL, "gain": spec})
    with pytest.raises(UserError, match=r"optimizer of \['lost'\]: found None"):
        make_optimizer({**SMALL, "lost": 3}, constant(1.0))


@pytest.mark.pitfall("N1")
def test_a_weight_with_two_owners_is_an_error():
    twice = {**SMALL, "again": replace(SMALL["embed"], family="muon")}
    for use in (lambda specs: make_optimizer(specs, constant(1.0)), optimizer_report):
        with pytest.raises(UserError, match=r"optimizer of embed\.weight: found two weights of that name"):
            use(twice)


def test_adamw_card_and_decay_where_the_spec_says_so():
    specs = {name: replace(SMALL["gain"], key=name, shape=(1,), decay=decay) for name, decay in (("on", True), ("off", False))}
    two, four = ({name: jnp.full(1, value, jnp.float32) for name in specs} for value in (2.0, 4.0))
    params, _ = run(specs, two, four)
    np.testing.assert_allclose(params["on"], 1.988, rtol=1e-6)
    np.testing.assert_allclose(params["off"], 1.99, rtol=1e-6)


def test_adamw_against_float64():
    """Three steps of AdamW as its paper writes it, in float64 NumPy, to a millionth of the weight's size."""
    spec, rate = replace(SMALL["gain"], shape=(40,)), 0.01
    rng = np.random.default_rng(3)
    weight = rng.standard_normal(40, dtype=np.float32)
    rule, params = make_optimizer({"gain": spec}, constant(rate)), {"gain": jnp.asarray(weight)}
    state, update = rule.init(params), jax.jit(rule.update)
    wanted, m, v = weight.astype(np.float64), np.zeros(40), np.zeros(40)
    for step in range(1, 4):
        g = rng.standard_normal(40, dtype=np.float32) * np.float32(10.0 ** -(3 * step))
        updates, state = update({"gain": jnp.asarray(g)}, state, params)
        params = optax.apply_updates(params, updates)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * np.square(g.astype(np.float64))
        direction = (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-20)
        wanted = wanted - rate * (direction + 0.1 * wanted)
    assert np.linalg.norm(params["gain"] - wanted) <= 1e-6 * np.linalg.norm(wanted)


@pytest.mark.parametrize("exponent", range(-24, 1))
def test_adamw_never_steps_further_than_its_rate(exponent):
    """Whatever size a gradient has: from those whose squares float32 cannot hold to ordinary ones."""
    specs = {"gain": replace(SMALL["gain"], shape=(3,), decay=False)}
    zeros = {"gain": jnp.zeros(3, jnp.float32)}
    gradient = jnp.array([1.0, -3.3, 7.1], jnp.float32) * jnp.float32(10.0**exponent)
    params, _ = run(specs, zeros, {"gain": gradient}, rate=1e-3, steps=1)
    assert float(jnp.max(jnp.abs(params["gain"]))) <= 1.001e-3


def test_tables_move_by_their_own_factor():
    signs = jnp.array([[1, -1], [-1, 1]], jnp.float32)
    specs = {name: replace(SMALL[name], shape=(2, 2)) for name in ("embed", "engram")}
    zeros = {name: jnp.zeros((2, 2), jnp.float32) for name in specs}
    params, _ = run(specs, zeros, dict.fromkeys(specs, 1e-07 * signs))
    np.testing.assert_allclose(params["embed"], -0.0018 * signs, rtol=1e-5)
    np.testing.assert_allclose(params["engram"], -0.009 * signs, rtol=1e-5)


@pytest.mark.pitfall("H3")
def test_biases_and_id_tables_are_left_alone():
    before = random_like(SMALL, 0)
    gradients = {**random_like(SMALL, 1), "bias": jnp.full(4, 100.0), "ids": None}
    after, state = run(SMALL, before, gradients, rate=1.0, steps=2)
    for name in ("bias", "ids"):
        np.testing.assert_array_equal(after[name], before[name])
        assert after[name].dtype == before[name].dtype
    for name in set(SMALL) - {"bias", "ids"}:
        assert np.any(np.asarray(after[name] != before[name])), name
    for family in ("muon", "sinkhorn"):
        momentum = state.families[family].momentum
        assert {name for name in SMALL if momentum[name] is not None} == {n for n, s in SMALL.items() if s.family == family}


@pytest.mark.pitfall("H3")
def test_bias_rule():
    bias = jnp.zeros(4, jnp.float32)
    for _ in range(3):
        bias = update_biases(bias, jnp.array([600, 0, 0, 0], jnp.int32))
    np.testing.assert_allclose(bias, [-0.003, 0.003, 0.003, 0.003], rtol=1e-6)
    np.testing.assert_array_equal(update_biases(bias, jnp.zeros(4, jnp.int32)), bias)
    np.testing.assert_array_equal(update_biases(bias, jnp.full(4, 7.0)), bias)
    np.testing.assert_allclose(update_biases(bias, jnp.array([1.0, 3, 2, 2])) - bias, [0.001, -0.001, 0, 0], atol=1e-9)


def test_the_schedule_follows_the_count_in_the_state():
    specs = {name: SMALL[name] for name in ("gain", "embed", "bias")}
    rule = make_optimizer(specs, lambda count: jnp.where(count == 2, 1.0, 0.0))
    before, update = random_like(specs, 2), jax.jit(rule.update)
    state, moved = rule.init(before), []
    for step in range(4):
        assert int(state.steps) == step
        updates, state = update(before, state, before)
        moved.append(any(np.any(np.asarray(u)) for u in jax.tree.leaves(updates)))
    assert moved == [False, False, True, False]


def test_zero_gradients_move_only_by_decay():
    before = random_like(SMALL, 3)
    after, state = run(SMALL, before, jax.tree.map(jnp.zeros_like, before), steps=3)
    for name, spec in SMALL.items():
        factor = 0.999**3 if spec.decay else 1.0
        np.testing.assert_allclose(after[name], np.asarray(before[name]) * factor, rtol=1e-5)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))


def test_clip_leaves_indexers_out():
    specs = {name: SMALL[name] for name in ("muon", "indexer", "gain", "bias", "ids")}
    gradients = {
        "muon": jnp.full((8, 6), 3 / 48**0.5),
        "indexer": jnp.full((4, 6), 1e6),
        "gain": jnp.full(6, 4 / 6**0.5),
        "bias": jnp.full(4, 50.0),
        "ids": None,
    }
    clipped, norm = clip(specs, gradients)
    np.testing.assert_allclose(norm, 5.0, rtol=1e-6)
    for name in ("muon", "gain"):
        np.testing.assert_allclose(clipped[name], gradients[name] / 5, rtol=1e-6)
    for name in ("indexer", "bias"):
        np.testing.assert_array_equal(clipped[name], gradients[name])
    assert clipped["ids"] is None
    same, norm = clip(specs, {**gradients, "muon": gradients["muon"] / 10, "gain": jnp.zeros(6)})
    np.testing.assert_array_equal(same["muon"], gradients["muon"] / 10)
    zero, norm = clip(specs, jax.tree.map(jnp.zeros_like, gradients))
    assert float(norm) == 0 and not np.any(zero["muon"])


@pytest.mark.parametrize(("name", "active"), [("small", 0), ("toy", 0), ("toy", 500)])
def test_report_is_what_the_state_takes(name, active):
    specs = SMALL if name == "small" else text_specs(preset("toy"))
    params = map_specs(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)
    state = make_optimizer(specs, constant(1.0), active).init(params)
    report = optimizer_report(specs, active)

    def size(tree):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

    assert report["schedule"] == {"parameters": 0, "state_bytes": size(state.steps)}
    for family in ("muon", "sinkhorn", "adamw"):
        assert report[family]["state_bytes"] == size(state.families[family])
    assert sum(row["state_bytes"] for row in report.values()) == size(state)
    assert sum(row["parameters"] for row in report.values()) == sum(spec.size for spec in spec_leaves(specs))
    assert report["sign"]["state_bytes"] == 0


def test_the_toy_model_compiles_a_loop_for_each_shape():
    specs = text_specs(preset("toy"))
    rule = make_optimizer(specs, constant(1e-3))
    params, gradients = random_like(specs, 4, 0.02), random_like(specs, 5)
    # Embedding and head take no gradient here: most rows of a real one are zero.
    gradients = gradients.replace(embed=jnp.zeros_like(gradients.embed))
    state = rule.init(params)
    began = time.process_time()
    compiled = jax.jit(rule.update).lower(gradients, state, params).compile()
    assert time.process_time() - began < 60
    muon = {matrix_shape(spec) for spec in spec_leaves(specs) if spec.family == "muon"}
    tables = [spec for spec in spec_leaves(specs) if spec.family == "sinkhorn"]
    assert len(re.findall(r" while\(", compiled.as_text())) <= len(muon) + len(tables)

    updates, state = compiled(gradients, state, params)
    for spec, update, weight in zip(spec_leaves(specs), *map(jax.tree.leaves, (updates, params)), strict=True):
        assert np.all(np.isfinite(update)), spec.key
        moved = np.asarray(update) + (1e-4 * np.asarray(weight) if spec.decay else 0)
        rms = np.sqrt(np.mean(np.square(moved)))
        wanted = {"sign": 0.0, "adamw": 1e-3}.get(spec.family, 0.18e-3 * spec.lr_scale) * (spec.key != "embed.weight")
        np.testing.assert_allclose(rms, wanted, rtol=0.02, err_msg=spec.key)
