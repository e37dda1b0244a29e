"""Rows hold every token once, aligned, and are predicted within their own document alone."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.errors import UserError
from train.packing import Packed, pack, targets_and_weights
from train.tokenizer import BOS_ID, EOS_ID, PAD_ID


def numbered(sizes: list[int]) -> list[np.ndarray]:
    """Documents whose tokens are all different, so that each can be found again."""
    ends = np.cumsum([10, *sizes])
    return [np.arange(a, b, dtype=np.int32) for a, b in pairwise(ends)]


def pieces_of(packed: Packed, align: int) -> list[np.ndarray]:
    pieces = []
    for ids, segments in zip(*packed, strict=True):
        assert (ids[segments == 0] == PAD_ID).all()
        starts = []
        for segment in range(1, segments.max() + 1):
            (at,) = np.nonzero(segments == segment)
            assert len(at) and at[0] % align == 0 and at[-1] - at[0] + 1 == len(at)
            starts.append(at[0])
            pieces.append(ids[at])
        assert starts == sorted(starts)
    return pieces


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 90), max_size=20), st.sampled_from([1, 2, 4, 8]), st.integers(1, 5))
def test_every_token_is_in_one_aligned_piece(sizes, align, times):
    length = align * times + (4 if align == 1 else 0)
    documents = numbered(sizes)
    if length < 3:
        with pytest.raises(UserError):
            pack(documents, length, align)
        return
    packed = pack(documents, length, align)
    assert packed.ids.shape == packed.segments.shape and packed.ids.shape[1] == length
    assert packed.ids.dtype == packed.segments.dtype == np.int32
    pieces = pieces_of(packed, align)
    assert all(piece[0] == BOS_ID and len(piece) <= length for piece in pieces)
    # Numbered tokens sort the pieces back into the documents.
    pieces.sort(key=lambda piece: piece[1])
    rest = iter(pieces)
    for document in documents:
        found, ended = [], len(document) == 0
        while not ended:
            piece = next(rest)
            ended = piece[-1] == EOS_ID
            content = piece[1:-1] if ended else piece[1:]
            assert len(content)
            found += content.tolist()
        assert found == document.tolist()
    assert next(rest, None) is None
    again = pack(documents, length, align)
    assert all(np.array_equal(a, b) for a, b in zip(packed, again, strict=True))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_every_token_is_predicted_once_from_its_own_document(sizes):
    documents = numbered(sizes)
    packed = pack(documents, 16, 4)
    targets, weights = targets_and_weights(*packed)
    assert targets.dtype == np.int32 and weights.dtype == np.float32
    assert set(np.unique(weights)) <= {0.0, 1.0}
    predicted = targets[weights == 1]
    expected = np.concatenate([*documents, np.full(len(documents), EOS_ID)])
    assert sorted(predicted) == sorted(expected)
    assert (targets[weights == 0] == PAD_ID).all()
    for row in range(len(targets)):
        for t in range(16):
            inside = t < 15 and packed.segments[row, t] == packed.segments[row, t + 1] > 0
            assert weights[row, t] == inside
            if inside:
                assert targets[row, t] == packed.ids[row, t + 1]


def test_known_rows():
    """Seven tokens fill a piece and leave EOS no room, so the seventh moves to a piece of its own."""
    packed = pack(numbered([3, 7, 1]), 8, 4)
    assert packed.ids.tolist() == [
        [0, 10, 11, 12, 1, 2, 2, 2],
        [0, 13, 14, 15, 16, 17, 18, 2],
        [0, 19, 1, 2, 0, 20, 1, 2],
    ]
    assert packed.segments.tolist() == [
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 2, 2, 2, 0],
    ]


def test_best_fit_fills_the_tightest_row():
    # Units of 4 in rows of 16: 3 and 2 open rows with 1 and 2 free, then 2 goes to the second and 1 to the first.
    packed = pack(numbered([10, 6, 6, 2]), 16, 4)
    assert (packed.segments.max(1) == 2).all() and len(packed.ids) == 2


def test_millions_of_tokens_take_seconds():
    sizes = np.random.default_rng(0).integers(10, 12000, 600)
    documents = [np.full(n, 7, np.int32) for n in sizes]
    start = time.perf_counter()
    packed = pack(documents, 256, 16)
    targets_and_weights(*packed)
    assert time.perf_counter() - start < 10
    assert (packed.segments > 0).mean() > 0.97


@pytest.mark.parametrize(("length", "align", "near"), [(250, 16, 256), (4, 16, 16), (2, 1, 3), (2, 2, 4), (0, 16, 16)])
def test_bad_length(length, align, near):
    with pytest.raises(UserError, match=rf"length: found {length}, .*nearest is {near}$"):
        pack(numbered([5]), length, align)


def test_no_documents_give_no_rows():
    assert pack([], 16, 4).ids.shape == (0, 16)
