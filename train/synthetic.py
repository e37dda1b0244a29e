"""Rows with answers that only a long look back can give: needles, recall among many keys, copies (training §9).

A row is one document: BOS, a text of any ids as hay, the task's own tokens in it, and at its end a question and its answer.
Three ordinary ids serve as marks.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from dsv41.errors import UserError, nearest
from train.data import Batch
from train.packing import Packed, targets_and_weights
from train.tokenizer import BOS_ID, EOS_ID, SPECIAL_TOKENS

KEY, VALUE, PAIRS, SPAN = 2, 2, 8, 8
ALPHABET = 256  # ids of the pairs of `pairs_row`
# What a token of an answer, which has 2 or 8 of them, and any other weigh in training.
_WEIGHT, _REST = 8.0, 0.25
_MARK, _ASK, _COPY = range(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + 3)
_FIRST = _COPY + 1
TASKS = ("needle", "recall", "copy")


class Row(NamedTuple):
    """ids int32[length]; answer: the indices of the tokens to be told; depth: where in the hay they stood, 0 to 1."""

    ids: np.ndarray
    answer: np.ndarray
    depth: float


def least_length(task: str) -> int:
    """The shortest row that holds a task, with as much hay as tokens of its own."""
    own = {"needle": 1, "recall": PAIRS, "copy": 1}[task] * _piece(task) + _question(task)
    return 2 * own


def _piece(task: str) -> int:
    return 1 + SPAN if task == "copy" else 1 + KEY + VALUE


def _question(task: str) -> int:
    return 3 + SPAN if task == "copy" else 3 + KEY + VALUE  # with BOS and EOS


def make_row(task: str, hay: np.ndarray | None, length: int, vocab: int, depth: float, rng: np.random.Generator) -> Row:
    """A row of ``length`` tokens whose answer stands at ``depth`` of the hay, 0 its beginning and 1 just before the question.

    hay: at least ``length`` ids to take text from; None for random ids. Raises `UserError` for an unknown task, a length
    too short for it, and a vocabulary without ids to make keys of.
    """
    if task not in TASKS:
        raise UserError(f"task: found {task!r}, allowed are {', '.join(TASKS)}{nearest(task, TASKS)}")
    if length < least_length(task):
        least = least_length(task)
        raise UserError(f"length: found {length}, allowed is {least} or more for task {task!r}; nearest is {least}")
    if vocab <= _FIRST + 1:
        raise UserError(f"vocab_size: found {vocab}, allowed is {_FIRST + 2} or more for tasks; nearest is {_FIRST + 2}")
    draw = lambda count: rng.integers(_FIRST, vocab, count).astype(np.int32)  # noqa: E731
    if task == "copy":
        span = draw(SPAN)
        pieces, question, answer = [np.r_[_MARK, span]], [_COPY], span
    else:
        pairs = PAIRS if task == "recall" else 1
        keys = _distinct(pairs, vocab, rng)
        values = [draw(VALUE) for _ in range(pairs)]
        pieces = [np.r_[_MARK, key, value] for key, value in zip(keys, values, strict=True)]
        question, answer = [_ASK, *keys[0]], values[0]
    room = length - 2 - sum(map(len, pieces)) - len(question) - len(answer)
    filler = draw(room) if hay is None else _clean(np.asarray(hay[:room], np.int32), vocab, rng)
    # The one that is asked for first; the others anywhere.
    places = np.r_[round(depth * room), rng.integers(0, room + 1, len(pieces) - 1)].astype(int)
    parts, at = [np.array([BOS_ID])], 0
    for n in np.argsort(places, kind="stable"):
        parts += [filler[at : places[n]], pieces[n]]
        at = places[n]
    ids = np.concatenate([*parts, filler[at:], question, answer, [EOS_ID]]).astype(np.int32)
    return Row(ids, np.arange(length - 1 - len(answer), length - 1), depth)


def pairs_row(
    hay: np.ndarray, length: int, vocab: int, depths: np.ndarray, rng: np.random.Generator, alphabet: int = ALPHABET
) -> tuple[np.ndarray, np.ndarray]:
    """A row of ``length`` tokens with a pair at each of ``depths`` and, at its end, a question for every one, in random order.

    Also where each pair's value is told again, int[pairs, 2]. alphabet: how many ids, the last of ``vocab``, pairs are made of;
    the hay has none of them, and no two pairs share one. Raises `UserError` for a length, a vocabulary or an alphabet too small.
    """
    own = len(depths) * (KEY + VALUE)
    least = 2 * (own + len(depths)) + 2
    if length < least:
        raise UserError(f"length: found {length}, allowed is {least} or more for {len(depths)} pairs; nearest is {least}")
    if alphabet < own:
        raise UserError(f"alphabet: found {alphabet}, allowed is {own} or more for {len(depths)} pairs; nearest is {own}")
    first = vocab - alphabet
    if first <= _FIRST:
        least = _FIRST + alphabet + 1
        raise UserError(f"vocab_size: found {vocab}, allowed is {least} or more for pairs of {alphabet} ids; nearest is {least}")
    pairs = first + rng.permutation(alphabet)[:own].reshape(len(depths), -1)
    filler = np.asarray(hay[: length - least], np.int32)
    filler = np.where((filler < _FIRST) | (filler >= first), rng.integers(_FIRST, first, len(filler)), filler)
    marked = lambda mark, n: np.r_[mark, pairs[n]]  # noqa: E731
    places = np.round(np.asarray(depths) * len(filler)).astype(int)
    parts, at = [np.array([BOS_ID], np.int32)], 0
    for n in np.argsort(places, kind="stable"):
        parts += [filler[at : places[n]], marked(_MARK, n)]
        at = places[n]
    order = rng.permutation(len(depths))
    row = np.concatenate([*parts, filler[at:], *(marked(_ASK, n) for n in order), [EOS_ID]]).astype(np.int32)
    begins = np.empty(len(depths), int)
    begins[order] = length - 1 - (1 + KEY + VALUE) * np.arange(len(depths), 0, -1) + 1 + KEY
    return row, begins[:, None] + np.arange(VALUE)


def _distinct(count: int, vocab: int, rng: np.random.Generator) -> list[np.ndarray]:
    keys: dict[tuple[int, ...], None] = {}
    while len(keys) < count:
        keys[tuple(rng.integers(_FIRST, vocab, KEY).tolist())] = None
    return [np.array(key, np.int32) for key in keys]


def _clean(hay: np.ndarray, vocab: int, rng: np.random.Generator) -> np.ndarray:
    """Hay without marks and special ids, which would look like the task's."""
    return np.where(hay < _FIRST, rng.integers(_FIRST, vocab, len(hay)), hay).astype(np.int32)


