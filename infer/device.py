"""The device's side of the engine: the cache of all slots over one pool of pages, and steps of a few shapes that change it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.cache import Cache
from dsv41.errors import UserError
from dsv41.numerics import Policy
from dsv41.plan import layer_plans
from dsv41.pool import bind, init_pool, slot_of, unbind, with_slot
from infer.model import Model
from infer.sampling import Sampling, SamplingRows, sampling_rows
from infer.steps import BLOCK, DecoderReplay, Drawn, Steps, chunk_width

ENDS = 16  # end tokens of a slot that the device looks for; the host looks for all
_TABLES = 4  # each width of a table is so many times the one before


class Device:
    """Slots, their cache and their steps. A program is compiled for each chunk width and table width, which are few.

    pages: of the pool, page 0 not counted; page: tokens of each, a multiple of every ratio; longest: tokens that a request may
    have. A step that raises leaves no cache behind: `reset` makes an empty one.
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
        ) -> tuple[Drawn, Cache]:
            logits, one = steps.fill(params, bind(slot_of(cache, slot, fresh), table), ids, live, end, early)
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

    def fill(self, slot: int, prompt: list[int], at: int, pages: list[int], sampling: Sampling, asked: bool) -> tuple[int, Drawn]:
        """Runs the chunk of a slot's prompt from ``at`` on: where it ends, and what was drawn ``[1]`` if the prompt does.

        The chunks of a prompt and their shapes do not depend on what else there is to do.
        """
        width = chunk_width(len(prompt) - at, self.chunks)
        part = prompt[at : at + width]
        ids, live = np.full((1, width), self.pad, np.int32), np.zeros((1, width), bool)
        ids[0, : len(part)], live[0, : len(part)] = part, True
        kind = "encode" if self.steps.early(at + width, len(prompt)) else "prefill"
        table = self._table([pages[: -(-len(prompt) // self.page)]])
        end = np.asarray([len(prompt)], np.int32)
        args = np.int32(slot), np.bool(at == 0), table, ids, live, end, sampling_rows([sampling]), np.bool(asked)
        drawn, self.cache = self._programs[kind](self.params, self.cache, *args)
        return at + len(part), jax.device_get(drawn)

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
                for kind in ("encode", "prefill") if self.steps.early(chunk, most) else ("prefill",):
                    args = np.int32(0), np.bool(True), table, *nothing, one, np.bool(False)
                    _, self.cache = self._programs[kind](self.params, self.cache, *args)
            zeros, ends, given = np.zeros(n, np.int32), np.full((n, ENDS), -1, np.int32), np.full((BLOCK, n), -1, np.int32)
            args = zeros, zeros, ends, sampling_rows([Sampling()] * n), np.int32(1), given, np.bool(False)
            table = np.zeros((n, width), np.int32)
            _, self.cache = self._programs["decode"](self.params, self.cache, table, *args)
        jnp.asarray(self.cache.length).block_until_ready()
