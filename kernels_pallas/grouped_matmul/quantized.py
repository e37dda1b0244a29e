"""Products of sorted rows with stored weights, on Hopper (Pallas Mosaic GPU): FP4 and FP8, dequantised in registers.

The weight is the first operand of the matrix instruction, so that the few rows of a group are its narrow side and no weight is
written back once it is dequantised. One warpgroup copies a line of codes of 64 output columns, and what the rows have for it,
into a ring of slots; the others multiply, each its own output columns.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.grouped_matmul import narrow, unpack
from kernels_pallas.grouped_matmul.product import PIECE, TILED, Writer, swiglu, two_views, views, walk
from kernels_pallas.grouped_matmul.unpack import BLOCK, LINE, Codes

COLS = 64  # output columns of one matrix instruction
NARROW = 16  # rows up to which every warp multiplies by itself
_TILED_BYTES: Any = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]


@dataclass(frozen=True)
class Tile:
    """Static choices. rows: of a group; consumers: multiplying warpgroups; parts: accumulators of each, 64 output columns (gate
    and up are two); stages: slots of the ring."""

    rows: int = 16
    consumers: int = 2
    parts: int = 2
    stages: int = 4


def quantized_product(
    x: jax.Array,
    weights: tuple[tuple[jax.Array, jax.Array], ...],
    sizes: jax.Array,
    scale: jax.Array | None = None,
    *,
    codes: Codes,
    limit: float = 0.0,
    tile: Tile = Tile(),
    ctas: int = 132,
    interpret: Any = None,
) -> jax.Array:
    """As `product.product`, of weights' codes ``[E, N, K bits / 8]`` and scales ``[E, N / rows, K / 32]``, uint8.

    x ``[T, K]`` bfloat16, after `unpack.permuted`; scale ``[T]``.
    """
    rows, depth = x.shape
    width = weights[0][0].shape[1]
    paired, native = len(weights) == 2, interpret is None
    assert not paired or tile.parts == 2
    lines, stages = depth // codes.depth, tile.stages
    blocks, own_blocks = codes.depth // BLOCK, codes.turn // BLOCK
    wide = tile.consumers * COLS
    out_cols = wide * (1 if paired else tile.parts)
    col_tiles = pl.cdiv(width, out_cols)
    ctas = min(ctas, col_tiles * (pl.cdiv(rows, tile.rows) + sizes.shape[0]))
    arrays = [a for pair in weights for a in pair]

    def body(x_ref: Any, *refs: Any) -> None:
        codes_refs, scales_refs = refs[: len(arrays) : 2], refs[1 : len(arrays) : 2]
        sizes_ref, factors = refs[len(arrays)], refs[len(arrays) + 1 : -6]
        out_ref, x_smem, codes_smem, staged, full, empty = refs[-6:]
        x_flat, x_tiled = views(x_smem, native)
        wg = lax.axis_index("wg")

        def slot_of(step: Any) -> Any:
            return lax.rem(step, jnp.int32(stages))

        def source(part: int, col: Any) -> tuple[int, Any]:
            """Which weight, and the tile's first row of it."""
            return (part, col * out_cols) if paired else (0, col * out_cols + part * wide)

        def producer() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def visit(number: Any, group: Any, row: Any, _: Any, col: Any) -> None:
                def one_step(k: Any, _: None) -> None:
                    step = number * lines + k
                    slot = slot_of(step)
                    pl.when(step >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                    for part in range(tile.parts):
                        which, first = source(part, col)
                        stored = codes_refs[which].at[group, pl.ds(first, wide), pl.ds(k * LINE, LINE)]
                        plgpu.copy_gmem_to_smem(stored, codes_smem.at[slot, part], full.at[slot])
                    for block in range(blocks):
                        deep = pl.ds(k * codes.depth + block * BLOCK, BLOCK)
                        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row, tile.rows), deep], x_flat.at[slot, block], full.at[slot])

                lax.fori_loop(0, lines, one_step, None)

            number, _, _ = walk(sizes_ref, tile.rows, col_tiles, ctas, visit)
            for slot in range(stages):
                pl.when(number * lines > slot)(lambda slot=slot: plgpu.barrier_wait(empty.at[slot]))

        def consumer() -> None:
            # All of what the launch has given the warpgroups; to ask for more is to wait for ever.
            pool = 512 // (tile.consumers + 1) // 8 * 8 * (tile.consumers + 1)
            plgpu.set_max_registers(min((pool - 40) // tile.consumers // 8 * 8, 232), action="increase")
            writer = Writer(out_ref, tuple(ref.at[wg] for ref in views(staged, native)))

            def visit(number: Any, group: Any, row: Any, taken: Any, col: Any) -> None:
                def weight(part: int) -> tuple[int, Any]:
                    """Which weight, and this warpgroup's first row of it."""
                    which, first = source(part, col)
                    return which, first + wg * COLS

                def scales_of(k: Any) -> list[Any]:
                    places = [weight(part) for part in range(tile.parts)]
                    return [unpack.load_scales(scales_refs[which], group, first, k, codes) for which, first in places]

                def each_line(use: Any, carry: Any) -> Any:
                    """Over the ring's slots, each freed once it is used."""

                    def one_line(k: Any, carry: Any) -> Any:
                        slot = slot_of(number * lines + k)
                        plgpu.barrier_wait(full.at[slot])
                        carry = use(k, slot, carry)
                        plgpu.barrier_arrive(empty.at[slot])
                        return carry

                    return lax.fori_loop(0, lines, one_line, carry)

                def unpacked(slot: Any, part: int, turn: int, scales: list[Any]) -> Any:
                    stored = codes_smem.at[slot, part, pl.ds(wg * COLS, COLS)]
                    return unpack.registers(unpack.load_codes(stored, turn, _TILED_BYTES), scales[part], codes, turn)

                def place(slot: Any, turn: int, i: int) -> Any:
                    return x_tiled.at[slot, turn * own_blocks + i]

                def accumulate(*accs: Any) -> Any:
                    def use(k: Any, slot: Any, scales: list[Any]) -> list[Any]:
                        later = scales_of(jnp.minimum(k + 1, lines - 1))
                        for turn in range(unpack.TURNS):
                            for part, acc in enumerate(accs):
                                a = unpacked(slot, part, turn, scales)
                                for i in range(own_blocks):
                                    b = place(slot, turn, i).transpose((1, 0))
                                    plgpu.wgmma(acc, a[:, i * BLOCK : (i + 1) * BLOCK], b)
                                plgpu.wgmma_wait(own_blocks)
                        plgpu.wgmma_wait(0)
                        return later

                    each_line(use, scales_of(jnp.int32(0)))
                    return [acc[...] for acc in accs]

                def narrowly(k: Any, slot: Any, carry: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
                    scales, sums = carry
                    later = scales_of(jnp.minimum(k + 1, lines - 1))
                    for turn in range(unpack.TURNS):
                        own_x = [narrow.load_rows(place(slot, turn, i), TILED) for i in range(own_blocks)]
                        sums = [narrow.multiply(acc, unpacked(slot, part, turn, scales), own_x) for part, acc in enumerate(sums)]
                    return later, sums

                def interpreted(k: Any, slot: Any, sums: list[Any]) -> list[Any]:
                    # The interpreter knows no matrix instruction with an operand in registers.
                    own_x = jnp.concatenate([x_tiled[slot, block] for block in range(blocks)], axis=1)
                    found = []
                    for part, acc in enumerate(sums):
                        which, first = weight(part)
                        # What is past the last column is thrown away.
                        first = lax.div(jnp.minimum(first, width - COLS), codes.rows)
                        columns = pl.ds(k * codes.depth // 32, codes.depth // 32)
                        scales = scales_refs[which][group, pl.ds(first, COLS // codes.rows), columns]
                        stored = codes_smem[slot, part, pl.ds(wg * COLS, COLS)]
                        a = unpack.interpreted(stored, scales, codes)
                        found.append(acc + lax.dot_general(a, own_x.astype(jnp.float32), (((1,), (1,)), ((), ()))))
                    # It also wants a fence between reads and a later copy.
                    plgpu.commit_smem()
                    return found

                if native and tile.rows <= NARROW:
                    zero = plgpu.layout_cast(jnp.zeros((COLS, tile.rows), jnp.float32), plgpu.Layout.WGMMA)
                    sums = each_line(narrowly, (scales_of(jnp.int32(0)), [zero] * tile.parts))[1]
                elif native:
                    sums = pl.run_scoped(accumulate, *[plgpu.ACC((COLS, tile.rows), jnp.float32)] * tile.parts)
                else:
                    sums = each_line(interpreted, [jnp.zeros((COLS, tile.rows), jnp.float32)] * tile.parts)
                if paired:
                    load = unpack.load_factors if native else unpack.interpreted_factors
                    factor = load(factors[0], row, tile.rows)
                    sums = [factor * swiglu(sums[0], sums[1], limit)]
                turn = 0
                for part, acc in enumerate(sums):
                    start = col * out_cols + part * wide + wg * COLS
                    acc = acc.astype(jnp.bfloat16)
                    for first in range(0, tile.rows, PIECE):
                        size = min(PIECE, tile.rows - first)
                        after = int(tile.rows <= PIECE)  # a group may end before a tile's second piece
                        part_of = acc[:, first : first + size]
                        writer.write(part_of, row + first, taken - first, start, turn, across=True, after=after)
                        turn += 1

            _, end, ahead = walk(sizes_ref, tile.rows, col_tiles, ctas, visit)
            writer.clear(end, ahead, ctas, tile.consumers)

        pl.when(wg < tile.consumers)(consumer)
        pl.when(wg == tile.consumers)(producer)

    piece = min(PIECE, tile.rows)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
        scratch_types=(
            two_views((stages, blocks, tile.rows, BLOCK), native),
            plgpu.SMEM((stages, tile.parts, wide, LINE), jnp.uint8, transforms=_TILED_BYTES),
            two_views((tile.consumers, 2, piece, COLS), native),
            plgpu.Barrier(num_arrivals=tile.parts + blocks, num_barriers=stages),
            plgpu.Barrier(num_arrivals=tile.consumers, num_barriers=stages),
        ),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=tile.consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
        interpret=interpret,
    )(x, *arrays, sizes, *([] if scale is None else [scale]))
