"""Prefill of a prompt into a cache: encoder layers on every token, decoder layers on its last rows alone (serving §2).

Of the other tokens the decoder needs what its first layer, the last kv source, compresses of the encoder's output. Its windows
end at the first row that runs, ``end - rows``: with the window's W rows that is the bounded replay of the report, an
approximation; with `halo_rows` every layer's last W rows are exact.

Behind a prefix whose entries and keys are in the cache already, the encoder layers run again on its last tokens, for their
windows alone, and write none of its entries (serving §3).
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dsv41 import mhc
from dsv41.block import Tokens, block
from dsv41.cache import Cache, Carried, cached_site, chunk_layout, extend_source, latest, take
from dsv41.config import ModelConfig
from dsv41.dspark import remember
from dsv41.model import begin_chunk, draft_input, unembed
from dsv41.numerics import Policy
from dsv41.params import DraftParams, TextParams
from dsv41.plan import layer_plans
from dsv41.replay import decoder_input, gather
from dsv41.site import Shared


def decoder_layers(config: ModelConfig) -> int:
    """How many layers stand in the decoder half."""
    return sum(plan.half == "decoder" for plan in layer_plans(config))


def halo_rows(config: ModelConfig) -> int:
    """Rows of the decoder after which the last token and all windows behind it are exact: each layer reaches W - 1 further."""
    return 1 + decoder_layers(config) * (config.sliding_window - 1)


@struct.dataclass
class Restored:
    """What a cache holds of prompts before their first chunk, int32 ``[B]`` each; zeros for nothing.

    kept: tokens whose entries and keys, ``kept // r`` of ratio r, are there and are not written again. floor: the first position
    that a window may reach; ring slots of earlier ones may hold anything.
    """

    kept: jax.Array
    floor: jax.Array


def replay_start(config: ModelConfig, end: int, kept: int, exact: bool) -> int:
    """First token that runs of a prompt of ``end`` tokens whose first ``kept`` have their entries: its `Restored.floor` too.

    exact: as many tokens as it takes for the same result as with all of them, where the decoder runs `halo_rows`; else the
    last W before ``kept``, an approximation (serving §3).
    """
    if not exact:
        return max(0, kept - config.sliding_window)
    encoder = config.num_hidden_layers - decoder_layers(config)
    return max(0, min(kept, end - halo_rows(config)) - encoder * (config.sliding_window - 1))


def prefill(
    params: TextParams,
    config: ModelConfig,
    policy: Policy,
    cache: Cache,
    ids: Int[Array, "B T"],
    live: Bool[Array, "B T"],
    token_map: Int[Array, " V"],
    end: Int[Array, " B"],
    rows: int,
    image: Bool[Array, "B T"] | None = None,
    restored: Restored | None = None,
    draft: DraftParams | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """A chunk of prompts of ``end`` tokens: logits of each row's last new token, and the cache behind the chunk.

    ids, live, image: as `dsv41.model.extend` takes them, a row's tokens within its prompt. rows: of the decoder, counted from
    the prompt's end, so that the outcome does not depend on the chunks; 0 for a chunk that has none of any prompt's. Logits of a
    row without one of them in this chunk mean nothing. The config has a decoder half. restored: the same for every chunk of a
    prompt, whose first token is the one at the cache's length, by `replay_start`. draft: as `extend` takes it.
    """
    residual, carried, tokens, folded, _ = begin_chunk(params, config, policy, cache, ids, live, token_map, image)
    time, count = ids.shape[1], jnp.sum(tokens.layout.segments, axis=1)
    history = latest(folded, count, cache.history.shape[1])
    kept, lowest, site = None, jnp.zeros_like(end), cached_site
    if restored is not None:
        kept, lowest, site = restored.kept, restored.floor, partial(cached_site, kept=restored.kept)
        tokens = replace(tokens, layout=replace(tokens.layout, floor=jnp.broadcast_to(lowest[:, None], ids.shape)))
    layers = list(zip(layer_plans(config), params.layers, strict=True))
    first = len(layers) - decoder_layers(config)
    means: Any = []
    for plan, layer in layers[:first]:
        out = block(residual, layer, plan, carried, tokens, config, policy, None, site)
        residual, carried = out.residual, out.carried
        means.append(out.mean)

    plan, layer = layers[first]
    x = decoder_input(residual, layer, plan, tokens, config)
    source = extend_source(x, layer.attn, plan, cache.sources[-1], cache.length, count, config, policy, None, kept)
    written = replace(carried.cache, sources=(*carried.cache.sources[:-1], source))
    behind = partial(replace, length=cache.length + count, history=history)
    if not rows:
        return jnp.zeros((ids.shape[0], config.vocab_size), jnp.float32), behind(written)

    skipped = jnp.clip(end - rows - cache.length, 0, count)
    index = skipped[:, None] + jnp.arange(min(rows, time), dtype=jnp.int32)[None]
    pick = partial(gather, jnp.minimum(index, time - 1), index < count[:, None])
    at = cache.length + skipped
    layout = chunk_layout(at, count - skipped, index.shape[1], pick(tokens.layout.image))
    floor = jnp.broadcast_to(jnp.maximum(end - rows, lowest)[:, None], index.shape)
    tokens = Tokens(pick(tokens.ids), replace(layout, floor=floor), jax.tree.map(pick, tokens.engram_rows))
    residual: Any = jax.tree.map(pick, residual)
    means = jax.tree.map(pick, means)
    carried = Carried(Shared(main_kv=source.main_kv, index_k=source.index_k), replace(written, length=at))
    site = partial(cached_site, publishes=False)
    for plan, layer in layers[first:]:
        out = block(residual, layer, plan, carried, tokens, config, policy, None, site)
        residual, carried = out.residual, out.carried
        means.append(out.mean)
    written = carried.cache
    if draft is not None:
        written = remember(draft, config, policy, written, draft_input(means, None), at, count - skipped)
    last = jnp.maximum(count - skipped - 1, 0)[:, None]
    streams, pre = take(mhc.settle(residual, None), last), take(residual.pre, last)
    return unembed(params, streams, pre, config, None)[:, 0], behind(written)
