"""The tokenizer loses nothing, is the same everywhere, and its cache heals."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv41.errors import UserError
from train.corpus import Document
from train.tokenizer import (
    BOS_ID,
    EOS_ID,
    MIN_VOCAB_SIZE,
    PAD_ID,
    cache_root,
    cached_tokenizer,
    encode_documents,
    token_bytes,
    tokenizer_from_json,
    train_tokenizer,
)

ROOT = Path(__file__).parents[2]
SOURCE = "def add(first, second):\n        return first + second  # 1234\n\n\nclass Ünïcode:\n        value = 'ß'\n" * 40
TOKENIZER = train_tokenizer([SOURCE], 400)
DOCUMENTS = [Document("a", "a", SOURCE), Document("b", "b", "x = [1, 2]\n")]


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
@example("<bos><eos><pad> <bos>\n<pad>")
@example(" a  b\t\n\r\n   c \x00\ufeff\u2028\U0001f600e\u0301")
def test_round_trip_and_token_bytes(text):
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids) == text
    assert not {BOS_ID, EOS_ID, PAD_ID} & set(ids)
    assert token_bytes(TOKENIZER)[ids].sum() == len(text.encode())


def test_special_tokens_and_vocabulary():
    assert [TOKENIZER.token_to_id(t) for t in ("<bos>", "<eos>", "<pad>")] == [BOS_ID, EOS_ID, PAD_ID] == [0, 1, 2]
    assert MIN_VOCAB_SIZE <= TOKENIZER.get_vocab_size() <= 400
    sizes = token_bytes(TOKENIZER)
    assert sizes.dtype == np.int32 and sizes.shape == (TOKENIZER.get_vocab_size(),)
    assert not sizes[:3].any() and sizes[3:].all()
    assert TOKENIZER.decode([BOS_ID, *TOKENIZER.encode("hi").ids, EOS_ID, PAD_ID]) == "hi"


def test_code_patterns():
    tokens = [TOKENIZER.decode([i]) for i in TOKENIZER.encode("def add(first):\n        return first + 1234\n").ids]
    assert "\n        " in tokens and "return" in tokens
    assert [t for t in tokens if any(c.isdigit() for c in t)] == ["1", "2", "3", "4"]


def test_smallest_vocabulary_is_bytes():
    tokenizer = train_tokenizer([SOURCE], MIN_VOCAB_SIZE)
    assert tokenizer.get_vocab_size() == MIN_VOCAB_SIZE
    assert len(tokenizer.encode("aß").ids) == 3
    with pytest.raises(UserError, match="vocab_size: found 258, allowed is 259"):
        train_tokenizer([SOURCE], MIN_VOCAB_SIZE - 1)


def test_training_is_the_same_in_another_process_and_on_one_thread():
    code = (
        "import sys; from train.tokenizer import train_tokenizer as t; from pathlib import Path;"
        "sys.stdout.write(t([Path(p).read_text() for p in sys.argv[1:]], 700).to_str())"
    )
    files = [str(ROOT / "dsv41" / "errors.py"), str(ROOT / "train" / "corpus.py"), str(ROOT / "train" / "tokenizer.py")]
    expected = train_tokenizer([Path(f).read_text() for f in files], 700).to_str()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    found = subprocess.run([sys.executable, "-c", code, *files], env=env, capture_output=True, text=True, check=True)
    assert found.stdout == expected


def test_encode_documents():
    encoded = encode_documents(TOKENIZER, DOCUMENTS)
    assert [e.dtype for e in encoded] == [np.int32, np.int32]
    assert [TOKENIZER.decode(e) for e in encoded] == [d.text for d in DOCUMENTS]


def test_cache_is_used_keyed_by_content_and_healed(tmp_path, monkeypatch):
    folder = tmp_path / "new" / "cache"
    first = cached_tokenizer(DOCUMENTS, 300, folder).to_str()
    (file,) = folder.iterdir()
    good = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("train.tokenizer.train_tokenizer", None)
        kept = cached_tokenizer(DOCUMENTS, 300, folder)
    assert kept.to_str() == first
    assert kept.decode(kept.encode("<bos>").ids) == "<bos>"
    parses = good.replace(b"]", b"] ", 1)
    for damaged in (b"", good[:100], good[:-1], good + b" ", b"\xff\xfe", parses):
        file.write_bytes(damaged)
        assert cached_tokenizer(DOCUMENTS, 300, folder).to_str() == first
        assert file.read_bytes() == good
    cached_tokenizer(DOCUMENTS, 301, folder)
    cached_tokenizer(DOCUMENTS[:1], 300, folder)
    assert len(list(folder.iterdir())) == 3


def test_failed_cache_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match=r"cache: cannot write .*No space left"):
        cached_tokenizer(DOCUMENTS, 300, tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cache: cannot write"):
        cached_tokenizer(DOCUMENTS, 300, tmp_path / "file")


def test_cache_root(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("DSV41_CACHE", raising=False)
    assert cache_root() == Path("/home/me/.cache/dsv41")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/xdg/dsv41")
    monkeypatch.setenv("DSV41_CACHE", "~/own")
    assert cache_root() == Path("/home/me/own")


def test_json_errors():
    assert tokenizer_from_json(TOKENIZER.to_str()).to_str() == TOKENIZER.to_str()
    with pytest.raises(UserError, match="tokenizer: found no tokenizer"):
        tokenizer_from_json("{}")
    with pytest.raises(UserError, match="tokenizer: found ids 0-2"):
        tokenizer_from_json(TOKENIZER.to_str().replace("<bos>", "<s>"))
