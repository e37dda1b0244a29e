"""Products of rows sorted by expert with their expert's weights (architecture §9)."""

from typing import Any

from jaxtyping import Array, Float, Float32, Int

from kernels_pallas import registry
from kernels_pallas.registry import Impl


def grouped_matmul(x: Float[Array, "T K"], weight: Any, sizes: Int[Array, " E"], *, impl: Impl = "auto") -> Float[Array, "T N"]:
    """``x[t] W[e]^T`` with the group e that row t is in.

    x: the rows of group 0, then those of group 1 and so on. weight ``[E, N, K]``: an array, taken in x's dtype, or a
    `dsv41.hf.stored.StoredWeight` of FP4 (one E8M0 scale per 32) or FP8 (one a 32x32 tile), which is dequantised tile by tile
    and has no gradient. sizes: int32 rows of each group, 0 allowed, together at most T.

    Returns x's dtype; rows past the last group are zeros, whatever they hold. Differentiable in x and in an array weight.
    """
    return registry.call("grouped_matmul", impl, x, (weight,), sizes, None)


def grouped_swiglu(
    x: Float[Array, "T K"],
    gate: Any,
    up: Any,
    sizes: Int[Array, " E"],
    scale: Float32[Array, " T"],
    *,
    limit: float,
    impl: Impl = "auto",
) -> Float[Array, "T N"]:
    """``scale * silu(min(g, limit)) * clip(u, -limit, limit)`` with g and u the products of x with gate and up.

    gate, up: weights as in `grouped_matmul`, of one kind; scale: the routing weight of each row. SwiGLU is in float32.
    Returns x's dtype; rows past the last group are zeros. Differentiable in x, scale and array weights.
    """
    return registry.call("grouped_matmul", impl, x, (gate, up), sizes, scale, limit=limit)
