"""Each mechanism of the recipe against going without it: held-out bits per byte at equal tokens, several seeds.

Run: python -m bench.ablations [--steps 2000] [--seeds 3] [--workers 1] [--out FILE.md] ...

All seeds of a variant are one batched program, and many steps one call of it, so that a GPU is kept busy by models as small
as the toy; so do workers, processes that share out the variants. A seed draws the initial weights and the order of the rows;
the rows are the same for all variants. Variants that train alike are trained once.
"""

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax

from dsv41.config import ModelConfig, preset
from dsv41.errors import UserError, nearest
from dsv41.files import write_text
from dsv41.numerics import PACKED, Policy
from dsv41.params import ParamSpec, Stored, count_parameters, map_specs, text_specs
from kernels_pallas import registry
from train.corpus import STDLIB
from train.curve import Score
from train.data import Batch, Prepared, TrainData, prepare, to_batch
from train.loop import fit_vocabulary
from train.optim import warmup_hold_cosine
from train.packing import Packed
from train.recipes import DTYPES
from train.step import EvalStep, StepOptions, TrainState, init_state, make_eval_step, make_train_step
from train.tokenizer import cache_root

_PLAIN = Policy()


@dataclass(frozen=True)
class Numerics:
    """How a model is run: with which policy, and which stored forms of its weights."""

    policy: Policy = _PLAIN
    weights: tuple[Stored, ...] = ()


PLAIN, NO_POOL = Numerics(), Numerics(Policy(candidate_pool=False))
CACHE, RELEASED = Numerics(PACKED), Numerics(PACKED, ("fp4", "fp8", "fp8_rows"))
# Where training changes over to `Variant.late`.
_LATE = 0.8


@dataclass(frozen=True)
class Variant:
    """What differs from the full recipe: the model, the owners of its weights, how it is trained and how it is scored.

    model takes the config and the length of a row. late: how the last fifth of the steps is trained, where that differs.
    """

    says: str
    model: Callable[[ModelConfig, int], ModelConfig] = lambda config, length: config
    owner: Callable[[ParamSpec], ParamSpec] = lambda spec: spec
    trained: Numerics = PLAIN
    late: Numerics | None = None
    scored: Numerics = PLAIN

    @property
    def training(self) -> tuple[Any, ...]:
        """What decides the weights."""
        return self.model, self.owner, self.trained, self.late


def _adamw(spec: ParamSpec) -> ParamSpec:
    # Muon's and Sinkhorn's updates have RMS 0.18 of the rate, AdamW's about 1.
    owned = spec.family in ("muon", "sinkhorn")
    return replace(spec, family="adamw", lr_scale=0.18 * spec.lr_scale) if owned else spec


def _frozen_indexer(spec: ParamSpec) -> ParamSpec:
    return replace(spec, family="frozen") if ".indexer." in spec.key else spec


def _dense(config: ModelConfig, length: int) -> ModelConfig:
    """Every layer attends to all tokens before it, by keys and values of its own."""
    return replace(
        config,
        sliding_window=length,
        compress_ratios=(0,) * config.num_hidden_layers,
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=-1,
    )


def _no_engram(config: ModelConfig, length: int) -> ModelConfig:
    return replace(config, engram_layer_ids=(), engram_num_embeddings=())


VARIANTS = {
    "full": Variant("the whole recipe"),
    "adamw": Variant("AdamW for all weights, its rate times 0.18", owner=_adamw),
    "plain-muon": Variant("Muon on whole query and output matrices", owner=lambda spec: replace(spec, blocks=1)),
    "no-engram": Variant("no Engram tables", _no_engram),
    "frozen-indexer": Variant("indexers stay as they were drawn", owner=_frozen_indexer),
    "dense": Variant("dense attention in every layer, nothing shared", _dense),
    "unshifted-mhc": Variant("mHC with each site's own coefficients", lambda config, _: replace(config, hc_single_pass=False)),
    "pool-at-inference": Variant("candidate pool only when scored", trained=NO_POOL),
    "no-pool": Variant("no candidate pool", trained=NO_POOL, scored=NO_POOL),
    "fp4-post-hoc": Variant("scored with the caches' FP4 and FP8 rows", scored=CACHE),
    "fp4-trained": Variant("the same, and its last fifth trained with them", late=CACHE, scored=CACHE),
    "release-post-hoc": Variant("scored with those and with FP4 and FP8 weights", scored=RELEASED),
    "release-trained": Variant("the same, and its last fifth trained with all of them", late=RELEASED, scored=RELEASED),
}


