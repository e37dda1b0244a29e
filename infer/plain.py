"""The plain generator: one compiled forward over a padded buffer for each token. Slow, obviously right, the cache's oracle."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.model import forward
from dsv41.numerics import Policy
from infer.model import Model
from infer.sampling import Sampling, SamplingRows, sample, sampling_rows


class PlainGenerator:
    """Continues one prompt within a buffer of ``length`` tokens, a multiple of the config's document alignment."""

    def __init__(self, model: Model, length: int = 256, policy: Policy | None = None):
        self.model, self.length = model, length
        config, fold = model.config, jnp.asarray(model.token_map, jnp.int32)
        policy = policy or Policy()

        def step(params: Any, buffer: jax.Array, count: jax.Array, rows: SamplingRows) -> jax.Array:
            segments = (jnp.arange(length, dtype=jnp.int32) < count).astype(jnp.int32)[None]
            logits = forward(params, config, policy, buffer, segments, fold).logits
            last = jax.lax.dynamic_index_in_dim(logits, count - 1, 1, keepdims=False)
            return sample(last, count[None], rows)[0][0]

        self._step = jax.jit(step)

    def continue_ids(self, ids: list[int], sampling: Sampling) -> list[int]:
        """New tokens after ``ids`` (BOS included) up to an end token, the wanted number or the end of the buffer."""
        buffer = np.full((1, self.length), self.model.config.pad_token_id, np.int32)
        buffer[0, : len(ids)] = ids
        count, rows = len(ids), sampling_rows([sampling])
        ends = {self.model.config.eos_token_id, *sampling.stop_ids}
        while count < min(self.length, len(ids) + sampling.max_new_tokens):
            token = int(self._step(self.model.params, jnp.asarray(buffer), jnp.int32(count), rows))
            if token in ends:
                break
            buffer[0, count] = token
            count += 1
        return buffer[0, len(ids) : count].tolist()
