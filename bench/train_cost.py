"""What a training step costs here: seconds by named scope and pass, peak memory, and the share that is computed twice.

Run: python -m bench.train_cost [--preset small] [--out FILE.json] ...

Rows are random ids. A step is timed whole, on the clock, and then traced: each operation of the compiled step counts under the
innermost scope of its name, and under the pass that the name tells: forward, backward, or again for the backward pass.
"""

import json
import re
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import ProfileData

from bench import program
from dsv41.config import ModelConfig, preset, replace
from dsv41.errors import UserError, nearest
from dsv41.files import write_text
from dsv41.numerics import Policy
from train.data import Batch
from train.metrics import flops_per_token, peak_flops
from train.packing import targets_and_weights
from train.recipes import DTYPES
from train.step import StepOptions, init_state, make_train_step

SCOPES = ("engram", "mhc", "indexer", "attention", "moe", "head", "optimizer")
PASSES = ("forward", "again", "backward")
REMATS = ("none", "attention", "block")
TRACED = 3
Operation = tuple[float, float, str]  # start and stop in seconds since the first, name in the compiled program
_NAMED = re.compile(r"%?([\w.-]+) = .*metadata=\{[^}]*op_name=\"([^\"]*)\"")


@dataclass(frozen=True)
class Options:
    """Times training steps."""

    preset: str = "toy"
    """A named configuration, or ``wide``: four layers of the release's width, with 16 experts of its size."""
    batch_size: int = 4
    """Rows a step."""
    length: int = 256
    """Tokens a row."""
    dtype: str = "float32"
    """Of the passes: float32 or bfloat16."""
    remats: tuple[str, ...] = REMATS
    """What the backward pass computes again: none, attention and block, one after another."""
    repeats: int = 9
    """Steps that are timed; the median counts."""
    index_loss: bool = True
    """Whether the indexers learn."""
    out: Path | None = None
    """Also write the rows to this JSON file."""


def configuration(name: str) -> ModelConfig:
    """The model to time."""
    if name != "wide":
        return preset(name)
    return replace(preset("slice"), moe_intermediate_size=2304, n_routed_experts=16, num_experts_per_tok=6)


def place(op_name: str) -> tuple[str, str]:
    """Scope and pass of an operation, by the name that JAX gave it; scope ``rest`` where no scope is in it."""
    words = re.findall(r"\w+", op_name)
    scope = next((word for word in reversed(words) if word in SCOPES), "rest")
    if "rematted_computation" in words:
        return scope, "again"
    return scope, "backward" if "transpose" in words else "forward"


def names(compiled: Any) -> dict[str, str]:
    """The JAX name of each instruction of a compiled step; that of a fusion is its root's."""
    return dict(_NAMED.findall(compiled.as_text()))


def operations(folder: Path) -> tuple[list[list[list[Operation]]], bool]:
    """A trace's operations by plane and line, of devices where there are any, else of this host's threads; and which it is."""
    file = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    planes = list(ProfileData.from_file(str(file)).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    with warnings.catch_warnings():
        # The types of a trace have no __module__, of which Python warns.
        warnings.simplefilter("ignore", DeprecationWarning)
        found = [
            [
                [(e.start_ns, e.start_ns + e.duration_ns, op) for e in line.events if (op := dict(e.stats).get("hlo_op"))]
                for line in plane.lines
            ]
            for plane in devices or planes
        ]
    began = min((start for plane in found for line in plane for start, _, _ in line), default=0)
    seconds = lambda line: [((start - began) / 1e9, (stop - began) / 1e9, op) for start, stop, op in line]  # noqa: E731
    return [[seconds(line) for line in plane] for plane in found], bool(devices)


def seconds_by_place(folder: Path, named: dict[str, str]) -> Counter[tuple[str, str]]:
    """Of a trace's operations; nested ones count once."""
    found: Counter[tuple[str, str]] = Counter()
    for line in (line for plane in operations(folder)[0] for line in plane):
        # Of a loop and what runs in it, the latter; the loop keeps what is left.
        open_: list[Operation] = []
        for one in sorted((one for one in line if one[2] in named), key=lambda one: (one[0], -one[1])):
            start, stop, op = one
            while open_ and open_[-1][1] <= start:
                open_.pop()
            if open_:
                found[place(named[open_[-1][2]])] -= stop - start
            found[place(named[op])] += stop - start
            open_.append(one)
    return found


def _plain_trace() -> jax.profiler.ProfileOptions:
    """Without the calls of Python functions, which are far more than the operations."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    return options


def random_batch(config: ModelConfig, rows: int, length: int) -> Batch:
    """Rows of random ids, one document each, as numpy arrays."""
    ids = np.random.default_rng(0).integers(3, config.vocab_size, (rows, length)).astype(np.int32)
    segments = np.ones_like(ids)
    return Batch(ids, segments, *targets_and_weights(ids, segments))


def _batch(config: ModelConfig, options: Options) -> Batch:
    return jax.tree.map(jnp.asarray, random_batch(config, options.batch_size, options.length))


def named_one_by_one() -> dict[str, Any] | None:
    """Compiler options: of a GPU's recorded graphs of kernels a trace does not say which operation each kernel is."""
    return {"xla_gpu_enable_command_buffer": ""} if jax.default_backend() == "gpu" else None


def build(options: Options, remat: str) -> tuple[Any, float]:
    """The compiled step of one policy, and the seconds that took."""
    config = configuration(options.preset)
    fold = jnp.arange(config.vocab_size, dtype=jnp.int32) % config.engram_compressed_vocab_size
    step = make_train_step(config, Policy(DTYPES[options.dtype], remat=remat), fold, StepOptions(index_loss=options.index_loss))  # pyright: ignore
    began = time.perf_counter()
    state = jax.eval_shape(lambda: init_state(config, 0))
    compiled = step.lower(state, _batch(config, options), jnp.float32(0)).compile(named_one_by_one())  # pyright: ignore
    return compiled, time.perf_counter() - began


def timed_steps(
    compiled: Any, state: Any, batch: Any, rate: Any, repeats: int, read: Callable[[Path], Any]
) -> tuple[float, dict[str, Any], Any]:
    """Median seconds of a step, the last one's metrics, and what ``read`` finds in the folder of a trace of `TRACED` more.

    A first step is left out; state: donated.
    """
    state, metrics = jax.block_until_ready(compiled(state, batch, rate))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        state, metrics = jax.block_until_ready(compiled(state, batch, rate))
        times.append(time.perf_counter() - began)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=_plain_trace()):
            for _ in range(TRACED):
                state, metrics = jax.block_until_ready(compiled(state, batch, rate))
        return statistics.median(times), metrics, read(Path(folder))


