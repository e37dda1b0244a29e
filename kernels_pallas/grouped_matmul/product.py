"""Products of sorted rows with the weight of their group, on Hopper (Pallas Mosaic GPU).

A persistent CTA takes tiles of up to 128 rows of one group and ``cols`` output columns. One warpgroup copies operands by TMA into
a ring of slots, `DEPTH` of the contracted dimension each; two others multiply, 64 rows each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import TILED, store, two_views, views

ROWS = 64  # of one matrix instruction
DEPTH = 64  # of the contracted dimension a slot: 128 bytes of bfloat16, one row of the swizzle
PIECE = 64  # columns that leave at once
CONSUMERS = 2
REGISTERS = 40, 232  # a thread of the copying warpgroup and of each other, of 504 for the three


@dataclass(frozen=True)
class Tile:
    """Static choices. cols: output columns of a tile, of gate and up together; stages: slots of the ring."""

    cols: int = 256
    stages: int = 4


def walk(sizes: Any, tile_rows: int, col_tiles: int, ctas: int, visit: Callable[..., None]) -> tuple[Any, Any, Any]:
    """Calls ``visit(number, group, row, rows, col)`` for each of this CTA's tiles, ``number`` counting them from 0.

    rows: those from the tile's first on, in the tile and in its group; col: number of the tile along the columns. Tiles of a
    group that differ in rows only are neighbours, so that they find its weights in the L2. Returns how many tiles there were,
    the end of the last group, and how many tiles further on the CTA's next one would be.
    """

    def one_group(group: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        number, start, ahead = carry
        size = sizes[group]
        tiles = lax.div(size + (tile_rows - 1), jnp.int32(tile_rows))
        items = tiles * col_tiles
        own = lax.div(jnp.maximum(items - ahead, 0) + (ctas - 1), jnp.int32(ctas))

        def one_tile(i: Any, _: None) -> None:
            item = ahead + i * ctas
            at = lax.rem(item, tiles) * tile_rows
            visit(number + i, group, start + at, jnp.minimum(size - at, tile_rows), lax.div(item, tiles))

        lax.fori_loop(0, own, one_tile, None)
        return number + own, start + size, ahead + own * ctas - items

    return lax.fori_loop(0, sizes.shape[0], one_group, (jnp.int32(0), jnp.int32(0), lax.axis_index("cta")))


class Writer:
    """Sends registers to device memory through shared memory, some rows of 64 columns at a time, of which any number are rows
    of the group. staged: `views` ``[2, R, 64]``, used in turn; R is a power of two."""

    def __init__(self, out: Any, staged: tuple[Any, Any]):
        self.out, (self.flat, self.tiled) = out, staged
        self.rows = self.flat.shape[1]

    def write(self, piece: Any, row: Any, rows: Any, col: Any, turn: int, across: bool = False, after: int = 1) -> None:
        """``piece`` ``[R, 64]``, its transpose where ``across``; those rows that are below ``rows``.

        turn: the piece's number in its tile; after: copies that the piece before it has at least.
        """
        # A tile may have had an odd number of pieces.
        plgpu.wait_smem_to_gmem(min(turn, after), wait_read_only=True)
        place = self.tiled.at[turn % 2]
        store(place.transpose((1, 0)) if across else place, piece)
        plgpu.commit_smem()
        # A copy has a fixed number of rows: one of each power of two that the number has.
        rows = jnp.clip(rows, 0, self.rows)  # below 0 where the group ended before this piece
        size = self.rows
        while size:

            @pl.when((rows & size) != 0)
            def _(size: int = size) -> None:
                before = rows & (2 * self.rows - 2 * size)
                at = self.out.at[pl.ds(row + before, size), pl.ds(col, PIECE)]
                plgpu.copy_smem_to_gmem(self.flat.at[turn % 2, pl.ds(before, size)], at)

            size //= 2

    def clear(self, end: Any, ahead: Any, ctas: int, warpgroups: int) -> None:
        """Zeros in this warpgroup's part of the rows from ``end`` on; ahead: how many pieces further on the CTA's first is."""
        rows, width = self.out.shape
        zero = plgpu.layout_cast(jnp.zeros((64, self.rows), jnp.bfloat16), plgpu.Layout.WGMMA)
        groups = pl.cdiv(width, PIECE * warpgroups)
        items = lax.div(rows - end + (self.rows - 1), jnp.int32(self.rows)) * groups

        def one(i: Any, _: None) -> None:
            item = ahead + i * ctas
            row = end + lax.div(item, jnp.int32(groups)) * self.rows
            col = (lax.rem(item, jnp.int32(groups)) * warpgroups + lax.axis_index("wg")) * PIECE
            pl.when(col < width)(lambda: self.write(zero, row, rows - row, col, 0, across=True))

        lax.fori_loop(0, lax.div(jnp.maximum(items - ahead, 0) + (ctas - 1), jnp.int32(ctas)), one, None)
        plgpu.wait_smem_to_gmem(0)


def swiglu(gate: Any, up: Any, limit: float) -> Any:
    """Clamped SwiGLU of float32 registers."""
    gate = jnp.minimum(gate, limit)
    return gate / (1.0 + jnp.exp(-gate)) * jnp.clip(up, -limit, limit)


def product(
    xs: tuple[jax.Array, ...],
    weights: tuple[jax.Array, ...],
    sizes: jax.Array,
    scale: jax.Array | None = None,
    *,
    transposed: bool = False,
    limit: float = 0.0,
    tile: Tile = Tile(),
    ctas: int = 132,
    interpret: Any = None,
) -> jax.Array:
    """``[T, N]`` bfloat16: rows ``[T, K]`` times the transpose of their group's weight; zeros past the last group.

    weights ``[E, N, K]`` bfloat16, ``[E, K, N]`` where ``transposed``. Several of each: the sum of their products. With ``scale``
    ``[T + 64]`` float32, of one x and two weights, gate and up, ``scale * swiglu(gate, up)``. sizes ``[E]`` int32: rows of each
    group, one after the other.
    """
    rows, depth = xs[0].shape
    width = weights[0].shape[2 if transposed else 1]
    paired, native = scale is not None, interpret is None
    steps, stages = pl.cdiv(depth, DEPTH), tile.stages
    whole = steps * len(xs)
    out_cols = tile.cols // (2 if paired else 1)
    col_tiles = pl.cdiv(width, out_cols)
    ctas = min(ctas, col_tiles * (pl.cdiv(rows, ROWS) + sizes.shape[0]))

    def body(*refs: Any) -> None:
        x_refs, refs = refs[: len(xs)], refs[len(xs) :]
        w_refs, sizes_ref, scales = refs[: len(weights)], refs[len(weights)], refs[len(weights) + 1 : -6]
        out_ref, a_smem, b_smem, staged, full, empty = refs[-6:]
        a_flat, a_tiled = views(a_smem, native)
        wg = lax.axis_index("wg")

        def slot_of(step: Any) -> Any:
            return lax.rem(step, jnp.int32(stages))

        def producer() -> None:
            plgpu.set_max_registers(REGISTERS[0], action="decrease")

            def visit(number: Any, group: Any, row: Any, taken: Any, col: Any) -> None:
                def copy(k: Any, slot: Any, x_ref: Any, w_refs: Any) -> None:
                    deep = pl.ds(k * DEPTH, DEPTH)

                    def copy_rows(count: int) -> None:
                        place = a_flat.at[slot, pl.ds(0, count)]
                        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row, count), deep], place, full.at[slot])

                    pl.when(taken <= ROWS)(lambda: copy_rows(ROWS))
                    pl.when(taken > ROWS)(lambda: copy_rows(CONSUMERS * ROWS))
                    across = pl.ds(col * out_cols, out_cols)
                    for i, w_ref in enumerate(w_refs):
                        source = w_ref.at[(group, deep, across) if transposed else (group, across, deep)]
                        place = b_smem.at[slot, pl.ds(i * out_cols, out_cols)] if paired else b_smem.at[slot]
                        plgpu.copy_gmem_to_smem(source, place, full.at[slot])

                def one_step(k: Any, _: None) -> None:
                    step = number * whole + k
                    slot = slot_of(step)
                    pl.when(step >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                    if paired:
                        copy(k, slot, x_refs[0], w_refs)
                        return
                    for i, (x_ref, w_ref) in enumerate(zip(x_refs, w_refs, strict=True)):
                        own = (k >= i * steps) & (k < (i + 1) * steps)
                        pl.when(own)(lambda i=i, x_ref=x_ref, w_ref=w_ref: copy(k - i * steps, slot, x_ref, (w_ref,)))

                lax.fori_loop(0, whole, one_step, None)

            number, _, _ = walk(sizes_ref, CONSUMERS * ROWS, col_tiles, ctas, visit)
            # Sees the last arrival of every slot, so that none is left to a kernel that has ended.
            for slot in range(stages):
                pl.when(number * whole > slot)(lambda slot=slot: plgpu.barrier_wait(empty.at[slot]))

        def consumer() -> None:
            plgpu.set_max_registers(REGISTERS[1], action="increase")
            writer = Writer(out_ref, tuple(ref.at[wg] for ref in views(staged, native)))

            def pass_by(first: Any) -> None:
                def one_step(k: Any, _: None) -> None:
                    plgpu.barrier_wait(full.at[slot_of(first + k)])
                    plgpu.barrier_arrive(empty.at[slot_of(first + k)])

                lax.fori_loop(0, whole, one_step, None)

            def multiply(first: Any, row: Any, left: Any, col: Any) -> None:
                def accumulate(acc: Any) -> Any:
                    def one_step(k: Any, _: None) -> None:
                        slot = slot_of(first + k)
                        plgpu.barrier_wait(full.at[slot])
                        b = b_smem.at[slot] if transposed else b_smem.at[slot].transpose((1, 0))
                        plgpu.wgmma(acc, a_tiled.at[slot, pl.ds(wg * ROWS, ROWS)], b)
                        plgpu.wgmma_wait(1)
                        pl.when(k > 0)(lambda: plgpu.barrier_arrive(empty.at[slot_of(first + k + (stages - 1))]))

                    lax.fori_loop(0, whole, one_step, None)
                    return acc[...]

                acc = pl.run_scoped(accumulate, plgpu.ACC((ROWS, tile.cols), jnp.float32))
                plgpu.barrier_arrive(empty.at[slot_of(first + (whole - 1))])
                if paired:
                    layout = plgpu.Layout.WGMMA.reduce(1)
                    factor = plgpu.load(scales[0].at[pl.ds(row, ROWS)], layout=layout, optimized=False)
                    factor = lax.broadcast_in_dim(factor, (ROWS, out_cols), (0,))
                    acc = factor * swiglu(acc[:, :out_cols], acc[:, out_cols:], limit)
                acc = acc.astype(jnp.bfloat16)
                for piece in range(0, out_cols, PIECE):
                    writer.write(acc[:, piece : piece + PIECE], row, left, col * out_cols + piece, piece // PIECE)

            def visit(number: Any, group: Any, row: Any, taken: Any, col: Any) -> None:
                left = taken - wg * ROWS
                pl.when(left > 0)(lambda: multiply(number * whole, row + wg * ROWS, left, col))
                pl.when(left <= 0)(lambda: pass_by(number * whole))

            _, end, ahead = walk(sizes_ref, CONSUMERS * ROWS, col_tiles, ctas, visit)
            writer.clear(end, ahead, ctas, CONSUMERS)

        pl.when(wg < CONSUMERS)(consumer)
        pl.when(wg == CONSUMERS)(producer)

    b_shape = (stages, DEPTH, tile.cols) if transposed else (stages, tile.cols, DEPTH)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
        scratch_types=(
            two_views((stages, CONSUMERS * ROWS, DEPTH), native),
            plgpu.SMEM(b_shape, jnp.bfloat16, transforms=TILED),
            two_views((CONSUMERS, 2, ROWS, PIECE), native),
            plgpu.Barrier(num_arrivals=3 if paired else 2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        ),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
        interpret=interpret,
    )(*xs, *weights, sizes, *([] if scale is None else [scale]))
