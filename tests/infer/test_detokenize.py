"""Streamed text is the text: every split character, context-dependent decoder and stop string across pieces."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from infer.detokenize import StopStrings, StreamDecoder
from train.tokenizer import BOS_ID, EOS_ID, MIN_VOCAB_SIZE, PAD_ID, train_tokenizer

EMOJI = "🙂🙂삼겹살é"
BYTES = train_tokenizer(["a"], MIN_VOCAB_SIZE)
SPECIALS = [BOS_ID, EOS_ID, PAD_ID]


def _byte_ids() -> list[int]:
    """The id of each byte, in a tokenizer that has no merges."""
    # UTF-8 has no byte C0, C1 or F5 to FF; their ids are never met in texts but a model can emit them.
    ids = {}
    for char in map(chr, [*range(0x800), *range(0x800, 0x110000, 0x400)]):
        if not "\ud800" <= char <= "\udfff":
            ids.update(zip(char.encode(), BYTES.encode(char).ids, strict=True))
    rest = sorted(set(range(3, MIN_VOCAB_SIZE)) - set(ids.values()))
    ids.update(zip([b for b in range(256) if b not in ids], rest, strict=True))
    return [ids[b] for b in range(256)]


BYTE_IDS = _byte_ids()


def byte_level() -> Tokenizer:
    """Merges, some across character boundaries, and added tokens within the text, one of them not spelled in bytes."""
    tokenizer = train_tokenizer([f"{EMOJI} 🙃 hello world, hello\ufffd {EMOJI}" * 20], 330)
    tokenizer.add_tokens(["<think>", AddedToken("a 語", normalized=False)])
    return tokenizer


def word_level(decoder: decoders.Decoder | None, tokens: list[str]) -> Tokenizer:
    """Ids 0, 1, ... decode to ``tokens`` by ``decoder``."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


FALLBACK_BYTES = [f"<0x{b:02X}>" for b in (*"é🙂\n".encode(), 0x41, 0xFF)]
PIECES = ["a", "▁", "▁b", "▁▁", "\ufffd", "語", "<0x", *FALLBACK_BYTES]
FALLBACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
TOKENIZERS = {
    "byte-level": byte_level(),
    "bytes": BYTES,
    "bytes and nothing": word_level(decoders.ByteLevel(), ["", *(BYTES.id_to_token(BYTE_IDS[b]) for b in "🙂a".encode())]),
    "llama": word_level(decoders.Sequence([*FALLBACK, decoders.Strip(" ", 1, 0)]), PIECES),
    # None at the end: there the library itself panics on texts that are shorter.
    "strip": word_level(decoders.Sequence([*FALLBACK, decoders.Strip(" ", 12, 0)]), PIECES),
    "metaspace": word_level(decoders.Metaspace(), PIECES),
    "wordpiece": word_level(decoders.WordPiece(), ["x", "yz", "##q", ".", "'s", "\ufffd", "##\ufffd"]),
    "bpe suffix": word_level(decoders.BPEDecoder("</w>"), ["x", "yz</w>", "</w>", "\ufffd</w>"]),
    "ctc": word_level(decoders.CTC("<pad>", "|", False), ["<pad>", "|", "x", "yz", "\ufffd"]),
    "no decoder": word_level(None, ["x", "yz", "\ufffd"]),
}


def stream(tokenizer: Tokenizer, ids) -> tuple[list[str], str]:
    """What each push gave, and the flush."""
    decoder = StreamDecoder(tokenizer)
    return [decoder.push(i) for i in ids], decoder.flush()


@pytest.mark.pitfall("J4")
@pytest.mark.parametrize("name", ["byte-level", "bytes"])
def test_split_characters_come_whole_and_at_once(name):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(EMOJI).ids
    deltas, rest = stream(tokenizer, ids)
    assert "".join(deltas) == EMOJI and rest == ""
    assert "\ufffd" not in "".join(deltas)
    if name == "bytes":
        assert [d for d in deltas if d] == list(EMOJI)
        assert len(ids) == len(EMOJI.encode())


