"""Tasks of a long look back: where their answers stand, and that nothing but a look back tells them; replayed batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41.errors import UserError
from train.data import to_batch
from train.packing import Packed
from train.replay import replayed
from train.synthetic import (
    _ASK,
    _COPY,
    _FIRST,
    _MARK,
    KEY,
    SPAN,
    TASKS,
    VALUE,
    make_row,
    mixed,
    pairs_row,
    task_accuracy,
    to_task_batch,
)
from train.tokenizer import BOS_ID, EOS_ID


def row(task="needle", length=128, depth=0.5, seed=0, hay=None, vocab=300):
    return make_row(task, hay, length, vocab, depth, np.random.default_rng(seed))


def solve(ids: np.ndarray) -> np.ndarray:
    """The answer, by looking for the question's key, or the copied span, in the row itself."""
    ids = ids.tolist()
    if _COPY in ids:
        start = ids.index(_MARK) + 1
        return np.array(ids[start : start + SPAN])
    ask = ids.index(_ASK)
    key = ids[ask + 1 : ask + 1 + KEY]
    starts = [n for n in range(ask) if ids[n] == _MARK and ids[n + 1 : n + 1 + KEY] == key]
    assert len(starts) == 1, "one mark has the key that is asked for"
    return np.array(ids[starts[0] + 1 + KEY : starts[0] + 1 + KEY + VALUE])


@given(st.sampled_from(TASKS), st.integers(94, 300), st.floats(0, 1), st.integers(0, 99), st.booleans())
def test_a_row_tells_its_answer_once_and_asks_for_it_at_its_end(task, length, depth, seed, random_hay):
    hay = None if random_hay else np.arange(length) % 50  # text with ids that stand for marks
    made = row(task, length, depth, seed, hay)
    assert made.ids.shape == (length,) and made.ids.dtype == np.int32
    assert made.ids[0] == BOS_ID and made.ids[-1] == EOS_ID and made.ids.max() < 300
    np.testing.assert_array_equal(made.ids[made.answer], solve(made.ids))
    assert made.answer[-1] == length - 2
    assert np.all(made.ids[1:-1] >= _MARK)


@pytest.mark.parametrize("task", ["needle", "copy"])
def test_depth_is_where_the_answer_stands(task):
    for depth in (0.0, 0.25, 0.5, 1.0):
        at = row(task, 400, depth).ids.tolist().index(_MARK)
        assert abs(at - 1 - depth * 380) <= 20
    with pytest.raises(UserError, match=r"task: found 'neddle'.* did you mean 'needle'"):
        row("neddle")
    with pytest.raises(UserError, match=r"length: found 20, allowed is \d+ or more for task 'recall'"):
        row("recall", 20)
    with pytest.raises(UserError, match="vocab_size: found 7"):
        row(vocab=7)


def test_a_row_counts_only_when_its_whole_answer_is_right():
    batch = to_task_batch([row(seed=n) for n in range(3)])
    assert batch.weights.sum(axis=1).tolist() == [VALUE] * 3
    told = batch.targets.copy()
    told[0, :100] = 0  # where nothing is asked
    last = np.flatnonzero(batch.weights[1])[-1]
    told[1, last] += 1
    assert task_accuracy(told, batch).tolist() == [True, False, True]


def test_part_of_a_batch_becomes_tasks_with_its_own_text_as_hay():
    ids = np.random.default_rng(0).integers(_FIRST, 300, (4, 96)).astype(np.int32)
    batch = to_batch(Packed(ids, np.ones_like(ids)))
    made = mixed(batch, 0.5, 300, np.random.default_rng(1))
    np.testing.assert_array_equal(made.ids[:2], ids[:2])
    np.testing.assert_array_equal(made.weights[:2], batch.weights[:2])
    for n in (2, 3):
        np.testing.assert_array_equal(made.targets[n, :-1], made.ids[n, 1:])
        assert set(np.unique(made.weights[n])) == {0.0, 0.25, 8.0}
        assert np.isin(made.ids[n], ids[n]).mean() > 0.5
        answer = made.weights[n] == 8
        np.testing.assert_array_equal(made.targets[n][answer], solve(made.ids[n]))
    again = mixed(batch, 0.5, 300, np.random.default_rng(1))
    np.testing.assert_array_equal(made.ids, again.ids)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(100, 200), st.integers(0, 99))
def test_every_pair_of_a_row_is_asked_for_and_its_tokens_stand_nowhere_else(depths, length, seed):
    ids, answers = pairs_row(np.arange(length) % 250, length, 300, np.array(depths), np.random.default_rng(seed), 40)
    assert ids.shape == (length,) and ids.dtype == np.int32 and answers.shape == (len(depths), VALUE)
    hay = length - 10 * len(depths) - 2
    for depth, answer in zip(depths, answers, strict=True):
        own = ids[answer[0] - KEY : answer[-1] + 1]
        assert ids[answer[0] - KEY - 1] == _ASK
        (told,) = (n for n in np.flatnonzero(ids == _MARK) if ids[n + 1] == own[0])
        np.testing.assert_array_equal(ids[told + 1 : told + 1 + KEY + VALUE], own)
        assert all((ids == token).sum() == 2 for token in own)
        before = int((ids[:told] == _MARK).sum())
        assert told - 1 - 5 * before == round(depth * hay)
    assert answers.max() == length - 2 and ids[-1] == EOS_ID
    with pytest.raises(UserError, match="length: found 20, allowed is 22 or more for 2 pairs; nearest is 22"):
        pairs_row(ids, 20, 300, np.zeros(2), np.random.default_rng(0))
    with pytest.raises(UserError, match="vocab_size: found 46, allowed is 47 or more for pairs of 40 ids; nearest is 47"):
        pairs_row(ids, 100, 46, np.zeros(2), np.random.default_rng(0), 40)
    with pytest.raises(UserError, match="alphabet: found 7, allowed is 8 or more for 2 pairs; nearest is 8"):
        pairs_row(ids, 100, 300, np.zeros(2), np.random.default_rng(0), 7)


@given(st.integers(0, 999), st.integers(1, 8), st.booleans())
def test_replayed_batches(seed, window, half):
    rng = np.random.default_rng(seed)
    segments = np.repeat(np.arange(1, 9), rng.integers(1, 12, 8))[:48]
    segments = np.pad(segments, (0, 48 - len(segments)))[None].astype(np.int32)
    ids = rng.integers(3, 99, (1, 48)).astype(np.int32)
    batch = to_batch(Packed(ids, segments))
    made = replayed(batch, window, half, np.random.default_rng(seed))
    for name in ("ids", "segments", "targets"):
        np.testing.assert_array_equal(getattr(made, name), getattr(batch, name))
    chosen = [] if made.chosen is None else made.chosen[0][made.chosen[0] < 48].tolist()
    assert (made.chosen is not None) == half
    for segment in range(1, segments.max() + 1):
        at = np.flatnonzero(segments[0] == segment)
        (start,) = set(made.replay[0, at].tolist())
        weighed = at[made.weights[0, at] > 0] - at[0]
        if len(weighed):
            prompt = int(weighed[0]) + 1
            assert start == max(0, prompt - window)
            np.testing.assert_array_equal(made.weights[0, at[prompt - 1 :]], batch.weights[0, at[prompt - 1 :]])
        if half:
            inside = [n for n in chosen if segments[0, n] == segment]
            assert inside == at[start:].tolist() and len(inside) <= len(at) / 2
            assert set((at[0] + weighed).tolist()) <= set(inside)
    assert chosen == sorted(chosen)
