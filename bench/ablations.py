"""Each mechanism of the recipe against going without it: held-out bits per byte at equal tokens, several seeds.

Run: python -m bench.ablations [--steps 2000] [--seeds 3] [--workers 1] [--out FILE.md] ...

All seeds of variants that have the same passes are one batched program, whatever their optimizers, and many steps one call of
it, so that a GPU is kept busy by models as small as the toy; so do workers, processes that share out such groups. A seed draws
the initial weights and the order of the rows; the rows are the same for all variants. Variants that train alike are trained once.
"""

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench import program
from dsv41.config import ModelConfig, preset
from dsv41.errors import UserError, nearest
from dsv41.files import write_text
from dsv41.numerics import PACKED, Policy
from dsv41.params import ParamSpec, Stored, count_parameters, init_params, map_specs, text_specs
from kernels_pallas import registry
from train.corpus import STDLIB
from train.curve import Score
from train.data import Batch, Prepared, TrainData, prepare, to_batch
from train.loop import fit_vocabulary
from train.optim import make_optimizer, warmup_hold_cosine
from train.packing import Packed
from train.recipes import DTYPES
from train.step import StepOptions, TrainState, make_eval_step, make_gradients, make_update
from train.tokenizer import cache_root

_PLAIN = Policy()


@dataclass(frozen=True)
class Numerics:
    """How a model is run: with which policy, and which stored forms of its weights."""

    policy: Policy = _PLAIN
    weights: tuple[Stored, ...] = ()


PLAIN, NO_POOL = Numerics(), Numerics(Policy(candidate_pool=False))
CACHE, RELEASED = Numerics(PACKED), Numerics(PACKED, ("fp4", "fp8", "fp8_rows"))


def _same(first: Any, *_: Any) -> Any:
    return first


# Where training changes over to `Variant.late`.
_LATE = 0.8


@dataclass(frozen=True)
class Variant:
    """What differs from the full recipe: the model, the owners of its weights, how it is trained and how it is scored.

    model takes the config and the length of a row. rate: a factor of the learning rate. late: how the last fifth of the steps
    is trained, where that differs.
    """

    says: str
    model: Callable[[ModelConfig, int], ModelConfig] = _same
    owner: Callable[[ParamSpec], ParamSpec] = _same
    rate: float = 1.0
    trained: Numerics = PLAIN
    late: Numerics | None = None
    scored: Numerics = PLAIN

    @property
    def passes(self) -> tuple[Any, ...]:
        """What decides the forward and the backward pass."""
        return self.model, self.trained

    @property
    def optimizer(self) -> tuple[Any, ...]:
        """What decides an update, given the gradient."""
        return self.owner, self.rate


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
    "adamw-low": Variant("the same at a third of its rate", owner=_adamw, rate=1 / 3),
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
    """The most steps in one call."""
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


