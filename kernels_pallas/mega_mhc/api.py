"""From a sub-block's output to the next one's input: mHC update, collapse, RMS norm, coefficients (architecture §10)."""

from typing import Any

import jax
from jaxtyping import Array, Float, Float32

from dsv41.params import HyperConnection
from kernels_pallas import registry
from kernels_pallas.registry import Impl


def mega_mhc(
    y: Float[Array, "*s D"],
    streams: Float[Array, "*s N D"],
    post: Float32[Array, "*s N"],
    comb: Float32[Array, "*s N N"],
    pre: Float32[Array, "*s N"],
    hc: HyperConnection,
    gain: Float[Array, " D"],
    *,
    iters: int,
    eps: float,
    rms_eps: float,
    fp8: bool = False,
    impl: Impl = "auto",
) -> tuple[jax.Array, Any, jax.Array, jax.Array, jax.Array]:
    """Closes one mHC site and opens the next.

    y: the sub-block's output; post and comb (indexed [source, target]) of its own site; pre: what the next sub-block
    collapses with, which is this site's in the single-pass form. hc, gain: the next site's predictor (fn ``[N (N + 2), N D]``,
    base, scale in float32) and the gain of its RMS norm. iters: Sinkhorn steps; eps: that of the coefficients; rms_eps: that
    of both root mean squares.

    Returns the new streams ``[*s, N, D]`` and the next sub-block's normalised input ``[*s, D]`` in the streams' dtype, then pre
    ``[*s, N]``, post ``[*s, N]`` and comb ``[*s, N, N]`` of the new streams in float32. Differentiable in every array, by
    kernels where kernels run; not with fp8: then that input is E4M3 bits ``[*s, D]`` and scale bytes ``[*s, D / 32]``, as
    `dsv41.quant.pack` gives them of the activation format (§8.2).
    """
    args = (y, streams, post, comb, pre, hc, gain)
    return registry.call("mega_mhc", impl, *args, iters=iters, eps=eps, rms_eps=rms_eps, fp8=fp8)
