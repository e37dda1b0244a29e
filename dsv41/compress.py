"""The compressor of a kv source: its attention input -> one latent a group of ``ratio`` tokens (architecture §5)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv41 import context
from dsv41.config import ModelConfig
from dsv41.numerics import linear, rms_norm
from dsv41.params import CompressorParams
from dsv41.rope import layer_frequencies, rotate
from dsv41.sharding import size


def project(x: Float[Array, "B T D"], params: CompressorParams) -> tuple[Float[Array, "B T K"], Float[Array, "B T K"] | None]:
    """Each token's value and gate score, in float32; at ratio 1 the value in ``x``'s dtype and no score."""
    if params.wgate is None:
        return linear(x, params.wkv), None
    return linear(x, params.wkv, jnp.float32), linear(x, params.wgate, jnp.float32)


def pool(
    value: Float[Array, "B S r K"], score: Float[Array, "B S r K"] | None, params: CompressorParams, eps: float, dtype: jnp.dtype
) -> Float[Array, "B S K"]:
    """Pre-RoPE latents of complete groups: a channel-wise softmax over the group in float32, then RMSNorm."""
    pooled = value[:, :, 0] if score is None else jnp.sum(jax.nn.softmax(score, axis=2) * value, axis=2)
    return rms_norm(pooled.astype(dtype), params.norm, eps)


def latents(x: Float[Array, "B T D"], params: CompressorParams, config: ModelConfig, ratio: int) -> Float[Array, "B S K"]:
    """Latents of a whole row, ``S = T // ratio``, or of the groups that end in this device's part of it.

    A trailing partial group makes nothing; groups that straddle documents or padding exist but are never visible.
    """
    split = lambda a: None if a is None else context.groups(a, ratio)  # noqa: E731
    value, score = project(_grouped(x, ratio), params)
    return pool(split(value), split(score), params, config.rms_norm_eps, x.dtype)


def group_positions(positions: Int[Array, "B T"], ratio: int) -> Int[Array, "B S"]:
    """RoPE position of each of those entries: that of its group's first token."""
    return context.groups(_grouped(positions, ratio), ratio)[:, :, 0]


def _grouped(a: Array, ratio: int) -> Array:
    """Tokens of whole groups; the rest of a part's last group may be in the next part."""
    return a[:, : a.shape[1] // ratio * ratio] if size("context") == 1 else a


def main_kv(
    latent: Float[Array, "B S K"], positions: Int[Array, "B S"], config: ModelConfig, ratio: int
) -> Float[Array, "B S K"]:
    """Main KV entries before their FP4 form: RoPE at the group's position (§8.1)."""
    return rotate(latent, positions, layer_frequencies(config, ratio))
