"""Second kernel of mega_mhc: the coefficients from the partial projections and sums of squares."""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

LANES = 128  # one token a thread of a warpgroup; a block with fewer tokens leaves the rest of them idle
GROUPS = 4  # warpgroups that share the sums over the splits
_TOKEN = plgpu.Layout.TCGEN05_TMEM_NATIVE.reduce(1)


def _sum(values: list[Any]) -> Any:
    """As a tree: the chain of dependent operations is what a block's time consists of."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=False)] + values[len(values) // 2 * 2 :]
    return values[0]


def _inverse(x: Any) -> Any:
    """Of a positive number, in two instructions where a division takes ten; to about 3e-7."""
    root = lax.rsqrt(x)
    return root * root


def _sinkhorn(m: list[list[Any]], iters: int, eps: float) -> list[list[Any]]:
    """Of one matrix a token, entry by entry, so that no register array is indexed at run time."""
    n = len(m)

    def columns(m: list[list[Any]]) -> list[list[Any]]:
        scale = [_inverse(_sum([m[j][k] for j in range(n)]) + eps) for k in range(n)]
        return [[m[j][k] * scale[k] for k in range(n)] for j in range(n)]

    def step(_: Any, m: list[list[Any]]) -> list[list[Any]]:
        scale = [_inverse(_sum(row) + eps) for row in m]
        return columns([[entry * scale[j] for entry in m[j]] for j in range(n)])

    soft = []
    for row in m:
        top = functools.reduce(jnp.maximum, row)
        e = [jnp.exp(entry - top) for entry in row]
        scale = _inverse(_sum(e))
        soft.append([entry * scale + eps for entry in e])
    return lax.fori_loop(0, iters - 1, step, columns(soft))


def _sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + jnp.exp(-x))


def _kernel(refs: tuple, scoped: tuple, *, tokens: int, n: int, d: int, iters: int, eps: float, rms_eps: float) -> None:
    p_gmem, q_gmem, scale_gmem, base_gmem, pre_gmem, post_gmem, comb_gmem = refs
    splits, _, m = p_gmem.shape
    parts_s, squares_s, mixes_s, outs, done = scoped
    wg = lax.axis_index("wg")
    row = lax.axis_index("block") * tokens
    flat = plgpu.Layout.WG_STRIDED((tokens, m), 1)

    projection, squares = [], []
    for s in range(-(-splits // GROUPS)):
        split = s * GROUPS + wg
        inside = jnp.minimum(split, jnp.int32(splits - 1))
        part = plgpu.load(p_gmem.at[inside, pl.ds(row, tokens)], layout=flat, optimized=False)
        square = plgpu.load(q_gmem.at[0, inside, pl.ds(row, LANES)], layout=_TOKEN, optimized=False)
        if (s + 1) * GROUPS > splits:
            counts = (split < splits).astype(jnp.float32)
            part, square = part * counts, square * counts
        projection.append(part)
        squares.append(square)
    parts_s[wg, :, :] = _sum(projection)
    squares_s[wg, :] = _sum(squares)
    plgpu.barrier_arrive(done)

    @pl.when(wg == 0)
    def _():
        plgpu.barrier_wait(done)
        parts = [plgpu.load(parts_s.at[g], layout=flat, optimized=False) for g in range(GROUPS)]
        mixes_s[:tokens, :] = _sum(parts)
        squares = [plgpu.load(squares_s.at[g], layout=_TOKEN, optimized=False) for g in range(GROUPS)]
        rms = lax.rsqrt(_sum(squares) / (n * d) + rms_eps)
        plgpu.commit_smem()

        def mix(j: int, kind: int) -> Any:
            return plgpu.load(mixes_s.at[:, j], layout=_TOKEN, optimized=False) * (rms * scale_gmem[kind]) + base_gmem[j]

        pre_s, post_s, comb_s = outs
        comb = _sinkhorn([[mix(2 * n + j * n + k, 2) for k in range(n)] for j in range(n)], iters, eps)
        for k in range(n):
            pre_s[:, k] = _sigmoid(mix(k, 0)) + eps
            post_s[:, k] = 2.0 * _sigmoid(mix(n + k, 1))
        for j in range(n):
            for k in range(n):
                comb_s[j, :, k] = comb[j][k]
        plgpu.commit_smem()
        token = pl.ds(row, tokens)
        plgpu.copy_smem_to_gmem(pre_s.at[:tokens], pre_gmem.at[token])
        plgpu.copy_smem_to_gmem(post_s.at[:tokens], post_gmem.at[token])
        for j in range(n):
            plgpu.copy_smem_to_gmem(comb_s.at[j, :tokens], comb_gmem.at[token, j])
        plgpu.wait_smem_to_gmem(0)


def finish(
    p: jax.Array,
    q: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    d: int,
    t: int,
    iters: int,
    eps: float,
    rms_eps: float,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """pre ``[T, N]``, post ``[T, N]``, comb ``[T, N, N]`` in float32.

    p, q: what `kernels_pallas.mega_mhc.update.update` returns; scale ``[3]``, base ``[N (N + 2)]``.
    """
    f32 = jnp.float32
    m = p.shape[2]
    n = next(n for n in range(1, m) if n * (n + 2) == m)
    # Enough blocks for every SM, and no fewer tokens than give each thread one number of a split's part.
    tokens = 16 if t <= 2048 else 32 if t <= 4096 else 64

    def mega_mhc_finish(*refs):
        pl.run_scoped(
            lambda *scoped: _kernel(refs, scoped, tokens=tokens, n=n, d=d, iters=iters, eps=eps, rms_eps=rms_eps),
            plgpu.SMEM((GROUPS, tokens, m), f32),
            plgpu.SMEM((GROUPS, LANES), f32),
            plgpu.SMEM((LANES, m), f32),
            (plgpu.SMEM((LANES, n), f32), plgpu.SMEM((LANES, n), f32), plgpu.SMEM((n, LANES, n), f32)),
            plgpu.Barrier(num_arrivals=GROUPS),
            collective_axes="wg",
        )

    pre, post, comb = plgpu.kernel(
        mega_mhc_finish,
        out_type=tuple(jax.ShapeDtypeStruct(shape, f32) for shape in ((t, n), (t, n), (t, n, n))),
        grid=(pl.cdiv(t, tokens),),
        grid_names=("block",),
        num_threads=GROUPS,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True),
        interpret=interpret,
    )(p, q, scale, base)
    return pre, post, comb
