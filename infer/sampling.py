"""Choosing the next token from logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


def sample(
    logits: Float[Array, " V"], key: PRNGKeyArray, position: Int[Array, ""], temperature: Float[Array, ""]
) -> Int[Array, ""]:
    """The token for ``position``: the likeliest at temperature 0, else drawn with ``fold_in(key, position)``.

    The key depends on the seed and the position alone, so the same prefix gives the same token however it was reached.
    """
    logits = logits.astype(jnp.float32)
    drawn = jax.random.categorical(jax.random.fold_in(key, position), logits / jnp.where(temperature > 0, temperature, 1.0))
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits)).astype(jnp.int32)
