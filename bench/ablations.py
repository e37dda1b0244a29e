"""Each mechanism of the recipe against going without it: held-out bits per byte at equal tokens, several seeds.

Run: python -m bench.ablations [--steps 2000] [--seeds 3] [--out FILE.md] ...

All seeds of a variant are one batched program, and many steps one call of it, so that a GPU is kept busy by models as small
as the toy. A seed draws the initial weights and the order of the rows; the rows are the same for all variants.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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
from dsv41.numerics import Policy
from dsv41.params import ParamSpec, count_parameters, map_specs, text_specs
from train.corpus import STDLIB
from train.curve import Score
from train.data import Batch, Prepared, TrainData, prepare, to_batch
from train.loop import fit_vocabulary
from train.optim import warmup_hold_cosine
from train.packing import Packed
from train.step import EvalStep, StepOptions, TrainState, init_state, make_eval_step, make_train_step
from train.tokenizer import cache_root

PLAIN, NO_POOL = Policy(), Policy(candidate_pool=False)


@dataclass(frozen=True)
class Variant:
    """What differs from the full recipe: the model, the owners of its weights, the policies of training and of scoring.

    model takes the config and the length of a row.
    """

    says: str
    model: Callable[[ModelConfig, int], ModelConfig] = lambda config, length: config
    owner: Callable[[ParamSpec], ParamSpec] = lambda spec: spec
    trained: Policy = PLAIN
    scored: Policy = PLAIN


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


def _stack(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _chunks(streams: list[TrainData], steps: int, size: int) -> Any:
    """Batches of ``size`` steps for all seeds: ``[steps, seeds, B, T]``; the last ones may be fewer."""
    for start in range(0, steps, size):
        count = min(size, steps - start)
        batches = [[stream.batch(start + n) for stream in streams] for n in range(count)]
        yield jax.tree.map(lambda *leaves: np.stack(leaves), *[jax.tree.map(lambda *s: np.stack(s), *row) for row in batches])


def run(name: str, config: ModelConfig, fold: np.ndarray, prepared: Prepared, options: Options) -> Result:
    """Trains and scores a variant."""
    variant, began = VARIANTS[name], time.monotonic()
    dtype = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}[options.dtype]
    config = variant.model(config, options.length)
    specs = map_specs(variant.owner, text_specs(config))
    trained, scored = (replace(policy, compute_dtype=dtype) for policy in (variant.trained, variant.scored))
    step = make_train_step(config, trained, fold, StepOptions(), specs)
    states = _stack([init_state(config, seed, specs=specs) for seed in range(options.seeds)])
    streams = [TrainData(prepared.train, options.batch_size, seed) for seed in range(options.seeds)]
    rates = warmup_hold_cosine(options.steps, options.lr)

    @partial(jax.jit, donate_argnums=0)
    def many(states: TrainState, batches: Batch, rates: jax.Array) -> tuple[TrainState, jax.Array]:
        def one(states: TrainState, given: tuple[Batch, jax.Array]) -> tuple[TrainState, jax.Array]:
            states, metrics = jax.vmap(step, in_axes=(0, 0, None))(states, *given)
            return states, metrics["ce"]

        return lax.scan(one, states, (batches, rates))

    losses, done, compiled = [], 0, {}
    for batches in _chunks(streams, options.steps, options.chunk):
        count = batches.ids.shape[0]
        given = states, batches, rates(np.arange(done, done + count))
        if count not in compiled:
            compiled[count] = many.lower(*given).compile()  # pyright: ignore
        states, ce = _finished(compiled[count], *given)
        done += count
        losses.append([float(value) for value in ce[-1]])
        print(f"{name}: step {done}, cross-entropy {np.mean(losses[-1]):.4f}, {time.monotonic() - began:.0f} s", flush=True)
    scores = _scores(states.params, make_eval_step(config, scored, fold), prepared, options)
    return Result(name, count_parameters(text_specs(config)), scores, losses, time.monotonic() - began)


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


def table(results: list[Result], options: Options) -> str:
    """The results in Markdown, with the command that gives them."""
    shape = f"{options.batch_size} rows of {options.length} tokens"
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(Options) if getattr(options, f.name) != f.default}
    said = lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else str(value)  # noqa: E731
    words = [f"--{name.replace('_', '-')} {said(value)}" for name, value in given.items()]
    lines = [
        f"`{options.preset}`, {options.steps:,} steps of {shape},"
        f" {options.seeds} seeds, {options.dtype}, on {jax.local_devices()[0].device_kind}. Held-out bits per byte.",
        "",
        "```",
        " ".join(["python -m bench.ablations", *words]),
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
    for name in ("steps", "seeds", "batch_size", "chunk"):
        if getattr(options, name) < 1:
            raise UserError(f"{name}: found {getattr(options, name)}, allowed is 1 or more; nearest is 1")
    config = preset(options.preset)
    prepared = prepare(options.data, config.vocab_size, options.length, config.document_alignment, cache_root())
    config, fold = fit_vocabulary(config, prepared.tokenizer)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for name in options.variants:
        results.append(run(name, config, fold, prepared, options))
        jax.clear_caches()
        write_text(options.out, table(results, options))
        write_text(options.out.with_suffix(".json"), json.dumps([dataclasses.asdict(r) for r in results], indent=1) + "\n")
    print(table(results, options), end="")


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
