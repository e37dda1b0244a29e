"""Sinkhorn-balanced updates of embeddings, the head and n-gram tables (training §2.1-2.2)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from dsv41.params import ParamSpec, spec_leaves
from dsv41.sharding import cut_axes, greatest, total

MOMENTUM = 0.95
UPDATE_RMS = 0.18
# Odd, so that the last normalisation is of rows.
_NORMALISATIONS = 11
_LIVE = 1e-3
_EPS = 1e-20


class SinkhornState(NamedTuple):
    """``momentum``: float32, the tree and shapes of the weights; in place of a table's, `ActiveRows` where so chosen."""

    momentum: Any


@struct.dataclass
class Rows:
    """Some rows of a table: ids int32[u], ascending, past the table's end where there is none; values float32[u, n]."""

    ids: jax.Array
    values: jax.Array


@struct.dataclass
class ActiveRows:
    """Momentum of the rows that have most of it, of a table of ``count`` (training §2.5).

    rows: `Rows` of constant capacity. rest float32[]: sum of the norms of the other rows' momentum, which only decays.
    lost int32[]: rows, so far, that were dropped while their update was not yet zero, for want of capacity.
    """

    rows: Rows
    rest: jax.Array
    lost: jax.Array
    count: int = struct.field(pytree_node=False)


def balance(
    x: Float[Array, "m n"], rest: Float[Array, ""] | float = 0.0, count: int | None = None, axes: Sequence[str] = ()
) -> Float[Array, "m n"]:
    """Rows and columns of ``x`` scaled to RMS 1, ending on rows, as ``sqrt(n) diag(r) x diag(c)`` (training §2.2).

    Rows whose norm is at most 1e-3 of the mean norm over all rows, zero rows included, become zero. count: rows of the
    whole table, where ``x`` holds some of them; rest: sum of the norms of the others, which are to become zero. axes: of the
    mesh, over which the rows are cut.
    """
    largest = greatest(jnp.max(jnp.abs(x)), axes)
    largest = jnp.where(largest > 0, largest, 1.0)
    x = x / largest
    norms = jnp.sqrt(jnp.sum(jnp.square(x), axis=1))
    mean = (total(jnp.sum(norms), axes) + rest / largest) / (count or x.shape[0])
    r = jnp.where(norms > _LIVE * mean, 1.0, 0.0)
    c = jnp.ones(x.shape[1], jnp.float32)

    def rescale(scale: Array, r: Array, c: Array, axis: int) -> Array:
        norm = jnp.sum(jnp.square(r[:, None] * x * c[None, :]), axis=axis)
        norm = jnp.sqrt(norm if axis else total(norm, axes))
        # A column of zeros stays zero under any scale, and 1/eps twice in a row is not a float32.
        return jnp.where(norm > 0, scale / (norm + _EPS), 0.0)

    def pair(_: Array, scales: tuple[Array, Array]) -> tuple[Array, Array]:
        r, c = scales
        r = rescale(r, r, c, 1)
        return r, rescale(c, r, c, 0)

    r, c = lax.fori_loop(0, _NORMALISATIONS // 2, pair, (r, c))
    r = rescale(r, r, c, 1)
    return x.shape[1] ** 0.5 * r[:, None] * x * c[None, :]


def dense(rows: Rows, count: int) -> Float[Array, "m n"]:
    """The table of ``count`` rows that holds ``rows`` and else zeros."""
    return jnp.zeros((count, rows.values.shape[1]), rows.values.dtype).at[rows.ids].set(rows.values, mode="drop")


def _spread(rows: Rows, ids: Int[Array, " u"]) -> Float[Array, "u n"]:
    """The values at ``ids``, zeros for those that ``rows`` has not."""
    at = jnp.clip(jnp.searchsorted(rows.ids, ids), 0, rows.ids.shape[0] - 1)
    return jnp.where((rows.ids[at] == ids)[:, None], rows.values[at], 0.0)


def init_active(capacity: int, count: int, width: int) -> ActiveRows:
    """No momentum yet, of a table of ``count`` rows."""
    rows = Rows(jnp.full((capacity,), count, jnp.int32), jnp.zeros((capacity, width), jnp.float32))
    return ActiveRows(rows, jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32), count)


