"""One optimizer for all weights: each leaf goes to the family its spec names (training §1.1)."""

from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Num

from dsv41.errors import UserError
from dsv41.params import ParamSpec, map_specs, spec_leaves
from dsv41.sharding import cut_axes, total
from train.optim.muon import WEIGHT_DECAY, muon
from train.optim.sinkhorn import UPDATE_RMS, ActiveRows, Rows, dense, sinkhorn

# Momenta that a family keeps of each number; None: the optimizer leaves the weight alone.
_MOMENTA = {"muon": 1, "sinkhorn": 1, "adamw": 2, "sign": None, "frozen": None}
_COUNT_BYTES = 4
_LEAST_SQUARED = 2e-18  # 0.05 times its square is a normal float32


class OptimizerState(NamedTuple):
    """``steps`` int32[]: steps done, which the learning rate follows; ``families``: name to the state of its rule.

    The momenta are trees of the weights' form with None for weights of other families.
    """

    steps: Array
    families: dict[str, Any]


def adamw(specs: Any) -> optax.GradientTransformation:
    """Bias-corrected Adam, b1 0.9, b2 0.95, eps 1e-20, and decay 0.1 where the spec says so (training §1.3).

    Over a tree of float32 weights of any shape; the update is the direction to subtract, learning rate aside.
    """
    mask = map_specs(lambda spec: spec.decay, specs)
    rule = optax.chain(optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-20), optax.add_decayed_weights(WEIGHT_DECAY, mask=mask))

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        # Squares below float32's range are zero, and over an eps of 1e-20 the step would be up to a hundred times its size.
        gradients = jax.tree.map(lambda g: jnp.where(jnp.abs(g) < _LEAST_SQUARED, jnp.zeros_like(g), g), gradients)
        # Optax raises a float to an integer count.
        with jax.numpy_dtype_promotion("standard"):
            return rule.update(gradients, state, params)

    return optax.GradientTransformation(rule.init, update)


def _check(specs: Any) -> None:
    seen: set[str] = set()
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda x: isinstance(x, ParamSpec)):
        where = spec.key if isinstance(spec, ParamSpec) else jax.tree_util.keystr(path)
        family = getattr(spec, "family", None)
        if family not in _MOMENTA:
            raise UserError(f"optimizer of {where}: found {family!r}, allowed are {', '.join(_MOMENTA)}")
        if where in seen:
            raise UserError(f"optimizer of {where}: found two weights of that name, allowed is one owner for each weight")
        seen.add(where)


def _capacity(spec: ParamSpec, active_rows: int) -> int:
    """Rows of a table whose momentum is kept, 0 for all of them."""
    return active_rows if spec.axes[0] == "table_rows" and active_rows < spec.shape[0] else 0


def _select(specs: Any, family: str, tree: Any) -> Any:
    """``tree`` with None in place of the leaves of other families."""
    return map_specs(lambda spec, leaf: leaf if spec.family == family else None, specs, tree)


def make_optimizer(
    specs: Any, schedule: optax.Schedule, active_rows: int = 0, products: Any = jnp.float32
) -> optax.GradientTransformation:
    """The optimizer of a whole tree of weights, such as `text_specs` describes (training §1.1).

    ``update(gradients, state, params)`` gives updates for `apply_updates`: minus the learning rate, minus the
    spec's factor, times the family's direction; exactly zero, in the weight's dtype, for ``sign`` and ``frozen``
    weights, whose gradients are not looked at and may be anything, None included. The gradient of a table may be `Rows`.
    active_rows: rows of an Engram table whose momentum is kept; its gradient and update are `Rows`. 0 for all rows.
    products: as for `orthogonalize`.

    Raises `UserError` for a leaf without a known family, and for two leaves of one name.
    """
    _check(specs)
    own = {name: _select(specs, name, specs) for name, momenta in _MOMENTA.items() if momenta}
    capacity = map_specs(lambda spec: _capacity(spec, active_rows), own["sinkhorn"])
    rules = {"muon": muon(own["muon"], products), "sinkhorn": sinkhorn(capacity, own["sinkhorn"]), "adamw": adamw(own["adamw"])}

    def init(params: Any) -> OptimizerState:
        states = {name: rule.init(_select(specs, name, params)) for name, rule in rules.items()}
        return OptimizerState(jnp.zeros([], jnp.int32), states)

    def update(gradients: Any, state: OptimizerState, params: Any = None) -> tuple[Any, OptimizerState]:
        directions, states = {}, {}
        for name, rule in rules.items():
            chosen = _select(specs, name, gradients)
            if name != "sinkhorn":
                chosen = map_specs(lambda spec, g: dense(g, spec.shape[0]) if isinstance(g, Rows) else g, specs, chosen)
            direction, states[name] = rule.update(chosen, state.families[name], _select(specs, name, params))
            directions[name] = iter(jax.tree.leaves(direction, is_leaf=lambda x: isinstance(x, Rows)))
        rate = -jnp.asarray(schedule(state.steps), jnp.float32)

        def step(spec: ParamSpec, weight: Array) -> Any:
            if spec.family not in directions:
                return jnp.zeros_like(weight)
            direction = next(directions[spec.family])
            if isinstance(direction, Rows):
                return Rows(direction.ids, rate * spec.lr_scale * direction.values)
            return rate * spec.lr_scale * direction

        return map_specs(step, specs, params), OptimizerState(optax.safe_increment(state.steps), states)

    return optax.GradientTransformation(init, update)


