"""Recall at 16 times the length trained on: rows of pairs, context extension by YaRN, sparse against dense selection.

Run: python -m bench.needles [--steps 800] [--long-steps 300] [--seeds 2] [--out FILE.json] ...

A model sees no text of its own, only pairs of a key and a value scattered in library text, each asked for at the row's end.
Documents grow from 64 tokens to a row; then rows are ``stretch`` times as long, as recipe `long` has them. Scored rows hold a
needle at each depth, asked for in random order. All seeds and rates are one batched program.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench import program
from dsv41.config import ModelConfig, preset, replace
from dsv41.errors import UserError
from dsv41.files import write_text
from dsv41.model import features
from dsv41.numerics import Policy
from dsv41.params import init_params, text_specs
from kernels_pallas import registry
from train.corpus import STDLIB
from train.data import Batch, prepare
from train.evaluate import dense_selection
from train.loop import fit_vocabulary
from train.losses import head_logits
from train.optim import make_optimizer, warmup_hold_cosine
from train.packing import targets_and_weights
from train.step import TrainState, make_gradients, make_update
from train.synthetic import pairs_row
from train.tokenizer import cache_root

_SHORTEST = 64  # tokens of a document at first


@dataclass(frozen=True)
class Options:
    """Trains models on pairs in short rows, extends them, and asks for needles in long rows."""

    preset: str = "toy"
    """A named configuration."""
    data: tuple[str, ...] = (STDLIB,)
    """Text to hide pairs in."""
    steps: int = 800
    """Steps on short rows."""
    long_steps: int = 300
    """Steps on long rows."""
    seeds: int = 2
    """Models of each rate."""
    lrs: tuple[float, ...] = (3e-3, 7.5e-3, 1.5e-2)
    """Peak learning rates."""
    batch_size: int = 16
    """Short rows a step, a multiple of stretch."""
    length: int = 256
    """Tokens of a short row."""
    stretch: int = 16
    """Length of a long row over that of a short one."""
    chunk: int = 25
    """Steps in one call."""
    depths: tuple[float, ...] = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
    """Where needles stand, 0 the beginning of a row and 1 its end."""
    rows: int = 64
    """Scored rows of each length."""
    out: Path = Path("bench/results/needles.json")
    """What was found."""


class Needles:
    """All of it; everything is compiled from the start, one program beside the other."""

    def __init__(self, options: Options):
        base = preset(options.preset)
        prepared = prepare(options.data, base.vocab_size, options.length, base.document_alignment, cache_root())
        base, fold = fit_vocabulary(base, prepared.tokenizer)
        self._options, self._fold, self._hay = options, jnp.asarray(fold, jnp.int32), prepared.train.ids.reshape(-1)
        self._held = prepared.heldout.ids.reshape(-1)
        self.long = options.length * options.stretch
        scaling = with_fields(base.rope_scaling, factor=options.stretch, original_max_position_embeddings=options.length)
        self.config = replace(base, rope_scaling=scaling, max_position_embeddings=max(base.max_position_embeddings, self.long))
        # Before its extension a model has no YaRN and no pool.
        plain = replace(self.config, rope_scaling=with_fields(scaling, factor=1))
        self._compilers = ThreadPoolExecutor()
        self._drawn = self._compilers.submit(self._draw)
        self._shapes = jax.eval_shape(self._initial, self._seeds)
        self._short = self._program(plain, Policy(candidate_pool=False), options.length)
        self._extended = self._program(self.config, Policy(remat="attention"), self.long)
        self._answers = {
            "sparse": self._asked(self.config),
            "dense": self._asked(dense_selection(self.config, self.long)),
        }

    @property
    def _seeds(self) -> np.ndarray:
        return np.tile(np.arange(self._options.seeds), len(self._options.lrs))

    def _initial(self, seeds: Any) -> TrainState:
        rule = make_optimizer(text_specs(self.config), lambda _: jnp.float32(0))

        def one(seed: Any) -> TrainState:
            params = init_params(self.config, jax.random.key(seed))
            return TrainState(params, rule.init(params), jnp.zeros((), jnp.int32))

        return jax.vmap(one)(seeds)

    def _draw(self) -> TrainState:
        with jax.default_device(jax.devices("cpu")[0]):
            return jax.device_get(jax.jit(self._initial)(self._seeds))

    def _compiled(self, function: Any, *args: Any) -> Future[Any]:
        # Kernels have no batched form.
        with registry.automatic("reference"):
            lowered = function.lower(*jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args))
        return self._compilers.submit(lowered.compile)

    def _program(self, config: ModelConfig, policy: Policy, length: int) -> Future[Any]:
        copies = len(self._options.lrs)
        gradients = jax.vmap(make_gradients(config, policy, self._fold))
        update = jax.vmap(make_update(config, policy))

        def one(states: TrainState, given: tuple[Batch, jax.Array]) -> tuple[TrainState, jax.Array]:
            batch = jax.tree.map(lambda a: jnp.concatenate([a] * copies), given[0])
            states, metrics = update(states, *gradients(states.params, batch), given[1])
            return states, metrics["ce"]

        many = jax.jit(lambda states, *given: lax.scan(one, states, given), donate_argnums=0)
        batches = self._batches(0, self._options.chunk, length, [length])
        return self._compiled(many, self._shapes, batches, np.zeros((self._options.chunk, len(self._seeds)), np.float32))

    def _asked(self, config: ModelConfig) -> Future[Any]:
        """``(params, ids, segments, at) -> the likeliest next ids at places``, one row of one model at a time."""

        def one(params: Any, row: tuple[jax.Array, ...]) -> jax.Array:
            ids, segments, at = row
            hidden = features(params, config, Policy(), ids[None], segments[None], self._fold).hidden[0]
            return jnp.argmax(head_logits(hidden[at], params.head), axis=-1)

        def every(params: Any, *rows: jax.Array) -> jax.Array:
            return lax.map(lambda one_model: lax.map(lambda row: one(one_model, row), rows), params)

        ids = np.zeros((self._options.rows, self.long), np.int32)
        return self._compiled(jax.jit(every), self._shapes.params, ids, ids, ids[:, : self._places])

    @property
    def _places(self) -> int:
        return 2 * len(self._options.depths) * self._options.stretch

    def _row(self, rng: np.random.Generator, length: int, size: int, hay: np.ndarray, depths: Any = None) -> tuple[Any, ...]:
        """ids, segments and weights of a row of documents of ``size`` tokens, and where in ids each answer begins."""
        ids, segments, weights, at = [], [], [], []
        for n in range(length // size):
            text = np.take(hay, np.arange(size) + rng.integers(len(hay)), mode="wrap")
            where = rng.random(min(size // 16, 64)) if depths is None else np.asarray(depths)
            row, answers = pairs_row(text, size, self.config.vocab_size, where, rng)
            ids.append(row)
            segments.append(np.full(size, n + 1, np.int32))
            weight = np.zeros(size, np.float32)
            weight[answers.reshape(-1) - 1] = 1.0
            weights.append(weight)
            at.append(answers + n * size)
        return np.concatenate(ids), np.concatenate(segments), np.concatenate(weights), np.stack(at)

    def _batches(self, start: int, stop: int, length: int, sizes: list[int]) -> Batch:
        """Of steps ``start`` to ``stop - 1`` and all seeds, ``[steps, seeds, B, T]``; a row's documents are of one of sizes."""
        rows, options = self._options.batch_size * self._options.length // length, self._options
        made = []
        for step in range(start, stop):
            for seed in range(options.seeds):
                rng = np.random.default_rng((seed, step, length))
                made += [self._row(rng, length, int(rng.choice(sizes)), self._hay)[:3] for _ in range(rows)]
        shape = stop - start, options.seeds, rows, length
        ids, segments, weights = (np.stack(parts) for parts in zip(*made, strict=True))
        targets, allowed = targets_and_weights(ids, segments)
        return Batch(*(a.reshape(shape) for a in (ids, segments, targets, allowed * weights)))

    def _calls(self, steps: int, length: int, sizes: Any) -> Iterator[tuple[int, Batch]]:
        """Batches of a call and the step that it starts with, made while the call before it runs."""
        size = self._options.chunk
        with ThreadPoolExecutor(1) as ahead:
            make = lambda first: ahead.submit(self._batches, first, first + size, length, sizes(first / steps))  # noqa: E731
            coming = make(0)
            for first in range(0, steps, size):
                batches, coming = coming.result(), make(first + size)
                yield first, batches

    def train(self) -> Iterator[tuple[str, Any, np.ndarray]]:
        """The phase, its states and losses ``[calls, models]``, after each of both phases."""
        options, began = self._options, time.monotonic()
        states, total = jax.device_put(self._drawn.result()), options.steps + options.long_steps
        rates = np.repeat([[1.0]], total, axis=0) * np.repeat(options.lrs, options.seeds)[None]
        rates = rates * np.asarray(warmup_hold_cosine(total, 1.0)(np.arange(total)))[:, None]
        whole = [size for size in (_SHORTEST << n for n in range(20)) if size <= options.length]
        # A document more of the next size every sixth of the way, and all sizes in the second half.
        growing = lambda done: whole[: 1 + int(6 * done)]  # noqa: E731
        for name, compiled, first, steps, length, sizes in (
            ("short", self._short, 0, options.steps, options.length, growing),
            ("long", self._extended, options.steps, options.long_steps, self.long, lambda _: [options.length, self.long]),
        ):
            losses = []
            for start, batches in self._calls(steps, length, sizes):
                given = batches, rates[first + start : first + start + options.chunk].astype(np.float32)
                states, ce = jax.block_until_ready(compiled.result()(states, *given))
                losses.append(np.asarray(ce[-1]))
                means = ", ".join(f"{loss:.3f}" for loss in losses[-1])
                print(f"{name}: step {start + options.chunk}, loss {means}, {time.monotonic() - began:.0f} s", flush=True)
            yield name, states, np.array(losses)

    def accuracy(self, params: Any, selection: str, size: int) -> np.ndarray:
        """Share of needles whose whole value is the likeliest, ``[models, depths]``, in documents of ``size`` tokens."""
        options = self._options
        rng = np.random.default_rng(size)
        made = [self._row(rng, self.long, size, self._held, options.depths) for _ in range(options.rows)]
        ids, segments, at = (np.stack([row[n] for row in made]) for n in (0, 1, 3))
        told = at.reshape(options.rows, -1) - 1
        padded = np.pad(told, ((0, 0), (0, self._places - told.shape[1]))).astype(np.int32)
        got = np.asarray(self._answers[selection].result()(params, ids, segments.astype(np.int32), padded))
        right = got[:, :, : told.shape[1]] == np.take_along_axis(ids, told + 1, axis=1)[None]
        return right.reshape(len(got), options.rows, *at.shape[1:]).all(axis=-1).mean(axis=(1, 2))


