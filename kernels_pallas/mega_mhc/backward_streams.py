"""Second backward kernel of mega_mhc on Hopper: one pass over the streams, y and their cotangents.

A block keeps a chunk of 64 columns and takes its tiles of 64 tokens one after the other, so that the predictor's part and the
sums of its gradient stay where they are. Four warpgroups: a loader; a projector, which adds the projection's part to the new
streams' cotangents (the predictor on the tensor cores) and, behind the mixers, multiplies the new streams by the projection's
cotangents and sends the tile out; two mixers, which have the rest.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas.mega_mhc.backward_tokens import HALF, TOKENS, scalars
from kernels_pallas.mega_mhc.update import COLS, MIXERS, ROWS
from kernels_pallas.mosaic import TILED, store

SLOTS = 2
_OWN = ROWS // MIXERS
# The contraction of a product is as long as its operands' swizzle, so the predictor's 24 rows make 32.
_NARROW = (plgpu.TilingTransform((8, HALF)), plgpu.SwizzleTransform(64))  # pyright: ignore[reportAbstractUsage]
_TILE = plgpu.Layout.TILED(plgpu.Tiling(((TOKENS, COLS), (4, COLS), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
_WGMMA = plgpu.Layout.WGMMA
# A thread's; together what the launch has given all warpgroups.
_MIXER_REGISTERS, _PROJECTOR_REGISTERS, _LOADER_REGISTERS = 176, 136, 24


@dataclass(frozen=True)
class Work:
    """How blocks share the tiles of all chunks, chunk by chunk: each has a run of ``least`` or one more."""

    tiles: int
    chunks: int
    blocks: int

    @property
    def least(self) -> int:
        return self.tiles * self.chunks // self.blocks

    @property
    def longer(self) -> int:
        """How many blocks, the first ones, have one more."""
        return self.tiles * self.chunks % self.blocks

    def begin(self, block: Any) -> Any:
        """The block's first tile, of an int32."""
        return block * self.least + jnp.minimum(block, self.longer)

    def owner(self, tile: Any, where: Any = jnp.where, div: Any = lax.div) -> Any:
        """The block that has ``tile``, of an int32."""
        ahead, least, longer = (np.int32(v) for v in (self.longer * (self.least + 1), self.least, self.longer))
        return where(tile < ahead, div(tile, least + np.int32(1)), longer + div(tile - ahead, least))

    def parts(self) -> np.ndarray:
        """How many blocks have tiles of each chunk."""
        first = np.arange(self.chunks, dtype=np.int32) * self.tiles
        start, last = (self.owner(tile, np.where, np.floor_divide) for tile in (first, first + self.tiles - 1))
        return last - start + 1


def _i32(x: int) -> Any:
    return jnp.int32(x)


def _across(v: Any, axis: int) -> Any:
    """A value a row (axis 0) or a column (1) of 16 x 64, all over them."""
    return plgpu.layout_cast(lax.broadcast_in_dim(v, (TOKENS, COLS), (axis,)), _TILE)


