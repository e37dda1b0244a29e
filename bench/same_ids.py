"""Greedy decode through the kernels and through the reference, on this machine's accelerator: are the ids the same?

Prefill and decode run over the packed cache twice, once with every op on its reference. A step's logits differ in rounding, and
where two tokens are nearer to each other than that, or a stored code or a selected entry changes over, so may the rest of the
text: beside the ids of both runs, the kernels are fed the reference's ids (forced), and the logits of each step compared. Random
weights know no next token, so every step is such a place: the slice first learns two rows by heart.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bench import program
from dsv41.cache import init_cache
from dsv41.config import ModelConfig, preset
from dsv41.errors import UserError
from dsv41.files import write_text
from dsv41.model import extend, forward
from dsv41.numerics import Policy
from dsv41.params import init_params
from infer.model import load_model
from kernels_pallas import registry
from kernels_pallas.registry import Impl

STEPS = 24
_CHUNK = 256
_PROMPT = 1280


@dataclass(frozen=True)
class Found:
    """steps ``B x T``; same: ids equal in free runs; forced: with the reference's history; logits: their largest difference over
    the largest logit; margin: least distance of the reference's best two logits, in the same measure, where the forced ids
    differ, None where they do not."""

    name: str
    dtype: str
    ids: int
    same: int
    forced: int
    logits: float
    margin: float | None


class Decoder:
    """Prefill in chunks and greedy steps with one choice of implementations, for prompts ``[batch, length]``."""

    def __init__(self, params: Any, config: ModelConfig, policy: Policy, fold: Any, impl: Impl, batch: int, length: int):
        """params: arrays or their shapes."""

        def step(params: Any, cache: Any, ids: jax.Array) -> tuple[jax.Array, Any]:
            with registry.automatic(impl):
                logits, cache = extend(params, config, policy, cache, ids, jnp.ones(ids.shape, bool), fold)
            return logits, cache

        self._empty = lambda: init_cache(config, policy, batch, length + STEPS)
        self._starts = range(0, length, _CHUNK)
        widths = {1, *(min(_CHUNK, length - start) for start in self._starts)}
        ids = {width: jax.ShapeDtypeStruct((batch, width), jnp.int32) for width in widths}
        cache = jax.eval_shape(self._empty)
        self._lowered = {width: jax.jit(step, donate_argnums=1).lower(params, cache, ids[width]) for width in widths}

    def compile(self) -> None:
        self._steps = {width: lowered.compile() for width, lowered in self._lowered.items()}

    def run(self, params: Any, prompts: np.ndarray, forced: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Ids ``[B, STEPS]`` and logits ``[B, STEPS, V]`` after prompts ``[B, T]``; forced: ids to go on with instead."""
        cache = self._empty()
        ids, logits = jnp.asarray(prompts), jnp.zeros(())
        for start in self._starts:
            chunk = ids[:, start : start + _CHUNK]
            logits, cache = self._steps[chunk.shape[1]](params, cache, chunk)
        found, seen = [], []
        for number in range(STEPS):
            seen.append(np.asarray(logits, np.float32))
            found.append(np.argmax(seen[-1], axis=-1).astype(np.int32))
            after = found[-1] if forced is None else forced[:, number]
            logits, cache = self._steps[1](params, cache, jnp.asarray(after)[:, None])
        return np.stack(found, axis=1), np.stack(seen, axis=1)


class Comparison:
    """Both runs of one model in one dtype. params: arrays or their shapes."""

    def __init__(self, name: str, params: Any, config: ModelConfig, fold: Any, prompts: np.ndarray, dtype: Any):
        policy = Policy(dtype, quantize_main_kv=True, quantize_index=True, quantize_window=True)
        self._name, self._dtype, self._prompts = name, jnp.dtype(dtype).name, prompts
        fold = jnp.asarray(fold, jnp.int32)
        impls: tuple[Impl, ...] = ("reference", "auto")
        self.decoders = [Decoder(params, config, policy, fold, impl, *prompts.shape) for impl in impls]

    def run(self, params: Any) -> Found:
        plain, kernels = self.decoders
        want, logits = plain.run(params, self._prompts)
        free, _ = kernels.run(params, self._prompts)
        forced, got = kernels.run(params, self._prompts, want)
        largest = np.abs(logits).max()
        best = np.sort(logits, axis=-1)
        gaps = (best[..., -1] - best[..., -2])[forced != want] / largest
        margin = float(gaps.min()) if gaps.size else None
        same, agree = int((free == want).sum()), int((forced == want).sum())
        return Found(self._name, self._dtype, want.size, same, agree, float(np.abs(got - logits).max() / largest), margin)


