"""Meshes, and where each weight stands on one: a weight's logical axes to mesh axes, by one table.

A training step is one `jax.shard_map` over the whole mesh. Inside it every array is a device's own part, and model code asks
`size`, `index` and `total`, which are 1, 0 and the identity without a mesh: one code for one device and for many.

Gradients: a device differentiates its own share of the loss, which is the sum of the shares over all devices. A cotangent is
then one device's share too, and JAX's transposes of the collectives (psum's is psum, all_gather's a scattered sum) are right.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dsv41.config import ModelConfig
from dsv41.errors import UserError, nearest
from dsv41.params import ParamSpec, map_specs, spec_leaves

AXES: tuple[str, ...] = ("data", "fsdp", "expert", "context", "model")
# Over which a batch's rows are cut; over which its tokens are. What is left, `model`, has every token.
ROWS = ("data", "fsdp", "expert")
TOKENS = (*ROWS, "context")
# Over which weights are cut beside the axes that compute in parts, and put together before use.
STORED = ("fsdp", "expert")
GATHERED = "gathered"
MOST = 2**20  # devices
_COUNT = re.compile(r"0*[1-9][0-9]{0,6}")
# The release's FP8 tiles and FP4 groups: weights stored in them are cut between them, so that a part can be quantised alone.
_TILE = 32

Sizes = dict[str, int]
Cut = tuple[tuple[str, ...], ...]

# Logical axis to the mesh axes over which it stays cut while it is computed with.
COMPUTED: dict[str | None, tuple[str, ...]] = {
    "experts": ("model", "expert"),
    "heads": ("model",),
    "vocab": ("model",),
    "expert_mlp": ("model",),
    "table_rows": ("model", "context", "expert", "fsdp"),
}
# Logical axes whose leaves are cut by them alone: their optimizer works row by row.
_ROWS_ALONE = (("vocab",), ("table_rows",))


def parse_mesh(text: str) -> Sizes:
    """``"data=2,expert=4"`` as the size of every axis, 1 for those not named; raises `UserError` for another form."""
    sizes = dict.fromkeys(AXES, 1)
    seen = set()
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if name not in AXES:
            raise UserError(f"mesh: found axis {name!r}, allowed are {', '.join(AXES)}{nearest(name.lower(), AXES)}")
        if not (equals and _COUNT.fullmatch(value)) or name in seen:
            raise UserError(f"mesh: found {part.strip()!r}, allowed is each axis once, as 'data=2,expert=4'")
        seen.add(name)
        sizes[name] = int(value)
    if math.prod(sizes.values()) > MOST:
        raise UserError(f"mesh: found {text!r}, allowed are meshes of at most {MOST:,} devices")
    return sizes


def spell(sizes: Sizes) -> str:
    """What `parse_mesh` reads."""
    return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "data=1"


def check_mesh(config: ModelConfig, sizes: Sizes) -> None:
    """Raises `UserError` where a part of the model that is computed in parts cannot be cut so."""
    model, both = sizes["model"], sizes["model"] * sizes["expert"]
    for what, count, size, axes in (
        ("routed experts", config.n_routed_experts, both, "expert times model"),
        ("query heads", config.num_attention_heads, model, "model"),
        ("groups of the output projection", config.o_groups, model, "model"),
        ("channels of the shared expert", config.moe_intermediate_size, model, "model"),
    ):
        if count % size:
            close = max(n for n in range(1, size) if count % n == 0)
            raise UserError(f"mesh: found {axes} of {size}, allowed are divisors of the {count} {what}; nearest is {close}")


def make_mesh(sizes: Sizes) -> Mesh:
    """The mesh over this run's devices, in their order; raises `UserError` where there are too few, or other processes' idle."""
    wanted, found = math.prod(sizes.values()), jax.device_count()
    if wanted > found or (jax.process_count() > 1 and wanted != found):
        allowed = f"allowed {'are all' if jax.process_count() > 1 else 'are at most'} the {found} here"
        flag = "XLA_FLAGS=--xla_force_host_platform_device_count=8"
        more = f"; on a CPU, {flag} makes it 8" if jax.default_backend() == "cpu" else ""
        raise UserError(f"mesh: found {spell(sizes)!r} for {wanted} devices, {allowed}{more}")
    devices = np.array(jax.devices()[:wanted]).reshape([sizes[name] for name in AXES])
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def abstract_mesh(sizes: Sizes) -> AbstractMesh:
    """The mesh without devices, for tracing and lowering."""
    return AbstractMesh(tuple(sizes[name] for name in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_sizes(mesh: Any) -> Sizes:
    """Of a mesh, concrete or not."""
    return dict(mesh.shape)


def row_parts(sizes: Sizes) -> int:
    """Parts that a batch's rows are cut into."""
    return sizes["data"] * sizes["fsdp"] * sizes["expert"]


def _piece(shape: Sequence[int], cut: Sequence[Sequence[str]], sizes: Sizes, dim: int) -> int:
    return shape[dim] // math.prod(sizes[axis] for axis in cut[dim])


def _tile(spec: ParamSpec, dim: int) -> int:
    back = len(spec.shape) - dim  # 1 for the last dimension
    return _TILE if back <= {"fp8": 2, "fp4": 1}.get(spec.stored, 0) else 1


def _unit(spec: ParamSpec, dim: int) -> int:
    """What a stored cut of a dimension leaves whole: a head's rows, a tile."""
    block = spec.shape[dim] // spec.blocks if spec.blocks > 1 and dim == len(spec.shape) - 2 else 1
    return math.lcm(block, _tile(spec, dim))


