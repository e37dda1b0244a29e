"""Released weights into arrays: float32 masters or the stored form, placed straight into their shards (architecture §8, §14).

Each process reads the bytes of its own shards, each of them once, and no more than one leaf is under way at a time.
"""

import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from dsv41.errors import UserError
from dsv41.hf.folder import ReleasedFolder
from dsv41.hf.names import Slot, text_leaves
from dsv41.hf.safetensors import DTYPES
from dsv41.hf.stored import StoredWeight, decode, granule
from dsv41.params import DraftParams, ParamSpec, TextParams, draft_specs, spec_leaves, text_specs

Form = Literal["masters", "stored", "served"]
ShardingRule = Callable[[ParamSpec], Sharding]
Key = tuple[tuple[int, int], ...]  # start and stop on each axis
Task = Callable[[], None]
Run = Callable[[Iterable[Task]], None]  # to the end of all of them

_PIECE_BYTES = 1 << 24
# Decoding makes temporary arrays: in this size they stay in a core's cache, and no fresh memory is cleared for them.
_DECODE_BYTES = 1 << 19
_LARGE = 1 << 21
_BF16, _F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
# What the reference holds otherwise than it is stored (§14), by the leaf's path.
_HELD = {"wo_a": _BF16, "head": _F32, "compressor": _F32}


def one_device(spec: ParamSpec) -> Sharding:
    """The first device holds everything."""
    return SingleDeviceSharding(jax.local_devices()[0])


def fsdp(mesh: Mesh) -> ShardingRule:
    """Each weight over all devices of a one-axis mesh, on the largest axis that they divide; else on each of them.

    Axes whose shards hold whole granules of 32 come first, so that no scale is needed twice.
    """
    (axis,) = mesh.axis_names
    count = mesh.size

    def rule(spec: ParamSpec) -> Sharding:
        axes = [n for n, size in enumerate(spec.shape) if size % (2 * count if n == len(spec.shape) - 1 else count) == 0]
        whole = lambda n: spec.shape[n] // count % 32 == 0 or (spec.stacked and n == 0)  # noqa: E731
        best = max(axes, key=lambda n: (whole(n), spec.shape[n]), default=None)
        return NamedSharding(mesh, PartitionSpec(*(axis if n == best else None for n in range(len(spec.shape)))))

    return rule


def load_params(
    folder: ReleasedFolder,
    form: Form = "masters",
    sharding: ShardingRule = one_device,
    progress: Callable[[int], None] = lambda _: None,
    threads: int | None = None,
) -> TextParams:
    """The text model's weights as `TextParams`, experts stacked.

    masters: float32 (id tables int32), exact. stored: `StoredWeight` where the folder holds scales and the folder's own
    dtype elsewhere, except for the reference's own transforms: wo_a as bfloat16, head and compressor as float32 (§14).
    served: what `dsv41.model` computes with: routed experts and tables as stored, the others as masters. Rows of ``sharding``
    that a weight's own do not divide into are filled up with zeros, as `dsv41.sharding.padded_shape` says.
    progress: called with the bytes read so far. Raises `UserError` for a weight with values that are not finite
    (float32 tensors are taken as they are), for an id that int32 does not hold, and for a file cut short meanwhile.
    """
    return _load(folder, text_specs(folder.config), text_slots(folder), form, sharding, progress, threads)


def load_draft(folder: ReleasedFolder, sharding: ShardingRule = one_device) -> DraftParams:
    """The drafter's weights as float32 masters, as `load_params` gives the text model's."""
    specs = draft_specs(folder.config)
    slots: dict[str, list[Slot]] = {spec.key: [] for spec in spec_leaves(specs)}
    for slot in folder.slots.values():
        if slot.part == "draft":
            slots[slot.spec.key].append(slot)
    return _load(folder, specs, slots, "masters", sharding, lambda _: None, None)


def _load(
    folder: ReleasedFolder,
    specs: Any,
    slots: dict[str, list[Slot]],
    form: Form,
    sharding: ShardingRule,
    progress: Callable[[int], None],
    threads: int | None,
) -> Any:
    """A tree of weights in the shape of ``specs``; slots: of each leaf, in leaf order."""
    leaves = []
    with _workers(threads or os.cpu_count() or 1) as run:
        for path, own in slots.items():
            leaves.append(_leaf(folder, path, own, form, sharding(own[0].spec), run))
            progress(folder.bytes_read)
    is_spec = lambda x: isinstance(x, ParamSpec)  # noqa: E731
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), leaves)


