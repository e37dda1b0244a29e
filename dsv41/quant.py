"""The number formats of the caches, activations and weights: E2M1, E4M3 and E8M0 codecs (architecture §8).

One `Format` a use; `fake_quant` is quantise-dequantise with a straight-through gradient, `pack`/`unpack` the stored bytes.
``unpack(pack(x)) == fake_quant(x)`` bit for bit. Groups run along the last axis.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int, UInt8

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints between neighbouring magnitudes; a tie goes to the even code, so it rises only where the upper code is even.
_E2M1_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
E2M1_MAX, E4M3_MAX = 6.0, 448.0


@dataclass(frozen=True)
class Format:
    """A group-scaled format. ``group`` channels share one scale byte; ``floor`` bounds the group's largest magnitude."""

    name: str
    element: Literal["e2m1", "e4m3"]
    scale: Literal["e4m3", "e8m0"]
    group: int
    floor: float

    @property
    def max(self) -> float:
        return E2M1_MAX if self.element == "e2m1" else E4M3_MAX

    def row_bytes(self, width: int) -> int:
        """Stored bytes of a row of ``width`` channels: elements, then one scale byte a group."""
        return width * (4 if self.element == "e2m1" else 8) // 8 + width // self.group


MAIN_KV = Format("main KV", "e2m1", "e4m3", 16, 6 * 2.0**-9)  # §8.1
WINDOW_KV = Format("window KV", "e4m3", "e8m0", 32, 1e-4)  # §8.2
ACTIVATION = Format("activation", "e4m3", "e8m0", 32, 1e-4)  # §8.2
INDEX_KEY = Format("index key and query", "e2m1", "e8m0", 32, 6 * 2.0**-126)  # §8.3
EXPERT_WEIGHT = Format("expert weight", "e2m1", "e8m0", 32, 6 * 2.0**-126)  # §8.5
ENGRAM_ROW = Format("Engram row", "e4m3", "e8m0", 32, 448 * 2.0**-126)  # §8.6
WEIGHT_TILE_FLOOR = 448 * 2.0**-126


def round_e4m3(x: Float32[Array, "*s"]) -> Float32[Array, "*s"]:
    """The E4M3 number nearest to ``x``, ties to even, saturating, as float32.

    By arithmetic: XLA drops a conversion there and back where it may keep excess precision, as it does on GPU.
    """
    x = jnp.clip(x, -E4M3_MAX, E4M3_MAX)
    exponent = (lax.bitcast_convert_type(x, jnp.int32) >> 23) & 0xFF
    # Three mantissa bits; below 2**-6 the numbers are multiples of 2**-9.
    step = lax.bitcast_convert_type((jnp.maximum(exponent, 127 - 6) - 3) << 23, jnp.float32)
    return lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step


def e4m3(x: Float32[Array, "*s"]) -> Array:
    """`round_e4m3` in E4M3's own dtype; the bare cast gives NaN above 464."""
    return round_e4m3(x).astype(jnp.float8_e4m3fn)