def apply_updates(params: Any, updates: Any) -> Any:
    """`optax.apply_updates`, for updates of some rows too."""

    def one(weight: Array, update: Any) -> Array:
        if isinstance(update, Rows):
            return weight.at[update.ids].add(update.values, mode="drop")
        return weight + update

    return jax.tree.map(one, params, updates)


def optimizer_report(specs: Any, active_rows: int = 0) -> dict[str, dict[str, int]]:
    """Family to ``parameters`` and ``state_bytes`` of its optimizer state, from the specs alone.

    AdamW's bytes include the step counter of its bias correction; the shared step count is under ``schedule``.
    """
    _check(specs)
    report: dict[str, dict[str, int]] = defaultdict(lambda: {"parameters": 0, "state_bytes": 0})
    report["schedule"]["state_bytes"] = _COUNT_BYTES
    report["adamw"]["state_bytes"] = _COUNT_BYTES
    for spec in spec_leaves(specs):
        report[spec.family]["parameters"] += spec.size
        if rows := _capacity(spec, active_rows):
            # Each row's id, and two scalars.
            report[spec.family]["state_bytes"] += 4 * (rows * (spec.shape[1] + 1) + 2)
        else:
            report[spec.family]["state_bytes"] += (_MOMENTA[spec.family] or 0) * spec.size * spec.dtype(0).nbytes
    return dict(report)


def floats(gradients: Any) -> Any:
    """The gradients without those of id tables, and without the ids of rows."""
    return jax.tree.map(lambda g: g if jnp.issubdtype(g.dtype, jnp.floating) else None, gradients)


def _sum(specs: Any, parts: Any) -> Float[Array, ""]:
    """The sum of a number of each weight's part, over all weights and over the devices that hold their other parts."""
    sums: dict[tuple[str, ...], list[Any]] = defaultdict(list)
    map_specs(lambda spec, part: None if part is None else sums[cut_axes(spec)].append(part), specs, parts)
    return jnp.float32(0) + sum(total(sum(found), axes) for axes, found in sums.items())


def clip(specs: Any, gradients: Any, limit: float = 1.0) -> tuple[Any, Float[Array, ""]]:
    """Gradients scaled to a global norm of at most ``limit``, and the norm before that, float32[] (training §3.3).

    Indexer weights have a loss of their own: they neither count nor are scaled. Nor do ``sign`` and ``frozen`` ones,
    whose gradients pass as they are.
    """

    def counts(spec: ParamSpec) -> bool:
        return bool(_MOMENTA[spec.family]) and ".indexer." not in spec.key

    def square(spec: ParamSpec, g: Any) -> Any:
        return jnp.sum(jnp.square(g.values if isinstance(g, Rows) else g)) if counts(spec) else None

    norm = jnp.sqrt(_sum(specs, map_specs(square, specs, gradients)))
    scale = jnp.where(norm > limit, limit / norm, 1.0)

    def scaled(spec: ParamSpec, g: Any) -> Any:
        if not counts(spec):
            return g
        return Rows(g.ids, g.values * scale) if isinstance(g, Rows) else g * scale

    return map_specs(scaled, specs, gradients), norm


def measure(specs: Any, updates: Any, state: OptimizerState, rate: Array) -> dict[str, Array]:
    """What the optimizer did, float32[] each, of the updates before they are applied.

    ``update_rms.FAMILY``: RMS over the rate, of the rows that move in tables that Sinkhorn balances. ``sinkhorn_residual``:
    how far from 1 the furthest column's RMS over those rows is; the rows' own is 1. ``engram_lost``: rows that lost momentum
    for want of capacity, so far, where only some rows have any.
    """
    counts: dict[str, list[Any]] = defaultdict(list)
    residuals = []

    def square(spec: ParamSpec, update: Any) -> Any:
        if not _MOMENTA[spec.family]:
            return None
        values = (update.values if isinstance(update, Rows) else update) / jnp.maximum(rate, 1e-30)
        count: Any = spec.size
        if spec.family == "sinkhorn":
            live = total(jnp.sum(jnp.any(values != 0, axis=1).astype(jnp.float32)), cut_axes(spec))
            count = live * values.shape[1]
            squares = total(jnp.sum(jnp.square(values), axis=0), cut_axes(spec))
            columns = jnp.sqrt(squares / jnp.maximum(live, 1.0)) / (UPDATE_RMS * spec.lr_scale)
            residuals.append(jnp.where(live > 0, jnp.max(jnp.abs(columns - 1.0)), 0.0))
        counts[spec.family].append(count)
        return jnp.sum(jnp.square(values))

    squares = map_specs(square, specs, updates)
    found = {
        f"update_rms.{family}": jnp.sqrt(
            _sum(specs, _select(specs, family, squares)) / jnp.maximum(jnp.float32(sum(counts[family])), 1.0)
        )
        for family in counts
    }
    if residuals:
        found["sinkhorn_residual"] = jnp.max(jnp.stack(residuals))
    momenta = jax.tree.leaves(state.families["sinkhorn"].momentum, is_leaf=lambda x: isinstance(x, ActiveRows))
    lost = [one.lost for one in momenta if isinstance(one, ActiveRows)]
    if lost:
        found["engram_lost"] = sum(lost, start=jnp.int32(0)).astype(jnp.float32)
    return found


def update_biases(bias: Float[Array, " E"], load: Num[Array, " E"], speed: float = 0.001) -> Float[Array, " E"]:
    """Correction biases after a step: up for experts under the mean load, down for those above (training §4.2).

    ``load`` counts the tokens routed to each expert over the whole batch, one layer and modality at a time; none at all
    changes nothing.
    """
    load = load.astype(jnp.float32)
    return bias + speed * jnp.sign(jnp.mean(load) - load)
