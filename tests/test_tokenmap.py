"""The token folding map against golden classes, and what would change their number."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from dsv41.config import ModelConfig
from dsv41.errors import UserError
from dsv41.hashing import multipliers
from dsv41.tokenmap import fold_tokens, token_map

GOLDEN = json.loads((Path(__file__).parent / "golden/unit/token_map_builder.json").read_text())
DECODED, RAW = GOLDEN["decoded"], GOLDEN["byte_level_tokens"]
CLASSES = GOLDEN["compressed_vocab_size"]


def byte_level(tokens):
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def same(first, second, raw=("x", "y")):
    return fold_tokens([first, second], list(raw))[1] == 1


def test_golden_from_decoded_texts():
    ids, count = fold_tokens(DECODED, RAW)
    assert ids.dtype == np.int32
    assert ids.tolist() == GOLDEN["compressed_ids"]
    assert count == CLASSES


def test_golden_from_byte_level_tokens():
    ids, count = token_map(byte_level(RAW), CLASSES)
    assert ids.dtype == np.int32
    assert ids.tolist() == GOLDEN["compressed_ids"]
    assert count == CLASSES


def test_special_and_added_tokens_count():
    tokenizer = byte_level(RAW)
    tokenizer.add_special_tokens(["<\uff5cbegin\u2581of\u2581sentence\uff5c>", "The"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<THINK>", normalized=False)])
    ids, count = token_map(tokenizer)
    # "The" was in the vocabulary already, special or not.
    assert ids.tolist() == [*GOLDEN["compressed_ids"], CLASSES, CLASSES + 1, CLASSES + 1]
    assert count == CLASSES + 2


def test_ids_are_numbered_in_first_seen_order():
    ids, count = fold_tokens(["b", "a", "B", "c", " a"], ["x"] * 5)
    assert ids.tolist() == [0, 1, 0, 2, 1]
    assert count == 3
    assert fold_tokens([], [])[1] == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (" \t\r\n", " "),
        ("a\n\n b", "A B"),
        ("\u3000", " "),  # NFKC: ideographic space
        ("\u2028", "\u2028"),
        ("\u0130", "I"),
        ("\u212b", "a"),  # Angstrom sign
        ("\u03a3\u039f\u03a3", "\u03c3\u03bf\u03c3"),  # each character alone, so no final sigma
        ("\u0939\u093f", "\u0939"),  # a spacing combining mark goes too
        ("\ue000", " "),
    ],
)
def test_texts_of_one_class(first, second):
    assert same(first, second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (" ", "\u200b"),
        (" ", "\x0b"),  # trimmed to nothing, so it stays itself
        ("\x0b", "\x0c"),
        ("a\x1c", "a"),  # str.strip would trim it
        ("", " "),
        ("\u0301", "\u0300"),
        ("\u00df", "ss"),  # lower case, not case folding
        ("\u0131", "i"),
        ("a b", "ab"),
    ],
)
def test_texts_of_two_classes(first, second):
    assert not same(first, second)


def test_partial_characters_keep_their_spelling():
    assert not same("\ufffd", "\ufffd")
    assert same("\ufffd", "\ufffd", ("x", "x"))
    # One name space: a spelling can meet another token's normalised text.
    assert same("\ufffd", "X", ("x", "y"))


@pytest.mark.pitfall("D5")
def test_changed_class_count_raises():
    found = f"^engram_compressed_vocab_size: found {CLASSES - 1}, "
    with pytest.raises(UserError, match=f"{found}.* allowed is {CLASSES}$"):
        token_map(byte_level(RAW), CLASSES - 1)
    # A new spelling makes a new class, one that folds does not.
    assert token_map(byte_level([*RAW, "tHE"]), CLASSES)[1] == CLASSES
    with pytest.raises(UserError, match=f"fold into {CLASSES + 1} classes"):
        token_map(byte_level([*RAW, "new"]), CLASSES)
    size = ModelConfig().engram_compressed_vocab_size
    assert multipliers(1, 4, size) != multipliers(1, 4, size - 1)


def test_unequal_lengths_and_gaps_raise():
    with pytest.raises(UserError, match=r"^raw: found 1 tokens, allowed is 2, one for each decoded text$"):
        fold_tokens(["a", "b"], ["a"])
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 2}, merges=[]))
    with pytest.raises(UserError, match=r"found no token with id 1, allowed are ids 0\.\.1 without a gap"):
        token_map(tokenizer)
