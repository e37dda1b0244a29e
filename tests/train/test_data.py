"""The stream of batches depends on the step alone; `prepare` goes from names to rows."""

from itertools import islice

import chex
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.errors import UserError
from train.data import Batch, TrainData, prepare, to_batch
from train.packing import Packed, targets_and_weights
from train.tokenizer import BOS_ID, EOS_ID


def numbered_rows(count: int, length: int = 8) -> Packed:
    ids = np.arange(count * length, dtype=np.int32).reshape(count, length)
    return Packed(ids, np.ones_like(ids))


def rows_of(batch: Batch) -> list[int]:
    return (batch.ids[:, 0] // batch.ids.shape[1]).tolist()


@pytest.mark.pitfall("N8")
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 23), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_no_gap_and_no_repeat_at_epoch_edges(rows, batch_size, seed):
    data = TrainData(numbered_rows(rows), batch_size, seed)
    steps = -(-3 * rows // batch_size)
    stream = [row for step in range(steps) for row in rows_of(data.batch(step))]
    for epoch in range(3):
        assert sorted(stream[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@pytest.mark.pitfall("N8")
@pytest.mark.parametrize("batch_size", [1, 4, 23, 50])
@pytest.mark.parametrize("start", [0, 1, 3, 17, 10**9])
def test_resume_gives_the_same_batches(start, batch_size):
    """23 rows in batches of 4: steps 5 and 11 hold rows of two epochs."""
    whole = TrainData(numbered_rows(23), batch_size, seed=5)
    resumed = TrainData(numbered_rows(23), batch_size, seed=5)
    ahead = list(islice(resumed.iterator(start), 8))
    for step, batch in enumerate(ahead, start):
        chex.assert_trees_all_equal(batch, whole.batch(step))
        chex.assert_trees_all_equal(batch, TrainData(numbered_rows(23), batch_size, seed=5).batch(step))


def test_batch_size_cuts_one_stream():
    by_one = [rows_of(TrainData(numbered_rows(11), 1, 3).batch(s))[0] for s in range(30)]
    by_five = [row for s in range(6) for row in rows_of(TrainData(numbered_rows(11), 5, 3).batch(s))]
    assert by_one == by_five


def test_epochs_and_seeds_differ():
    data = TrainData(numbered_rows(50), 50, 0)
    orders = [rows_of(data.batch(epoch)) for epoch in range(3)]
    other = TrainData(numbered_rows(50), 50, 1)
    orders += [rows_of(other.batch(epoch)) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 6


def test_batch_fields():
    packed = Packed(np.array([[0, 7, 8, 1]], np.int32), np.array([[1, 1, 1, 1]], np.int32))
    batch = TrainData(packed, 2, 0).batch(0)
    for value, dtype in zip(jax.tree.leaves(batch), (np.int32, np.int32, np.int32, np.float32), strict=True):
        assert isinstance(value, np.ndarray) and value.dtype == dtype and value.shape == (2, 4)
    assert batch.targets.tolist() == [[7, 8, 1, 2]] * 2
    assert batch.weights.tolist() == [[1, 1, 1, 0]] * 2
    chex.assert_trees_all_equal(to_batch(packed), jax.tree.map(lambda x: x[:1], batch))


@pytest.mark.parametrize(("batch_size", "seed", "word"), [(0, 0, "batch_size"), (1, -1, "seed"), (1, 2**32, "seed")])
def test_errors(batch_size, seed, word):
    with pytest.raises(UserError, match=f"{word}: found .* nearest is"):
        TrainData(numbered_rows(3), batch_size, seed)


def test_prepare(tmp_path):
    for group in range(30):
        folder = tmp_path / "text" / f"group{group}"
        folder.mkdir(parents=True)
        (folder / "a.py").write_text(f"def function_{group}(value):\n    return value + {group}\n" * 9)
    first = prepare([str(tmp_path / "text")], 300, 32, 16, tmp_path / "cache")
    again = prepare([str(tmp_path / "text")], 300, 32, 16, tmp_path / "cache")
    for a, b in zip([*first.train, *first.heldout], [*again.train, *again.heldout], strict=True):
        np.testing.assert_array_equal(a, b)
    assert first.heldout_bytes == sum(len(d.text.encode()) for d in first.heldout_documents)
    assert first.train_bytes == sum(len(d.text.encode()) for d in first.train_documents)
    assert first.token_bytes[first.train.ids].sum() == first.train_bytes
    targets, weights = targets_and_weights(*first.heldout)
    assert (first.token_bytes[targets] * weights).sum() == first.heldout_bytes
    assert (first.train.ids == EOS_ID).sum() == len(first.train_documents)
    assert (first.train.ids[:, 0] == BOS_ID).all()