def main(options: Options) -> None:
    """Trains, scores and writes."""
    least = 2 * _SHORTEST
    if options.length < least or options.length & (options.length - 1):
        raise UserError(f"length: found {options.length}, allowed is a power of two from {least}; nearest is {least}")
    if options.batch_size % options.stretch:
        raise UserError(f"batch_size: found {options.batch_size}, allowed is a multiple of {options.stretch}")
    for name in ("steps", "long_steps"):
        if getattr(options, name) % options.chunk or getattr(options, name) < options.chunk:
            raise UserError(f"{name}: found {getattr(options, name)}, allowed is a multiple of chunk, {options.chunk}")
    run(Needles(options), options)


def run(needles: Needles, options: Options) -> None:
    """Trains and scores, and writes what there is after each score."""
    found: dict[str, Any] = {"options": {**asdict(options), "out": None}, "device": jax.local_devices()[0].device_kind}
    models = [{"lr": lr, "seed": seed} for lr in options.lrs for seed in range(options.seeds)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    states: Any = None
    for phase, trained, losses in needles.train():
        states = trained
        found |= {"models": models, f"losses.{phase}": losses.tolist()}
        write_text(options.out, json.dumps(found, indent=1) + "\n")
    for selection, size in (("sparse", needles.long), ("dense", needles.long), ("sparse", options.length)):
        accuracy = needles.accuracy(states.params, selection, size)
        found[f"accuracy.{selection}.{size}"] = accuracy.tolist()
        print(selection, size, np.round(accuracy, 2).tolist(), flush=True)
        write_text(options.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    program.run(main, Options)
