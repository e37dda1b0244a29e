"""Files and folders that users name, refused in one line before anything can hang, fill the memory or be half-written."""

import json
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from dsv41.errors import UserError, cause

SMALL = 1 << 20


def read_small(file: Path, most: int = SMALL) -> bytes:
    """The content of a regular file of at most ``most`` bytes; `UserError` for any other, missing or unreadable one."""
    try:
        # Before opening: to open a pipe is to wait for its writer.
        info = file.stat()
        if not stat.S_ISREG(info.st_mode):
            found = "a folder" if stat.S_ISDIR(info.st_mode) else "a device or pipe"
            raise UserError(f"found {found} at {str(file)!r}, allowed is a regular file")
        if info.st_size > most:
            raise UserError(f"found {info.st_size:,} bytes in {str(file)!r}, allowed are at most {most:,}")
        with file.open("rb") as stream:
            return stream.read(info.st_size)
    except FileNotFoundError:
        raise UserError(f"no file {str(file)!r}") from None
    except OSError as error:
        raise UserError(f"cannot read {str(file)!r}: {cause(error)}") from None


def read_json(file: Path, most: int = SMALL) -> Any:
    """The value in a JSON file that `read_small` takes; `UserError` where there is none."""
    try:
        return json.loads(read_small(file, most).decode())
    except UserError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError of its own
        raise UserError(f"{str(file)!r} is not JSON: {error}") from None


def make_writable(folder: Path, name: str = "out", allowed: str = "a folder that can be written") -> None:
    """Proves that ``folder`` can be made and written, and leaves nothing behind; raises `UserError`, of ``name``, when not."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-"):
            pass
    except OSError as error:
        raise UserError(f"{name}: cannot write {str(folder)!r} ({cause(error)}), allowed is {allowed}") from error
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()
