"""Checkpoints: a folder a step, whole or absent whatever interrupts the writing, and checked when read.

Orbax writes and reads the arrays. Around that: a folder takes its final name in one rename, and ``checkpoint.json`` in
it holds the caller's facts, the name, shape and dtype of every array, and a checksum of every file. Orbax's storage
detects a cut file but hands out the numbers of one whose bytes changed.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from dsv41.errors import UserError
from train.processes import any_of, leads, meet, several

_MANIFEST = "checkpoint.json"
_PARAMS, _REST = "params", "rest"
_STEP = re.compile(r"0|[1-9][0-9]*")
# Of a save cut short (Orbax adds a suffix of its own while it writes), and of a removal cut short.
_PARTIAL, _REMOVED = ".partial", ".removed"
_LEFTOVER = re.compile(rf"[0-9]+(\{_PARTIAL}|\{_REMOVED})(\..*)?")
_TENSORSTORE_ERRNO = re.compile(r"os_error_code='(\d+)'")
_CHUNK = 1 << 24
# After a save that failed: seconds between looks for what its threads still write, looks without any, and looks at most.
_PAUSE, _CALM, _LOOKS = 0.05, 4, 100
_WRITER = ThreadPoolExecutor(1)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax logs the tracebacks of its threads besides raising what they raised.

    Where one array fails it closes its event loop, which TensorStore's threads then call for all the others, each with a
    traceback of its own, also some time later.
    """
    logger = logging.getLogger("absl")
    level, hook = logger.level, sys.unraisablehook

    def unraisable(found: Any) -> None:
        if not (isinstance(found.exc_value, RuntimeError) and str(found.exc_value) == "Event loop is closed"):
            hook(found)

    logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = unraisable
    try:
        yield
        sys.unraisablehook = hook
    finally:
        logger.setLevel(level)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _reason(error: BaseException) -> str:
    """Why, in a few words: the operating system's where there are any."""
    for link in _chain(error):
        found = _TENSORSTORE_ERRNO.search(str(link))
        number = link.errno if isinstance(link, OSError) else int(found[1]) if found else None
        if number is not None:
            return os.strerror(number)
    last = list(_chain(error))[-1]
    return f"{type(last).__name__}: {' '.join(str(last).split())[:160]}"