def power_of_two_exponent(x: Float32[Array, "*s"]) -> Int[Array, "*s"]:
    """Biased exponent byte of 2**ceil(log2(x)) from the bits of a positive normal ``x``; exact powers stay (§8 P2)."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).astype(jnp.int32)


def e8m0_value(byte: Int[Array, "*s"] | UInt8[Array, "*s"]) -> Float32[Array, "*s"]:
    """2**(byte - 127) as float32, built from bits; byte 0 is the subnormal 2**-127."""
    exponent = byte.astype(jnp.int32)
    bits = jnp.where(exponent == 0, jnp.int32(1 << 22), exponent << 23)
    return lax.bitcast_convert_type(bits, jnp.float32)


def e2m1_codes(x: Float32[Array, "*s n"], unit: Float32[Array, "*s one"] | None = None) -> UInt8[Array, "*s n"]:
    """Codes 0-15 (sign in bit 3) of ``x``, or of ``x / unit``, rounded to nearest even, saturating at 6.

    Without a division, which XLA does not round correctly: midpoints times an E4M3 ``unit`` are exact, so ties are ties.
    """
    magnitude = jnp.abs(x)
    code = jnp.zeros(x.shape, jnp.uint8)
    for midpoint, rises in _E2M1_MIDPOINTS:
        bound = midpoint if unit is None else midpoint * unit
        above = magnitude >= bound if rises else magnitude > bound
        code = code + above.astype(jnp.uint8)
    return code | (jnp.signbit(x).astype(jnp.uint8) << 3)


def e2m1_values(codes: UInt8[Array, "*s"]) -> Float32[Array, "*s"]:
    """float32 values of E2M1 codes."""
    magnitude = (codes & 7).astype(jnp.int32)
    # 1 + mantissa/2, scaled by 2**(exponent-1); exponent 0 is the subnormal {0, 0.5}.
    exponent, mantissa = magnitude >> 1, (magnitude & 1).astype(jnp.float32)
    power = lax.bitcast_convert_type((exponent + 126) << 23, jnp.float32)
    value = jnp.where(exponent == 0, 0.5 * mantissa, power * (1.0 + 0.5 * mantissa))
    return jnp.where(codes >= 8, -value, value)


def pack_nibbles(codes: UInt8[Array, "*s n"]) -> UInt8[Array, "*s half"]:
    """Two codes a byte, the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: UInt8[Array, "*s half"]) -> UInt8[Array, "*s n"]:
    """The inverse of `pack_nibbles`: twice as many codes."""
    pair = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return pair.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def _scale_bytes(amax: Float32[Array, "*s"], fmt: Format) -> UInt8[Array, "*s"]:
    amax = jnp.maximum(amax, jnp.float32(fmt.floor))
    if fmt.scale == "e4m3":
        near = lax.bitcast_convert_type(e4m3(amax / jnp.float32(fmt.max)), jnp.uint8)
        # The quotient may be off by some ulp. What lies between two scales, times 6, is exact; a tie goes to the even code.
        value = lambda code: scale_values(code, fmt)  # noqa: E731
        above = jnp.float32(fmt.max / 2) * (value(near) + value(jnp.minimum(near + 1, 0x7E)))
        below = jnp.float32(fmt.max / 2) * (value(near) + value(near - 1))
        odd = near % 2 == 1
        up = ((amax > above) | ((amax == above) & odd)) & (near < 0x7E)
        return near + up.astype(jnp.uint8) - ((amax < below) | ((amax == below) & odd)).astype(jnp.uint8)
    return power_of_two_exponent(amax * jnp.float32(np.float32(1) / np.float32(fmt.max))).astype(jnp.uint8)


def scale_values(scales: UInt8[Array, "*s"], fmt: Format) -> Float32[Array, "*s"]:
    """float32 values of scale bytes."""
    if fmt.scale == "e4m3":
        return lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(jnp.float32)
    return e8m0_value(scales)


