"""From a sub-block's output to the next one's input: mHC update, collapse, RMS norm, coefficients (architecture §10)."""

import jax
from jaxtyping import Array, Float, Float32

from dsv41.params import HyperConnection
from kernels_pallas import registry
from kernels_pallas.registry import Impl


def mega_mhc(
    y: Float[Array, "T D"],
    streams: Float[Array, "T N D"],
    post: Float32[Array, "T N"],
    comb: Float32[Array, "T N N"],
    pre: Float32[Array, "T N"],
    hc: HyperConnection,
    gain: Float[Array, " D"],
    *,
    iters: int,
    eps: float,
    rms_eps: float,
    impl: Impl = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Closes one mHC site and opens the next.

    y: the sub-block's output; post and comb (indexed [source, target]) of its own site; pre: what the next sub-block
    collapses with, which is this site's in the single-pass form. hc, gain: the next site's predictor (fn ``[N (N + 2), N D]``,
    base, scale in float32) and the gain of its RMS norm. iters: Sinkhorn steps; eps: that of the coefficients; rms_eps: that
    of both root mean squares.

    Returns the new streams ``[T, N, D]`` and the next sub-block's normalised input ``[T, D]`` in the streams' dtype, then pre
    ``[T, N]``, post ``[T, N]`` and comb ``[T, N, N]`` of the new streams in float32. Differentiable in every array, on
    Hopper by kernels, else by recomputation in XLA.
    """
    args = (y, streams, post, comb, pre, hc, gain)
    return registry.call("mega_mhc", impl, *args, iters=iters, eps=eps, rms_eps=rms_eps)
