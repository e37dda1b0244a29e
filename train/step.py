"""One training step and one scoring step, compiled: forward, backward, optimizer, router biases."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec

from dsv41.config import ModelConfig
from dsv41.model import Output, features, table_rows
from dsv41.numerics import Policy
from dsv41.owners import fetched_rows, returned_rows
from dsv41.params import ParamSpec, Stored, TextParams, init_params, map_specs, text_specs
from dsv41.plan import layer_plans
from dsv41.replay import replayed_features
from dsv41.sharding import AXES, TOKENS, gathered, shardings, size, summed, total
from train.data import Batch
from train.layout import BATCH, state_leaves
from train.losses import Sums, chunked_sums, total_loss
from train.optim import Rows, apply_updates, clip, floats, make_optimizer, measure, update_biases
from train.qat import fake_quantized

Metrics = dict[str, jax.Array]
TrainStep = Callable[["TrainState", Batch, jax.Array], tuple["TrainState", Metrics]]
Gradients = Callable[[TextParams, Batch], tuple[Any, Any]]
Update = Callable[["TrainState", Any, Any, jax.Array], tuple["TrainState", Metrics]]
EvalStep = Callable[[TextParams, Batch], tuple[jax.Array, jax.Array]]


@struct.dataclass
class TrainState:
    """All that a resume needs; ``step`` counts batches consumed, int32."""

    params: TextParams
    opt_state: Any
    step: jax.Array


@dataclass(frozen=True)
class StepOptions:
    """How a step is computed, beside the forward pass's policy.

    accumulate: parts of a batch whose gradients are summed before the one update, a divisor of its rows. weights: stored
    forms that the forward and backward pass see the weights in (`train.qat`). active_rows: rows of an Engram table that have
    momentum, 0 for all. z_weight: of the mean squared log partition. replay: how decoder replay is simulated. index_loss: whether
    the indexers learn; else their loss is not computed.
    """

    accumulate: int = 1
    weights: tuple[Stored, ...] = ()
    active_rows: int = 0
    z_weight: float = 0.0
    replay: Literal["off", "mask", "gather"] = "off"
    index_loss: bool = True


def init_state(config: ModelConfig, seed: int | jax.Array, active_rows: int = 0, specs: Any = None) -> TrainState:
    """The state before the first step. specs: in place of the config's, with other optimizers."""
    params = init_params(config, jax.random.key(seed))
    rule = make_optimizer(specs or text_specs(config), lambda _: jnp.float32(0), active_rows)
    return TrainState(params, rule.init(params), jnp.zeros((), jnp.int32))


def _balance_routers(params: TextParams, load: jax.Array) -> TextParams:
    """Moves each layer's correction biases by the sign rule on its load, of text and of image tokens apart (§9)."""

    def one(layer: Any, load: jax.Array) -> Any:
        if layer.ffn.bias is None:
            return layer
        text, image = (update_biases(bias, n) for bias, n in zip((layer.ffn.bias, layer.ffn.bias_vl), load, strict=True))
        return replace(layer, ffn=replace(layer.ffn, bias=text, bias_vl=image))

    return replace(params, layers=tuple(one(*pair) for pair in zip(params.layers, load, strict=True)))


def _tables(params: TextParams) -> list[Any]:
    return [layer.engram.embed for layer in params.layers if layer.engram is not None]


def _with_tables(params: TextParams, tables: list[Any]) -> TextParams:
    rest = iter(tables)
    layers = (
        layer if layer.engram is None else replace(layer, engram=replace(layer.engram, embed=next(rest)))
        for layer in params.layers
    )
    return replace(params, layers=tuple(layers))


