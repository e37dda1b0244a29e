"""Rounds of speculation for a batch: which drafts are verified is decided here, between two steps of the device."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.cache import Cache
from dsv41.config import ModelConfig
from dsv41.numerics import Policy
from infer.sampling import SamplingRows
from infer.schedule import Drafting, Rate, choose_lengths, rate_of
from infer.speculate import Ahead, Verified, look_ahead, verify

_TIMED = 3  # runs of each width, of which the median counts
Call = Callable[..., Any]


def widths(config: ModelConfig) -> tuple[int, ...]:
    """Tokens a row of the steps that are compiled: a few, the last token and all drafts the widest."""
    most = config.dspark_block_size + 1
    return (*(width for width in (2, 4) if width < most), max(most, 2))


def programs(config: ModelConfig, policy: Policy, fold: jax.Array) -> dict[str, Callable]:
    """By name, each of ``(weights, cache, token, ...)`` with weights of the model and the drafter."""

    def round_of(width: int, weights: Any, *args: Any) -> tuple[Verified, Cache, Ahead]:
        """`verify`, and drafts of what follows."""
        params, drafter = weights
        done, cache = verify(params, drafter, config, policy, fold, *args, width=width)
        rows = args[-1]
        return done, cache, look_ahead(params, drafter, config, policy, cache, done.last, done.left > 0, rows)

    def ahead(weights: Any, *args: Any) -> Ahead:
        params, drafter = weights
        return look_ahead(params, drafter, config, policy, *args)

    return {"draft": ahead, **{f"verify {width}": partial(round_of, width) for width in widths(config)}}


class Rounds:
    """One batch's. call: runs a program of `programs` by name, as ``call(name, *args)`` without the weights."""

    def __init__(self, drafting: Drafting, config: ModelConfig, call: Call):
        self._drafting, self._widths, self._call = drafting, widths(config), call
        self._ahead: Any = None
        self._seconds: dict[int, float] = {}
        self.drafted = self.accepted = self.count = 0

    def step(
        self, cache: Cache, tokens: jax.Array, left: np.ndarray, ends: jax.Array, rows: SamplingRows
    ) -> tuple[np.ndarray, np.ndarray, Cache, jax.Array]:
        """A round: new tokens and their log-probabilities ``[n, B]``, -1 behind a row's last; the cache; the last tokens.

        cache: donated. left: tokens that each row still wants.
        """
        live = left > 0
        if self._ahead is None:
            self._ahead = self._call("draft", cache, tokens, jnp.asarray(live), rows)
        if self._drafting.mode == "scheduled" and not self._seconds:
            self._measure(cache, tokens, ends, rows)
        wanted = self._lengths(np.asarray(self._ahead.confidence), live)
        width = next(w for w in self._widths if w > int(wanted.max()))
        # A draft behind the last wanted token would be for nothing.
        lengths = np.minimum(wanted, np.maximum(left - 1, 0)).astype(np.int32)
        args = tokens, self._ahead, jnp.asarray(lengths), jnp.asarray(left), ends, rows
        done, cache, self._ahead = self._call(f"verify {width}", cache, *args)
        self.drafted, self.accepted = self.drafted + int(lengths.sum()), self.accepted + int(np.asarray(done.accepted).sum())
        self.count += int(live.sum())
        return np.asarray(done.tokens).T, np.asarray(done.logprobs).T, cache, done.last

    def _lengths(self, confidence: np.ndarray, live: np.ndarray) -> np.ndarray:
        rate: Rate = rate_of(self._seconds, max(int(live.sum()), 1)) if self._seconds else lambda tokens: 1.0
        return choose_lengths(self._drafting, confidence, live, rate)

    def _measure(self, cache: Cache, tokens: jax.Array, ends: jax.Array, rows: SamplingRows) -> None:
        """Seconds of a round by its width, on this batch: the curve that the scheduler weighs drafts by."""
        batch = tokens.shape[0]
        for width in self._widths:
            took = []
            lengths = jnp.full((batch,), width - 1, jnp.int32)
            for n in range(_TIMED + 1):
                # A copy: the cache is donated.
                args = jax.tree.map(jnp.copy, cache), tokens, self._ahead, lengths, lengths + 1, ends, rows
                jax.block_until_ready(args)
                began = time.perf_counter()
                jax.block_until_ready(self._call(f"verify {width}", *args, timed=False))
                took += [time.perf_counter() - began] if n else []
            self._seconds[width] = float(np.median(took))