class Lesson:
    """A training step that learns ``rows`` ``[B, T]`` by heart.

    The rows' ids are few and drawn at random, so that a next id follows from several before it: attention has to find them.
    """

    def __init__(self, config: ModelConfig, rows: jax.Array, fold: jax.Array):
        policy = Policy(jnp.bfloat16, quantize_main_kv=True, quantize_index=True, quantize_window=True)
        self._rule = optax.adam(optax.schedules.warmup_constant_schedule(0.0, 2e-4, 20))
        self._init = jax.jit(lambda: init_params(config, jax.random.key(0)))

        def loss(params: Any) -> jax.Array:
            logits = forward(params, config, policy, rows[:, :-1], None, fold).logits
            with jax.numpy_dtype_promotion("standard"):
                return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]))

        def step(params: Any, state: Any) -> tuple[Any, Any, jax.Array]:
            value, grads = jax.value_and_grad(loss, allow_int=True)(params)
            grads = jax.tree.map(lambda g, p: g if g.dtype == p.dtype else jnp.zeros_like(p), grads, params)
            with jax.numpy_dtype_promotion("standard"):
                updates, state = self._rule.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        self.params = jax.eval_shape(self._init)
        self._lowered = jax.jit(step, donate_argnums=(0, 1)).lower(self.params, jax.eval_shape(self._rule.init, self.params))

    def compile(self) -> None:
        self._step = self._lowered.compile()

    def learn(self, steps: int = 300, enough: float = 0.05) -> tuple[Any, float]:
        """Weights and their mean cross-entropy in nats: steps until it is ``enough``."""
        params, value = self._init(), float("inf")
        state = self._rule.init(params)
        for number in range(steps):
            params, state, found = self._step(params, state)
            if number % 20 == 19:
                value = float(found)
                print(f"step {number + 1}: {value:.4f} nats", flush=True)
                if value < enough:
                    break
        return params, value


def compile_all(programs: list[Any]) -> None:
    """Side by side: a program of the slice takes minutes."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.compile(), programs))


def main(run: Path | None, out: Path | None) -> None:
    """``run``: the folder of a trained run, compared beside the slice; ``out``: JSON."""
    if jax.default_backend() == "cpu":
        raise UserError("backend: found cpu, allowed is gpu or tpu: here both runs are the reference")
    random, found = np.random.default_rng(0), []
    device = program.device()

    def keep(one: Found) -> None:
        found.append(one)
        print(one, flush=True)
        if out is not None:
            write_text(out, json.dumps({"device": device, "results": [vars(f) for f in found]}, indent=1) + "\n")

    if run is not None:
        model = load_model(run)
        prompts = random.integers(3, model.config.vocab_size, (8, 96)).astype(np.int32)
        for dtype in (jnp.float32, jnp.bfloat16):
            toy = Comparison(f"trained, {run.name}", model.params, model.config, model.token_map, prompts, dtype)
            compile_all(toy.decoders)
            keep(toy.run(model.params))
    config = preset("slice")
    rows = random.integers(3, 67, (2, _PROMPT + STEPS)).astype(np.int32)
    fold = np.arange(config.vocab_size, dtype=np.int32)
    lesson = Lesson(config, jnp.asarray(rows), jnp.asarray(fold))
    kinds = [Comparison("slice", lesson.params, config, fold, rows[:, :_PROMPT], dtype) for dtype in (jnp.float32, jnp.bfloat16)]
    compile_all([lesson, *(decoder for kind in kinds for decoder in kind.decoders)])
    params, nats = lesson.learn()
    for kind in kinds:
        keep(replace(kind.run(params), name=f"slice, {nats:.3f} nats"))


if __name__ == "__main__":
    words = [Path(word) for word in sys.argv[1:]]
    main(words[1] if len(words) > 1 else None, words[0] if words else None)
