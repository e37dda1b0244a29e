"""Weights in their stored form: element codes with one E8M0 scale byte a granule, in host memory (architecture §8.4-8.6).

FP8 weights share a scale in a tile, FP4 experts and FP8 Engram rows in 32 channels of a row; all three are one rule with
another granule. Decoding here is NumPy's: XLA on CPU takes subnormal numbers for 0, and small scales give such.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct

from dsv41.params import Stored
from dsv41.quant import (
    E2M1_VALUES,
    ENGRAM_ROW,
    EXPERT_WEIGHT,
    dequantize_tiles,
    pack,
    quantize_tiles,
    unpack,
)

Granule = tuple[int, int]
_PIECE = 1 << 22  # elements encoded at a time
_CACHED = 1 << 17  # elements decoded at a time: what is made of them stays in a core's cache and in the allocator's hands
# E2M1 code of half a whole number, the nearest below where there is none.
_CODES = np.array([0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7], np.uint8)


def granule(stored: Stored, tile: Granule) -> Granule:
    """Rows and columns that share a scale; ``tile`` is the configuration's, for FP8 weights."""
    return {"fp8": tile, "fp4": (1, EXPERT_WEIGHT.group), "fp8_rows": (1, ENGRAM_ROW.group)}[stored]


@cache
def _values(stored: Stored) -> np.ndarray:
    """float32 values of every two bytes read as one number: ``[65536, 2]``, of FP4, low nibble first, ``[65536, 4]``."""
    codes = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2)
    if stored != "fp4":
        return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    four = np.array([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], np.float32)
    return np.stack([four[codes & 15], four[codes >> 4]], axis=-1).reshape(-1, 4)


def _elements(codes: np.ndarray, stored: Stored, out: np.ndarray) -> None:
    """Fills float32 ``out`` ``[R, C]`` with the values of element bytes without their scales."""
    table = _values(stored)
    # Two bytes at a time take half as long. The mode is the one in which no copy of ``out`` is made.
    if codes.shape[1] % 2 == 0 and out.flags.c_contiguous:
        pairs = np.ascontiguousarray(codes).view("<u2")
        np.take(table, pairs, axis=0, out=out.reshape(*pairs.shape, table.shape[1]), mode="clip")
    else:
        pairs = np.ascontiguousarray(np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))).view("<u2")
        out[:] = np.take(table, pairs, axis=0).reshape(len(out), -1)[:, : out.shape[1]]


