"""The text model, over full sequences and behind a cache: embedding, streams, blocks, final collapse, head (architecture §3)."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dsv41 import context, mhc
from dsv41.block import Tokens, block, first_mix
from dsv41.cache import Cache, Carried, cached_site, chunk_layout, take
from dsv41.config import ModelConfig
from dsv41.engram import engram_rows, fetch_ahead, folded_ids, hashed
from dsv41.indexer import SELECTED
from dsv41.layout import Layout, make_layout, replay_layout
from dsv41.numerics import Policy, Taps, record, rms_norm
from dsv41.params import TextParams, text_specs
from dsv41.plan import layer_plans
from dsv41.sharding import GATHERED, STORED, gathered, size
from dsv41.site import Shared, served_kl, whole_row
from dsv41.vocabulary import embedded, whole_logits

_STATIC = (2, 5, 6, 7, 8)  # of `block`'s arguments


@struct.dataclass
class Output:
    """hidden ``[B, T, D]``: what the head reads, in compute dtype; logits ``[B, T, V]`` float32, None from `features`.

    load ``[L, 2, E]``: tokens routed to each expert, of live text and of image tokens. balance ``[L]``. index_kl ``[I]``, a
    loss for each index source.
    """

    hidden: jax.Array
    logits: Any
    load: jax.Array
    balance: jax.Array
    index_kl: jax.Array


def _align(ids: Any, segments: Any, image: Any, alignment: int) -> tuple[Any, Any, Any, Any]:
    """Turns left padding into right padding where the first document starts off the alignment; also the turn's index."""
    start = jnp.argmax(segments > 0, axis=1).astype(jnp.int32) % alignment
    index = (jnp.arange(ids.shape[1], dtype=jnp.int32)[None] + start[:, None]) % ids.shape[1]
    take = lambda a: jnp.take_along_axis(a, index, axis=1)  # noqa: E731
    back = (jnp.arange(ids.shape[1], dtype=jnp.int32)[None] - start[:, None]) % ids.shape[1]
    return take(ids), take(segments), take(image), back


def extend_history(
    ids: Int[Array, "B T"], layout: Layout, cache: Cache, token_map: Any, config: ModelConfig
) -> tuple[tuple[Int[Array, "B T C"], ...], Int[Array, "B h"]]:
    """Engram rows of a chunk, whose look-backs reach into the cache's history, and the history behind it."""
    depth = cache.history.shape[1]
    if not depth:
        return (), cache.history
    folded = jnp.concatenate([cache.history, folded_ids(ids, layout, token_map, config)], axis=1)
    positions = cache.length[:, None] + jnp.arange(-depth, ids.shape[1], dtype=jnp.int32)[None]
    rows = tuple(table[:, depth:] for table in hashed(folded, positions, token_map, config))
    count = jnp.sum(layout.segments, axis=1)
    return rows, take(folded, count[:, None] + jnp.arange(depth, dtype=jnp.int32)[None])


def make_tokens(ids: Any, segments: Any, image: Any, token_map: Any, config: ModelConfig) -> Tokens:
    """The batch as the layers see it: ids, layout and Engram rows."""
    layout = make_layout(segments, image)
    return Tokens(ids, layout, engram_rows(ids, layout, token_map, config))


def begin_chunk(
    params: TextParams,
    config: ModelConfig,
    policy: Policy,
    cache: Cache,
    ids: Int[Array, "B T"],
    live: Bool[Array, "B T"],
    token_map: Int[Array, " V"],
    image: Bool[Array, "B T"] | None,
) -> tuple[mhc.Residual, Carried, Tokens, Int[Array, "B h"], Int[Array, "B T"]]:
    """What the first layer takes of a chunk behind a cache; also the history behind it, and where each token went."""
    image = jnp.zeros(ids.shape, bool) if image is None else image
    time = ids.shape[1]
    ids, segments, image, back = _align(ids, live.astype(jnp.int32), image, time)
    layout = chunk_layout(cache.length, jnp.sum(segments, axis=1), time, image)
    rows, history = extend_history(ids, layout, cache, token_map, config)
    tokens = Tokens(ids, layout, fetch_ahead(params, config, rows, policy.compute_dtype))
    residual = mhc.Residual(embed(params, ids, config, policy), first_mix(ids, config))
    return residual, Carried(Shared(), cache), tokens, history, back


