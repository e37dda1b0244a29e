"""Engram's token folding map: ids whose texts differ only in case, accents, width or space share a class (§11.1)."""

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

from dsv41.errors import UserError

_SPACE = "\ue000"  # stands for a text of one space while the ends are trimmed
_UNDECODABLE = "\ufffd"  # what decoding gives for part of a character
# The tokenizer's own normalisers, not unicodedata and str: they drop all combining marks, lower-case character by
# character (no final sigma) and trim less than str.strip, each of which changes the number of classes.
_NORMALIZER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"\A \z"), _SPACE),
        normalizers.Strip(),
        normalizers.Replace(_SPACE, " "),
    ]
)


def fold_tokens(decoded: list[str], raw: list[str]) -> tuple[np.ndarray, int]:
    """The class of each id, ``int32 [V]`` numbered in first-seen order, and the number of classes.

    decoded: each id's text, decoded alone; raw: its spelling in the vocabulary, which decides where the text is no
    whole character. A text that normalises to nothing stays itself. Raises `UserError` for lists of unequal lengths.
    """
    if len(decoded) != len(raw):
        raise UserError(f"raw: found {len(raw)} tokens, allowed is {len(decoded)}, one for each decoded text")
    classes: dict[str, int] = {}
    ids = np.empty(len(decoded), np.int32)
    for n, (text, token) in enumerate(zip(decoded, raw, strict=True)):
        key = token if _UNDECODABLE in text else _NORMALIZER.normalize_str(text) or text
        ids[n] = classes.setdefault(key, len(classes))
    return ids, len(classes)


def token_map(tokenizer: Tokenizer, expected: int | None = None) -> tuple[np.ndarray, int]:
    """`fold_tokens` of every id of ``tokenizer``, added and special tokens too: ``int32 [V]`` and the class count.

    V is the tokenizer's own size, which may be less than the model's ``vocab_size``. expected: the configuration's
    ``engram_compressed_vocab_size``, on which every multiplier and so every table row depends. Raises `UserError` when
    the count differs from it and when an id below V has no token.
    """
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    raw = []
    for n in range(size):
        token = tokenizer.id_to_token(n)
        if token is None:
            raise UserError(f"tokenizer: found no token with id {n}, allowed are ids 0..{size - 1} without a gap")
        raw.append(token)
    # Not decode_batch: its threads would make every later fork of this process warn.
    decoded = [tokenizer.decode([n], skip_special_tokens=False) for n in range(size)]
    ids, count = fold_tokens(decoded, raw)
    if expected is not None and count != expected:
        raise UserError(
            f"engram_compressed_vocab_size: found {expected}, but the tokenizer's {size} tokens fold into {count}"
            f" classes; allowed is {count}"
        )
    return ids, count
