"""What bounded replay costs: how far its next tokens are from the exact ones, on held-out text, by length and place of the hit.

KL(exact || other) of the token after a prompt, and after some more tokens of the text behind it. Exact: every layer on every
token. Bounded: of a share of the prompt entries and keys are at hand; encoder layers run again on the last window before its end,
decoder layers on the prompt's last window (`dsv41.prefill`). Window: the prompt's last window is all there is.
Run: python -m bench.replay_quality --checkpoint RUN [--out FILE.json] [--figures FOLDER]
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import program
from dsv41.analyze.figures import Theme, axes_of, context_axis, legend_above, save
from dsv41.cache import Cache, init_cache
from dsv41.errors import UserError
from dsv41.files import check_outputs, write_text
from dsv41.model import extend
from dsv41.numerics import Policy
from dsv41.prefill import Restored, prefill, replay_start
from dsv41.restore import history_at
from infer.model import Model, load_model
from train.corpus import STDLIB
from train.data import prepare
from train.tokenizer import cache_root


@dataclass(frozen=True)
class Options:
    """Compares replays of a trained model on held-out text."""

    checkpoint: Path
    """The folder of a run."""
    data: tuple[str, ...] = (STDLIB,)
    """The text that the run was trained on, whose held-out part is asked."""
    lengths: tuple[int, ...] = (64, 128, 256, 448)
    """Of prompts, in tokens, multiples of the chunk."""
    shares: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Of a prompt, what is at hand."""
    more: int = 16
    """Tokens of the text behind each prompt after which the next one is compared too."""
    rows: int = 32
    """Prompts of each length, at most."""
    out: Path | None = None
    """Also write what was found to this JSON file."""
    figures: Path | None = None
    """Also draw replay-light.svg and replay-dark.svg into this folder."""


@dataclass(frozen=True)
class Found:
    """Mean KL in nats at the prompt's end and over all next tokens that were compared; ``kept`` tokens were at hand."""

    kind: str
    tokens: int
    share: float
    kept: int
    last: float
    mean: float


class Comparison:
    """Logits of a model behind prompts ``ids`` ``[B, T]`` by each kind of prefill, in chunks of a window; rows are float32."""

    def __init__(self, model: Model, ids: np.ndarray, more: int):
        self._params, self._config, self._ids, self._more = model.params, model.config, ids, more
        self._fold_map, fold = model.token_map, jnp.asarray(model.token_map, jnp.int32)
        self.window = window = model.config.sliding_window
        if more > window:
            raise UserError(f"more: found {more}, allowed is up to the window's {window}")
        config, policy = model.config, Policy()
        self._empty = lambda: init_cache(config, policy, len(ids), ids.shape[1] + window)

        def behind(params: Any, cache: Cache, ids: Any, live: Any, end: Any, restored: Restored | None) -> tuple:
            return prefill(params, config, policy, cache, ids, live, fold, end, window, restored=restored)

        self._every = jax.jit(lambda p, c, ids, live: extend(p, config, policy, c, ids, live, fold, every=True))
        self._behind = jax.jit(behind)

    def _chunks(self, first: int, end: int, step: Callable, cache: Cache) -> tuple[Any, Cache]:
        """Logits and cache behind tokens ``first`` to ``end - 1``, the last chunk padded."""
        out: Any = None
        for at in range(first, end, self.window):
            width = min(self.window, end - at)
            part = np.pad(self._ids[:, at : at + width], ((0, 0), (0, self.window - width)))
            live = np.broadcast_to(np.arange(self.window) < width, part.shape)
            out, cache = step(self._params, cache, part, live)
            out = out[:, :width] if out.ndim == 3 else out[:, None]
        return out, cache

    def _behind_prompt(self, end: int, logits: Any, cache: Cache) -> np.ndarray:
        """Log-probabilities behind a prompt and each of ``more`` tokens, ``[B, 1 + more, V]``."""
        later, _ = self._chunks(end, end + self._more, self._every, cache)
        return np.asarray(jax.nn.log_softmax(jnp.concatenate([logits[:, -1:], later], axis=1), axis=-1))

    def exact(self, end: int) -> tuple[np.ndarray, Cache]:
        """With every layer on every token; also the cache behind the prompt."""
        logits, cache = self._chunks(0, end, self._every, self._empty())
        return self._behind_prompt(end, logits, cache), cache

    def window_only(self, end: int) -> np.ndarray:
        """Of the last window alone."""
        logits, cache = self._chunks(max(end - self.window, 0), end, self._every, self._empty())
        return self._behind_prompt(end, logits, cache)

    def bounded(self, end: int, kept: int, known: Cache) -> np.ndarray:
        """Behind ``kept`` tokens whose entries and keys ``known`` has; what it has of windows is not read."""
        rows, restored, start = len(self._ids), None, 0
        cache = self._empty()
        if kept:
            start = replay_start(self._config, end, kept, False)
            restored = Restored(jnp.full((rows,), kept, jnp.int32), jnp.full((rows,), start, jnp.int32))
            past = np.stack([history_at(row.tolist(), start, self._fold_map, self._config) for row in self._ids])
            lost = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), known.windows)
            cache = replace(known, length=jnp.full((rows,), start, jnp.int32), history=jnp.asarray(past), windows=lost)
        ends = jnp.full((rows,), end, jnp.int32)
        step = lambda p, c, ids, live: self._behind(p, c, ids, live, ends, restored)  # noqa: E731
        return self._behind_prompt(end, *self._chunks(start, end, step, cache))


