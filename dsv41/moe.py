"""Mixture of experts: sqrt-softplus routing with a correction bias, grouped expert products, shared expert (architecture §9)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from dsv41.config import ModelConfig
from dsv41.exchange import exchange
from dsv41.numerics import Taps, linear, record, swiglu
from dsv41.params import ExpertParams, MoEParams
from dsv41.sharding import ROWS, index, size, total
from kernels_pallas import registry
from kernels_pallas.grouped_matmul.api import grouped_matmul, grouped_swiglu
from kernels_pallas.grouped_matmul.reference import values

_COUNTED = 256  # so few items find their places by comparing all: two kernels on a GPU where sorting and scattering take more


@struct.dataclass
class Routing:
    """ids, weights ``[N, k]`` in router order (descending biased score); scores ``[N, E]``, unbiased."""

    ids: jax.Array
    weights: jax.Array
    scores: jax.Array


def route(
    x: Float[Array, "N D"], params: MoEParams, config: ModelConfig, image: Bool[Array, " N"], ids: Int[Array, " N"]
) -> Routing:
    """Top-k of score + bias, weights from the unbiased scores; equal scores take the lowest expert (§9).

    Text tokens use ``bias``, image-span tokens ``bias_vl``; a hash layer takes its experts from ``tid2eid[ids]``.
    """
    logits = linear(x, params.gate, jnp.float32) / jnp.float32(config.gate_temp)
    scores = jnp.sqrt(jax.nn.softplus(logits))
    k = config.num_experts_per_tok
    if params.tid2eid is not None:
        chosen = params.tid2eid[jnp.clip(ids, 0, config.vocab_size - 1)]
    else:
        assert params.bias is not None and params.bias_vl is not None
        bias = jnp.where(image[:, None], params.bias_vl[None], params.bias[None])
        chosen = lax.top_k(lax.stop_gradient(scores + bias), k)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if config.norm_topk_prob and k > 1:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return Routing(chosen, weights * config.routed_scaling_factor, scores)


def _swiglu_expert(x: Array, w: ExpertParams, limit: float) -> Array:
    hidden = swiglu(linear(x, w.w1), linear(x, w.w3), limit)
    return linear(hidden.astype(x.dtype), w.w2)


def by_expert(expert: Int[Array, " n"]) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    """Items by expert, equal ones as they come: which item is at each place, and at which place each item is."""
    items = jnp.arange(expert.size, dtype=jnp.int32)
    if expert.size > _COUNTED:
        order = jnp.argsort(expert, stable=True).astype(jnp.int32)
        return order, jnp.zeros_like(items).at[order].set(items, unique_indices=True)
    before = (expert[None] < expert[:, None]) | ((expert[None] == expert[:, None]) & (items[None] < items[:, None]))
    place = jnp.sum(before.astype(jnp.int32), axis=1)
    return jnp.sum(jnp.where(place[None] == items[:, None], items[None], 0), axis=1), place


@jax.custom_vjp
def _spread(x: Array, order: Array, place: Array) -> Array:
    """Each row of ``x`` once for each of its items, in ``order``; ``place`` is where an item went.

    Its gradient and that of `_gathered` are each other's, written out: sums over an item's known places in float32 and in a
    known order, where XLA's own would add rows into shared memory as they come.
    """
    return x[order // (order.size // x.shape[0])]


def _spread_forward(x: Array, order: Array, place: Array) -> tuple[Array, Any]:
    return _spread(x, order, place), (order, place, x.shape[0])


def _spread_backward(kept: Any, g: Array) -> tuple:
    order, place, count = kept
    return _gathered(g, order, place, count).astype(g.dtype), None, None


_spread.defvjp(_spread_forward, _spread_backward)


def _gathered_primal(rows: Array, order: Array, place: Array, count: int) -> Array:
    """Sums in float32 of the rows of each of ``count`` tokens' items."""
    return jnp.sum(rows[place].astype(jnp.float32).reshape(count, -1, *rows.shape[1:]), axis=1)


_gathered: Any = jax.custom_vjp(_gathered_primal, nondiff_argnums=(3,))


