"""The unpack warpgroup's side of the tiles: as PTX on the device, as plain array code under the interpreter."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dsv41.quant import MAIN_KV, WINDOW_KV, row_values
from kernels_pallas.sparse_attention import unpack
from kernels_pallas.sparse_attention.unpack import KEYS, Geometry, Lane

HEADS = 64  # rows of a matrix instruction
MASKED = -1e30
SLOT_BYTES = 5120  # of the ring: two rows a thread of selected entries, or one of the window
ID_SLOTS = 4
TILED: Any = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]


@dataclass(frozen=True)
class Refs:
    """What the producer reads and writes. entry_tiles: tiles of selected entries; those of the window follow, up to tiles."""

    geometry: Geometry
    q: Any
    entries: Any
    entry_ids: Any
    window: Any
    window_ids: Any
    q_smem: Any
    k_smem: Any
    bias_smem: Any
    ring: Any
    ids: Any
    entry_tiles: int
    tiles: int


def ring_depth(geometry: Geometry) -> int:
    """Steps that copies run ahead; fewer than a tile has, so that a tile's ids are there when it begins."""
    return min(3, geometry.rounds // max(1, geometry.rounds // 4) - 1, geometry.rounds - 1)


def publish(native: bool, together: bool = True) -> None:
    """Makes a thread's writes to shared memory visible to the tensor cores; ``together``: the whole warpgroup's.

    Where a barrier counts every thread's arrival, the warpgroup need not meet first, as it does in Pallas' `commit_smem`.
    """
    if not native:
        plgpu.commit_smem()
        return

    inline: Any = plgpu.inline_mgpu()
    inline(lambda ctx: unpack.fence(together))()


class Interpreted:
    """Same tiles by array code: nothing is held ahead."""

    def __init__(self, refs: Refs):
        self.refs = refs

    def _halves(self, rows: jax.Array) -> list[jax.Array]:
        extra = self.refs.geometry.padded - rows.shape[-1]
        return jnp.split(jnp.pad(rows, ((0, 0), (0, extra))).astype(jnp.float16), 2, axis=-1)

    def query(self, query: Any, block: Any) -> None:
        rows = self.refs.q[query, pl.ds(block * HEADS, HEADS)]
        for side, values in enumerate(self._halves(rows)):
            self.refs.q_smem[side] = values

    def start(self, here: tuple, following: tuple) -> Any:
        return 0

    def tile(self, step: Any, here: tuple, following: tuple, later: tuple, slot: Any, state: Any, ready: Any) -> Any:
        ready()
        refs, (query, number) = self.refs, here
        kinds = ((refs.entries, refs.entry_ids, MAIN_KV, 0), (refs.window, refs.window_ids, WINDOW_KV, refs.entry_tiles))
        for rows_ref, ids_ref, fmt, first in kinds:
            mine = (number < refs.entry_tiles) if fmt is MAIN_KV else (number >= refs.entry_tiles)

            @pl.when(mine)
            def _(rows_ref=rows_ref, ids_ref=ids_ref, fmt=fmt, first=first):
                start = jnp.clip(number - first, 0, ids_ref.shape[1] // KEYS - 1) * KEYS
                ids = jnp.where(number < refs.tiles, ids_ref[query, pl.ds(start, KEYS)], -1)

                def row(i, rows):
                    stored = rows_ref[pl.ds(jnp.maximum(ids[i], 0), 1)]
                    values = jnp.where(ids[i] >= 0, row_values(stored, fmt, jnp.float32), 0.0)
                    return lax.dynamic_update_slice(rows, values, (i, 0))

                rows = lax.fori_loop(0, KEYS, row, jnp.zeros((KEYS, refs.geometry.width), jnp.float32))
                for side, values in enumerate(self._halves(rows)):
                    refs.k_smem[slot, side] = values
                refs.bias_smem[slot] = jnp.where(ids >= 0, 0.0, MASKED)

        return state


class Native:
    """Copies run `depth` steps ahead of the unpacking, across tiles and queries, in a ring of shared memory.

    A step is two rows a thread of selected entries, or one of the window. The ids that name a tile's rows arrive two tiles
    ahead, so that no instruction waits for device memory. Only the copies' own groups are waited for: loads to registers
    share a few counters, and waiting for one of them means waiting for the last.
    """

    def __init__(self, refs: Refs):
        self.refs = refs
        geometry = refs.geometry
        self.per_step = max(1, geometry.rounds // 4)
        self.entry_steps, self.window_steps = geometry.rounds // self.per_step, geometry.rounds
        self.depth = ring_depth(geometry)
        self.scalar = plgpu.Layout.WG_SPLAT(())

    def _inline(self, *args: Any, types: tuple) -> Any:
        def decorate(function: Any) -> Any:
            return plgpu.inline_mgpu(arg_types=types)(function)(*args)

        return decorate

    def query(self, query: Any, block: Any) -> None:
        """Writes a query's block of heads."""
        geometry, q = self.refs.geometry, self.refs.q
        heads, size = q.shape[1], jnp.dtype(q.dtype).itemsize
        types = (plgpu.RefType(), plgpu.RefType(TILED), self.scalar, self.scalar)

        @self._inline(q, self.refs.q_smem, query, block, types=types)
        def _(ctx: Any, q_ref: Any, q_smem: Any, query: Any, block: Any) -> None:
            lane = Lane(geometry)
            pieces = lane.pieces(unpack.shared_address(q_smem))
            first = unpack.madd(unpack.scalar(block), HEADS, unpack.times(unpack.scalar(query), heads))
            source = unpack.step(unpack.global_address(q_ref), lane.chunk, 32 * size)
            at_once = min(geometry.rounds, 8 // size)  # as many rows as there are registers for
            for start in range(0, geometry.rounds, at_once):
                rows = range(start, start + at_once)
                places = [unpack.step(source, unpack.add(first, lane.place(i)), geometry.width * size) for i in rows]
                loaded = [unpack.load_words(place, lane.live, 8 * size) for place in places]
                for index, words in zip(rows, loaded, strict=True):
                    unpack.store_query(words, pieces, index * lane.stride, wide=size == 4)

    def _types(self) -> tuple:
        """Of `_refs`: the pools, their ids, the ring, the ids' slots."""
        return (plgpu.RefType(),) * 6

    def _refs(self) -> tuple:
        refs = self.refs
        return refs.entries, refs.entry_ids, refs.window, refs.window_ids, refs.ring, refs.ids

    def start(self, here: tuple, following: tuple) -> Any:
        """Asks for the first steps of tile ``here``; gives the state that `tile` takes for it."""
        types = (*self._types(), *[self.scalar] * 4)

        @self._inline(*self._refs(), *here, *following, types=types)
        def _(ctx: Any, *args: Any) -> None:
            task = Task(self, args[:6])
            for step, (query, number) in enumerate((args[6:8], args[8:10])):
                task.stage_ids(unpack.scalar(query), unpack.scalar(number), unpack.constant(step))
            unpack.commit()
            unpack.wait(0)

        publish(native=True)

        @self._inline(*self._refs(), here[1], types=(*self._types(), self.scalar))
        def _(ctx: Any, *args: Any) -> None:
            task = Task(self, args[:6])
            ids = task.ids(unpack.constant(0))
            for step in range(self.depth):
                task.stage(unpack.scalar(args[6]), ids, step, task.place(unpack.constant(0), step))
                unpack.commit()

        return jnp.int32(0)

    def tile(self, step: Any, here: tuple, following: tuple, later: tuple, slot: Any, state: Any, ready: Any) -> Any:
        """Writes tile ``here`` (query, number), the CTA's ``step``-th, into ``slot`` once it is ``ready``."""
        ready()
        refs = self.refs
        types = (*self._types(), plgpu.RefType(TILED), plgpu.RefType(), *[self.scalar] * 6)
        args = (*self._refs(), refs.k_smem.at[slot], refs.bias_smem.at[slot], step, here[1], following[1], *later, state)

        @self._inline(*args, types=types)
        def _(ctx: Any, *args: Any) -> None:
            task = Task(self, args[:6])
            step, here, following, later_query, later, state = (unpack.scalar(a) for a in args[8:])
            task.stage_ids(later_query, later, unpack.add(step, unpack.constant(2)))
            ids, next_ids = task.ids(step), task.ids(unpack.add(step, unpack.constant(1)))
            pieces = task.lane.pieces(unpack.shared_address(args[6]))
            bias = unpack.shared_address(args[7])
            for selected, steps in ((True, self.entry_steps), (False, self.window_steps)):
                with unpack.when(unpack.below(here, refs.entry_tiles), selected):
                    for number in range(steps):
                        place = task.place(state, number)
                        unpack.wait(self.depth - 1)
                        held = task.take(place, selected)
                        ahead = number + self.depth
                        if ahead < steps:
                            task.stage_kind(selected, ids, ahead, place)
                        else:
                            task.stage(following, next_ids, ahead - steps, place)
                        unpack.commit()
                        task.unpack(held, ids, number, pieces, bias, selected)

        moved = jnp.where(here[1] < refs.entry_tiles, self.entry_steps, self.window_steps)
        return lax.rem(state + moved, jnp.int32(self.depth))


class Task:
    """What a thread does for one tile, as instructions. Slots of the ring: planes of 16 bytes a thread, then of 4."""

    def __init__(self, native: Native, refs: Any):
        self.native, self.sizes, self.geometry = native, native.refs, native.refs.geometry
        entries, self.entry_ids, window, self.window_ids, ring, ids = refs
        self.lane = Lane(self.geometry)
        self.entries, self.window = unpack.global_address(entries), unpack.global_address(window)
        self.ring_at, self.ids_at = unpack.shared_address(ring), unpack.shared_address(ids)

    def place(self, state: Any, step: int) -> Any:
        """The ring's slot of a tile's ``step``-th step."""
        depth = self.native.depth
        number = unpack.remainder(unpack.add(state, unpack.constant(step % depth)), depth)
        return unpack.madd(number, SLOT_BYTES, self.ring_at)

    def stage_ids(self, query: Any, number: Any, step: Any) -> None:
        """Asks for a tile's ids, those of rows r, r + 8, ... side by side; -1 past the last tile."""
        sizes, lane = self.sizes, self.lane
        lists = []
        for ref, count, first in (
            (self.entry_ids, sizes.entry_ids.shape[1], 0),
            (self.window_ids, sizes.window_ids.shape[1], sizes.entry_tiles),
        ):
            row = unpack.step(unpack.global_address(ref), query, 4 * count)
            lists.append(unpack.step(row, unpack.add(number, unpack.constant(-first)), 4 * KEYS))
        source = unpack.step(unpack.choose(unpack.below(number, sizes.entry_tiles), *lists), lane.thread, 4)
        place = unpack.madd(unpack.low(lane.thread, 7), 8, unpack.right(lane.thread, 3))
        slot = unpack.madd(unpack.low(step, ID_SLOTS - 1), 4 * KEYS, self.ids_at)
        own = unpack.below(lane.thread, KEYS)
        unpack.stage_id(unpack.madd(place, 4, slot), source, own, unpack.below(number, sizes.tiles))

    def ids(self, step: Any) -> list[Any]:
        """The ids of the thread's rows of the CTA's ``step``-th tile."""
        slot = unpack.madd(unpack.low(step, ID_SLOTS - 1), 4 * KEYS, self.ids_at)
        first = unpack.madd(self.lane.row, 32, unpack.madd(self.lane.group, 4, slot))
        groups = self.geometry.groups
        return [unpack.take(unpack.add(first, unpack.constant(4 * i * groups)), 1)[0] for i in range(self.geometry.rounds)]

    def stage(self, number: Any, ids: list[Any], step: int, place: Any) -> None:
        """Asks for a step of tile ``number``, whichever kind it is."""
        for selected in (True, False):
            with unpack.when(unpack.below(number, self.sizes.entry_tiles), selected):
                self.stage_kind(selected, ids, step, place)

    def stage_kind(self, selected: bool, ids: list[Any], step: int, place: Any) -> None:
        """Asks for a step of a tile of selected entries, or of the window."""
        width, lane = self.geometry.width, self.lane
        fmt, base = (MAIN_KV, self.entries) if selected else (WINDOW_KV, self.window)
        rows, planes = (self.native.per_step, 1) if selected else (1, 2)
        row_bytes, size = fmt.row_bytes(width), 16 * planes
        elements = row_bytes - width // fmt.group
        # A thread's scales are two bytes, or one: the word that holds them is copied, shared with its neighbours.
        word = min(4, width // fmt.group)
        scales = unpack.low(unpack.times(lane.chunk, 32 // fmt.group), -4)
        for i, number in enumerate(ids[step * rows : (step + 1) * rows]):
            alive = unpack.both(unpack.not_negative(number), lane.live)
            row = unpack.step(base, number, row_bytes)
            for plane in range(planes):
                shared = unpack.madd(lane.thread, 16, unpack.add(place, unpack.constant(2048 * (i + plane))))
                source = unpack.shift(unpack.step(row, lane.chunk, size), 16 * plane)
                unpack.stage(shared, source, 16, alive, row_bytes)
            shared = unpack.madd(lane.thread, 4, unpack.add(place, unpack.constant(2048 * rows * planes + 512 * i)))
            unpack.stage(shared, unpack.step(unpack.shift(row, elements), scales, 1), word, alive, row_bytes)

    def take(self, place: Any, selected: bool) -> list[tuple[list[Any], Any]]:
        """A step's rows as words of codes and the word of their scales."""
        rows, planes = (self.native.per_step, 1) if selected else (1, 2)
        lane, out = self.lane, []
        for i in range(rows):
            words = []
            for plane in range(planes):
                words += unpack.take(unpack.madd(lane.thread, 16, unpack.add(place, unpack.constant(2048 * (i + plane)))), 4)
            at = unpack.add(place, unpack.constant(2048 * rows * planes + 512 * i))
            out.append((words, unpack.take(unpack.madd(lane.thread, 4, at), 1)[0]))
        return out

    def unpack(self, held: list, ids: list[Any], step: int, pieces: list[Any], bias: Any, selected: bool) -> None:
        """Writes a step's rows to the tile."""
        lane = self.lane
        word = min(4, self.geometry.width // WINDOW_KV.group)  # bytes that were copied; past them may be anything
        for i, (words, scales) in enumerate(held):
            index = step * len(held) + i
            if selected:
                unpack.store_e2m1(words, unpack.half(scales, unpack.low(lane.chunk, 1)), pieces, index * lane.stride)
            else:
                unpack.store_e4m3(words, unpack.byte(scales, unpack.low(lane.chunk, word - 1)), pieces, index * lane.stride)
            lane.store_bias(bias, index, ids[index], MASKED)
