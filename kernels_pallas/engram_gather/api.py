"""Rows of an Engram table by number, in the compute dtype (architecture §8.6, §11.5)."""

from typing import Any

import jax
from jaxtyping import Array, Float, Int, UInt8

from kernels_pallas import registry
from kernels_pallas.registry import Impl


def in_host_memory(table: Array) -> bool:
    """Whether an array, or a traced one, lies in pinned host memory."""
    return jax.typeof(table).memory_space == jax.memory.Space.Host


def engram_gather(
    table: Array, scales: UInt8[Array, "R groups"] | None, ids: Int[Array, "*s"], dtype: Any, *, impl: Impl = "auto"
) -> Float[Array, "*s W"]:
    """Row ``ids[...]`` of ``table`` in ``dtype``.

    table: ``[R, W]``, E4M3 bytes (`dsv41.quant.ENGRAM_ROW`) whose E8M0 scales, one per 32 channels, are ``scales``; or
    floats, where ``scales`` is None. ids: int32, 0 to R - 1. Stored values are exact in bfloat16 and float32. Differentiable
    in a table of floats.

    Both may lie in pinned host memory: then what a program computes between this call and the first use of its rows runs
    meanwhile. A kernel reads host memory itself, on a stream of its own.
    """
    return registry.call("engram_gather", impl, table, scales, ids, dtype=dtype)
