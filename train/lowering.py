"""A training step lowered for a mesh without its devices: one device's bytes, and what it sends of each collective."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from dsv41.config import ModelConfig
from dsv41.errors import UserError
from dsv41.exchange import using
from dsv41.numerics import Policy
from dsv41.params import map_specs
from dsv41.sharding import Sizes, abstract_mesh, check_mesh, padded_shape, parse_mesh, shard_bytes, spell
from train.data import Batch
from train.layout import check_tokens, row_parts, state_leaves
from train.packing import check_length
from train.step import StepOptions, init_state, make_train_step

# Of the bytes that go into a collective over n devices, what a device sends of them: of a ring where sums or copies go round.
_SENT = {
    "psum": lambda n: 2 * (n - 1) / n,
    "psum_invariant": lambda n: 2 * (n - 1) / n,
    "pmax": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "ragged_all_to_all": lambda n: (n - 1) / n,
    "ppermute": lambda n: 1,
}


def _axes(params: dict[str, Any]) -> tuple[str, ...]:
    found = params.get("axes", params.get("axis_name"))
    return (found,) if isinstance(found, str) else tuple(found or ())


def collectives(jaxpr: Any, sizes: Sizes, times: int = 1) -> Iterator[tuple[str, tuple[str, ...], int, float]]:
    """Each collective of a jaxpr: its name, mesh axes, how often a step runs it, and the bytes that a device sends each time.

    A loop's are counted as often as it runs; those of a branch once. Rows of a ragged exchange are taken as spread evenly.
    """
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _SENT:
            axes = _axes(equation.params)
            sizes_of = [v.aval.size * v.aval.dtype.itemsize for v in equation.invars]
            # A ragged exchange's second operand is where rows arrive; the larger of the two is room for the worst case.
            size = min(sizes_of[:2]) if name == "ragged_all_to_all" else sum(sizes_of)
            yield name, axes, times, size * _SENT[name](math.prod(sizes[axis] for axis in axes))
        inside = times * equation.params["length"] if name == "scan" else times
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from collectives(inner, sizes, inside)


def lower_train(config: ModelConfig, sizes: Sizes, rows: int, length: int, platform: str) -> dict[str, Any]:
    """One device's bytes and collectives of a step on ``rows`` rows for each device along the rows' axes, bfloat16 passes.

    platform: what it is lowered for, cuda or tpu. Kernels are not: the reference form of each op stands in their places. Each
    layer's backward pass computes it again.
    """
    mesh = abstract_mesh(sizes)
    leaves = state_leaves(init_state, config)
    state = map_specs(lambda spec: jax.ShapeDtypeStruct(padded_shape(spec, sizes), spec.dtype), leaves)
    shape = (rows * row_parts(sizes), length)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    batch = Batch(ids, ids, ids, jax.ShapeDtypeStruct(shape, jnp.float32))  # pyright: ignore
    fold = np.arange(config.vocab_size, dtype=np.int32) % config.engram_compressed_vocab_size
    policy = Policy(jnp.bfloat16, remat="block")
    with using("ragged"):
        step: Any = make_train_step(config, policy, fold, StepOptions(), mesh=mesh)
        traced = step.trace(state, batch, jax.ShapeDtypeStruct((), jnp.float32))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for name, axes, times, sent in collectives(traced.jaxpr.jaxpr, sizes):
        total = found[(name, "*".join(axes))]
        total[0] += times
        total[1] += times * sent
    return {
        "devices": math.prod(sizes.values()),
        "tokens": shape[0] * length,
        "state_bytes": shard_bytes(leaves, sizes),
        "weight_bytes": shard_bytes(leaves.params, sizes),
        "lowered_characters": len(text),
        "collectives": [
            {"name": name, "axes": axes, "times": int(times), "bytes": round(sent)}
            for (name, axes), (times, sent) in sorted(found.items(), key=lambda item: -item[1][1])
        ],
    }


def report(config: ModelConfig, mesh: str, rows: int, length: int, platform: str, as_json: bool) -> str:
    """What `dsv41 compile` prints; raises `UserError` for a mesh or a batch that the model cannot have."""
    sizes = parse_mesh(mesh)
    check_mesh(config, sizes)
    check_length(length, config.document_alignment)
    check_tokens(sizes, length)
    most = np.iinfo(np.int32).max // (row_parts(sizes) * length)  # tokens are counted in int32
    if not 1 <= rows <= most:
        allowed = f"1 to {most}" if most else "none"
        raise UserError(f"rows: found {rows}, allowed with rows of {length} tokens on this mesh is {allowed}")
    found = lower_train(config, sizes, rows, length, platform)
    if as_json:
        return json.dumps(found, indent=1)
    lines = [
        f"training step on {spell(sizes)}, {found['devices']} devices, {found['tokens']:,} tokens, lowered for {platform}",
        f"one device's weights and momenta: {found['state_bytes']:,} bytes; gradients: {found['weight_bytes']:,}",
        "what a device sends in a step, by collective and axes: times, bytes",
    ]
    lines += [f"  {row['name']} {row['axes']}: {row['times']:,}, {row['bytes']:,}" for row in found["collectives"]]
    lines.append(f"  all: {sum(row['bytes'] for row in found['collectives']):,} bytes")
    return "\n".join(lines)
