"""A benchmark of its own as a program: its options, bad input as one line exit code 2, and what it was measured on."""

import sys
from collections.abc import Callable
from datetime import date
from typing import Any

import jax
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


def device() -> dict[str, str]:
    """The device's kind, the version of jax and the day, as files of results have them."""
    return {"kind": jax.devices()[0].device_kind, "jax": jax.__version__, "date": date.today().isoformat()}
