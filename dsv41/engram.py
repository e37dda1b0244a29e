"""Engram: hashed n-gram rows, gated onto the residual streams before a block (architecture §11)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from dsv41.config import ModelConfig
from dsv41.hashing import hash_rows, lookback
from dsv41.layout import Layout
from dsv41.numerics import Taps, linear, record
from dsv41.owners import fetch, fetched_rows, parts
from dsv41.params import EngramParams, ParamSpec, TextParams, text_specs
from dsv41.sharding import cut_axes
from kernels_pallas.engram_gather.api import in_host_memory


def engram_rows(
    ids: Int[Array, "B T"], layout: Layout, token_map: Int[Array, " V"], config: ModelConfig
) -> tuple[Int[Array, "B T C"], ...]:
    """Row ids of every table: look-backs cut at the document's start and at padding or image tokens (§11.4)."""
    if not config.engram_layer_ids:
        return ()
    folded = folded_ids(ids, layout, token_map, config)
    return hashed(folded, layout.positions, token_map, config)


def folded_ids(ids: Int[Array, "B T"], layout: Layout, token_map: Int[Array, " V"], config: ModelConfig) -> Int[Array, "B T"]:
    """Folded ids, -1 for tokens that end a look-back: padding, image tokens, ids outside the vocabulary.

    An index outside the map would wrap to a valid-looking class.
    """
    inside = (ids >= 0) & (ids < config.vocab_size)
    folded = token_map[jnp.where(inside, ids, 0)]
    return jnp.where(layout.live & ~layout.image & inside, folded, -1)


def hashed(
    folded: Int[Array, "B T"], positions: Int[Array, "B T"], token_map: Int[Array, " V"], config: ModelConfig
) -> tuple[Int[Array, "B T C"], ...]:
    """Row ids of every table from `folded_ids`; positions within the document, where look-backs past 0 end."""
    pad = token_map[config.engram_pad_token_id]
    rows = lookback(folded, positions, folded < 0, config.engram_max_ngram_size, pad)
    return tuple(hash_rows(rows, table) for table in config.engram_hashes)


@struct.dataclass
class Fetched:
    """Rows of a table on their way: their numbers ``[B, T, C]`` and values ``[B, T, C, W]``."""

    ids: jax.Array
    values: jax.Array


def fetch_ahead(params: TextParams, config: ModelConfig, rows: tuple[Int[Array, "B T C"], ...], dtype: Any) -> tuple[Any, ...]:
    """The rows of tables in pinned host memory or on several devices, asked for before the first layer; others stay numbers,
    for their layer.

    Numbers depend on tokens alone, so what the first layers compute can hide the way.
    """

    def ahead(ids: Array, table: Any, spec: ParamSpec) -> Any:
        if cut_axes(spec):
            found = fetched_rows(spec, table, ids.reshape(-1), dtype)
            return Fetched(ids, found.reshape(*ids.shape, -1))
        return Fetched(ids, fetch(table, ids, dtype)) if in_host_memory(parts(table)[0]) else ids

    of = lambda layers: [layer.engram.embed for layer in layers if layer.engram is not None]  # noqa: E731
    return tuple(ahead(*one) for one in zip(rows, of(params.layers), of(text_specs(config).layers), strict=True))


def apply_engram(
    streams: Float[Array, "B T N D"],
    rows: Any,
    layout: Layout,
    params: EngramParams,
    config: ModelConfig,
    taps: Taps | None,
    name: str,
) -> Float[Array, "B T N D"]:
    """``X_j += gate_j value`` with a parameter-free signed-root gate per stream; 0 at image tokens (§11.5).

    rows: numbers ``[B, T, C]`` of the table's rows, or `Fetched` ones.
    """
    batch, time, n, d = streams.shape
    rows = rows if isinstance(rows, Fetched) else Fetched(rows, fetch(params.embed, rows, streams.dtype))
    record(taps, f"{name}.hash_ids", rows.ids)
    fetched = rows.values.reshape(batch, time, -1)
    kv = linear(fetched, params.wkv)
    key = kv[..., : n * d].reshape(batch, time, n, d).astype(jnp.float32)
    value = kv[..., n * d :]
    x = streams.astype(jnp.float32)
    gains = (params.q_weight.astype(jnp.float32) * params.k_weight.astype(jnp.float32))[None, None]
    norm = lambda v: lax.rsqrt(jnp.mean(jnp.square(v), axis=-1) + jnp.float32(config.rms_norm_eps))  # noqa: E731
    dot = jnp.sum(x * gains * key, axis=-1) * norm(x) * norm(key) * d**-0.5
    # The floor under the root keeps the gradient finite at 0.
    root = jnp.sqrt(jnp.maximum(jnp.abs(dot), 1e-6))
    gate = jax.nn.sigmoid(jnp.where(jnp.signbit(dot), -root, root))
    gate = jnp.where((layout.image | ~layout.live)[..., None], 0.0, gate)
    record(taps, f"{name}.dot", dot)
    record(taps, f"{name}.gate", gate)
    record(taps, f"{name}.value", value)
    out = (x + gate[..., None] * value.astype(jnp.float32)[..., None, :]).astype(streams.dtype)
    record(taps, f"{name}.streams", out)
    return out
