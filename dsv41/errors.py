"""The one error type that users meet, the nearest-name suggestion every such error carries, and text safe to print."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

# C0 but newline and tab, DEL, C1, and what reorders the text around it.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class UserError(ValueError):
    """Bad input, said in one line: what, found, allowed, nearest valid spelling.

    The command line prints it without a traceback and ends with exit code 2.
    """


def nearest(name: str, allowed: Iterable[str]) -> str:
    """``"; did you mean 'toy'?"`` for the closest of ``allowed``, or an empty string when none is close."""
    match = get_close_matches(name, list(allowed), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def cause(error: Exception) -> str:
    """What went wrong, without the path that an operating system's error repeats."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def escaped(text: str) -> str:
    """``text`` with controls, and what is no text in a file's name, as escapes such as ``\\x1b``."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}" if found[0] < "\u0100" else f"\\u{ord(found[0]):04x}", text)
