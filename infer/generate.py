"""Batched generation through the packed cache: prefill in chunks, then decode steps for all requests at once.

Steps run in blocks on the device, so that the host is asked once for several tokens; it ends a request at a stop string
and drops what the block made past it.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dsv41.cache import Cache, cache_bytes, capacity, init_cache
from dsv41.config import ModelConfig
from dsv41.errors import UserError
from dsv41.numerics import Policy
from dsv41.prefill import Restored
from dsv41.sharding import ROWS
from infer.continuation import Continuation, check_prompt
from infer.model import Model, weight_parts
from infer.prefix import Hit, PrefixCache, lengths
from infer.rounds import Rounds, programs
from infer.sampling import Sampling, SamplingRows, sample, sampling_rows
from infer.schedule import NO_DRAFTS, Drafting
from infer.steps import CHUNKS, DecoderReplay, Steps, chunk_width

SMALLEST_CAPACITY = 64
OnText = Callable[[int, str], None]


@dataclass(frozen=True)
class Generation:
    """New token ids with their log-probabilities, and their text; ``finish``: an end token or stop string, or enough tokens.

    cached_tokens: of the prompt, those whose entries came out of a prefix cache.
    """

    ids: list[int]
    logprobs: list[float]
    text: str
    finish: Literal["stop", "length"]
    cached_tokens: int = 0


@dataclass
class Speed:
    """What a batch took: real tokens, seconds without compiling, and bytes of the cache.

    drafted, accepted: drafts that were verified and that stayed; rounds: verifications, each of one request.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_seconds: float = 0.0
    new_tokens: int = 0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0
    cache_bytes: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0

    def line(self) -> str:
        """One line for people."""
        rate = lambda n, s: f"{n / s:,.0f}" if s > 0 else "-"  # noqa: E731
        drafts = f"; accepted {self.accepted} of {self.drafted} drafts" if self.drafted else ""
        found = f"; found {self.cached_tokens} tokens in the prefix cache" if self.cached_tokens else ""
        return (
            f"prefill {self.prompt_tokens} tokens, {rate(self.prompt_tokens, self.prefill_seconds)} tokens/s;"
            f" decode {self.new_tokens} tokens, {rate(self.new_tokens, self.decode_seconds)} tokens/s;"
            f" cache {self.cache_bytes:,} bytes; compiled in {self.compile_seconds:.1f} s{drafts}{found}"
        )


def _bucket(n: int, smallest: int, multiple: int = 1) -> int:
    """The next power of two from ``smallest`` on, raised to a multiple."""
    return -(-max(smallest, 1 << (n - 1).bit_length()) // multiple) * multiple


def on_mesh(function: Any, kind: str, config: ModelConfig, mesh: Any) -> Any:
    """A program of the `Generator` for each device's rows of a batch; weights are cut as `Model.mesh` says."""
    weights = weight_parts(config, mesh)
    rows = PartitionSpec(ROWS)
    out = (PartitionSpec(None, ROWS), rows, rows) if kind == "decode" else rows

    def run(*args: Any) -> Any:
        ins = (rows if kind == "first" else weights, *(rows for _ in args[1:]))
        return jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=out, check_vma=False)(*args)

    return run