def update_active(state: ActiveRows, gradient: Rows) -> tuple[Rows, ActiveRows]:
    """The update of the rows that have one, and the momentum behind it, at a cost that does not grow with the table.

    What `sinkhorn` does to the whole table, exactly so while no row was dropped for want of capacity (training §2.5).
    """
    capacity, count = state.rows.ids.shape[0], state.count
    size = capacity + gradient.ids.shape[0]
    ids = jnp.unique(jnp.concatenate([state.rows.ids, gradient.ids]), size=size, fill_value=count).astype(jnp.int32)
    # Places without a row all have the id that no row has, and zeros.
    inside = (ids < count)[:, None]
    old, new = (jnp.where(inside, _spread(rows, ids), 0.0) for rows in (state.rows, gradient))
    momentum = MOMENTUM * old + (1 - MOMENTUM) * new
    ahead = MOMENTUM * momentum + (1 - MOMENTUM) * new
    rest = MOMENTUM * state.rest
    direction = UPDATE_RMS * balance(ahead, MOMENTUM * rest, count)
    size_of = lambda x: jnp.sqrt(jnp.sum(jnp.square(x), axis=1))  # noqa: E731
    kept = jnp.sort(lax.top_k(jnp.where(inside[:, 0], size_of(ahead), -1.0), capacity)[1])
    left = jnp.ones((size,), bool).at[kept].set(False)
    rest = rest + jnp.sum(jnp.where(left, size_of(momentum), 0.0))
    lost = state.lost + jnp.sum((left & jnp.any(direction != 0, axis=1)).astype(jnp.int32))
    return Rows(ids, direction), ActiveRows(Rows(ids[kept], momentum[kept]), rest, lost, count)


def sinkhorn(capacity: Any = None, specs: Any = None) -> optax.GradientTransformation:
    """Balanced Nesterov momentum over a tree of tables ``[rows, width]`` float32 (training §2.1).

    The update is the direction to descend, to be multiplied by minus the learning rate: live rows have RMS 0.18. There
    is no decay. A gradient may be `Rows`, the others being zero. capacity: a like tree of numbers, or None for one with
    momentum of every row; else of so many rows, whose gradient and update are `Rows`. specs: a like tree of `ParamSpec`, which
    says how the tables lie on a mesh.
    """

    def init(params: Any) -> SinkhornState:
        if capacity is None:
            return SinkhornState(jax.tree.map(jnp.zeros_like, params))
        return SinkhornState(jax.tree.map(lambda p, n: init_active(n, *p.shape) if n else jnp.zeros_like(p), params, capacity))

    def average(m: Array, g: Any) -> Array:
        if isinstance(g, Rows):
            return (MOMENTUM * m).at[g.ids].add((1 - MOMENTUM) * g.values, mode="drop")
        return MOMENTUM * m + (1 - MOMENTUM) * g

    def one(momentum: Any, gradient: Any, spec: ParamSpec | None) -> tuple[Any, Any]:
        if isinstance(momentum, ActiveRows):
            return update_active(momentum, gradient)
        momentum = average(momentum, gradient)
        count, axes = (spec.shape[0], cut_axes(spec)) if spec else (None, ())
        return UPDATE_RMS * balance(average(momentum, gradient), 0.0, count, axes), momentum

    def update(gradients: Any, state: SinkhornState, params: Any = None) -> tuple[Any, SinkhornState]:
        leaves, form = jax.tree.flatten(state.momentum, is_leaf=lambda x: isinstance(x, ActiveRows))
        described = spec_leaves(specs) if specs is not None else [None] * len(leaves)
        both = [one(*three) for three in zip(leaves, form.flatten_up_to(gradients), described, strict=True)]
        directions, momenta = (form.unflatten(part) for part in zip(*both, strict=True)) if both else (gradients, state.momentum)
        return directions, SinkhornState(momenta)

    return optax.GradientTransformation(init, update)
