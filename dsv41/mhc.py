"""Single-pass manifold-constrained hyper-connections: coefficients, input mix, residual update (architecture §10).

The update that closes a site and all that opens the next one read the same streams: `enter` does both in one pass.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Float32

from dsv41.config import ModelConfig
from dsv41.numerics import Taps, linear, record, rms_norm
from dsv41.params import HyperConnection
from kernels_pallas.mega_mhc.api import mega_mhc


@struct.dataclass
class Residual:
    """The residual streams between two sub-blocks, before the output of the last one is added.

    streams ``[B, T, N, D]``; pre ``[B, T, N]``: what the next sub-block collapses with. y ``[B, T, D]``, post ``[B, T, N]`` and
    comb ``[B, T, N, N]``: the output, and its own site's coefficients; y is None where nothing is to be added. name: that of the
    streams with y added, among the taps.
    """

    streams: jax.Array
    pre: jax.Array
    post: jax.Array | None = None
    comb: jax.Array | None = None
    y: jax.Array | None = None
    name: str = struct.field(pytree_node=False, default="")


def settle(residual: Residual, taps: Taps | None = None) -> jax.Array:
    """The streams ``[B, T, N, D]`` with the last sub-block's output added."""
    if residual.y is None or residual.post is None or residual.comb is None:
        return residual.streams
    streams = expand(residual.y, residual.streams, residual.post, residual.comb)
    record(taps, residual.name, streams)
    return streams


def enter(
    residual: Residual,
    hc: HyperConnection,
    gain: Float[Array, " D"],
    config: ModelConfig,
    taps: Taps | None,
    layer: str,
    kind: str,
) -> tuple[Float[Array, "B T D"], Residual]:
    """Closes the last site and opens that of a sub-block: its normalised input, and the residual for its output.

    hc, gain: this site's predictor and the gain of its norm. The V4 form collapses with the coefficients that it has just
    predicted, so that it takes another pass. layer, kind: the taps' names are of them.
    """
    iters, eps, rms_eps = config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps
    if residual.y is not None and config.hc_single_pass:
        args = (residual.y, residual.streams, residual.post, residual.comb, residual.pre)
        streams, x, pre, post, comb = mega_mhc(*args, hc, gain, iters=iters, eps=eps, rms_eps=rms_eps)
        record(taps, residual.name, streams)
        collapsed = None if taps is None else collapse(residual.pre, streams)
    else:
        streams = settle(residual, taps)
        pre, post, comb = coefficients(streams, hc, iters, eps, rms_eps)
        collapsed = collapse(residual.pre if config.hc_single_pass else pre, streams)
        x = rms_norm(collapsed, gain, rms_eps)
    for part, value in (("pre", pre), ("post", post), ("comb", comb)):
        record(taps, f"{layer}.hc_{kind}.{part}", value)
    record(taps, f"{layer}.{kind}_in", collapsed)
    return x, Residual(streams, pre, post, comb)


def sinkhorn(logits: Float32[Array, "*s N N"], iters: int, eps: float) -> Float32[Array, "*s N N"]:
    """Row softmax + eps, one column step, then ``iters - 1`` times (row, column); eps in every divisor; ends on columns."""

    def columns(m: jax.Array) -> jax.Array:
        return m / (jnp.sum(m, axis=0, keepdims=True) + eps)

    def step(m: jax.Array, _: None) -> tuple[jax.Array, None]:
        return columns(m / (jnp.sum(m, axis=1, keepdims=True) + eps)), None

    # Tokens run along the last axis: sums over a trailing axis of 4 vectorise badly (4 to 10 times slower on CPU).
    # A scan, not an unrolled loop: two sites a layer would dominate compile time.
    n = logits.shape[-1]
    matrices = jnp.moveaxis(logits.reshape(-1, n, n), 0, -1)
    start = columns(jax.nn.softmax(matrices, axis=1) + eps)
    balanced = lax.scan(step, start, None, length=iters - 1)[0]
    return jnp.moveaxis(balanced, -1, 0).reshape(logits.shape)


def _mixes(streams: Float[Array, "*s N D"], hc: HyperConnection, rms_eps: float) -> Float32[Array, "*s M"]:
    flat = streams.astype(jnp.float32).reshape(*streams.shape[:-2], -1)
    scale = lax.rsqrt(jnp.mean(jnp.square(flat), axis=-1, keepdims=True) + jnp.float32(rms_eps))
    return linear(flat, hc.fn) * scale


def _spread(row: Float[Array, " M"], like: jax.Array) -> jax.Array:
    return row.astype(jnp.float32).reshape((1,) * (like.ndim - 1) + (-1,))


@jax.named_scope("mhc")
def coefficients(
    streams: Float[Array, "*s N D"], hc: HyperConnection, iters: int, eps: float, rms_eps: float
) -> tuple[Float32[Array, "*s N"], Float32[Array, "*s N"], Float32[Array, "*s N N"]]:
    """pre (A), post (C) and comb (M, indexed [source, target]) of a site, all in float32."""
    n = streams.shape[-2]
    m = _mixes(streams, hc, rms_eps)
    scales = hc.scale[np.repeat(np.arange(3), (n, n, n * n))]
    m = m * _spread(scales, m) + _spread(hc.base, m)
    comb = m[..., 2 * n :].reshape(*m.shape[:-1], n, n)
    return jax.nn.sigmoid(m[..., :n]) + eps, 2 * jax.nn.sigmoid(m[..., n : 2 * n]), sinkhorn(comb, iters, eps)


def head_coefficients(streams: Float[Array, "*s N D"], hc: HyperConnection, eps: float, rms_eps: float) -> Float32[Array, "*s N"]:
    """Final collapse weights of the unshifted V4 form, which has a predictor of its own for them."""
    m = _mixes(streams, hc, rms_eps)
    return jax.nn.sigmoid(m * _spread(hc.scale, m) + _spread(hc.base, m)) + eps


@jax.named_scope("mhc")
def collapse(pre: Float32[Array, "*s N"], streams: Float[Array, "*s N D"]) -> Float[Array, "*s D"]:
    """Sum of ``pre`` times streams in float32, in the streams' dtype."""
    return jnp.sum(pre[..., None] * streams.astype(jnp.float32), axis=-2).astype(streams.dtype)


@jax.named_scope("mhc")
def expand(
    y: Float[Array, "*s D"],
    streams: Float[Array, "*s N D"],
    post: Float32[Array, "*s N"],
    comb: Float32[Array, "*s N N"],
) -> Float[Array, "*s N D"]:
    """``new_k = post_k y + sum_j comb[j, k] stream_j``: the sum runs over the first index, the source stream."""
    mixed = jnp.einsum("...jk,...jd->...kd", comb, streams.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return (post[..., None] * y.astype(jnp.float32)[..., None, :] + mixed).astype(streams.dtype)
