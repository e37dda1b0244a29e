"""Kernels that a Reuse layer of the release's widths launches in decode and in prefill, counted by CUPTI.

The same model is run with one Reuse layer and with two: what the second adds is its kernels, those that join it to the rest
included. A decode step is the second of a loop. Times are of the device, of one call, cache and caches of the chip warm.
Run: python -m bench.launches [FILE.json]    (on a GPU)
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench import program
from bench.kernels import profiled
from dsv41.cache import init_cache
from dsv41.config import ModelConfig, preset, replace
from dsv41.errors import UserError
from dsv41.files import check_outputs, write_text
from dsv41.model import extend
from dsv41.numerics import Policy
from dsv41.params import init_params
from kernels_pallas import registry

STEPS = {"decode, 1 request": (1, 1), "decode, 32 requests": (32, 1), "prefill of 512 tokens": (1, 512)}
_CAPACITY = 4096
_POLICY = Policy(jnp.bfloat16, quantize_main_kv=True, quantize_index=True, quantize_window=True)


def with_reuse(layers: int) -> ModelConfig:
    """The slice of the release's widths, 16 experts of them too, with ``layers`` Reuse layers behind its last."""
    config = preset("slice")
    return replace(
        config,
        num_hidden_layers=config.num_hidden_layers + layers,
        compress_ratios=(*config.compress_ratios, *(1,) * layers),
        moe_intermediate_size=2304,
        n_routed_experts=16,
    )


def kernels(params: Any, config: ModelConfig, batch: int, time: int) -> list[tuple[str, float]]:
    """Name and microseconds of each kernel of a step of ``batch`` requests and ``time`` tokens behind a context of as many.

    A decode step is one of a loop of them, as generation runs it: what depends on the weights alone is done before the loop.
    """
    fold = jnp.arange(config.vocab_size, dtype=jnp.int32)
    step = jax.jit(lambda params, cache, ids: extend(params, config, _POLICY, cache, ids, jnp.ones(ids.shape, bool), fold))

    def steps(count: jax.Array, params: Any, cache: Any, ids: jax.Array) -> Any:
        def one(_: Any, state: tuple) -> tuple:
            logits, cache = step(params, *state)
            return cache, jnp.argmax(logits, axis=-1).astype(jnp.int32)[:, None]

        return jax.lax.fori_loop(0, count, one, (cache, ids))

    ids = jax.random.randint(jax.random.key(1), (batch, max(time, 512)), 3, config.vocab_size)
    _, cache = step(params, init_cache(config, _POLICY, batch, _CAPACITY), ids)
    if time > 1:
        jax.block_until_ready(step(params, cache, ids))
        return profiled(step, (params, cache, ids))[1]
    loop = jax.jit(steps)
    _, one, two = (profiled(loop, (jnp.int32(count), params, cache, ids[:, :1]))[1] for count in (1, 1, 2))
    return of_one_step(one, two)


def of_one_step(one: list[tuple[str, float]], two: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """The kernels of a loop's second step, from those of the loop with one step and with two, each at its mean time."""
    names = Counter(name for name, _ in two)
    mean = {name: sum(us for own, us in two if own == name) / count for name, count in names.items()}
    return [(name, mean[name]) for name in (names - Counter(name for name, _ in one)).elements()]


def added(few: list[tuple[str, float]], many: list[tuple[str, float]]) -> tuple[int, float, dict[str, int]]:
    """Kernels, microseconds and kernels by name that ``many`` has beyond ``few``."""
    names = Counter(name for name, _ in many)
    names.subtract(name for name, _ in few)
    return len(many) - len(few), sum(us for _, us in many) - sum(us for _, us in few), {n: c for n, c in names.items() if c}


def main(out: Path | None) -> None:
    """Prints and writes the count of each step, with the kernels and with every op on its reference."""
    check_outputs({"out": out})
    if jax.default_backend() != "gpu":
        raise UserError(f"backend: found {jax.default_backend()}, allowed is gpu: CUPTI counts there")
    params: Any = init_params(with_reuse(2), jax.random.key(0), jnp.bfloat16)
    fewer = params.replace(layers=params.layers[:-1])
    results = []
    for impl in ("auto", "reference"):
        for name, (batch, time) in STEPS.items():
            with registry.automatic(impl):
                runs = [kernels(p, with_reuse(n + 1), batch, time) for n, p in enumerate((fewer, params))]
            count, us, names = added(*runs)
            results.append({"step": name, "impl": impl, "kernels": count, "us": round(us, 1), "names": names})
            print(f"{name}, {impl}: {count} kernels a Reuse layer, {us:.1f} us; whole step {len(runs[1])}", flush=True)
            print(names, flush=True)
            if out is not None:
                device = program.device()
                write_text(out, json.dumps({"device": device, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else None)
