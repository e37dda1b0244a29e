"""`index_topk`: reference against float64, kernels against the reference in the interpreter, real shapes lowered."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params

from dsv41 import indexer, site
from dsv41.config import preset
from dsv41.layout import make_layout
from dsv41.numerics import Policy
from dsv41.params import abstract_params, text_specs
from dsv41.plan import layer_plans
from dsv41.quant import INDEX_KEY, fake_quant, row_values
from kernels_pallas import registry
from kernels_pallas.index_topk import cases, gpu, reference
from kernels_pallas.index_topk.cases import Case
from kernels_pallas.index_topk.gpu import Tiling
from kernels_pallas.index_topk.score import Scoring
from kernels_pallas.index_topk.select import Slicing, top_k
from kernels_pallas.interpret import gpu_interpreter, gpu_races
from tests.models import tiny_config, tiny_params


@partial(jax.jit, static_argnames="case")
def arguments(case):
    return cases.arguments(case)


def exact(args):
    """All scores in float64, -inf where an entry is not visible or not in the query's pool."""
    q, weights, keys, first, count, table, pool = (None if a is None else np.asarray(a) for a in args)
    values = np.asarray(row_values(jnp.asarray(keys), INDEX_KEY, jnp.float32), np.float64)
    values = values if table is None else values[table].reshape(len(table), -1, values.shape[-1])
    dots = np.einsum("bthk,bsk->bths", q.astype(np.float64), values)
    scores = np.einsum("bths,bth->bts", np.maximum(dots, 0), weights.astype(np.float64))
    entry = np.arange(scores.shape[2])
    seen = (entry >= first[..., None]) & (entry < (first + count)[..., None])
    if pool is not None:
        seen &= (pool[..., None] == entry // 8).any(axis=2)
    return np.where(seen, scores, -np.inf)


def check_choice(ids, scores, k, tolerance):
    """Rows of ids are ascending, -1 behind; as many as there are; none left out that is better by more than ``tolerance``."""
    assert ids.shape == (*scores.shape[:2], min(k, scores.shape[2]))
    for got, row in zip(ids.reshape(-1, ids.shape[2]), scores.reshape(-1, scores.shape[2]), strict=True):
        some = got[got >= 0]
        assert len(some) == min(len(got), np.isfinite(row).sum()) and np.all(got[len(some) :] == -1)
        assert np.all(np.diff(some) > 0) and np.all(np.isfinite(row[some]))
        left = np.delete(row, some)
        if len(some) and len(left):
            assert row[some].min() >= left.max() - tolerance


@pytest.mark.pitfall("B5", "B6")
@pytest.mark.parametrize("name", cases.SMALL)
def test_reference(name):
    """float32 sums of 128 and of 32 products: 1e-6 of the largest score. Where scores tie they are whole numbers, and exact."""
    case = cases.SMALL[name]
    args = arguments(case)
    ids, blocks = jax.jit(partial(reference.run, **cases.options(case)))(*args)
    scores = exact(args)
    tolerance = 0 if case.levels else 1e-6 * np.abs(scores[np.isfinite(scores)]).max()
    check_choice(np.asarray(ids), scores, case.topk, tolerance)
    if case.levels:
        want, _ = lax.top_k(jnp.asarray(scores, jnp.float32), case.topk)
        assert len(np.unique(np.asarray(want))) < case.topk
        order = np.argsort(-scores, axis=2, kind="stable")[..., : case.topk]
        np.testing.assert_array_equal(ids, np.sort(order, axis=2))
    if not case.keep:
        assert blocks is None
        return
    best = scores.reshape(*scores.shape[:2], -1, case.block).max(axis=3)
    newest = (np.asarray(args[3]) + np.asarray(args[4]) - 1) // case.block
    np.put_along_axis(best, newest[..., None], 1e30, axis=2)
    check_choice(np.asarray(blocks), best, case.keep, tolerance)


@pytest.mark.parametrize("name", cases.SMALL)
def test_gpu_kernel_interpreted(name):
    """Several queries and warpgroups a CTA, several slices a row; the interpreter watches for races between warpgroups."""
    case = cases.SMALL[name]
    args, options = arguments(case), cases.options(case)
    assert gpu.left_to_xla(args[0], args[2], args[5], args[6], case.keep, case.block) is None
    want = jax.jit(partial(reference.run, **options))(*args)
    queries = 1 if case.pool else {1: 1, 5: 4}.get(case.queries, 2)
    tiling = Tiling(Scoring(queries, queries, warpgroups=2, ctas=4), Slicing(128, 4))
    got = jax.jit(partial(gpu.run, **options, tiling=tiling, interpret=gpu_interpreter()))(*args)
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        if w is not None:
            np.testing.assert_array_equal(g, w)
    assert not gpu_races()


def test_chunks_of_queries_change_nothing():
    """Two at a time, the last one alone."""
    case = Case(queries=3, entries=136, topk=32, keep=4, start=True)
    args, options = arguments(case), cases.options(case)
    tiling = Tiling(Scoring(2, 1, 1, 2), Slicing(128, 4), bound=4 * 136 * 2)
    got = jax.jit(partial(gpu.run, **options, tiling=tiling, interpret=gpu_interpreter()))(*args)
    jax.tree.map(np.testing.assert_array_equal, got, reference.run(*args, **options))


def test_selection_in_three_levels():
    """Scores of few values in slices of 512: 40 of each survive, from rows of unlike lengths and from named blocks."""
    scores = jnp.round(8 * jax.random.normal(jax.random.key(0), (3, 7000))) + 0.0
    limits = jnp.array([7000, 0, 2049]), jnp.array([0, 0, 3])
    count = sum(limits)[:, None]
    run = partial(top_k, k=40, slicing=Slicing(128, 4), interpret=gpu_interpreter())
    want = reference_top_k(jnp.where(jnp.arange(7000)[None] < count, scores, -jnp.inf), 40)
    np.testing.assert_array_equal(jax.jit(run)(scores, limits), want)
    blocks = jnp.broadcast_to(2 * jnp.arange(875, dtype=jnp.int32), (3, 875))
    got = jax.jit(partial(run, blocks=blocks))(scores, limits)
    np.testing.assert_array_equal(got, jnp.where(want < 0, -1, want // 8 * 16 + want % 8))


def reference_top_k(scores, k):
    value, ids = lax.top_k(scores, k)
    ordered = jnp.sort(jnp.where(value > -jnp.inf, ids, scores.shape[1]))
    return jnp.where(ordered == scores.shape[1], -1, ordered)


@pytest.mark.parametrize("name", cases.REAL)
def test_real_shapes_lower_for_cuda(name):
    case = cases.REAL[name]
    args, options = cases.abstract(case), cases.options(case)
    assert gpu.refusal(*args, **options) is None
    run = cases.timed(case, partial(gpu.run, **options))
    args = jax.eval_shape(partial(cases.arguments, case)) if case.selection else args
    text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.pitfall("B12")
def test_scores_are_never_all_there():
    """Of 4096 queries over 64K entries, no array of the lowered program has more than the bound, inputs aside."""
    case = cases.REAL["prefill, 4096 queries, 64K"]
    args = cases.abstract(case)
    jaxpr = jax.make_jaxpr(partial(gpu.run, **cases.options(case)))(*args)
    sizes = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            sizes.extend(v.aval.size * v.aval.dtype.itemsize for v in equation.outvars if hasattr(v.aval, "dtype"))
            for inner in jaxprs_in_params(equation.params):
                walk(inner)

    walk(jaxpr.jaxpr)
    inputs = max(a.size * a.dtype.itemsize for a in args if a is not None)
    assert case.queries * case.entries * 4 > 8 * gpu.BOUND
    assert max(sizes) <= max(gpu.BOUND, inputs)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"dtype": "float16"}, "float16"), ({"keep": 8, "pool": 8}, "restricted"), ({"topk": 30}, "30"), ({"keep": 4100}, "4100")],
)
def test_what_the_kernel_refuses(change, said):
    case = Case(**change)
    with pytest.raises(registry.Refused, match=said):
        registry.choose("index_topk", "gpu", *cases.abstract(case), **cases.options(case), backend="gpu")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"heads": 16}, "16 heads"),
        ({"width": 64}, "64 channels"),
        ({"entries": 65540}, "65540 entries"),
        ({"page": 24}, "24 entries"),
        ({"keep": 8, "block": 4}, "4 entries"),
    ],
)
def test_what_is_left_to_xla(change, said):
    case = Case(**change)
    q, _, keys, _, _, table, pool = cases.abstract(case)
    assert said in (gpu.left_to_xla(q, keys, table, pool, case.keep, case.block) or "")
    for dtype, reason in ((jnp.float32, "keys are float32"), (jnp.bfloat16, "queries float32")):
        q, values = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, 1, 32, 128), (1, 64, 128)))
        q = q if dtype == jnp.float32 else jax.ShapeDtypeStruct(q.shape, jnp.float32)
        assert reason in (gpu.left_to_xla(q, values, None, None, 0, 8) or "")