class Group:
    """Variants of one model and one way of running it: their seeds train as one batch, of which each has its own optimizer.

    Everything is compiled from the start, one program beside the other. config: the full recipe's.
    """

    def __init__(
        self, names: tuple[str, ...], config: ModelConfig, fold: np.ndarray, prepared: Prepared, options: Options, chunk: int
    ):
        self.names, self._fold, self._prepared, self._options, self._chunk = names, fold, prepared, options, chunk
        variants = [VARIANTS[name] for name in names]
        self.config = variants[0].model(config, options.length)
        self._streams = [TrainData(prepared.train, options.batch_size, seed) for seed in range(options.seeds)]
        self._optimizers = list(dict.fromkeys(variant.optimizer for variant in variants))
        self._compilers = ThreadPoolExecutor()
        draw = jax.vmap(lambda seed: self._fresh(self._weights(seed)))
        self._shapes = jax.eval_shape(draw, np.arange(options.seeds))
        self._drawn = self._compilers.submit(self._draw)
        self._early = self._program(variants[0].trained, self._optimizers)
        scored = dict.fromkeys(variant.scored for variant in variants)
        self._scorers = {numerics: self._scorer(numerics) for numerics in scored}
        late = dict.fromkeys((v.late, v.optimizer) for v in variants if v.late is not None)
        self._late = {key: self._program(key[0], [key[1]]) for key in late}

    def _fresh(self, params: Any) -> tuple[TrainState, ...]:
        """The state of each optimizer before the first step."""
        specs = [map_specs(owner, text_specs(self.config)) for owner, _ in self._optimizers]
        rules = [make_optimizer(own, lambda _: jnp.float32(0)) for own in specs]
        return tuple(TrainState(params, rule.init(params), jnp.zeros((), jnp.int32)) for rule in rules)

    def _weights(self, seed: Any) -> Any:
        return init_params(self.config, jax.random.key(seed))

    def _draw(self) -> tuple[TrainState, ...]:
        """The initial states of all seeds; drawn on the host, where it compiles faster, and once for all optimizers."""
        with jax.default_device(jax.devices("cpu")[0]):
            params = jax.jit(jax.vmap(self._weights))(np.arange(self._options.seeds))
            return jax.device_get(jax.vmap(self._fresh)(params))

    def _program(self, numerics: Numerics, optimizers: list[tuple[Any, ...]]) -> Future[Any]:
        """A chunk of steps: ``(states, batches, rates) -> (states, cross-entropy [steps, optimizers, seeds])``."""
        config, seeds, steps = self.config, self._options.seeds, StepOptions(weights=numerics.weights)
        policy = _typed(numerics, self._options)
        gradients = jax.vmap(make_gradients(config, policy, self._fold, steps))
        updates = [make_update(config, policy, steps, map_specs(owner, text_specs(config))) for owner, _ in optimizers]
        join = lambda trees: jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)  # noqa: E731

        def one(states: tuple[TrainState, ...], given: tuple[Batch, jax.Array]) -> tuple[tuple[TrainState, ...], jax.Array]:
            batches, rate = given
            found = gradients(join([state.params for state in states]), join([batches] * len(states)))
            done = []
            for n, (state, update, (_, factor)) in enumerate(zip(states, updates, optimizers, strict=True)):
                own = jax.tree.map(lambda a, n=n: a[n * seeds : (n + 1) * seeds], found)
                done.append(jax.vmap(update, in_axes=(0, 0, 0, None))(state, own[0], own[1], rate * factor))
            return tuple(state for state, _ in done), jnp.stack([metrics["ce"] for _, metrics in done])

        many = jax.jit(lambda states, *given: lax.scan(one, states, given), donate_argnums=0)
        states = tuple(self._shapes[self._optimizers.index(optimizer)] for optimizer in optimizers)
        return self._compiled(many, states, self._batches(0, self._chunk), np.zeros(self._chunk, np.float32))

    def _scorer(self, numerics: Numerics) -> Future[Any]:
        step = make_eval_step(self.config, _typed(numerics, self._options), self._fold, numerics.weights)
        batch = to_batch(Packed(*(np.zeros((self._options.batch_size, self._options.length), np.int32) for _ in range(2))))
        return self._compiled(jax.jit(jax.vmap(step, in_axes=(0, None))), self._shapes[0].params, batch)

    def _compiled(self, function: Any, *args: Any) -> Future[Any]:
        # Kernels have no batched form.
        with registry.automatic("reference"):
            lowered = function.lower(*jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args))
        return self._compilers.submit(lowered.compile)

    def _batches(self, start: int, stop: int) -> Batch:
        """Of steps ``start`` to ``stop - 1`` and all seeds, ``[steps, seeds, B, T]``."""
        stack = lambda trees: jax.tree.map(lambda *leaves: np.stack(leaves), *trees)  # noqa: E731
        return stack([stack([stream.batch(n) for stream in self._streams]) for n in range(start, stop)])

    def step_seconds(self) -> float:
        """Of a step of all variants of the group that differ from the start, in chunks, the host's part left out."""
        given = self._batches(0, self._chunk), np.zeros(self._chunk, np.float32)
        program, spans = self._early.result(), []
        for _ in range(2):
            args = jax.block_until_ready(jax.device_put((self._drawn.result(), *given)))
            began = time.monotonic()
            jax.block_until_ready(program(*args))
            spans.append(time.monotonic() - began)
        return min(spans) / self._chunk

    def train(self, steps: int) -> Iterator[Result]:
        """Trains and scores every variant; ``steps`` and four fifths of it are multiples of the chunk."""
        began, rates = time.monotonic(), warmup_hold_cosine(steps, self._options.lr)
        change = round(_LATE * steps) if self._late else steps
        optimizers = [(optimizer, None) for optimizer in self._optimizers]
        states = jax.device_put(self._drawn.result())

        def go(program: Any, states: Any, start: int, stop: int, what: str) -> tuple[Any, np.ndarray]:
            losses = []
            for first in range(start, stop, self._chunk):
                after = first + self._chunk
                given = self._batches(first, after), np.asarray(rates(np.arange(first, after)), np.float32)
                states, ce = jax.block_until_ready(program(states, *given))
                losses.append(np.asarray(ce[-1]))
                means = ", ".join(f"{mean:.4f}" for mean in losses[-1].mean(axis=1))
                print(f"{what}: step {after}, cross-entropy {means}, {time.monotonic() - began:.0f} s", flush=True)
            return states, np.array(losses).reshape(-1, *np.shape(losses[0])[:1], self._options.seeds)

        done: dict[Any, tuple[TrainState, np.ndarray]] = {}
        states, early = go(self._early.result(), states, 0, change, self.names[0])
        kept = {key: jax.tree.map(jnp.copy, states[self._optimizers.index(key[1])]) for key in self._late}
        if change < steps:
            states, last = go(self._early.result(), states, change, steps, self.names[0])
        else:
            last = early[:0]
        for n, key in enumerate(optimizers):
            done[key] = states[n], np.concatenate([early[:, n], last[:, n]])
        yield from self._results(done, steps, began)
        for key, state in kept.items():
            name = next(name for name in self.names if VARIANTS[name].late == key[0])
            [state], losses = go(self._late[key].result(), (state,), change, steps, name)
            before = early[:, self._optimizers.index(key[1])]
            yield from self._results({(key[1], key[0]): (state, np.concatenate([before, losses[:, 0]]))}, steps, began)

    def _results(self, done: dict[Any, tuple[TrainState, np.ndarray]], steps: int, began: float) -> Iterator[Result]:
        size = count_parameters(text_specs(self.config))
        for name in self.names:
            variant = VARIANTS[name]
            if (found := done.get((variant.optimizer, variant.late))) is not None:
                scores = self._scores(found[0].params, self._scorers[variant.scored].result(), steps)
                yield Result(name, size, scores, found[1].tolist(), time.monotonic() - began)

    def _scores(self, params: Any, step: Any, steps: int) -> list[float]:
        rows, prepared = self._options.batch_size, self._prepared
        nats, held = np.zeros(self._options.seeds), prepared.heldout
        for start in range(0, len(held.ids), rows):
            some = Packed(*(a[start : start + rows] for a in held))
            short = rows - len(some.ids)
            some = Packed(*(np.pad(a, ((0, short), (0, 0))) for a in some))
            nats += np.asarray(step(params, to_batch(some))[0], np.float64)
        size = int(prepared.token_bytes[held.ids].sum())
        return [Score(steps, float(n), 0, size).bits_per_byte for n in nats]


def _typed(numerics: Numerics, options: Options) -> Policy:
    return replace(numerics.policy, compute_dtype=DTYPES[options.dtype])


def chunk_size(steps: int, most: int) -> int:
    """The most steps of one call, up to ``most``, such that calls end both where training changes and where it ends."""
    both = math.gcd(steps, round(_LATE * steps))
    return next(size for size in range(min(most, both), 0, -1) if both % size == 0)


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
        groups.setdefault(VARIANTS[name].passes, []).append(name)
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
        group = Group(names, config, fold, prepared, options, chunk_size(options.steps, options.chunk))
        for result in group.train(options.steps):
            results.append(result)
            _write(results, options)
        jax.clear_caches()
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
    program.run(main, Options)
