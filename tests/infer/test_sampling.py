"""Sampling: the distributions, what the filters keep, and draws that depend on nothing but seed and position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

from dsv41.errors import UserError
from infer.sampling import Sampling, sample, sampling_rows

SAMPLE = jax.jit(sample)
DRAWS = 1024


def draws(logits, request: Sampling, count: int = DRAWS) -> np.ndarray:
    """Tokens drawn from the same logits at positions 0 to count - 1."""
    # One width, one compilation.
    row = np.pad(np.asarray(logits, np.float32), (0, 8 - len(logits)), constant_values=-np.inf)
    batch = jnp.broadcast_to(jnp.asarray(row)[None], (count, 8))
    return np.asarray(SAMPLE(batch, jnp.arange(count), sampling_rows([request] * count))[0])


def kept_ids(logits, request: Sampling) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Ids that may be drawn, their probabilities over the vocabulary, and the masses that top-p compares (float64)."""
    scaled = np.asarray(logits, np.float64) / request.temperature
    p = np.exp(scaled - scaled.max())
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    order = order[: request.top_k or len(p)]
    mass = np.cumsum(p[order]) / p[order].sum()
    if request.top_p < 1:
        order = order[: int(np.argmax(mass >= request.top_p)) + 1]
    kept = sorted(i for i in order if p[i] >= request.min_p * p.max())
    chances = np.zeros(len(p))
    chances[kept] = p[kept] / p[kept].sum()
    return kept, chances, mass


@pytest.mark.parametrize(
    "request_",
    [
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.5, seed=2),
        Sampling(temperature=3.0, seed=2**32 - 1),
        Sampling(temperature=1.0, top_k=5, seed=3),
        Sampling(temperature=1.5, top_p=0.8, seed=4),
        Sampling(temperature=1.0, min_p=0.1, seed=5),
        Sampling(temperature=2.0, top_k=6, top_p=0.9, min_p=0.2, seed=6),
    ],
)
def test_frequencies_are_the_probabilities(request_):
    logits = [0.3, -1.0, 2.0, 1.5, -0.2, 0.9, -3.0, 1.1]
    found = np.bincount(draws(logits, request_, 20_000), minlength=8)
    _, chances, _ = kept_ids(logits, request_)
    possible = chances > 0
    assert not found[~possible].any()
    expected = 20_000 * chances[possible]
    # The 99.9% quantile of chi-square with 7 degrees of freedom; fewer have lower ones.
    assert np.sum(np.square(found[possible] - expected) / expected) < 24.3


# Whole and half logits make ties, at the cuts too.
@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 4).map(lambda n: n / 2), min_size=8, max_size=8),
    st.sampled_from([0.7, 1.0, 2.5]),
    st.integers(0, 10),
    st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    st.one_of(st.just(0.0), st.floats(0.0, 0.99)),
    st.integers(0, 2**32 - 1),
)
@example([1.0] * 8, 1.0, 3, 1.0, 0.0, 0)
@example([1.0] * 8, 1.0, 0, 0.55, 0.0, 0)
@example([0.0, 1.0, 1.0, 1.0, 0.0, 2.0, 0.0, 1.0], 1.0, 3, 0.9, 0.3, 7)
@example([0.0] * 7 + [2.0], 1.0, 0, 1e-30, 0.0, 0)
def test_filters_keep_the_reference_set(logits, temperature, top_k, top_p, min_p, seed):
    request = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    kept, chances, mass = kept_ids(logits, request)
    scaled = np.asarray(logits) / temperature
    # Not on a float32 rounding of either cut.
    assume(top_p == 1 or np.abs(mass - top_p).min() > 1e-5)
    assume(np.abs(np.exp(scaled - scaled.max()) - min_p).min() > 1e-5)
    found = set(draws(logits, request).tolist())
    assert found <= set(kept)
    assert found >= {i for i in kept if chances[i] > 0.04}, "a kept token that 1024 draws miss with chance e^-41"


