"""The baseline that a trained model must beat: an interpolated byte model that sees the two previous bytes."""

from collections.abc import Sequence

import numpy as np

from train.corpus import Document

BYTES = 256


def _flatten(documents: Sequence[Document]) -> tuple[np.ndarray, np.ndarray]:
    """All bytes int64[n], and for each the number of bytes before it in its document, int64[n]."""
    parts = [np.frombuffer(document.text.encode(), np.uint8) for document in documents]
    sizes = np.array([len(part) for part in parts], np.int64)
    starts = np.cumsum(sizes) - sizes
    return np.concatenate(parts).astype(np.int64), np.arange(sizes.sum()) - np.repeat(starts, sizes)


class ByteModel:
    """Order-2 byte model, Witten-Bell interpolated 2 -> 1 -> 0 -> uniform, counted on ``documents`` one by one.

    ``p_n(b | context) = (count(context, b) + distinct(context) * p_{n-1}(b)) / (count(context) + distinct(context))``;
    a context never seen has no counts, and leaves the shorter one's probability.
    """

    def __init__(self, documents: Sequence[Document]):
        data, before = _flatten(documents)
        self._zero = np.bincount(data, minlength=BYTES)
        one = data[:-1] * BYTES + data[1:]
        self._one = np.bincount(one[before[1:] >= 1], minlength=BYTES**2).reshape(BYTES, BYTES)
        two = one[:-1] * BYTES + data[2:]
        self._two = np.bincount(two[before[2:] >= 2], minlength=BYTES**3).reshape(BYTES**2, BYTES)
        self._p_zero = _interpolate(
            self._zero, np.asarray(self._zero.sum()), np.asarray((self._zero > 0).sum()), np.full(BYTES, 1 / BYTES)
        )
        self._totals = [counts.sum(-1) for counts in (self._one, self._two)]
        self._distinct = [np.count_nonzero(counts, -1) for counts in (self._one, self._two)]

    def probability(self, context: np.ndarray, byte: np.ndarray, order: int) -> np.ndarray:
        """float64[n]: probability of ``byte`` int[n] after ``context`` int[n], the last ``order`` bytes, big-endian.

        ``order`` is 0, 1 or 2; at order 0 the context is not read.
        """
        if order == 0:
            return self._p_zero[byte]
        shorter = self.probability(context % BYTES, byte, order - 1)
        counts = (self._one, self._two)[order - 1]
        totals, distinct = self._totals[order - 1], self._distinct[order - 1]
        return _interpolate(counts[context, byte], totals[context], distinct[context], shorter)


def _interpolate(count: np.ndarray, total: np.ndarray, distinct: np.ndarray, shorter: np.ndarray) -> np.ndarray:
    return np.where(total > 0, (count + distinct * shorter) / np.maximum(total + distinct, 1), shorter)


def bits_per_byte(train: Sequence[Document], heldout: Sequence[Document]) -> float:
    """Bits per byte of ``heldout`` under `ByteModel` of ``train``; a document's first bytes see shorter contexts."""
    model = ByteModel(train)
    data, before = _flatten(heldout)
    previous = np.concatenate([[0], data[:-1]])
    context = np.concatenate([[0], previous[:-1]]) * BYTES + previous
    bits = 0.0
    for order in (0, 1, 2):
        at = before == order if order < 2 else before >= 2
        bits -= np.log2(model.probability(context[at] % BYTES**order, data[at], order)).sum()
    return float(bits / len(data))
