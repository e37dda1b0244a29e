"""A row in parts along the mesh axis `context`: values, gradients and collectives against one device."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from dsv41 import context
from dsv41.model import features
from dsv41.params import init_params
from dsv41.plan import layer_plans
from dsv41.sharding import total
from tests.models import PLAIN, VOCAB, equations, tiny_config, tiny_params
from train.losses import chunked_sums

TIME = 24
ROWS = 2
FOLD = np.arange(VOCAB, dtype=np.int32)
CUT = PartitionSpec(None, "context")
COLLECTIVES = ("all_gather", "all_to_all", "ppermute", "psum", "reduce_scatter")


def mesh(parts):
    return jax.make_mesh((parts,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:parts])


def forward(config, policy, params, batch):
    ids, segments, image, replay = batch[:4]
    return features(params, config, policy, ids, segments, jnp.asarray(FOLD), image=image, replay=replay)


def share(config, policy, params, batch):
    """This device's share of a loss in which every part of the objective weighs as much as the others, and what goes into it."""
    out = forward(config, policy, params, batch)
    sums = chunked_sums(out.hidden, params.head, *batch[4:])
    count = jnp.maximum(total(sums.weight, "context"), 1.0)
    z = sums.squared_log_z / count
    loss = sums.nats / count + 0.1 * z + jnp.sum(out.balance) + jnp.sum(out.index_kl)
    return loss, (sums.nats, out.balance, out.index_kl, out.load)


def pulled(config, policy, params, batch):
    """Loss, its parts, and gradients of the float weights, summed over devices."""
    (loss, parts), grads = jax.value_and_grad(partial(share, config, policy), has_aux=True, allow_int=True)(params, batch)
    grads = [g for g in jax.tree.leaves(grads) if jnp.issubdtype(g.dtype, jnp.floating)]
    return total((loss, parts, grads), "context")


@cache
def compiled(config, policy, parts):
    run = partial(pulled, config, policy)
    if parts > 1:
        run = jax.shard_map(run, mesh=mesh(parts), in_specs=(PartitionSpec(), CUT), out_specs=PartitionSpec(), check_vma=False)
    return jax.jit(run)


@cache
def near(config, seed):
    """The weights with about two thirds of them moved by their last bit."""
    rng = np.random.default_rng(seed)
    step = lambda p: p * (1 + np.float32(6e-8) * rng.integers(-1, 2, p.shape).astype(np.float32))  # noqa: E731
    return jax.tree.map(lambda p: step(np.asarray(p)) if p.dtype == jnp.float32 else p, tiny_params(config))


def same(got, want, others):
    """float32 sums over a row in parts, in another order, six layers deep and back: 1e-5 of each leaf's largest value.

    And twice what `near` weights move the leaf by on one device at most: the root in Engram's gate passes rounding on up to
    500 times enlarged where its dot is near 0. A ten-millionth of the largest gradient is float32's zero.
    """
    largest = lambda a: float(np.abs(np.asarray(a)).max(initial=0.0))  # noqa: E731
    zero = 1e-7 * max(map(largest, want[2]))
    for a, b, *c in zip(*map(jax.tree.leaves, (got, want, *others)), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * largest(b) + 2 * max(largest(b - d) for d in c) + zero)


def batch_of(seed, segments, image=None, replay=0):
    rng = np.random.default_rng(seed)
    ids, targets = (rng.integers(0, VOCAB, segments.shape, dtype=np.int32) for _ in range(2))
    weights = (segments > 0) * rng.uniform(0.5, 1, segments.shape).astype(np.float32)
    image = np.zeros(segments.shape, bool) if image is None else image & (segments > 0)
    replay = np.full(segments.shape, replay, np.int32)
    return ids, segments.astype(np.int32), image, replay, targets, weights