def measure(options: Options, remat: str, compiled: Any, compiling: float) -> dict[str, Any]:
    """The row of one policy: seconds a step, tokens a second, bytes, and seconds by scope and pass."""
    config = configuration(options.preset)
    batch, rate = _batch(config, options), jnp.float32(1e-3)
    memory = compiled.memory_analysis()
    read = lambda folder: seconds_by_place(folder, names(compiled))  # noqa: E731
    seconds, metrics, spent = timed_steps(compiled, init_state(config, 0), batch, rate, options.repeats, read)
    row = {
        "preset": options.preset,
        "remat": remat,
        "index_loss": options.index_loss,
        "dtype": options.dtype,
        "batch_size": options.batch_size,
        "length": options.length,
        "device": jax.local_devices()[0].device_kind,
        "compile_seconds": round(compiling, 1),
        "seconds": seconds,
        "tokens_per_second": options.batch_size * options.length / seconds,
        "flops_per_token": flops_per_token(config, options.length),
        "state_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "loss": float(metrics["loss"]),
        "traced_seconds": sum(spent.values()) / TRACED,
        "again_share": sum(s for (_, name), s in spent.items() if name == "again") / max(sum(spent.values()), 1e-12),
        "scopes": {f"{scope}.{name}": s / TRACED for (scope, name), s in sorted(spent.items())},
    }
    if peak := peak_flops():
        row["mfu"] = row["tokens_per_second"] * row["flops_per_token"] / peak
    return row


def say(row: dict[str, Any]) -> str:
    """A row as a line, and a line for each scope."""
    whole = row["traced_seconds"]
    lines = [
        f"{row['preset']} {row['dtype']} {row['batch_size']}x{row['length']} remat {row['remat']}: {1e3 * row['seconds']:.2f} ms,"
        f" {row['tokens_per_second']:,.0f} tokens/s{f', MFU {row["mfu"]:.3f}' if 'mfu' in row else ''},"
        f" state {row['state_bytes'] / 1e6:,.0f} MB, temporary {row['temporary_bytes'] / 1e6:,.0f} MB,"
        f" computed again {row['again_share']:.1%} of {1e3 * whole:.2f} ms traced, compiled in {row['compile_seconds']} s"
    ]
    for scope in (*SCOPES, "rest"):
        parts = [row["scopes"].get(f"{scope}.{name}", 0.0) for name in PASSES]
        if sum(parts):
            said = ", ".join(f"{name} {1e3 * s:.2f}" for name, s in zip(PASSES, parts, strict=True) if s)
            lines.append(f"  {scope}: {1e3 * sum(parts):.2f} ms, {sum(parts) / whole:.1%} ({said})")
    return "\n".join(lines)


def main(options: Options) -> None:
    """Prints a row for each policy, and writes what there is after each of them."""
    for remat in options.remats:
        if remat not in REMATS:
            raise UserError(f"remats: found {remat!r}, allowed are {', '.join(REMATS)}{nearest(remat, REMATS)}")
    if options.dtype not in DTYPES:
        raise UserError(f"dtype: found {options.dtype!r}, allowed are {', '.join(DTYPES)}{nearest(options.dtype, DTYPES)}")
    for field in ("batch_size", "length", "repeats"):
        if getattr(options, field) < 1:
            raise UserError(f"{field}: found {getattr(options, field)}, allowed is 1 or more; nearest is 1")
    rows: list[dict[str, Any]] = []
    for remat in options.remats:
        rows.append(measure(options, remat, *build(options, remat)))
        print(say(rows[-1]), flush=True)
        if options.out is not None:
            write_text(options.out, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    program.run(main, Options)
