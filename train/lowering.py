"""Programs lowered for a mesh, as a rule without its devices: one device's bytes, and what it sends of each collective."""

import contextlib
import json
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.collectives import summed_collectives
from dsv41.config import ModelConfig
from dsv41.errors import UserError, nearest
from dsv41.exchange import using
from dsv41.numerics import Policy
from dsv41.params import map_specs
from dsv41.sharding import (
    Sizes,
    abstract_mesh,
    check_mesh,
    make_mesh,
    mesh_sizes,
    padded_shape,
    parse_mesh,
    row_parts,
    shard_bytes,
    spell,
)
from train.data import Batch
from train.layout import check_tokens, state_leaves
from train.packing import check_length
from train.step import StepOptions, init_state, make_train_step

HERE = "here"
_GPUS, _TPUS = re.compile(r"[a-z]+[0-9]+x([1-9][0-9]{0,6})"), re.compile(r"v[0-9]+[a-z]*[-:]([0-9x]+)")


def trace_train(config: ModelConfig, mesh: Any, kind: str, rows: int, length: int) -> tuple[Any, dict[str, int]]:
    """A training step traced for ``rows`` rows on each device along the rows' axes, bfloat16 passes, and one device's bytes.

    Each layer's backward pass computes it again.
    """
    sizes = mesh_sizes(mesh)
    leaves = state_leaves(init_state, config)
    state = map_specs(lambda spec: jax.ShapeDtypeStruct(padded_shape(spec, sizes), spec.dtype), leaves)
    shape = (rows * row_parts(sizes), length)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    batch = Batch(ids, ids, ids, jax.ShapeDtypeStruct(shape, jnp.float32))  # pyright: ignore
    fold = np.arange(config.vocab_size, dtype=np.int32) % config.engram_compressed_vocab_size
    policy = Policy(jnp.bfloat16, remat="block")
    step: Any = make_train_step(config, policy, fold, StepOptions(), mesh=mesh)
    traced = step.trace(state, batch, jax.ShapeDtypeStruct((), jnp.float32))
    return traced, {
        "tokens": shape[0] * length,
        "state_bytes": shard_bytes(leaves, sizes),
        "weight_bytes": shard_bytes(leaves.params, sizes),
    }


def lower(
    config: ModelConfig, sizes: Sizes, rows: int, length: int, platform: str, kind: str = "train", here: bool = False
) -> dict[str, Any]:
    """One device's bytes and collectives of a program.

    kind: "train", or as `infer.lowering.trace_infer` has it. platform: what it is lowered for, cuda or tpu. Kernels are not: the
    reference form of each op stands in their places. here: lowered for this machine's devices in place of ``platform``,
    compiled, and what the program takes of each added.
    """
    from infer.lowering import trace_infer

    trace = trace_train if kind == "train" else trace_infer
    mesh = make_mesh(sizes) if here else abstract_mesh(sizes)
    with contextlib.nullcontext() if here else using("ragged"):
        traced, found = trace(config, mesh, kind, rows, length)
        lowered = traced.lower() if here else traced.lower(lowering_platforms=(platform,))
    memory = lowered.compile().memory_analysis() if here else None
    return {
        "step": kind,
        "devices": math.prod(sizes.values()),
        **found,
        **({"temporary_bytes": memory.temp_size_in_bytes, "argument_bytes": memory.argument_size_in_bytes} if memory else {}),
        "lowered_characters": len(lowered.as_text()),
        "collectives": summed_collectives(traced.jaxpr.jaxpr, sizes),
    }


def _platform(topology: str | None, platform: str, sizes: Sizes) -> str:
    """What to lower for; raises `UserError` for devices that are not the mesh's, or whose compiler is not here."""
    if topology is None:
        return platform
    if platform != "cuda":
        raise UserError(f"platform: found {platform!r} beside topology={topology}, allowed is one of them")
    if topology == HERE:
        return platform
    gpus, wanted = _GPUS.fullmatch(topology), math.prod(sizes.values())
    if gpus and int(gpus[1]) == wanted:
        return "cuda"
    if gpus:
        raise UserError(
            f"topology: found {gpus[1]} devices for a mesh of {wanted}, allowed is the same; nearest is "
            f"'{topology.rpartition('x')[0]}x{wanted}'"
        )
    if _TPUS.fullmatch(topology):
        raise UserError(f"topology: found {topology!r}, whose compiler is not here, allowed is platform=tpu, which lowers for it")
    allowed = f"allowed is '{HERE}', or a GPU and how many of it, as 'h200x{wanted}'"
    raise UserError(f"topology: found {topology!r}, {allowed}{nearest(topology, (HERE, f'h200x{wanted}'))}")


def report(
    config: ModelConfig, mesh: str, rows: int, length: int, platform: str, as_json: bool, kind: str, topology: str | None
) -> str:
    """What `dsv41 compile` prints; raises `UserError` for a mesh or a batch that the model cannot have."""
    sizes = parse_mesh(mesh)
    check_mesh(config, sizes)
    platform = _platform(topology, platform, sizes)
    if kind == "train":
        check_length(length, config.document_alignment)
        check_tokens(sizes, length, config.document_alignment)
    most = np.iinfo(np.int32).max // (row_parts(sizes) * max(length, 1))  # tokens are counted in int32
    if not most:
        raise UserError(f"length: found {length}, allowed on this mesh is 1 to {np.iinfo(np.int32).max // row_parts(sizes)}")
    if not 1 <= rows <= most:
        near = min(max(rows, 1), most)
        raise UserError(f"rows: found {rows}, allowed with {length} tokens each on this mesh is 1 to {most}; nearest is {near}")
    found = lower(config, sizes, rows, length, platform, kind, topology == HERE)
    if as_json:
        return json.dumps(found, indent=1)
    name = {"train": "training step", "prefill": "chunk of a prompt", "decode": "decode step"}[kind]
    done = "compiled here" if topology == HERE else f"lowered for {topology or platform}"
    lines = [f"{name} on {spell(sizes)}, {found['devices']} devices, {found['tokens']:,} tokens, {done}"]
    if kind == "train":
        lines.append(f"one device's weights and momenta: {found['state_bytes']:,} bytes; gradients: {found['weight_bytes']:,}")
    else:
        lines.append(f"one device's weights: {found['weight_bytes']:,} bytes; cache: {found['cache_bytes']:,}")
    if "temporary_bytes" in found:
        lines.append(f"what the program takes of a device beside: {found['temporary_bytes']:,} bytes")
    lines.append("what a device sends in a step, by collective and axes: times, bytes")
    lines += [f"  {row['name']} {row['axes']}: {row['times']:,}, {row['bytes']:,}" for row in found["collectives"]]
    lines.append(f"  all: {sum(row['bytes'] for row in found['collectives']):,} bytes")
    return "\n".join(lines)