def _touched(rows: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The distinct rows of a batch, ascending, ``count`` behind them; and where among them each of ``rows`` is."""
    ids, inverse = jnp.unique(rows, size=min(rows.size, count), fill_value=count, return_inverse=True)
    return ids.astype(jnp.int32), inverse.reshape(rows.shape).astype(jnp.int32)


def _read_rows(params: TextParams, places: list[Any], rows: tuple[jax.Array, ...]) -> tuple[list[Any], TextParams, tuple]:
    """The distinct rows that each of ``rows`` names, the weights with those in place of the tables, and where each is there."""
    touched = [_touched(r, spec.shape[0]) for r, spec in zip(rows, places, strict=True)]
    ids = [one for one, _ in touched]
    small = [fetched_rows(*three) for three in zip(places, _tables(params), ids, strict=True)]  # pyright: ignore
    return ids, _with_tables(params, small), tuple(inverse for _, inverse in touched)


def make_gradients(
    config: ModelConfig, policy: Policy, token_map: Any, options: StepOptions = StepOptions(), specs: Any = None
) -> Gradients:
    """``gradients(params, batch) -> (losses, gradients)``: the part of a step that the optimizers have no say in.

    losses: what is minimised, and (cross-entropy, balance, indexer losses, load). Otherwise as `make_train_step`.
    """
    fold = jnp.asarray(token_map, jnp.int32)
    specs = specs or text_specs(config)
    parts = options.accumulate

    def run(params: TextParams, batch: Batch, rows: Any) -> tuple[Output, Sums]:
        targets, weights = batch.targets, batch.weights
        if options.replay == "gather":
            out = replayed_features(params, config, policy, batch.ids, batch.segments, fold, batch.replay, batch.chosen, rows)  # pyright: ignore
            inside = batch.chosen < targets.shape[1]
            take = lambda a: jnp.take_along_axis(a, jnp.minimum(batch.chosen, targets.shape[1] - 1), axis=1)  # noqa: E731 # pyright: ignore
            targets, weights = take(targets), jnp.where(inside, take(weights), 0.0)
        else:
            start = batch.replay if options.replay == "mask" else None
            out = features(params, config, policy, batch.ids, batch.segments, fold, None, batch.image, rows, start)
        with jax.named_scope("head"):
            return out, chunked_sums(out.hidden, gathered(params.head, specs.head), targets, weights, vocab=config.vocab_size)

    def loss_fn(params: TextParams, batch: Batch, rows: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        out, sums = run(fake_quantized(params, specs, options.weights), batch, rows)
        ce, z = sums.nats / tokens, sums.squared_log_z / tokens
        balance = jnp.sum(out.balance) / parts
        index_kl = out.index_kl / parts if options.index_loss else jnp.zeros_like(out.index_kl)
        loss = total_loss(ce, balance, jnp.sum(index_kl), z, options.z_weight)
        # Devices along `model` all computed it.
        return loss / size("model"), (ce, balance, index_kl, out.load)

    grad = jax.value_and_grad(loss_fn, has_aux=True, allow_int=True)

    def whole(params: TextParams, batch: Batch) -> Any:
        tokens = jnp.maximum(total(jnp.sum(batch.weights), TOKENS), 1.0)
        tables, places = _tables(params), _tables(specs)
        ids, params, inverse = _read_rows(params, places, table_rows(batch.ids, batch.segments, fold, config, batch.image))
        inputs, meshed = (batch, inverse), size(*AXES) > 1

        def done(out: Any, grads: Any) -> Any:
            values = zip(places, ids, _tables(grads), tables, strict=True)
            grads = _with_tables(grads, [returned_rows(*one) if meshed else Rows(*one[1:3]) for one in values])
            return out, map_specs(_reduced, specs, grads)

        if parts == 1:
            return done(*grad(params, *inputs, tokens))
        split = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), inputs)
        first, rest = (jax.tree.map(lambda a, cut=cut: a[cut], split) for cut in (0, slice(1, None)))
        out, grads = grad(params, *first, tokens)

        def add(total: Any, part: Any) -> tuple[Any, None]:
            out, grads = grad(params, *part, tokens)
            return jax.tree.map(jnp.add, total, (out, floats(grads))), None

        # A scan, so that the parts share one set of activations. Id tables have gradients that no loop can carry.
        out, sums = lax.scan(add, (out, floats(grads)), rest)[0]
        return done(out, jax.tree.map(lambda s, g: g if s is None else s, sums, grads, is_leaf=lambda x: x is None))

    def summed_up(params: TextParams, batch: Batch) -> Any:
        (loss, shares), grads = whole(params, batch)
        return (total(loss, AXES), total(shares, TOKENS)), grads

    return summed_up


def make_update(config: ModelConfig, policy: Policy, options: StepOptions = StepOptions(), specs: Any = None) -> Update:
    """``update(state, losses, gradients, rate) -> (state, metrics)``: the rest of a step, after `make_gradients`."""
    specs = specs or text_specs(config)

    def update(state: TrainState, losses: Any, grads: Any, rate: jax.Array) -> tuple[TrainState, Metrics]:
        loss, (ce, balance, index_kl, load) = losses
        with jax.named_scope("optimizer"):
            grads, norm = clip(specs, grads)
            rule = make_optimizer(specs, lambda _: rate, options.active_rows, policy.compute_dtype)
            updates, opt_state = rule.update(grads, state.opt_state, state.params)
            # The clipped norm leaves the indexer's gradients out; a NaN there must stop the step too.
            finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(floats(grads)))
            finite = total(1 - finite.astype(jnp.int32), AXES) == 0
            is_rows = lambda x: isinstance(x, Rows)  # noqa: E731
            # The rows of a table are stopped before it, so that the step never passes over the whole of it.
            updates = jax.tree.map(
                lambda u: Rows(u.ids, jnp.where(finite, u.values, 0.0)) if is_rows(u) else u, updates, is_leaf=is_rows
            )
            params = _balance_routers(apply_updates(state.params, updates), load)
            keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
            params = jax.tree.map(
                lambda u, new, old: new if is_rows(u) else keep(new, old), updates, params, state.params, is_leaf=is_rows
            )
            opt_state = jax.tree.map(keep, opt_state, state.opt_state)
        share = load[:, 0] / jnp.maximum(jnp.mean(load[:, 0], axis=-1, keepdims=True), 1e-9)
        metrics = {
            "loss": loss,
            "ce": ce,
            "balance": balance,
            "index_kl": jnp.sum(index_kl),
            **{f"index_kl.{plan.layer}": kl for plan, kl in zip(_selecting(config), index_kl, strict=True)},
            "grad_norm": norm,
            "lr": rate,
            "max_load": jnp.max(share),
            "load_cv": jnp.mean(jnp.std(share, axis=-1)),
            **measure(specs, updates, opt_state, rate),
            "skipped": 1 - finite.astype(jnp.int32),
        }
        return TrainState(params, opt_state, state.step + 1), metrics

    return update


def make_train_step(
    config: ModelConfig,
    policy: Policy,
    token_map: Any,
    options: StepOptions = StepOptions(),
    specs: Any = None,
    mesh: Any = None,
) -> TrainStep:
    """``step(state, batch, rate) -> (state, metrics)``, jitted, with ``state`` donated.

    rate: float32 learning rate of this step. The cross-entropy is that of the whole batch (sum of nats over sum of weights)
    in however many parts; balance and indexer loss are means over the parts. Of the Engram tables only the rows that a
    batch reads are differentiated. A step whose loss or gradient is not finite changes nothing but the step number:
    parameters, optimizer state and router biases stay, and ``skipped`` is 1. specs: as for `init_state`. mesh: of which every
    device computes its part; the state is then one of `train.layout.init_on`, the batch one of `train.layout.place_batch`.
    """
    gradients = make_gradients(config, policy, token_map, options, specs)
    update = make_update(config, policy, options, specs)

    def step(state: TrainState, batch: Batch, rate: jax.Array) -> tuple[TrainState, Metrics]:
        return update(state, *gradients(state.params, batch), rate)

    if mesh is None:
        return jax.jit(step, donate_argnums=0)
    states = jax.tree.map(lambda s: s.spec, shardings(state_leaves(init_state, config, specs), mesh))
    ins, outs = (states, BATCH, PartitionSpec()), (states, PartitionSpec())
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False), donate_argnums=0)


def _reduced(spec: ParamSpec, gradient: Any) -> Any:
    """A weight's gradient over all devices; id tables and what the sign rule moves have none."""
    return gradient if spec.family in ("frozen", "sign") or isinstance(gradient, Rows) else summed(spec, gradient)


def _selecting(config: ModelConfig) -> list[Any]:
    return [plan for plan in layer_plans(config) if plan.selects]


def make_eval_step(
    config: ModelConfig, policy: Policy, token_map: Any, weights: tuple[Stored, ...] = (), mesh: Any = None
) -> EvalStep:
    """``step(params, batch) -> (sum of weighted nats, sum of weights)``, jitted. weights: as in `StepOptions`."""
    fold = jnp.asarray(token_map, jnp.int32)

    def step(params: TextParams, batch: Batch) -> tuple[jax.Array, jax.Array]:
        specs = text_specs(config)
        at = None
        if mesh is not None:
            rows = table_rows(batch.ids, batch.segments, fold, config)
            _, params, at = _read_rows(params, _tables(specs), rows)
        out = features(fake_quantized(params, specs, weights), config, policy, batch.ids, batch.segments, fold, rows=at)
        head = gathered(params.head, specs.head)
        sums = chunked_sums(out.hidden, head, batch.targets, batch.weights, vocab=config.vocab_size)
        return total((sums.nats, sums.weight), TOKENS)

    if mesh is None:
        return jax.jit(step)
    ins = (jax.tree.map(lambda s: s.spec, shardings(text_specs(config), mesh)), BATCH)
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=PartitionSpec(), check_vma=False))


__all__ = [
    "EvalStep",
    "Gradients",
    "Metrics",
    "StepOptions",
    "TrainState",
    "TrainStep",
    "Update",
    "init_state",
    "make_eval_step",
    "make_gradients",
    "make_train_step",
    "make_update",
]
