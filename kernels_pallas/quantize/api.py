"""Values to the bytes that a cache or a product of quantised inputs holds (architecture §8.1-8.3)."""

from jaxtyping import Array, Float, Int, UInt8

from dsv41.quant import Format
from kernels_pallas import registry
from kernels_pallas.registry import Impl


def quantize_rows(x: Float[Array, "*s n"], fmt: Format, *, impl: Impl = "auto") -> UInt8[Array, "*s row"]:
    """`dsv41.quant.pack_rows`: ``fmt.row_bytes(n)`` bytes a row, elements and then scales.

    x: bfloat16 or float32, finite. Every implementation gives the same bytes. Not differentiable.
    """
    return registry.call("quantize", impl, x, None, None, fmt=fmt)


def quantize_apart(
    x: Float[Array, "*s n"], fmt: Format, *, impl: Impl = "auto"
) -> tuple[UInt8[Array, "*s bytes"], UInt8[Array, "*s groups"]]:
    """`dsv41.quant.pack`: the same bytes, elements and scales as arrays of their own, as products take them."""
    return registry.call("quantize", impl, x, None, None, fmt=fmt, apart=True)


def quantize_append(
    pool: UInt8[Array, "B S row"], x: Float[Array, "B T n"], slots: Int[Array, "B T"], fmt: Format, *, impl: Impl = "auto"
) -> UInt8[Array, "B S row"]:
    """``pool`` with the row of ``x[b, i]`` in slot ``slots[b, i]`` of request b, int32; a slot outside the pool is dropped.

    No slot of a request may be named twice. A kernel writes in place where nothing reads the old ``pool`` any more.
    """
    return registry.call("quantize", impl, x, pool, slots, fmt=fmt)
