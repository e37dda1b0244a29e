"""Files and folders that users name, refused in one line before anything can hang, fill the memory or be half-written."""

import errno
import fcntl
import json
import math
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dsv41.errors import UserError, cause

SMALL = 1 << 20
# Some network file systems know no locks; work there goes unguarded, as it would without one.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def read_small(file: Path, most: int = SMALL) -> bytes:
    """The content of a regular file of at most ``most`` bytes; `UserError` for any other, missing or unreadable one."""
    try:
        # Before opening: to open a pipe is to wait for its writer.
        info = file.stat()
        if not stat.S_ISREG(info.st_mode):
            raise UserError(f"found {_kind(info)} at {str(file)!r}, allowed is a regular file")
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
        for left in reversed(range(100)):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-"):
                    break
            except (FileNotFoundError, FileExistsError):
                # Another process, which asks the same at the same time, has taken away what it had made.
                if not left:
                    raise
    except OSError as error:
        raise UserError(f"{name}: cannot write {str(folder)!r} ({cause(error)}), allowed is {allowed}") from error
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()


def check_outputs(outputs: Mapping[str, Path | None], inputs: Sequence[Path] = ()) -> None:
    """Proves that `replacing` can write each file, of the option's name, and leaves nothing behind.

    Raises `UserError` for a file in no folder or in one that cannot be written, a folder, device or pipe, one of ``inputs``,
    and one file under two options.
    """
    taken = {os.path.realpath(file): "an input" for file in inputs}
    for name, file in outputs.items():
        if file is None:
            continue
        target = Path(os.path.realpath(file))
        if str(target) in taken:
            raise UserError(f"{name}: found {str(file)!r}, which is {taken[str(target)]}, allowed is a file of its own")
        taken[str(target)] = f"the file of {name} too"
        allowed = "allowed is a file in a folder that exists and can be written"
        try:
            info = target.stat() if target.exists() else None
            if info is not None and not stat.S_ISREG(info.st_mode):
                raise UserError(f"{name}: found {_kind(info)} at {str(file)!r}, {allowed}")
            with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".writable-"):
                pass
        except OSError as error:
            raise UserError(f"{name}: cannot write {str(file)!r} ({cause(error)}), {allowed}") from None


@contextmanager
def locked(folder: Path, name: str = "out", user: str = "a run") -> Iterator[None]:
    """Makes ``folder`` and keeps others, in this process too, out of it meanwhile; `UserError`, of ``name``, where one is in it.

    The lock is the kernel's, on ``folder/lock``, and goes with its process however that ends. Folders that it made go at the end
    if nothing was put into them.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    file = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = _lock(file)
    except BlockingIOError:
        raise UserError(f"{name}: found {user} at work in {str(folder)!r}, allowed is one at a time") from None
    except OSError as error:
        raise UserError(f"{name}: cannot lock {str(file)!r} ({cause(error)}), allowed is a folder that can be written") from None
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()
        os.close(number)
        for path in made:
            with suppress(OSError):
                path.rmdir()


def _lock(file: Path) -> int:
    while True:
        number = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            # Its last owner may have removed it between the two lines above.
            if file.exists() and os.path.samestat(os.fstat(number), file.stat()):
                return number
        except BaseException:
            os.close(number)
            raise
        os.close(number)


def _kind(info: os.stat_result) -> str:
    return "a folder" if stat.S_ISDIR(info.st_mode) else "a device or pipe"


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A temporary path beside ``file`` to write to, which takes its place at the end, or is removed on an error.

    Where ``file`` is a link, what it points to is replaced.
    """
    target = Path(os.path.realpath(file))
    number, name = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".partial")
    partial = Path(name)
    try:
        os.close(number)
        umask = os.umask(0)
        os.umask(umask)
        partial.chmod(0o666 & ~umask)  # mkstemp's files are their owner's alone
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def to_json(value: Any) -> str:
    """``value`` as JSON, in which there are no NaN and no infinities: null in their place."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [plain(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(value), allow_nan=False)


def write_text(file: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    with replacing(file) as partial:
        partial.write_text(text, encoding="utf-8")
