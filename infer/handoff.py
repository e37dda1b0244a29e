"""Prefill in one place and decode in another: what goes between them are blocks, as the prefix cache keeps them (serving §7)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.cache import init_cache
from dsv41.numerics import Policy
from dsv41.prefill import prefill
from infer.model import Model
from infer.prefix import PrefixCache
from infer.steps import CHUNKS, chunk_width


class Prefiller:
    """The role that reads prompts: the encoder layers and what the decoder's first layer compresses, no other weights.

    The role that decodes puts the rows into the store of a `PrefixCache` of the same model, policy, replay and block, and takes
    the prompt as any that begins with what is there. prefix: such a one; its store is not looked at.
    """

    def __init__(self, model: Model, policy: Policy, prefix: PrefixCache):
        self._model, self._policy, self._prefix = model, policy, prefix
        fold = jnp.asarray(model.token_map, jnp.int32)
        run = lambda p, c, ids, live, end: prefill(p, model.config, policy, c, ids, live, fold, end, 0)[1]  # noqa: E731
        self._run = jax.jit(run, donate_argnums=1)
        self._empty = jax.jit(partial(init_cache, model.config, policy, 1), static_argnums=0)

    def run(self, prompt: list[int]) -> list[tuple[bytes, int, bytes]]:
        """Rows of a prompt's complete blocks, as `infer.store.BlockStore.put` takes them."""
        prefix, at = self._prefix, 0
        keys = prefix.keys(prompt)
        done = len(keys) * prefix.block
        # A power of two of blocks, so that few programs are compiled.
        blocks = 1 << max(len(keys) - 1, 0).bit_length()
        cache = self._empty(blocks * prefix.block)
        while at < done:
            width = chunk_width(done - at, CHUNKS)
            part = prompt[at : min(at + width, done)]
            ids, live = np.zeros((1, width), np.int32), np.zeros((1, width), bool)
            ids[0, : len(part)], live[0, : len(part)] = part, True
            cache = self._run(self._model.params, cache, ids, live, np.asarray([len(prompt)], np.int32))
            at += len(part)
        return prefix.rows(keys, prompt, 0, prefix.mover.take(cache, range(len(keys))))
