"""The device's side of the engine: the cache of all slots over one pool of pages, and steps of a few shapes that change it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dsv41.cache import Cache
from dsv41.errors import UserError
from dsv41.numerics import Policy
from dsv41.plan import layer_plans
from dsv41.pool import bind, init_pool, slot_of, tails, unbind, with_slot
from dsv41.prefill import Restored
from dsv41.sharding import ROWS
from infer.model import Model, weight_parts
from infer.prefix import NO_HIT, Hit, lengths
from infer.sampling import MOST_STOP_IDS, Sampling, SamplingRows, sampling_rows
from infer.steps import BLOCK, DecoderReplay, Drawn, Steps, chunk_width

ENDS = MOST_STOP_IDS + 1  # end tokens of a slot, the model's own among them
_TABLES = 4  # each width of a table is so many times the one before


@dataclass(frozen=True)
class Chunk:
    """The chunk of a slot's prompt from token ``at`` on.

    pages: of the slot. asked: whether anyone wants the likeliest. hit: where the prompt begins, whose blocks and windows are in
    place; history: before its start.
    """

    slot: int
    prompt: list[int]
    at: int
    pages: list[int]
    sampling: Sampling
    asked: bool = False
    hit: Hit = NO_HIT
    history: np.ndarray | None = None


class Device:
    """Slots, their cache and their steps. A program is compiled for each chunk width and table width, which are few.

    pages: of the pool, those that are nobody's not counted; page: tokens of each, a multiple of every ratio; longest: tokens
    that a request may have. behind: whether prompts may begin with restored ones. A step that raises leaves no cache behind:
    `reset` makes an empty one. On a mesh each of ``shards`` parts of the devices has as many slots, with their pages, and a
    step is one program of all of them.
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
        self.pad, self.shards = model.config.pad_token_id, model.row_parts
        self.widths = [-(-longest // page)]
        while self.widths[0] > 1:
            self.widths.insert(0, -(-self.widths[0] // _TABLES))
        self.steps = steps = Steps(model, policy, decoder_replay, likeliest)
        self._own = 1 + pages // self.shards
        rows = PartitionSpec(ROWS)
        self._where: Any = model.rows or jax.devices()[0]
        init = partial(init_pool, model.config, policy, slots, self.shards * self._own, page)
        self._init = jax.jit(init, out_shardings=model.rows)

        def on_mesh(function: Any, ins: Any, out: PartitionSpec) -> Any:
            if model.mesh is None:
                return function
            weights = weight_parts(model.config, model.mesh)

            def run(*args: Any) -> Any:
                specs = weights, rows, *(ins or [rows] * (len(args) - 2))
                return jax.shard_map(function, mesh=model.mesh, in_specs=specs, out_specs=(out, rows), check_vma=False)(*args)

            return run

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
            # One of each shard: where there is none, nothing is live and its slot stays as it is.
            one = slot_of(cache, slot[0], fresh[0])
            if start is not None and history is not None:
                length = jnp.where(fresh, start, one.length)
                one = replace(one, length=length, history=jnp.where(fresh[:, None], history, one.history))
            logits, one = steps.fill(params, bind(one, table), ids, live, end, early, restored)
            drawn = Drawn.none((1,), steps.likeliest) if early else steps.draw(logits, one.length, rows, asked[0])
            return drawn, with_slot(cache, slot[0], unbind(one))

        def decode(params: Any, cache: Cache, table: jax.Array, *args: Any) -> tuple[Drawn, Cache]:
            drawn, cache, _ = steps.decode(params, bind(cache, table), *args)
            return drawn, unbind(cache)

        drawn = PartitionSpec(None, ROWS)
        decode_ins = [rows] * 5 + [PartitionSpec(), drawn, PartitionSpec()]
        self._programs: dict[str, Any] = {"decode": jax.jit(on_mesh(decode, decode_ins, drawn), donate_argnums=1)}
        for end in ("", "_behind") if behind else ("",):
            for kind, early in (("encode", True), ("prefill", False)):
                self._programs[kind + end] = jax.jit(on_mesh(partial(fill, early), None, rows), donate_argnums=1)
        self._take_windows = jax.jit(_windows_of)
        self._put_windows = jax.jit(_with_windows, donate_argnums=0, out_shardings=model.rows)
        self._depth = model.config.engram_max_ngram_size - 1 if model.config.engram_layer_ids else 0
        self.reset()

    def reset(self) -> None:
        """An empty cache in all slots."""
        # There is room for one.
        self.cache: Any = None
        # On its device from the start, or the first step would be compiled once more for the cache that it returns.
        self.cache = jax.device_put(self._init(), self._where)

    def compiled(self) -> int:
        """How many programs there are."""
        return sum(program._cache_size() for program in self._programs.values())

    def _width(self, pages: int) -> int:
        return next(width for width in self.widths if width >= pages)

    def _table(self, pages: list[list[int]], width: int) -> np.ndarray:
        table = np.zeros((len(pages), width), np.int32)
        for row, own in zip(table, pages, strict=True):
            row[: len(own)] = own
        return table % self._own  # as each shard counts its own

    def shard(self, slot: int) -> int:
        """Where a slot is."""
        return slot * self.shards // self.slots

    def shape(self, chunk: Chunk) -> tuple[str, int, int]:
        """Which program fills a chunk, and the widths of its ids and its table. Other work has no say in it."""
        left, kept = len(chunk.prompt) - chunk.at, chunk.hit.kept > 0
        width = chunk_width(left, self.chunks)
        kind = "encode" if self.steps.early(chunk.at + width, len(chunk.prompt), kept) else "prefill"
        return f"{kind}_behind" if kept else kind, width, self._width(-(-len(chunk.prompt) // self.page))

    def fill(self, chunks: list[Chunk]) -> tuple[list[int], Drawn]:
        """Runs chunks of one shape, each in another shard: where each ends, and what was drawn ``[shards]`` of those that end."""
        kind, width, wide = self.shape(chunks[0])
        count = self.shards
        slot, end, ends = np.zeros(count, np.int32), np.zeros(count, np.int32), []
        fresh, asked = np.zeros(count, bool), np.zeros(count, bool)
        ids, live = np.full((count, width), self.pad, np.int32), np.zeros((count, width), bool)
        pages: list[list[int]] = [[] for _ in range(count)]
        rules, hits = [Sampling()] * count, [NO_HIT] * count
        histories: list[np.ndarray | None] = [None] * count
        for chunk in chunks:
            n, part = self.shard(chunk.slot), chunk.prompt[chunk.at : chunk.at + width]
            slot[n], end[n] = chunk.slot % (self.slots // count), len(chunk.prompt)
            fresh[n], asked[n] = chunk.at == chunk.hit.start, chunk.asked
            ids[n, : len(part)], live[n, : len(part)] = part, True
            pages[n], rules[n] = chunk.pages[: -(-len(chunk.prompt) // self.page)], chunk.sampling
            hits[n], histories[n] = chunk.hit, chunk.history
            ends.append(chunk.at + len(part))
        more = self._behind(hits, histories) if kind.endswith("_behind") else ()
        args = slot, fresh, self._table(pages, wide), ids, live, end, sampling_rows(rules), asked, *more
        drawn, self.cache = self._programs[kind](self.params, self.cache, *args)
        return ends, jax.device_get(drawn)

    def _behind(self, hits: list[Hit], histories: Sequence[np.ndarray | None]) -> tuple:
        none = np.full(self._depth, -1, np.int32)
        count = len(hits)
        restored = Restored(lengths(hits, "kept", count), lengths(hits, "floor", count))
        return restored, lengths(hits, "start", count), np.stack([none if h is None else h for h in histories])

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
        table = self._table(pages, self._width(max(map(len, pages))))
        drawn, self.cache = self._programs["decode"](self.params, self.cache, table, *args)
        return jax.device_get(drawn)

    def warm_up(self) -> None:
        """Compiles every program by running it on nothing."""
        n, shards = self.slots, self.shards
        for width in self.widths:
            table, most = np.zeros((shards, width), np.int32), width * self.page
            # What no prompt within so many pages comes to is left out.
            for shorter, chunk in zip((0, *self.chunks), self.chunks, strict=False):
                if shorter >= most:
                    break
                none, never = np.zeros(shards, np.int32), np.zeros(shards, bool)
                nothing = np.zeros((shards, chunk), np.int32), np.zeros((shards, chunk), bool), none
                args = none, never, table, *nothing, sampling_rows([Sampling()] * shards), never
                for end, more in (("", ()), ("_behind", self._behind([NO_HIT] * shards, [None] * shards))):
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
