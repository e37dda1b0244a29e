"""The baseline equals its definition, computed the slow way with exact fractions."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.corpus import Document, load_corpus, split_corpus
from train.ngram import ByteModel, bits_per_byte


def documents(texts: list[str]) -> list[Document]:
    return [Document(str(i), str(i), text) for i, text in enumerate(texts)]


def slow_probability(texts: list[str], context: bytes, byte: int) -> Fraction:
    after: Counter[int] = Counter()
    for text in texts:
        raw = text.encode()
        for i in range(len(context), len(raw)):
            if raw[i - len(context) : i] == context:
                after[raw[i]] += 1
    shorter = slow_probability(texts, context[1:], byte) if context else Fraction(1, 256)
    total, distinct = sum(after.values()), len(after)
    return (after[byte] + distinct * shorter) / (total + distinct) if total else shorter


def slow_bits(train: list[str], heldout: list[str]) -> float:
    bits, count = 0.0, 0
    for text in heldout:
        raw = text.encode()
        count += len(raw)
        for i in range(len(raw)):
            bits -= math.log2(slow_probability(train, raw[max(i - 2, 0) : i], raw[i]))
    return bits / count


texts = st.lists(st.text("abß\n", min_size=1, max_size=8), min_size=1, max_size=4)


@settings(max_examples=20, deadline=None)
@given(texts, texts)
def test_equals_the_slow_model(train, heldout):
    assert bits_per_byte(documents(train), documents(heldout)) == pytest.approx(slow_bits(train, heldout), rel=1e-12)


def test_probabilities_sum_to_one():
    model = ByteModel(documents(["abracadabra", "cabß", "a", "\u20ac"]))
    contexts = {0: [0], 1: [97, 98, 0, 255], 2: [97 * 256 + 98, 98 * 256 + 114, 97 * 256 + 255, 0, 65535]}
    for order, values in contexts.items():
        for context in values:
            p = model.probability(np.full(256, context), np.arange(256), order)
            assert (p > 0).all()
            assert p.sum() == pytest.approx(1, abs=1e-12)


def test_standard_library_baseline():
    bits = bits_per_byte(*split_corpus(load_corpus()))
    assert 2.3 < bits < 3.2
