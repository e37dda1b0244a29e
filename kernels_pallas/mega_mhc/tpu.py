"""`mega_mhc` on TPU (Pallas Mosaic): a block of whole tokens at a time, so that nothing is read twice, forward and backward."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dsv41.quant import ACTIVATION, pack
from kernels_pallas.mega_mhc.gradient import differentiable
from kernels_pallas.mega_mhc.reference import predicted, sinkhorn, total

TOKENS = 16  # one tile of bfloat16 rows; both buffers of every operand are 4 MB at 4 streams of 5120
LANES = 128
VMEM_BYTES = 48 << 20  # asked for, where a kernel has 16 MB by default and the chip 64 or more


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
    fp8: bool = False,
) -> str | None:
    """Why these shapes or dtypes cannot run here."""
    *lead, n, d = streams.shape
    if d % LANES:
        return f"a row has {d} channels, allowed are multiples of {LANES}"
    if y.dtype != streams.dtype or y.dtype not in (jnp.bfloat16, jnp.float32):
        return f"y is {y.dtype} and the streams are {streams.dtype}, allowed is one of bfloat16 and float32"
    if 0 in lead:
        return "there are no tokens"
    # The backward's: both buffers of five times the streams' rows and of the predictor and its gradient, and of float32 rows
    # five times the streams.
    used = TOKENS * d * (2 * 3 * (n + 1) * y.dtype.itemsize + 4 * 5 * (n + 1)) + 4 * 4 * hc.fn.shape[0] * n * d
    return f"a block takes {used >> 20} MB, allowed are {VMEM_BYTES >> 20}" if used > VMEM_BYTES else None


def _rows(y: Any, x: Any, post: Any, comb: Any, pre: Any, gain: Any, dtype: Any, rms_eps: float) -> tuple[list[Any], Any]:
    """New streams and the next input in float32, stored in ``dtype`` between; x, post, pre: one array a stream."""
    streams = range(len(x))

    def stored(v: Any) -> Any:
        return v.astype(dtype).astype(jnp.float32)

    new = [stored(post[k] * y + total([comb[j][k] * x[j] for j in streams])) for k in streams]
    hat = stored(total([pre[k] * new[k] for k in streams]))
    return new, hat * lax.rsqrt(jnp.mean(hat * hat, axis=1, keepdims=True) + rms_eps) * gain


def _loaded(
    y_ref: Any, x_ref: Any, post_ref: Any, comb_ref: Any, pre_ref: Any, gain_ref: Any, n: int, d: int
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Arguments of `_rows`."""

    def columns(ref: Any, first: int = 0) -> list[Any]:
        return [ref[:, first + k : first + k + 1] for k in range(n)]

    f32 = jnp.float32
    x = [x_ref[:, k * d : (k + 1) * d].astype(f32) for k in range(n)]
    comb = [columns(comb_ref, j * n) for j in range(n)]
    return y_ref[...].astype(f32), x, columns(post_ref), comb, columns(pre_ref), gain_ref[...]


def _product(a: Any, b: Any, axes: tuple[int, int]) -> Any:
    contract = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, contract, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _kernel(*refs: Any, n: int, d: int, iters: int, eps: float, rms_eps: float) -> None:
    y_ref, x_ref, post_ref, comb_ref, pre_ref, fn_ref, scale_ref, base_ref, gain_ref, *outs = refs
    new_ref, hat_ref, own_pre_ref, own_post_ref, own_comb_ref, z_ref, rms_ref = outs
    rows = _loaded(y_ref, x_ref, post_ref, comb_ref, pre_ref, gain_ref, n, d)
    new, hat = _rows(*rows, new_ref.dtype, rms_eps)
    hat_ref[...] = hat.astype(hat_ref.dtype)
    for k in range(n):
        new_ref[:, k * d : (k + 1) * d] = new[k].astype(new_ref.dtype)
    squares = total([jnp.sum(row * row, axis=1, keepdims=True) for row in new])
    rms = lax.rsqrt(squares / (n * d) + rms_eps)
    z = total([_product(new[k], fn_ref[:, k * d : (k + 1) * d], (1, 1)) for k in range(n)]) * rms
    z_ref[...] = z
    rms_ref[...] = rms

    mixes = z * scale_ref[...] + base_ref[...]
    own_pre_ref[...] = jax.nn.sigmoid(mixes[:, :n]) + eps
    own_post_ref[...] = 2 * jax.nn.sigmoid(mixes[:, n : 2 * n])
    entries = [[mixes[:, i : i + 1] for i in range(2 * n + j * n, 2 * n + (j + 1) * n)] for j in range(n)]
    out = sinkhorn(entries, iters, eps)
    for j in range(n):
        for k in range(n):
            own_comb_ref[:, j * n + k : j * n + k + 1] = out[j][k]