@cache
def _scales() -> np.ndarray:
    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def decode(
    codes: np.ndarray,
    scales: np.ndarray,
    stored: Stored,
    tile: Granule,
    out: np.ndarray | None = None,
    start: tuple[int, int] = (0, 0),
) -> np.ndarray:
    """float32 ``[R, C]`` of element bytes ``[R, C]`` (FP4: ``[R, C/2]``) and scale bytes, exact.

    start: row and column of the block inside its granule at the scales' corner, for blocks cut out of a weight. out:
    where the values go. Values beyond float32's range become infinite, those of a NaN scale (byte 255) NaN.
    """
    high, wide = granule(stored, tile)
    columns = codes.shape[1] * (2 if stored == "fp4" else 1)
    if out is None:
        out = np.empty((codes.shape[0], columns), np.float32)
    step = max(_CACHED // max(columns, 1), 1)
    for first in range(0, codes.shape[0], step):
        rows = slice(first, min(first + step, codes.shape[0]))
        row = (start[0] + np.arange(rows.start, rows.stop)) // high
        # Spread once a granule: to repeat elements holds Python's lock, to take rows does not.
        spread = _spread(scales[row[0] : row[-1] + 1], start[1], columns, wide)
        values = out[rows]
        _elements(codes[rows], stored, values)
        # Infinities and NaN are for the caller to judge.
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(values, np.take(spread, row - row[0], axis=0) if high > 1 else spread, out=values)
    return out


def _spread(scales: np.ndarray, start: int, columns: int, wide: int) -> np.ndarray:
    """float32 scale of each of ``columns`` columns, of which the first is ``start`` columns into the first granule."""
    needed = _scales()[scales[:, start // wide : -(-(start + columns) // wide)]]
    return np.repeat(needed, wide, axis=1)[:, start % wide :][:, :columns]


def encode(values: np.ndarray, stored: Stored, tile: Granule) -> tuple[np.ndarray, np.ndarray]:
    """Element and scale bytes of float32 ``[R, C]`` by the codecs of `dsv41.quant`, scales chosen afresh."""
    high, _ = granule(stored, tile)
    step = max(_PIECE // max(values.shape[1], 1) // high, 1) * high
    pieces = [_encode(values[first : first + step], stored, tile) for first in range(0, len(values), step)]
    codes, scales = zip(*pieces, strict=True)
    return np.concatenate(codes), np.concatenate(scales)


@jax.jit
def _pack_fp4(values: jax.Array) -> Any:
    return pack(values, EXPERT_WEIGHT)


@jax.jit
def _pack_rows(values: jax.Array) -> Any:
    return pack(values, ENGRAM_ROW)


_pack_tiles = jax.jit(quantize_tiles, static_argnames=("block",))


def _encode(values: np.ndarray, stored: Stored, tile: Granule) -> tuple[np.ndarray, np.ndarray]:
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        array = jnp.asarray(np.ascontiguousarray(values))
        if stored == "fp8":
            codes, scales = _pack_tiles(array, block=tile)
        else:
            codes, scales = (_pack_fp4 if stored == "fp4" else _pack_rows)(array)
    return np.asarray(codes), np.asarray(scales)


def recode(values: np.ndarray, scales: np.ndarray, stored: Stored, tile: Granule) -> np.ndarray | None:
    """The element bytes that give exactly ``values`` under ``scales``; None where there are none.

    What makes released -> masters -> released equal byte for byte: a scale may be other than the least one that holds
    its granule (it was chosen before the elements were rounded), so `encode` could find another pair for one value.
    """
    high, wide = granule(stored, tile)
    row = np.arange(values.shape[0]) // high
    codes = np.empty((values.shape[0], values.shape[1] // (2 if stored == "fp4" else 1)), np.uint8)
    step = max(_CACHED // max(values.shape[1], 1), 1)
    for first in range(0, len(values), step):
        rows = slice(first, first + step)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            scaled = values[rows] / _spread(scales[row[rows]], 0, values.shape[1], wide)
            if stored == "fp4":
                # Twice a magnitude is a whole number of 0..12; others, and NaN, fail the comparison below.
                twice = np.nan_to_num(np.clip(np.abs(scaled), 0, 6) * 2).astype(np.int32)
                four = _CODES[twice] | (np.signbit(scaled).astype(np.uint8) << 3)
                codes[rows] = four[:, 0::2] | (four[:, 1::2] << 4)
            else:
                codes[rows] = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    back = decode(codes, scales, stored, tile)
    return codes if np.array_equal(back.view(np.uint32), np.ascontiguousarray(values).view(np.uint32)) else None


@struct.dataclass
class StoredWeight:
    """A weight as it is stored, a pytree: ``codes`` and ``scales`` are uint8, with the expert axis first in a stack.

    codes: E4M3 bits ``[.., out, in]``, or two E2M1 codes a byte ``[.., out, in/2]``; scales: E8M0 bytes, one a granule.
    """

    codes: Any
    scales: Any
    stored: Stored = struct.field(pytree_node=False)
    tile: Granule = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's own shape."""
        *lead, width = self.codes.shape
        return (*lead, 2 * width) if self.stored == "fp4" else (*lead, width)

    def dequantize(self) -> jax.Array:
        """float32 weight by `dsv41.quant`, inside jit or out."""
        if self.stored == "fp8":
            one = lambda codes, scales: dequantize_tiles(codes, scales, self.tile)  # noqa: E731
            return (jax.vmap(one) if self.codes.ndim == 3 else one)(self.codes, self.scales)
        return unpack(self.codes, self.scales, EXPERT_WEIGHT if self.stored == "fp4" else ENGRAM_ROW)
