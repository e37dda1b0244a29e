"""A benchmark of its own as a program: its options, and bad input as one line and exit code 2, as the command line has it."""

import sys
from collections.abc import Callable
from typing import Any

import tyro

from dsv41.cli import spelled
from dsv41.errors import UserError


def run(main: Callable[[Any], None], options: type) -> None:
    """``main`` of the options that ``sys.argv`` gives; fields of theirs are said as options."""
    try:
        main(tyro.cli(options, description=sys.modules[main.__module__].__doc__))
    except UserError as error:
        print(f"error: {spelled(str(error), options)}", file=sys.stderr)
        raise SystemExit(2) from None
