"""RoPE on the last channels, adjacent pairs: a plain table and a YaRN table (architecture §4.3)."""

import math
from functools import cache

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dsv41.config import ModelConfig, RopeScaling


@cache
def frequencies(rope_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """``float32 [rope_dim / 2]`` on the host, in the exact order of §4.3; ``scaling`` None is the plain table."""
    exponent = np.arange(0, rope_dim, 2, dtype=np.float32) / np.float32(rope_dim)
    base = (np.float64(theta) ** exponent.astype(np.float64)).astype(np.float32)
    f = np.float32(1) / base
    if scaling is None:
        return f

    def dimension(rotations: float) -> float:
        original = scaling.original_max_position_embeddings
        return rope_dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), rope_dim - 1)
    index = np.arange(rope_dim // 2, dtype=np.float32)
    ramp = np.clip((index - np.float32(low)) / np.float32(max(high - low, 1e-3)), 0, 1).astype(np.float32)
    return (f / np.float32(scaling.factor) * ramp + f * (np.float32(1) - ramp)).astype(np.float32)


def layer_frequencies(config: ModelConfig, ratio: int) -> np.ndarray:
    """The table of a layer: plain theta without compression, the compressed theta with YaRN for ratio >= 1."""
    if ratio == 0:
        return frequencies(config.qk_rope_head_dim, config.rope_theta, None)
    return frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)


def rotate(
    x: Float[Array, "*s K"], positions: Int[Array, "*s"], table: np.ndarray, inverse: bool = False
) -> Float[Array, "*s K"]:
    """Rotates the last ``2 * len(table)`` channels of ``x`` by position (its conjugate for ``inverse``), in float32."""
    phase = positions.astype(jnp.float32)[..., None] * jnp.asarray(table).reshape((1,) * positions.ndim + (-1,))
    cos, sin = jnp.cos(phase), jnp.sin(phase)
    if inverse:
        sin = -sin
    width = 2 * table.shape[0]
    keep, turn = x[..., :-width], x[..., -width:].astype(jnp.float32)
    pairs = turn.reshape(*turn.shape[:-1], width // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(turn.shape)
    return jnp.concatenate([keep, turned.astype(x.dtype)], axis=-1)


def rotate_heads(
    x: Float[Array, "B T H K"], positions: Int[Array, "B T"], table: np.ndarray, inverse: bool = False
) -> Float[Array, "B T H K"]:
    """`rotate` with one position for all heads of a token."""
    repeated = jnp.broadcast_to(positions[..., None], x.shape[:-1])
    return rotate(x, repeated, table, inverse)
