"""Training the drafter behind a frozen backbone: anchors, losses, one step, and what it would have accepted (training §4.4)."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from dsv41.attention import Before
from dsv41.config import ModelConfig
from dsv41.dspark import base_logits, confidence_logits, context_rows, markov_logits, run_stages
from dsv41.layout import make_layout
from dsv41.model import Output, features
from dsv41.numerics import Policy
from dsv41.params import DraftParams, TextParams, draft_specs, init_draft
from dsv41.replay import gather
from train.data import Batch
from train.losses import head_logits
from train.optim import apply_updates, clip, make_optimizer, update_biases

CE_WEIGHT, L1_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0


@struct.dataclass
class Blocks:
    """What blocks at A anchors of each of B rows say, G slots each; all in the order of the rows.

    logits float32 ``[N, G, V]``, confidence ``[N, G]`` logits, targets: the backbone's logits ``[N, G, V]``, labels int32
    ``[N, G]``, counts ``[N, G]``: 1 where a slot is supervised, up to the first that is not. load ``[S, E]``.
    """

    logits: jax.Array
    confidence: jax.Array
    targets: jax.Array
    labels: jax.Array
    counts: jax.Array
    load: jax.Array


def draw_anchors(
    key: Array, segments: Int[Array, "B T"], weights: Float[Array, "B T"], count: int
) -> tuple[Int32[Array, "B A"], Bool[Array, "B A"]]:
    """Random places of each row, no place twice, and which of them are anchors.

    An anchor has a token before it in its document, which the drafter's context needs, and a supervised one behind it.
    """
    inside = (make_layout(segments).positions > 0) & (weights > 0)
    order = jnp.where(inside, jax.random.uniform(key, segments.shape, jnp.float32), -1.0)
    drawn, places = lax.top_k(order, min(count, segments.shape[1]))
    return places.astype(jnp.int32), drawn >= 0


def blocks(
    drafter: DraftParams,
    params: TextParams,
    config: ModelConfig,
    policy: Policy,
    batch: Batch,
    out: Output,
    anchors: Int32[Array, "B A"],
    live: Bool[Array, "B A"],
) -> Blocks:
    """Blocks whose Markov head is told the tokens that came, behind a backbone whose `dsv41.model.features` are ``out``.

    A block at a token sees the window of its document before that token, as in inference. Nothing here has a gradient but the
    drafter.
    """
    params, out = lax.stop_gradient((params, out))
    window, slots = config.sliding_window, config.dspark_block_size
    (rows, time), flat = batch.ids.shape, anchors.size
    positions = make_layout(batch.segments).positions
    place = anchors[..., None] + jnp.arange(-window, 0, dtype=jnp.int32)[None, None]
    index, there = jnp.clip(place, 0, time - 1).reshape(rows, -1), (place >= 0).reshape(rows, -1)
    of = lambda a, at: jnp.take_along_axis(a, at, axis=1)  # noqa: E731
    own = of(batch.segments, anchors)
    known = there & (of(batch.segments, index) == jnp.repeat(own, window, axis=1))
    keys = jnp.where(known, of(positions, index), -1).reshape(flat, window)
    kept = context_rows(drafter, config, policy, out.draft_input, positions)
    context = tuple(Before(gather(index, known, row).reshape(flat, window, -1), keys) for row in kept)

    ahead = anchors[..., None] + jnp.arange(slots, dtype=jnp.int32)[None, None]
    at = jnp.minimum(ahead, time - 1).reshape(rows, -1)
    here = (ahead < time).reshape(rows, -1) & (of(batch.segments, at) == jnp.repeat(own, slots, axis=1))
    counts = jnp.where(here, of(batch.weights, at), 0.0).reshape(flat, slots)
    counts = jnp.cumprod((counts > 0).astype(jnp.float32), axis=1) * live.reshape(-1, 1).astype(jnp.float32)
    tokens, labels = (of(a, at).reshape(flat, slots) for a in (batch.ids, batch.targets))

    start = of(positions, anchors).reshape(-1)
    hidden, load = run_stages(drafter, params, config, policy, tokens[:, 0], start, live.reshape(-1), context)
    embedding, more = markov_logits(drafter, config, tokens)
    targets = head_logits(gather(at, here, out.hidden), params.head).reshape(flat, slots, -1)
    logits = base_logits(drafter, params, config, hidden) + more
    return Blocks(logits, confidence_logits(drafter, hidden, embedding), targets, labels, counts, load)


def _shortfall(found: Blocks) -> Float32[Array, "N G"]:
    """The L1 distance of drafter and backbone, slot by slot."""
    mine, theirs = (jax.nn.softmax(a, axis=-1) for a in (found.logits, found.targets))
    return jnp.sum(jnp.abs(mine - theirs), axis=-1)


def draft_loss(found: Blocks) -> tuple[Float32[Array, ""], dict[str, Array]]:
    """0.1 cross-entropy + 0.9 L1 + 1.0 binary cross-entropy of the confidence, earlier slots weighing more (DSpark, eq. 9-12).

    Also what `measure_blocks` says, and the three parts.
    """
    slots = found.logits.shape[1]
    decay = jnp.exp(-jnp.arange(slots, dtype=jnp.float32) / slots)[None] * found.counts
    mean = lambda a: jnp.sum(decay * a) / jnp.maximum(jnp.sum(decay), 1e-9)  # noqa: E731
    chosen = jnp.take_along_axis(found.logits, found.labels[..., None], axis=-1)[..., 0]
    ce, far = jax.nn.logsumexp(found.logits, axis=-1) - chosen, _shortfall(found)
    truth = lax.stop_gradient(1 - far / 2)
    binary = jax.nn.softplus(found.confidence) - truth * found.confidence
    parts = {"ce": mean(ce), "l1": mean(far), "confidence": mean(binary)}
    loss = CE_WEIGHT * parts["ce"] + L1_WEIGHT * parts["l1"] + CONFIDENCE_WEIGHT * parts["confidence"]
    return loss, {**parts, **measure_blocks(lax.stop_gradient(found))}


def acceptance(found: Blocks) -> tuple[Float32[Array, "N G"], Float32[Array, "N G"]]:
    """Of each slot behind the tokens that came: the probability that a draft is accepted, and whether a greedy one is."""
    agree = jnp.argmax(found.logits, axis=-1) == jnp.argmax(found.targets, axis=-1)
    return 1 - _shortfall(found) / 2, agree.astype(jnp.float32)


def measure_blocks(found: Blocks) -> dict[str, Array]:
    """``accept.K`` and ``greedy.K``: means of `acceptance` of slot K, from 1 on; ``accepted`` and ``greedy_accepted``: expected
    tokens of a round, the model's own among them; ``overconfident``: how much the confidence is above acceptance."""
    named: dict[str, Array] = {}
    whole = found.counts[:, -1]
    for name, length, rates in zip(("accept", "greedy"), ("accepted", "greedy_accepted"), acceptance(found), strict=True):
        share = jnp.sum(rates * found.counts, axis=0) / jnp.maximum(jnp.sum(found.counts, axis=0), 1.0)
        named |= {f"{name}.{k + 1}": share[k] for k in range(share.shape[0])}
        tokens = 1 + jnp.sum(jnp.cumprod(rates, axis=1), axis=1)
        named[length] = jnp.sum(tokens * whole) / jnp.maximum(jnp.sum(whole), 1.0)
    gap = (jax.nn.sigmoid(found.confidence) - acceptance(found)[0]) * found.counts
    return {**named, "overconfident": jnp.sum(gap) / jnp.maximum(jnp.sum(found.counts), 1.0)}


