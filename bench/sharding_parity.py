"""A training step on meshes of eight devices against one device's: loss, every gradient, every weight's change and every metric,
the held-out loss of the weights before it, and the losses of six steps.

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
from typing import Any, Literal

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
from train.replay import replayed
from train.step import StepOptions, TrainState, init_state, make_eval_step, make_train_step

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


def _changes(before: Any, after: Any) -> dict[str, np.ndarray]:
    paths = jax.tree_util.tree_leaves_with_path(before)
    return {
        jax.tree_util.keystr(path): np.asarray(new) - old
        for (path, old), new in zip(paths, jax.tree.leaves(after), strict=True)
        if jnp.issubdtype(old.dtype, jnp.floating)
    }


def gradients(state: TrainState) -> dict[str, np.ndarray]:
    """Of the first step, by weight and family: what momenta that began at zero hold of them."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        name = jax.tree_util.keystr(path)
        if "momentum" in name or ".mu" in name:
            found[name] = np.asarray(leaf)
    return found


def differences(
    config: ModelConfig,
    params: Any,
    batch: Batch,
    meshes: Sequence[str],
    accumulate: int = 1,
    steps: int = 1,
    replay: Literal["off", "mask", "gather"] = "off",
) -> Iterator[dict[str, Any]]:
    """For each mesh: relative differences of the loss and the held-out loss, of the metric that is furthest, and in the 2-norm of
    all gradients, of the furthest one and of the furthest weight's change, and whose they are.

    Gradients of Engram weights apart: the root in their gate has a slope of up to 500, which magnifies rounding. Ahead of the
    meshes one device with weights moved by one rounding, which says how far rounding alone can go. steps: after so many on the
    same batch, the last cross-entropy and index loss too. replay: how decoder replay is simulated.
    """
    fold, options = np.arange(config.vocab_size, dtype=np.int32), StepOptions(accumulate, replay=replay)
    leaves, whole = state_leaves(init_state, config), batch
    if replay != "off":
        batch = replayed(batch, config.sliding_window, replay == "gather", np.random.default_rng(0))

    def fresh() -> TrainState:
        state = init_state(config, 0)
        return TrainState(jax.tree.map(lambda a: jnp.array(a, copy=True), params), state.opt_state, state.step)

    def run(state: TrainState, mesh: Any = None) -> dict[str, Any]:
        step = make_train_step(config, Policy(), fold, options, mesh=mesh)
        score = make_eval_step(config, Policy(), fold, mesh=mesh)
        placed = lambda b, parts: jax.tree.map(jnp.asarray, b) if mesh is None else place_batch(b, mesh, parts)  # noqa: E731
        stored = lambda state: to_stored(state, leaves, mesh) if mesh else state  # noqa: E731
        nats, weight = map(float, score(state.params, placed(whole, 1)))
        before, metrics = jax.tree.map(np.array, stored(state).params), []
        found: dict[str, Any] = {"eval": nats / weight, "metrics": metrics}
        for n in range(steps):
            state, told = step(state, placed(batch, accumulate), np.float32(0.01))
            metrics.append(jax.tree.map(float, told))
            if not n:
                found |= {"gradients": gradients(stored(state)), "changes": _changes(before, stored(state).params)}
        return found

    wanted = run(fresh())

    def apart(part: str, found: dict[str, Any]) -> dict[str, float]:
        norm = np.linalg.norm
        return {name: float(norm(found[part][name] - a) / max(norm(a), 1e-30)) for name, a in wanted[part].items()}

    def compared(text: str, found: dict[str, Any]) -> dict[str, Any]:
        by_gradient, by_change = (apart(part, found) for part in ("gradients", "changes"))
        engram = max(value for name, value in by_gradient.items() if ".engram." in name)
        worst = max((name for name in by_gradient if ".engram." not in name), key=lambda name: by_gradient[name])
        total = sum(np.sum(np.square(g, dtype=np.float64)) for g in wanted["gradients"].values())
        squares = sum(np.sum(np.square(found["gradients"][n] - g, dtype=np.float64)) for n, g in wanted["gradients"].items())
        one, other = wanted["metrics"], found["metrics"]
        off = lambda n, name: abs(other[n][name] - one[n][name]) / max(abs(one[n][name]), 1e-30)  # noqa: E731
        metric, change = max(one[0], key=lambda name: off(0, name)), max(by_change, key=lambda name: by_change[name])
        return {
            "mesh": text,
            "loss": off(0, "loss"),
            "eval": abs(found["eval"] - wanted["eval"]) / wanted["eval"],
            "metric": off(0, metric),
            "metric_of": metric,
            "all_gradients": float(np.sqrt(squares / total)),
            "gradient": by_gradient[worst],
            "of": worst,
            "engram_gradient": engram,
            "change": by_change[change],
            "change_of": change,
            "over_1e-5": sum(value > 1e-5 for value in by_gradient.values()),
            "gradients": len(by_gradient),
            **({"steps": steps, "last_ce": off(-1, "ce"), "last_index_kl": off(-1, "index_kl")} if steps > 1 else {}),
        }

    # A control: the same step of weights moved to the next number, up or down.
    moved, rng = fresh(), np.random.default_rng(0)
    move = lambda a: np.nextafter(a, rng.choice(np.array([-np.inf, np.inf], np.float32), a.shape)) if a.ndim > 1 else a  # noqa: E731
    moved = replace(moved, params=jax.tree.map(lambda a: jnp.asarray(move(np.asarray(a))), moved.params))
    yield compared("one device, weights moved by a rounding", run(moved))
    for text in meshes:
        mesh = make_mesh(parse_mesh(text))
        where = jax.tree.map(lambda target: target.sharding, stored_target(leaves, mesh))
        yield compared(text, run(from_stored(jax.device_put(fresh(), where), leaves, mesh), mesh))


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