@pytest.mark.pitfall("J4")
def test_a_partial_character_waits_for_the_end():
    ids = [BYTE_IDS[b] for b in "ok 🙂".encode()[:-1]]
    assert stream(BYTES, ids) == (["o", "k", " ", "", "", ""], "\ufffd")
    # Broken by a letter: final at once.
    assert stream(BYTES, [*ids, BYTE_IDS[ord("!")]]) == (["o", "k", " ", "", "", "", "\ufffd!"], "")
    # A real U+FFFD waits for the next token only.
    deltas, rest = stream(BYTES, [BYTE_IDS[b] for b in "\ufffda".encode()])
    assert (deltas, rest) == (["", "", "", "\ufffda"], "")
    # Ids that give no text neither end nor break a character.
    assert stream(BYTES, [BYTE_IDS[0xC3], *SPECIALS, 10**6, BYTE_IDS[0xA9]]) == ([""] * 5 + ["é"], "")


@pytest.mark.pitfall("J4")
@settings(max_examples=150)
@given(st.text(max_size=60))
@example(EMOJI * 9)
@example("\ufffd" * 40)
def test_texts(text):
    for name in ("byte-level", "bytes"):
        ids = TOKENIZERS[name].encode(text).ids
        deltas, rest = stream(TOKENIZERS[name], ids)
        assert "".join(deltas) + rest == TOKENIZERS[name].decode(ids)
        if "\ufffd" not in text:
            assert "\ufffd" not in "".join(deltas) and rest == ""


# Bytes that begin, continue and break characters, more often than chance would have them.
_TELLING = st.sampled_from(
    [0x41, 0x80, 0x9F, 0xA0, 0xBF, 0xBD, 0xC0, 0xC3, 0xE0, 0xE2, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF, 0x99, 0x82]
)


@pytest.mark.pitfall("J4")
@settings(max_examples=400)
@given(st.lists(st.one_of(_TELLING, st.integers(0, 255), st.just(None)), max_size=70))
@example([0xFF] * 70)
@example([*b"\xf0\x9f\x99"] * 20)
@example([*"🙂".encode()] * 20)
@example([0x9F, 0x99, 0x82, 0xF0] * 20)
def test_bytes_valid_or_not(values):
    ids = [PAD_ID if b is None else BYTE_IDS[b] for b in values]
    deltas, rest = stream(BYTES, ids)
    expected = bytes(b for b in values if b is not None).decode(errors="replace")
    assert "".join(deltas) + rest == BYTES.decode(ids) == expected
    # Nothing complete is held back.
    assert rest in ("", "\ufffd")


@pytest.mark.pitfall("J4")
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100)
@given(data=st.data())
def test_any_ids(name, data):
    tokenizer = TOKENIZERS[name]
    size = tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 1), max_size=80))
    # Also long repeats, which keep a window in one state: all spaces, all padding, all half characters.
    ids += data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4)) * data.draw(st.integers(0, 20))
    deltas, rest = stream(tokenizer, ids)
    assert "".join(deltas) + rest == tokenizer.decode(ids)


def test_little_text_in_the_window_keeps_the_context():
    spaces, a = [PIECES.index("▁")] * 30, PIECES.index("a")
    assert stream(TOKENIZERS["strip"], [*spaces, a]) == ([""] * 12 + [" "] * 18 + ["a"], "")
    # Ids: nothing, four bytes, "a".
    deltas, rest = stream(TOKENIZERS["bytes and nothing"], [5, 1, 2, 3, *[0] * 30, 4, 5])
    assert (deltas, rest) == (["a", *[""] * 33, "🙂", "a"], "")
    ids = [1, *[0] * 8, 2, 3, 4, *[0] * 5, 1, *[0] * 20, 5]
    deltas, rest = stream(TOKENIZERS["bytes and nothing"], ids)
    assert "".join(deltas) + rest == "🙂\ufffda"