@st.composite
def packed(draw, alignment=4):
    """Rows of documents at multiples of the alignment, with padding between; or one document behind left padding."""
    rows = np.zeros((ROWS, TIME), np.int32)
    for row in rows:
        if draw(st.booleans()):
            row[draw(st.integers(0, TIME - 1)) :] = 1
            continue
        start, number = 0, 1
        while start < TIME:
            length = draw(st.integers(0, TIME - start))
            row[start : start + length] = number
            number += length > 0
            start += -(-max(length, 1) // alignment) * alignment
    return rows


@pytest.mark.pitfall("M5")
@given(packed(), st.integers(0, 99), st.booleans(), st.integers(0, 9))
@settings(max_examples=10)
def test_rows_in_eight_parts_equal_whole_rows(segments, seed, images, replay):
    """Three tokens a part: every second cut goes through a pair, windows of four reach over two parts, documents over more."""
    config = tiny_config()
    image = np.random.default_rng(seed).random(segments.shape) < 0.2 if images else None
    # Replay counts positions from a row's start, where no row has left padding.
    replay = replay if segments[:, 0].all() else 0
    params, batch = tiny_params(config), batch_of(seed, segments, image, replay)
    one, eight = (compiled(config, PLAIN, parts) for parts in (1, 8))
    same(eight(params, batch), one(params, batch), [one(near(config, n), batch) for n in range(4)])


@given(st.sampled_from([2, 4, 8]), st.integers(1, 7), st.integers(1, 5), st.integers(0, 12))
@settings(max_examples=12)
def test_parts_of_any_length_give_the_rows_ahead_and_the_groups_of_whole_rows(parts, time, ratio, reach):
    total = parts * time
    row = np.arange(1, total + 1, dtype=np.int32)[None, :, None].repeat(2, axis=2)

    def run(a):
        grouped = context.entries(context.groups(a, ratio), time, ratio)
        index = (jnp.arange(total, dtype=jnp.int32)[None] - reach % total) % total
        return context.ahead(a, reach), grouped, context.turned(a, index, reach), context.part(context.whole(a))

    spec = PartitionSpec(None, "context")
    out = (spec, PartitionSpec(), spec, spec)
    run = jax.jit(jax.shard_map(run, mesh=mesh(parts), in_specs=(spec,), out_specs=out, check_vma=False))
    near, groups, turned, back = map(np.asarray, run(row))
    padded = np.concatenate([np.zeros((1, reach, 2), np.int32), row], axis=1)
    ahead = np.concatenate([padded[:, p * time : p * time + reach] for p in range(parts)], axis=1)
    np.testing.assert_array_equal(near, ahead)
    np.testing.assert_array_equal(groups, row[:, : total // ratio * ratio].reshape(1, -1, ratio, 2))
    np.testing.assert_array_equal(turned, np.roll(row, reach % total, axis=1))
    np.testing.assert_array_equal(back, row)


def moved(config, policy, parts, backward):
    """Name and shape of each collective in a pass over rows in parts, but for sums of a few numbers a row."""
    batch = batch_of(0, np.ones((ROWS, TIME), np.int32))
    shapes = jax.eval_shape(lambda: (init_params(config, jax.random.key(0)), batch))

    def run(params, batch):
        if not backward:
            return forward(config, policy, params, batch).hidden
        loss = lambda p: share(config, policy, p, batch)[0]  # noqa: E731
        return jax.tree.leaves(jax.grad(loss, allow_int=True)(params))[0]

    out = PartitionSpec() if backward else CUT
    run = jax.shard_map(run, mesh=mesh(parts), in_specs=(PartitionSpec(), CUT), out_specs=out, check_vma=False)
    found = [
        (e.primitive.name, v.aval.shape)
        for e in equations(jax.make_jaxpr(run)(*shapes).jaxpr)
        if e.primitive.name.startswith(COLLECTIVES)
        for v in e.outvars
    ]
    return sorted(f for f in found if f[0] != "psum" or np.prod(f[1]) > ROWS * config.n_routed_experts)


def test_devices_exchange_entries_keys_and_window_rows_and_no_hidden_states():
    """Every collective of a pass, but for sums of the losses: none has a hidden state of every token, or of a layer."""
    config, parts = tiny_config(hidden_size=64), 4
    plans, shape = layer_plans(config), lambda *s: (ROWS, *s)
    ids = [("all_gather", shape(TIME))] * 3
    entries = [(plan.ratio, width) for plan in plans if plan.owns_kv for width in (config.head_dim, config.index_head_dim)]
    gathered = [("all_gather", shape(TIME // ratio, width)) for ratio, width in entries]
    windows = [("ppermute", shape(config.sliding_window - 1, config.head_dim))] * len(plans)
    # What turns rows with left padding back; the last layer's hidden states of three tokens.
    turn = [("ppermute", shape(config.document_alignment - 1, config.hidden_size))]
    forward_pass = ids + gathered + windows + turn
    assert moved(config, PLAIN, parts, False) == sorted(forward_pass)
    scattered = [("reduce_scatter", shape(TIME // parts // ratio, width)) for ratio, width in entries]
    assert moved(config, PLAIN, parts, True) == sorted(forward_pass + scattered + windows + turn)