def to_task_batch(rows: list[Row]) -> Batch:
    """A batch that weighs the answers alone, 1 each: for scoring."""
    ids = np.stack([row.ids for row in rows])
    targets, weights = targets_and_weights(ids, np.ones_like(ids))
    weights = np.zeros_like(weights)
    for n, row in enumerate(rows):
        weights[n, row.answer - 1] = 1.0
    return Batch(ids, np.ones_like(ids), targets, weights)


def mixed(batch: Batch, share: float, vocab: int, rng: np.random.Generator) -> Batch:
    """``batch`` with ``share`` of its rows, the last ones, turned into tasks with their text as hay.

    Of such a row's tokens the answer weighs 8 each and all others a quarter: keys are random, and text is cut at seams.
    """
    rows, length = batch.ids.shape
    turned = Packed(batch.ids.copy(), batch.segments.copy())
    targets, weights = batch.targets.copy(), batch.weights.copy()
    for row in range(rows - round(share * rows), rows):
        made = make_row(TASKS[int(rng.integers(len(TASKS)))], turned.ids[row], length, vocab, float(rng.random()), rng)
        turned.ids[row], turned.segments[row] = made.ids, 1
        targets[row], own = targets_and_weights(made.ids, turned.segments[row])
        own *= _REST
        own[made.answer - 1] = _WEIGHT
        weights[row] = own
    return replace(batch, ids=turned.ids, segments=turned.segments, targets=targets, weights=weights)


def task_accuracy(logits_argmax: Any, batch: Batch) -> np.ndarray:
    """Of each row, whether every token of its answer is the likeliest, bool[B]."""
    right = (np.asarray(logits_argmax) == batch.targets) | (batch.weights == 0)
    return right.all(axis=1)