def _kernel(refs: tuple, scoped: tuple, *, work: Work) -> None:
    ins, outs = refs[:9], refs[9:]
    x_gmem, y_gmem, dnew_gmem, dh_gmem, scalar_gmem, dp_gmem, dpt_gmem, w_gmem, gain_gmem = ins
    dx_gmem, dy_gmem, sum_gmem, dw_gmem, dgain_gmem = outs
    _, n, d = x_gmem.shape
    m = dpt_gmem.shape[0] // 2
    xs, ys, gs, hs, ws, ps, pts, scalars_s, bars = scoped
    full, mixed, ready, empty, w_full = bars
    tiles = work.tiles
    block, wg = lax.axis_index("block"), lax.axis_index("wg")
    begin, end = work.begin(block), work.begin(block + 1)
    first = lax.div(begin, _i32(tiles))
    segments = lax.div(end - 1, _i32(tiles)) - first + 1

    def span(s):
        """Chunk, and its first and last tile but one, of the block's ``s``-th segment."""
        chunk = first + s
        return chunk, jnp.maximum(begin, chunk * tiles), jnp.minimum(end, (chunk + 1) * tiles)

    def place(u):
        """Tokens, slot and columns of the block's tile ``u``."""
        chunk = lax.div(u, _i32(tiles))
        return pl.ds((u - chunk * tiles) * ROWS, ROWS), lax.rem(u - begin, _i32(SLOTS)), pl.ds(chunk * COLS, COLS)

    def part(chunk):
        """Which of the chunk's parts this block sums."""
        return block - work.owner(chunk * tiles)

    def loader():
        plgpu.set_max_registers(_LOADER_REGISTERS, action="decrease")

        def one_tile(u, _):
            row, slot, col = place(u)
            pl.when(u - begin >= SLOTS)(lambda: plgpu.barrier_wait(empty.at[slot]))
            for source, target in ((dp_gmem.at[row], ps), (dpt_gmem.at[:, row], pts), (scalar_gmem.at[:, row], scalars_s)):
                plgpu.copy_gmem_to_smem(source, target.at[slot], full.at[slot])
            for source, target in ((dnew_gmem, gs), (x_gmem, xs)):
                for k in range(n):
                    plgpu.copy_gmem_to_smem(source.at[row, k, col], target.at[slot, k], full.at[slot])
            for source, target in ((dh_gmem, hs), (y_gmem, ys)):
                plgpu.copy_gmem_to_smem(source.at[row, col], target.at[slot], full.at[slot])

        lax.fori_loop(begin, end, one_tile, None)

        # Interpret mode holds that a barrier is not left with an arrival that nobody waited for.
        def drain(u, _):
            plgpu.barrier_wait(empty.at[place(u)[1]])

        lax.fori_loop(jnp.maximum(begin, end - SLOTS), end, drain, None)

    def projector():
        plgpu.set_max_registers(_PROJECTOR_REGISTERS, action="increase")

        def project(u):
            _, slot, _ = place(u)
            plgpu.barrier_wait(full.at[slot])
            for k in range(n):

                def product(acc, k=k):
                    for half in range(2):
                        plgpu.wgmma(acc, ps.at[slot, :, pl.ds(half * HALF, HALF)], ws.at[k])
                    return acc[...]

                acc = pl.run_scoped(product, plgpu.ACC((ROWS, COLS), jnp.float32))
                own = plgpu.load(gs.at[slot, k], layout=_WGMMA).astype(jnp.float32)
                gs[slot, k] = (own + acc).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.barrier_arrive(mixed.at[slot])

        def one_segment(s, _):
            chunk, start, stop = span(s)
            col = pl.ds(chunk * COLS, COLS)
            for k in range(n):
                plgpu.copy_gmem_to_smem(w_gmem.at[:, pl.ds(k * d + chunk * COLS, COLS)], ws.at[k], w_full)
            plgpu.barrier_wait(w_full)
            project(start)

            def products(*accs):
                def one_tile(u, _):
                    pl.when(u + 1 < stop)(lambda: project(u + 1))
                    row, slot, _ = place(u)
                    plgpu.barrier_wait(ready.at[slot])
                    for k in range(n):
                        plgpu.copy_smem_to_gmem(xs.at[slot, k], dx_gmem.at[row, k, col])
                    plgpu.copy_smem_to_gmem(ys.at[slot], dy_gmem.at[row, col])
                    for k in range(n):
                        for half in range(2):
                            cotangents = pts.at[slot, pl.ds(half * m, m)].transpose((1, 0))
                            plgpu.wgmma(accs[k], gs.at[slot, k].transpose((1, 0)), cotangents)
                    plgpu.wgmma_wait(0)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(empty.at[slot])

                lax.fori_loop(start, stop, one_tile, None)
                return tuple(acc[...] for acc in accs)

            sums = pl.run_scoped(products, *(plgpu.ACC((COLS, m), jnp.float32) for _ in range(n)))
            for k in range(n):
                store(dw_gmem.at[part(chunk), k, col], sums[k])

        lax.fori_loop(0, segments, one_segment, None)
        plgpu.wait_smem_to_gmem(0)

    def mixer(w: int):
        plgpu.set_max_registers(_MIXER_REGISTERS, action="increase")
        f32 = jnp.float32

        def one_segment(s, _):
            chunk, start, stop = span(s)
            col = pl.ds(chunk * COLS, COLS)
            gain = plgpu.load(gain_gmem.at[col], layout=_TILE.reduce(0), optimized=False)

            def one_tile(u, dgain):
                _, slot, _ = place(u)
                plgpu.barrier_wait(full.at[slot])
                plgpu.barrier_wait(mixed.at[slot])
                for piece in range(_OWN // TOKENS):
                    rows = slice(w * _OWN + piece * TOKENS, w * _OWN + (piece + 1) * TOKENS)
                    token = pl.ds(place(u)[0].start + rows.start, TOKENS)
                    dgain = one_piece(slot, rows, token, chunk, gain, dgain)
                plgpu.commit_smem()
                plgpu.barrier_arrive(ready.at[slot])
                return dgain

            zero = plgpu.layout_cast(jnp.zeros((TOKENS, COLS), f32), _TILE)
            dgain = lax.fori_loop(start, stop, one_tile, zero)
            store(dgain_gmem.at[part(chunk), w, :, col], dgain)

        def one_piece(slot, rows, token, chunk, gain, dgain):
            def row_value(i):
                return plgpu.load(scalars_s.at[slot, i, rows], layout=_TILE.reduce(1), optimized=False)

            def scaled(i, v):
                return _across(row_value(i), 0) * v

            def fetch(ref, *index):
                return plgpu.load(ref.at[(slot, *index, rows)], layout=_TILE).astype(f32)

            def keep(i, v):
                store(sum_gmem.at[chunk, i, token], jnp.sum(v, axis=1))

            x = [fetch(xs, j) for j in range(n)]
            y = fetch(ys)
            news, hat = [], None
            for k in range(n):
                new = scaled(k, y)
                for j in range(n):
                    new += scaled(n + j * n + k, x[j])
                new = new.astype(jnp.bfloat16)
                news.append(new)
                collapsed = scaled(n + n * n + k, new.astype(f32))
                hat = collapsed if hat is None else hat + collapsed
            assert hat is not None
            hat = hat.astype(jnp.bfloat16).astype(f32)
            dh = scaled(m, fetch(hs))
            dgain += dh * hat
            dhat = dh * _across(gain, 1) - scaled(m + 1, hat)
            dy, dx = None, [None] * n
            for k in range(n):
                new = news[k].astype(f32)
                grad = fetch(gs, k) + scaled(n + n * n + k, dhat) + scaled(m + 2, new)
                gs[slot, k, rows] = news[k]
                keep(n + n * n + k, dhat * new)
                keep(k, grad * y)
                term = scaled(k, grad)
                dy = term if dy is None else dy + term
                for j in range(n):
                    keep(n + j * n + k, grad * x[j])
                    term = scaled(n + j * n + k, grad)
                    dx[j] = term if dx[j] is None else dx[j] + term
            assert dy is not None
            ys[slot, rows] = dy.astype(jnp.bfloat16)
            for j in range(n):
                xs[slot, j, rows] = dx[j].astype(jnp.bfloat16)
            return dgain

        lax.fori_loop(0, segments, one_segment, None)

    for w in range(MIXERS):
        pl.when(wg == w)(functools.partial(mixer, w))
    pl.when(wg == MIXERS)(projector)
    pl.when(wg == MIXERS + 1)(loader)


def backward_streams(
    y: jax.Array,
    streams: jax.Array,
    dnew: jax.Array,
    dx: jax.Array,
    scalar: jax.Array,
    dp: jax.Array,
    dpt: jax.Array,
    w: jax.Array,
    gain: jax.Array,
    blocks: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Cotangents of the streams and of y, and sums for all others, for T a multiple of 64 and D of 64.

    y, streams: what the forward took; dnew, dx: cotangents of the new streams and of the next input; scalar, dp, dpt: of
    `kernels_pallas.mega_mhc.backward_tokens.backward_tokens`; w: the predictor's rows in bfloat16 ``[32, N D]``, those past
    M zero; gain ``[D]`` float32. blocks: how many run at once.

    Returns ``[T, N, D]`` and ``[T, D]`` in bfloat16; float32 sums over each chunk of 64 columns ``[D / 64, 2 N + N N, T]`` in
    the order post, comb, pre; the predictor's gradient ``[parts, N, D, M]`` and the gain's ``[parts, 2, 16, D]``, of which
    a chunk has as many parts as `Work.parts` says and the others are not written.
    """
    t, n, d = streams.shape
    m = dpt.shape[0] // 2
    bf16, f32 = jnp.bfloat16, jnp.float32
    work = Work(t // ROWS, d // COLS, blocks)
    scratch = (
        plgpu.SMEM((SLOTS, n, ROWS, COLS), bf16, transforms=TILED),
        plgpu.SMEM((SLOTS, ROWS, COLS), bf16, transforms=TILED),
        plgpu.SMEM((SLOTS, n, ROWS, COLS), bf16, transforms=TILED),
        plgpu.SMEM((SLOTS, ROWS, COLS), bf16, transforms=TILED),
        plgpu.SMEM((n, HALF, COLS), bf16, transforms=_NARROW),
        plgpu.SMEM((SLOTS, ROWS, 2 * HALF), bf16, transforms=_NARROW),
        plgpu.SMEM((SLOTS, 2 * m, ROWS), bf16, transforms=TILED),
        plgpu.SMEM((SLOTS, scalars(n), ROWS), f32),
        (
            plgpu.Barrier(num_arrivals=2 * n + 5, num_barriers=SLOTS),
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=MIXERS, num_barriers=SLOTS),
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=n),
        ),
    )

    def mega_mhc_backward_streams(*refs):
        pl.run_scoped(lambda *scoped: _kernel(refs, scoped, work=work), *scratch, collective_axes="wg")

    parts = int(work.parts().max())
    return plgpu.kernel(
        mega_mhc_backward_streams,
        out_type=(
            jax.ShapeDtypeStruct((t, n, d), bf16),
            jax.ShapeDtypeStruct((t, d), bf16),
            jax.ShapeDtypeStruct((d // COLS, 2 * n + n * n, t), f32),
            jax.ShapeDtypeStruct((parts, n, d, m), f32),
            jax.ShapeDtypeStruct((parts, MIXERS, TOKENS, d), f32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=MIXERS + 2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        interpret=interpret,
    )(streams, y, dnew, dx, scalar, dp, dpt, w, gain)