def _backward_kernel(*refs: Any, n: int, d: int, rms_eps: float) -> None:
    y_ref, x_ref, post_ref, comb_ref, pre_ref, gain_ref, fn_ref, dnew_ref, dhat_ref, dp_ref, shrink_ref, *outs = refs
    dy_ref, dx_ref, dpost_ref, dcomb_ref, dpre_ref, dfn_ref, dgain_ref = outs
    f32 = jnp.float32
    rows = _loaded(y_ref, x_ref, post_ref, comb_ref, pre_ref, gain_ref, n, d)
    (new, _), pull = jax.vjp(functools.partial(_rows, dtype=x_ref.dtype, rms_eps=rms_eps), *rows)

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        dfn_ref[...] = jnp.zeros_like(dfn_ref)
        dgain_ref[...] = jnp.zeros_like(dgain_ref)

    cotangents = []
    for k in range(n):
        part = slice(k * d, (k + 1) * d)
        cotangents.append(
            dnew_ref[:, part].astype(f32) + _product(dp_ref[...], fn_ref[:, part], (1, 0)) + shrink_ref[...] * new[k]
        )
        dfn_ref[:, part] += _product(dp_ref[...], new[k], (0, 0))
    dy, dx, dpost, dcomb, dpre, dgain = pull((cotangents, dhat_ref[...].astype(f32)))
    dy_ref[...] = dy.astype(dy_ref.dtype)
    dgain_ref[...] += dgain
    for k in range(n):
        dx_ref[:, k * d : (k + 1) * d] = dx[k].astype(dx_ref.dtype)
        dpost_ref[:, k : k + 1] = dpost[k]
        dpre_ref[:, k : k + 1] = dpre[k]
        for j in range(n):
            dcomb_ref[:, j * n + k : j * n + k + 1] = dcomb[j][k]


