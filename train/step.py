"""One training step and one scoring step, compiled: forward, backward, optimizer, router biases."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax

from dsv41.config import ModelConfig
from dsv41.model import forward
from dsv41.numerics import Policy
from dsv41.params import TextParams, init_params, text_specs
from train.data import Batch
from train.losses import total_loss, weighted_nll
from train.optim import clip, make_optimizer, update_biases

Metrics = dict[str, jax.Array]
TrainStep = Callable[["TrainState", Batch, jax.Array], tuple["TrainState", Metrics]]
EvalStep = Callable[[TextParams, Batch], tuple[jax.Array, jax.Array]]


@struct.dataclass
class TrainState:
    """All that a resume needs; ``step`` counts batches consumed, int32."""

    params: TextParams
    opt_state: Any
    step: jax.Array


def _optimizer(config: ModelConfig, rate: Any) -> optax.GradientTransformation:
    return make_optimizer(text_specs(config), lambda _: rate)


def init_state(config: ModelConfig, seed: int) -> TrainState:
    """The state before the first step."""
    params = init_params(config, jax.random.key(seed))
    return TrainState(params, _optimizer(config, jnp.float32(0)).init(params), jnp.zeros((), jnp.int32))


def _balance_routers(params: TextParams, load: jax.Array) -> TextParams:
    """Moves each layer's text correction biases by the sign rule on its load; the image biases stay (§9)."""
    layers = tuple(
        layer if layer.ffn.bias is None else replace(layer, ffn=replace(layer.ffn, bias=update_biases(layer.ffn.bias, n)))
        for layer, n in zip(params.layers, load, strict=True)
    )
    return replace(params, layers=layers)


def _floats(gradient: jax.Array) -> jax.Array | None:
    """None in place of the gradients of id tables."""
    return gradient if jnp.issubdtype(gradient.dtype, jnp.floating) else None


def make_train_step(config: ModelConfig, policy: Policy, token_map: Any, accumulate: int = 1) -> TrainStep:
    """``step(state, batch, rate) -> (state, metrics)``, jitted, with ``state`` donated.

    rate: float32 learning rate of this step. accumulate: parts of a batch whose gradients are summed before the one update,
    a divisor of its rows; the cross-entropy is that of the whole batch (sum of nats over sum of weights), balance and
    indexer loss are means over the parts. A step whose loss or gradient is not finite changes nothing but the step number:
    parameters, optimizer state and router biases stay, and ``skipped`` is 1.
    """
    fold = jnp.asarray(token_map, jnp.int32)

    def loss_fn(params: TextParams, batch: Batch, tokens: jax.Array) -> tuple[jax.Array, Any]:
        out = forward(params, config, policy, batch.ids, batch.segments, fold)
        ce = weighted_nll(out.logits, batch.targets, batch.weights)[0] / tokens
        balance, index_kl = out.balance / accumulate, out.index_kl / accumulate
        return total_loss(ce, balance, index_kl), (ce, balance, index_kl, out.load)

    grad = jax.value_and_grad(loss_fn, has_aux=True, allow_int=True)

    def whole(params: TextParams, batch: Batch) -> Any:
        tokens = jnp.maximum(jnp.sum(batch.weights), 1.0)
        if accumulate == 1:
            return grad(params, batch, tokens)
        parts = jax.tree.map(lambda a: a.reshape(accumulate, -1, *a.shape[1:]), batch)
        first, rest = (jax.tree.map(lambda a, cut=cut: a[cut], parts) for cut in (0, slice(1, None)))
        out, grads = grad(params, first, tokens)

        def add(total: Any, part: Batch) -> tuple[Any, None]:
            out, grads = grad(params, part, tokens)
            return jax.tree.map(jnp.add, total, (out, jax.tree.map(_floats, grads))), None

        # A scan, so that the parts share one set of activations. Id tables have gradients that no loop can carry.
        out, sums = lax.scan(add, (out, jax.tree.map(_floats, grads)), rest)[0]
        return out, jax.tree.map(lambda s, g: g if s is None else s, sums, grads, is_leaf=lambda x: x is None)

    def step(state: TrainState, batch: Batch, rate: jax.Array) -> tuple[TrainState, Metrics]:
        (loss, (ce, balance, index_kl, load)), grads = whole(state.params, batch)
        grads, norm = clip(text_specs(config), grads)
        updates, opt_state = _optimizer(config, rate).update(grads, state.opt_state, state.params)
        params = _balance_routers(optax.apply_updates(state.params, updates), load)
        # The clipped norm leaves the indexer's gradients out; a NaN there must stop the step too.
        finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(jax.tree.map(_floats, grads)))
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        metrics = {
            "loss": loss,
            "ce": ce,
            "balance": balance,
            "index_kl": index_kl,
            "grad_norm": norm,
            "lr": rate,
            "max_load": jnp.max(load / jnp.maximum(jnp.mean(load, axis=-1, keepdims=True), 1e-9)),
            "skipped": 1 - finite.astype(jnp.int32),
        }
        return TrainState(params, opt_state, state.step + 1), metrics

    return jax.jit(step, donate_argnums=0)


def make_eval_step(config: ModelConfig, policy: Policy, token_map: Any) -> EvalStep:
    """``step(params, batch) -> (sum of weighted nats, sum of weights)``, jitted."""
    fold = jnp.asarray(token_map, jnp.int32)

    def step(params: TextParams, batch: Batch) -> tuple[jax.Array, jax.Array]:
        out = forward(params, config, policy, batch.ids, batch.segments, fold)
        return weighted_nll(out.logits, batch.targets, batch.weights)

    return jax.jit(step)


__all__ = ["EvalStep", "Metrics", "TrainState", "TrainStep", "init_state", "make_eval_step", "make_train_step"]