def quantize(x: Float[Array, "*s n"], fmt: Format) -> tuple[UInt8[Array, "*s n"], UInt8[Array, "*s groups"]]:
    """Element codes (one byte each: E2M1 code or E4M3 bits) and scale bytes. Raises when groups do not divide ``n``."""
    width = x.shape[-1]
    if width % fmt.group:
        raise ValueError(f"{fmt.name}: found {width} channels, allowed is a multiple of {fmt.group}")
    grouped = x.astype(jnp.float32).reshape(*x.shape[:-1], width // fmt.group, fmt.group)
    scales = _scale_bytes(jnp.max(jnp.abs(grouped), axis=-1), fmt)
    if fmt.scale == "e4m3":
        codes = e2m1_codes(grouped, scale_values(scales, fmt)[..., None])
    else:
        # The reciprocal of a power of two is exact.
        scaled = jnp.clip(grouped * e8m0_value(254 - scales)[..., None], -fmt.max, fmt.max)
        codes = e2m1_codes(scaled) if fmt.element == "e2m1" else lax.bitcast_convert_type(e4m3(scaled), jnp.uint8)
    return codes.reshape(x.shape), scales


def dequantize(codes: UInt8[Array, "*s n"], scales: UInt8[Array, "*s groups"], fmt: Format) -> Float32[Array, "*s n"]:
    """float32 values of codes and scales, exact (every product of the two fits bf16)."""
    if fmt.element == "e2m1":
        values = e2m1_values(codes)
    else:
        values = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    grouped = values.reshape(*codes.shape[:-1], codes.shape[-1] // fmt.group, fmt.group)
    return (grouped * scale_values(scales, fmt)[..., None]).reshape(codes.shape)


def pack(x: Float[Array, "*s n"], fmt: Format) -> tuple[UInt8[Array, "*s bytes"], UInt8[Array, "*s groups"]]:
    """The stored form of ``x``: element bytes (two E2M1 codes each, or one E4M3) and scale bytes."""
    codes, scales = quantize(x, fmt)
    return (pack_nibbles(codes) if fmt.element == "e2m1" else codes), scales


def unpack(packed: UInt8[Array, "*s bytes"], scales: UInt8[Array, "*s groups"], fmt: Format) -> Float32[Array, "*s n"]:
    """float32 values of the stored form."""
    return dequantize(unpack_nibbles(packed) if fmt.element == "e2m1" else packed, scales, fmt)


def pack_rows(x: Float[Array, "*s n"], fmt: Format) -> UInt8[Array, "*s row"]:
    """`pack` as one array of ``fmt.row_bytes(n)`` bytes a row: elements, then scales."""
    return jnp.concatenate(pack(x, fmt), axis=-1)


def row_values(rows: Array, fmt: Format, dtype: Any) -> Float[Array, "*s n"]:
    """Values of stored rows in ``dtype``: bytes of `pack_rows` are dequantised, rows of floats are taken as they are."""
    if rows.dtype != jnp.uint8:
        return rows.astype(dtype)
    elements = rows.shape[-1] * fmt.group // fmt.row_bytes(fmt.group)
    split = fmt.row_bytes(elements) - elements // fmt.group
    return unpack(rows[..., :split], rows[..., split:], fmt).astype(dtype)


def fake_quant(x: Float[Array, "*s n"], fmt: Format) -> Float[Array, "*s n"]:
    """Quantise and dequantise in ``x``'s dtype; the gradient is the identity, saturated values included (§8, QAT backward)."""
    return _straight_through(x, fmt)


# A rule of its own rather than ``x + stop_gradient(q - x)``: that sum does not land on ``q`` in floating point.
@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _straight_through(x: jax.Array, fmt: Format) -> Any:
    return dequantize(*quantize(x, fmt), fmt).astype(x.dtype)


@_straight_through.defjvp
def _(fmt: Format, primals: tuple, tangents: tuple) -> tuple:
    return _straight_through(primals[0], fmt), tangents[0]


def _tiles(weight: Array, block: tuple[int, int]) -> Array:
    """``[out, in]`` -> ``[out/b0, b0, in/b1, b1]``, the ragged edge padded with zeros."""
    rows, columns = weight.shape
    padded = jnp.pad(weight, ((0, -rows % block[0]), (0, -columns % block[1])))
    return padded.reshape(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])


def quantize_tiles(
    weight: Float[Array, "out in"], block: tuple[int, int] = (32, 32)
) -> tuple[UInt8[Array, "out in"], UInt8[Array, "to ti"]]:
    """FP8 weight with one E8M0 scale a tile (§8.4): E4M3 bits ``[out, in]``, scale bytes ``[ceil(out/b), ceil(in/b)]``."""
    tiles = _tiles(weight.astype(jnp.float32), block)
    amax = jnp.maximum(jnp.max(jnp.abs(tiles), axis=(1, 3)), jnp.float32(WEIGHT_TILE_FLOOR))
    scales = power_of_two_exponent(amax * jnp.float32(np.float32(1) / np.float32(E4M3_MAX))).astype(jnp.uint8)
    values = e4m3(tiles / e8m0_value(scales)[:, None, :, None])
    bits = lax.bitcast_convert_type(values, jnp.uint8)
    padded = bits.reshape(tiles.shape[0] * block[0], tiles.shape[2] * block[1])
    return padded[: weight.shape[0], : weight.shape[1]], scales


def dequantize_tiles(
    bits: UInt8[Array, "out in"], scales: UInt8[Array, "to ti"], block: tuple[int, int] = (32, 32)
) -> Float32[Array, "out in"]:
    """float32 weight of `quantize_tiles`' form; edge tiles may be partial."""
    values = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)
    scaled = _tiles(values, block) * e8m0_value(scales)[:, None, :, None]
    padded = scaled.reshape(scaled.shape[0] * block[0], scaled.shape[2] * block[1])
    return padded[: bits.shape[0], : bits.shape[1]]


def quantized_linear(x: Float[Array, "*s in"], weight: Float32[Array, "out in"]) -> Float32[Array, "*s out"]:
    """A linear whose input is FP8-quantised first, over a dequantised weight (§4.9), in float32."""
    quantized = fake_quant(x.astype(jnp.float32), ACTIVATION)
    return jnp.einsum("...i,oi->...o", quantized, weight, precision=lax.Precision.HIGHEST)
