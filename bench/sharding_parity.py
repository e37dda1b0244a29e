"""Loss and every gradient of one training step on meshes of eight devices, against one device's, in float32.

python -m bench.sharding_parity [MESH ...] writes bench/results/sharding_parity.json; on CPU it makes the eight devices itself.
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

from dsv41.config import ModelConfig, preset
from dsv41.numerics import Policy
from dsv41.sharding import make_mesh, parse_mesh
from train.data import Batch
from train.layout import from_stored, place_batch, state_leaves, stored_target, to_stored
from train.step import StepOptions, TrainState, init_state, make_train_step

RESULTS = Path(__file__).parent / "results" / "sharding_parity.json"
MESHES = ("data=8", "fsdp=8", "expert=8", "model=2", "fsdp=2,expert=2,model=2", "data=2,expert=2,model=2")


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
    config: ModelConfig, params: Any, batch: Batch, meshes: Sequence[str], accumulate: int = 1
) -> Iterator[dict[str, Any]]:
    """For each mesh: relative differences of the loss and, in the 2-norm, of all gradients and the furthest one, and whose it is.

    Gradients of Engram weights apart: the root in their gate has a slope of up to 500, which magnifies rounding. Ahead of the
    meshes one device with weights moved by one rounding, which says how far rounding alone can go.
    """
    fold, options = np.arange(config.vocab_size, dtype=np.int32), StepOptions(accumulate)

    def fresh() -> TrainState:
        state = init_state(config, 0)
        return TrainState(jax.tree.map(lambda a: jnp.array(a, copy=True), params), state.opt_state, state.step)

    step = make_train_step(config, Policy(), fold, options)
    one, metrics = step(fresh(), jax.tree.map(jnp.asarray, batch), np.float32(0.01))  # pyright: ignore
    wanted, loss = gradients(one), float(metrics["loss"])
    leaves = state_leaves(init_state, config)

    def compared(text: str, metrics: Any, state: TrainState) -> dict[str, Any]:
        found = gradients(state)
        apart = {name: float(np.linalg.norm(found[name] - g) / max(np.linalg.norm(g), 1e-30)) for name, g in wanted.items()}
        engram = max(value for name, value in apart.items() if ".engram." in name)
        worst = max((name for name in apart if ".engram." not in name), key=lambda name: apart[name])
        over = sum(value > 1e-5 for value in apart.values())
        total = sum(np.sum(np.square(g, dtype=np.float64)) for g in wanted.values())
        squares = sum(np.sum(np.square(found[name] - g, dtype=np.float64)) for name, g in wanted.items())
        return {
            "mesh": text,
            "loss": abs(float(metrics["loss"]) - loss) / abs(loss),
            "all_gradients": float(np.sqrt(squares / total)),
            "gradient": apart[worst],
            "of": worst,
            "engram_gradient": engram,
            "over_1e-5": over,
            "gradients": len(apart),
        }

    # A control: the same step of weights moved to the next float32, up or down.
    moved, rng = fresh(), np.random.default_rng(0)
    move = lambda a: np.nextafter(a, rng.choice(np.array([-np.inf, np.inf], np.float32), a.shape)) if a.ndim > 1 else a  # noqa: E731
    moved = replace(moved, params=jax.tree.map(lambda a: jnp.asarray(move(np.asarray(a))), moved.params))
    new, metrics = step(moved, jax.tree.map(jnp.asarray, batch), np.float32(0.01))  # pyright: ignore
    yield compared("one device, weights moved by a rounding", metrics, new)
    for text in meshes:
        mesh = make_mesh(parse_mesh(text))
        where = jax.tree.map(lambda target: target.sharding, stored_target(leaves, mesh))
        state = from_stored(jax.device_put(fresh(), where), leaves, mesh)
        step = make_train_step(config, Policy(), fold, options, mesh=mesh)
        new, metrics = step(state, place_batch(batch, mesh, accumulate), np.float32(0.01))  # pyright: ignore
        yield compared(text, metrics, to_stored(new, leaves, mesh))


def main(meshes: Sequence[str]) -> None:
    """Prints a line a mesh and writes all of them."""
    config = preset("toy")
    params = init_state(config, 0).params
    found = []
    for row in differences(config, params, some_batch(config, 8, 64), meshes or MESHES):
        print(json.dumps(row), flush=True)
        found.append(row)
    RESULTS.write_text(json.dumps({"preset": "toy", "rows": 8, "length": 64, "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
