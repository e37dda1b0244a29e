"""Vocabulary parallelism: embedding and head in equal parts of their rows along the mesh axis `model` (training §8).

Rows past the vocabulary fill up the last part; no token reads them and no probability is theirs. Every device of the axis has
the same tokens. Without that axis each function is the plain one.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from dsv41.numerics import linear
from dsv41.sharding import greatest, index, size, total

AXIS = "model"


def _own(ids: Array, rows: int) -> tuple[Array, Array]:
    """Which of this device's rows each id is, and whether it is one of them."""
    own = ids - index(AXIS) * rows
    return jnp.clip(own, 0, rows - 1), (own >= 0) & (own < rows)


def embedded(table: Float[Array, "v D"], ids: Int[Array, "*s"]) -> Float[Array, "*s D"]:
    """Rows of the embedding, of ids inside the vocabulary: one device has each row, and the sum over devices is exact."""
    if size(AXIS) == 1:
        return table[ids]
    own, here = _own(ids, table.shape[0])
    return total(jnp.where(here[..., None], table[own], jnp.zeros((), table.dtype)), AXIS)


def whole_logits(hidden: Float[Array, "*s D"], head: Float[Array, "v D"], vocab: int) -> Float32[Array, "*s V"]:
    """float32 logits of the whole vocabulary, on every device."""
    found = linear(hidden, head, jnp.float32)
    return found if size(AXIS) == 1 else lax.all_gather(found, AXIS, axis=found.ndim - 1, tiled=True)[..., :vocab]


def chosen_and_log_z(
    logits: Float32[Array, "*s v"], targets: Int[Array, "*s"], vocab: int | None = None
) -> tuple[Float32[Array, "*s"], Float32[Array, "*s"]]:
    """Each target's logit, and the log of the sum of all logits' exponentials.

    logits: this device's part of them; of the others it learns their largest, their sum and the target's. vocab: how many of
    all parts' are of the vocabulary, all of them if None.
    """
    if size(AXIS) == 1:
        return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0], jax.nn.logsumexp(logits, axis=-1)
    held = logits.shape[-1]
    if vocab is not None and vocab < held * size(AXIS):
        inside = index(AXIS) * held + jnp.arange(held, dtype=jnp.int32) < vocab
        logits = jnp.where(inside.reshape((1,) * (logits.ndim - 1) + (held,)), logits, -jnp.inf)
    own, here = _own(targets, held)
    chosen = jnp.where(here, jnp.take_along_axis(logits, own[..., None], axis=-1)[..., 0], 0.0)
    largest = greatest(jnp.max(lax.stop_gradient(logits), axis=-1), AXIS)
    chosen, summed = total((chosen, jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1)), AXIS)
    return chosen, jnp.log(summed) + largest
