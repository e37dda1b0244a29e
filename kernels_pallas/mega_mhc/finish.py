"""Second kernel of mega_mhc on Hopper: coefficients from the partial projections, and the collapsed row's RMS norm."""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from dsv41.quant import ACTIVATION, E4M3_MAX
from kernels_pallas.mega_mhc.update import COLS, ROWS
from kernels_pallas.mosaic import store, two_views, views

_MOST_CHUNKS = 24  # 64 x 64 bfloat16 each, beside 12 KiB of coefficients in 227 KiB of shared memory
_ROW = plgpu.Layout.WGMMA
# Of the coefficients a block has a part of the tile: four rows a warp, where in the products' layout a thread had two.
_PART = 16
_PART_ROW = plgpu.Layout.TILED(
    plgpu.Tiling(((_PART, COLS), (4, COLS), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
).reduce(1)


def _inverse(x: Any) -> Any:
    """One over a positive number: twice the rounding of a division, a quarter of its instructions."""
    root = lax.rsqrt(x)
    return root * root


def _sinkhorn(m: list[list[Any]], iters: int, eps: float) -> list[list[Any]]:
    """Of one matrix a token, entry by entry, so that no register array is indexed at run time."""
    n = len(m)

    def total(entries: list[Any]) -> Any:
        return functools.reduce(lambda a, b: a + b, entries)

    def columns(m: list[list[Any]]) -> list[list[Any]]:
        scale = [_inverse(total([m[j][k] for j in range(n)]) + eps) for k in range(n)]
        return [[m[j][k] * scale[k] for k in range(n)] for j in range(n)]

    def step(_: Any, m: list[list[Any]]) -> list[list[Any]]:
        scale = [_inverse(total(row) + eps) for row in m]
        return columns([[entry * scale[j] for entry in m[j]] for j in range(n)])

    soft = []
    for row in m:
        top = functools.reduce(jnp.maximum, row)
        e = [jnp.exp(entry - top) for entry in row]
        scale = _inverse(total(e))
        soft.append([entry * scale + eps for entry in e])
    return lax.fori_loop(0, iters - 1, step, columns(soft))


def _sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + jnp.exp(-x))


def _kernel(refs: tuple, scoped: tuple, *, n: int, blocks: int, iters: int, eps: float, rms_eps: float, native: bool) -> None:
    p_gmem, q_gmem, scale_gmem, base_gmem, hat_gmem, gain_gmem, pre_gmem, post_gmem, comb_gmem, stats_gmem, x_gmem, *fp8 = refs
    splits, _, m = p_gmem.shape
    d = gain_gmem.shape[0]
    mixes, outs, chunks_s, barriers = scoped
    flat_s, chunks_s = views(chunks_s, native)
    block = lax.axis_index("block")
    per_tile = blocks + ROWS // _PART
    row = lax.div(block, jnp.int32(per_tile)) * ROWS
    part = lax.rem(block, jnp.int32(per_tile))
    token = pl.ds(row, ROWS)

    def summed(kind: int, layout: Any) -> Any:
        parts = [plgpu.load(q_gmem.at[kind, s, token], layout=layout, optimized=False) for s in range(splits)]
        return functools.reduce(lambda a, b: a + b, parts)

    def coefficients():
        parts = [plgpu.load(p_gmem.at[s, token], layout=_ROW, optimized=False) for s in range(splits)]
        mix = functools.reduce(lambda a, b: a + b, parts)
        rms = lax.rsqrt(summed(0, _ROW.reduce(1)) / (n * d) + rms_eps)
        scale = plgpu.load(scale_gmem, layout=_ROW.reduce(0), optimized=False)
        base = plgpu.load(base_gmem, layout=_ROW.reduce(0), optimized=False)

        def wide(v, axis):
            return plgpu.layout_cast(lax.broadcast_in_dim(v, (ROWS, m), (axis,)), _ROW)

        mix *= wide(rms, 0)
        store(outs[3].at[:, :m], mix)
        store(outs[3].at[:, m], rms)
        store(outs[3].at[:, m + 1], lax.rsqrt(summed(1, _ROW.reduce(1)) / d + rms_eps))
        mixes[...] = mix * wide(scale, 1) + wide(base, 1)
        plgpu.commit_smem()
        first = (part - blocks) * _PART
        own = pl.ds(first, _PART)
        column = [plgpu.load(mixes.at[own, j], layout=_PART_ROW, optimized=False) for j in range(2 * n + n * n)]
        for k in range(n):
            store(outs[0].at[own, k], _sigmoid(column[k]) + eps)
            store(outs[1].at[own, k], 2.0 * _sigmoid(column[n + k]))
        comb = _sinkhorn([column[2 * n + j * n : 2 * n + (j + 1) * n] for j in range(n)], iters, eps)
        for j in range(n):
            for k in range(n):
                store(outs[2].at[own, j * n + k], comb[j][k])
        plgpu.commit_smem()
        for source, target in zip(outs, (pre_gmem, post_gmem, comb_gmem, stats_gmem), strict=True):
            plgpu.copy_smem_to_gmem(source.at[own], target.at[pl.ds(row + first, _PART)])
        plgpu.wait_smem_to_gmem(0)

    def quantized(x, layout, chunk):
        """Writes the codes of a chunk and the exponent byte of each group, as `dsv41.quant.pack` gives them."""
        group = lax.div(plgpu.broadcasted_iota(jnp.int32, (ROWS, COLS), 1, layout=layout), jnp.int32(ACTIVATION.group))
        shrink = None
        for number in range(COLS // ACTIVATION.group):
            own = group == number
            largest = jnp.max(jnp.where(own, jnp.maximum(x, -x), 0.0), axis=1)
            bits = lax.bitcast_convert_type(jnp.maximum(largest, ACTIVATION.floor) * (1 / E4M3_MAX), jnp.int32)
            exponent = (bits >> 23) + jnp.where((bits & 0x7FFFFF) != 0, 1, 0)
            store(fp8[0].at[token, chunk * (COLS // ACTIVATION.group) + number], exponent.astype(jnp.uint8))
            inverse = lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
            wide = plgpu.layout_cast(lax.broadcast_in_dim(inverse, (ROWS, COLS), (0,)), layout)
            shrink = wide if shrink is None else jnp.where(own, wide, shrink)
        store(x_gmem.at[token, pl.ds(chunk * COLS, COLS)], (x * shrink).astype(jnp.float8_e4m3fn))

    def normalise():
        chunks = chunks_s.shape[0]
        layout = plgpu.Layout.SMEM_GMEM_COPY((ROWS, COLS), jnp.bfloat16, 128)

        def col(i):
            return pl.ds((i * blocks + part) * COLS, COLS)

        def fetch(i, _):
            plgpu.copy_gmem_to_smem(hat_gmem.at[token, col(i)], flat_s.at[i], barriers.at[i])

        lax.fori_loop(0, chunks, fetch, None)
        rms = lax.rsqrt(summed(1, layout.reduce(1)) / d + rms_eps)
        rms = plgpu.layout_cast(lax.broadcast_in_dim(rms, (ROWS, COLS), (0,)), layout)

        def one_chunk(i, _):
            gain = plgpu.load(gain_gmem.at[col(i)], layout=layout.reduce(0), optimized=False)
            gain = plgpu.layout_cast(lax.broadcast_in_dim(gain, (ROWS, COLS), (1,)), layout)
            plgpu.barrier_wait(barriers.at[i])
            hat = plgpu.load(chunks_s.at[i], layout=layout).astype(jnp.float32)
            x = (hat * rms * gain).astype(jnp.bfloat16)
            if fp8:
                quantized(x.astype(jnp.float32), layout, i * blocks + part)
                return
            chunks_s[i] = x
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(flat_s.at[i], x_gmem.at[token, col(i)])

        lax.fori_loop(0, chunks, one_chunk, None)
        plgpu.wait_smem_to_gmem(0)

    # Nothing is written where a part has no token at all.
    pl.when((part >= blocks) & (row + (part - blocks) * _PART < hat_gmem.shape[0]))(coefficients)
    pl.when(part < blocks)(normalise)


def normalisers(d: int) -> int:
    """How many blocks share the normalisation of 64 rows of ``d`` channels: each holds its part whole."""
    columns = d // COLS
    few = math.gcd(8, columns)
    return next(b for b in range(few, columns + 1) if columns % b == 0 and columns // b <= _MOST_CHUNKS)


def finish(
    p: jax.Array,
    q: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    hat: jax.Array,
    gain: jax.Array,
    n: int,
    iters: int,
    eps: float,
    rms_eps: float,
    fp8: bool,
    interpret: Any,
) -> tuple[jax.Array, ...]:
    """pre ``[T, N]``, post ``[T, N]``, comb ``[T, N * N]`` in float32, what the backward needs of each token, and x ``[T, D]``.

    What the backward needs is float32 ``[T, M + 4]``: M projections over the streams' RMS, then one over that RMS and over the
    collapsed row's. p, q, hat: what `kernels_pallas.mega_mhc.update.update` returns; scale and base: ``[N (N + 2)]``. fp8: x as
    E4M3 and, one more, its scale bytes ``[T, D / 32]``, both with T in whole tiles of 64.
    """
    f32, native = jnp.float32, not interpret
    t, d = hat.shape
    blocks = normalisers(d)
    chunks = d // COLS // blocks
    widths = (n, n, n * n, p.shape[2] + 4)  # rows of whole 16 bytes

    def mega_mhc_finish(*refs):
        pl.run_scoped(
            lambda *scoped: _kernel(refs, scoped, n=n, blocks=blocks, iters=iters, eps=eps, rms_eps=rms_eps, native=native),
            plgpu.SMEM((ROWS, p.shape[2]), f32),
            tuple(plgpu.SMEM((ROWS, width), f32) for width in widths),
            two_views((chunks, ROWS, COLS), native),
            plgpu.Barrier(num_barriers=chunks),
        )

    tall = pl.cdiv(t, ROWS) * ROWS
    codes = (jax.ShapeDtypeStruct((tall, d), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((tall, d // ACTIVATION.group), jnp.uint8))
    x = codes if fp8 else (jax.ShapeDtypeStruct(hat.shape, hat.dtype),)
    return plgpu.kernel(
        mega_mhc_finish,
        out_type=(*(jax.ShapeDtypeStruct((t, width), f32) for width in widths), *x),
        grid=(pl.cdiv(t, ROWS) * (blocks + ROWS // _PART),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(p, q, scale, base, hat, gain)
