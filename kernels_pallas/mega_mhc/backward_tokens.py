"""First backward kernel of mega_mhc on Hopper: what a token needs that is not a row of channels.

Back through the coefficients (sigmoids, Sinkhorn's steps, the RMS of the streams) and, for the norm, one product of two rows.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kernels_pallas.mega_mhc.update import COLS
from kernels_pallas.mosaic import store

TOKENS = 16  # of a block: four rows a warp, and as many blocks as fill the device at 4096 tokens
_AHEAD = 8  # tiles of both rows that are on their way at once
# A warp has four rows, eight lanes a row, eight channels a lane.
_TILE = plgpu.Layout.TILED(plgpu.Tiling(((TOKENS, COLS), (4, COLS), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
_ROW = _TILE.reduce(1)
HALF = 32  # of the projection's cotangents: rows for the high halves, and as many for the low ones


def scalars(n: int) -> int:
    """How many numbers a token hands to `kernels_pallas.mega_mhc.backward_streams`: post, comb, pre, then three of the norms."""
    return 2 * n + n * n + 4


def _total(entries: list[Any]) -> Any:
    return functools.reduce(lambda a, b: a + b, entries)


def _kernel(refs: tuple, sums: Any, *, n: int, d: int, iters: int, eps: float) -> None:
    dx_gmem, x_gmem, stats_gmem, predictor_gmem, old, new, outs = refs
    scalar_gmem, dp_gmem, dpt_gmem, dm_gmem = outs
    m = 2 * n + n * n
    block, wg = lax.axis_index("block"), lax.axis_index("wg")
    token = pl.ds(block * TOKENS, TOKENS)

    def column(ref, *index):
        return plgpu.load(ref.at[(token, *index)], layout=_ROW, optimized=False)

    def norm():
        def tiles(i, total):
            cols = [pl.ds((i * _AHEAD + a) * COLS, COLS) for a in range(_AHEAD)]
            pairs = [[plgpu.load(ref.at[token, c], layout=_TILE, optimized=False) for c in cols] for ref in (dx_gmem, x_gmem)]
            for a, b in zip(*pairs, strict=True):
                total += a.astype(jnp.float32) * b.astype(jnp.float32)
            return total

        def one(i, total):
            col = pl.ds(i * COLS, COLS)
            a, b = (plgpu.load(ref.at[token, col], layout=_TILE, optimized=False) for ref in (dx_gmem, x_gmem))
            return total + a.astype(jnp.float32) * b.astype(jnp.float32)

        whole = d // COLS // _AHEAD
        total = plgpu.layout_cast(jnp.zeros((TOKENS, COLS), jnp.float32), _TILE)
        total = lax.fori_loop(0, whole, tiles, total)
        total = lax.fori_loop(whole * _AHEAD, d // COLS, one, total)
        rms = column(stats_gmem, m + 1)
        # x is the normalised row times the gain, so that this is the product of its cotangent with the row.
        store(scalar_gmem.at[m + 1, token], rms * rms / d * jnp.sum(total, axis=1))
        store(scalar_gmem.at[m, token], rms)

    def coefficients():
        z = [column(stats_gmem, i) for i in range(m)]
        rms = column(stats_gmem, m)

        def predictor(row, i):
            return plgpu.layout_cast(jnp.broadcast_to(predictor_gmem[row, i], (TOKENS,)), _ROW)

        def mix(i):
            return z[i] * predictor(0, i) + predictor(1, i)

        dz_sum = None

        def give(i, dm):
            """Hands on the cotangent of mix ``i``."""
            nonlocal dz_sum
            store(dm_gmem.at[i, token], dm)
            dz = dm * predictor(0, i)
            part = dz * z[i]
            dz_sum = part if dz_sum is None else dz_sum + part
            dp = dz * rms
            high = dp.astype(jnp.bfloat16)
            low = (dp - high.astype(jnp.float32)).astype(jnp.bfloat16)
            for half, value in enumerate((high, low)):
                store(dp_gmem.at[token, half * HALF + i], value)
                store(dpt_gmem.at[half * m + i, token], value)

        for i in range(2 * n):
            s = 1.0 / (1.0 + jnp.exp(-mix(i)))
            cotangent = column(new[0], i) if i < n else 2.0 * column(new[1], i - n)
            give(i, cotangent * s * (1.0 - s))

        # Forward, keeping every step's divisors; then back from the end, the matrices by multiplying with them again.
        soft = []
        for j in range(n):
            row = [mix(2 * n + j * n + k) for k in range(n)]
            top = functools.reduce(jnp.maximum, row)
            e = [jnp.exp(entry - top) for entry in row]
            scale = 1.0 / _total(e)
            soft.append([entry * scale for entry in e])

        def columns(i, a):
            divisors = [_total([a[j][k] for j in range(n)]) + eps for k in range(n)]
            for k in range(n):
                store(sums.at[i, k], divisors[k])
            inverse = [1.0 / v for v in divisors]
            return [[a[j][k] * inverse[k] for k in range(n)] for j in range(n)]

        def step(i, a):
            divisors = [_total(row) + eps for row in a]
            for j in range(n):
                store(sums.at[i, n + j], divisors[j])
            inverse = [1.0 / v for v in divisors]
            return columns(i, [[entry * inverse[j] for entry in a[j]] for j in range(n)])

        a = columns(0, [[entry + eps for entry in row] for row in soft])
        a = lax.fori_loop(1, iters, step, a)
        da = [[column(new[2], j * n + k) for k in range(n)] for j in range(n)]

        def kept(i, which):
            return plgpu.load(sums.at[i, which], layout=_ROW, optimized=False)

        def columns_back(i, a, da):
            divisors = [kept(i, k) for k in range(n)]
            inner = [_total([da[j][k] * a[j][k] for j in range(n)]) for k in range(n)]
            inverse = [1.0 / v for v in divisors]
            da = [[(da[j][k] - inner[k]) * inverse[k] for k in range(n)] for j in range(n)]
            return [[a[j][k] * divisors[k] for k in range(n)] for j in range(n)], da

        def step_back(back, state):
            i = iters - 1 - back
            a, da = columns_back(i, *state)
            divisors = [kept(i, n + j) for j in range(n)]
            inner = [_total([da[j][k] * a[j][k] for k in range(n)]) for j in range(n)]
            inverse = [1.0 / v for v in divisors]
            da = [[(da[j][k] - inner[j]) * inverse[j] for k in range(n)] for j in range(n)]
            return [[a[j][k] * divisors[j] for k in range(n)] for j in range(n)], da

        a, da = lax.fori_loop(0, iters - 1, step_back, (a, da))
        _, da = columns_back(0, a, da)
        for j in range(n):
            inner = _total([da[j][k] * soft[j][k] for k in range(n)])
            for k in range(n):
                give(2 * n + j * n + k, soft[j][k] * (da[j][k] - inner))

        assert dz_sum is not None
        store(scalar_gmem.at[m + 2, token], dz_sum * rms * rms * (-1.0 / (n * d)))
        zero = plgpu.layout_cast(jnp.zeros((TOKENS,), jnp.bfloat16), _ROW)
        for i in range(m, HALF):
            for half in range(2):
                store(dp_gmem.at[token, half * HALF + i], zero)
        for first, ref in zip((0, n, n + n * n), old, strict=True):
            for i in range(ref.shape[1]):
                store(scalar_gmem.at[first + i, token], column(ref, i))

    pl.when(wg == 0)(coefficients)
    pl.when(wg == 1)(norm)


def backward_tokens(
    dx: jax.Array,
    x: jax.Array,
    stats: jax.Array,
    predictor: jax.Array,
    old: tuple[jax.Array, jax.Array, jax.Array],
    new: tuple[jax.Array, jax.Array, jax.Array],
    iters: int,
    eps: float,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """What the streams' backward needs of each token, for T a multiple of 16.

    dx, x: cotangent of the next input, and the input, ``[T, D]`` bfloat16. stats: of the forward ``[T, 32]``: M normalised
    projections, the inverse RMS of the streams and of the collapsed row. predictor: ``[2, M]``, scale and base. old: post
    ``[T, N]``, comb ``[T, N N]``, pre ``[T, N]`` that the forward took. new: cotangents of pre, post and comb that it gave.

    Returns, float32 unless said: ``[2 N + N N + 4, T]`` post, comb, pre, the collapsed row's inverse RMS, what its norm
    takes away of the row, and of the streams (one row more than used, so that a column of it is whole 16 bytes); the
    projection's cotangent in bfloat16 ``[T, 64]``, M high halves from column 0 and low ones from 32, the rest 0; the same
    as ``[2 M, T]`` without gaps; the cotangent of the scaled mixes ``[M, T]``.
    """
    t, d = x.shape
    n = old[0].shape[1]
    m = 2 * n + n * n
    f32 = jnp.float32

    def mega_mhc_backward_tokens(*refs):
        pl.run_scoped(
            lambda sums: _kernel((*refs[:4], refs[4:7], refs[7:10], refs[10:]), sums, n=n, d=d, iters=iters, eps=eps),
            plgpu.SMEM((iters, 2 * n, TOKENS), f32),
            collective_axes="wg",
        )

    return plgpu.kernel(
        mega_mhc_backward_tokens,
        out_type=(
            jax.ShapeDtypeStruct((scalars(n), t), f32),
            jax.ShapeDtypeStruct((t, 2 * HALF), jnp.bfloat16),
            jax.ShapeDtypeStruct((2 * m, t), jnp.bfloat16),
            jax.ShapeDtypeStruct((m, t), f32),
        ),
        grid=(t // TOKENS,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        interpret=interpret,
    )(dx, x, stats, predictor, *old, *new)
