"""`sparse_attention` on TPU (Pallas Mosaic): a query's rows come by one DMA each, a tile of 128 keys ahead of the arithmetic.

The grid is (query, tile of keys), entries' tiles before the window's; running maximum, sum and output stay in VMEM. Ids reach
scalar memory a tile at a time, by block: those of a prefill (4096 queries of 640, 10 MB) would not fit it at once.

A DMA moves whole 32-bit rows, which a pool of bytes is not on TPU, so XLA first lays both pools out as words (`_words`),
which copies them on every call. Byte ``i`` of a word belongs to channels ``128 i`` and up, so that all lanes of a register
shift alike. Inside each 128 channels the kernel works with the even ones before the odd ones: that is how the nibbles of a
byte fall, and scores do not depend on it. The stored values are exact in bfloat16; sums are float32.

TPU's compiler takes it for v4, v5e, v5p and v6e; it has run in the interpreter only.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dsv41.quant import MAIN_KV, WINDOW_KV, Format
from kernels_pallas.sparse_attention import refusals

KEYS = 128
GROUP = 8  # rows whose copies are begun, and waited for, together
LANES = 128
HEADS = 16  # one tile of bfloat16 rows
MAX_HEADS = 256  # both buffers of float32 q and output, the sum and q again are 12 MB at 512 channels
_FLOOR = -1e30  # finite, so that a difference of two is never NaN


def refusal(q: Any, entries: Any, entry_ids: Any, window: Any, window_ids: Any, sink: Any, mass: bool = False) -> str | None:
    """Why these shapes or dtypes cannot run here."""
    heads, width = q.shape[1:]
    if width % LANES or not 0 < width <= 4 * LANES:
        return f"a row has {width} channels, allowed are multiples of {LANES} up to {4 * LANES}"
    if heads > MAX_HEADS:
        return f"a query has {heads} heads, allowed are at most {MAX_HEADS}"
    if mass:
        return "probabilities are asked for, which only the reference gives here"
    return refusals.refusal(q, entries, entry_ids, window, window_ids)


@dataclass(frozen=True)
class _List:
    """One of a query's two lists: ``count`` tiles of the grid from ``first`` on; words a row takes in HBM and VMEM."""

    fmt: Format
    first: int
    count: int

    @property
    def words(self) -> int:
        return LANES if self.fmt is MAIN_KV else 2 * LANES


