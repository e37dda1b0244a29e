"""Released weights into arrays: float32 masters or the stored form, placed straight into their shards (architecture §8, §14).

Each process reads the bytes of its own shards, each of them once, and no more than one leaf is under way at a time.
"""

import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from dsv41.params import ParamSpec, TextParams, text_specs

Form = Literal["masters", "stored"]
ShardingRule = Callable[[ParamSpec], Sharding]
Key = tuple[tuple[int, int], ...]  # start and stop on each axis
Task = Callable[[], None]

_PIECE_BYTES = 1 << 24
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
    progress: called with the bytes read so far. Raises `UserError` for a weight with values that are not finite
    (float32 tensors are taken as they are), for an id that int32 does not hold, and for a file cut short meanwhile.
    """
    leaves = []
    with ThreadPoolExecutor(threads or max(4, os.cpu_count() or 1)) as pool:
        for path, slots in text_slots(folder).items():
            leaves.append(_leaf(folder, path, slots, form, sharding(slots[0].spec), pool))
            progress(folder.bytes_read)
    is_spec = lambda x: isinstance(x, ParamSpec)  # noqa: E731
    return jax.tree.unflatten(jax.tree.structure(text_specs(folder.config), is_leaf=is_spec), leaves)


def load_scales(folder: ReleasedFolder, sharding: ShardingRule = one_device) -> dict[str, jax.Array]:
    """The scale bytes, uint8 by leaf path and stacked as the leaf is, of every text leaf that is quantised throughout."""
    with ThreadPoolExecutor(4) as pool:
        return {
            path: _scales(folder, slots, sharding(slots[0].spec), pool)
            for path, slots in text_slots(folder).items()
            if all(map(folder.quantized, slots))
        }


def load_carried(folder: ReleasedFolder, sharding: ShardingRule = one_device) -> dict[str, jax.Array]:
    """Every tensor outside the text model by its released name, byte for byte; dtypes of 8 bits and F4 as uint8."""
    carried = {}
    with ThreadPoolExecutor(4) as pool:
        for slot in (s for s in folder.slots.values() if s.part != "text"):
            place = sharding(slot.spec)
            whole = NamedSharding(place.mesh, PartitionSpec()) if isinstance(place, NamedSharding) else place
            for name in folder.names(slot):
                carried[name] = _raw(folder, [name], False, whole, pool)
    return carried


def text_slots(folder: ReleasedFolder) -> dict[str, list[Slot]]:
    """The slots of each text leaf, in leaf order."""
    leaves: dict[str, list[Slot]] = {path: [] for path in text_leaves(folder.config)}
    for slot in folder.slots.values():
        if slot.part == "text":
            leaves[slot.path].append(slot)
    return leaves


def _leaf(folder: ReleasedFolder, path: str, slots: list[Slot], form: Form, sharding: Sharding, pool: Any) -> Any:
    spec = slots[0].spec
    held = next((dtype for part, dtype in _HELD.items() if part in path.split(".")), None)
    if spec.stored == "i64":
        held = np.dtype(np.int32)
    found = {folder.entry(slot.weight.name).dtype for slot in slots}
    if form == "stored" and held is None and len(found) == 1:
        codes = _raw(folder, [slot.weight.name for slot in slots], spec.stacked, sharding, pool)
        if not folder.quantized(slots[0]):
            return codes
        return StoredWeight(codes, _scales(folder, slots, sharding, pool), spec.stored, folder.tile)
    dtype = np.dtype(spec.dtype) if form == "masters" or held is None else held
    tables = [_table(folder, slot, sharding, spec) for slot in slots]

    def tasks(block: np.ndarray, key: Key) -> Iterator[Task]:
        for n, out, inner in _experts(block, key, spec.stacked):
            yield from _decoded(folder, slots[n], tables[n], out, inner)

    array = _assemble(spec.shape, dtype, sharding, tasks, pool)
    for slot in slots:
        for name in folder.names(slot):
            folder.files[name].forget(name)
    return array


def _scales(folder: ReleasedFolder, slots: list[Slot], sharding: Sharding, pool: Any) -> jax.Array:
    return _raw(folder, [slot.scale.name for slot in slots if slot.scale], slots[0].spec.stacked, sharding, pool)


def _raw(folder: ReleasedFolder, names: list[str], stacked: bool, sharding: Sharding, pool: Any) -> jax.Array:
    """The tensors' own bytes, stacked or the only one; dtypes of 8 bits as uint8."""
    view = folder.view(names[0])
    shape, dtype = view.shape, view.dtype if view.dtype.itemsize > 1 else np.dtype(np.uint8)

    def tasks(block: np.ndarray, key: Key) -> Iterator[Task]:
        for n, out, inner in _experts(block, key, stacked):
            yield from _copied(folder, names[n], out, inner)

    shape = (len(names), *shape) if stacked else shape
    return _assemble(shape, dtype, _fit(sharding, shape), tasks, pool)