def _gathered_forward(rows: Array, order: Array, place: Array, count: int) -> tuple[Array, Any]:
    return _gathered_primal(rows, order, place, count), (order, place, jnp.zeros((), rows.dtype))


def _gathered_backward(count: int, kept: Any, g: Array) -> tuple:
    order, place, like = kept
    return _spread(g.astype(like.dtype), order, place), None, None


_gathered.defvjp(_gathered_forward, _gathered_backward)


def grouped(expert: Int[Array, " i"], experts: int) -> tuple[Int[Array, " i"], Int[Array, " i"], Int[Array, " E"]]:
    """`by_expert`, items of no expert last; and how many each expert has."""
    sizes = jnp.sum((expert[:, None] == jnp.arange(experts, dtype=expert.dtype)[None]).astype(jnp.int32), axis=0)
    return *by_expert(expert), sizes


def grouped_experts(
    x: Float[Array, "N D"],
    ids: Int[Array, "N k"],
    weights: Float32[Array, "N k"],
    live: Bool[Array, "N #k"],
    params: ExpertParams,
    limit: float,
) -> Float32[Array, "N D"]:
    """Sum over each token's experts in float32; no token is dropped, a pair of token and expert that is not live adds nothing.

    Tokens are sorted by expert for `kernels_pallas.grouped_matmul`. Without a kernel for it, fewer token-expert pairs than
    experts need no sorting.
    """
    experts, items = params.w1.shape[0], ids.size
    rows, scale = jax.ShapeDtypeStruct((items, x.shape[1]), x.dtype), jax.ShapeDtypeStruct((items,), weights.dtype)
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)
    into = registry.choose("grouped_matmul", "auto", rows, (params.w1, params.w3), sizes, scale, limit=limit)
    if items <= experts and into.impl == "reference":
        precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        # A few tokens: each fetches its experts' weights.
        w = ExpertParams(*(values(p, x.dtype)[ids] for p in (params.w1, params.w3, params.w2)))
        one = lambda equation, a, b: jnp.einsum(equation, a, b, precision=precision)  # noqa: E731
        hidden = swiglu(one("ni,nkoi->nko", x, w.w1), one("ni,nkoi->nko", x, w.w3), limit) * weights[..., None]
        out = one("nko,nkdo->nkd", hidden.astype(x.dtype), w.w2).astype(jnp.float32)
        return jnp.sum(jnp.where(live[..., None], out, 0.0), axis=1)
    expert = jnp.where(live, ids, experts).reshape(-1)
    order, place, sizes = grouped(expert, experts)
    scale = _spread(weights.reshape(-1), order, place)
    hidden = grouped_swiglu(_spread(x, order, place), params.w1, params.w3, sizes, scale, limit=limit)
    return _gathered(grouped_matmul(hidden, params.w2, sizes), order, place, ids.shape[0])


def dispatched_experts(
    x: Float[Array, "N D"],
    ids: Int[Array, "N k"],
    weights: Float32[Array, "N k"],
    live: Bool[Array, "N #k"],
    params: ExpertParams,
    limit: float,
) -> Float32[Array, "N D"]:
    """`grouped_experts` where each device of the mesh axes `expert` and `model` holds an equal part of the experts.

    params: this device's experts. Each row goes to the device along `expert` that holds its expert, and its product comes
    back to the row's place, so that a token's products are summed in the router's order. Buffers have room for the worst
    case: no row is dropped, whatever the router does. Along `model`, where every device has the same tokens, the result is
    this device's share of a sum (`dsv41.sharding.total`).
    """
    shards, held, (count, k) = size("expert"), params.w1.shape[0], ids.shape
    own = ids - jnp.int32(index("model") * shards * held)
    live = live & (own >= 0) & (own < shards * held)
    if shards == 1:
        return grouped_experts(x, jnp.where(live, own, 0), weights, live, params, limit)
    order, place, sizes = grouped(jnp.where(live, own, shards * held).reshape(-1), shards * held)
    # Rows from each device to each device for each expert that it holds.
    sizes: Any = lax.all_gather(sizes.reshape(shards, held), "expert")
    pairs, most = jnp.sum(sizes, axis=-1), count * min(k, held)

    def send(rows: Array) -> Any:
        return exchange(rows, pairs, most, shards * most)

    rows, scale = send(_spread(x, order, place)), send(_spread(weights.reshape(-1), order, place))
    ends = jnp.cumsum(sizes[:, index("expert")].reshape(-1))
    number = jnp.arange(shards * most, dtype=jnp.int32)
    expert = (jnp.searchsorted(ends, number, side="right") % held).astype(jnp.int32)
    out = grouped_experts(rows, expert[:, None], scale[:, None], (number < ends[-1])[:, None], params, limit)
    return _gathered(exchange(out.astype(x.dtype), pairs.T, most, count * k), order, place, count)


