"""Embedding, head and cross-entropy in parts along the mesh axis `model`, against one device."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from dsv41.vocabulary import embedded, whole_logits
from tests.models import equations
from train.losses import chunked_sums

PARTS, VOCAB, WIDTH = 8, 61, 16
HELD = -(-VOCAB // PARTS) * PARTS
SHAPE = (2, 9)


def loss(table, head, ids, targets, weights):
    """Sums of the loss in three chunks, of hidden states that are the embedding's."""
    sums = chunked_sums(states(table, ids), head, targets, weights, most=6 * head.shape[0], vocab=VOCAB)
    return sums.nats + 0.1 * sums.squared_log_z


def states(table, ids):
    return jnp.tanh(embedded(table, ids) * 3.0)


def shares(*args):
    value, grads = jax.value_and_grad(lambda *args: loss(*args) / PARTS, (0, 1))(*args)
    return lax.psum(value, "model"), grads


def logits(table, head, ids):
    return whole_logits(states(table, ids), head, VOCAB)


MESH = jax.make_mesh((PARTS,), ("model",), axis_types=(AxisType.Auto,))
ROWS = PartitionSpec("model")
IN = (ROWS, ROWS, *(PartitionSpec(),) * 3)
SHARDED = jax.shard_map(shares, mesh=MESH, in_specs=IN, out_specs=(PartitionSpec(), (ROWS, ROWS)), check_vma=False)
LOGITS = jax.shard_map(logits, mesh=MESH, in_specs=IN[:3], out_specs=PartitionSpec(), check_vma=False)
RUN, RUN_LOGITS = jax.jit(SHARDED), jax.jit(LOGITS)
ONE, ONE_LOGITS = jax.jit(jax.value_and_grad(loss, (0, 1))), jax.jit(logits)


def arguments(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    table, head = (rng.standard_normal((VOCAB, WIDTH)).astype(np.float32) * np.float32(scale) for _ in range(2))
    ids, targets = (rng.integers(0, VOCAB, SHAPE, dtype=np.int32) for _ in range(2))
    return table, head, ids, targets, rng.integers(0, 3, SHAPE).astype(np.float32)


def held(rows):
    """With rows past the vocabulary that would take every maximum."""
    return np.concatenate([rows, np.full((HELD - VOCAB, WIDTH), 1e3, np.float32)])


@given(st.integers(0, 999), st.sampled_from([0.1, 1.0, 100.0]))
@settings(max_examples=10)
def test_vocabulary_in_eight_parts_equals_the_whole(seed, scale):
    table, head, *batch = arguments(seed, scale)
    value, grads = RUN(held(table), held(head), *batch)
    want, want_grads = ONE(table, head, *batch)
    # float32 sums of at most 61 exponentials in another order, and 16 products: 1e-5 of the largest value, headroom 10. A logit
    # is off by 2**-24 of the largest for each of a few sums, and its exponential by as much of itself.
    logits = ONE_LOGITS(table, head, batch[0])
    apart = max(1e-5, 8 * 2**-24 * float(np.abs(logits).max()))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=apart * max(1e-30, float(np.abs(b).max())))  # noqa: E731
    close(value, want)
    np.testing.assert_allclose(RUN_LOGITS(held(table), held(head), batch[0]), logits, rtol=0, atol=1e-5 * np.abs(logits).max())
    for grad, want_grad in zip(grads, want_grads, strict=True):
        close(grad[:VOCAB], want_grad)
        assert not np.asarray(grad[VOCAB:]).any()


def test_the_loss_exchanges_no_logits_and_no_rows_of_the_vocabulary():
    tokens = SHAPE[0] * SHAPE[1]
    table, head, *batch = arguments(0)
    moved = [
        v.aval.size
        for e in equations(jax.make_jaxpr(SHARDED)(held(table), held(head), *batch).jaxpr)
        if e.primitive.name.startswith(("psum", "pmax", "all_gather", "all_to_all", "reduce_scatter"))
        for v in e.outvars
    ]
    # Embedding rows forward and back; of a chunk's loss three numbers a token.
    assert moved and max(moved) == tokens * WIDTH and sum(size == tokens * WIDTH for size in moved) <= 2
