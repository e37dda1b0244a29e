"""The training objective: next-token cross-entropy in float32, expert balance, the indexer's KL, and a z-loss where asked."""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from dsv41.numerics import linear
from dsv41.vocabulary import chosen_and_log_z

BALANCE_WEIGHT = 1e-4
INDEX_KL_WEIGHT = 1.0
MOST_LOGITS = 1 << 25  # held at once: 128 MiB in float32


@struct.dataclass
class Sums:
    """Over positions, each times its weight, float32[]: nats of the targets, squares of the log partition, and 1."""

    nats: jax.Array
    squared_log_z: jax.Array
    weight: jax.Array


def target_sums(
    logits: Float[Array, "*s V"], targets: Int[Array, "*s"], weights: Float[Array, "*s"], vocab: int | None = None
) -> Sums:
    """The sums of some positions, in float32; a position of weight 0 adds nothing, whatever its logits are.

    vocab: as `dsv41.vocabulary.chosen_and_log_z` takes it.
    """
    chosen, log_z = chosen_and_log_z(logits.astype(jnp.float32), targets, vocab)
    total = lambda x: jnp.sum(weights * jnp.where(weights > 0, x, 0.0))  # noqa: E731
    return Sums(total(log_z - chosen), total(jnp.square(log_z)), jnp.sum(weights))


def weighted_nll(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """``(sum of weighted nats, sum of weights)`` of whole logits."""
    sums = target_sums(logits, targets, weights)
    return sums.nats, sums.weight


def head_logits(hidden: Float[Array, "*s D"], head: Float[Array, "V D"]) -> Float[Array, "*s V"]:
    """float32 logits; bfloat16 hidden states meet the head as it is published, in bfloat16, and are summed in float32."""
    return linear(hidden, head, out=jnp.float32)


def chunked_sums(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    most: int = MOST_LOGITS,
    vocab: int | None = None,
) -> Sums:
    """`target_sums` of all positions, of which no more than ``most`` logits are there at once, in either pass.

    head: where its rows are cut over a mesh, this device's part. vocab: as `dsv41.vocabulary.chosen_and_log_z` takes it.
    """
    tokens = targets.size
    chunks = -(-tokens * head.shape[0] // most)
    size = -(-tokens // chunks)
    pad = lambda a: jnp.pad(a, ((0, chunks * size - tokens), *((0, 0),) * (a.ndim - 1)))  # noqa: E731
    flat = hidden.reshape(tokens, -1), targets.reshape(tokens), weights.reshape(tokens)
    if chunks == 1:
        return target_sums(head_logits(flat[0], head), *flat[1:], vocab)
    parts = jax.tree.map(lambda a: pad(a).reshape(chunks, size, *a.shape[1:]), flat)

    # Computed again by the backward pass, which else would keep every chunk's logits.
    @jax.checkpoint
    def one(head: Array, part: tuple[Array, Array, Array]) -> Sums:
        return target_sums(head_logits(part[0], head), *part[1:], vocab)

    def add(total: Sums, part: tuple[Array, Array, Array]) -> tuple[Sums, None]:
        return jax.tree.map(jnp.add, total, one(head, part)), None

    zero = jnp.zeros((), jnp.float32)
    return lax.scan(add, Sums(zero, zero, zero), parts)[0]


def total_loss(
    ce: Float[Array, ""],
    balance: Float[Array, ""],
    index_kl: Float[Array, ""],
    z: Float[Array, ""] | float = 0.0,
    z_weight: float = 0.0,
) -> Float[Array, ""]:
    """Cross-entropy + 1e-4 sequence balance + indexer KL, and ``z_weight`` times the mean squared log partition."""
    total = ce + BALANCE_WEIGHT * balance + INDEX_KL_WEIGHT * index_kl
    return total + z_weight * z if z_weight else total