def measure(model: Model, ids: np.ndarray, options: Options) -> list[Found]:
    """Each kind at each length; bounded at each share too."""
    compare, found = Comparison(model, ids, options.more), []
    multiple = max(model.config.compress_ratios)
    for end in options.lengths:
        exact, known = compare.exact(end)

        def told(kind: str, share: float, kept: int, other: np.ndarray, exact: Any = exact, end: int = end) -> None:
            apart = np.sum(np.exp(exact) * (exact - other), axis=-1, dtype=np.float64)
            found.append(Found(kind, end, share, kept, float(apart[:, 0].mean()), float(apart.mean())))
            print(f"{kind:7} {end:5} tokens, {kept:5} at hand: {found[-1].last:.5f} nats, {found[-1].mean:.5f} on", flush=True)

        told("window", 0.0, 0, compare.window_only(end))
        for share in options.shares:
            kept = int(share * end) // multiple * multiple
            told("bounded", share, kept, compare.bounded(end, kept, known))
    return found


def draw(found: list[Found], theme: Theme) -> Any:
    """Mean KL by length: a line for the window alone and one for each share at hand."""
    lengths = sorted({one.tokens for one in found})
    with axes_of(theme) as axes:
        kinds = {(one.kind, one.share): None for one in found}
        for (kind, share), marker in zip(kinds, "osD^vP*X", strict=False):
            label = "last window only" if kind == "window" else f"bounded, {share:.0%} at hand"
            values = [next(o.mean for o in found if (o.kind, o.share, o.tokens) == (kind, share, n)) for n in lengths]
            axes.plot(lengths, values, marker=marker, label=label)
        context_axis(axes, lengths)
        axes.set_yscale("log")
        axes.set_xlabel("prompt (tokens)")
        axes.set_ylabel("mean KL of the next token (nats, log scale)")
        legend_above(axes, "Bounded replay against the exact result")
    return axes.figure


def held_out(model: Model, options: Options, length: int) -> np.ndarray:
    """Rows of ``length`` tokens of the text that the run did not see, int32 ``[B, length]``."""
    prepared = prepare(options.data, model.config.vocab_size, length, model.config.document_alignment, cache_root())
    if prepared.tokenizer.to_str() != model.tokenizer.to_str():
        raise UserError(f"data: found {' '.join(options.data)}, of which another tokenizer comes; allowed is the run's own text")
    return prepared.heldout.ids.reshape(-1, length)[: options.rows]


def main(options: Options) -> None:
    """Prints a line for each; writes ``out`` and the figures."""
    if options.out is not None:
        check_outputs({"out": options.out})
    model = load_model(options.checkpoint)
    window, room = model.config.sliding_window, max(options.lengths) + options.more
    for length in options.lengths:
        if length < window or length % window:
            raise UserError(f"lengths: found {length}, allowed are multiples of the window's {window} tokens")
    ids = held_out(model, options, -(-room // window) * window)
    found = measure(model, ids, options)
    if options.out is not None:
        facts = {"device": program.device(), "step": model.step, "prompts": len(ids), "window": window, "more": options.more}
        write_text(options.out, json.dumps({**facts, "results": [asdict(one) for one in found]}, indent=1) + "\n")
    if options.figures is not None:
        for theme in ("light", "dark"):
            save(draw(found, theme), options.figures / f"replay-{theme}.svg")


if __name__ == "__main__":
    program.run(main, Options)
