"""`sparse_attention` in plain XLA: gather, dequantise, one masked softmax; float32 products."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv41.numerics import sink_softmax
from dsv41.quant import MAIN_KV, WINDOW_KV, Format, row_values


def _rows(stored: jax.Array, ids: jax.Array, fmt: Format) -> jax.Array:
    """float32 values ``[N, n, K]`` of the rows that ``ids`` names, zeros for -1."""
    # Float rows are wide before they are gathered, so that their gradients are summed as float32.
    stored = stored if stored.dtype == jnp.uint8 else stored.astype(jnp.float32)
    # A row that nobody selected may hold NaN, and zero times NaN is not zero.
    rows = row_values(stored[jnp.maximum(ids, 0)], fmt, jnp.float32)
    return jnp.where((ids >= 0)[..., None], rows, 0.0)


def run(
    q: jax.Array,
    entries: jax.Array,
    entry_ids: jax.Array,
    window: jax.Array,
    window_ids: jax.Array,
    sink: jax.Array | None,
    mass: bool = False,
    dtype: Any = jnp.float32,
    barrier: bool = False,
) -> tuple[jax.Array, ...]:
    """See `kernels_pallas.sparse_attention.api.sparse_attention`. dtype: of both products' operands; barrier: keep XLA from
    gathering for each of them."""
    rows = jnp.concatenate([_rows(entries, entry_ids, MAIN_KV), _rows(window, window_ids, WINDOW_KV)], axis=1)
    rows = rows.astype(dtype)
    rows = lax.optimization_barrier(rows) if barrier else rows
    mask = (jnp.concatenate([entry_ids, window_ids], axis=1) >= 0)[:, None]
    products = {"preferred_element_type": jnp.float32, "precision": lax.Precision.HIGHEST if dtype == jnp.float32 else None}
    scores = jnp.einsum("nhk,nsk->nhs", q.astype(dtype), rows, **products) * q.shape[-1] ** -0.5
    off = jnp.full((q.shape[1],), -jnp.inf, jnp.float32)
    probs = sink_softmax(scores, mask, off if sink is None else sink)
    lse = jax.nn.logsumexp(jnp.where(mask, scores, -jnp.inf), axis=-1)
    out = jnp.einsum("nhs,nsk->nhk", probs.astype(dtype), rows, **products).astype(q.dtype)
    if not mass:
        return out, lse
    return out, lse, lax.stop_gradient(jnp.sum(probs[..., : entry_ids.shape[1]], axis=1))


def merge_parts(outputs: jax.Array, lse: jax.Array, sink: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """See `kernels_pallas.sparse_attention.api.merge`."""
    # Part by part and elementwise, which is one kernel; a reduction over a leading axis of a few would be several.
    parts = [lse[i] for i in range(lse.shape[0])]
    top = functools.reduce(jnp.maximum, parts)
    weights = [jnp.where(jnp.isneginf(part), 0.0, jnp.exp(part - top)) for part in parts]
    total = functools.reduce(jnp.add, weights)
    below = total if sink is None else total + jnp.where(total > 0, jnp.exp(sink.astype(jnp.float32)[None] - top), 1.0)
    below = jnp.where(below > 0, below, 1.0)
    mixed = functools.reduce(
        jnp.add, [(w / below)[..., None] * o.astype(jnp.float32) for w, o in zip(weights, outputs, strict=True)]
    )
    return mixed, jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)
