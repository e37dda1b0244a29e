"""First kernel of mega_mhc on Hopper (Pallas Mosaic GPU): one pass over the streams, new ones written as they are read."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kernels_pallas.mega_mhc.finish import LANES

ROWS, COLS = 64, 64  # the rows of one wgmma, the columns of one swizzled 128-byte row
_TILED = (plgpu.TilingTransform((8, COLS)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
# A thread's, by the number of mixing warpgroups. They share what the launch has given all of them: 128 for each of four
# warpgroups, 80 (85, in eights) for each of six. To ask for more is to wait for ever.
MIXER_REGISTERS, PROJECTOR_REGISTERS, LOADER_REGISTERS = {2: 184, 4: 96}, {2: 96, 4: 56}, {2: 40, 4: 40}
_LANE = plgpu.LoweringSemantics.Lane


@dataclass(frozen=True)
class Tile:
    """Static choices. splits: how many CTAs share the columns of 64 tokens; width: columns of a chunk, 64 or 128;
    slots: chunks of streams in flight; pieces: pieces of the weight in flight (one stream of one chunk each);
    groups: how many tiles of tokens run at once; ring: chunks of y and of collapsed rows in shared memory, where these
    stay until their RMS is known, at least 2 more than a CTA has in a tile (0: they are written without it); mixers: how
    many warpgroups share the rows.
    """

    splits: int = 8
    width: int = 64
    slots: int = 3
    pieces: int = 3
    groups: int = 16
    ring: int = 13
    mixers: int = 2


def _layout(rows: int) -> Any:
    """Of 16-byte vectors, eight threads a row."""
    if rows == 32:
        return plgpu.Layout.SMEM_GMEM_COPY((rows, COLS), jnp.bfloat16, 128)
    return plgpu.Layout.TILED(plgpu.Tiling(((16, COLS), (4, 8))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1)


def _i32(x: int) -> Any:
    return jnp.int32(x)


def _kernel(refs: tuple, scoped: tuple, *, tile: Tile, tiles: int, norm_eps: float, clustered: bool) -> None:
    x_gmem, y_gmem, post_gmem, comb_gmem, pre_gmem, w_gmem, gain_gmem, xo_gmem, xhat_gmem, p_gmem, q_gmem = refs
    _, n, d = x_gmem.shape
    m = w_gmem.shape[0] // 2
    width, splits, hold = tile.width, tile.splits, tile.ring > 0
    own = ROWS // tile.mixers
    layout = _layout(own)
    chunks = d // width // splits
    xs, yh, ws, coef, scale_s, bars = scoped
    full, ready, empty, y_full, y_free, w_full, c_full, c_free, together = bars
    if clustered:
        group, split = lax.axis_index("group"), lax.axis_index("split")
    else:
        block = lax.axis_index("block")
        group, split = lax.div(block, _i32(splits)), lax.rem(block, _i32(splits))
    wg = lax.axis_index("wg")
    own_tiles = lax.div(_i32(tiles + tile.groups - 1) - group, _i32(tile.groups))
    total = own_tiles * chunks

    def first_row(it):
        return (group + it * tile.groups) * ROWS

    def first_col(i):
        return (i * splits + split) * width

    def down(v):
        """A value a row, along that row."""
        return plgpu.layout_cast(lax.broadcast_in_dim(v, (own, COLS), (0,)), layout)

    def along(v):
        """A value a column, down that column."""
        return plgpu.layout_cast(lax.broadcast_in_dim(v, (own, COLS), (1,)), layout)

    def in_ring(g):
        return lax.rem(g, _i32(tile.ring))

    def loader():
        plgpu.set_max_registers(LOADER_REGISTERS[tile.mixers], action="decrease")

        def one_tile(it, _):
            row = pl.ds(first_row(it), ROWS)
            pl.when(it >= 1)(lambda: plgpu.barrier_wait(c_free))
            for source, target in zip((post_gmem, comb_gmem, pre_gmem), coef, strict=True):
                plgpu.copy_gmem_to_smem(source.at[row], target, c_full)

            def one_chunk(i, _):
                g = it * chunks + i
                slot = lax.rem(g, _i32(tile.slots))
                pl.when(g >= tile.slots)(lambda: plgpu.barrier_wait(empty.at[slot]))
                col = pl.ds(first_col(i), width)
                for k in range(n):
                    plgpu.copy_gmem_to_smem(x_gmem.at[row, k, col], xs.at[slot, k], full.at[slot])
                if hold:
                    pl.when(g >= tile.ring)(lambda: plgpu.barrier_wait(y_free.at[in_ring(g)]))
                    plgpu.copy_gmem_to_smem(y_gmem.at[row, col], yh.at[in_ring(g)], y_full.at[in_ring(g)])
                else:
                    plgpu.copy_gmem_to_smem(y_gmem.at[row, col], yh.at[slot], full.at[slot])

            lax.fori_loop(0, chunks, one_chunk, None)

        lax.fori_loop(0, own_tiles, one_tile, None)

        # Interpret mode holds that a barrier is not left with an arrival that nobody waited for.
        def drain(barrier, count):
            for back in range(count, 0, -1):
                slot = lax.rem(total - back + count, _i32(count))
                pl.when(total >= back)(lambda slot=slot: plgpu.barrier_wait(barrier.at[slot]))

        drain(empty, tile.slots)
        plgpu.barrier_wait(c_free)
        if hold:
            drain(y_free, tile.ring)

    def mixer(w: int):
        plgpu.set_max_registers(MIXER_REGISTERS[tile.mixers], action="increase")
        rows = slice(w * own, (w + 1) * own)
        zero = plgpu.layout_cast(jnp.zeros((own,), jnp.float32), layout.reduce(1))

        def token(it):
            return pl.ds(first_row(it) + w * own, own)

        def root_mean_square(it):
            """Of the tile's collapsed rows, once every CTA that shares them has written its sums of squares."""
            if clustered:
                plgpu.barrier_wait(together)
            else:
                done = group + it * tile.groups
                plgpu.semaphore_wait(together.at[tile.mixers * done + w], splits, decrement=False, memory_scope="gpu")
            squares = zero
            for s in range(splits):
                squares += plgpu.load(q_gmem.at[1, s, token(it)], layout=layout.reduce(1), optimized=False)
            scale_s[rows] = lax.rsqrt(squares / d + norm_eps)
            plgpu.commit_smem()

        def release(c):
            """Collapsed chunk ``c`` has left shared memory: the next y may take its place."""
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(y_free.at[in_ring(c)])

        def normalise(c):
            it, i = lax.div(c, _i32(chunks)), lax.rem(c, _i32(chunks))
            pl.when(i == 0)(lambda: root_mean_square(it))
            scale = down(plgpu.load(scale_s.at[rows], layout=layout.reduce(1), optimized=False))
            hat_s = yh.at[in_ring(c)]
            for h in range(width // COLS):
                part = slice(h * COLS, (h + 1) * COLS)
                gain = plgpu.load(gain_gmem.at[pl.ds(first_col(i) + h * COLS, COLS)], layout=layout.reduce(0), optimized=False)
                hat = plgpu.load(hat_s.at[rows, part], layout=layout).astype(jnp.float32)
                hat_s[rows, part] = (hat * scale * along(gain)).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(hat_s.at[rows], xhat_gmem.at[token(it), pl.ds(first_col(i), width)])

        def one_tile(it, _):
            plgpu.barrier_wait(c_full)

            def column(ref, j):
                return plgpu.load(ref.at[rows, j], layout=layout.reduce(1), optimized=False)

            post_s, comb_s, pre_s = coef
            post = [column(post_s, k) for k in range(n)]
            comb = [[column(comb_s, j * n + k) for k in range(n)] for j in range(n)]
            pre = [column(pre_s, k) for k in range(n)]
            plgpu.commit_smem()  # all four warps have read them
            plgpu.barrier_arrive(c_free)

            def one_chunk(i, carry):
                square, square_hat = carry
                g = it * chunks + i
                slot = lax.rem(g, _i32(tile.slots))
                plgpu.barrier_wait(full.at[slot])
                if hold:
                    plgpu.barrier_wait(y_full.at[in_ring(g)])
                    pl.when(g > chunks)(lambda: release(g - chunks - 1))
                own_y = yh.at[in_ring(g)] if hold else yh.at[slot]
                for h in range(width // COLS):
                    part = slice(h * COLS, (h + 1) * COLS)
                    x = [plgpu.load(xs.at[slot, j, rows, part], layout=layout).astype(jnp.float32) for j in range(n)]
                    y = plgpu.load(own_y.at[rows, part], layout=layout).astype(jnp.float32)
                    hats, squares = [], []
                    for k in range(n):
                        new = down(post[k]) * y
                        for j in range(n):
                            new += down(comb[j][k]) * x[j]
                        stored = new.astype(jnp.bfloat16)
                        xs[slot, k, rows, part] = stored
                        new = stored.astype(jnp.float32)
                        hats.append(down(pre[k]) * new)
                        squares.append(new * new)
                    hat = functools.reduce(jnp.add, hats).astype(jnp.bfloat16)
                    own_y[rows, part] = hat
                    hat = hat.astype(jnp.float32)
                    square += jnp.sum(functools.reduce(jnp.add, squares), axis=1)
                    square_hat += jnp.sum(hat * hat, axis=1)
                plgpu.commit_smem()
                plgpu.barrier_arrive(ready.at[slot])
                # A tile late, so that nobody waits for the other CTAs' sums.
                if hold:
                    pl.when(it >= 1)(lambda: normalise(g - chunks))
                return square, square_hat

            square, square_hat = lax.fori_loop(0, chunks, one_chunk, (zero, zero))
            q_gmem[0, split, token(it)] = square
            q_gmem[1, split, token(it)] = square_hat
            if not hold:
                return
            plgpu.commit_smem()  # all four warps have written before one thread says so
            if clustered:
                plgpu.barrier_arrive(together)
            else:
                done = group + it * tile.groups
                plgpu.semaphore_signal(together.at[tile.mixers * done + w], memory_scope="gpu")

        lax.fori_loop(0, own_tiles, one_tile, None)
        if hold:

            def remaining(i, _):
                c = total - chunks + i
                pl.when(c >= 1)(lambda: release(c - 1))
                normalise(c)

            lax.fori_loop(0, chunks, remaining, None)
            release(total - 1)
            plgpu.wait_smem_to_gmem(0)

    def projector():
        plgpu.set_max_registers(PROJECTOR_REGISTERS[tile.mixers], action="decrease")
        last = total * n

        def load_piece(piece):
            slot = lax.rem(piece, _i32(tile.pieces))
            i, k = lax.rem(lax.div(piece, _i32(n)), _i32(chunks)), lax.rem(piece, _i32(n))
            plgpu.copy_gmem_to_smem(w_gmem.at[:, pl.ds(k * d + first_col(i), width)], ws.at[slot], w_full.at[slot])

        for piece in range(tile.pieces):
            pl.when(last > piece)(functools.partial(load_piece, _i32(piece)))

        def one_tile(it, _):
            row = first_row(it)

            def project(acc):
                def one_chunk(i, _):
                    g = it * chunks + i
                    slot = lax.rem(g, _i32(tile.slots))
                    plgpu.barrier_wait(ready.at[slot])
                    col = pl.ds(first_col(i), width)
                    for k in range(n):
                        plgpu.copy_smem_to_gmem(xs.at[slot, k], xo_gmem.at[pl.ds(row, ROWS), k, col])
                    if not hold:
                        plgpu.copy_smem_to_gmem(yh.at[slot], xhat_gmem.at[pl.ds(row, ROWS), col])
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
            p_gmem[split, pl.ds(row, ROWS)] = acc[:, :m] + acc[:, m:]

        lax.fori_loop(0, own_tiles, one_tile, None)
        plgpu.wait_smem_to_gmem(0)

    for w in range(tile.mixers):
        pl.when(wg == w)(functools.partial(mixer, w))
    pl.when(wg == tile.mixers)(projector)
    pl.when(wg == tile.mixers + 1)(loader)


def update(y, streams, post, comb, pre, w, gain, tile: Tile, norm_eps: float, interpret: Any):
    """New streams ``[T, N, D]``; collapsed row ``[T, D]``, normalised if it was held; of each of S splits the projection
    ``[S, 64 ceil(T/64), M]`` and the sums of squares ``[2, S, 64 ceil(T/64) + 128]`` of the new streams and of the collapsed row.
    """
    t, n, d = streams.shape
    tiles = pl.cdiv(t, ROWS)
    chunks = d // tile.width // tile.splits
    tile = replace(tile, groups=min(tile.groups or tiles, tiles))
    assert chunks * tile.splits * tile.width == d and (not tile.ring or tile.ring >= chunks + 2)
    hold = tile.ring > 0
    # Interpret mode has no semaphores. On the device a cluster of 8 would leave up to 20 of 132 SMs without work.
    clustered = hold and bool(interpret)
    held = tile.ring if hold else tile.slots
    bf16, f32 = jnp.bfloat16, jnp.float32
    axes: dict[str, Any] = (
        {"grid": (tile.groups,), "grid_names": ("group",), "cluster": (tile.splits,), "cluster_names": ("split",)}
        if clustered
        else {"grid": (tile.groups * tile.splits,), "grid_names": ("block",)}
    )
    exchange: Any = plgpu.ClusterBarrier(collective_axes=("split",), num_arrivals=tile.mixers) if clustered else plgpu.Barrier()
    scratch = (
        plgpu.SMEM((tile.slots, n, ROWS, tile.width), bf16, transforms=_TILED),
        plgpu.SMEM((held, ROWS, tile.width), bf16, transforms=_TILED),
        plgpu.SMEM((tile.pieces, w.shape[0], tile.width), bf16, transforms=_TILED),
        tuple(plgpu.SMEM((ROWS, columns), f32) for columns in (n, n * n, n)),
        plgpu.SMEM((ROWS,), f32),
        (
            plgpu.Barrier(num_arrivals=n if hold else n + 1, num_barriers=tile.slots),
            plgpu.Barrier(num_arrivals=tile.mixers, num_barriers=tile.slots),
            plgpu.Barrier(num_barriers=tile.slots),
            plgpu.Barrier(num_barriers=held),
            plgpu.Barrier(num_arrivals=tile.mixers, num_barriers=held),
            plgpu.Barrier(num_barriers=tile.pieces),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(num_arrivals=tile.mixers),
            exchange,
        ),
    )

    def mega_mhc(*refs):
        def body(*scoped):
            *parts, bars = scoped
            if hold and not clustered:
                bars = (*bars[:-1], pl.get_global(plgpu.SemaphoreType.REGULAR((tile.mixers * tiles,))))
            _kernel(refs, (*parts, bars), tile=tile, tiles=tiles, norm_eps=norm_eps, clustered=clustered)

        pl.run_scoped(body, *scratch, collective_axes="wg")

    return plgpu.kernel(
        mega_mhc,
        out_type=(
            jax.ShapeDtypeStruct((t, n, d), bf16),
            jax.ShapeDtypeStruct((t, d), bf16),
            jax.ShapeDtypeStruct((tile.splits, tiles * ROWS, w.shape[0] // 2), f32),
            jax.ShapeDtypeStruct((2, tile.splits, tiles * ROWS + LANES), f32),
        ),
        num_threads=tile.mixers + 2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=_LANE, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=interpret,
        **axes,
    )(streams, y, post, comb.reshape(t, n * n), pre, w, gain)