def _words(rows: jax.Array, fmt: Format, width: int) -> jax.Array:
    """Rows ``[S, bytes]`` uint8 as ``[S, 1, words]`` int32, of which a DMA takes any: on an untiled axis.

    Byte i of words 0-63 (E2M1, two codes) or 0-127 (E4M3) is of channels 128 i and up, and so are the scales, which follow
    in words of their own. Slices of neighbours, because TPU is slow at taking every fourth byte.
    """
    codes = LANES // 2 if fmt.element == "e2m1" else LANES
    scales = LANES // fmt.group
    split = fmt.row_bytes(width) - width // fmt.group

    def joined(start: int, size: int) -> jax.Array:
        parts = [rows[:, start + i * size : start + (i + 1) * size].astype(jnp.int32) << 8 * i for i in range(width // LANES)]
        return functools.reduce(jnp.bitwise_or, parts)

    words = jnp.concatenate([joined(0, codes), joined(split, scales)], axis=1)
    # Whole registers, so that one wait can count the bytes of several copies.
    return jnp.pad(words, ((0, 0), (0, -words.shape[1] % LANES)))[:, None]


def _tiles(ids: jax.Array, count: int) -> jax.Array:
    """``[N, count, 2, 128]`` int32 of ids ``[N, k]``: a tile's ids, then in each place how many groups hold all it names."""
    ids = jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, count * KEYS - ids.shape[1])), constant_values=-1)
    ids = ids.reshape(-1, count, KEYS)
    groups = jnp.max(jnp.where(ids >= 0, jnp.arange(KEYS, dtype=jnp.int32) // GROUP + 1, 0), axis=2, keepdims=True)
    return jnp.stack([ids, jnp.broadcast_to(groups, ids.shape)], axis=2)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.float32)


def _e2m1(code: jax.Array) -> jax.Array:
    """Values of codes 0-15 by their bits; nothing subnormal on the way, which TPU would flush."""
    magnitude = code & 7
    small = jnp.where(magnitude == 1, 126 << 23, 0)
    return _bits(jnp.where(magnitude < 2, small, (magnitude << 22) + (126 << 23)) | ((code & 8) << 28))


def _e4m3(code: jax.Array) -> jax.Array:
    """Values of E4M3 bytes; NaN's codes, which the quantiser never writes, read as 480."""
    magnitude = code & 0x7F
    below = _bits((magnitude << 20) + (121 << 23)) - 2.0**-6
    value = jnp.where(magnitude < 8, below, _bits((magnitude << 20) + (120 << 23)))
    return jnp.where(code >= 0x80, -value, value)


def _lanes(x: jax.Array, source: Any) -> jax.Array:
    """Lane ``l`` of each 128 takes lane ``source(l)``."""
    blocks = [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]
    ids = source(lax.broadcasted_iota(jnp.int32, blocks[0].shape, 1))
    moved = [jnp.take_along_axis(block, ids, axis=1, mode="promise_in_bounds") for block in blocks]
    return jnp.concatenate(moved, axis=1)


def _even_first(lane: jax.Array) -> jax.Array:
    return 2 * (lane & 63) + (lane >> 6)


def _in_order(lane: jax.Array) -> jax.Array:
    return (lane >> 1) + 64 * (lane & 1)


def _unpack(raw: Any, fmt: Format, width: int) -> list[jax.Array]:
    """float32 values ``[128, 128]`` of each 128 channels, even ones first."""
    if fmt is MAIN_KV:
        codes = _lanes(raw[...], lambda lane: lane & 63)
        scales = _lanes(raw[...], lambda lane: 64 + ((lane & 63) >> 3))
        nibble = 4 * (lax.broadcasted_iota(jnp.int32, codes.shape, 1) >> 6)
    else:
        codes = _lanes(raw[:, :LANES], _even_first)
        scales = _lanes(raw[:, LANES:], lambda lane: (lane & 63) >> 4)
        nibble = None
    blocks = []
    for i in range(width // LANES):
        scale = lax.shift_right_logical(scales, 8 * i) & 0xFF
        if nibble is None:
            blocks.append(_e4m3(lax.shift_right_logical(codes, 8 * i) & 0xFF) * _bits(scale << 23))
        else:
            blocks.append(_e2m1(lax.shift_right_logical(codes, nibble + 8 * i) & 15) * _e4m3(scale))
    return blocks


def _kernel(*refs: Any, lists: list[_List], queries: int, scale: float) -> None:
    ids_ref, here_ref, ahead_ref, q_ref, sink_ref = refs[:5]
    pools = refs[5 : 5 + len(lists)]
    out_ref, lse_ref = refs[5 + len(lists) : 7 + len(lists)]
    rings = refs[7 + len(lists) : 7 + 2 * len(lists)]
    q_scratch, k_scratch, top_ref, total_ref, acc_ref, arrived = refs[7 + 2 * len(lists) :]
    width = q_ref.shape[-1]
    f32 = jnp.float32
    precision = lax.Precision.HIGHEST if k_scratch.dtype == f32 else None
    tiles = lists[-1].first + lists[-1].count
    query, tile = pl.program_id(0), pl.program_id(1)
    step = query * tiles + tile
    slot = lax.rem(step, 2)

    def of_tile(tile: jax.Array, act: Any) -> None:
        for part, pool, ring in zip(lists, pools, rings, strict=True):
            inside = (tile >= part.first) & (tile < part.first + part.count)
            pl.when(inside)(functools.partial(act, part, pool, ring))

    def fetch(tile: jax.Array, slot: jax.Array, names: Any) -> None:
        def rows(part: _List, pool: Any, ring: Any) -> None:
            def group(g: jax.Array, _: None) -> None:
                for i in range(GROUP):
                    # Row 0 in place of none, without a branch for each; its values are dropped.
                    name = jnp.maximum(names[0, 0, 0, g * GROUP + i], 0)
                    copied = ring.at[slot, pl.ds(g * GROUP + i, 1)]
                    pltpu.make_async_copy(pool.at[name], copied, arrived.at[slot]).start()

            lax.fori_loop(0, names[0, 0, 1, 0], group, None)

        of_tile(tile, rows)

    pl.when(step == 0)(lambda: fetch(tile, slot, here_ref))
    following = jnp.where(tile + 1 == tiles, 0, tile + 1)
    pl.when(step + 1 < queries * tiles)(lambda: fetch(following, 1 - slot, ahead_ref))

    @pl.when(tile == 0)
    def _() -> None:
        q_scratch[...] = _lanes(q_ref[0].astype(f32), _even_first).astype(q_scratch.dtype)
        top_ref[...] = jnp.full(top_ref.shape, _FLOOR, f32)
        total_ref[...] = jnp.zeros(total_ref.shape, f32)
        acc_ref[...] = jnp.zeros(acc_ref.shape, f32)

    def unpack(part: _List, pool: Any, ring: Any) -> None:
        def wait(g: jax.Array, _: None) -> None:
            copied = ring.at[slot, pl.ds(pl.multiple_of(g * GROUP, GROUP), GROUP)]
            pltpu.make_async_copy(copied, copied, arrived.at[slot]).wait()

        lax.fori_loop(0, here_ref[0, 0, 1, 0], wait, None)
        # What no id names may hold infinity, and zero times infinity is not zero.
        rows = jnp.broadcast_to(ids_ref[0, 0, :1], (KEYS, KEYS)).T >= 0
        for i, values in enumerate(_unpack(ring.at[slot], part.fmt, width)):
            k_scratch[:, i * LANES : (i + 1) * LANES] = jnp.where(rows, values, 0.0).astype(k_scratch.dtype)

    @pl.when(here_ref[0, 0, 1, 0] > 0)
    def _() -> None:
        of_tile(tile, unpack)
        keys, named = k_scratch[...], ids_ref[0, 0, :1] >= 0
        products = {"precision": precision, "preferred_element_type": f32}
        scores = lax.dot_general(q_scratch[...], keys, (((1,), (1,)), ((), ())), **products) * scale
        scores = jnp.where(named, scores, _FLOOR)
        before = top_ref[:, :1]
        top = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        probs = jnp.exp(scores - top)  # a tile that is not skipped has a key, so a masked score is far below top
        factor = jnp.exp(before - top)
        total = total_ref[:, :1] * factor + jnp.sum(probs, axis=1, keepdims=True)
        added = lax.dot_general(probs.astype(keys.dtype), keys, (((1,), (0,)), ((), ())), **products)
        acc_ref[...] = acc_ref[...] * factor + added
        top_ref[...] = jnp.broadcast_to(top, top_ref.shape)
        total_ref[...] = jnp.broadcast_to(total, total_ref.shape)

    @pl.when(tile + 1 == tiles)
    def _() -> None:
        top, total, sink = top_ref[:, :1], total_ref[:, :1], sink_ref[...]
        some = total > 0
        high = jnp.maximum(top, sink)
        whole = total * jnp.exp(top - high) + jnp.exp(sink - high)
        share = jnp.where(some, jnp.exp(top - high) / jnp.where(some, whole, 1.0), 0.0)
        out_ref[0] = _lanes(acc_ref[...] * share, _in_order).astype(out_ref.dtype)
        lse = jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)
        lse_ref[0] = jnp.broadcast_to(lse, top_ref.shape).T[:1]


def run(
    q: jax.Array,
    entries: jax.Array,
    entry_ids: jax.Array,
    window: jax.Array,
    window_ids: jax.Array,
    sink: jax.Array | None,
    mass: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `kernels_pallas.sparse_attention.api.sparse_attention`. interpret: parameters of Pallas' interpreter."""
    queries, heads, width = q.shape
    lists, pools, ids, first = [], [], [], 0
    for fmt, rows, named in ((MAIN_KV, entries, entry_ids), (WINDOW_KV, window, window_ids)):
        count = pl.cdiv(named.shape[1], KEYS)
        if count:
            lists.append(_List(fmt, first, count))
            pools.append(_words(rows, fmt, width))
            ids.append(_tiles(named, count))
            first += count
    tiles = first
    names = jnp.concatenate(ids, axis=1)
    padded = pl.cdiv(heads, HEADS) * HEADS
    q = jnp.pad(q, ((0, 0), (0, padded - heads), (0, 0)))
    below = jnp.full((heads,), -jnp.inf, jnp.float32) if sink is None else sink.astype(jnp.float32)
    below = jnp.pad(below, (0, padded - heads))[:, None]

    def here(n: jax.Array, t: jax.Array) -> tuple:
        return n, t, 0, 0

    def ahead(n: jax.Array, t: jax.Array) -> tuple:
        step = jnp.minimum(n * tiles + t + 1, queries * tiles - 1)
        return lax.div(step, tiles), lax.rem(step, tiles), 0, 0

    def of_query(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda n, t: (n, 0, 0))

    f32, vmem = jnp.float32, pltpu.VMEM
    out, lse = pl.pallas_call(
        functools.partial(_kernel, lists=lists, queries=queries, scale=width**-0.5),
        grid=(queries, tiles),
        in_specs=[
            pl.BlockSpec((1, 1, 2, KEYS), here),
            pl.BlockSpec((1, 1, 2, KEYS), here, memory_space=pltpu.SMEM),
            pl.BlockSpec((1, 1, 2, KEYS), ahead, memory_space=pltpu.SMEM),
            of_query(padded, width),
            pl.BlockSpec((padded, 1), lambda n, t: (0, 0)),
            *(pl.BlockSpec(memory_space=pltpu.HBM) for _ in pools),
        ],
        out_specs=[of_query(padded, width), of_query(1, padded)],
        out_shape=[
            jax.ShapeDtypeStruct((queries, padded, width), q.dtype),
            jax.ShapeDtypeStruct((queries, 1, padded), f32),
        ],
        scratch_shapes=[
            *(vmem((2, KEYS, part.words), jnp.int32) for part in lists),
            vmem((padded, width), q.dtype),
            vmem((KEYS, width), q.dtype),
            vmem((padded, LANES), f32),
            vmem((padded, LANES), f32),
            vmem((padded, width), f32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        # Each step begins the copies of the next one, of the next query too, so the order is fixed.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="sparse_attention",
    )(names, names, names, q, below, *pools)
    return out[:, :heads], lse[:, 0, :heads]
