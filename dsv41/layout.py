"""Where each token stands: documents of packed rows, positions, and which compressed entries a query may see (§4.6, §7)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int


@struct.dataclass
class Layout:
    """Static facts of a batch of rows.

    segments ``[B, T]``: 0 padding, 1.. documents; starts: index of the document's first token; positions: within the
    document; live: not padding; image: inside an image span. floor: the first position that a token's window may reach,
    where windows are cut short. before ``[B, W]``: of a part of a row, positions and segments of the W tokens ahead of it, 0
    where there is none.
    """

    segments: jax.Array
    starts: jax.Array
    positions: jax.Array
    live: jax.Array
    image: jax.Array
    floor: jax.Array | None = None
    before: tuple[jax.Array, jax.Array] | None = None


def replay_layout(layout: Layout, start: Int[Array, "B T"]) -> Layout:
    """Windows as after a replay from position ``start`` of each token's document: tokens behind it see none before it.

    Tokens before it, of which a replay knows nothing, keep their windows (training §6.2).
    """
    return replace(layout, floor=jnp.where(layout.positions >= start, start, 0))


def make_layout(segments: Int[Array, "B T"], image: Bool[Array, "B T"] | None = None) -> Layout:
    """The layout of rows whose documents start at multiples of `ModelConfig.document_alignment`."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32)[None], segments.shape)
    before = jnp.pad(segments, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    starts = jax.lax.cummax(jnp.where(segments != before, index, 0), axis=1)
    live = segments > 0
    image = jnp.zeros(segments.shape, bool) if image is None else image & live
    return Layout(segments, starts, index - starts, live, image)


def visible_entries(layout: Layout, ratio: int) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """(first, count): a query sees entries ``first .. first + count - 1``, the complete groups of its document so far."""
    count = jnp.where(layout.live, (layout.positions + 1) // ratio, 0)
    return layout.starts // ratio, count


def causal_mask(first: Int[Array, "B T"], count: Int[Array, "B T"], entries: int) -> Bool[Array, "B T S"]:
    """Which of ``entries`` each query may see."""
    index = jnp.arange(entries, dtype=jnp.int32)[None, None]
    return (index >= first[..., None]) & (index < (first + count)[..., None])
