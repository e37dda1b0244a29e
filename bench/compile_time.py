"""Compile time of the training step, persistent cache off: `toy`, and a plan of 40 layers at toy widths.

Run: python -m bench.compile_time [FILE.json]
"""

import json
import os
import platform
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from dsv41.config import ModelConfig, preset, replace
from dsv41.files import write_text
from dsv41.numerics import Policy
from dsv41.params import count_parameters, text_specs
from train.packing import targets_and_weights
from train.step import init_state, make_train_step

BATCH, LENGTH = 4, 256


def forty_layers() -> ModelConfig:
    """The release's schedule at the toy's widths."""
    toy, release = preset("toy"), preset("flash")
    lists = ("num_hidden_layers", "kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id")
    ratios = release.compress_ratios[: release.num_hidden_layers]
    return replace(
        toy,
        compress_ratios=ratios,
        engram_layer_ids=release.engram_layer_ids,
        dspark_target_layer_ids=release.dspark_target_layer_ids,
        **{name: getattr(release, name) for name in lists},
    )


def measure(config: ModelConfig) -> dict[str, float]:
    """Seconds to trace and lower, and to compile, one training step."""
    from train.data import Batch

    ids = jnp.ones((BATCH, LENGTH), jnp.int32)
    targets, weights = (jnp.asarray(a) for a in targets_and_weights(jax.device_get(ids), jax.device_get(ids)))
    step = make_train_step(config, Policy(), jnp.arange(config.vocab_size, dtype=jnp.int32))
    state = jax.eval_shape(lambda: init_state(config, 0))
    began = time.perf_counter()
    lowered = step.lower(state, Batch(ids, ids, targets, weights), jnp.float32(0))  # pyright: ignore
    traced = time.perf_counter()
    lowered.compile()
    return {"trace_seconds": round(traced - began, 1), "compile_seconds": round(time.perf_counter() - traced, 1)}


def main() -> None:
    """Prints the two rows and writes them."""
    jax.config.update("jax_enable_compilation_cache", False)
    rows = []
    for name, config in (("toy", preset("toy")), ("toy widths, 40 layers", forty_layers())):
        parameters = count_parameters(text_specs(config))
        rows.append({"plan": name, "layers": config.num_hidden_layers, "parameters": parameters, **measure(config)})
        print(rows[-1], flush=True)
    where = {"device": jax.devices()[0].device_kind, "cores": os.cpu_count(), "machine": platform.machine()}
    report = {**where, "jax": jax.__version__, "date": time.strftime("%Y-%m-%d"), "rows": rows}
    if len(sys.argv) > 1:
        file = Path(sys.argv[1])
        write_text(file, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