@dataclass(frozen=True)
class Options:
    """Compares variants of the recipe."""

    preset: str = "toy"
    """A named configuration."""
    data: tuple[str, ...] = (STDLIB,)
    """Text files, folders, or stdlib."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    """Names of variants, all where not given."""
    steps: int = 2000
    """Steps of each run."""
    seeds: int = 3
    """Runs of each variant."""
    batch_size: int = 16
    """Rows a step."""
    length: int = 256
    """Tokens a row."""
    lr: float = 1.5e-2
    """Peak learning rate."""
    dtype: str = "float32"
    """Of the passes: float32 or bfloat16."""
    chunk: int = 25
    """Steps in one call."""
    workers: int = 1
    """Processes that share out the variants."""
    out: Path = Path("bench/results/ablations.md")
    """The table; the numbers also go to a file of its name that ends in .json."""


@dataclass(frozen=True)
class Result:
    """scores: bits per byte of each seed. losses: cross-entropy of each chunk's last step, of each seed."""

    name: str
    parameters: int
    scores: list[float]
    losses: list[list[float]]
    seconds: float


def _chunks(streams: list[TrainData], start: int, stop: int, size: int) -> Iterator[tuple[int, Batch]]:
    """Batches of up to ``size`` steps for all seeds, ``[steps, seeds, B, T]``, and the step that they lead to."""
    stack = lambda trees: jax.tree.map(lambda *leaves: np.stack(leaves), *trees)  # noqa: E731
    for first in range(start, stop, size):
        last = min(first + size, stop)
        yield last, stack([stack([stream.batch(n) for stream in streams]) for n in range(first, last)])


def run(names: tuple[str, ...], config: ModelConfig, fold: np.ndarray, prepared: Prepared, options: Options) -> list[Result]:
    """Trains variants that train alike, once, and scores each."""
    first, began = VARIANTS[names[0]], time.monotonic()
    config = first.model(config, options.length)
    specs = map_specs(first.owner, text_specs(config))
    rates = warmup_hold_cosine(options.steps, options.lr)
    streams = [TrainData(prepared.train, options.batch_size, seed) for seed in range(options.seeds)]
    states = jax.jit(jax.vmap(lambda seed: init_state(config, seed, specs=specs)))(jnp.arange(options.seeds))
    change = round(_LATE * options.steps) if first.late is not None else options.steps

    def program(numerics: Numerics) -> Any:
        step = make_train_step(config, _typed(numerics, options), fold, StepOptions(weights=numerics.weights), specs)

        def one(states: TrainState, given: tuple[Batch, jax.Array]) -> tuple[TrainState, jax.Array]:
            states, metrics = jax.vmap(step, in_axes=(0, 0, None))(states, *given)
            return states, metrics["ce"]

        return jax.jit(lambda states, *given: lax.scan(one, states, given), donate_argnums=0)

    losses = []
    for start, stop, numerics in ((0, change, first.trained), (change, options.steps, first.late)):
        many = program(numerics) if numerics is not None else None
        compiled = {}
        for done, batches in _chunks(streams, start, stop, options.chunk):
            given = states, batches, rates(np.arange(done - batches.ids.shape[0], done))
            if batches.ids.shape[0] not in compiled:
                # Kernels have no batched form.
                with registry.automatic("reference"):
                    compiled[batches.ids.shape[0]] = many.lower(*given).compile()  # pyright: ignore
            states, ce = _finished(compiled[batches.ids.shape[0]], *given)
            losses.append([float(value) for value in ce[-1]])
            seconds = time.monotonic() - began
            print(f"{names[0]}: step {done}, cross-entropy {np.mean(losses[-1]):.4f}, {seconds:.0f} s", flush=True)
    results, size = [], count_parameters(text_specs(config))
    for name in names:
        scored = VARIANTS[name].scored
        step = make_eval_step(config, _typed(scored, options), fold, scored.weights)
        with registry.automatic("reference"):
            scores = _scores(states.params, step, prepared, options)
        results.append(Result(name, size, scores, losses, time.monotonic() - began))
    return results


def _typed(numerics: Numerics, options: Options) -> Policy:
    return replace(numerics.policy, compute_dtype=DTYPES[options.dtype])


def _finished(call: Callable[..., Any], *args: Any) -> Any:
    return jax.block_until_ready(call(*args))


def _scores(params: Any, step: EvalStep, prepared: Prepared, options: Options) -> list[float]:
    step = jax.jit(jax.vmap(step, in_axes=(0, None)))
    nats, held = np.zeros(options.seeds), prepared.heldout
    for start in range(0, len(held.ids), options.batch_size):
        rows = Packed(*(a[start : start + options.batch_size] for a in held))
        short = options.batch_size - len(rows.ids)
        nats += np.asarray(step(params, to_batch(Packed(*(np.pad(a, ((0, short), (0, 0))) for a in rows))))[0], np.float64)
    size = int(prepared.token_bytes[held.ids].sum())
    return [Score(options.steps, float(n), 0, size).bits_per_byte for n in nats]


