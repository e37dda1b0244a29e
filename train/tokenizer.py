"""Byte-level BPE trained on the training text: lossless, and the same vocabulary for the same text everywhere."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dsv41.errors import UserError
from dsv41.files import write_text
from train.corpus import Document

BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>")
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256

# Merges stay within one match. Line breaks keep the indentation that follows, so a code line's depth is one token;
# a word keeps one mark or space before it (`.join`, ` return`); digits stay single, so numbers have one spelling.
_PATTERN = r"[^\s\p{L}\p{N}]?\p{L}+| \p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+[ \t]*|\s+(?!\S)|\s+"
CACHE_ALLOWED = "a writable folder in $DSV41_CACHE"
# Part of the cache key: raise it when anything but the pattern changes what training gives.
_RECIPE = 1


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer with `SPECIAL_TOKENS` as ids 0-2, all 256 bytes, and merges learned from ``texts``.

    ``decode(encode(text).ids) == text`` for every string; text that spells a special token is encoded as text. Small
    ``texts`` may run out of merges, so the vocabulary has at most ``vocab_size`` entries.

    Raises `UserError` for a ``vocab_size`` below `MIN_VOCAB_SIZE`.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"vocab_size: found {vocab_size}, allowed is {MIN_VOCAB_SIZE} (256 bytes and {len(SPECIAL_TOKENS)} special"
            f" tokens) or more; nearest is {MIN_VOCAB_SIZE}"
        )
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def tokenizer_from_json(text: str) -> Tokenizer:
    """The tokenizer whose ``to_str()`` is ``text``; raises `UserError` when ``text`` is not one of this module's.

    The JSON does not hold the rule that special tokens in text are text; `Tokenizer.from_str` alone would lose it.
    """
    tokenizer = foreign_tokenizer(text)
    found = [tokenizer.id_to_token(i) for i in range(len(SPECIAL_TOKENS))]
    if found != list(SPECIAL_TOKENS):
        raise UserError(f"tokenizer: found ids 0-2 = {found}, allowed is {list(SPECIAL_TOKENS)}")
    tokenizer.encode_special_tokens = True
    return tokenizer


def foreign_tokenizer(text: str) -> Tokenizer:
    """Any tokenizer's JSON, as a released checkpoint brings it; raises `UserError` when ``text`` is not one."""
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())
        raise UserError(f"tokenizer: found no tokenizer ({reason}), allowed is the JSON of a byte-level BPE") from error


def cache_root() -> Path:
    """Where what can be made again is kept: $DSV41_CACHE, or dsv41 below $XDG_CACHE_HOME or ~/.cache."""
    # Unlike Path.expanduser this leaves the home of an unknown user as it is.
    if own := os.environ.get("DSV41_CACHE"):
        return Path(os.path.expanduser(own))
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "dsv41"


def cached_tokenizer(documents: Sequence[Document], vocab_size: int, cache_dir: Path) -> Tokenizer:
    """`train_tokenizer` on the documents' texts, kept in ``cache_dir`` under a digest of all that decides the result.

    A cache file that is damaged or cut short is made again. Raises `UserError` when ``cache_dir`` cannot be written.
    """
    recipe = [_RECIPE, tokenizers.__version__, _PATTERN, SPECIAL_TOKENS, vocab_size]
    digest = hashlib.sha256(json.dumps(recipe).encode())
    for document in documents:
        raw = document.text.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    path = cache_dir / f"tokenizer-{digest.hexdigest()[:32]}.json"
    if (kept := _read_cache(path)) is not None:
        return kept
    tokenizer = train_tokenizer((document.text for document in documents), vocab_size)
    _write_cache(path, tokenizer.to_str())
    return tokenizer


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_cache(path: Path) -> Tokenizer | None:
    try:
        checksum, text = path.read_text(encoding="utf-8").split("\n", 1)
        return tokenizer_from_json(text) if checksum == _checksum(text) else None
    except (OSError, ValueError):
        return None


def _write_cache(path: Path, text: str) -> None:
    # The checksum is for damage that still parses: a changed merge would quietly give other tokens.
    content = f"{_checksum(text)}\n{text}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, content)
    except OSError as error:
        raise UserError(f"cache: cannot write {str(path.parent)!r} ({error.strerror}), allowed is {CACHE_ALLOWED}") from error


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[np.ndarray]:
    """Token ids of each document, int32[n], without BOS and EOS."""
    encoded = tokenizer.encode_batch_fast([document.text for document in documents], add_special_tokens=False)
    return [np.array(encoding.ids, np.int32) for encoding in encoded]


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """UTF-8 bytes that each token stands for, int32[vocabulary]; 0 for special tokens.

    Summed over the ids of a text it gives ``len(text.encode())``, the denominator of bits per byte.
    """
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    # Byte-level BPE spells every byte as one character.
    sizes = [0 if i in special else len(tokenizer.id_to_token(i)) for i in range(tokenizer.get_vocab_size())]
    return np.array(sizes, np.int32)