def load_scales(folder: ReleasedFolder, sharding: ShardingRule = one_device) -> dict[str, jax.Array]:
    """The scale bytes, uint8 by leaf path and stacked as the leaf is, of every text leaf that is quantised throughout."""
    with _workers(os.cpu_count() or 1) as run:
        return {
            path: _scales(folder, slots, sharding(slots[0].spec), run)
            for path, slots in text_slots(folder).items()
            if all(map(folder.quantized, slots))
        }


def load_carried(folder: ReleasedFolder, sharding: ShardingRule = one_device) -> dict[str, jax.Array]:
    """Every tensor outside the text model by its released name, byte for byte; dtypes of 8 bits and F4 as uint8."""
    carried = {}
    with _workers(os.cpu_count() or 1) as run:
        for slot in (s for s in folder.slots.values() if s.part != "text"):
            place = sharding(slot.spec)
            whole = NamedSharding(place.mesh, PartitionSpec()) if isinstance(place, NamedSharding) else place
            for name in folder.names(slot):
                carried[name] = _raw(folder, [name], False, whole, run)
    return carried


def text_slots(folder: ReleasedFolder) -> dict[str, list[Slot]]:
    """The slots of each text leaf, in leaf order."""
    leaves: dict[str, list[Slot]] = {path: [] for path in text_leaves(folder.config)}
    for slot in folder.slots.values():
        if slot.part == "text":
            leaves[slot.path].append(slot)
    return leaves


@contextmanager
def _workers(threads: int) -> Iterator[Run]:
    """Threads for tasks, which they take from the iterable themselves: a future for each costs more than a small tensor."""

    def run(tasks: Iterable[Task]) -> None:
        waiting, lock = iter(tasks), threading.Lock()

        def work() -> None:
            nonlocal waiting
            while True:
                with lock:
                    task = next(waiting, None)
                if task is None:
                    return
                try:
                    task()
                except BaseException:
                    with lock:
                        waiting = iter(())
                    raise

        for done in [pool.submit(work) for _ in range(threads)]:
            done.result()

    with ThreadPoolExecutor(threads) as pool:
        yield run


def _leaf(folder: ReleasedFolder, path: str, slots: list[Slot], form: Form, sharding: Sharding, run: Run) -> Any:
    spec = slots[0].spec
    held = next((dtype for part, dtype in _HELD.items() if part in path.split(".")), None)
    if spec.stored == "i64":
        held = np.dtype(np.int32)
    found = {folder.entry(slot.weight.name).dtype for slot in slots}
    rows = _rows(spec, sharding) if form == "served" else None
    kept = form == "stored" or (form == "served" and spec.stored in ("fp4", "fp8_rows"))
    if kept and held is None and len(found) == 1:
        codes = _raw(folder, [slot.weight.name for slot in slots], spec.stacked, sharding, run, rows)
        if not folder.quantized(slots[0]):
            return codes
        return StoredWeight(codes, _scales(folder, slots, sharding, run, rows), spec.stored, folder.tile)
    dtype = np.dtype(spec.dtype) if form != "stored" or held is None else held
    tables = [_table(folder, slot, sharding, spec) for slot in slots]
    tasks = [partial(_decoded, folder, slot, table) for slot, table in zip(slots, tables, strict=True)]
    array = _assemble(spec.shape, dtype, spec.stacked, sharding, tasks, run, rows)
    for slot in slots:
        for name in folder.names(slot):
            folder.files[name].forget(name)
    return array