@pytest.mark.parametrize(
    ("case", "values"),
    [
        (Case(queries=3, entries=135, topk=32, keep=4, start=True), jnp.bfloat16),
        (Case(batch=2, queries=2, entries=210, heads=8, width=32, topk=256, dtype="float32"), jnp.float32),
        (Case(batch=2, queries=2, entries=120, heads=16, width=64, topk=40, pool=6, block=10), jnp.uint8),
        (Case(batch=2, entries=400, topk=40, pool=12, dtype="float32"), jnp.float32),
    ],
    ids=["values, candidates found", "fewer than wanted", "packed, another width, pool", "values, pool fetched"],
)
def test_scores_by_xla_and_selection_by_kernels(case, values):
    args, options = arguments(case), cases.options(case)
    if values != jnp.uint8:
        args = (*args[:2], row_values(args[2], INDEX_KEY, values), *args[3:])
    size = 4 * 4 * case.heads * case.entries * case.batch
    tiling = Tiling(slicing=Slicing(128, 4), bound=size // 4)
    got = jax.jit(partial(gpu.run, **options, tiling=tiling, interpret=gpu_interpreter()))(*args)
    jax.tree.map(np.testing.assert_array_equal, got, jax.jit(partial(reference.run, **options))(*args))


@pytest.mark.parametrize("share", [1, 32], ids=["fetched", "all keys"])
@pytest.mark.parametrize("stored", [False, True], ids=["values", "stored"])
def test_scores_of_what_was_picked(monkeypatch, stored, share):
    """Also their gradients, some queries at a time. float32 sums of 128 and 32 in another order: 1e-5 of the largest."""
    case = Case(batch=2, queries=5, entries=64, dtype="float32")
    q, weights, rows, *_ = arguments(case)
    rows = rows.reshape(2, 64, -1)
    values = row_values(rows, INDEX_KEY, jnp.float32)
    ids = jax.random.randint(jax.random.key(1), (2, 5, 12), -1, 64)
    cotangent = jax.random.normal(jax.random.key(2), ids.shape)

    def some(q, weights, values):
        scores = indexer.picked_scores(q, weights, rows if stored else values, ids)
        return jnp.sum(jnp.where(ids < 0, 0, scores) * cotangent), scores

    def every(q, weights, values):
        scores = jnp.take_along_axis(indexer.key_scores(q, weights, values), jnp.maximum(ids, 0), axis=-1)
        return jnp.sum(jnp.where(ids < 0, 0, scores) * cotangent), scores

    monkeypatch.setattr(indexer, "PICKED_BYTES", 2 * 2 * 12 * 128 * 4)
    monkeypatch.setattr(indexer, "ALL_KEYS", share)
    wrt = (0, 1) if stored else (0, 1, 2)
    (got, want) = (jax.jit(jax.grad(f, wrt, has_aux=True))(q, weights, values) for f in (some, every))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-5 * np.abs(w).max())