def test_top_p_reaches_its_mass_and_no_more():
    # 0.5, 0.25, 0.125, 0.125 are exact in float32, and so are their sums: the cut is at "reaches".
    logits = jnp.log(jnp.array([0.125, 0.5, 0.125, 0.25]))
    sets = {0.5: {1}, 0.50001: {1, 3}, 0.75: {1, 3}, 0.76: {0, 1, 3}, 0.875: {0, 1, 3}, 0.88: {0, 1, 2, 3}}
    for top_p, expected in sets.items():
        assert set(draws(logits, Sampling(temperature=1.0, top_p=top_p)).tolist()) == expected


def test_greedy_takes_the_lowest_of_equal_ids_and_reports_raw_log_probabilities():
    logits = jnp.array([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0, 1.0, 2.0, 3.0]], jnp.bfloat16)
    requests = [Sampling(), Sampling(top_k=2, top_p=0.5), Sampling(temperature=0.01, top_k=1)]
    tokens, logprobs = SAMPLE(logits, jnp.arange(3), sampling_rows(requests))
    assert tokens.dtype == jnp.int32 and logprobs.dtype == jnp.float32
    assert tokens.tolist() == [1, 0, 3]
    expected = jax.nn.log_softmax(logits.astype(jnp.float32))[jnp.arange(3), tokens]
    np.testing.assert_allclose(logprobs, expected, rtol=1e-6)


def test_extreme_temperatures():
    logits = [-1e30, 5.0, 1e4, -jnp.inf]
    for temperature in (1e-300, 1e-40, 2e-38, 1e-20):
        assert set(draws(logits, Sampling(temperature=temperature)).tolist()) == {2}
    flat = set(draws([-3.0, 5.0, 1e4, -jnp.inf], Sampling(temperature=3e38)).tolist())
    assert flat == {0, 1, 2}, "an excluded token stays excluded"


def _batch(requests, logits, positions):
    tokens, logprobs = SAMPLE(jnp.asarray(logits), jnp.asarray(positions, jnp.int32), sampling_rows(requests))
    return np.asarray(tokens), np.asarray(logprobs)


@pytest.mark.pitfall("O4")
def test_a_draw_depends_on_seed_and_position_alone():
    rng = np.random.default_rng(0)
    requests = [
        request
        for seed in (0, 11, 2**32 - 1)
        for request in (
            Sampling(seed=seed),
            Sampling(temperature=1.0, seed=seed),
            Sampling(temperature=0.8, top_k=20, seed=seed),
            Sampling(temperature=1.2, top_p=0.3, seed=seed),
            Sampling(temperature=1.0, min_p=0.2, seed=seed),
            Sampling(temperature=1.0, top_k=50, top_p=0.5, min_p=0.02, seed=seed),
        )
    ]
    logits = rng.normal(0, 1, (len(requests), 500)).astype(np.float32)
    positions = rng.integers(0, 1000, len(requests))
    alone = [_batch([r], logits[i : i + 1], positions[i : i + 1]) for i, r in enumerate(requests)]
    for _ in range(4):
        # Other slots, and padding rows that hold rubbish.
        order = rng.permutation(len(requests))
        mixed = [*(requests[i] for i in order), Sampling(temperature=1.0, top_p=0.5), Sampling()]
        rubbish = np.full((2, 500), np.nan, np.float32)
        tokens, logprobs = _batch(mixed, np.vstack([logits[order], rubbish]), [*positions[order], 0, 0])
        for slot, i in enumerate(order):
            assert tokens[slot] == alone[i][0][0]
            np.testing.assert_allclose(logprobs[slot], alone[i][1][0], rtol=1e-6)


@pytest.mark.pitfall("O4")
def test_seeds_and_positions_differ():
    logits = np.zeros((64, 10_000), np.float32)
    by_seed, _ = _batch([Sampling(temperature=1.0, seed=s) for s in range(64)], logits, [5] * 64)
    by_position, _ = _batch([Sampling(temperature=1.0, seed=5)] * 64, logits, range(64))
    assert len(set(by_seed.tolist())) > 60 and len(set(by_position.tolist())) > 60
    assert by_seed[5] == by_position[5]
    same, _ = _batch([Sampling(temperature=1.0, seed=5)] * 64, logits, [5] * 64)
    assert set(same.tolist()) == {int(by_seed[5])}


