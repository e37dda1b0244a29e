"""Gradient of each group's weight on Hopper (Pallas Mosaic GPU): the group's rows of two arrays, multiplied over the rows.

One warpgroup copies 64 rows at a time into a ring of slots, two others multiply, each its own rows of the tile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.grouped_matmul.product import CONSUMERS, PIECE, REGISTERS, ROWS, TILED

_MASKED = 32  # rows that are cleared at once


@dataclass(frozen=True)
class Tile:
    """Static choices: rows and cols of a tile of the gradient, slots of the ring."""

    rows: int = 128
    cols: int = 256
    stages: int = 4


def walk(sizes: Any, items: int, ctas: int, visit: Callable[..., None]) -> Any:
    """Calls ``visit(step, steps, group, begin, low, high, item)`` for each of this CTA's tiles, ``items`` a group.

    step: how many steps of 64 rows came before; steps: those of the tile. The first begins at row ``begin``, a multiple of 8 as
    copies of tiles of 8 rows ask for; the group's rows are from ``low`` to ``high`` of there. Returns the number of steps.
    """

    def one_group(group: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        step, start, ahead = carry
        size = sizes[group]
        low = lax.rem(start, jnp.int32(8))
        steps = jnp.where(size > 0, lax.div(low + size + (ROWS - 1), jnp.int32(ROWS)), 0)
        own = lax.div(jnp.maximum(items - ahead, 0) + (ctas - 1), jnp.int32(ctas))

        def one_tile(i: Any, _: None) -> None:
            visit(step + i * steps, steps, group, start - low, low, low + size, ahead + i * ctas)

        lax.fori_loop(0, own, one_tile, None)
        return step + own * steps, start + size, ahead + own * ctas - items

    return lax.fori_loop(0, sizes.shape[0], one_group, (jnp.int32(0), jnp.int32(0), lax.axis_index("cta")))[0]


def _clear(ref: Any, low: Any, high: Any) -> None:
    """Zeros in the rows before ``low`` and from ``high`` on."""
    layout = plgpu.Layout.SMEM_GMEM_COPY((_MASKED, 64), jnp.bfloat16, 128)
    for row in range(0, ref.shape[0], _MASKED):

        @pl.when((low > row) | (high < row + _MASKED))
        def _(row: int = row) -> None:
            number = plgpu.broadcasted_iota(jnp.int32, (_MASKED, 64), 0, layout=layout)
            keep = (number >= low - row) & (number < high - row)
            for col in range(0, ref.shape[1], 64):
                part = ref.at[row : row + _MASKED, col : col + 64]
                part[...] = jnp.where(keep, plgpu.load(part, layout=layout), jnp.bfloat16(0))


def weight_gradient(
    g: jax.Array, x: jax.Array, sizes: jax.Array, *, tile: Tile = Tile(), ctas: int = 132, interpret: Any = None
) -> jax.Array:
    """``[E, N, K]`` bfloat16: over the rows of each group, the product of g ``[T, N]`` and x ``[T, K]``, both bfloat16.

    sizes ``[E]`` int32: rows of each group, one after the other. A group without rows has zeros.
    """
    # Copies take rows in whole tiles of 8; what is behind the last is of no group.
    g, x = (jnp.pad(a, ((0, -a.shape[0] % 8), (0, 0))) for a in (g, x))
    width, depth, groups = g.shape[1], x.shape[1], sizes.shape[0]
    col_tiles = pl.cdiv(depth, tile.cols)
    items = pl.cdiv(width, tile.rows) * col_tiles
    ctas = min(ctas, items * groups)
    stages, own_rows, own_cols = tile.stages, tile.rows // CONSUMERS, tile.cols // CONSUMERS

    def body(g_ref, x_ref, sizes_ref, out_ref, a_smem, b_smem, out_smem, full, empty, cleared):
        wg = lax.axis_index("wg")

        def place(item: Any) -> tuple[Any, Any]:
            return lax.div(item, jnp.int32(col_tiles)) * tile.rows, lax.rem(item, jnp.int32(col_tiles)) * tile.cols

        def producer() -> None:
            plgpu.set_max_registers(REGISTERS[0], action="decrease")

            def visit(first: Any, steps: Any, group: Any, begin: Any, low: Any, high: Any, item: Any) -> None:
                row, col = place(item)

                def one_step(k: Any, _: None) -> None:
                    step = first + k
                    slot = lax.rem(step, jnp.int32(stages))
                    pl.when(step >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                    tokens = pl.ds(begin + k * ROWS, ROWS)
                    barrier = full.at[slot]
                    plgpu.copy_gmem_to_smem(g_ref.at[tokens, pl.ds(row, tile.rows)], a_smem.at[slot], barrier)
                    plgpu.copy_gmem_to_smem(x_ref.at[tokens, pl.ds(col, tile.cols)], b_smem.at[slot], barrier)

                lax.fori_loop(0, steps, one_step, None)

            steps = walk(sizes_ref, items, ctas, visit)
            for slot in range(stages):
                pl.when(steps > slot)(lambda slot=slot: plgpu.barrier_wait(empty.at[slot]))

        def consumer() -> None:
            plgpu.set_max_registers(REGISTERS[1], action="increase")

            def visit(first: Any, steps: Any, group: Any, begin: Any, low: Any, high: Any, item: Any) -> None:
                row, col = place(item)

                def own_a(slot: Any) -> Any:
                    return a_smem.at[slot, :, pl.ds(wg * own_rows, own_rows)]

                def accumulate(acc: Any) -> Any:
                    def one_step(k: Any, _: None) -> None:
                        step = first + k
                        slot = lax.rem(step, jnp.int32(stages))
                        plgpu.barrier_wait(full.at[slot])
                        own_low, own_high = low - k * ROWS, high - k * ROWS

                        @pl.when((own_low > 0) | (own_high < ROWS))
                        def _() -> None:
                            _clear(own_a(slot), own_low, own_high)
                            _clear(b_smem.at[slot, :, pl.ds(wg * own_cols, own_cols)], own_low, own_high)
                            plgpu.commit_smem()
                            plgpu.barrier_arrive(cleared)
                            plgpu.barrier_wait(cleared)

                        plgpu.wgmma(acc, own_a(slot).transpose((1, 0)), b_smem.at[slot])
                        plgpu.wgmma_wait(1)
                        before = lax.rem(step + (stages - 1), jnp.int32(stages))
                        pl.when(k > 0)(lambda: plgpu.barrier_arrive(empty.at[before]))

                    lax.fori_loop(0, steps, one_step, None)
                    return acc[...]

                acc = pl.run_scoped(accumulate, plgpu.ACC((own_rows, tile.cols), jnp.float32))
                last = lax.rem(first + steps + (stages - 1), jnp.int32(stages))
                pl.when(steps > 0)(lambda: plgpu.barrier_arrive(empty.at[last]))
                acc = acc.astype(jnp.bfloat16)
                slot = 0
                for i in range(0, own_rows, ROWS):
                    for j in range(0, tile.cols, PIECE):
                        plgpu.wait_smem_to_gmem(out_smem.shape[1] - 1, wait_read_only=True)
                        out_smem[wg, slot] = acc[i : i + ROWS, j : j + PIECE]
                        plgpu.commit_smem()
                        at = out_ref.at[group, pl.ds(row + wg * own_rows + i, ROWS), pl.ds(col + j, PIECE)]
                        plgpu.copy_smem_to_gmem(out_smem.at[wg, slot], at)
                        slot = (slot + 1) % out_smem.shape[1]

            walk(sizes_ref, items, ctas, visit)
            plgpu.wait_smem_to_gmem(0)

        pl.when(wg < CONSUMERS)(consumer)
        pl.when(wg == CONSUMERS)(producer)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((groups, width, depth), jnp.bfloat16),
        scratch_types=(
            plgpu.SMEM((stages, ROWS, tile.rows), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((stages, ROWS, tile.cols), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((CONSUMERS, 2, ROWS, PIECE), jnp.bfloat16, transforms=TILED),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS),
        ),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        interpret=interpret,
    )(g, x, sizes)
