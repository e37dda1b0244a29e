"""Text of a token stream, as it comes: no broken characters, nothing of a stop string, nothing that must be taken back."""

from collections.abc import Sequence

from tokenizers import Tokenizer

# Ids kept as context, and how many make the window worth cutting: a push decodes about this many, however long the text.
_KEEP, _LIMIT = 8, 16
# A UTF-8 character has at most this many bytes.
_MAX_BYTES = 4
_REPLACEMENT = "\ufffd"
# Byte-level BPE spells a byte as itself where that is a letter to see, and the others in order from 256 on.
_SEEN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(byte): byte for byte in _SEEN} | {chr(256 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*_SEEN}))}


def spelling(tokenizer: Tokenizer, id: int) -> bytes:
    """The bytes that a token of a byte-level BPE stands for; a special one's are its name."""
    token = tokenizer.id_to_token(id) or ""
    return bytes(_BYTES[c] for c in token) if _BYTES.keys() >= set(token) else token.encode()


class StreamDecoder:
    """Turns ids into text piece by piece; all pieces joined are ``tokenizer.decode(ids)``, for any ids.

    What a token adds is the difference of two decodes of a window of the last ids, so that tokens get the spaces they have
    within a text and not those they have alone. Text is given out once no later id can change it:

    - The last U+FFFD may be the start of a character whose other bytes are still to come.
    - A decoder with byte fallback (``<0x0A>``) judges a run of byte tokens as a whole, so a run waits for its end.

    Decoders that rewrite finished text across tokens in any other way (a pattern applied to the joined text) cannot be
    streamed.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        decoder = tokenizer.decoder
        self._byte_fallback = decoder is not None and decoder.decode(["<0x41>"]) == "A"
        self._ids: list[int] = []
        self._given = 0  # characters of the window's text that were given out

    def push(self, id: int) -> str:
        """Takes the next id; gives the text that became final, perhaps none."""
        token = self._tokenizer.id_to_token(id)
        # Decoding skips both kinds. In the window they would push out the context.
        if token is None or id in self._special:
            return ""
        self._ids.append(id)
        if self._byte_fallback and token.startswith("<0x"):
            return ""
        text = self._tokenizer.decode(self._ids)
        final = len(text) - text.endswith(_REPLACEMENT)
        delta = text[self._given : final]
        self._given = max(self._given, final)
        if len(self._ids) >= _LIMIT:
            self._cut()
        return delta

    def _cut(self) -> None:
        """Forgets all but the last ids, if those tell what comes next as well as all of them do.

        Four characters do: they hold at least the four bytes after which decoding is in step with UTF-8 wherever it began,
        and text at all means that what a decoder strips at the start is over.
        """
        text = self._tokenizer.decode(self._ids[-_KEEP:])
        if len(text) >= _MAX_BYTES:
            del self._ids[:-_KEEP]
            self._given = len(text) - text.endswith(_REPLACEMENT)

    def flush(self) -> str:
        """Ends the stream; gives what was held back, such as U+FFFD for a character that stayed incomplete."""
        text = self._tokenizer.decode(self._ids)[self._given :]
        self._ids, self._given = [], 0
        return text


def begun(text: str, stops: Sequence[str]) -> int:
    """Where the longest end of ``text`` begins that is the start, but not the whole, of one of ``stops``."""
    longest = max(map(len, stops), default=0)
    for at in range(max(len(text) - longest + 1, 0), len(text)):
        if any(len(stop) > len(text) - at and stop.startswith(text[at:]) for stop in stops):
            return at
    return len(text)


class StopStrings:
    """Cuts a stream of text before the first place where any of ``stops`` (none of them empty) occurs.

    The place is the one that ``min(text.find(stop) ...)`` gives for the whole text, however it is split into pieces: a
    stop string that is complete still waits while a longer one that began before it may be. Of stop strings that begin at
    the same place the shortest counts. Text that may be the start of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Takes more text; gives what is safe to show, and whether a stop string was reached, after which nothing follows."""
        if self._stopped:
            return "", True
        return self._give(self._held + text, partial=True)

    def flush(self) -> tuple[str, bool]:
        """Ends the stream; gives what was held back, and whether a stop string was reached."""
        if self._stopped:
            return "", True
        return self._give(self._held, partial=False)

    def _give(self, text: str, partial: bool) -> tuple[str, bool]:
        found = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=len(text))
        start = begun(text, self._stops) if partial else len(text)
        # At the same place the complete one wins; without either both are at the end of the text.
        self._stopped = found <= start and found < len(text)
        end = min(found, start)
        self._held = "" if self._stopped else text[end:]
        return text[:end], self._stopped
