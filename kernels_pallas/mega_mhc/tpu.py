"""`mega_mhc` on TPU (Pallas Mosaic): a block of whole tokens at a time, so that nothing is read twice; gradients in XLA."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.mega_mhc.gradient import differentiable
from kernels_pallas.mega_mhc.reference import sinkhorn, total, unrolled

TOKENS = 16  # one tile of bfloat16 rows; both buffers of every operand are 4 MB at 4 streams of 5120
LANES = 128
VMEM_BYTES = 12 << 20  # of the 16 MB that a kernel has by default


def refusal(
    y: Any,
    streams: Any,
    post: Any,
    comb: Any,
    pre: Any,
    hc: Any,
    gain: Any,
    *,
    iters: int,
    eps: float,
    rms_eps: float,
) -> str | None:
    """Why these shapes or dtypes cannot run here."""
    _, n, d = streams.shape
    if d % LANES:
        return f"a row has {d} channels, allowed are multiples of {LANES}"
    if y.dtype != streams.dtype or y.dtype not in (jnp.bfloat16, jnp.float32):
        return f"y is {y.dtype} and the streams are {streams.dtype}, allowed is one of bfloat16 and float32"
    if streams.shape[0] == 0:
        return "there are no tokens"
    # Both buffers of the streams, y and x, the predictor, and the streams in float32.
    used = TOKENS * d * (2 * (2 * n + 2) * y.dtype.itemsize + 4 * (n + 2)) + 2 * 4 * hc.fn.shape[0] * n * d
    return f"a block takes {used >> 20} MB, allowed are {VMEM_BYTES >> 20}" if used > VMEM_BYTES else None


def _kernel(*refs: Any, n: int, d: int, iters: int, eps: float, rms_eps: float) -> None:
    y_ref, x_ref, post_ref, comb_ref, pre_ref, fn_ref, scale_ref, base_ref, gain_ref, *outs = refs
    new_ref, hat_ref, own_pre_ref, own_post_ref, own_comb_ref = outs
    f32 = jnp.float32

    def part(k: int) -> slice:
        return slice(k * d, (k + 1) * d)

    y = y_ref[...].astype(f32)
    x = [x_ref[:, part(j)].astype(f32) for j in range(n)]
    hats, squares, products = [], [], []
    for k in range(n):
        mixed = post_ref[:, k : k + 1] * y + total([comb_ref[:, j * n + k : j * n + k + 1] * x[j] for j in range(n)])
        new_ref[:, part(k)] = mixed.astype(new_ref.dtype)
        new = new_ref[:, part(k)].astype(f32)
        hats.append(pre_ref[:, k : k + 1] * new)
        squares.append(jnp.sum(new * new, axis=1, keepdims=True))
        contract = (((1,), (1,)), ((), ()))
        products.append(
            lax.dot_general(new, fn_ref[:, part(k)], contract, precision=lax.Precision.HIGHEST, preferred_element_type=f32)
        )
    hat = total(hats).astype(hat_ref.dtype).astype(f32)
    rms = lax.rsqrt(jnp.mean(hat * hat, axis=1, keepdims=True) + rms_eps)
    hat_ref[...] = (hat * rms * gain_ref[...]).astype(hat_ref.dtype)

    mixes = total(products) * lax.rsqrt(total(squares) / (n * d) + rms_eps) * scale_ref[...] + base_ref[...]
    own_pre_ref[...] = jax.nn.sigmoid(mixes[:, :n]) + eps
    own_post_ref[...] = 2 * jax.nn.sigmoid(mixes[:, n : 2 * n])
    entries = [[mixes[:, i : i + 1] for i in range(2 * n + j * n, 2 * n + (j + 1) * n)] for j in range(n)]
    out = sinkhorn(entries, iters, eps)
    for j in range(n):
        for k in range(n):
            own_comb_ref[:, j * n + k : j * n + k + 1] = out[j][k]


def forward(
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
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """`run` without its gradient."""
    t, n, d = streams.shape
    m = hc.fn.shape[0]

    def tokens(columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((TOKENS, columns), lambda i: (i, 0))

    def whole(rows: int, columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, columns), lambda i: (0, 0))

    # Streams side by side: four of them as rows of their own would fill half a tile.
    scale = jnp.concatenate([jnp.full((count,), hc.scale[i], jnp.float32) for i, count in enumerate((n, n, n * n))])
    f32 = jnp.float32
    new, hat, own_pre, own_post, own_comb = pl.pallas_call(
        functools.partial(_kernel, n=n, d=d, iters=iters, eps=eps, rms_eps=rms_eps),
        grid=(pl.cdiv(t, TOKENS),),
        in_specs=[
            tokens(d),
            tokens(n * d),
            tokens(n),
            tokens(n * n),
            tokens(n),
            whole(m, n * d),
            whole(1, m),
            whole(1, m),
            whole(1, d),
        ],
        out_specs=[tokens(n * d), tokens(d), tokens(n), tokens(n), tokens(n * n)],
        out_shape=[
            jax.ShapeDtypeStruct((t, n * d), streams.dtype),
            jax.ShapeDtypeStruct((t, d), streams.dtype),
            *(jax.ShapeDtypeStruct((t, columns), f32) for columns in (n, n, n * n)),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="mega_mhc",
    )(
        y,
        streams.reshape(t, n * d),
        post,
        comb.reshape(t, n * n),
        pre,
        hc.fn.astype(f32),
        scale[None],
        hc.base.astype(f32)[None],
        gain.astype(f32)[None],
    )
    return new.reshape(t, n, d), hat, own_pre, own_post, own_comb.reshape(t, n, n)


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
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """See `kernels_pallas.mega_mhc.api.mega_mhc`. interpret: parameters of Pallas' interpreter."""
    static = {"iters": iters, "eps": eps, "rms_eps": rms_eps}

    def keep(*args: Any) -> tuple[Any, Any]:
        return forward(*args, **static, interpret=interpret), args

    def pull(args: Any, cotangents: Any) -> Any:
        return jax.vjp(functools.partial(unrolled, **static), *args)[1](cotangents)

    return differentiable(keep, pull, (y, streams, post, comb, pre, hc, gain))