def extend(
    params: TextParams,
    config: ModelConfig,
    policy: Policy,
    cache: Cache,
    ids: Int[Array, "B T"],
    live: Bool[Array, "B T"],
    token_map: Int[Array, " V"],
    image: Bool[Array, "B T"] | None = None,
    taps: Taps | None = None,
    every: bool = False,
) -> tuple[Float[Array, "B *t V"], Cache]:
    """Logits of the tokens that follow a cache, and the cache behind them: prefill in any chunks, and decode at T = 1.

    live: each row's new tokens, one run with padding on either side or none at all (the row's cache stays as it is).
    every: logits of all T positions; else of each row's last new token, ``[B, V]``. A row must stay within the capacity
    of the cache: entries past it are dropped.
    """
    residual, carried, tokens, history, back = begin_chunk(params, config, policy, cache, ids, live, token_map, image)
    count = jnp.sum(tokens.layout.segments, axis=1)
    for plan, layer in zip(layer_plans(config), params.layers, strict=True):
        out = block(residual, layer, plan, carried, tokens, config, policy, taps, cached_site)
        residual, carried = out.residual, out.carried
    streams, pre = mhc.settle(residual, taps), residual.pre
    record_draft_input(taps, config)
    cache = replace(carried.cache, length=cache.length + count, history=history)
    if every:
        return jnp.take_along_axis(unembed(params, streams, pre, config, taps), back[..., None], axis=1), cache
    last = jnp.maximum(count - 1, 0)[:, None]
    return unembed(params, take(streams, last), take(pre, last), config, taps)[:, 0], cache


def embed(params: TextParams, ids: Int[Array, "B T"], config: ModelConfig, policy: Policy) -> Float[Array, "B T N D"]:
    """Embedding rows copied to every residual stream (§3)."""
    table = gathered(params.embed, text_specs(config).embed)
    rows = embedded(table, jnp.clip(ids, 0, config.vocab_size - 1)).astype(policy.compute_dtype)
    return jnp.broadcast_to(rows[:, :, None], (*ids.shape, config.hc_mult, config.hidden_size))


def record_draft_input(taps: Taps | None, config: ModelConfig) -> None:
    """Keeps the stream means entering the layers that the draft stages read (§12.2)."""
    if taps is not None and config.num_nextn_predict_layers:
        means = [taps[f"layers.{layer}.input_mean"] for layer in config.dspark_target_layer_ids]
        record(taps, "dspark_main_hidden", jnp.concatenate(means, axis=-1))


def unembed(
    params: TextParams, streams: Float[Array, "B T N D"], pre: Float[Array, "B T N"], config: ModelConfig, taps: Taps | None
) -> Float[Array, "B T V"]:
    """float32 logits of `final_hidden` (§3)."""
    head = gathered(params.head, text_specs(config).head)
    return whole_logits(final_hidden(params, streams, pre, config, taps), head, config.vocab_size)


def final_hidden(
    params: TextParams, streams: Float[Array, "B T N D"], pre: Float[Array, "B T N"], config: ModelConfig, taps: Taps | None
) -> Float[Array, "B T D"]:
    """Final collapse with the last FFN site's input mix (the V4 form has a predictor of its own), and norm (§3)."""
    if params.hc_head is not None:
        hc_head = gathered(params.hc_head, text_specs(config).hc_head)
        pre = mhc.head_coefficients(streams, hc_head, config.hc_eps, config.rms_norm_eps)
    hidden = mhc.collapse(pre, streams)
    record(taps, "final_hidden", hidden)
    return rms_norm(hidden, params.norm, config.rms_norm_eps)


def _row_tokens(ids: Any, segments: Any, image: Any, token_map: Any, config: ModelConfig) -> tuple[Tokens, Int[Array, "B T"]]:
    """`make_tokens` of aligned rows, and the index that turns them back.

    Of rows in parts, this device's tokens: their layout and look-backs are those of whole rows, at a few bytes a token.
    """
    image = jnp.zeros(ids.shape, bool) if image is None else image
    ids, segments, image = (context.whole(a) for a in (ids, segments, image))
    ids, segments, image, back = _align(ids, segments, image, config.document_alignment)
    tokens = make_tokens(ids, segments, image, token_map, config)
    if size("context") > 1:
        ahead = tuple(context.before(a, config.sliding_window) for a in (tokens.layout.positions, tokens.layout.segments))
        tokens = context.part(tokens)
        tokens = replace(tokens, layout=replace(tokens.layout, before=ahead))
    return tokens, back


