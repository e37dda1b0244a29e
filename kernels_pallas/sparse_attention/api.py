"""Attention of each query over its own list of stored rows, one K=V latent shared by all heads (architecture §4.4, §4.5)."""

import jax
from jaxtyping import Array, Float, Float32, Int

from kernels_pallas import registry
from kernels_pallas.registry import Impl


def sparse_attention(
    q: Float[Array, "N H K"],
    entries: Array,
    entry_ids: Int[Array, "N k"],
    window: Array,
    window_ids: Int[Array, "N w"],
    sink: Float[Array, " H"] | None,
    *,
    mass: bool = False,
    impl: Impl = "auto",
) -> tuple[Array, ...]:
    """One softmax over a query's selected entries and window rows, with the sink in its denominator only.

    q: rotated queries; scores are scaled by ``K**-0.5``. entries ``[S, 9K/16]`` uint8 (`dsv41.quant.MAIN_KV` rows: E2M1,
    then one E4M3 scale per 16), window ``[R, 33K/32]`` uint8 (`WINDOW_KV` rows: E4M3, then one E8M0 scale per 32), or
    either ``[*, K]`` in a float dtype. The ids are row numbers, -1 where there is none, in any order; a row that no id
    names may hold anything. sink: per head, or None for a part that is to be merged with others.

    Returns the output ``[N, H, K]`` before its inverse RoPE, in q's dtype, and the log-sum-exp ``[N, H]`` of the scores, float32
    (the sink left out, -inf for a query with no keys): parts over disjoint keys merge by it. With ``mass`` also each selected
    entry's probability summed over heads, float32 ``[N, k]``, 0 for -1; no gradient passes through it.

    With rows of a float dtype it is differentiable in q, entries, window and sink; a row that several ids name gets the sum.
    The gradient has the same bits at every run.
    """
    return registry.call("sparse_attention", impl, q, entries, entry_ids, window, window_ids, sink, mass=mass)


def merge(
    outputs: Float[Array, "P N H K"], lse: Float32[Array, "P N H"], sink: Float[Array, " H"] | None
) -> tuple[jax.Array, jax.Array]:
    """The whole of P parts over disjoint keys, each computed with ``sink=None``: output float32, log-sum-exp."""
    from kernels_pallas.sparse_attention.reference import merge_parts

    return merge_parts(outputs, lse, sink)
