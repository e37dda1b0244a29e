"""Documents to rows: cut into pieces that fit a row, packed tightly, each piece on the model's alignment."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dsv41.errors import UserError
from train.tokenizer import BOS_ID, EOS_ID, PAD_ID


class Packed(NamedTuple):
    """Rows of pieces: ``ids`` int32[N, length] and ``segments`` int32[N, length].

    A row's pieces are segments 1, 2, 3... from its start; padding has segment 0 and id `PAD_ID`.
    """

    ids: np.ndarray
    segments: np.ndarray


def check_length(length: int, align: int, least: int = 3, why: str = "", name: str = "length") -> None:
    """Raises `UserError` when ``length`` is no multiple of ``align``, under ``least`` or past 31 bits.

    least: 3 for BOS, a token and EOS. why: what asks for more, as "for synthetic rows". name: the option.
    """
    least, most = -(-least // align) * align, (2**31 - 1) // align * align
    if not least <= length <= most or length % align:
        near = min(max(round(min(length, most) / align) * align, least), most)
        kind = f"a multiple of {align}, " if align > 1 else ""
        allowed = f"{kind}{least} to {most}{f' {why}' if why else ''}"
        raise UserError(f"{name}: found {length}, allowed is {allowed}; nearest is {near}")


def pack(documents: Sequence[np.ndarray], length: int, align: int) -> Packed:
    """Packs token ids, int32[n] each, into rows of ``length``; the same documents give the same rows.

    A document becomes pieces of at most ``length`` tokens: each starts with BOS, the last ends with EOS, and each holds
    at least one token of the document, so that every token of text is predicted exactly once. Empty documents vanish.
    Pieces go whole, largest first, into the row with the least room that takes them, and start at multiples of
    ``align``, so that compression groups and pool blocks never mix two documents.

    Raises `UserError` for a ``length`` that `check_length` refuses.
    """
    check_length(length, align)
    pieces = [piece for document in documents for piece in _pieces(document, length)]
    units = np.array([-(-len(piece) // align) for piece in pieces], np.int64)
    rows, starts, count = _best_fit(units, length // align)
    ids = np.full((count, length), PAD_ID, np.int32)
    segments = np.zeros((count, length), np.int32)
    last = np.zeros(count, np.int32)
    # Pieces of a row get their starts in the order of packing, so that order also numbers the segments.
    for i in np.argsort(-units, kind="stable"):
        row, start, piece = rows[i], starts[i] * align, pieces[i]
        last[row] += 1
        ids[row, start : start + len(piece)] = piece
        segments[row, start : start + len(piece)] = last[row]
    return Packed(ids, segments)


def _pieces(document: np.ndarray, length: int) -> Iterator[np.ndarray]:
    if not len(document):
        return
    content = length - 1
    cuts = list(range(content, len(document), content))
    # A last piece that content fills has no room for EOS: its last token moves to a piece of its own.
    if len(document) % content == 0:
        cuts.append(len(document) - 1)
    for start, end in zip([0, *cuts], [*cuts, len(document)], strict=True):
        tail = [EOS_ID] if end == len(document) else []
        yield np.concatenate([[BOS_ID], document[start:end], tail]).astype(np.int32)


def _best_fit(units: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Best-fit-decreasing of pieces of ``units`` into rows of ``capacity``: row and first unit of each, rows."""
    rows, starts = np.zeros(len(units), np.int64), np.zeros(len(units), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit r is set while a row with r free units exists: the best fit is the lowest set bit from the piece's size up.
    rooms = 0
    count = 0
    for i in np.argsort(-units, kind="stable"):
        size = int(units[i])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms &= ~(1 << room)
        else:
            room, row, count = capacity, count, count + 1
        rows[i], starts[i] = row, capacity - room
        if room > size:
            open_rows[room - size].append(row)
            rooms |= 1 << (room - size)
    return rows, starts, count


def targets_and_weights(ids: np.ndarray, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The next token of each position, int32[..., T], and its weight, float32[..., T].

    The weight is 1 where the next token is of the same segment, else 0 with target `PAD_ID`: at the end of a segment,
    in padding, and at the end of the row.
    """
    targets = np.full_like(ids, PAD_ID, dtype=np.int32)
    weights = np.zeros(ids.shape, np.float32)
    inside = (segments[..., 1:] == segments[..., :-1]) & (segments[..., :-1] > 0)
    targets[..., :-1] = np.where(inside, ids[..., 1:], PAD_ID)
    weights[..., :-1] = inside
    return targets, weights