def _specs(tokens: tuple[int, ...], whole: tuple[tuple[int, int], ...]) -> list[pl.BlockSpec]:
    """Blocks of whole tokens of so many columns, then arrays that every block sees."""
    blocks = [pl.BlockSpec((TOKENS, columns), lambda i: (i, 0)) for columns in tokens]
    return blocks + [pl.BlockSpec(shape, lambda i: (0, 0)) for shape in whole]


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
) -> tuple[tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array, jax.Array]:
    """`run` without its gradient; then what that needs: projections over the streams' RMS ``[T, M]``, one over it ``[T, 1]``."""
    t, n, d = streams.shape
    m, f32 = hc.fn.shape[0], jnp.float32
    widths = (n, n, n * n, m, 1)
    new, hat, own_pre, own_post, own_comb, z, rms = pl.pallas_call(
        functools.partial(_kernel, n=n, d=d, iters=iters, eps=eps, rms_eps=rms_eps),
        grid=(pl.cdiv(t, TOKENS),),
        in_specs=_specs((d, n * d, n, n * n, n), ((m, n * d), (1, m), (1, m), (1, d))),
        out_specs=_specs((n * d, d, *widths), ()),
        out_shape=[
            jax.ShapeDtypeStruct((t, n * d), streams.dtype),
            jax.ShapeDtypeStruct((t, d), streams.dtype),
            *(jax.ShapeDtypeStruct((t, columns), f32) for columns in widths),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="mega_mhc",
    )(
        y,
        streams.reshape(t, n * d),  # side by side: four streams as rows of their own would fill half a tile
        post,
        comb.reshape(t, n * n),
        pre,
        hc.fn.astype(f32),
        _spread(hc.scale, n),
        hc.base.astype(f32)[None],
        gain.astype(f32)[None],
    )
    return (new.reshape(t, n, d), hat, own_pre, own_post, own_comb.reshape(t, n, n)), z, rms


def _spread(scale: jax.Array, n: int) -> jax.Array:
    """The scale of each of M projections, ``[1, M]``."""
    parts = [jnp.full((1, count), scale[i], jnp.float32) for i, count in enumerate((n, n, n * n))]
    return jnp.concatenate(parts, axis=1)


def backward(
    args: tuple, z: jax.Array, rms: jax.Array, cotangents: tuple, iters: int, eps: float, rms_eps: float, interpret: Any
) -> tuple[Any, ...]:
    """Cotangents of ``args``: of the coefficients in XLA, as they are small, of all that is as long as a row by a kernel.

    z, rms: what `forward` leaves for it.
    """
    y, streams, post, comb, pre, hc, gain = args
    t, n, d = streams.shape
    m, f32 = hc.fn.shape[0], jnp.float32
    dnew, dhat, dpre, dpost, dcomb = cotangents

    def coefficients(z: jax.Array, scale: jax.Array, base: jax.Array) -> Any:
        return predicted(z * _spread(scale, n) + base[None], n, iters, eps)

    dz, dscale, dbase = jax.vjp(coefficients, z, hc.scale.astype(f32), hc.base.astype(f32))[1]((dpre, dpost, dcomb))
    dp = dz * rms
    shrink = -rms * rms * jnp.sum(dz * z, axis=1, keepdims=True) / (n * d)

    def whole(a: jax.Array) -> jax.Array:
        """With whole blocks of tokens; one of zeros adds nothing to a sum."""
        return jnp.pad(a.reshape(t, -1), ((0, -t % TOKENS), (0, 0)))

    rows = [whole(a) for a in (y, streams, post, comb, pre)]
    length = rows[0].shape[0]
    dy, dx, dpost, dcomb, dpre, dfn, dgain = pl.pallas_call(
        functools.partial(_backward_kernel, n=n, d=d, rms_eps=rms_eps),
        grid=(length // TOKENS,),
        in_specs=[
            *_specs((d, n * d, n, n * n, n), ((1, d), (m, n * d))),
            *_specs((n * d, d, m, 1), ()),
        ],
        out_specs=_specs((d, n * d, n, n * n, n), ((m, n * d), (1, d))),
        out_shape=[
            jax.ShapeDtypeStruct((length, d), y.dtype),
            jax.ShapeDtypeStruct((length, n * d), streams.dtype),
            *(jax.ShapeDtypeStruct((length, columns), f32) for columns in (n, n * n, n)),
            jax.ShapeDtypeStruct((m, n * d), f32),
            jax.ShapeDtypeStruct((1, d), f32),
        ],
        # The predictor's gradient stays where it is from block to block.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="mega_mhc_backward",
    )(*rows, gain.astype(f32)[None], hc.fn.astype(f32), *(whole(a) for a in (dnew, dhat, dp, shrink)))
    dhc = type(hc)(fn=dfn.astype(hc.fn.dtype), base=dbase.astype(hc.base.dtype), scale=dscale.astype(hc.scale.dtype))
    of_rows = (a[:t].reshape(b.shape) for a, b in zip((dy, dx, dpost, dcomb, dpre), args[:5], strict=True))
    return *of_rows, dhc, dgain[0].astype(gain.dtype)


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
    interpret: Any = False,
) -> tuple[jax.Array, Any, jax.Array, jax.Array, jax.Array]:
    """See `kernels_pallas.mega_mhc.api.mega_mhc`. interpret: parameters of Pallas' interpreter."""
    static = {"iters": iters, "eps": eps, "rms_eps": rms_eps}

    def keep(*args: Any) -> tuple[Any, Any]:
        outputs, z, rms = forward(*args, **static, interpret=interpret)
        return outputs, (args, z, rms)

    def pull(kept: Any, cotangents: Any) -> Any:
        args, z, rms = kept
        return backward(args, z, rms, cotangents, iters, eps, rms_eps, interpret)

    new, x, *own = differentiable(keep, pull, (y, streams, post, comb, pre, hc, gain))
    return new, pack(x, ACTIVATION) if fp8 else x, *own