@pytest.mark.pitfall("H1")
@pytest.mark.parametrize(
    "row",
    [[-np.inf] * 7, [np.nan] * 7, [0.0, 1.0, np.nan, 3.0, 0.0, 0.0, 9.0], [0.0, 1.0, np.inf, 3.0, np.inf, 0.0, -np.inf]],
)
def test_a_row_without_probabilities_samples_inside_the_vocabulary_with_a_flag(row):
    requests = [
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, top_k=3),
        Sampling(temperature=1.0, top_p=0.5, min_p=0.1),
        Sampling(temperature=1.0, top_p=0.5),
    ]
    logits = np.array([row] * 4 + [[0.0] * 6 + [50.0]], np.float32)
    tokens, logprobs = _batch(requests, logits, range(5))
    assert ((tokens >= 0) & (tokens < 7)).all()
    assert np.isnan(logprobs[:4]).all()
    assert tokens[4] == 6 and logprobs[4] == 0, "a good row beside them"


def _primitives(jaxpr) -> set[str]:
    """Names of what runs whatever the branch: without the inside of `lax.cond`."""
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        if equation.primitive.name != "cond":
            for inner in jaxprs_in_params(equation.params):
                found |= _primitives(inner)
    return found


def test_a_greedy_batch_sorts_and_draws_nothing():
    jaxpr = jax.make_jaxpr(sample)(jnp.zeros((2, 9)), jnp.arange(2), sampling_rows([Sampling()] * 2))
    always = _primitives(jaxpr.jaxpr)
    assert "cond" in always and "argmax" in always
    assert not {"sort", "cumsum", "random_bits", "threefry2x32"} & always
    assert str(jaxpr).count("= sort[") == 1, "one sort for all filters"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.5}, r"temperature: found -0.5, allowed is 0.0 to 3.40\S+; nearest is 0.0"),
        ({"temperature": float("nan")}, "temperature: found nan, .*nearest is 0.0"),
        ({"temperature": float("inf")}, r"temperature: found inf, .*nearest is 3.40\S+e\+38"),
        ({"top_k": -1}, "top_k: found -1, allowed is 0 to 2147483647; nearest is 0"),
        ({"top_k": 2**31}, "top_k: found 2147483648, .*nearest is 2147483647"),
        ({"top_p": 0.0}, "top_p: found 0.0, allowed is above 0, up to 1 .off.; for the likeliest token alone set temperature"),
        ({"top_p": 1.5}, "top_p: found 1.5, .*nearest is 1.0"),
        ({"top_p": float("nan")}, "top_p: found nan, .*nearest is 1.0"),
        ({"min_p": 1.0}, "min_p: found 1.0, allowed is 0 .off. to below 1; for the likeliest token alone set temperature"),
        ({"min_p": -0.1}, "min_p: found -0.1, .*nearest is 0.0"),
        ({"min_p": float("nan")}, "min_p: found nan, .*nearest is 0.0"),
        ({"seed": -1}, "seed: found -1, allowed is 0 to 4294967295; nearest is 0"),
        ({"seed": 2**32}, "seed: found 4294967296, .*nearest is 4294967295"),
        ({"max_new_tokens": -1}, "max_new_tokens: found -1, allowed is 0 or more; nearest is 0"),
        ({"stop": ("a", "")}, "stop: found '', allowed is text of at least one character"),
        ({"stop_ids": (*range(17),)}, "stop_ids: found 17 token ids, allowed are up to 16"),
        ({"stop_ids": (1, -2)}, "stop_ids: found -2, allowed is 0 or more; nearest is 0"),
    ],
)
def test_impossible_values(values, message):
    with pytest.raises(UserError, match=message) as caught:
        Sampling(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.pitfall("J5")
def test_limits_are_allowed_and_reach_the_rows():
    Sampling(max_new_tokens=0, stop=("\n",), stop_ids=(0,))
    made = sampling_rows([Sampling(), Sampling(3e38, 2**31 - 1, 1e-9, 0.99, 2**32 - 1, max_new_tokens=1)])
    assert [a.dtype.name for a in jax.tree.leaves(made)] == ["float32", "int32", "float32", "float32", "uint32"]
    assert made.seed.tolist() == [0, 2**32 - 1] and made.top_k.tolist() == [0, 2**31 - 1]
    assert made.temperature[0] == 0 and made.top_p[0] == 1 and made.min_p[0] == 0
