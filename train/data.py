"""Training batches by step number alone, and the way from named data to packed rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grain
import numpy as np
from flax import struct
from tokenizers import Tokenizer

from dsv41.errors import UserError
from train.corpus import Document, load_corpus, split_corpus, text_bytes
from train.packing import Packed, pack, targets_and_weights
from train.tokenizer import cached_tokenizer, encode_documents, token_bytes

_MAX_SEED = 2**32 - 1
# Grain counts the batches of a repeat without end in floating point, past what len() can return when they hold one row.
_EPOCHS = 2**32
# Deep enough to hide the making of a batch behind a step; a batch is small.
_PREFETCH = 8


@struct.dataclass
class Batch:
    """Packed rows with what to predict: ids, segments and targets int32[B, T], weights float32[B, T].

    image bool[B, T]: image tokens, where there are any. replay int32[B, T], chosen int32[B, K]: where decoder replay is
    simulated, as `dsv41.replay` takes them.
    """

    ids: np.ndarray
    segments: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    image: np.ndarray | None = None
    replay: np.ndarray | None = None
    chosen: np.ndarray | None = None


def to_batch(packed: Packed) -> Batch:
    """All rows of ``packed`` as one batch, in their order: for scoring."""
    targets, weights = targets_and_weights(*packed)
    return Batch(packed.ids, packed.segments, targets, weights)


class _Rows:
    """Random access to packed rows, as grain's source."""

    def __init__(self, packed: Packed):
        self._packed = packed

    def __len__(self) -> int:
        return len(self._packed.ids)

    def __getitem__(self, row: int) -> Packed:
        return Packed(self._packed.ids[row], self._packed.segments[row])


def check_stream(batch_size: int, seed: int) -> None:
    """Raises `UserError` for a batch size under 1 and a seed outside 32 bits."""
    if batch_size < 1:
        raise UserError(f"batch_size: found {batch_size}, allowed is 1 or more; nearest is 1")
    if not 0 <= seed <= _MAX_SEED:
        near = min(max(seed, 0), _MAX_SEED)
        raise UserError(f"seed: found {seed}, allowed is 0 to {_MAX_SEED}; nearest is {near}")


class TrainData:
    """An endless stream of rows: every epoch all rows once in an order of its own, with no gap between epochs.

    Step s takes positions ``s * batch_size`` to ``(s + 1) * batch_size - 1`` of the stream, whatever ran before it and
    on however many hosts, so the step number is all there is to store for a resume.

    Raises `UserError` for arguments that `check_stream` refuses.
    """

    def __init__(self, packed: Packed, batch_size: int, seed: int):
        check_stream(batch_size, seed)
        rows = grain.MapDataset.source(_Rows(packed)).seed(seed).shuffle().repeat(_EPOCHS)
        self._batches = rows.batch(batch_size).map(to_batch)

    def batch(self, step: int) -> Batch:
        """The batch of ``step`` (from 0), as numpy arrays."""
        batch = self._batches[step]
        assert batch is not None  # only filtered data sets have holes
        return batch

    def iterator(self, start_step: int = 0) -> Iterator[Batch]:
        """``batch(start_step)``, ``batch(start_step + 1)``... without end, made ahead in a background thread."""
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCH)
        return iter(self._batches[start_step:].to_iter_dataset(options))


@dataclass(frozen=True)
class Prepared:
    """Everything a run reads: documents of both splits, the tokenizer trained on the first, and both packed.

    ``heldout_bytes`` counts the text in the held-out rows, the denominator of bits per byte; ``token_bytes`` is
    int32[vocabulary], the bytes of each token (0 for special ones).
    """

    tokenizer: Tokenizer
    token_bytes: np.ndarray
    train_documents: list[Document]
    heldout_documents: list[Document]
    train: Packed
    heldout: Packed
    train_bytes: int
    heldout_bytes: int


def prepare(data: Sequence[str], vocab_size: int, length: int, align: int, cache_dir: Path) -> Prepared:
    """Loads ``data``, splits it, trains or finds the tokenizer in ``cache_dir``, and packs rows of ``length`` tokens.

    The same data give the same arrays. Raises `UserError` for whatever in the arguments cannot be used.
    """
    train_documents, heldout_documents = split_corpus(load_corpus(data))
    tokenizer = cached_tokenizer(train_documents, vocab_size, cache_dir)
    sizes = token_bytes(tokenizer)
    heldout = pack(encode_documents(tokenizer, heldout_documents), length, align)
    return Prepared(
        tokenizer=tokenizer,
        token_bytes=sizes,
        train_documents=train_documents,
        heldout_documents=heldout_documents,
        train=pack(encode_documents(tokenizer, train_documents), length, align),
        heldout=heldout,
        train_bytes=text_bytes(train_documents),
        heldout_bytes=int(sizes[heldout.ids].sum()),
    )
