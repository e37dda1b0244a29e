"""Speculative decoding: drafts of the next tokens, verified in one step of the model; what is sampled stays as it was (§12.7).

Sampled rows accept a draft with probability min(1, p/q), p the model's and q the drafter's distribution, both after temperature
and filters, and else draw from what is left of p; greedy rows are the case where both are certain. The draws of a position do
not depend on what was drafted of it before and thrown away.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int, Int32

from dsv41.cache import Cache, commit
from dsv41.config import ModelConfig
from dsv41.dspark import draft, remember
from dsv41.model import run_chunk, unembed
from dsv41.numerics import Policy
from dsv41.params import DraftParams, TextParams
from infer.sampling import SamplingRows, distribution, pick, uniforms

_DRAFT, _ACCEPT = 1, 2  # purposes of a position's draws
_LEAST_MASS = 1e-8  # of p - q: with less of it rounding has eaten what is left


@struct.dataclass
class Ahead:
    """What is drafted behind each row's last token: tokens int32 ``[B, G]``, the distributions that they were drawn by
    ``[B, G, V]``, confidence logits ``[B, G]``."""

    tokens: jax.Array
    probs: jax.Array
    confidence: jax.Array


@struct.dataclass
class Verified:
    """New tokens int32 ``[B, n]``, -1 behind a row's last one, and their log-probabilities, before any temperature or filter;
    accepted int32 ``[B]``: drafts that were; last, left int32 ``[B]``: the last token, not in the cache yet, and how many more
    the row wants, 0 where it has ended."""

    tokens: jax.Array
    logprobs: jax.Array
    accepted: jax.Array
    last: jax.Array
    left: jax.Array


def look_ahead(
    params: TextParams,
    drafter: DraftParams,
    config: ModelConfig,
    policy: Policy,
    cache: Cache,
    token: Int32[Array, " B"],
    live: Bool[Array, " B"],
    rows: SamplingRows,
) -> Ahead:
    """Drafts behind each row's ``token``, which stands behind what the cache holds."""

    def choose(slot: Any, logits: Float32[Array, "B V"]) -> Int32[Array, " B"]:
        return pick(distribution(logits[:, None], rows)[:, 0], cache.length + 1 + slot, rows, _DRAFT)

    found = draft(drafter, params, config, policy, cache, token, live, choose)
    return Ahead(found.tokens, distribution(found.logits, rows), found.confidence)


def judge(
    logits: Float32[Array, "B n V"],
    ahead: Ahead,
    lengths: Int32[Array, " B"],
    position: Int32[Array, " B"],
    rows: SamplingRows,
) -> tuple[Int32[Array, "B n"], Int32[Array, " B"]]:
    """The drafts and behind the accepted ones the model's own token, and how many are accepted of the first ``lengths``.

    logits: of the last token and n - 1 drafts behind it. position: of the first draft.
    """
    count = logits.shape[1] - 1
    drafts, q = ahead.tokens[:, :count], ahead.probs[:, :count]
    p, slots = distribution(logits, rows), jnp.arange(count + 1, dtype=jnp.int32)[None]
    of = lambda probs: jnp.take_along_axis(probs, drafts[..., None], axis=2)[..., 0]  # noqa: E731
    chance = uniforms(rows, position[:, None] + slots[:, :count], _ACCEPT)
    stays = (chance * of(q) < of(p[:, :count])) & (slots[:, :count] < lengths[:, None])
    accepted = jnp.sum(jnp.cumprod(stays.astype(jnp.int32), axis=1), axis=1)
    at = lambda probs, n: jnp.take_along_axis(probs, n[:, None, None], axis=1)[:, 0]  # noqa: E731
    own, refused = at(p, accepted), at(q, jnp.minimum(accepted, count - 1))
    rest = jnp.maximum(own - refused, 0.0)
    rejected = (accepted < lengths) & (jnp.sum(rest, axis=-1) > _LEAST_MASS)
    rest = jnp.where(rejected[:, None], rest, own)
    last = pick(rest, position + accepted, rows)
    tokens = jnp.where(slots == accepted[:, None], last[:, None], jnp.pad(drafts, ((0, 0), (0, 1))))
    return tokens, accepted


def verify(
    params: TextParams,
    drafter: DraftParams,
    config: ModelConfig,
    policy: Policy,
    token_map: Int[Array, " V"],
    cache: Cache,
    token: Int32[Array, " B"],
    ahead: Ahead,
    lengths: Int32[Array, " B"],
    left: Int32[Array, " B"],
    ends: Int32[Array, "B e"],
    rows: SamplingRows,
    width: int,
) -> tuple[Verified, Cache]:
    """A step of the model on each row's last token and the first ``lengths`` of its drafts, up to a token that ends it.

    width: tokens of the step, one more than the most drafts and 2 or more. The cache is to the bit as if what was not accepted
    had never been there, but for entries past its length. Rows with nothing left stay as they are.
    """
    slots = jnp.arange(width, dtype=jnp.int32)[None]
    ids = jnp.concatenate([token[:, None], ahead.tokens[:, : width - 1]], axis=1)
    live = (slots <= lengths[:, None]) & (left > 0)[:, None]
    chunk = run_chunk(params, config, policy, cache, ids, live, token_map, defer=True)
    logits = unembed(params, chunk.streams, chunk.pre, config, None)
    tokens, accepted = judge(logits, ahead, lengths, cache.length + 1, rows)
    ended = jnp.any(tokens[..., None] == ends[:, None], axis=-1) & (slots <= accepted[:, None])
    first = jnp.min(jnp.where(ended, slots, width), axis=1)
    count = jnp.minimum(jnp.minimum(accepted, first) + 1, left)
    after = commit(chunk.cache, count, config)
    after = remember(drafter, config, policy, after, chunk.draft_input, cache.length, count)
    made = slots < count[:, None]
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
    newest = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    done = Verified(
        tokens=jnp.where(made, tokens, -1),
        logprobs=jnp.where(made, logprobs, 0.0),
        accepted=jnp.where(left > 0, accepted, 0),
        last=jnp.where(left > 0, newest, token),
        left=jnp.where(first < count, 0, left - count),
    )
    return done, after
