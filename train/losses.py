"""The training objective: next-token cross-entropy in float32, expert balance, and the indexer's KL."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BALANCE_WEIGHT = 1e-4
INDEX_KL_WEIGHT = 1.0


def token_nll(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Nats of each target, in float32."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def weighted_nll(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """``(sum of weighted nats, sum of weights)``; a position of weight 0 adds nothing, whatever its logits are."""
    nll = jnp.where(weights > 0, token_nll(logits, targets), 0.0)
    return jnp.sum(weights * nll), jnp.sum(weights)


def total_loss(ce: Float[Array, ""], balance: Float[Array, ""], index_kl: Float[Array, ""]) -> Float[Array, ""]:
    """Cross-entropy + 1e-4 sequence balance + indexer KL."""
    return ce + BALANCE_WEIGHT * balance + INDEX_KL_WEIGHT * index_kl