def _flat(tree: Any) -> dict[str, Any]:
    """The leaves by their dotted paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(flat) != len(leaves):
        raise ValueError("two leaves of the state have one path")
    return flat


def _split(state: Any) -> dict[str, dict[str, Any]]:
    """The parameters apart, so that they can be read alone."""
    return {_PARAMS: _flat(state.params), _REST: _flat(dataclasses.replace(state, params=None))}


def _described(flat: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in flat.items()}


def _is_manifest(value: Any) -> bool:
    """Whether JSON is what `Checkpoints.save` writes: readers take its parts as they are."""

    def is_array(described: Any) -> bool:
        if not (isinstance(described, list) and len(described) == 2 and isinstance(described[1], str)):
            return False
        try:
            jnp.dtype(described[1])
        except TypeError:
            return False
        return _are_sizes(described[0])

    if not isinstance(value, dict) or not all(isinstance(value.get(part), dict) for part in ("meta", "arrays", "files")):
        return False
    if type(value.get("step", 0)) is not int:
        return False
    arrays = itertools.chain(*(item.values() if isinstance(item, dict) else [None] for item in value["arrays"].values()))
    return all(map(is_array, arrays)) and all(_are_sizes(checksum) and len(checksum) == 2 for checksum in value["files"].values())


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _checksum(file: Path) -> list[int]:
    """Size and CRC-32."""
    size = crc = 0
    with open(file, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


def _files(folder: Path) -> list[str]:
    """The files below ``folder``, sorted, without hidden ones, which operating systems leave behind and Orbax does not write."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Checkpoints:
    """The checkpoints in ``directory``, one folder for each step; the newest ``keep`` stay.

    A state is a dataclass that is a pytree of arrays, none of them empty, with its parameters in the field
    ``params``. One process writes at a time, or all of one run together; others may read meanwhile. As a context it waits for
    `save_behind` at its end.
    """

    def __init__(self, directory: str | Path, keep: int = 2):
        self._directory = Path(directory).absolute()
        self._keep = keep
        self._writing: Future[None] | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def steps(self) -> list[int]:
        """The steps of the finished checkpoints, ascending; none where there is no folder."""
        try:
            names = [entry.name for entry in os.scandir(self._directory) if entry.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"checkpoints: cannot read {str(self._directory)!r} ({_reason(error)})") from error
        return sorted(int(name) for name in names if _STEP.fullmatch(name))

    def latest(self) -> int | None:
        """The newest step, None where there is no checkpoint."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, meta: dict[str, Any], extra: dict[str, dict[str, Any]] | None = None) -> None:
        """Writes ``state`` and the JSON object ``meta``, then removes all but the newest ``keep`` checkpoints.

        extra: more items of named arrays beside the state's, each of which `restore_extra` reads alone.

        Until the new checkpoint is complete the others are untouched, and a failure leaves them so. A step that is
        there already is replaced. Raises `UserError` where the folder cannot be written or the disk is full.
        """
        items = {**_split(state), **{name: arrays for name, arrays in (extra or {}).items() if arrays}}
        partial = self._directory / f"{step}{_PARTIAL}"
        failed = True
        try:
            if leads():
                self._directory.mkdir(parents=True, exist_ok=True)
                self._clean()
            meet(f"save {step}")
            with _quiet():
                ocp.save_checkpointables(partial, items)
            if leads():
                self._finish(step, partial, items, meta)
            failed = False
        except (OSError, ValueError, RuntimeError, LookupError) as error:
            # TensorStore's threads go on for a moment, and make the folder again for what they write.
            calm = 0
            for _ in range(_LOOKS if leads() else 0):
                calm = 0 if self._clean() else calm + 1
                if calm == _CALM:
                    break
                time.sleep(_PAUSE)
            raise UserError(f"checkpoints: cannot write step {step} to {str(self._directory)!r} ({_reason(error)})") from error
        finally:
            meet(f"saved {step}")
            failed = any_of(failed)
        if failed:
            raise UserError(f"checkpoints: another process cannot write step {step} to {str(self._directory)!r}")

    def _finish(self, step: int, partial: Path, items: dict[str, dict[str, Any]], meta: dict[str, Any]) -> None:
        """What `save` does when the arrays are written."""
        manifest = {
            "step": step,
            "meta": meta,
            "arrays": {name: _described(flat) for name, flat in items.items()},
            "files": {name: _checksum(partial / name) for name in _files(partial)},
        }
        (partial / _MANIFEST).write_text(json.dumps(manifest) + "\n", encoding="utf-8")
        _sync(partial / _MANIFEST)
        self._retire(step)
        partial.rename(self._directory / str(step))
        _sync(self._directory)
        for old in self.steps()[: -self._keep]:
            self._retire(old)
        self._clean()

    def save_behind(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """`save` in a thread of its own, of a copy in this host's memory: ``state`` may be donated at once.

        Waits for the one before it, and raises what that would have raised. Of several processes each writes its parts, at
        once.
        """
        self.wait()
        if several():
            self.save(step, state, meta)
            return
        # A copy: on CPU what device_get gives is the device's own memory.
        copy = jax.tree.map(lambda leaf: np.array(leaf, copy=True), jax.device_get(state))
        self._writing = _WRITER.submit(self.save, step, copy, meta)

    def wait(self) -> None:
        """Returns when `save_behind` has written; raises `UserError` where it could not."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        """The state saved at ``step``, bit for bit, and its ``meta``.

        ``abstract_state`` is the state as `jax.ShapeDtypeStruct` leaves, on whose shardings (default: the first device)
        the arrays come. Raises `UserError` for a checkpoint that is missing, damaged, or of another shape.
        """
        abstract = _split(abstract_state)
        manifest = self._manifest(step)
        loaded = self._load(step, manifest, abstract)
        params = jax.tree.unflatten(jax.tree.structure(abstract_state.params), loaded[_PARAMS].values())
        rest = dataclasses.replace(abstract_state, params=None)
        rest = jax.tree.unflatten(jax.tree.structure(rest), loaded[_REST].values())
        return dataclasses.replace(rest, params=params), manifest["meta"]

    def restore_params(self, step: int, abstract_params: Any) -> Any:
        """The parameters saved at ``step`` alone; the rest as in `restore`."""
        loaded = self._load(step, self._manifest(step), {_PARAMS: _flat(abstract_params)})
        return jax.tree.unflatten(jax.tree.structure(abstract_params), loaded[_PARAMS].values())

    def restore_extra(self, step: int, item: str) -> dict[str, Any]:
        """The arrays of an item that `save` was given as ``extra``, on the first device; none where there is no such item.

        Raises `UserError` for a checkpoint that is missing or damaged.
        """
        manifest = self._manifest(step)
        described = manifest["arrays"].get(item, {})
        abstract = {name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)) for name, (shape, dtype) in described.items()}
        return self._load(step, manifest, {item: abstract})[item] if abstract else {}

    def check(self, step: int) -> None:
        """Raises `UserError` where `restore` would for a checkpoint that is missing or damaged; its arrays are not loaded."""
        manifest = self._manifest(step)
        self._check_files(step, manifest["files"], set(manifest["arrays"]) - {_PARAMS, _REST})

    def described(self, step: int) -> dict[str, dict[str, Any]]:
        """Shape and dtype of every array of every item, as ``{item: {name: [shape, dtype]}}``."""
        return self._manifest(step)["arrays"]

    def meta(self, step: int) -> dict[str, Any]:
        """What `save` was given as ``meta``."""
        return self._manifest(step)["meta"]

    def fingerprint(self, step: int) -> bytes:
        """A digest of what `save` wrote, by the checksums of its files."""
        manifest = self._manifest(step)
        return hashlib.sha256(json.dumps([manifest["arrays"], manifest["files"]], sort_keys=True).encode()).digest()

    def _where(self, step: int) -> str:
        return f"checkpoint {str(self._directory / str(step))!r}"

    def _manifest(self, step: int) -> dict[str, Any]:
        steps = self.steps()
        if step not in steps:
            found = f"found steps {', '.join(map(str, steps))}" if steps else "found none"
            raise UserError(f"checkpoints: no step {step} in {str(self._directory)!r}, {found}")
        try:
            manifest = json.loads((self._directory / str(step) / _MANIFEST).read_text(encoding="utf-8"))
            if not _is_manifest(manifest):
                raise TypeError("of another form")
            # Absent in those of an older version.
            written = manifest.get("step", step)
        except OSError as error:
            raise UserError(f"{self._where(step)}: cannot read {_MANIFEST} ({_reason(error)})") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"{self._where(step)}: {_MANIFEST} is damaged") from error
        if written != step:
            raise UserError(f"{self._where(step)} is damaged: what it holds was written as step {written}")
        return manifest

    def _load(self, step: int, manifest: dict[str, Any], abstract: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for item, flat in abstract.items():
            self._check_arrays(step, manifest["arrays"].get(item, {}), _described(flat))
        self._check_files(step, manifest["files"], {_PARAMS, _REST, *manifest["arrays"]} - set(abstract))
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or device),
            abstract,
        )
        loaded: dict[str, Any] = {}
        try:
            with _quiet():
                # One at a time: where one fails, Orbax leaves the coroutines of those beside it without an end.
                for item, flat in target.items():
                    loaded |= ocp.load_checkpointables(self._directory / str(step), {item: flat})
        except (OSError, ValueError, RuntimeError, LookupError) as error:
            raise UserError(f"{self._where(step)}: cannot read the arrays ({_reason(error)})") from error
        # In the order of the target's leaves, which is not that of the stored names.
        return {item: {name: loaded[item][name] for name in flat} for item, flat in abstract.items()}

    def _check_arrays(self, step: int, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
        """Orbax would cast an array of another dtype without a word."""
        wrong = [
            f"{name} is {_say(stored.get(name))}, the model's is {_say(wanted.get(name))}"
            for name in sorted({*stored, *wanted})
            if stored.get(name) != wanted.get(name)
        ]
        if wrong:
            more = f" (and {len(wrong) - 1} more arrays differ)" if len(wrong) > 1 else ""
            raise UserError(f"{self._where(step)} is of another model: {wrong[0]}{more}")

    def _check_files(self, step: int, files: dict[str, Any], unread: set[str]) -> None:
        read = lambda name: name.partition("/")[0] not in unread  # noqa: E731
        for name in _files(self._directory / str(step)):
            if name not in files and name != _MANIFEST and read(name):
                raise UserError(f"{self._where(step)} is damaged: {name} has no checksum")
        for name, checksum in files.items():
            if not read(name):
                continue
            try:
                found = _checksum(self._directory / str(step) / name)
            except OSError as error:
                raise UserError(f"{self._where(step)} is damaged: cannot read {name} ({_reason(error)})") from error
            if found != checksum:
                cut = f"{found[0]} bytes where {checksum[0]}" if found[0] != checksum[0] else "not the bytes that"
                raise UserError(f"{self._where(step)} is damaged: {name} holds {cut} were written")

    def _retire(self, step: int) -> None:
        """Takes a checkpoint out of sight in one move; removing its files takes many."""
        folder = self._directory / str(step)
        if folder.exists():
            folder.rename(self._directory / f"{step}{_REMOVED}")

    def _clean(self) -> bool:
        """Removes what saves and removals that were cut short left behind; whether there was anything."""
        found = False
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(self._directory)):
                if _LEFTOVER.fullmatch(entry.name):
                    found = True
                    shutil.rmtree(entry.path, ignore_errors=True)
        return found


def _say(described: list[Any] | None) -> str:
    return "absent" if described is None else f"{described[1]}{described[0]}"
