"""Shapes that tests and benchmarks of `grouped_matmul` share, and what they cost."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.hf.stored import StoredWeight
from dsv41.quant import EXPERT_WEIGHT, pack, quantize_tiles

SIZES = ("even", "random", "skewed", "one")
WEIGHTS = ("bfloat16", "float32", "fp4", "fp8")


@dataclass(frozen=True)
class Case:
    """T rows of E groups, weights N x K. sizes: even, random (every row's group drawn alike), skewed (Zipf) or one (all in one
    group); dead: rows of no group; paired: SwiGLU of two products; backward: their gradients are timed too."""

    rows: int
    groups: int
    depth: int
    width: int
    sizes: str = "random"
    weights: str = "bfloat16"
    paired: bool = False
    backward: bool = False
    dead: int = 0
    dtype: str = "bfloat16"


_TRAIN = Case(16384, 64, 4096, 2048)
_RELEASE = Case(24576, 384, 5120, 2304)
_DECODE = Case(192, 48, 5120, 2304, weights="fp4")
REAL = {
    "64 experts, even": Case(16384, 64, 4096, 2048, "even"),
    "64 experts": _TRAIN,
    "64 experts, skewed": Case(16384, 64, 4096, 2048, "skewed"),
    "64 experts, SwiGLU": Case(16384, 64, 4096, 2048, paired=True),
    "64 experts, gradients": Case(16384, 64, 4096, 2048, backward=True),
    "384 experts": _RELEASE,
    "384 experts, skewed": Case(24576, 384, 5120, 2304, "skewed"),
    "384 experts, FP4": Case(24576, 384, 5120, 2304, weights="fp4"),
    "decode, bf16": Case(192, 48, 5120, 2304),
    "decode, FP4, SwiGLU": Case(192, 48, 5120, 2304, weights="fp4", paired=True),
    "decode, FP4, second product": Case(192, 48, 2304, 5120, weights="fp4"),
}
SMALL = {
    "FP4, groups of one piece in tiles of two": Case(320, 4, 256, 128, "skewed", weights="fp4"),
    "FP8, the same": Case(320, 4, 128, 128, "skewed", weights="fp8", dead=9),
    "one row": Case(1, 3, 64, 64),
    "random": Case(300, 5, 128, 192),
    "whole tiles": Case(256, 2, 64, 256, "even"),
    "all in one group": Case(130, 4, 64, 128, "one", dead=7),
    "dead rows": Case(90, 6, 128, 64, dead=40),
    "only dead rows": Case(70, 3, 64, 64, dead=70),
    "SwiGLU": Case(150, 4, 128, 192, paired=True, dead=9),
    "skewed": Case(200, 9, 64, 64, "skewed", paired=True),
    "float32": Case(90, 6, 48, 40, dtype="float32", weights="float32", dead=4),
    "FP4": Case(70, 5, 256, 128, weights="fp4", dead=3),
    "FP4, SwiGLU": Case(40, 6, 512, 192, "skewed", weights="fp4", paired=True),
    "FP4, few rows, SwiGLU": Case(11, 5, 256, 192, weights="fp4", paired=True, dead=2),
    "FP8": Case(50, 3, 256, 64, weights="fp8"),
    "FP8, SwiGLU": Case(90, 4, 128, 128, weights="fp8", paired=True, dead=5),
}
CASES = {**SMALL, **REAL}


def _weight_shapes(case: Case) -> tuple[Any, ...]:
    shape, whole = jax.ShapeDtypeStruct, (case.groups, case.width, case.depth)
    if case.weights not in WEIGHTS:
        raise ValueError(f"weights: found {case.weights!r}, allowed are {', '.join(WEIGHTS)}")
    if case.weights == "fp4":
        codes, scales = (*whole[:2], case.depth // 2), (*whole[:2], case.depth // EXPERT_WEIGHT.group)
    elif case.weights == "fp8":
        codes, scales = whole, (case.groups, -(-case.width // 32), -(-case.depth // 32))
    else:
        return (shape(whole, jnp.dtype(case.weights)),)
    return (StoredWeight(shape(codes, jnp.uint8), shape(scales, jnp.uint8), case.weights, (32, 32)),)


def abstract(case: Case) -> tuple:
    """Shapes and dtypes of the op's arguments."""
    if case.sizes not in SIZES:
        raise ValueError(f"sizes: found {case.sizes!r}, allowed are {', '.join(SIZES)}")
    shape = jax.ShapeDtypeStruct
    scale = shape((case.rows,), jnp.float32) if case.paired else None
    weights = _weight_shapes(case) * (2 if case.paired else 1)
    return shape((case.rows, case.depth), jnp.dtype(case.dtype)), weights, shape((case.groups,), jnp.int32), scale


