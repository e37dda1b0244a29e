"""Context lengths as they are typed: ``4k,64k,1m`` or the doubling range ``4k..1m``; k is 1024."""

import re

from dsv41.errors import UserError

MOST = 2**30  # positions are int32, and caches are longer by what their length is a multiple of
_UNITS = {"": 1, "k": 1024, "m": 1024**2}
USUAL = (4096, 16384, 65536, 131072, 262144, 524288, 1048576)


def parse_contexts(text: str) -> tuple[int, ...]:
    """Ascending, each once. Raises `UserError` for what is no length, an empty range, or more than 64 lengths."""
    found: set[int] = set()
    for word in text.split(","):
        word = word.strip()
        first, dots, last = word.partition("..")
        low = _length(first, word)
        high = _length(last, word) if dots else low
        if high < low:
            raise UserError(f"contexts: found {word!r}, allowed is a range that goes up; did you mean '{last}..{first}'?")
        while low <= high:
            found.add(low)
            low *= 2
    if len(found) > 64:
        raise UserError(f"contexts: found {len(found)} lengths, allowed are up to 64")
    return tuple(sorted(found))


def _length(number: str, word: str) -> int:
    match = re.fullmatch(r"([0-9]{1,10})([kKmM]?)", number.strip())
    value = int(match[1]) * _UNITS[match[2].lower()] if match else 0
    if not 1 <= value <= MOST:
        raise UserError(f"contexts: found {word!r}, allowed is 1 to {MOST} tokens as 4096, 4k or 1m, or a range 4k..1m")
    return value


def usual_contexts(most: int) -> tuple[int, ...]:
    """The lengths of the report's figures; for a model of less than 64k tokens, doublings up to ``most``."""
    if most >= 65536:
        return tuple(n for n in USUAL if n <= most)
    return tuple(sorted({max(most >> shift, 1) for shift in range(5)}))


def spell(context: int) -> str:
    """``4k`` for 4096, ``1m`` for 1048576; other numbers as they are."""
    for unit in ("m", "k"):
        if context % _UNITS[unit] == 0:
            return f"{context // _UNITS[unit]}{unit}"
    return str(context)