def test_the_site_with_the_op_is_the_site_without(monkeypatch):
    """A layer that may use a kernel hands stored bytes to the op, and scores what was picked again for the indexer's loss.

    float32 sums in another order: 1e-6 of the largest score.
    """
    config = tiny_config()
    params = tiny_params(config)
    policy = Policy(quantize_index=True)
    seen = []

    def chosen(op, impl, *args, **options):
        seen.append(args[2].dtype)
        return registry.Choice(op, "gpu", {})

    plan = next(plan for plan in layer_plans(config) if plan.pool == "publishes")
    layout = make_layout(jnp.ones((1, 48), jnp.int32))
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (1, 48, config.hidden_size))
    latent = jax.random.normal(keys[1], (1, 48, config.q_lora_rank))
    stored = fake_quant(jax.random.normal(keys[2], (1, 48 // plan.ratio, config.index_head_dim)), INDEX_KEY)

    def run():
        def one(x, latent, stored, attn):
            return site.choose(x, latent, attn, plan, site.Shared(index_k=stored), layout, config, policy, None)

        return jax.jit(one)(x, latent, stored, params.layers[plan.layer].attn)

    want, scores = run()
    with monkeypatch.context() as patch:
        patch.setattr(site.registry, "choose", chosen)
        patch.setattr(site, "index_topk", reference.run)
        got, again = run()
    assert seen == [jnp.uint8]
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_array_equal(got.pool, want.pool)
    some = want.ids >= 0
    assert some.any() and want.pool.shape[2] == min(
        config.candidate_topk_blocks, -(-stored.shape[1] // config.candidate_block_size)
    )
    largest = jnp.abs(jnp.where(some, scores, 0)).max()
    np.testing.assert_allclose(jnp.where(some, again, 0), jnp.where(some, scores, 0), rtol=0, atol=1e-6 * largest)


@pytest.mark.pitfall("B12")
@pytest.mark.parametrize("quantised", [False, True], ids=["values", "stored"])
@pytest.mark.parametrize("role", ["publishes", "consumes"])
def test_on_a_gpu_the_site_neither_sorts_nor_holds_all_scores(monkeypatch, quantised, role):
    """Selection and gradients of 8192 queries over as many keys, release width: nothing is sorted, and no array has
    more bytes than the op's or the picked scores' bound, beyond the queries and what is selected."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config, time = preset("slice"), 8192
    policy = Policy(jnp.bfloat16, quantize_index=quantised)
    plan = next(plan for plan in layer_plans(config) if plan.pool == role)
    attn = abstract_params(text_specs(config)).layers[plan.layer].attn
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((1, time, *s), dtype)  # noqa: E731
    blocks = shape(config.candidate_topk_blocks, dtype=jnp.int32) if role == "consumes" else None

    def loss(params, x, latent, keys, blocks):
        layout = make_layout(jnp.ones((1, time), jnp.int32))
        params = replace(attn, indexer=params)
        shared, picked = site.choose(
            x, latent, params, plan, site.Shared(index_k=keys, pool=blocks), layout, config, policy, None
        )
        return jnp.sum(picked**2), shared

    x, latent, keys = shape(config.hidden_size), shape(config.q_lora_rank), shape(config.index_head_dim)
    traced = jax.make_jaxpr(jax.grad(loss, (0, 3), has_aux=True))(attn.indexer, x, latent, keys, blocks)
    names, sizes = set(), []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            names.add(str(equation.primitive))
            sizes.extend(v.aval.size * v.aval.dtype.itemsize for v in equation.outvars if hasattr(v.aval, "dtype"))
            for inner in jaxprs_in_params(equation.params):
                walk(inner)

    walk(traced.jaxpr)
    queries = time * config.index_n_heads * config.index_head_dim * 4
    assert not {"top_k", "sort"} & names and "inline_mgpu_p" in names
    assert max(sizes) <= max(gpu.BOUND, queries, 2 * indexer.PICKED_BYTES) < time * time * 4