@struct.dataclass
class DrafterState:
    """What a step changes; ``step`` int32: batches consumed."""

    draft: DraftParams
    opt_state: Any
    step: jax.Array


def init_drafter(config: ModelConfig, seed: int, draft: DraftParams | None = None) -> DrafterState:
    """The state before the first step, of a new drafter where none is given."""
    rule = make_optimizer(draft_specs(config), lambda _: jnp.float32(0))

    @jax.jit
    def init(key: Array, draft: DraftParams | None) -> DrafterState:
        draft = init_draft(config, key) if draft is None else draft
        return DrafterState(draft, rule.init(draft), jnp.zeros((), jnp.int32))

    return init(jax.random.key(seed), draft)


def make_blocks(config: ModelConfig, policy: Policy, token_map: Any, anchors: int) -> Any:
    """``(drafter, params, batch, key) -> Blocks``: the backbone's features, and blocks at random anchors of them."""
    fold = jnp.asarray(token_map, jnp.int32)

    def run(drafter: DraftParams, params: TextParams, batch: Batch, key: Array) -> Blocks:
        out = features(params, config, policy, batch.ids, batch.segments, fold, None, batch.image)
        places, live = draw_anchors(key, batch.segments, batch.weights, anchors)
        return blocks(drafter, params, config, policy, batch, out, places, live)

    return run


def make_drafter_step(config: ModelConfig, policy: Policy, token_map: Any, anchors: int, seed: int) -> Any:
    """``step(state, params, batch, rate) -> (state, metrics)``, jitted, with ``state`` donated; the backbone stays as it is.

    anchors: of each row, drawn by seed and step. The drafter's weights have the families that their specs name, whose optimizers
    are the backbone's; its routers' biases follow their load. A step that is not finite changes nothing but its number.
    """
    run, specs = make_blocks(config, policy, token_map, anchors), draft_specs(config)

    def loss_fn(draft: DraftParams, params: TextParams, batch: Batch, key: Array) -> tuple[Array, Any]:
        found = run(draft, params, batch, key)
        loss, metrics = draft_loss(found)
        return loss, (metrics, found.load)

    def step(state: DrafterState, params: TextParams, batch: Batch, rate: Array) -> tuple[DrafterState, dict[str, Array]]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        (loss, (metrics, load)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.draft, params, batch, key)
        grads, norm = clip(specs, grads)
        updates, opt_state = make_optimizer(specs, lambda _: rate).update(grads, state.opt_state, state.draft)
        draft = _balanced(apply_updates(state.draft, updates), load)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        draft, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (draft, opt_state), (state.draft, state.opt_state)
        )
        more = {"loss": loss, "grad_norm": norm, "lr": rate, "skipped": 1 - finite.astype(jnp.int32)}
        return DrafterState(draft, opt_state, state.step + 1), {**more, **metrics}

    return jax.jit(step, donate_argnums=0)


def _balanced(draft: DraftParams, load: Float32[Array, "S E"]) -> DraftParams:
    """With each stage's correction biases moved by the sign rule on its load (§9)."""

    def one(stage: Any, counts: Array) -> Any:
        return replace(stage, ffn=replace(stage.ffn, bias=update_biases(stage.ffn.bias, counts)))

    return replace(draft, stages=tuple(one(*pair) for pair in zip(draft.stages, load, strict=True)))
