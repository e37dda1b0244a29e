"""Training text: the running interpreter's standard library, or the user's own files, split by group for scoring."""

import hashlib
import os
import sysconfig
import tokenize
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from dsv41.errors import UserError

STDLIB = "stdlib"

# Whether tests and bundled packages are there depends on who packed the Python.
_SKIPPED_PARTS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"}
# Settings of one build, with paths of the machine that made it: not library text.
_BUILD_PREFIXES = ("_sysconfigdata", "config-")

# A group a little over what is left of the held-out budget is taken; a larger one would distort the fraction.
_OVERSHOOT = 1.5
# The largest share of the text given up so that held-out text is a whole group and not the tail of a training one.
_MAX_WHOLE_GROUP = 0.25


@dataclass(frozen=True)
class Document:
    """One text: its path for people, the group that never straddles the split, and its non-empty text."""

    name: str
    group: str
    text: str


def load_corpus(data: Sequence[str] = (STDLIB,)) -> list[Document]:
    """The documents of ``data``, in an order that depends on names alone, each file once.

    Every entry is ``"stdlib"`` (the .py files of the running interpreter's standard library without its tests; group =
    top-level module or package), a text file (group = its name) or a folder walked in sorted order (group = first path
    component below it). Folder walks skip hidden, empty, binary and non-UTF-8 files and follow links, each folder once.

    Raises `UserError` for a missing or unreadable path, a named file that is not text, and a folder without text.
    """
    documents: list[Document] = []
    seen: set[str] = set()
    check_paths(data)
    for entry in data:
        count = 0
        try:
            for name, group, file, text in _read_entry(entry):
                count += 1
                # One file under two names would sit in two groups, and so perhaps on both sides of the split.
                real = os.path.realpath(file)
                if real not in seen:
                    seen.add(real)
                    documents.append(Document(name, group, text))
        except OSError as error:
            raise UserError(f"data: cannot read {error.filename or entry}: {error.strerror or error}") from error
        if not count:
            raise UserError(f"data: found no text in {entry!r}, allowed is UTF-8 text, in a file or below a folder")
    return documents


def _read_entry(entry: str) -> Iterator[tuple[str, str, Path, str]]:
    """Name, group, file and text of every text in one entry of the data."""
    read = _read_source if entry == STDLIB else _read_text
    for name, group, file in _stdlib_files() if entry == STDLIB else _user_files(entry):
        if text := read(file):
            yield name, group, file, text


def _user_files(entry: str) -> Iterator[tuple[str, str, Path]]:
    path = _path(entry)
    if path.is_dir():
        top = path.resolve().name
        for relative, file in _walk(path, "", set()):
            yield f"{top}/{relative}", relative.split("/")[0], file
    else:
        yield path.name, path.name, path


def check_paths(data: Sequence[str]) -> None:
    """Raises `UserError` for no entry, and for one that is neither ``"stdlib"`` nor a file nor a folder; reads nothing."""
    allowed = f"allowed are {STDLIB!r}, text files and folders"
    if not data:
        raise UserError(f"data: found nothing, {allowed}")
    if "" in data:  # as a path it is the current folder
        raise UserError(f"data: found '', {allowed}")
    for path in map(_path, data):
        if str(path) == STDLIB or path.is_dir() or path.is_file():
            continue
        if path.exists():
            raise UserError(f"data: found a device or pipe at {str(path)!r}, {allowed}")
        kind = "a link to nothing" if path.is_symlink() else "nothing"
        raise UserError(f"data: found {kind} at {str(path)!r}, {allowed}{_nearest_path(path)}")


def _path(entry: str) -> Path:
    # Unlike Path.expanduser this leaves the home of an unknown user as it is.
    return Path(os.path.expanduser(entry))


def _nearest_path(path: Path) -> str:
    """A suggestion from beside ``path``, by the names alone: paths in one folder are always alike."""
    names = [STDLIB] if path.parent == Path() else []
    with suppress(OSError):
        names += sorted(os.listdir(path.parent))
    close = get_close_matches(path.name, names, n=1)
    return f"; did you mean {str(path.with_name(close[0]))!r}?" if close else ""