def _rows(spec: ParamSpec, sharding: Sharding) -> int | None:
    """Rows of a weight whose own do not divide into its shards, filled up; None where they do."""
    if not isinstance(sharding, NamedSharding) or not spec.shape or spec.stacked:
        return None
    parts = _parts(sharding, 0)
    return -(-spec.shape[0] // parts) * parts if spec.shape[0] % parts else None


def _parts(sharding: NamedSharding, dim: int) -> int:
    axis = sharding.spec[dim] if dim < len(sharding.spec) else None
    return math.prod(sharding.mesh.shape[a] for a in ((axis,) if isinstance(axis, str) else axis or ()))


def _scales(folder: ReleasedFolder, slots: list[Slot], sharding: Sharding, run: Run, rows: int | None = None) -> jax.Array:
    return _raw(folder, [slot.scale.name for slot in slots if slot.scale], slots[0].spec.stacked, sharding, run, rows)


def _raw(
    folder: ReleasedFolder, names: list[str], stacked: bool, sharding: Sharding, run: Run, rows: int | None = None
) -> jax.Array:
    """The tensors' own bytes, stacked or the only one; dtypes of 8 bits as uint8."""
    view = folder.view(names[0])
    shape, dtype = view.shape, view.dtype if view.dtype.itemsize > 1 else np.dtype(np.uint8)
    shape = (len(names), *shape) if stacked else shape
    tasks = [partial(_copied, folder, name) for name in names]
    return _assemble(shape, dtype, stacked, sharding if rows else _fit(sharding, shape), tasks, run, rows)


def _fit(sharding: Sharding, shape: tuple[int, ...]) -> Sharding:
    """``sharding`` of a weight for an array of its layout but other sizes: whole on the axes that it does not divide."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    axes = [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
    kept = (axis if size % _parts(sharding, n) == 0 else None for n, (axis, size) in enumerate(zip(axes, shape, strict=True)))
    return NamedSharding(sharding.mesh, PartitionSpec(*kept))


def _assemble(
    shape: tuple[int, ...],
    dtype: np.dtype,
    stacked: bool,
    sharding: Sharding,
    tensors: list[Callable[[np.ndarray, Key], Iterator[Task]]],
    run: Run,
    rows: int | None = None,
) -> jax.Array:
    """An array whose distinct shards ``tensors`` fill, one an expert, each once however many devices hold it.

    rows: with rows of zeros behind the tensor's own, so many in all.
    """
    if rows is not None:
        tensors = [partial(_filled, fill, shape[0]) for fill in tensors]
        shape = (rows, *shape[1:])
    owners: dict[Key, list[Any]] = {}
    for device, key in _keys(sharding, shape):
        owners.setdefault(key, []).append(device)
    blocks = {key: _memory(tuple(stop - start for start, stop in key), dtype) for key in owners}
    parts = [part for key, block in blocks.items() for part in _experts(block, key, stacked)]
    run(task for n, out, inner in parts for task in tensors[n](out, inner))
    placed = [jax.device_put(blocks[key], device) for key, devices in owners.items() for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def _filled(fill: Callable[[np.ndarray, Key], Iterator[Task]], rows: int, out: np.ndarray, key: Key) -> Iterator[Task]:
    """Tasks that fill a range of a tensor of ``rows`` rows, what is behind them with zeros."""
    start, stop = key[0]
    end = max(start, min(stop, rows))
    out[end - start :] = 0
    if end > start:
        yield from fill(out[: end - start], ((start, end), *key[1:]))


def _keys(sharding: Sharding, shape: tuple[int, ...]) -> list[tuple[Any, Key]]:
    """This process's devices, and the range that each of them holds."""
    indices = sharding.addressable_devices_indices_map(shape).items()
    return [(d, tuple(part.indices(size)[:2] for part, size in zip(at or (), shape, strict=True))) for d, at in indices]


def _memory(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory to fill; page-aligned where it is large, so that a CPU device takes it over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE:
        return np.empty(shape, dtype)
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Filling 4 GiB page by page of 4 KiB takes longer than reading them.
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return np.ndarray(shape, dtype, buffer)


def _experts(block: np.ndarray, key: Key, stacked: bool) -> Iterator[tuple[int, np.ndarray, Key]]:
    """The tensors that a block is made of: number, its part of the block, and the range inside the tensor."""
    if not stacked:
        yield 0, block, key
        return
    first, stop = key[0]
    for n in range(first, stop):
        yield n, block[n - first], key[1:]


def _pieces(out: np.ndarray, key: Key, size: int = _PIECE_BYTES) -> Iterator[tuple[np.ndarray, Key]]:
    """A range cut along its first axis into parts of about ``size`` bytes."""
    if not key:
        yield out, key
        return
    (start, stop), rest = key[0], key[1:]
    width = max(out.nbytes // max(len(out), 1), 1)
    step = max(size // width, 1)
    for at in range(start, stop, step):
        end = min(at + step, stop)
        yield out[at - start : end - start], ((at, end), *rest)


def _copied(folder: ReleasedFolder, name: str, out: np.ndarray, key: Key) -> Iterator[Task]:
    """Tasks that copy a range of a tensor."""
    shape = folder.view(name).shape
    contiguous = all(part == (0, size) for part, size in zip(key[1:], shape[1:], strict=True))
    for part, inner in _pieces(out, key):
        yield partial(_copy, folder, name, contiguous, part, inner)


def _copy(folder: ReleasedFolder, name: str, contiguous: bool, out: np.ndarray, key: Key) -> None:
    if contiguous:
        row = out.nbytes // max(len(out), 1) if key else 0
        flat = np.ndarray((out.nbytes,), np.uint8, out)  # pyright: ignore
        folder.files[name].read_into(flat, name, key[0][0] * row if key else 0)
    else:
        np.copyto(out, folder.view(name).view(out.dtype)[tuple(slice(*part) for part in key)])
    folder.took(out.nbytes)


Table = tuple[np.ndarray, tuple[int, int]]


def _table(folder: ReleasedFolder, slot: Slot, sharding: Sharding, spec: ParamSpec) -> Table | None:
    """The scales of all this process's shards of a weight, and the row and column they start at; None without scales."""
    if slot.scale is None or not folder.quantized(slot):
        return None
    keys = [key for _, key in _keys(sharding, spec.shape)]
    inner = [key[1:] for key in keys if key[0][0] <= slot.expert < key[0][1]] if slot.expert is not None else keys
    if not inner:
        return None
    sizes = granule(spec.stored, folder.tile)
    low = tuple(min(key[axis][0] for key in inner) // sizes[axis] for axis in (0, 1))
    high = tuple(-(-max(key[axis][1] for key in inner) // sizes[axis]) for axis in (0, 1))
    table = folder.view(slot.scale.name).view(np.uint8)[low[0] : high[0], low[1] : high[1]]
    folder.took(table.nbytes)
    return table, (low[0] * sizes[0], low[1] * sizes[1])


def _decoded(folder: ReleasedFolder, slot: Slot, table: Table | None, out: np.ndarray, key: Key) -> Iterator[Task]:
    """Tasks that turn a range of a weight into numbers of ``out``'s dtype."""
    if table is not None:
        for part, inner in _pieces(out, key):
            yield partial(_scaled, folder, slot, table, part, inner)
    elif DTYPES.get(folder.entry(slot.weight.name).dtype) == out.dtype:
        yield from _copied(folder, slot.weight.name, out, key)
    else:
        for part, inner in _pieces(out, key):
            yield partial(_plain, folder, slot, part, inner)


def _plain(folder: ReleasedFolder, slot: Slot, out: np.ndarray, key: Key) -> None:
    values = folder.view(slot.weight.name)[tuple(slice(*part) for part in key)]
    folder.took(values.nbytes)
    np.copyto(out, values, casting="unsafe")
    if out.dtype == np.int32:
        _need(bool((out == values).all()), folder, slot, "ids beyond int32")
    elif slot.spec.stored != "f32":
        _need(bool(np.isfinite(out).all()), folder, slot, "values that are not finite")


def _scaled(folder: ReleasedFolder, slot: Slot, table: Table, whole: np.ndarray, key: Key) -> None:
    (scales, (row, column)), (_, columns) = table, key
    stored = slot.spec.stored
    packed = 2 if stored == "fp4" else 1
    _need(not columns[0] % packed and not columns[1] % packed, folder, slot, "shards of half a byte")
    stripe = folder.view(slot.weight.name).view(np.uint8)[:, columns[0] // packed : columns[1] // packed]
    high, wide = granule(stored, folder.tile)
    inside = (columns[0] - column) % wide
    scales = scales[:, (columns[0] - column) // wide :]
    for out, (rows, _) in _pieces(whole, key, _DECODE_BYTES):
        codes, first = stripe[slice(*rows)], rows[0] - row
        target = out if out.dtype == np.float32 else None
        values = decode(codes, scales[first // high :], stored, folder.tile, target, (first % high, inside))
        _need(bool(np.isfinite(values).all()), folder, slot, "values that are not finite")
        if target is None:
            np.copyto(out, values, casting="unsafe")
        folder.took(codes.nbytes)


def _need(ok: bool, folder: ReleasedFolder, slot: Slot, found: str) -> None:
    if not ok:
        raise UserError(f"{folder.files[slot.weight.name].path}: {slot.weight.name!r}: found {found}")
