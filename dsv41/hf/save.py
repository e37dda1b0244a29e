"""Parameters to the released format: units of tensors, split into files by size, with an index (architecture §8, §14).

A folder appears whole under its name or not at all. The same weights give the same bytes.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dsv41.config import ModelConfig, QuantizationConfig, replace, save_config
from dsv41.errors import UserError
from dsv41.hf.folder import INDEX
from dsv41.hf.names import Slot, tile
from dsv41.hf.safetensors import DTYPES, write_safetensors
from dsv41.hf.stored import decode, encode, recode
from dsv41.params import ReleasedTensor

Target = Literal["release", "bf16", "fp32"]
SHARD_BYTES = 5_000_000_000
_METADATA = {"format": "pt"}  # transformers refuses files that do not say so


@dataclass(frozen=True)
class Unit:
    """Tensors that are made together and stand in one file; ``make`` gives them in the order of ``tensors``."""

    tensors: tuple[ReleasedTensor, ...]
    make: Callable[[], Sequence[np.ndarray]]


def default_target(config: ModelConfig) -> Target:
    """What the configuration itself says its weights are."""
    if config.quantization_config is not None:
        return "release"
    return "bf16" if config.dtype == "bfloat16" else "fp32"


def target_config(config: ModelConfig, target: Target) -> ModelConfig:
    """``config`` as it stands beside weights written as ``target``."""
    if target == "release":
        return replace(config, quantization_config=config.quantization_config or QuantizationConfig())
    return replace(config, quantization_config=None, dtype="bfloat16" if target == "bf16" else "float32")


def target_tensors(slot: Slot, target: Target) -> tuple[ReleasedTensor, ...]:
    """The tensors that hold a weight under ``target``; what the release keeps in float32 stays so in bf16 too (§10)."""
    if target == "release":
        return slot.tensors
    dtype = slot.weight.dtype
    if slot.spec.stored != "i64":
        dtype = "F32" if target == "fp32" or slot.spec.stored == "f32" else "BF16"
    return (ReleasedTensor(slot.weight.name, dtype, slot.shape),)


def from_master(
    slot: Slot, config: ModelConfig, target: Target, value: Callable[[], np.ndarray], scales: Callable[[], np.ndarray] | None
) -> Unit:
    """A unit of a float32 (ids: int32) master.

    scales: the scale bytes that the weight had where it came from. Where they hold it exactly they are kept, and with
    them every byte; else the weight is quantised afresh.
    """
    tensors = target_tensors(slot, target)

    def make() -> Sequence[np.ndarray]:
        array = np.asarray(value())
        if len(tensors) == 1:
            return [array.astype(DTYPES[tensors[0].dtype], copy=False)]
        stored = slot.spec.stored
        if scales is not None:
            kept = np.ascontiguousarray(scales())
            codes = recode(array, kept, stored, tile(config))
            if codes is not None:
                return _typed((codes, kept), tensors)
        if not np.isfinite(array).all():
            raise UserError(f"{slot.weight.name}: found values that are not finite, allowed are numbers that E8M0 scales reach")
        return _typed(encode(array, stored, tile(config)), tensors)

    return Unit(tensors, make)


def from_carried(slot: Slot, config: ModelConfig, target: Target, value: Callable[[str], np.ndarray]) -> Unit:
    """A unit of a weight that was carried in the form it had; unchanged where that is the target's."""

    tensors = target_tensors(slot, target)

    def make() -> Sequence[np.ndarray]:
        held = value(slot.weight.name)
        if len(tensors) == 1 and held.dtype == DTYPES[tensors[0].dtype]:
            return [held]
        if slot.scale is None or held.dtype.itemsize > 1:
            return from_master(slot, config, target, lambda: held.astype(np.float32), None).make()
        stored = (held.view(np.uint8), value(slot.scale.name).view(np.uint8))
        if target == "release":
            return _typed(stored, tensors)
        numbers = decode(*stored, slot.spec.stored, tile(config))
        return from_master(slot, config, target, lambda: numbers, None).make()

    return Unit(tensors, make)


def _typed(arrays: Sequence[np.ndarray], tensors: Sequence[ReleasedTensor]) -> list[np.ndarray]:
    return [array.view(DTYPES[tensor.dtype]) for array, tensor in zip(arrays, tensors, strict=True)]


def shard_units(units: Sequence[Unit], shard_bytes: int = SHARD_BYTES) -> list[list[Unit]]:
    """The units of each file, in their order; a file exceeds ``shard_bytes`` only with a unit that does so alone."""
    shards: list[list[Unit]] = []
    size = 0
    for unit in units:
        more = sum(tensor.bytes for tensor in unit.tensors)
        if not shards or size + more > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(unit)
        size += more
    return shards


def shard_names(count: int) -> list[str]:
    """``model-00001-of-00002.safetensors`` and so on."""
    return [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]


def write_weights(
    folder: Path,
    units: Sequence[Unit],
    config: ModelConfig,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Writes config.json, the files and their index into ``folder``; holds the tensors of one file at a time.

    progress: called with the bytes written so far.
    """
    shards = shard_units(units, shard_bytes)
    weight_map: dict[str, str] = {}
    done = 0
    for name, shard in zip(shard_names(len(shards)), shards, strict=True):
        arrays: dict[str, np.ndarray] = {}
        for unit in shard:
            for tensor, array in zip(unit.tensors, unit.make(), strict=True):
                if array.shape != tensor.shape:
                    raise UserError(f"{tensor.name}: found shape {list(array.shape)}, allowed is {list(tensor.shape)}")
                arrays[tensor.name] = array
                done += array.nbytes
            progress(done)
        write_safetensors(folder / name, arrays, _METADATA)
        weight_map |= dict.fromkeys(arrays, name)
    index = {"metadata": {"total_size": done}, "weight_map": dict(sorted(weight_map.items()))}
    with open(folder / INDEX, "x", encoding="utf-8") as file:
        file.write(json.dumps(index, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    save_config(config, folder / "config.json")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill under a temporary name, which becomes ``path`` at the end or vanishes after an error.

    Raises `UserError` where ``path`` holds something already or cannot be written.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path}: found something there, allowed is a new or empty folder")
    path = path.resolve()
    # A name of its own: nothing that stands there already is ours to clear away.
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
        partial.replace(path)
        descriptor = os.open(partial.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def leaf_reader(leaves: Mapping[str, Any]) -> Callable[[str, int | None], np.ndarray]:
    """``(path, expert) -> array`` of a mapping of jax arrays; the last leaf is kept, as its experts follow each other."""
    last: dict[str, np.ndarray] = {}

    def read(path: str, expert: int | None) -> np.ndarray:
        if path not in last:
            last.clear()
            last[path] = np.asarray(leaves[path])
        return last[path] if expert is None else last[path][expert]

    return read
