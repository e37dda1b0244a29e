"""A run's state and batches on a mesh, and the state as checkpoints hold it, which any other mesh can read."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41.config import ModelConfig
from dsv41.errors import UserError
from dsv41.params import ParamSpec, map_specs, text_specs
from dsv41.sharding import ROWS, Sizes, mesh_sizes, padded_shape, partition_spec, placement, row_parts, shardings

BATCH = PartitionSpec(ROWS, "context")


def check_rows(sizes: Sizes, rows: int, accumulate: int) -> None:
    """Raises `UserError` where a batch's rows do not give every device the same number in each part."""
    step = row_parts(sizes) * accumulate
    if rows % step:
        close = max(step, round(rows / step) * step)
        raise UserError(f"batch_size: found {rows}, allowed on this mesh is a multiple of {step} rows; nearest is {close}")


def check_tokens(sizes: Sizes, length: int, align: int, replay: str = "off") -> None:
    """Raises `UserError` where a row's tokens, a multiple of ``align``, cannot be cut over ``context``."""
    parts = sizes["context"]
    if parts > 1 and replay == "gather":
        raise UserError(f"mesh: found 'context={parts}', allowed where decoder replay gathers is 'context=1'")
    if length % parts:
        step = math.lcm(parts, align)
        near = max(1, round(length / step)) * step
        also = f" and of {align}" if parts % align else ""
        raise UserError(f"length: found {length}, allowed is a multiple of the mesh's 'context={parts}'{also}; nearest is {near}")


def state_leaves(init: Callable[..., Any], config: ModelConfig, specs: Any = None) -> Any:
    """A `ParamSpec` for each array of the state that ``init(config, seed)`` makes: a momentum's is its weight's."""
    specs = specs or text_specs(config)
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda x: isinstance(x, ParamSpec))
    known = {jax.tree_util.keystr(path): spec for path, spec in leaves}

    def one(path: Any, leaf: Any) -> ParamSpec:
        ends = (known.get(jax.tree_util.keystr(path[start:])) for start in range(len(path)))
        spec = next((spec for spec in ends if spec is not None and spec.shape == leaf.shape), None)
        stored = "f32" if jnp.issubdtype(leaf.dtype, jnp.floating) else "i64"
        return spec or ParamSpec(leaf.shape, (None,) * leaf.ndim, jax.tree_util.keystr(path), stored, "frozen")

    return jax.tree_util.tree_map_with_path(one, jax.eval_shape(lambda: init(config, 0, 0, specs)))


def _filled(spec: ParamSpec, leaf: Any, sizes: Sizes) -> Any:
    """With the rows of zeros that a table needs on a mesh, which no step changes."""
    more = padded_shape(spec, sizes)[0] - spec.shape[0] if spec.shape else 0
    return jnp.pad(leaf, [(0, more), *[(0, 0)] * (leaf.ndim - 1)]) if more else leaf


def init_on(mesh: Mesh, init: Callable[..., Any], config: ModelConfig, seed: int) -> Any:
    """``init(config, seed)`` with each array made where it lies."""
    leaves = state_leaves(init, config)
    make = lambda: map_specs(lambda spec, a: _filled(spec, a, mesh_sizes(mesh)), leaves, init(config, seed))  # noqa: E731
    return jax.jit(make, out_shardings=shardings(leaves, mesh))()


def place_batch(batch: Any, mesh: Mesh, accumulate: int = 1) -> Any:
    """A batch of whole numpy arrays on a mesh; every process has the same. accumulate: the parts it will be taken in.

    Each part of a device's rows is its share of that part of the batch, so that parts hold the rows they hold on one device.
    """
    shares = row_parts(mesh_sizes(mesh))

    def one(a: np.ndarray) -> jax.Array:
        split = a.reshape(accumulate, shares, -1, *a.shape[1:]).swapaxes(0, 1).reshape(a.shape)
        return jax.make_array_from_callback(a.shape, NamedSharding(mesh, BATCH), lambda at: split[at])

    return jax.tree.map(one, batch)


def _is_padded(spec: ParamSpec, sizes: Sizes) -> bool:
    return padded_shape(spec, sizes) != spec.shape


def _stored_sharding(spec: ParamSpec, mesh: Mesh) -> NamedSharding:
    """Where a weight lies that has no padding: as on the mesh, but a table that needs some there by columns."""
    sizes = mesh_sizes(mesh)
    cut = placement(spec, sizes)
    if _is_padded(spec, sizes):
        parts = math.prod(sizes[axis] for axis in cut[0])
        cut = ((), cut[0] if spec.shape[1] % parts == 0 else ())
    return NamedSharding(mesh, partition_spec(cut))


def _turned(leaf: jax.Array, spec: ParamSpec, mesh: Mesh, stored: bool) -> jax.Array:
    """A table that has padding, from its parts by rows to what is stored, or back; no device ever has the whole of it.

    Where its columns do not divide, which is where it is narrow, what is stored is a copy on each device.
    """
    sizes = mesh_sizes(mesh)
    axes, (rows, _), there = placement(spec, sizes)[0], spec.shape, _stored_sharding(spec, mesh).spec
    by_columns = there[1] is not None

    def store(part: jax.Array) -> jax.Array:
        if by_columns:
            return lax.all_to_all(part, axes, 1, 0, tiled=True)[:rows]
        return lax.all_gather(part, axes, tiled=True)[:rows]

    def restore(part: jax.Array) -> jax.Array:
        part = _filled(spec, part, sizes)
        if by_columns:
            return lax.all_to_all(part, axes, 0, 1, tiled=True)
        count = part.shape[0] // math.prod(sizes[axis] for axis in axes)
        return lax.dynamic_slice_in_dim(part, lax.axis_index(axes) * count, count)

    here = partition_spec(placement(spec, sizes))
    ins, outs = (here, there) if stored else (there, here)
    return jax.jit(jax.shard_map(store if stored else restore, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False))(leaf)


def to_stored(state: Any, leaves: Any, mesh: Mesh) -> Any:
    """A state on a mesh as a checkpoint holds it: without what fills tables up."""
    turn = lambda spec, leaf: _turned(leaf, spec, mesh, True) if _is_padded(spec, mesh_sizes(mesh)) else leaf  # noqa: E731
    return map_specs(turn, leaves, state)


def stored_target(leaves: Any, mesh: Mesh) -> Any:
    """What to restore a checkpoint into, for `from_stored`."""
    return map_specs(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=_stored_sharding(spec, mesh)), leaves)


def from_stored(state: Any, leaves: Any, mesh: Mesh) -> Any:
    """The inverse of `to_stored`, from any mesh's checkpoint."""
    turn = lambda spec, leaf: _turned(leaf, spec, mesh, False) if _is_padded(spec, mesh_sizes(mesh)) else leaf  # noqa: E731
    return map_specs(turn, leaves, state)