def test_a_space_depends_on_what_came_before():
    tokenizer = TOKENIZERS["llama"]
    b = PIECES.index("▁b")
    assert stream(tokenizer, [b, b]) == (["b", " b"], "")


def test_a_run_of_fallback_bytes_waits_for_its_end():
    tokenizer = TOKENIZERS["llama"]
    good, bad, a = PIECES.index("<0x41>"), PIECES.index("<0xFF>"), PIECES.index("a")
    assert stream(tokenizer, [good, good, a]) == (["", "", "AAa"], "")
    # One bad byte spoils the good ones before it.
    assert stream(tokenizer, [good, bad]) == (["", ""], "\ufffd\ufffd")


class _Counting:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self.decoded = tokenizer, 0

    def decode(self, ids):
        self.decoded += len(ids)
        return self._tokenizer.decode(ids)

    def id_to_token(self, id):
        return self._tokenizer.id_to_token(id)


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("byte-level", TOKENIZERS["byte-level"].encode("hello world, ").ids),
        ("bytes", [BYTE_IDS[b] for b in "🙂".encode()]),
        ("bytes", [BYTE_IDS[0xFF]]),
        ("bytes", [BYTE_IDS[0xF0], BYTE_IDS[0x9F], BYTE_IDS[0x99]]),
        ("bytes", [BYTE_IDS[65], PAD_ID, PAD_ID, PAD_ID]),
        ("llama", [PIECES.index("▁")]),
        ("llama", [PIECES.index("<0x41>")]),
        ("llama", [*[PIECES.index("<0x41>")] * 40, 0]),
    ],
)
def test_cost_per_token_does_not_grow(name, ids):
    decoder = StreamDecoder(TOKENIZERS[name])
    counting = decoder._tokenizer = _Counting(TOKENIZERS[name])
    stream_ids = (ids * 4000)[:4000]
    pieces = [decoder.push(i) for i in stream_ids] + [decoder.flush()]
    assert "".join(pieces) == TOKENIZERS[name].decode(stream_ids)
    assert counting.decoded <= 30 * 4000


def reference(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


def run_stops(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    matcher, shown = StopStrings(stops), ""
    for n, piece in enumerate(pieces):
        safe, stopped = matcher.push(piece)
        shown += safe
        arrived = "".join(pieces[: n + 1])
        # Shown text never needs to be taken back, and what is held could still become a stop string.
        assert arrived.startswith(shown)
        held = arrived[len(shown) :]
        assert stopped or not held or any(s.startswith(held) or held.startswith(s[:1]) for s in stops)
        if stopped:
            assert matcher.push("more") == ("", True) and matcher.flush() == ("", True)
            return shown, True
    safe, stopped = matcher.flush()
    return shown + safe, stopped


@settings(max_examples=500)
@given(
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=3).map(tuple),
    st.lists(st.text("abc", max_size=4), max_size=12),
)
@example(("abcd", "bc"), ["ab", "c", "a"])
@example(("aab",), ["a", "a", "a", "b"])
def test_stop_strings_in_any_pieces(stops, pieces):
    expected = reference("".join(pieces), stops)
    assert run_stops(stops, pieces) == expected
    assert run_stops(stops, list("".join(pieces))) == expected


def test_stop_string_holds_back_no_more_than_needed():
    matcher = StopStrings(["</end>", "\n\n"])
    assert matcher.push("text </") == ("text ", False)
    assert matcher.push("b> \n") == ("</b> ", False)
    assert matcher.push("x</e") == ("\nx", False)
    assert matcher.push("nd> tail") == ("", True)
    assert StopStrings([]).push("any") == ("any", False)
    waiting = StopStrings(["abcd", "bc"])
    assert waiting.push("xabc") == ("x", False), "abcd would begin earlier"
    assert waiting.flush() == ("a", True)
    same = StopStrings(["ab", "abc"])
    assert same.push("xab") == ("x", True), "the shorter of two at one place"
