"""DSpark, the drafter: it reads late layers of the backbone and proposes the next tokens all at once (architecture §12).

Stages with windows alone run over a block, the last token and noise behind it. A block sees the stages' own rows of the tokens
before it, made of the backbone's streams, and all of itself. A Markov head then adds to each slot's logits what the token before
it says, and a confidence head how likely the slot is to be accepted.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from dsv41 import mhc
from dsv41.attention import Before, attend, query_latent
from dsv41.block import Tokens, block, embed, first_mix
from dsv41.cache import Cache, put, ring_positions, ring_slots, stored
from dsv41.config import ModelConfig
from dsv41.layout import Layout
from dsv41.numerics import Policy, Taps, linear, record, rms_norm
from dsv41.params import AttentionParams, DraftParams, TextParams, draft_specs, text_specs
from dsv41.plan import LayerPlan, draft_plans, stage_config
from dsv41.quant import WINDOW_KV, Format, row_values
from dsv41.sharding import gathered
from dsv41.site import Former, quantized, read, window_rows
from dsv41.vocabulary import embedded, whole_logits

# (slot, its logits [B, V]) -> the slot's tokens [B]
Choose = Callable[[Any, jax.Array], jax.Array]


@struct.dataclass
class Drafted:
    """tokens int32 ``[B, G]``; logits ``[B, G, V]`` that each was chosen from; confidence ``[B, G]``, logits of the probability
    that a draft is accepted where those before it are."""

    tokens: jax.Array
    logits: jax.Array
    confidence: jax.Array


def _as_they_are(x: Any, fmt: Format, on: bool) -> Any:
    return x


def context_rows(
    params: DraftParams,
    config: ModelConfig,
    policy: Policy,
    inputs: Float[Array, "B T M"],
    positions: Int[Array, "B T"],
    taps: Taps | None = None,
    form: Former = quantized,
) -> tuple[Float[Array, "B T K"], ...]:
    """Each stage's rows of committed tokens (§12.2, §12.3). inputs: `dsv41.model.draft_input`; positions: in their documents."""
    specs = draft_specs(config)
    assert specs is not None
    main = linear(inputs, gathered(params.main_proj, specs.main_proj))
    main = rms_norm(main, params.main_norm, config.rms_norm_eps)
    record(taps, "mtp.main_x", main)
    nothing = jnp.zeros_like(positions)
    layout = Layout(nothing, nothing, positions, nothing > 0, nothing > 0)
    stages = zip(draft_plans(config), params.stages, specs.stages, strict=True)
    return tuple(
        window_rows(main, gathered(stage.attn, spec.attn), plan, layout, config, policy, taps, form)
        for plan, stage, spec in stages
    )


def remember(
    params: DraftParams,
    config: ModelConfig,
    policy: Policy,
    cache: Cache,
    inputs: Float[Array, "B T M"],
    length: Int[Array, " B"],
    count: Int[Array, " B"],
    taps: Taps | None = None,
) -> Cache:
    """The cache with the stages' rows of a chunk's first ``count`` tokens, at positions from ``length`` on."""
    time = inputs.shape[1]
    positions = length[:, None] + jnp.arange(time, dtype=jnp.int32)[None]
    rows = context_rows(params, config, policy, inputs, positions, taps, _as_they_are)
    slots = ring_slots(length, count, time, config.sliding_window)
    fresh = (stored(row, WINDOW_KV, policy.quantize_window) for row in rows)
    return replace(cache, drafts=tuple(put(ring, row, slots) for ring, row in zip(cache.drafts, fresh, strict=True)))


def remembered(cache: Cache, config: ModelConfig, dtype: Any) -> tuple[Before, ...]:
    """What `stages` sees of the tokens that a cache holds."""
    positions = ring_positions(cache.length, config.sliding_window)
    return tuple(Before(row_values(ring, WINDOW_KV, dtype), positions) for ring in cache.drafts)


def _block_site(
    x: Float[Array, "B G D"],
    params: AttentionParams,
    plan: LayerPlan,
    context: tuple[Before, ...],
    layout: Layout,
    config: ModelConfig,
    policy: Policy,
    taps: Taps | None,
) -> tuple[Float[Array, "B G D"], tuple[Before, ...], Float32[Array, ""]]:
    """The attention site of a stage: every slot sees the window before the block, and the whole block (§12.4)."""
    rows = window_rows(x, params, plan, layout, config, policy, taps)
    # As if all stood where the last one does, with a window that reaches as far back as the first one's.
    whole = replace(layout, positions=jnp.broadcast_to(layout.positions[:, -1:], layout.positions.shape))
    width = config.sliding_window + x.shape[1]
    core = lambda q: attend(q, rows, None, None, params.sink, whole, width, context[plan.layer])  # noqa: E731
    y, _ = read(query_latent(x, params, config), core, params, plan, layout, config, taps)
    return y, context, jnp.zeros((), jnp.float32)


