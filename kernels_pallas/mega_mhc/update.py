"""First kernel of mega_mhc on Hopper (Pallas Mosaic GPU): one pass over the streams, new ones written as they are read."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kernels_pallas.mosaic import TILED, store, two_views, views

ROWS, COLS = 64, 64  # the rows of one wgmma, the columns of one swizzled 128-byte row
MIXERS = 2
SHARED_BYTES = 227 << 10  # what a block may have
_OWN = ROWS // MIXERS
# A thread's. The warpgroups share what the launch has given all of them, 128 each; to ask for more is to wait for ever.
_MIXER_REGISTERS, _PROJECTOR_REGISTERS, _LOADER_REGISTERS = 184, 96, 40
_LANE = plgpu.LoweringSemantics.Lane


@dataclass(frozen=True)
class Tile:
    """Static choices. splits: how many CTAs share the columns of 64 tokens; slots: chunks of 64 columns of the streams in
    flight; pieces: pieces of the weight in flight (one stream of one chunk each); groups: how many tiles of tokens run at
    once (0: all of them).
    """

    splits: int = 2
    slots: int = 4
    pieces: int = 6
    groups: int = 0

    def shared_bytes(self, n: int) -> int:
        """Shared memory of a block for ``n`` streams."""
        weight_rows = 2 * n * (n + 2)
        chunks = self.slots * (n + 1) * ROWS * COLS * 2
        return chunks + self.pieces * weight_rows * COLS * 2 + 2 * ROWS * n * (n + 2) * 4 + 1024


def _layout() -> Any:
    return plgpu.Layout.SMEM_GMEM_COPY((_OWN, COLS), jnp.bfloat16, 128)


def _down(v: Any, layout: Any) -> Any:
    """A value a row, along that row."""
    return plgpu.layout_cast(lax.broadcast_in_dim(v, (_OWN, COLS), (0,)), layout)


def _i32(x: int) -> Any:
    return jnp.int32(x)


def _kernel(refs: tuple, scoped: tuple, *, tile: Tile, tiles: int, native: bool) -> None:
    x_gmem, y_gmem, post_gmem, comb_gmem, pre_gmem, w_gmem, xo_gmem, hat_gmem, p_gmem, q_gmem = refs
    _, n, d = x_gmem.shape
    m = w_gmem.shape[0] // 2
    chunks = d // COLS // tile.splits
    groups = tile.groups
    xs, yh, ws, coef, bars = scoped
    (xs_flat, xs), (yh_flat, yh) = views(xs, native), views(yh, native)
    full, ready, empty, w_full, c_full, c_free = bars
    block = lax.axis_index("block")
    group, split = lax.div(block, _i32(tile.splits)), lax.rem(block, _i32(tile.splits))
    wg = lax.axis_index("wg")
    own_tiles = lax.div(_i32(tiles + groups - 1) - group, _i32(groups))

    def first_row(it):
        return (group + it * groups) * ROWS

    def first_col(i):
        return (i * tile.splits + split) * COLS

    def loader():
        plgpu.set_max_registers(_LOADER_REGISTERS, action="decrease")

        def one_tile(it, _):
            row = pl.ds(first_row(it), ROWS)
            parity = lax.rem(it, _i32(2))
            pl.when(it >= 2)(lambda: plgpu.barrier_wait(c_free.at[parity]))
            for source, target in zip((post_gmem, comb_gmem, pre_gmem), coef, strict=True):
                plgpu.copy_gmem_to_smem(source.at[row], target.at[parity], c_full.at[parity])

            def one_chunk(i, _):
                g = it * chunks + i
                slot = lax.rem(g, _i32(tile.slots))
                pl.when(g >= tile.slots)(lambda: plgpu.barrier_wait(empty.at[slot]))
                col = pl.ds(first_col(i), COLS)
                for k in range(n):
                    plgpu.copy_gmem_to_smem(x_gmem.at[row, k, col], xs_flat.at[slot, k], full.at[slot])
                plgpu.copy_gmem_to_smem(y_gmem.at[row, col], yh_flat.at[slot], full.at[slot])

            lax.fori_loop(0, chunks, one_chunk, None)

        lax.fori_loop(0, own_tiles, one_tile, None)

        # Interpret mode holds that a barrier is not left with an arrival that nobody waited for.
        def drain(barrier, count, total):
            for back in range(count, 0, -1):
                slot = lax.rem(total - back + count, _i32(count))
                pl.when(total >= back)(lambda slot=slot: plgpu.barrier_wait(barrier.at[slot]))

        drain(empty, tile.slots, own_tiles * chunks)
        drain(c_free, 2, own_tiles)

    def mixer(w: int):
        plgpu.set_max_registers(_MIXER_REGISTERS, action="increase")
        rows = slice(w * _OWN, (w + 1) * _OWN)
        layout = _layout()

        def one_tile(it, _):
            parity = lax.rem(it, _i32(2))
            plgpu.barrier_wait(c_full.at[parity])

            def column(ref, j):
                return plgpu.load(ref.at[parity, rows, j], layout=layout.reduce(1), optimized=False)

            post_s, comb_s, pre_s = coef
            post = [column(post_s, k) for k in range(n)]
            comb = [[column(comb_s, j * n + k) for k in range(n)] for j in range(n)]
            pre = [column(pre_s, k) for k in range(n)]

            def one_chunk(i, carry):
                square, square_hat = carry
                g = it * chunks + i
                slot = lax.rem(g, _i32(tile.slots))
                plgpu.barrier_wait(full.at[slot])
                own_y = yh.at[slot]
                x = [plgpu.load(xs.at[slot, j, rows], layout=layout).astype(jnp.float32) for j in range(n)]
                y = plgpu.load(own_y.at[rows], layout=layout).astype(jnp.float32)
                hat, squares = None, None
                for k in range(n):
                    new = _down(post[k], layout) * y
                    for j in range(n):
                        new += _down(comb[j][k], layout) * x[j]
                    stored = new.astype(jnp.bfloat16)
                    xs[slot, k, rows] = stored
                    new = stored.astype(jnp.float32)
                    part = _down(pre[k], layout) * new
                    hat = part if hat is None else hat + part
                    squares = new * new if squares is None else squares + new * new
                assert hat is not None
                hat = hat.astype(jnp.bfloat16)
                own_y[rows] = hat
                hat = hat.astype(jnp.float32)
                plgpu.commit_smem()
                plgpu.barrier_arrive(ready.at[slot])
                return square + jnp.sum(squares, axis=1), square_hat + jnp.sum(hat * hat, axis=1)

            zero = plgpu.layout_cast(jnp.zeros((_OWN,), jnp.float32), layout.reduce(1))
            square, square_hat = lax.fori_loop(0, chunks, one_chunk, (zero, zero))
            plgpu.barrier_arrive(c_free.at[parity])
            token = pl.ds(first_row(it) + w * _OWN, _OWN)
            store(q_gmem.at[0, split, token], square)
            store(q_gmem.at[1, split, token], square_hat)

        lax.fori_loop(0, own_tiles, one_tile, None)

    def projector():
        plgpu.set_max_registers(_PROJECTOR_REGISTERS, action="decrease")
        last = own_tiles * (chunks * n)

        def load_piece(piece):
            slot = lax.rem(piece, _i32(tile.pieces))
            i, k = lax.rem(lax.div(piece, _i32(n)), _i32(chunks)), lax.rem(piece, _i32(n))
            col = pl.ds(k * d + first_col(i), COLS)
            plgpu.copy_gmem_to_smem(w_gmem.at[:, col], ws.at[slot], w_full.at[slot])

        for piece in range(tile.pieces):
            pl.when(last > piece)(functools.partial(load_piece, _i32(piece)))

        def one_tile(it, _):
            row = first_row(it)

            def project(acc):
                def one_chunk(i, _):
                    g = it * chunks + i
                    slot = lax.rem(g, _i32(tile.slots))
                    plgpu.barrier_wait(ready.at[slot])
                    col = pl.ds(first_col(i), COLS)
                    for k in range(n):
                        plgpu.copy_smem_to_gmem(xs_flat.at[slot, k], xo_gmem.at[pl.ds(row, ROWS), k, col])
                    plgpu.copy_smem_to_gmem(yh_flat.at[slot], hat_gmem.at[pl.ds(row, ROWS), col])
                    for k in range(n):
                        piece = g * n + k
                        w_slot = lax.rem(piece, _i32(tile.pieces))
                        plgpu.barrier_wait(w_full.at[w_slot])
                        plgpu.wgmma(acc, xs.at[slot, k], ws.at[w_slot].transpose((1, 0)))
                        plgpu.wgmma_wait(0)
                        pl.when(piece + tile.pieces < last)(functools.partial(load_piece, piece + tile.pieces))
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(empty.at[slot])

                lax.fori_loop(0, chunks, one_chunk, None)
                return acc[...]

            acc = pl.run_scoped(project, plgpu.ACC((ROWS, 2 * m), jnp.float32))
            store(p_gmem.at[split, pl.ds(row, ROWS)], acc[:, :m] + acc[:, m:])

        lax.fori_loop(0, own_tiles, one_tile, None)
        plgpu.wait_smem_to_gmem(0)

    for w in range(MIXERS):
        pl.when(wg == w)(functools.partial(mixer, w))
    pl.when(wg == MIXERS)(projector)
    pl.when(wg == MIXERS + 1)(loader)


def update(
    y: jax.Array,
    streams: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    pre: jax.Array,
    w: jax.Array,
    tile: Tile,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """New streams ``[T, N, D]`` and the collapsed row ``[T, D]`` in bfloat16; of each of S splits the projection
    ``[S, 64 ceil(T/64), M]`` and the sums of squares ``[2, S, 64 ceil(T/64)]`` of the new streams and of the collapsed row.

    w: the predictor as `kernels_pallas.mega_mhc.reference.high_and_low` splits it.
    """
    t, n, d = streams.shape
    assert d % (COLS * tile.splits) == 0
    tiles = pl.cdiv(t, ROWS)
    groups = min(tile.groups or tiles, tiles)
    tile = Tile(tile.splits, tile.slots, tile.pieces, groups)
    bf16, f32, native = jnp.bfloat16, jnp.float32, not interpret
    scratch = (
        two_views((tile.slots, n, ROWS, COLS), native),
        two_views((tile.slots, ROWS, COLS), native),
        plgpu.SMEM((tile.pieces, w.shape[0], COLS), bf16, transforms=TILED),
        tuple(plgpu.SMEM((2, ROWS, width), f32) for width in (n, n * n, n)),
        (
            plgpu.Barrier(num_arrivals=n + 1, num_barriers=tile.slots),
            plgpu.Barrier(num_arrivals=MIXERS, num_barriers=tile.slots),
            plgpu.Barrier(num_barriers=tile.slots),
            plgpu.Barrier(num_barriers=tile.pieces),
            plgpu.Barrier(num_arrivals=3, num_barriers=2),
            plgpu.Barrier(num_arrivals=MIXERS, num_barriers=2),
        ),
    )

    def mega_mhc(*refs):
        pl.run_scoped(
            lambda *scoped: _kernel(refs, scoped, tile=tile, tiles=tiles, native=native), *scratch, collective_axes="wg"
        )

    return plgpu.kernel(
        mega_mhc,
        out_type=(
            jax.ShapeDtypeStruct((t, n, d), bf16),
            jax.ShapeDtypeStruct((t, d), bf16),
            jax.ShapeDtypeStruct((tile.splits, tiles * ROWS, w.shape[0] // 2), f32),
            jax.ShapeDtypeStruct((2, tile.splits, tiles * ROWS), f32),
        ),
        grid=(groups * tile.splits,),
        grid_names=("block",),
        num_threads=MIXERS + 2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=_LANE, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(streams, y, post, comb.reshape(t, n * n), pre, w)