class Generator:
    """Continues prompts; programs are compiled once for each bucket of batch size, chunk width and cache capacity.

    decoder_replay: see `Steps`. prefix: of the same model, policy and replay; prompts begin with what it has, and leave their
    blocks in it; snapshots of windows are the engine's alone. drafting: how the model's drafter is used; its mode may be off.
    """

    def __init__(
        self,
        model: Model,
        policy: Policy | None = None,
        decoder_replay: DecoderReplay = "full",
        prefix: PrefixCache | None = None,
        drafting: Drafting = NO_DRAFTS,
    ):
        self.model, self.policy, self.prefix = model, policy or Policy(), prefix
        self.drafting = drafting
        if drafting.mode != "off" and model.draft is None:
            raise UserError(f"draft: found {drafting.mode!r} for a model without a drafter, allowed is 'off'")
        drafting.check(model.config)
        drafter = model.draft if drafting.mode != "off" else None
        self._weights: Any = model.params if drafter is None else (model.params, drafter)
        self.ends = {model.config.eos_token_id}
        self.programs: dict[tuple, Any] = {}
        steps = self._steps = Steps(model, self.policy, decoder_replay)

        def fill(
            early: bool,
            weights: Any,
            cache: Cache,
            ids: jax.Array,
            live: jax.Array,
            end: jax.Array,
            last: jax.Array,
            restored: Restored | None = None,
        ) -> tuple[jax.Array, Cache]:
            params = weights if drafter is None else weights[0]
            draft = None if drafter is None else weights[1]
            logits, cache = steps.fill(params, cache, ids, live, end, early, restored, draft)
            return jnp.where(jnp.any(live, axis=1)[:, None], logits, last), cache

        self._functions = {
            "encode": (partial(fill, True), 1),
            "prefill": (partial(fill, False), 1),
            "encode_behind": (partial(fill, True), 1),
            "prefill_behind": (partial(fill, False), 1),
            "decode": (steps.decode, 1),
            "first": (sample, ()),
        }
        if drafter is not None:
            for name, function in programs(model.config, self.policy, steps.fold).items():
                self._functions[name] = (function, () if name == "draft" else 1)

    def _call(self, speed: Speed, kind: str, key: tuple, *args: Any, timed: bool = True) -> Any:
        """Runs a program, compiled before the clock starts."""
        args = self._placed(args)
        if (kind, *key) not in self.programs:
            began = time.perf_counter()
            function, donated = self._functions[kind]
            if self.model.mesh is not None:
                function = on_mesh(function, kind, self.model.config, self.model.mesh)
            self.programs[kind, *key] = jax.jit(function, donate_argnums=donated).lower(*args).compile()
            speed.compile_seconds += time.perf_counter() - began
        began = time.perf_counter()
        out = jax.block_until_ready(self.programs[kind, *key](*args))
        spent = time.perf_counter() - began
        if not timed:
            return out
        if kind.startswith(("encode", "prefill")):
            speed.prefill_seconds += spent
        else:
            speed.decode_seconds += spent
        return out

    def _placed(self, args: tuple) -> tuple:
        """On a mesh each device's rows; weights are in place."""
        if (where := self.model.rows) is None:
            return args
        return tuple(arg if arg is self.model.params else jax.device_put(arg, where) for arg in args)

    def check(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> None:
        """Raises `UserError` for prompts (BOS included) that cannot be continued."""
        if not prompts:
            raise UserError("prompt: found none, allowed is one or more")
        for n, (ids, sampling) in enumerate(zip(prompts, samplings, strict=True), 1):
            check_prompt(ids, sampling, self.model.config, self.model.config.max_position_embeddings, f"prompt {n}")

    def generate(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], on_text: OnText | None = None
    ) -> tuple[list[Generation], Speed]:
        """Continues each prompt (ids, BOS included) by its own rules; ``on_text(n, piece)`` gets text as it becomes final.

        The outcome of a request does not depend on the others in the batch.
        """
        self.check(prompts, samplings)
        config, batch = self.model.config, _bucket(len(prompts), 1, self.model.row_parts)
        longest = max(len(ids) + s.max_new_tokens for ids, s in zip(prompts, samplings, strict=True))
        multiple = [r for r in config.compress_ratios if r] + ([self.prefix.block] if self.prefix else [])
        room = _bucket(longest, SMALLEST_CAPACITY, math.lcm(*multiple))
        speed = Speed()
        (cache,) = self._placed((init_cache(config, self.policy, batch, room, self.drafting.mode != "off"),))
        speed.cache_bytes = cache_bytes(cache)
        hits, cache = self._restore(prompts, cache)
        last, cache = self._prefill(prompts, cache, (batch, room), hits, speed)

        requests = [Continuation.begin(sampling, self.model.tokenizer) for sampling in samplings]
        rows = sampling_rows([*samplings, *[Sampling()] * (batch - len(prompts))])
        length = np.zeros(batch, np.int32)
        length[: len(prompts)] = [len(ids) for ids in prompts]
        tokens, logprobs = self._call(speed, "first", (batch,), last, jnp.asarray(length), rows)
        ends = self._ends(samplings, batch)
        left = np.zeros(batch, np.int32)
        new, said = np.asarray(tokens)[None], np.asarray(logprobs)[None]
        key = (batch, room, ends.shape[1])
        rounds = Rounds(
            self.drafting, config, lambda name, *args, **more: self._call(speed, name, key, self._weights, *args, **more)
        )
        run: Any = rounds.step if self.drafting.mode != "off" else partial(self._decode, speed, key)
        while True:
            self._account(requests, new, said, on_text)
            left[: len(requests)] = [0 if r.finish else r.sampling.max_new_tokens - len(r.ids) for r in requests]
            if not left.any():
                break
            new, said, cache, tokens = run(cache, tokens, left, ends, rows)
        speed.new_tokens = sum(len(request.ids) for request in requests)
        speed.drafted, speed.accepted, speed.rounds = rounds.drafted, rounds.accepted, rounds.count
        self._keep([[*ids, *r.ids[:-1]] for ids, r in zip(prompts, requests, strict=True)], cache, hits)
        done = [
            Generation(r.ids, r.logprobs, r.text, r.finish or "length", hit.kept) for r, hit in zip(requests, hits, strict=True)
        ]
        return done, speed

    def _decode(
        self, speed: Speed, key: tuple, cache: Cache, tokens: jax.Array, left: np.ndarray, ends: jax.Array, rows: SamplingRows
    ) -> tuple[np.ndarray, np.ndarray, Cache, jax.Array]:
        """A block of steps: new tokens and their log-probabilities ``[steps, B]``, the cache behind them, the last tokens."""
        args = self.model.params, cache, tokens, jnp.asarray(left), ends, rows
        drawn, cache, tokens = self._call(speed, "decode", key, *args)
        return np.asarray(drawn.tokens), np.asarray(drawn.logprobs), cache, tokens

    def _place(self, row: int, cache: Cache) -> int:
        """Number of a row's first block, see `dsv41.restore.take_blocks`."""
        assert self.prefix is not None
        return row * (capacity(cache, self.model.config) or 0) // self.prefix.block

    def _restore(self, prompts: Sequence[Sequence[int]], cache: Cache) -> tuple[list[Hit], Cache]:
        """Where each prompt goes on, and the cache with what is known of them."""
        prefix, hits = self.prefix, [Hit() for _ in prompts]
        if prefix is None:
            return hits, cache
        history = np.full(cache.history.shape, -1, np.int32)
        for row, ids in enumerate(prompts):
            keys = prefix.keys(ids)
            blocks = prefix.load(keys, ids)
            hits[row] = hit = prefix.hit(keys, ids, len(blocks), snapshots=False)
            if hit.kept:
                at = self._place(row, cache)
                cache = prefix.mover.put(cache, range(at, at + len(blocks)), blocks)
                history[row] = prefix.history(ids, hit)
        if any(hit.kept for hit in hits):
            cache = replace(cache, length=lengths(hits, "start", len(history)), history=jnp.asarray(history))
        return hits, cache

    def _keep(self, known: list[list[int]], cache: Cache, hits: list[Hit]) -> None:
        """Leaves the complete blocks of what each row holds in the prefix cache."""
        if (prefix := self.prefix) is None:
            return
        for row, (ids, hit) in enumerate(zip(known, hits, strict=True)):
            keys, first, at = prefix.keys(ids), hit.kept // prefix.block, self._place(row, cache)
            prefix.save(keys, ids, first, prefix.mover.take(cache, range(at + first, at + len(keys))))

    def _ends(self, samplings: Sequence[Sampling], batch: int) -> jax.Array:
        """Token ids that end each row, int32 ``[B, e]``, padded with -1."""
        rows = [sorted({*self.ends, *s.stop_ids}) for s in samplings]
        ends = np.full((batch, _bucket(max(map(len, rows)), 4)), -1, np.int32)
        for n, row in enumerate(rows):
            ends[n, : len(row)] = row
        return jnp.asarray(ends)

    def _account(self, requests: list[Continuation], tokens: np.ndarray, logprobs: np.ndarray, on_text: OnText | None) -> None:
        """Hands each running request its tokens of a block ``[steps, B]``; -1 where a row had already ended."""
        for n, request in enumerate(requests):
            said = ""
            for token, logprob in zip(tokens[:, n], logprobs[:, n], strict=True):
                if request.finish is None and token >= 0:
                    said += request.take(int(token), float(logprob), self.ends)
            if on_text is not None and said:
                on_text(n, said)

    def _prefill(
        self, prompts: Sequence[Sequence[int]], cache: Cache, shape: tuple[int, int], hits: list[Hit], speed: Speed
    ) -> tuple[jax.Array, Cache]:
        """Logits of each prompt's last token ``[B, V]``, and the cache behind the prompts."""
        rests = [ids[hit.start :] for ids, hit in zip(prompts, hits, strict=True)]
        batch, longest, at = shape[0], max(map(len, rests)), 0
        last = jnp.zeros((batch, self.model.config.vocab_size), jnp.float32)
        end = np.zeros((batch,), np.int32)
        end[: len(prompts)] = [len(ids) for ids in prompts]
        behind = any(hit.kept for hit in hits)
        restored = (Restored(lengths(hits, "kept", batch), lengths(hits, "floor", batch)),) if behind else ()
        while at < longest:
            width = chunk_width(longest - at, CHUNKS)
            ids = np.full((batch, width), self.model.config.pad_token_id, np.int32)
            live = np.zeros((batch, width), bool)
            for n, rest in enumerate(rests):
                part = rest[at : at + width]
                ids[n, : len(part)], live[n, : len(part)] = part, True
            args = self._weights, cache, jnp.asarray(ids), jnp.asarray(live), jnp.asarray(end), last, *restored
            kind = "encode" if self._steps.early(at + width, min(map(len, rests)), behind) else "prefill"
            last, cache = self._call(speed, f"{kind}_behind" if behind else kind, (*shape, width), *args)
            at += width
        speed.prompt_tokens = sum(map(len, rests))
        speed.cached_tokens = sum(hit.kept for hit in hits)
        return last, cache

    def encode(self, text: str, name: str = "prompt") -> list[int]:
        """See `Model.encode`."""
        return self.model.encode(text, name)
