"""A decode step with its Engram tables in device memory and in pinned host memory: whether the way over the bus is hidden.

Median wall time of a step among many that follow each other, the two by turns, and device time of the kernels that fetch rows.
Run: python -m bench.host_tables [FILE.json]    (on a GPU)
"""

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from bench import program
from bench.kernels import profiled
from dsv41.cache import init_cache
from dsv41.config import ModelConfig, preset, replace
from dsv41.errors import UserError
from dsv41.files import check_outputs, write_text
from dsv41.hashing import table_primes
from dsv41.hf.stored import StoredWeight
from dsv41.model import extend
from dsv41.numerics import Policy
from dsv41.params import init_params
from kernels_pallas.engram_gather.cases import Case, arguments

BATCHES = (1, 32, 128)
STEPS, REPEATS = 30, 15
_CAPACITY = 2048
_POLICY = Policy(jnp.bfloat16, quantize_main_kv=True, quantize_index=True, quantize_window=True)


def with_engram() -> ModelConfig:
    """The slice of the release's width and experts, with an Engram before its second layer, as the release has."""
    primes = table_primes(1, 4, 8, 50_000)
    return replace(
        preset("slice"),
        moe_intermediate_size=2304,
        engram_layer_ids=(1,),
        engram_vocab_size=50_000,
        engram_num_embeddings=tuple(map(sum, primes)),
    )


def with_table(params: Any, table: StoredWeight) -> Any:
    """The weights with ``table`` in every Engram layer."""
    layers = [layer.replace(engram=e and e.replace(embed=table)) for layer in params.layers for e in [layer.engram]]
    return params.replace(layers=tuple(layers))


def measured(runs: dict[str, Any], config: ModelConfig, batch: int) -> dict[str, tuple[list[float], float, jax.Array]]:
    """By the name of each run's weights: microseconds of a step in each repeat, those of its kernels that fetch rows, and the
    last step's logits. The runs take turns, so that what else the host does slows all alike."""
    fold = jnp.arange(config.vocab_size, dtype=jnp.int32)
    step = jax.jit(
        lambda params, cache, ids: extend(params, config, _POLICY, cache, ids, jnp.ones(ids.shape, bool), fold),
        donate_argnums=1,
    )
    ids = jax.random.randint(jax.random.key(1), (STEPS, batch, 1), 3, config.vocab_size)
    # Committed to the device as the cache that a step gives back is, or the second step would be compiled anew.
    empty = lambda: jax.device_put(init_cache(config, _POLICY, batch, _CAPACITY), jax.devices()[0])  # noqa: E731
    states = {name: step(params, empty(), ids[0]) for name, params in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name in [*runs] * REPEATS:
        logits, cache = jax.block_until_ready(states[name])
        start = time.perf_counter()
        for at in range(STEPS):
            logits, cache = step(runs[name], cache, ids[at])
        states[name] = jax.block_until_ready((logits, cache))
        times[name].append(1e6 * (time.perf_counter() - start) / STEPS)
    fetch = {name: profiled(step, (runs[name], states[name][1], ids[0]))[1] for name in runs}
    return {
        name: (times[name], sum(us for kernel, us in fetch[name] if "engram_gather" in kernel), states[name][0]) for name in runs
    }


def main(out: Path | None) -> None:
    """Prints and writes the time of each batch with the tables in each memory, and how far their logits are apart."""
    check_outputs({"out": out})
    if jax.default_backend() != "gpu":
        raise UserError(f"backend: found {jax.default_backend()}, allowed is gpu: its bus is what is measured")
    config = with_engram()
    params = init_params(config, jax.random.key(0), jnp.bfloat16)
    codes, scales, _ = arguments(Case(1, rows=max(config.engram_num_embeddings)))
    table = StoredWeight(codes, scales, "fp8_rows", (32, 32))
    tables = {"device": table, "pinned host": jax.device_put(table, jax.memory.Space.Host)}
    results = []
    for batch in BATCHES:
        runs = measured({name: with_table(params, table) for name, table in tables.items()}, config, batch)
        (near, _, want), (far, _, got) = runs.values()
        error = float(jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want)))
        for name, (times, fetch, _) in runs.items():
            spread = {"us": median(times), "low": min(times), "high": max(times), "fetch_us": fetch}
            results.append({"batch": batch, "tables": name, **{key: round(us, 1) for key, us in spread.items()}, "error": error})
            print(f"{batch} requests, tables in {name} memory: {spread['us']:.1f} us a step, {fetch:.1f} of fetching", flush=True)
        more = median(b - a for a, b in zip(near, far, strict=True))
        print(f"{more:+.1f} us a step by the host's tables; logits differ by {error:.1e} of the largest", flush=True)
        if out is not None:
            device = program.device()
            write_text(out, json.dumps({"device": device, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else None)
