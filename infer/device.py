"""The device's side of the engine: the cache of all slots over one pool of pages, and steps of a few shapes that change it."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.cache import Cache
from dsv41.errors import UserError
from dsv41.numerics import Policy
from dsv41.plan import layer_plans
from dsv41.pool import bind, init_pool, slot_of, tails, unbind, with_slot
from dsv41.prefill import Restored
from infer.model import Model
from infer.prefix import NO_HIT, Hit
from infer.sampling import Sampling, SamplingRows, sampling_rows
from infer.steps import BLOCK, DecoderReplay, Drawn, Steps, chunk_width

ENDS = 16  # end tokens of a slot that the device looks for; the host looks for all
_TABLES = 4  # each width of a table is so many times the one before


class Device:
    """Slots, their cache and their steps. A program is compiled for each chunk width and table width, which are few.

    pages: of the pool, page 0 not counted; page: tokens of each, a multiple of every ratio; longest: tokens that a request may
    have. behind: whether prompts may begin with restored ones. A step that raises leaves no cache behind: `reset` makes an
    empty one.
    """

    def __init__(
        self,
        model: Model,
        policy: Policy,
        decoder_replay: DecoderReplay,
        slots: int,
        pages: int,
        page: int,
        longest: int,
        chunks: tuple[int, ...],
        likeliest: int,
        behind: bool = False,
    ):
        for plan in layer_plans(model.config):
            if page < 1 or (plan.owns_kv and page % plan.ratio):
                raise UserError(f"page: found {page}, allowed is a positive multiple of {max(plan.ratio, 1)}")
        self.params, self.page, self.slots, self.chunks = model.params, page, slots, chunks
        self.pad = model.config.pad_token_id
        self.widths = [-(-longest // page)]
        while self.widths[0] > 1:
            self.widths.insert(0, -(-self.widths[0] // _TABLES))
        self.steps = steps = Steps(model, policy, decoder_replay, likeliest)
        self._init = jax.jit(partial(init_pool, model.config, policy, slots, 1 + pages, page))

        def fill(
            early: bool,
            params: Any,
            cache: Cache,
            slot: jax.Array,
            fresh: jax.Array,
            table: jax.Array,
            ids: jax.Array,
            live: jax.Array,
            end: jax.Array,
            rows: SamplingRows,
            asked: jax.Array,
            restored: Restored | None = None,
            start: jax.Array | None = None,
            history: jax.Array | None = None,
        ) -> tuple[Drawn, Cache]:
            one = slot_of(cache, slot, fresh)
            if start is not None and history is not None:
                length = jnp.where(fresh, start, one.length)
                one = replace(one, length=length, history=jnp.where(fresh, history, one.history))
            logits, one = steps.fill(params, bind(one, table), ids, live, end, early, restored)
            drawn = Drawn.none((1,), steps.likeliest) if early else steps.draw(logits, one.length, rows, asked)
            return drawn, with_slot(cache, slot, unbind(one))

        def decode(params: Any, cache: Cache, table: jax.Array, *args: Any) -> tuple[Drawn, Cache]:
            drawn, cache, _ = steps.decode(params, bind(cache, table), *args)
            return drawn, unbind(cache)

        self._programs: dict[str, Any] = {
            "encode": jax.jit(partial(fill, True), donate_argnums=1),
            "prefill": jax.jit(partial(fill, False), donate_argnums=1),
            "decode": jax.jit(decode, donate_argnums=1),
        }
        if behind:
            self._programs["encode_behind"] = jax.jit(partial(fill, True), donate_argnums=1)
            self._programs["prefill_behind"] = jax.jit(partial(fill, False), donate_argnums=1)
        self._take_windows = jax.jit(_windows_of)
        self._put_windows = jax.jit(_with_windows, donate_argnums=0)
        self._depth = model.config.engram_max_ngram_size - 1 if model.config.engram_layer_ids else 0
        self.reset()

    def reset(self) -> None:
        """An empty cache in all slots."""
        # On its device from the start, or the first step would be compiled once more for the cache that it returns.
        self.cache = jax.device_put(self._init(), jax.devices()[0])

    def compiled(self) -> int:
        """How many programs there are."""
        return sum(program._cache_size() for program in self._programs.values())

    def _table(self, pages: list[list[int]]) -> np.ndarray:
        width = next(w for w in self.widths if w >= max(map(len, pages), default=0))
        table = np.zeros((len(pages), width), np.int32)
        for row, own in zip(table, pages, strict=True):
            row[: len(own)] = own
        return table

    def fill(
        self,
        slot: int,
        prompt: list[int],
        at: int,
        pages: list[int],
        sampling: Sampling,
        asked: bool,
        hit: Hit = NO_HIT,
        history: np.ndarray | None = None,
    ) -> tuple[int, Drawn]:
        """Runs the chunk of a slot's prompt from ``at`` on: where it ends, and what was drawn ``[1]`` if the prompt does.

        The chunks of a prompt and their shapes do not depend on what else there is to do. hit: where the prompt begins, whose
        blocks and windows are in place; history: before its start.
        """
        width = chunk_width(len(prompt) - at, self.chunks)
        part = prompt[at : at + width]
        ids, live = np.full((1, width), self.pad, np.int32), np.zeros((1, width), bool)
        ids[0, : len(part)], live[0, : len(part)] = part, True
        kind = "encode" if self.steps.early(at + width, len(prompt), hit.kept > 0) else "prefill"
        more = self._behind(hit, history) if hit.kept else ()
        table = self._table([pages[: -(-len(prompt) // self.page)]])
        end = np.asarray([len(prompt)], np.int32)
        fresh = np.bool(at == hit.start)
        args = np.int32(slot), fresh, table, ids, live, end, sampling_rows([sampling]), np.bool(asked), *more
        drawn, self.cache = self._programs[f"{kind}_behind" if more else kind](self.params, self.cache, *args)
        return at + len(part), jax.device_get(drawn)

    def _behind(self, hit: Hit, history: np.ndarray | None) -> tuple:
        one = lambda n: np.asarray([n], np.int32)  # noqa: E731
        before = np.full(self._depth, -1, np.int32) if history is None else history
        return Restored(one(hit.kept), one(hit.floor)), one(hit.start), before[None]

    def length(self, slot: int) -> int:
        """Tokens that a slot's cache has consumed."""
        # On the host: an index into an array of the device is a program of its own.
        return int(np.asarray(self.cache.length)[slot])

    def windows(self, slot: int) -> Any:
        """A copy on the host of a slot's windows and pair tails."""
        return jax.device_get(self._take_windows(self.cache, np.int32(slot)))

    def put_windows(self, slot: int, windows: Any) -> None:
        """Gives a slot what `windows` gave."""
        self.cache = self._put_windows(self.cache, np.int32(slot), windows)

    def decode(
        self,
        pages: list[list[int]],
        tokens: np.ndarray,
        left: np.ndarray,
        ends: np.ndarray,
        samplings: list[Sampling],
        steps: int,
        given: np.ndarray,
        asked: bool,
    ) -> Drawn:
        """`Steps.decode` of all slots: what was drawn ``[BLOCK, slots]``."""
        args = tokens, left, ends, sampling_rows(samplings), np.int32(steps), given, np.bool(asked)
        drawn, self.cache = self._programs["decode"](self.params, self.cache, self._table(pages), *args)
        return jax.device_get(drawn)

    def warm_up(self) -> None:
        """Compiles every program by running it on nothing."""
        n, one = self.slots, sampling_rows([Sampling()])
        for width in self.widths:
            table, most = np.zeros((1, width), np.int32), width * self.page
            # What no prompt within so many pages comes to is left out.
            for shorter, chunk in zip((0, *self.chunks), self.chunks, strict=False):
                if shorter >= most:
                    break
                nothing = np.zeros((1, chunk), np.int32), np.zeros((1, chunk), bool), np.ones(1, np.int32)
                args = np.int32(0), np.bool(True), table, *nothing, one, np.bool(False)
                for end, more in (("", ()), ("_behind", self._behind(NO_HIT, None))):
                    for kind in ("encode", "prefill") if self.steps.early(chunk, most, bool(end)) else ("prefill",):
                        if (program := self._programs.get(kind + end)) is not None:
                            _, self.cache = program(self.params, self.cache, *args, *more)
            zeros, ends, given = np.zeros(n, np.int32), np.full((n, ENDS), -1, np.int32), np.full((BLOCK, n), -1, np.int32)
            args = zeros, zeros, ends, sampling_rows([Sampling()] * n), np.int32(1), given, np.bool(False)
            table = np.zeros((n, width), np.int32)
            _, self.cache = self._programs["decode"](self.params, self.cache, table, *args)
        jnp.asarray(self.cache.length).block_until_ready()


def _windows_of(cache: Cache, slot: jax.Array) -> Any:
    one = slot_of(cache, slot, jnp.zeros((), bool))
    return one.windows, [tails(source) for source in one.sources]


def _with_windows(cache: Cache, slot: jax.Array, state: Any) -> Cache:
    one = slot_of(cache, slot, jnp.zeros((), bool))
    windows, kept = state
    sources = tuple(replace(source, **own) for source, own in zip(one.sources, kept, strict=True))
    return with_slot(cache, slot, replace(one, windows=tuple(windows), sources=sources))
