"""The unpack warpgroup's side of the tiles: as PTX on the device, as plain array code under the interpreter."""

import math
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
AHEAD = 2  # turns that a warp's copies run ahead
ID_SLOTS = 4
TILED: Any = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]


@dataclass(frozen=True)
class Refs:
    """What the producer reads and writes. entry_tiles: tiles of selected entries; those of the window follow, up to tiles.
    bf16: what the tiles hold, and not fp16."""

    geometry: Geometry
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
    bf16: bool


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
        return jnp.split(jnp.pad(rows, ((0, 0), (0, extra))).astype(self.refs.k_smem.dtype), 2, axis=-1)

    def write(self, out_ref: Any, at: tuple, rows: jax.Array) -> None:
        query, part, head, channel = at
        out_ref[query, part, pl.ds(head, rows.shape[0]), pl.ds(channel, rows.shape[1])] = rows

    def start(self, here: tuple, following: tuple) -> None:
        pass

    def tile(self, step: Any, here: tuple, following: tuple, later: tuple, slot: Any, ready: Any) -> None:
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


class Native:
    """Each warp has 16 rows of a tile, which it copies and unpacks in turns: 8 selected entries at a time, or 4 window rows.

    Copies run two turns ahead of the unpacking, across tiles and queries, in two slots of the warp's own, so that no warp
    waits for another. The ids that name a tile's rows arrive two tiles ahead. Only the copies' own groups are waited for:
    loads to registers share a few counters, and waiting for one of them means waiting for the last.
    """

    def __init__(self, refs: Refs):
        self.refs = refs
        self.scalar = plgpu.Layout.WG_SPLAT(())

    def _inline(self, *args: Any, types: tuple) -> Any:
        def decorate(function: Any) -> Any:
            return plgpu.inline_mgpu(arg_types=types)(function)(*args)

        return decorate

    def _types(self) -> tuple:
        """Of `_refs`: the pools, their ids, the ring, the ids' slots."""
        return (plgpu.RefType(),) * 6

    def _refs(self) -> tuple:
        refs = self.refs
        return refs.entries, refs.entry_ids, refs.window, refs.window_ids, refs.ring, refs.ids

    def write(self, out_ref: Any, at: tuple, rows: jax.Array) -> None:
        """16-bit rows of a matrix product's layout to ``[64, n]`` of the output from ``at`` (query, part, head, channel) on."""

        @self._inline(out_ref, rows, *at, types=(plgpu.RefType(), plgpu.Layout.WGMMA, *[self.scalar] * 4))
        def _(ctx: Any, out: Any, rows: Any, *at: Any) -> None:
            query, part, head, channel = (unpack.scalar(a) for a in at)
            _, parts, heads, channels = out_ref.shape
            thread = unpack.own_thread()
            first = unpack.madd(unpack.madd(query, parts, part), heads, head)
            first = unpack.add(first, unpack.madd(unpack.right(thread, 5), 16, unpack.right(unpack.low(thread, 31), 2)))
            lane = unpack.low(thread, 3)
            address = unpack.step(unpack.global_address(out), first, 2 * channels)
            address = unpack.step(unpack.step(address, channel, 2), lane, 16)
            words = [unpack.bits(pair) for pair in rows.registers.flatten()]  # of 8 columns, then of rows r and r + 8
            for start in range(0, len(words), 8):
                for half in range(2):
                    offset = 16 * channels * half + 8 * start
                    unpack.store_piece(words[start + half : start + 8 : 2], lane, address, offset)

    def start(self, here: tuple, following: tuple) -> None:
        """Asks for the ids of tiles ``here`` and ``following``, and for the rows of the first two turns."""

        @self._inline(*self._refs(), *here, *following, types=(*self._types(), *[self.scalar] * 4))
        def _(ctx: Any, *args: Any) -> None:
            task = Task(self.refs, args[:6])
            for step, (query, number) in enumerate((args[6:8], args[8:10])):
                task.stage_ids(unpack.scalar(query), unpack.scalar(number), unpack.constant(step))
            unpack.commit()
            unpack.wait(0)
            unpack.meet()
            for turn in range(AHEAD):
                task.stage(unpack.scalar(args[7]), unpack.constant(0), turn)
                unpack.commit()

    def tile(self, step: Any, here: tuple, following: tuple, later: tuple, slot: Any, ready: Any) -> None:
        """Writes tile ``here`` (query, number), the CTA's ``step``-th, into ``slot`` once it is ``ready``."""
        ready()
        refs = self.refs
        types = (*self._types(), plgpu.RefType(TILED), plgpu.RefType(), *[self.scalar] * 5)
        args = (*self._refs(), refs.k_smem.at[slot], refs.bias_smem.at[slot], step, here[1], following[1], *later)

        @self._inline(*args, types=types)
        def _(ctx: Any, *args: Any) -> None:
            task = Task(refs, args[:6])
            tile, bias = (unpack.shared_address(a) for a in args[6:8])
            step, here, following, later_query, later = (unpack.scalar(a) for a in args[8:])
            task.stage_ids(later_query, later, unpack.add(step, unpack.constant(2)))
            for kind in task.kinds:
                with unpack.when(unpack.below(here, refs.entry_tiles), kind.selected):
                    task.tile(kind, step, following, tile, bias)