def _stdlib_files() -> Iterator[tuple[str, str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    for name, path in _walk(root, "", set(), _SKIPPED_PARTS):
        if name.endswith(".py") and not name.startswith(_BUILD_PREFIXES):
            yield name, _module_group(name.split("/")[0].removesuffix(".py")), path


def _module_group(module: str) -> str:
    """One group for a module and its near-copies.

    CPython keeps pure-Python twins of accelerated modules behind ``_py`` (`_pydecimal`, `_pyio`, `_pydatetime`) and
    helpers behind ``_``. Split apart, held-out text would repeat training text, and its score would measure memory.
    """
    name = module.strip("_")
    return (name.removeprefix("py").strip("_") if module.startswith("_") else name) or module


def _walk(folder: Path, prefix: str, seen: set[str], skipped: Container[str] = ()) -> Iterator[tuple[str, Path]]:
    """Files below ``folder`` with their paths relative to the start; each real folder once, so links may loop."""
    real = os.path.realpath(folder)
    if real in seen:
        return
    seen.add(real)
    for name in sorted(os.listdir(folder)):
        path = folder / name
        if name.startswith(".") or name in skipped:
            continue
        if path.is_dir():
            yield from _walk(path, f"{prefix}{name}/", seen, skipped)
        elif path.is_file():
            yield prefix + name, path


def _read_source(path: Path) -> str:
    """Python source by its declared encoding (PEP 263); empty when undecodable."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""


def _read_text(path: Path) -> str:
    """UTF-8 text; empty when not UTF-8, or with a NUL, which text never holds and binary formats do."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return ""
    return "" if "\0" in text else text


def text_bytes(documents: Iterable[Document]) -> int:
    """UTF-8 bytes of all texts."""
    return sum(len(document.text.encode()) for document in documents)


def split_corpus(documents: Sequence[Document], heldout_fraction: float = 0.04) -> tuple[list[Document], list[Document]]:
    """``(train, heldout)``, both non-empty, the same on every machine; held-out is about the fraction of the bytes.

    Whole groups are held out, in the order of the SHA-256 of their names, leaving out those that overshoot the rest of
    the budget by half. When none fits, the smallest group is held out if at most a quarter of the text. Else (a single
    group, or few large ones) the split is by position: the last group's last bytes are held out, and the document in
    which the boundary falls is cut after a line, its head in train and its tail in held-out under the same name.

    Raises `UserError` for a fraction outside (0, 1) and for text too short to cut in two.
    """
    if not 0 < heldout_fraction < 1:
        raise UserError(f"heldout_fraction: found {heldout_fraction}, allowed is above 0 and below 1")
    sizes: dict[str, int] = {}
    for document in documents:
        sizes[document.group] = sizes.get(document.group, 0) + len(document.text.encode())
    total = sum(sizes.values())
    # File names may be any bytes.
    order = sorted(sizes, key=lambda group: hashlib.sha256(group.encode(errors="surrogateescape")).digest())
    budget = total * heldout_fraction
    held: set[str] = set()
    for group in order:
        if budget > 0 and sizes[group] <= _OVERSHOOT * budget and len(held) + 1 < len(sizes):
            held.add(group)
            budget -= sizes[group]
    if not held and len(sizes) > 1:
        smallest = min(order, key=sizes.__getitem__)
        if sizes[smallest] <= _MAX_WHOLE_GROUP * total:
            held.add(smallest)
    if not held:
        # Group after group, so that only one group has text on both sides.
        rank = {group: i for i, group in enumerate(sizes)}
        by_group = sorted(documents, key=lambda document: rank[document.group])
        return _split_by_position(by_group, total * heldout_fraction)
    train = [document for document in documents if document.group not in held]
    return train, [document for document in documents if document.group in held]


def _split_by_position(documents: Sequence[Document], budget: float) -> tuple[list[Document], list[Document]]:
    if len(documents) == 1 and len(documents[0].text) < 2:
        raise UserError("data: found a single character, allowed is text of at least 2, to train on and to score")
    train, heldout = list(documents), []
    while len(train) > 1 and (len(train[-1].text) < 2 or len(train[-1].text.encode()) <= budget):
        budget -= len(train[-1].text.encode())
        heldout.insert(0, train.pop())
    last, tail = train[-1], max(int(budget), 1)
    if heldout and (budget < 1 or len(last.text) < 2):
        return train, heldout
    raw = last.text.encode()
    # The cut falls on a byte; a character that straddles it goes to the tail.
    cut = max(len(raw[: max(len(raw) - tail, 0)].decode(errors="ignore")), 1)
    # Back to a line's start, but not so far that a long line would double the tail.
    cut = last.text.rfind("\n", max(cut - tail, 0), cut) + 1 or cut
    train[-1] = replace(last, text=last.text[:cut])
    return train, [replace(last, text=last.text[cut:]), *heldout]
