"""Safetensors files: every dtype the release uses as read-only views of the mapped file, and a deterministic writer.

A file is a little-endian uint64 header length, a JSON header mapping each name to dtype, shape and byte range, then the
tensors' bytes without holes (format: https://github.com/huggingface/safetensors). Nothing in a header is believed
before it is checked, so a damaged or hostile file ends in one `UserError` line.
"""

import json
import math
import mmap
import os
import reprlib
import uuid
import weakref
from collections import Counter
from collections.abc import KeysView, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dsv41.errors import UserError, nearest

MAX_HEADER_BYTES = 100_000_000  # the format's limit
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_MAX_AXES = 64  # NumPy's limit

# The order is the format's own: its writer stores the last dtype first, which leaves every tensor aligned.
DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "C64": np.dtype("<c8"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {name: n for n, name in enumerate(DTYPES)}
_PACKED = "F4"  # two E2M1 codes a byte: no NumPy dtype has a view of it
_READABLE = (*DTYPES, _PACKED)

_short = reprlib.Repr(maxlevel=2, maxlist=8, maxdict=4, maxstring=160, maxother=80).repr


@dataclass(frozen=True)
class Entry:
    """One tensor: the format's dtype name, the shape, and its bytes ``[start, stop)`` counted from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class SafetensorsFile:
    """An open file: what `open_safetensors` found in it, and its tensors as views.

    entries: name -> `Entry`, in the order of the bytes; metadata: the header's strings, empty where it has none.
    The mapping lives as long as this object or any array taken from it; the file must not shrink meanwhile.
    """

    path: Path
    entries: dict[str, Entry] = field(repr=False)
    metadata: dict[str, str] = field(repr=False)
    _buffer: mmap.mmap = field(repr=False)
    _descriptor: int = field(repr=False)

    def __post_init__(self):
        weakref.finalize(self, os.close, self._descriptor)

    def keys(self) -> KeysView[str]:
        """The tensors' names, in the order of their bytes."""
        return self.entries.keys()

    def array(self, name: str) -> np.ndarray:
        """The tensor ``name`` as a read-only view without a copy, in its stored dtype and shape.

        ``F4`` comes as uint8 with the last axis halved, two codes a byte. Where the header's length is no multiple of
        8 the view may be unaligned. Raises `UserError` for an unknown name and for BOOL bytes other than 0 and 1.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise UserError(
                f"{self.path}: tensor: found no {_short(name)}, allowed is one of the {len(self.entries)} names in the"
                f" file{nearest(name, self.entries)}"
            )
        if entry.dtype == _PACKED:
            shape, dtype = (*entry.shape[:-1], entry.shape[-1] // 2), DTYPES["U8"]
        else:
            shape, dtype = entry.shape, DTYPES[entry.dtype]
        if entry.dtype == "BOOL":
            stored = np.ndarray(shape, np.uint8, self._buffer, entry.start)
            if stored.size and stored.max() > 1:
                raise _error(self.path, f"tensor {_short(name)}", f"the BOOL byte {stored.max()}", "0 or 1")
        return np.ndarray(shape, dtype, self._buffer, entry.start)

    def read_into(self, out: np.ndarray, name: str, first: int = 0) -> None:
        """Fills ``out``, a contiguous uint8 vector, with the bytes of ``name`` from its byte ``first`` on.

        For large tensors, where filling memory of one's own by a system call costs less than faulting in the mapping
        page by page. Raises `UserError` where the file has become shorter.
        """
        at, view = self.entries[name].start + first, memoryview(out)
        while view:
            count = os.preadv(self._descriptor, [view], at)
            if not count:
                raise _error(self.path, "file size, truncated since it was opened", f"{at} bytes", "what its header says")
            at, view = at + count, view[count:]

    def forget(self, name: str) -> None:
        """Takes the pages of ``name`` out of this process's memory; reading them again maps them again."""
        entry = self.entries[name]
        start = entry.start - entry.start % mmap.PAGESIZE
        if entry.stop > start:
            self._buffer.madvise(mmap.MADV_DONTNEED, start, entry.stop - start)


def open_safetensors(path: str | os.PathLike[str]) -> SafetensorsFile:
    """Maps the file at ``path`` and checks its whole header; reads no tensor.

    Raises `UserError`, one line that starts with the path, when the file is missing, unreadable, truncated or too long,
    or its header is no JSON object of tensors whose dtypes are known, whose sizes are those of shape and dtype, and
    whose byte ranges follow each other without overlap or hole up to the file's end.
    """
    path = Path(path)
    try:
        # Before opening: to open a pipe is to wait for its writer.
        if not path.is_file():
            siblings = (p.name for p in path.parent.glob("*.safetensors"))
            found = "something else" if path.exists() else "nothing there"
            raise UserError(f"{path}: found {found}, allowed is a safetensors file{nearest(path.name, siblings)}")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _LENGTH_BYTES:
                raise _error(path, "file size", f"{size} bytes", f"{_LENGTH_BYTES} (the header's length) or more")
            buffer = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            descriptor = os.dup(file.fileno())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    opened = SafetensorsFile(path, {}, {}, buffer, descriptor)
    length = int.from_bytes(buffer[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise _error(path, "header length (is this a safetensors file?)", length, f"at most {MAX_HEADER_BYTES}")
    data_start = _LENGTH_BYTES + length
    if data_start > size:
        raise _error(path, "file size, truncated", f"{size} bytes", f"{data_start} or more for its header")
    entries, metadata = _parse_header(path, buffer[_LENGTH_BYTES:data_start], data_start)
    expected = max((entry.stop for entry in entries.values()), default=data_start)
    if expected != size:
        what = "file size, truncated" if size < expected else "file size, bytes after the last tensor"
        raise _error(path, what, f"{size} bytes", f"the {expected} its header says")
    opened.entries.update(entries)
    opened.metadata.update(metadata)
    return opened


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes ``tensors`` to ``path``, which is whole or as before whenever someone looks.

    The bytes depend on names, dtypes, shapes, values and metadata alone and equal those of the ``safetensors`` package:
    dtype by dtype, names sorted (metadata, which the package leaves in any order, sorted too). Arrays of any strides
    and byte order; dtypes of `DTYPES`. Holds a copy of at most one tensor. Raises `UserError`, and leaves ``path`` as
    it was, for another dtype, a name or metadata that the format cannot hold, a header above `MAX_HEADER_BYTES`, and a
    failed write.
    """
    path = Path(path)
    dtypes = {}
    for name, array in tensors.items():
        dtype = _NAMES.get(array.dtype.newbyteorder("="))
        if dtype is None:
            allowed = ", ".join(str(d) for d in _NAMES)
            raise _error(path, f"tensor {_short(name)}: dtype", array.dtype, f"{allowed}{_nearest(array.dtype)}")
        dtypes[name] = dtype
    if _METADATA in tensors:
        raise _error(path, "tensor name", repr(_METADATA), "any other: metadata goes by its own argument")
    ordered = sorted(tensors, key=lambda name: (-_ORDER[dtypes[name]], name))
    header: dict[str, Any] = {} if metadata is None else {_METADATA: dict(sorted(metadata.items()))}
    stop = 0
    for name in ordered:
        start, stop = stop, stop + tensors[name].nbytes
        header[name] = {"dtype": dtypes[name], "shape": list(tensors[name].shape), "data_offsets": [start, stop]}
    # Half a surrogate pair, which UTF-8 cannot hold, passes here and fails the check below as one escape.
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise _error(path, "header length", len(text), f"at most {MAX_HEADER_BYTES}: write fewer tensors a file")
    _parse_header(path, text, 0)

    temporary = path.parent / f".safetensors-{uuid.uuid4().hex}.tmp"
    try:
        try:
            with temporary.open("xb") as file:
                file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
                for name in ordered:
                    flat = np.ascontiguousarray(tensors[name].reshape(-1), DTYPES[dtypes[name]])
                    file.write(flat.view(np.uint8).data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def _error(path: Path, what: str, found: object, allowed: str) -> UserError:
    return UserError(f"{path}: {what}: found {found}, allowed is {allowed}")


def _nearest(dtype: object) -> str:
    return nearest(str(dtype), map(str, _NAMES))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {_short(twice)} twice")
    return result


def _no_constant(text: str) -> None:
    raise ValueError(f"{text}, which is not JSON")


def json_object(path: Path, what: str, text: bytes) -> dict[str, Any]:
    """The object in ``text``; `UserError` for anything but UTF-8 JSON of one object without repeated keys."""
    try:
        value = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise _error(path, what, "too deep a nesting", "a JSON object") from None
    except ValueError as error:
        raise _error(path, what, f"{error}", "UTF-8 JSON without repeated keys") from None
    if not isinstance(value, dict):
        raise _error(path, what, _short(value), "a JSON object")
    return value


def _parse_header(path: Path, text: bytes, data_start: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """Entries in byte order, checked against each other but not against the file's size; and the metadata."""
    header = json_object(path, "header", text)
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(map(_is_text, (*metadata, *metadata.values()))):
        raise _error(path, _METADATA, _short(metadata), "a JSON object of Unicode strings")
    entries = [(name, _entry(path, name, value, data_start)) for name, value in header.items()]
    entries.sort(key=lambda item: (item[1].start, item[1].stop, item[0]))
    end, previous = data_start, "the header"
    for name, entry in entries:
        if entry.start != end:
            what = "overlaps" if entry.start < end else "leaves a hole after"
            found = f"{entry.start - data_start}, which {what} {previous}"
            raise _error(path, f"tensor {_short(name)}: data_offsets start", found, f"{end - data_start}")
        end, previous = entry.stop, f"tensor {_short(name)}"
    return dict(entries), metadata


def _entry(path: Path, name: str, value: Any, data_start: int) -> Entry:
    what = f"tensor {_short(name)}"
    if not _is_text(name):
        raise _error(path, "tensor name", _short(name), "Unicode text")
    if not isinstance(value, dict):
        raise _error(path, what, _short(value), "a JSON object of dtype, shape and data_offsets")
    for key in ("dtype", "shape", "data_offsets"):
        if key not in value:
            found = ", ".join(_short(other) for other in list(value)[:4]) or "no key"
            raise _error(path, f"{what}: {key}", f"none among {found}", "dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _READABLE:
        hint = nearest(dtype[:20], _READABLE) if isinstance(dtype, str) else ""
        raise _error(path, f"{what}: dtype", _short(dtype), ", ".join(_READABLE) + hint)
    if not _is_sizes(shape) or len(shape) > _MAX_AXES:
        raise _error(path, f"{what}: shape", _short(shape), f"a list of at most {_MAX_AXES} integers of 0 or more")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _error(path, f"{what}: data_offsets", _short(offsets), "[start, stop] with 0 <= start <= stop")
    bits = 4 if dtype == _PACKED else 8 * DTYPES[dtype].itemsize
    if dtype == _PACKED and (not shape or shape[-1] % 2):
        raise _error(path, f"{what}: shape", _short(shape), f"an even last axis, as {_PACKED} holds two values a byte")
    # NumPy multiplies the axes that are not 0 even where another one is.
    if math.prod(size for size in shape if size) * bits // 8 >= 2**63:
        raise _error(path, f"{what}: shape", _short(shape), "less than 2**63 bytes")
    start, stop = offsets
    size = math.prod(shape) * bits // 8
    if stop - start != size:
        allowed = f"the {size} of {dtype} {_short(shape)}"
        raise _error(path, f"{what}: data_offsets {_short(offsets)}", f"{stop - start} bytes", allowed)
    return Entry(dtype, tuple(shape), data_start + start, data_start + stop)


def _is_sizes(value: Any) -> bool:
    # Exactly int: JSON's true is one of Python's integers.
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _is_text(value: Any) -> bool:
    # JSON can spell half a surrogate pair, which is no text.
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)