def _words(options: Options) -> list[str]:
    """The command line's words for all that is not at its default but where to write."""
    words = []
    for f in dataclasses.fields(Options):
        value = getattr(options, f.name)
        if value != f.default and f.name != "out":
            words += [f"--{f.name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def table(results: list[Result], options: Options) -> str:
    """The results in Markdown, with the command that gives them."""
    shape = f"{options.batch_size} rows of {options.length} tokens"
    lines = [
        f"`{options.preset}`, {options.steps:,} steps of {shape},"
        f" {options.seeds} seeds, {options.dtype}, on {jax.local_devices()[0].device_kind}. Held-out bits per byte.",
        "",
        "```",
        " ".join(["python -m bench.ablations", *_words(options)]),
        "```",
        "",
        "| variant | what differs | parameters | mean | spread (sd) | against full | each seed |",
        "|---|---|---|---|---|---|---|",
    ]
    full = next((np.mean(r.scores) for r in results if r.name == "full"), math.nan)
    for r in results:
        spread = np.std(r.scores, ddof=1) if len(r.scores) > 1 else math.nan
        each = ", ".join(f"{score:.4f}" for score in r.scores)
        lines.append(
            f"| {r.name} | {VARIANTS[r.name].says} | {r.parameters:,} | {np.mean(r.scores):.4f} | {spread:.4f}"
            f" | {np.mean(r.scores) - full:+.4f} | {each} |"
        )
    return "\n".join(lines) + "\n"


def main(options: Options) -> None:
    """Runs the variants, and writes what there is after each of them."""
    for name in options.variants:
        if name not in VARIANTS:
            raise UserError(f"variants: found {name!r}, allowed are {', '.join(VARIANTS)}{nearest(name, VARIANTS)}")
    for name in ("steps", "seeds", "batch_size", "chunk", "workers"):
        if getattr(options, name) < 1:
            raise UserError(f"{name}: found {getattr(options, name)}, allowed is 1 or more; nearest is 1")
    if options.dtype not in DTYPES:
        raise UserError(f"dtype: found {options.dtype!r}, allowed are {', '.join(DTYPES)}{nearest(options.dtype, DTYPES)}")
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name in options.variants:
        groups.setdefault(VARIANTS[name].training, []).append(name)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    together = list(map(tuple, groups.values()))
    results = _shared(together, options) if options.workers > 1 else _alone(together, options)
    print(table(results, options), end="")


def _write(results: list[Result], options: Options) -> None:
    write_text(options.out, table(results, options))
    write_text(options.out.with_suffix(".json"), json.dumps([dataclasses.asdict(r) for r in results], indent=1) + "\n")


def _alone(groups: list[tuple[str, ...]], options: Options) -> list[Result]:
    config = preset(options.preset)
    prepared = prepare(options.data, config.vocab_size, options.length, config.document_alignment, cache_root())
    config, fold = fit_vocabulary(config, prepared.tokenizer)
    results: list[Result] = []
    for names in groups:
        results += run(names, config, fold, prepared, options)
        jax.clear_caches()
        _write(results, options)
    return results


def _shared(groups: list[tuple[str, ...]], options: Options) -> list[Result]:
    """The results of worker processes, in the order of the groups."""
    count = min(options.workers, len(groups))
    files = [options.out.with_name(f"{options.out.stem}.{n}.md") for n in range(count)]
    # The processes are on one device, whose memory none may take whole.
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    workers = []
    for n, file in enumerate(files):
        names = tuple(name for group in groups[n::count] for name in group)
        words = _words(replace(options, variants=names, workers=1))
        workers.append(subprocess.Popen([sys.executable, "-m", "bench.ablations", *words, "--out", str(file)], env=env))
    codes = [worker.wait() for worker in workers]
    found = [Result(**row) for file in files if file.with_suffix(".json").exists() for row in _take(file)]
    order = [name for group in groups for name in group]
    results = sorted(found, key=lambda result: order.index(result.name))
    _write(results, options)
    if any(codes):
        raise UserError(
            f"workers: {sum(map(bool, codes))} of {count} ended with an error; {options.out} has what the others found"
        )
    return results


def _take(file: Path) -> list[dict[str, Any]]:
    rows = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
    for written in (file, file.with_suffix(".json")):
        written.unlink()
    return rows


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
