"""The compressor of a kv source: its attention input -> one latent a group of ``ratio`` tokens (architecture §5)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv41.config import ModelConfig
from dsv41.numerics import Policy, Taps, linear, record, rms_norm
from dsv41.params import CompressorParams
from dsv41.quant import MAIN_KV, fake_quant
from dsv41.rope import layer_frequencies, rotate


def latents(x: Float[Array, "B T D"], params: CompressorParams, config: ModelConfig, ratio: int) -> Float[Array, "B S K"]:
    """Pre-RoPE latents, ``S = T // ratio``: a channel-wise softmax over the group in float32, then RMSNorm.

    A trailing partial group makes nothing; groups that straddle documents or padding exist but are never visible.
    """
    if ratio == 1:
        return rms_norm(linear(x, params.wkv), params.norm, config.rms_norm_eps)
    groups = x.shape[1] // ratio
    x = x[:, : groups * ratio]
    shape = (x.shape[0], groups, ratio, config.head_dim)
    value = linear(x, params.wkv, jnp.float32).reshape(shape)
    score = linear(x, params.wgate, jnp.float32).reshape(shape)
    pooled = jnp.sum(jax.nn.softmax(score, axis=2) * value, axis=2)
    return rms_norm(pooled.astype(x.dtype), params.norm, config.rms_norm_eps)


def group_positions(positions: Int[Array, "B T"], ratio: int) -> Int[Array, "B S"]:
    """RoPE position of each entry: that of its group's first token."""
    return positions[:, : positions.shape[1] // ratio * ratio : ratio]


def main_kv(
    latent: Float[Array, "B S K"],
    positions: Int[Array, "B S"],
    config: ModelConfig,
    policy: Policy,
    ratio: int,
    taps: Taps | None,
    name: str,
) -> Float[Array, "B S K"]:
    """Main KV entries: RoPE at the group's position, then FP4 with an E4M3 scale per 16 (§8.1)."""
    entries = rotate(latent, positions, layer_frequencies(config, ratio))
    record(taps, f"{name}.main_kv_prequant", entries)
    if policy.quantize_main_kv:
        entries = fake_quant(entries, MAIN_KV)
    record(taps, f"{name}.main_kv", entries)
    return entries