def table_rows(
    ids: Int[Array, "B T"], segments: Int[Array, "B T"], token_map: Int[Array, " V"], config: ModelConfig, image: Any = None
) -> tuple[Int[Array, "B T C"], ...]:
    """Rows of each Engram table that `features` fetches for a batch, in its order."""
    return _row_tokens(ids, segments, image, token_map, config)[0].engram_rows


def features(
    params: TextParams,
    config: ModelConfig,
    policy: Policy,
    ids: Int[Array, "B T"],
    segments: Int[Array, "B T"] | None,
    token_map: Int[Array, " V"],
    taps: Taps | None = None,
    image: Bool[Array, "B T"] | None = None,
    rows: tuple[Int[Array, "B T C"], ...] | None = None,
    replay: Int[Array, "B T"] | None = None,
) -> Output:
    """`forward` without the head.

    rows: rows to fetch from the tables of ``params`` in place of `table_rows`, where those hold a choice of rows. replay:
    in decoder layers a token at this position of its document or later sees no window key before it; 0 for none. Both
    want rows that start with a document.
    """
    segments = jnp.ones_like(ids) if segments is None else segments
    tokens, back = _row_tokens(ids, segments, image, token_map, config)
    tokens = tokens if rows is None else replace(tokens, engram_rows=rows)
    behind = tokens if replay is None else replace(tokens, layout=replay_layout(tokens.layout, replay))
    streams = embed(params, tokens.ids, config, policy)
    record(taps, "embed_streams", streams)
    residual, shared = mhc.Residual(streams, first_mix(tokens.ids, config)), Shared()
    run, site = _rematerialised(policy)
    outs = []
    for plan, layer in zip(layer_plans(config), params.layers, strict=True):
        seen = behind if plan.half == "decoder" else tokens
        out = run(residual, layer, plan, shared, seen, config, policy, taps, site)
        residual, shared = out.residual, out.carried
        outs.append(out)
    record_draft_input(taps, config)
    streams = mhc.settle(residual, taps)
    kl = [out.index_kl for out, plan in zip(outs, layer_plans(config), strict=True) if plan.selects]
    if policy.index_teacher == "served":
        kl = [*kl[1:], served_kl(shared, tokens.layout)]
    return Output(
        context.turned(final_hidden(params, streams, residual.pre, config, taps), back, config.document_alignment - 1),
        None,
        jnp.stack([out.load for out in outs]),
        jnp.stack([out.balance for out in outs]),
        jnp.stack(kl) if kl else jnp.zeros((0,), jnp.float32),
    )


def _rematerialised(policy: Policy) -> tuple[Any, Any]:
    """The block and its attention site, one of them such that its backward pass computes it again.

    Where weights are stored in parts, the backward pass puts a layer's together again rather than keep every layer's.
    """
    kept = jax.checkpoint_policies
    again = partial(jax.checkpoint, policy=kept.save_only_these_names(SELECTED))
    if policy.remat == "block":
        return again(block, static_argnums=_STATIC), whole_row
    run: Any = block
    if size(*STORED) > 1:
        run = jax.checkpoint(block, policy=kept.save_anything_except_these_names(GATHERED), static_argnums=_STATIC)
    return run, again(whole_row, static_argnums=(2, 5, 6, 7)) if policy.remat == "attention" else whole_row


def forward(
    params: TextParams,
    config: ModelConfig,
    policy: Policy,
    ids: Int[Array, "B T"],
    segments: Int[Array, "B T"] | None,
    token_map: Int[Array, " V"],
    taps: Taps | None = None,
    image: Bool[Array, "B T"] | None = None,
) -> Output:
    """Logits of every position, by the plan's schedule.

    segments: 0 padding, 1.. documents of a packed row (None: one document a row); a row holds its documents at multiples
    of `ModelConfig.document_alignment`, or one document behind any left padding. token_map: Engram's folding map (§11.1).
    taps: a dict to fill with intermediates under their golden names. image: image-span tokens.
    """
    out = features(params, config, policy, ids, segments, token_map, taps, image)
    logits = whole_logits(out.hidden, params.head, config.vocab_size)
    record(taps, "logits", logits)
    return replace(out, logits=logits)
