"""`grouped_matmul` on Hopper: kernels of Pallas Mosaic GPU for array weights, both their gradients, and stored weights."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.hf.stored import StoredWeight
from dsv41.numerics import swiglu
from kernels_pallas.grouped_matmul import quantized, reference, unpack
from kernels_pallas.grouped_matmul.gradient import weight_gradient
from kernels_pallas.grouped_matmul.product import product
from kernels_pallas.grouped_matmul.quantized import quantized_product

_GRANULE = 64  # weights are copied in tiles of 8 rows of 64 columns, and leave 64 columns at a time
_CODES = {"fp4": unpack.FP4, "fp8": unpack.FP8}


@dataclass(frozen=True)
class Device:
    """ctas: of the grids, one a multiprocessor. interpret: parameters of Pallas' interpreter."""

    ctas: int = 132
    interpret: Any = None


def refusal(
    x: Any, weights: tuple[Any, ...], sizes: Any, scale: Any = None, *, limit: float = 0.0, device: Device = Device()
) -> str | None:
    """Why these shapes or dtypes cannot run here."""
    groups, width, depth = weights[0].shape
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}, allowed is bfloat16"
    if x.shape[0] == 0 or groups == 0:
        return "there are no rows or no groups"
    if width % _GRANULE or depth % _GRANULE:
        return f"a weight is {width} x {depth}, allowed are multiples of {_GRANULE}"
    if isinstance(weights[0], StoredWeight):
        stored, tile = weights[0].stored, weights[0].tile
        if stored not in _CODES or (stored == "fp8" and tuple(tile) != (32, 32)):
            return f"weights are stored as {stored} with scales of {tile[0]} x {tile[1]}, allowed are fp4, and fp8 with 32 x 32"
        if depth % _CODES[stored].depth:
            return f"{stored} weights have {depth} columns, allowed are multiples of {_CODES[stored].depth}"
    return None


def run(
    x: jax.Array,
    weights: tuple[Any, ...],
    sizes: jax.Array,
    scale: jax.Array | None = None,
    *,
    limit: float = 0.0,
    device: Device = Device(),
) -> jax.Array:
    """See `kernels_pallas.grouped_matmul.api`. Products add up in float32; a fused SwiGLU takes them before they are rounded."""
    if isinstance(weights[0], StoredWeight):
        return _stored(x, weights, sizes, scale, limit, device)
    weights = tuple(w.astype(x.dtype) for w in weights)
    if scale is None:
        return _product(x, weights[0], sizes, device)
    return _swiglu(x, *weights, sizes, scale, limit, device)


def _none(a: jax.Array) -> np.ndarray:
    return np.zeros(a.shape, jax.dtypes.float0)


def _product_primal(x: jax.Array, weight: jax.Array, sizes: jax.Array, device: Device) -> jax.Array:
    return product((x,), (weight,), sizes, ctas=device.ctas, interpret=device.interpret)


def _product_forward(x: jax.Array, weight: jax.Array, sizes: jax.Array, device: Device) -> tuple[jax.Array, tuple]:
    return _product_primal(x, weight, sizes, device), (x, weight, sizes)


def _product_backward(device: Device, kept: tuple, g: jax.Array) -> tuple:
    x, weight, sizes = kept
    g_x = product((g,), (weight,), sizes, transposed=True, ctas=device.ctas, interpret=device.interpret)
    return g_x, weight_gradient(g, x, sizes, ctas=device.ctas, interpret=device.interpret), _none(sizes)


_product: Any = jax.custom_vjp(_product_primal, nondiff_argnums=(3,))
_product.defvjp(_product_forward, _product_backward)


def _swiglu_primal(
    x: jax.Array, gate: jax.Array, up: jax.Array, sizes: jax.Array, scale: jax.Array, limit: float, device: Device
) -> jax.Array:
    return product((x,), (gate, up), sizes, _padded(scale, 64), limit=limit, ctas=device.ctas, interpret=device.interpret)


def _swiglu_forward(
    x: jax.Array, gate: jax.Array, up: jax.Array, sizes: jax.Array, scale: jax.Array, limit: float, device: Device
) -> tuple[jax.Array, Any]:
    # The gradient needs both products, so here they are computed apart.
    products = _product_primal(x, gate, sizes, device), _product_primal(x, up, sizes, device)
    return _gated(products, scale, limit), (x, gate, up, sizes, scale, products)


def _gated(products: tuple[jax.Array, jax.Array], scale: jax.Array, limit: float) -> jax.Array:
    return (swiglu(*products, limit) * scale[:, None]).astype(products[0].dtype)


def _swiglu_backward(limit: float, device: Device, kept: tuple, g: jax.Array) -> tuple:
    x, gate, up, sizes, scale, products = kept
    g_products, g_scale = jax.vjp(partial(_gated, limit=limit), products, scale)[1](g)
    g_x = product(g_products, (gate, up), sizes, transposed=True, ctas=device.ctas, interpret=device.interpret)
    g_gate, g_up = (weight_gradient(own, x, sizes, ctas=device.ctas, interpret=device.interpret) for own in g_products)
    return g_x, g_gate, g_up, _none(sizes), g_scale


_swiglu: Any = jax.custom_vjp(_swiglu_primal, nondiff_argnums=(5, 6))
_swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def _padded(scale: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(scale.astype(jnp.float32), (0, rows))


def choose(rows: int, groups: int, paired: bool) -> quantized.Tile:
    """Tile sizes for ``rows`` in ``groups``, of stored weights."""
    mean = -(-rows // groups)
    size = next((s for s in (8, 16, 32, 64) if s >= 2 * mean), 128)
    if size == 8 and not paired:
        return quantized.Tile(8, 3, 1, 7)
    return quantized.Tile(size, 2, 2, {8: 5, 16: 4, 32: 4, 64: 3, 128: 2}[size])


def _stored_primal(
    x: jax.Array, weights: tuple, sizes: jax.Array, scale: jax.Array | None, limit: float, device: Device
) -> jax.Array:
    codes, tile = _CODES[weights[0].stored], choose(x.shape[0], sizes.shape[0], scale is not None)
    return quantized_product(
        unpack.permuted(x, codes),
        tuple((w.codes, w.scales) for w in weights),
        sizes,
        None if scale is None else scale.astype(jnp.float32),
        codes=codes,
        limit=limit,
        tile=tile,
        ctas=device.ctas,
        interpret=device.interpret,
    )


def _stored_forward(
    x: jax.Array, weights: tuple, sizes: jax.Array, scale: jax.Array | None, limit: float, device: Device
) -> tuple[jax.Array, tuple]:
    return _stored_primal(x, weights, sizes, scale, limit, device), (x, weights, sizes, scale)


def _stored_backward(limit: float, device: Device, kept: tuple, g: jax.Array) -> tuple:
    x, weights, sizes, scale = kept

    def plain(x: jax.Array, scale: jax.Array | None) -> jax.Array:
        return reference.run(x, weights, sizes, scale, limit=limit)

    g_x, g_scale = jax.vjp(plain, x, scale)[1](g)
    return g_x, jax.tree.map(_none, weights), _none(sizes), g_scale


_stored: Any = jax.custom_vjp(_stored_primal, nondiff_argnums=(4, 5))
_stored.defvjp(_stored_forward, _stored_backward)