def _fit(sharding: Sharding, shape: tuple[int, ...]) -> Sharding:
    """``sharding`` of a weight for an array of its layout but other sizes: whole on the axes that it does not divide."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    axes = [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
    count = lambda axis: math.prod(sharding.mesh.shape[a] for a in ((axis,) if isinstance(axis, str) else axis or ()))  # noqa: E731
    kept = (axis if size % count(axis) == 0 else None for axis, size in zip(axes, shape, strict=True))
    return NamedSharding(sharding.mesh, PartitionSpec(*kept))


def _assemble(
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Sharding,
    tasks: Callable[[np.ndarray, Key], Iterable[Task]],
    pool: ThreadPoolExecutor,
) -> jax.Array:
    """An array whose distinct shards ``tasks`` fill, each once however many devices hold it."""
    owners: dict[Key, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        owners.setdefault(_key(index, shape), []).append(device)
    blocks = {key: _memory(tuple(stop - start for start, stop in key), dtype) for key in owners}
    for _ in pool.map(lambda task: task(), [task for key, block in blocks.items() for task in tasks(block, key)]):
        pass
    placed = [jax.device_put(blocks[key], device) for key, devices in owners.items() for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def _key(index: Any, shape: tuple[int, ...]) -> Key:
    return tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))


def _memory(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory to fill; page-aligned where it is large, so that a CPU device takes it over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE:
        return np.empty(shape, dtype)
    buffer = mmap.mmap(-1, size)
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


def _pieces(out: np.ndarray, key: Key, rows: int = 1) -> Iterator[tuple[np.ndarray, Key]]:
    """A range cut along its first axis into parts of about `_PIECE_BYTES`, ``rows`` at a time kept together."""
    if not key:
        yield out, key
        return
    (start, stop), rest = key[0], key[1:]
    width = max(out.nbytes // max(len(out), 1), 1)
    step = max(_PIECE_BYTES // width // rows, 1) * rows
    at = start
    while at < stop:
        end = min(at - at % rows + step, stop)
        yield out[at - start : end - start], ((at, end), *rest)
        at = end


def _copied(folder: ReleasedFolder, name: str, out: np.ndarray, key: Key) -> Iterator[Task]:
    """Tasks that copy a range of a tensor."""
    shape = folder.view(name).shape
    contiguous = all(part == (0, size) for part, size in zip(key[1:], shape[1:], strict=True))

    def task(out: np.ndarray, key: Key) -> None:
        if contiguous:
            row = out.nbytes // max(len(out), 1) if key else 0
            flat = np.ndarray((out.nbytes,), np.uint8, out)  # pyright: ignore
            folder.files[name].read_into(flat, name, key[0][0] * row if key else 0)
        else:
            np.copyto(out, folder.view(name).view(out.dtype)[tuple(slice(*part) for part in key)])
        folder.took(out.nbytes)

    for part, inner in _pieces(out, key):
        yield lambda part=part, inner=inner: task(part, inner)


def _table(folder: ReleasedFolder, slot: Slot, sharding: Sharding, spec: ParamSpec) -> tuple[np.ndarray, tuple[int, int]] | None:
    """The scales of all this process's shards of a weight, and the row and column they start at; None without scales."""
    if slot.scale is None or not folder.quantized(slot):
        return None
    keys = [_key(index, spec.shape) for index in sharding.addressable_devices_indices_map(spec.shape).values()]
    inner = [key[1:] for key in keys if key[0][0] <= slot.expert < key[0][1]] if slot.expert is not None else keys
    if not inner:
        return None
    sizes = granule(spec.stored, folder.tile)
    low = tuple(min(key[axis][0] for key in inner) // sizes[axis] for axis in (0, 1))
    high = tuple(-(-max(key[axis][1] for key in inner) // sizes[axis]) for axis in (0, 1))
    table = folder.view(slot.scale.name).view(np.uint8)[low[0] : high[0], low[1] : high[1]]
    folder.took(table.nbytes)
    return table, (low[0] * sizes[0], low[1] * sizes[1])


def _decoded(
    folder: ReleasedFolder, slot: Slot, table: tuple[np.ndarray, tuple[int, int]] | None, out: np.ndarray, key: Key
) -> Iterator[Task]:
    """Tasks that turn a range of a weight into numbers of ``out``'s dtype."""
    name, stored = slot.weight.name, slot.spec.stored
    if table is None and DTYPES.get(folder.entry(name).dtype) == out.dtype:
        yield from _copied(folder, name, out, key)
        return

    def plain(out: np.ndarray, key: Key) -> None:
        values = folder.view(name)[tuple(slice(*part) for part in key)]
        folder.took(values.nbytes)
        np.copyto(out, values, casting="unsafe")
        if out.dtype == np.int32:
            _need(bool((out == values).all()), "ids beyond int32")
        elif stored != "f32":
            _need(bool(np.isfinite(out).all()), "values that are not finite")

    def scaled(out: np.ndarray, key: Key) -> None:
        assert table is not None
        scales, (row, column) = table
        packed = 2 if stored == "fp4" else 1
        rows, columns = key
        _need(not columns[0] % packed and not columns[1] % packed, "half a byte a shard")
        codes = folder.view(name).view(np.uint8)[slice(*rows), columns[0] // packed : columns[1] // packed]
        folder.took(codes.nbytes)
        high, wide = granule(stored, folder.tile)
        first, left = (rows[0] - row) // high, (columns[0] - column) // wide
        within = ((rows[0] - row) % high, (columns[0] - column) % wide)
        target = out if out.dtype == np.float32 else None
        values = decode(codes, scales[first:, left:], stored, folder.tile, target, within)
        _need(bool(np.isfinite(values).all()), "values that are not finite")
        if target is None:
            np.copyto(out, values, casting="unsafe")

    def _need(ok: bool, found: str) -> None:
        if not ok:
            raise UserError(f"{folder.files[name].path}: {name!r}: found {found}")

    for part, inner in _pieces(out, key):
        yield lambda part=part, inner=inner: (plain if table is None else scaled)(part, inner)