@dataclass(frozen=True)
class Kind:
    """A kind of rows. rows: that a warp takes at once; pitch: bytes from one copy to the next, an odd number of 16."""

    selected: bool
    rows: int
    fmt: Any
    width: int

    @property
    def turns(self) -> int:
        return KEYS // 4 // self.rows

    @property
    def row_bytes(self) -> int:
        return self.fmt.row_bytes(self.width)

    @property
    def pitch(self) -> int:
        return -(-self.row_bytes // 16) // 2 * 32 + 16

    @property
    def codes(self) -> int:
        """Bytes of a row before its scales."""
        return self.row_bytes - self.width // self.fmt.group


def kinds(width: int) -> tuple[Kind, Kind]:
    """Selected entries and window rows."""
    return Kind(True, 8, MAIN_KV, width), Kind(False, 4, WINDOW_KV, width)


def ring_bytes(width: int) -> int:
    """Shared memory that the four warps' slots take."""
    return 4 * AHEAD * max(kind.rows * kind.pitch for kind in kinds(width))


class Task:
    """What a warp does for its rows of a tile, as instructions."""

    def __init__(self, sizes: Refs, refs: Any):
        self.sizes, self.geometry = sizes, sizes.geometry
        entries, self.entry_ids, window, self.window_ids, ring, ids = refs
        self.kinds = kinds(self.geometry.width)
        self.lanes = {kind.selected: Lane(self.geometry, kind.rows) for kind in self.kinds}
        self.pools = {True: unpack.global_address(entries), False: unpack.global_address(window)}
        lane = self.lanes[True]
        self.number, self.warp = lane.number, lane.warp
        self.bf16 = sizes.bf16
        self.slots_at = unpack.madd(lane.warp, ring_bytes(self.geometry.width) // 4, unpack.shared_address(ring))
        self.ids_at = unpack.madd(lane.warp, KEYS, unpack.shared_address(ids))

    def _slot(self, turn: int) -> Any:
        size = ring_bytes(self.geometry.width) // 4 // AHEAD
        return unpack.add(self.slots_at, unpack.constant(turn % AHEAD * size))

    def _ids(self, step: Any) -> Any:
        """Where the warp's ids of the CTA's ``step``-th tile are."""
        return unpack.madd(unpack.low(step, ID_SLOTS - 1), 4 * KEYS, self.ids_at)

    def stage_ids(self, query: Any, number: Any, step: Any) -> None:
        """Asks for the warp's ids of a tile; -1 past the last tile."""
        sizes = self.sizes
        lists = []
        for ref, count, first in (
            (self.entry_ids, sizes.entry_ids.shape[1], 0),
            (self.window_ids, sizes.window_ids.shape[1], sizes.entry_tiles),
        ):
            row = unpack.step(unpack.global_address(ref), query, 4 * count)
            lists.append(unpack.step(row, unpack.add(number, unpack.constant(-first)), 4 * KEYS))
        place = unpack.madd(self.warp, KEYS // 4, self.number)
        source = unpack.step(unpack.choose(unpack.below(number, sizes.entry_tiles), *lists), place, 4)
        shared = unpack.madd(self.number, 4, self._ids(step))
        unpack.stage_id(shared, source, unpack.below(self.number, KEYS // 4), unpack.below(number, sizes.tiles))

    def stage(self, number: Any, step: Any, turn: int) -> None:
        """Asks for a turn's rows of tile ``number``, the CTA's ``step``-th, whichever kind it is."""
        for kind in self.kinds:
            with unpack.when(unpack.below(number, self.sizes.entry_tiles), kind.selected):
                self.stage_kind(kind, step, turn)

    def stage_kind(self, kind: Kind, step: Any, turn: int) -> None:
        """Asks for a turn's rows: as many neighbouring threads a row as there are rows in 32, piece after piece."""
        size = math.gcd(16, kind.row_bytes)
        pieces, together = kind.row_bytes // size, 32 // kind.rows
        row, piece = unpack.right(self.number, together.bit_length() - 1), unpack.low(self.number, together - 1)
        [named] = unpack.take(unpack.madd(row, 4, unpack.add(self._ids(step), unpack.constant(4 * kind.rows * turn))), 1)
        alive = unpack.not_negative(named)
        source = unpack.step(unpack.step(self.pools[kind.selected], named, kind.row_bytes), piece, size)
        shared = unpack.madd(piece, size, unpack.madd(row, kind.pitch, self._slot(turn)))
        for first in range(0, pieces, together):
            inside = unpack.below(piece, pieces - first)
            unpack.stage(shared, source, first * size, size, alive, None if first + together <= pieces else inside)

    def take(self, kind: Kind, turn: int, index: int) -> tuple[list[Any], Any]:
        """The thread's ``index``-th chunk of a turn: words of codes, and the word of its scales."""
        lane = self.lanes[kind.selected]
        row_at = unpack.madd(lane.row, kind.pitch, self._slot(turn))
        chunk, live = lane.chunk(index), None
        if self.geometry.width < self.geometry.padded or not lane.covers:
            # Past a row's end there are the next warp's rows, and some threads have no chunk of theirs.
            live = unpack.below(chunk, self.geometry.width // 32)
            chunk = unpack.choose(live, chunk, unpack.constant(0))
        at = unpack.madd(chunk, 16 if kind.selected else 32, row_at)
        words = (
            unpack.take(at, 4) if kind.selected else [*unpack.take(at, 4), *unpack.take(unpack.add(at, unpack.constant(16)), 4)]
        )
        scale_at = unpack.add(row_at, unpack.constant(kind.codes))
        scale = (
            unpack.take_half(unpack.madd(chunk, 2, scale_at)) if kind.selected else unpack.take_byte(unpack.add(chunk, scale_at))
        )
        if live is not None:
            *words, scale = (unpack.choose(live, word, unpack.constant(0)) for word in (*words, scale))
        return words, scale

    def tile(self, kind: Kind, step: Any, following: Any, tile: Any, bias: Any) -> None:
        """Unpacks a tile of one kind, and asks for what comes `AHEAD` turns later. Chunks are taken two before their turn."""
        lane = self.lanes[kind.selected]
        each = lane.per_thread
        write = unpack.store_e2m1 if kind.selected else unpack.store_e4m3
        places = [lane.pieces(tile, inside) for inside in range(0, 8, kind.rows)]
        held: list[Any] = []

        def take(number: int) -> None:
            turn, index = divmod(number, each)
            if turn >= kind.turns:
                return
            if index == 0:
                unpack.wait(AHEAD - 1)
                unpack.meet()
            held.append(self.take(kind, turn, index))
            if index == each - 1:
                unpack.meet()
                if turn + AHEAD < kind.turns:
                    self.stage_kind(kind, step, turn + AHEAD)
                else:
                    self.stage(following, unpack.add(step, unpack.constant(1)), turn + AHEAD - kind.turns)
                unpack.commit()

        def put(turn: int, index: int, words: list[Any], scale: Any) -> None:
            four = places[kind.rows * turn % 8 // kind.rows]
            odd = 4 * (lane.step * index % 2)
            write(words, scale, four[odd : odd + 4], lane.offset(turn, index), self.bf16)

        named, own, place = self.bias_ids(step)
        take(0)
        take(1)
        for number in range(kind.turns * each):
            take(number + 2)
            turn, index = divmod(number, each)
            if lane.covers:
                put(turn, index, *held[number])
            else:
                with unpack.when(unpack.below(lane.first, self.geometry.chunks)):
                    put(turn, index, *held[number])
        unpack.store_bias(unpack.add(unpack.madd(self.warp, KEYS, bias), place), named, own, MASKED)

    def bias_ids(self, step: Any) -> tuple[Any, Any, Any]:
        """The id of one of the warp's rows, whether the thread has one, and its place in bytes."""
        own = unpack.below(self.number, KEYS // 4)
        place = unpack.choose(own, unpack.times(self.number, 4), unpack.constant(0))
        return unpack.take(unpack.add(self._ids(step), place), 1)[0], own, place