def computed_cut(spec: ParamSpec, sizes: Sizes) -> list[list[str]]:
    """The mesh axes, dimension by dimension, that a weight stays cut over while it is computed with."""
    cut: list[list[str]] = [[] for _ in spec.shape]
    taken: set[str] = set()
    for dim, name in enumerate(spec.axes):
        for axis in COMPUTED.get(name, ()):
            if sizes.get(axis, 1) > 1 and axis not in taken:
                cut[dim].append(axis)
                taken.add(axis)
    return cut


def placement(spec: ParamSpec, sizes: Sizes, stored: Sequence[str] = STORED) -> Cut:
    """The mesh axes that each dimension of a weight is cut over.

    First those of `COMPUTED`. Then each axis of ``stored`` that is left cuts the first dimension that it divides into whole
    heads, tiles and equal parts; where there is none, and of vectors, every device along it has a copy.
    """
    cut = computed_cut(spec, sizes)
    taken = {axis for axes in cut for axis in axes}
    dims = (0,) if spec.axes[:1] in _ROWS_ALONE else range(len(spec.shape)) if len(spec.shape) > 1 else ()
    for axis in stored:
        if sizes.get(axis, 1) == 1 or axis in taken:
            continue
        for dim in dims:
            parts = math.prod(sizes[name] for name in (*cut[dim], axis))
            if spec.shape[dim] % (parts * _unit(spec, dim)) == 0:
                cut[dim].append(axis)
                break
    return tuple(map(tuple, cut))


def torn(spec: ParamSpec, sizes: Sizes) -> bool:
    """Whether an axis that computes in parts cuts a weight through the tiles or groups that it is stored in."""
    cut = computed_cut(spec, sizes)
    return any(_piece(spec.shape, cut, sizes, dim) % _tile(spec, dim) for dim, axes in enumerate(cut) if axes)


def partition_spec(cut: Cut) -> PartitionSpec:
    """``cut`` as JAX says it."""
    return PartitionSpec(*(axes or None for axes in cut))


def shard_shape(spec: ParamSpec, sizes: Sizes, cut: Cut) -> tuple[int, ...]:
    """The shape of one device's part; a table's last rows may be padding."""
    return tuple(-(-n // math.prod(sizes[axis] for axis in axes)) for n, axes in zip(spec.shape, cut, strict=True))


def padded_shape(spec: ParamSpec, sizes: Sizes, stored: Sequence[str] = STORED) -> tuple[int, ...]:
    """A weight's shape on a mesh: a table's rows go up to a multiple of its parts."""
    cut = placement(spec, sizes, stored)
    parts = (math.prod(sizes[axis] for axis in axes) for axes in cut)
    return tuple(n * m for n, m in zip(shard_shape(spec, sizes, cut), parts, strict=True))


def shardings(specs: Any, mesh: Any, stored: Sequence[str] = STORED) -> Any:
    """A `NamedSharding` for each weight of a tree of `ParamSpec`."""
    sizes = mesh_sizes(mesh)
    return map_specs(lambda spec: NamedSharding(mesh, partition_spec(placement(spec, sizes, stored))), specs)


def _ambient() -> Sizes:
    """The axes that the code at hand runs in parts of, by size."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis in mesh.manual_axes}


def _live(axes: str | Sequence[str]) -> tuple[str, ...]:
    sizes = _ambient()
    return tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes) if sizes.get(axis, 1) > 1)


def size(*axes: str) -> int:
    """Devices along the axes, 1 without a mesh."""
    sizes = _ambient()
    return math.prod(sizes.get(axis, 1) for axis in axes)


def index(axes: str | Sequence[str]) -> Any:
    """This device's number along the axes, the first one slowest; 0 without a mesh."""
    live = _live(axes)
    return lax.axis_index(live) if live else 0


def total(x: Any, axes: str | Sequence[str]) -> Any:
    """The sum over the devices along the axes, of each array of a tree."""
    live = _live(axes)
    return lax.psum(x, live) if live else x


def greatest(x: Any, axes: str | Sequence[str]) -> Any:
    """The largest over the devices along the axes, number by number."""
    live = _live(axes)
    return lax.pmax(x, live) if live else x


def ambient_cut(spec: ParamSpec) -> Cut:
    """`placement` in the code at hand."""
    return placement(spec, _ambient())


def cut_axes(spec: ParamSpec) -> tuple[str, ...]:
    """The mesh axes of the code at hand that a weight is cut over."""
    return tuple(axis for axes in ambient_cut(spec) for axis in axes)


def summed(spec: ParamSpec, gradient: Any) -> Any:
    """A weight's gradient of its devices' shares: over the axes along which each has a copy, the sum."""
    return total(gradient, [axis for axis in AXES if axis not in cut_axes(spec)])


def gathered(tree: Any, specs: Any) -> Any:
    """Weights as they are computed with, of their stored parts; the gradient goes back to the parts as a sum.

    Weights that are whole already stay as they are, and so do tables.
    """
    sizes = _ambient()
    if not any(sizes.get(axis, 1) > 1 for axis in STORED):
        return tree

    def one(spec: ParamSpec, leaf: Any) -> Any:
        computed = computed_cut(spec, sizes)
        for dim, axes in enumerate(placement(spec, sizes)):
            rest = tuple(axes[len(computed[dim]) :])
            if rest and leaf.shape[dim] < _piece(spec.shape, computed, sizes, dim):
                leaf = checkpoint_name(lax.all_gather(leaf, rest, axis=dim, tiled=True), GATHERED)
        return leaf

    return map_specs(one, specs, tree)


def shard_bytes(specs: Any, sizes: Sizes, stored: Sequence[str] = STORED) -> int:
    """Bytes of one device's part of a tree of `ParamSpec`, four a number."""
    return sum(4 * math.prod(shard_shape(spec, sizes, placement(spec, sizes, stored))) for spec in spec_leaves(specs))