def group_sizes(case: Case, seed: int = 0) -> np.ndarray:
    """Rows of each group."""
    rows, random = case.rows - case.dead, np.random.default_rng(seed)
    if case.sizes == "even":
        return np.full(case.groups, rows // case.groups, np.int32)
    if case.sizes == "one":
        return np.where(np.arange(case.groups) == case.groups // 2, rows, 0).astype(np.int32)
    chances = random.permutation(1 / np.arange(1, case.groups + 1)) if case.sizes == "skewed" else np.ones(case.groups)
    return random.multinomial(rows, chances / chances.sum()).astype(np.int32)


def arguments(case: Case, seed: int = 0, poison: bool = False) -> tuple:
    """Random arguments. poison: NaN in rows of no group."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    x = jax.random.normal(next(keys), (case.rows, case.depth), jnp.dtype(case.dtype))
    sizes = group_sizes(case, seed)
    if poison:
        x = jnp.where(jnp.arange(case.rows)[:, None] < int(sizes.sum()), x, jnp.nan)

    def draw(like: Any) -> Any:
        if not isinstance(like, StoredWeight):
            return jax.random.normal(next(keys), like.shape, like.dtype) * jnp.asarray(case.depth**-0.5, like.dtype)
        if case.rows * case.groups < 10_000:
            values = jax.random.normal(next(keys), like.shape, jnp.float32) * case.depth**-0.5
            stored = pack(values, EXPERT_WEIGHT) if case.weights == "fp4" else jax.vmap(quantize_tiles)(values)
            return StoredWeight(*stored, like.stored, like.tile)
        # Large ones as bytes: E4M3 codes below NaN's, scales around the square root of the depth.
        codes = jax.random.bits(next(keys), like.codes.shape, jnp.uint8) & jnp.uint8(0xFF if case.weights == "fp4" else 0xBF)
        scales = 117 + jax.random.bits(next(keys), like.scales.shape, jnp.uint8) % jnp.uint8(5)
        return StoredWeight(codes, scales, like.stored, like.tile)

    _, weights, _, scale = abstract(case)
    scale = None if scale is None else jax.random.uniform(next(keys), scale.shape, jnp.float32, 0.1, 1.5)
    return x, tuple(draw(w) for w in weights), jnp.asarray(sizes), scale


def cost(case: Case) -> tuple[int, int]:
    """Bytes that must move (weights of groups that have rows, their rows, all results) and FLOPs; gradients: both others too."""
    sizes = group_sizes(case)
    used, rows, both = int((sizes > 0).sum()), int(sizes.sum()), 2 if case.paired else 1
    stored = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(_weight_shapes(case))) // case.groups
    size = jnp.dtype(case.dtype).itemsize
    io, flops = (rows * case.depth + case.rows * case.width) * size, both * 2 * rows * case.depth * case.width
    weights = both * used * stored
    if not case.backward:
        return weights + io, flops
    # Values; rows' gradients; weights', of every group.
    return weights + io + weights + io + both * case.groups * stored + io, 3 * flops


def options(case: Case) -> dict:
    """Static options of the op."""
    return {"limit": 10.0} if case.paired else {}


def timed(case: Case, run: Callable) -> Callable:
    """What is timed: values, or values and gradients."""
    if not case.backward:
        return run

    def both(x: jax.Array, weights: tuple, sizes: jax.Array, scale: jax.Array | None) -> tuple:
        out, pull = jax.vjp(lambda x, weights: run(x, weights, sizes, scale), x, weights)
        return out, *pull(out)

    return both


def peers(case: Case) -> dict:
    """Other forms to time beside the kernel, of the op's signature."""
    if case.weights != "bfloat16" or case.paired:
        return {}

    def ragged_dot(x: jax.Array, weights: tuple, sizes: jax.Array, scale: None) -> jax.Array:
        return jax.lax.ragged_dot(x, weights[0].swapaxes(1, 2), sizes)

    def shipped(x: jax.Array, weights: tuple, sizes: jax.Array, scale: None) -> jax.Array:
        from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

        large = case.rows // case.groups > 128
        tile = {"block_m": 128 if large else 64, "block_n": 128 if large else 256, "grid_block_n": 4 if large else 1}
        tile |= {"block_k": 64, "max_concurrent_steps": 5 if large else 4, "transpose_rhs": True}
        return ragged_dot(x, weights[0], group_sizes=sizes, **tile)

    found = {"lax.ragged_dot": timed(case, ragged_dot)} if case.groups < 100 else {}
    return found if case.backward else {**found, "jax's Hopper kernel": shipped}