def expert_load(ids: Int[Array, "N k"], counted: Bool[Array, " N"], experts: int) -> Float32[Array, " E"]:
    """Routed tokens of each expert among the counted ones."""
    hits = (ids[..., None] == jnp.arange(experts, dtype=ids.dtype)[None, None]) & counted[:, None, None]
    return jnp.sum(hits.astype(jnp.float32), axis=(0, 1))


def sequence_balance(scores: Float32[Array, "B T E"], ids: Int[Array, "B T k"], live: Bool[Array, "B T"]) -> Float32[Array, ""]:
    """Sequence-wise balance loss, mean over rows with live tokens: ``sum_i f_i P_i`` (training §4.2).

    On a mesh this device's share of it: P is linear in the tokens, and f and the count are the whole row's.
    """
    experts, k = scores.shape[-1], ids.shape[-1]
    count = total(jnp.sum(live.astype(jnp.float32), axis=1), "context")
    hits = (ids[..., None] == jnp.arange(experts, dtype=ids.dtype)[None, None, None]) & live[:, :, None, None]
    f = total(jnp.sum(hits.astype(jnp.float32), axis=(1, 2)), "context") * experts / (k * jnp.maximum(count, 1.0))[:, None]
    share = scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), 1e-20)
    p = jnp.sum(jnp.where(live[..., None], share, 0.0), axis=1) / jnp.maximum(count, 1.0)[:, None]
    rows = total(jnp.sum((count > 0).astype(jnp.float32)), ROWS)
    return jnp.sum(lax.stop_gradient(f) * p) / jnp.maximum(rows, 1.0)


def moe(
    x: Float[Array, "B T D"],
    params: MoEParams,
    config: ModelConfig,
    token_ids: Int[Array, "B T"],
    live: Bool[Array, "B T"],
    image: Bool[Array, "B T"],
    taps: Taps | None,
    name: str,
) -> tuple[Float[Array, "B T D"], Float32[Array, "2 E"], Float32[Array, ""]]:
    """Output, expert load of live text tokens and of image tokens, and the layer's sequence balance loss."""
    batch, time, d = x.shape
    flat, alive = x.reshape(-1, d), live.reshape(-1)
    routing = route(flat, params, config, image.reshape(-1), token_ids.reshape(-1))
    k = config.num_experts_per_tok
    record(taps, f"{name}.expert_ids", routing.ids.reshape(batch, time, k))
    record(taps, f"{name}.expert_weights", routing.weights.reshape(batch, time, k))
    run = dispatched_experts if size("expert", "model") > 1 else grouped_experts
    routed = run(flat, routing.ids, routing.weights, alive[:, None], params.experts, config.swiglu_limit)
    # Of the dispatched rows nothing is needed here, so that this product can hide their way.
    shared = _swiglu_expert(flat, params.shared, config.swiglu_limit)
    out = total(routed + shared.astype(jnp.float32), "model").astype(x.dtype).reshape(batch, time, d)
    kinds = (alive & ~image.reshape(-1), alive & image.reshape(-1))
    load = jnp.stack([expert_load(routing.ids, kind, config.n_routed_experts) for kind in kinds])
    scores = routing.scores.reshape(batch, time, -1)
    return out, load, sequence_balance(scores, routing.ids.reshape(batch, time, k), live)