def run_stages(
    params: DraftParams,
    text: TextParams,
    config: ModelConfig,
    policy: Policy,
    token: Int[Array, " B"],
    position: Int[Array, " B"],
    live: Bool[Array, " B"],
    context: tuple[Before, ...],
    taps: Taps | None = None,
) -> tuple[Float[Array, "B G D"], Float32[Array, "S E"]]:
    """The collapsed streams behind the last stage, before the final norm, and each stage's tokens an expert (§12.4).

    token: each row's last one, which will stand at ``position`` and of which ``context`` knows nothing; a block of it and of
    noise runs. context: each stage's rows of the W tokens before it.
    """
    slots = config.dspark_block_size
    ids = jnp.full((token.shape[0], slots), config.dspark_noise_token_id, jnp.int32).at[:, 0].set(token)
    positions = position[:, None] + jnp.arange(slots, dtype=jnp.int32)[None]
    alive = jnp.broadcast_to(live[:, None], ids.shape)
    layout = Layout(alive.astype(jnp.int32), jnp.zeros_like(ids), positions, alive, jnp.zeros_like(alive))
    residual = mhc.Residual(embed(text, ids, config, policy), first_mix(ids, config))
    own, tokens, loads = stage_config(config), Tokens(ids, layout, ()), []
    for plan, stage in zip(draft_plans(config), params.stages, strict=True):
        out = block(residual, stage, plan, context, tokens, own, policy, taps, _block_site)
        residual = out.residual
        loads.append(out.load[0])
    hidden = mhc.collapse(residual.pre, mhc.settle(residual, taps))
    record(taps, "draft.head_hidden", hidden)
    return hidden, jnp.stack(loads)


def base_logits(
    params: DraftParams, text: TextParams, config: ModelConfig, hidden: Float[Array, "B G D"]
) -> Float32[Array, "B G V"]:
    """float32 logits of the slots by the text model's head, before the Markov head (§12.4)."""
    head = gathered(text.head, text_specs(config).head)
    return whole_logits(rms_norm(hidden, params.norm, config.rms_norm_eps), head, config.vocab_size)


def markov_logits(params: DraftParams, config: ModelConfig, token: Int[Array, "*s"]) -> tuple[Array, Float32[Array, "*s V"]]:
    """The Markov embedding of the tokens before the slots, and what it adds to the slots' logits (§12.5)."""
    embedding = embedded(params.markov_embed, token)
    return embedding, whole_logits(embedding, params.markov_head, config.vocab_size)


def confidence_logits(params: DraftParams, hidden: Float[Array, "*s D"], embedding: Float[Array, "*s R"]) -> Float32[Array, "*s"]:
    """Of slots with these streams behind tokens of that embedding (§12.6)."""
    both = jnp.concatenate([hidden.astype(jnp.float32), embedding.astype(jnp.float32)], axis=-1)
    return linear(both, params.confidence, jnp.float32)[..., 0]


def choose_tokens(
    params: DraftParams,
    text: TextParams,
    config: ModelConfig,
    token: Int[Array, " B"],
    hidden: Float[Array, "B G D"],
    choose: Choose,
) -> Drafted:
    """Drafts from left to right, each by its slot and the token before it."""

    def slot(before: jax.Array, at: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array, Array]]:
        number, base, state = at
        embedding, more = markov_logits(params, config, before)
        logits = base + more
        chosen = choose(number, logits)
        return chosen, (chosen, logits, confidence_logits(params, state, embedding))

    base, states = base_logits(params, text, config, hidden), jnp.moveaxis(hidden, 1, 0)
    numbers = jnp.arange(hidden.shape[1], dtype=jnp.int32)
    found = lax.scan(slot, token, (numbers, jnp.moveaxis(base, 1, 0), states))[1]
    return Drafted(*(jnp.moveaxis(a, 0, 1) for a in found))


def greedy(_: Any, logits: Float32[Array, "B V"]) -> Int32[Array, " B"]:
    """The likeliest token of each row."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def draft(
    params: DraftParams,
    text: TextParams,
    config: ModelConfig,
    policy: Policy,
    cache: Cache,
    token: Int[Array, " B"],
    live: Bool[Array, " B"],
    choose: Choose = greedy,
    taps: Taps | None = None,
) -> Drafted:
    """Drafts of what follows each row's ``token``, which stands behind the tokens that the cache holds and is not in it yet."""
    context = remembered(cache, config, policy.compute_dtype)
    hidden, _ = run_stages(params, text, config, policy, token, cache.length, live, context, taps)
    return choose_tokens(params, text, config, token, hidden, choose)
