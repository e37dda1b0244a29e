"""Context parallelism: a row's tokens in equal, contiguous parts along the mesh axis `context` (training §8).

A device keeps its tokens' hidden states and window rows to itself. It takes the last window rows of the parts before it, what
a group of tokens that a cut goes through has there, and every device's compressed entries and index keys, so that each query
selects among all entries of its row as on one device. All of this happens inside a `jax.shard_map`; without that axis every
function here leaves an array as it is. Gradients: JAX's transposes of the collectives, of one device's share of the loss.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Shaped

from dsv41.sharding import index, size

AXIS = "context"


def whole(a: Shaped[Array, "B t *s"]) -> Shaped[Array, "B T *s"]:
    """A row's parts put together: for ids and the like, of a few bytes a token."""
    return lax.all_gather(a, AXIS, axis=1, tiled=True) if size(AXIS) > 1 else a


def part(tree: Any) -> Any:
    """This device's part of each array ``[B, T, ...]`` of whole rows."""
    if size(AXIS) == 1:
        return tree
    cut = lambda a: lax.dynamic_slice_in_dim(a, index(AXIS) * (a.shape[1] // size(AXIS)), a.shape[1] // size(AXIS), 1)  # noqa: E731
    return jax.tree.map(cut, tree)


def before(a: Shaped[Array, "B T"], count: int) -> Shaped[Array, "B n"]:
    """Of whole rows what `ahead` gives of parts."""
    padded = jnp.pad(a, ((0, 0), (count, 0)))
    return lax.dynamic_slice_in_dim(padded, index(AXIS) * (a.shape[1] // size(AXIS)), count, 1)


def ahead(a: Shaped[Array, "B t *s"], count: int, ring: bool = False) -> Shaped[Array, "B n *s"]:
    """The ``count`` rows ahead of this device's part: zeros ahead of the row's first, or with ``ring`` the row's last."""
    shards, time = size(AXIS), a.shape[1]
    hops = -(-count // time)
    found = []
    for hop in range(hops if ring else min(hops, shards - 1), 0, -1):
        rows = a[:, max(0, hop * time - count) :]
        pairs = [(i, (i + hop) % shards) for i in range(shards if ring else shards - hop)]
        found.append(lax.ppermute(rows, AXIS, pairs))
    missing = count - sum(rows.shape[1] for rows in found)
    return jnp.concatenate([jnp.zeros((a.shape[0], missing, *a.shape[2:]), a.dtype), *found], axis=1)


def turned(a: Shaped[Array, "B t *s"], turn: Int[Array, "B T"], most: int) -> Shaped[Array, "B t *s"]:
    """``a[b, turn[b, i]]`` of whole rows, where ``turn`` moves a row by no more than ``most`` tokens towards its end."""
    spread = lambda i: i.reshape(*i.shape, *(1,) * (a.ndim - 2))  # noqa: E731
    if size(AXIS) == 1:
        return jnp.take_along_axis(a, spread(turn), axis=1)
    most = min(most, turn.shape[1] - 1)
    near = jnp.concatenate([ahead(a, most, ring=True), a], axis=1)
    at = (part(turn) - index(AXIS) * a.shape[1] + most) % turn.shape[1]
    return jnp.take_along_axis(near, spread(at), axis=1)


def groups(a: Shaped[Array, "B t *s"], ratio: int) -> Shaped[Array, "B g r *s"]:
    """The groups of ``ratio`` tokens of a row that end in this device's part, ``ceil(t / ratio)`` of them.

    Where a cut goes through groups, a part may end fewer: its last one is then no group, and `entries` leaves it out.
    """
    time = a.shape[1]
    count = -(-time // ratio)
    if time % ratio:
        more = jnp.zeros((a.shape[0], ratio - 1, *a.shape[2:]), a.dtype)
        a = jnp.concatenate([ahead(a, ratio - 1), a, more], axis=1)
        start = index(AXIS) * time
        a = lax.dynamic_slice_in_dim(a, start // ratio * ratio - start + ratio - 1, count * ratio, 1)
    return a.reshape(a.shape[0], count, ratio, *a.shape[2:])


def entries(a: Shaped[Array, "B g *s"], time: int, ratio: int) -> Shaped[Array, "B S *s"]:
    """All entries of a row, ``S = T // ratio``, of what each device made of its `groups`. time: tokens of one part."""
    if size(AXIS) == 1:
        return a
    found = whole(a)
    if time % ratio == 0:
        return found
    group = np.arange(size(AXIS) * time // ratio)
    owner = (group * ratio + ratio - 1) // time
    return found[:, owner * a.shape[1] + group - owner * time // ratio]
