"""`mega_mhc` in plain XLA: the model's own functions one after the other, and a form of them that XLA fuses better."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv41.mhc import coefficients, collapse, expand
from dsv41.numerics import linear, rms_norm
from dsv41.quant import ACTIVATION, pack


def run(
    y: jax.Array,
    streams: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    pre: jax.Array,
    hc: Any,
    gain: jax.Array,
    *,
    iters: int,
    eps: float,
    rms_eps: float,
    fp8: bool = False,
) -> tuple[jax.Array, Any, jax.Array, jax.Array, jax.Array]:
    """See `kernels_pallas.mega_mhc.api.mega_mhc`."""
    new = expand(y, streams, post, comb)
    own = coefficients(new, hc, iters, eps, rms_eps)
    x = rms_norm(collapse(pre, new), gain, rms_eps)
    return new, pack(x, ACTIVATION) if fp8 else x, *own


def total(terms: list[jax.Array]) -> jax.Array:
    """The sum, written out."""
    return functools.reduce(jnp.add, terms)


def sinkhorn(m: list[list[jax.Array]], iters: int, eps: float) -> list[list[jax.Array]]:
    """`dsv41.mhc.sinkhorn` of a matrix whose entries are arrays of their own."""
    n = len(m)

    def columns(m: list[list[jax.Array]]) -> list[list[jax.Array]]:
        totals = [total([m[j][k] for j in range(n)]) + eps for k in range(n)]
        return [[m[j][k] / totals[k] for k in range(n)] for j in range(n)]

    def step(_: Any, m: list[list[jax.Array]]) -> list[list[jax.Array]]:
        return columns([[entry / (total(row) + eps) for entry in row] for row in m])

    exps = [[jnp.exp(entry - functools.reduce(jnp.maximum, row)) for entry in row] for row in m]
    start = columns([[entry / total(row) + eps for entry in row] for row in exps])
    return lax.fori_loop(0, iters - 1, step, start)


def high_and_low(fn: jax.Array) -> jax.Array:
    """``[2 M, i]`` bfloat16: the rows of a float32 ``[M, i]``, then what rounding them to bfloat16 has lost."""
    # Not a conversion there and back, which XLA may drop.
    high = lax.reduce_precision(fn, 8, 7)
    return jnp.concatenate([high, fn - high]).astype(jnp.bfloat16)


def predicted(mixes: jax.Array, n: int, iters: int, eps: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """pre ``[T, N]``, post ``[T, N]`` and comb ``[T, N, N]`` of the scaled and shifted projections ``[T, N (N + 2)]``."""
    out = sinkhorn([[mixes[:, 2 * n + j * n + k] for k in range(n)] for j in range(n)], iters, eps)
    comb = jnp.stack([jnp.stack(row, axis=-1) for row in out], axis=-2)
    return jax.nn.sigmoid(mixes[:, :n]) + eps, 2 * jax.nn.sigmoid(mixes[:, n : 2 * n]), comb


def unrolled(
    y: jax.Array,
    streams: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    pre: jax.Array,
    hc: Any,
    gain: jax.Array,
    *,
    iters: int,
    eps: float,
    rms_eps: float,
    fp8: bool = False,
    split: bool = False,
) -> tuple[jax.Array, Any, jax.Array, jax.Array, jax.Array]:
    """The same with every sum over streams written out, so that XLA makes one elementwise kernel of it.

    split: the projection as one bfloat16 product with `high_and_low`, where a float32 one is a kernel of its own.
    """
    n = streams.shape[1]
    f32 = jnp.float32
    yf, xf = y.astype(f32), streams.astype(f32)
    mixed = [post[:, k, None] * yf + total([comb[:, j, k, None] * xf[:, j] for j in range(n)]) for k in range(n)]
    new = jnp.stack([row.astype(streams.dtype) for row in mixed], axis=1)
    newf = new.astype(f32)
    x = rms_norm(total([pre[:, k, None] * newf[:, k] for k in range(n)]).astype(streams.dtype), gain, rms_eps)
    flat = new.reshape(new.shape[0], -1)
    if split:
        both = jnp.einsum("ti,oi->to", flat, high_and_low(hc.fn), preferred_element_type=f32)
        projected = both[:, : hc.fn.shape[0]] + both[:, hc.fn.shape[0] :]
    else:
        projected = linear(flat, hc.fn, f32)
    scale = lax.rsqrt(jnp.mean(jnp.square(newf), axis=(1, 2)) + rms_eps)
    mixes = projected * scale[:, None] * hc.scale[np.repeat(np.arange(3), (n, n, n * n))][None] + hc.base[None]
    return new, pack(x, ACTIVATION) if fp8 else x, *predicted(mixes, n, iters, eps)
