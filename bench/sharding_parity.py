"""Loss and every gradient of a training step on meshes of eight devices, and the losses of six steps, against one device's.

python -m bench.sharding_parity [float32|float64] [MESH ...] writes its part of bench/results/sharding_parity.json; on CPU it
makes the eight devices itself. float64 is the same program with every float32 in it a float64: what is left there is no rounding
of float32, but what the mesh computes differently.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".lstrip()

import jax
import jax.numpy as jnp
import numpy as np

if __name__ == "__main__" and sys.argv[1:2] == ["float64"]:
    # Ahead of the imports below, which read the name.
    jax.config.update("jax_enable_x64", True)
    jnp.float32 = jnp.float64

from dsv41.config import ModelConfig, preset
from dsv41.numerics import Policy
from dsv41.sharding import make_mesh, parse_mesh
from train.data import Batch
from train.layout import from_stored, place_batch, state_leaves, stored_target, to_stored
from train.step import StepOptions, TrainState, init_state, make_train_step

RESULTS = Path(__file__).parent / "results" / "sharding_parity.json"
MESHES = ("data=8", "fsdp=8", "expert=8", "context=8", "model=2", "fsdp=2,model=2")
MESHES += ("fsdp=2,expert=2,model=2", "data=2,expert=2,model=2", "expert=2,context=2,model=2")
ACCUMULATED = "fsdp=2,expert=2,model=2"
STEPS = 6


def some_batch(config: ModelConfig, rows: int, length: int) -> Batch:
    """Random tokens; of the second row's end and of the whole last row there are none."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, config.vocab_size, (rows, length)).astype(np.int32)
    segments = np.ones_like(ids)
    segments[1, length * 3 // 4 :] = segments[-1] = 0
    weights = (segments > 0).astype(np.float32)
    return Batch(ids, segments, np.roll(ids, -1, 1), weights)


def gradients(state: TrainState) -> dict[str, np.ndarray]:
    """Of the first step, by weight and family: what momenta that began at zero hold of them."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        name = jax.tree_util.keystr(path)
        if "momentum" in name or ".mu" in name:
            found[name] = np.asarray(leaf)
    return found


def differences(
    config: ModelConfig, params: Any, batch: Batch, meshes: Sequence[str], accumulate: int = 1, steps: int = 1
) -> Iterator[dict[str, Any]]:
    """For each mesh: relative differences of the loss and, in the 2-norm, of all gradients and the furthest one, and whose it is.

    Gradients of Engram weights apart: the root in their gate has a slope of up to 500, which magnifies rounding. Ahead of the
    meshes one device with weights moved by one rounding, which says how far rounding alone can go. steps: after so many on the
    same batch, the last cross-entropy and index loss too.
    """
    fold, options = np.arange(config.vocab_size, dtype=np.int32), StepOptions(accumulate)
    leaves = state_leaves(init_state, config)

    def fresh() -> TrainState:
        state = init_state(config, 0)
        return TrainState(jax.tree.map(lambda a: jnp.array(a, copy=True), params), state.opt_state, state.step)

    def run(step: Any, state: TrainState, batch: Any, mesh: Any = None) -> tuple[dict[str, np.ndarray], list[dict[str, float]]]:
        first, told = {}, []
        for n in range(steps):
            state, metrics = step(state, batch, np.float32(0.01))
            told.append({name: float(metrics[name]) for name in ("loss", "ce", "index_kl")})
            if not n:
                first = gradients(to_stored(state, leaves, mesh) if mesh else state)
        return first, told

    step = make_train_step(config, Policy(), fold, options)
    here = jax.tree.map(jnp.asarray, batch)
    wanted, told = run(step, fresh(), here)

    def compared(text: str, found: dict[str, np.ndarray], other: list[dict[str, float]]) -> dict[str, Any]:
        apart = {name: float(np.linalg.norm(found[name] - g) / max(np.linalg.norm(g), 1e-30)) for name, g in wanted.items()}
        engram = max(value for name, value in apart.items() if ".engram." in name)
        worst = max((name for name in apart if ".engram." not in name), key=lambda name: apart[name])
        total = sum(np.sum(np.square(g, dtype=np.float64)) for g in wanted.values())
        squares = sum(np.sum(np.square(found[name] - g, dtype=np.float64)) for name, g in wanted.items())
        off = lambda n, name: abs(other[n][name] - told[n][name]) / abs(told[n][name])  # noqa: E731
        return {
            "mesh": text,
            "loss": off(0, "loss"),
            "all_gradients": float(np.sqrt(squares / total)),
            "gradient": apart[worst],
            "of": worst,
            "engram_gradient": engram,
            "over_1e-5": sum(value > 1e-5 for value in apart.values()),
            "gradients": len(apart),
            **({"steps": steps, "last_ce": off(-1, "ce"), "last_index_kl": off(-1, "index_kl")} if steps > 1 else {}),
        }

    # A control: the same step of weights moved to the next number, up or down.
    moved, rng = fresh(), np.random.default_rng(0)
    move = lambda a: np.nextafter(a, rng.choice(np.array([-np.inf, np.inf], np.float32), a.shape)) if a.ndim > 1 else a  # noqa: E731
    moved = replace(moved, params=jax.tree.map(lambda a: jnp.asarray(move(np.asarray(a))), moved.params))
    yield compared("one device, weights moved by a rounding", *run(step, moved, here))
    for text in meshes:
        mesh = make_mesh(parse_mesh(text))
        where = jax.tree.map(lambda target: target.sharding, stored_target(leaves, mesh))
        state = from_stored(jax.device_put(fresh(), where), leaves, mesh)
        step = make_train_step(config, Policy(), fold, options, mesh=mesh)
        yield compared(text, *run(step, state, place_batch(batch, mesh, accumulate), mesh))


def main(words: Sequence[str]) -> None:
    """Prints a line a mesh and writes all of them."""
    dtype, meshes = (words[0], words[1:]) if words and words[0] in ("float32", "float64") else ("float32", words)
    config = preset("toy")
    params, batch, found = init_state(config, 0).params, some_batch(config, 8, 64), []
    for parts, some in ((1, meshes or MESHES), (2, [] if meshes else [ACCUMULATED])):
        for row in differences(config, params, batch, some, parts, STEPS) if some else ():
            print(json.dumps(row), flush=True)
            found.append({"accumulate": parts, **row})
    results = json.loads(RESULTS.read_text())
    kept = {(row["accumulate"], row["mesh"]): row for row in [*results.get(dtype, []), *found]}
    RESULTS.write_text(json.dumps({**results, dtype: list(kept.values())}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
