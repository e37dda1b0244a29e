"""The one error type that users meet, and the nearest-name suggestion every such error carries."""

from collections.abc import Iterable
from difflib import get_close_matches


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
