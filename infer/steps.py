"""The device's part of continuing prompts: a chunk of prompts, and a block of decode steps, as functions to compile."""

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

from dsv41.cache import Cache
from dsv41.errors import UserError
from dsv41.model import extend
from dsv41.numerics import Policy
from dsv41.prefill import Restored, decoder_layers, halo_rows, prefill
from dsv41.sharding import ROWS, greatest
from infer.model import Model
from infer.sampling import SamplingRows, sample

CHUNKS = (16, 64, 256)  # widths of prefill chunks; a shorter rest is padded to the next one
BLOCK = 16  # decode steps between two looks of the host, at most
DecoderReplay = Literal["full", "bounded", "halo"]


def chunk_width(tokens: int, chunks: tuple[int, ...] = CHUNKS) -> int:
    """Width of the next chunk where so many tokens are left."""
    return next((width for width in chunks if width >= tokens), chunks[-1])


@struct.dataclass
class Drawn:
    """Sampled tokens int32 ``[*s]``, -1 where a row made none; their log-probabilities; and beside each the likeliest
    ``[*s, n]``, zeros where nobody asked."""

    tokens: jax.Array
    logprobs: jax.Array
    likeliest: jax.Array
    likeliest_logprobs: jax.Array

    @classmethod
    def none(cls, shape: tuple[int, ...], likeliest: int) -> "Drawn":
        """Of rows that made nothing."""
        ids = jnp.zeros((*shape, likeliest), jnp.int32)
        return cls(jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32), ids, ids.astype(jnp.float32))


class Steps:
    """The steps of a model under a policy.

    decoder_replay: the rows of a prompt that its decoder layers run (`dsv41.prefill`): ``full`` all, ``bounded`` the last
    window's, ``halo`` as many as it takes for the same result as of all. `UserError` where the model has no decoder half.
    """

    def __init__(self, model: Model, policy: Policy, decoder_replay: DecoderReplay, likeliest: int = 0):
        config = model.config
        if decoder_replay != "full" and not decoder_layers(config):
            raise UserError(f"decoder_replay: found {decoder_replay!r}, allowed is 'full' for a model without a decoder half")
        self.config, self.policy, self.fold = config, policy, jnp.asarray(model.token_map, jnp.int32)
        self.likeliest = min(likeliest, config.vocab_size)
        self.rows = {"bounded": config.sliding_window, "halo": halo_rows(config)}.get(decoder_replay)

    def early(self, end: int, shortest: int, behind: bool = False) -> bool:
        """Whether of a chunk up to ``end`` the decoder runs nothing, as every prompt has ``shortest`` tokens or more.

        behind: of prompts behind a restored prefix, of which both are counted from the first token that runs.
        """
        rows = self._rows(behind)
        return rows is not None and end <= shortest - rows

    def _rows(self, behind: bool) -> int | None:
        """Behind a prefix there is no running all rows of the decoder, but those that give the same result."""
        return halo_rows(self.config) if behind and self.rows is None else self.rows

    def fill(
        self,
        params: Any,
        cache: Cache,
        ids: Int[Array, "B T"],
        live: Bool[Array, "B T"],
        end: Int[Array, " B"],
        early: bool,
        restored: Restored | None = None,
    ) -> tuple[Float[Array, "B V"], Cache]:
        """Logits of each row's last token of a chunk, and the cache behind it; early: see `early`, then they mean nothing."""
        rows = self._rows(restored is not None)
        if rows is None:
            return extend(params, self.config, self.policy, cache, ids, live, self.fold)
        rows = 0 if early else rows
        return prefill(params, self.config, self.policy, cache, ids, live, self.fold, end, rows, restored=restored)

    def draw(
        self, logits: Float[Array, "B V"], at: Int[Array, " B"], rows: SamplingRows, asked: Bool[Array, ""] | bool = False
    ) -> Drawn:
        """Each row's token at a position, see `sample`; asked: whether anyone wants the likeliest."""
        tokens, logprobs = sample(logits, at, rows)
        none = Drawn.none(tokens.shape, self.likeliest)
        if not self.likeliest:
            return Drawn(tokens, logprobs, none.likeliest, none.likeliest_logprobs)

        def find() -> tuple[Array, Array]:
            values, ids = lax.top_k(jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1), self.likeliest)
            return ids, values

        ids, values = lax.cond(asked, find, lambda: (none.likeliest, none.likeliest_logprobs))
        return Drawn(tokens, logprobs, ids, values)

    def decode(
        self,
        params: Any,
        cache: Cache,
        tokens: Int32[Array, " B"],
        left: Int32[Array, " B"],
        ends: Int32[Array, "B e"],
        rows: SamplingRows,
        steps: Int32[Array, ""] | int = BLOCK,
        given: Int32[Array, "n B"] | None = None,
        asked: Bool[Array, ""] | bool = False,
    ) -> tuple[Drawn, Cache, Int32[Array, " B"]]:
        """Up to ``steps`` steps of rows that have any left, each up to a token that ends it: what was drawn ``[BLOCK, B]``.

        given: tokens to go on with in the place of what is drawn, -1 for none. Also the last tokens, not in the cache yet.
        """

        def going(left: jax.Array) -> jax.Array:
            # On a mesh all devices go on while one has rows that do: they meet in every step.
            return greatest(jnp.any(left > 0).astype(jnp.int32), ROWS)

        def more(state: tuple) -> jax.Array:
            return (state[0] < steps) & (state[-1] > 0)

        def step(state: tuple) -> tuple:
            at, cache, tokens, left, made, _ = state
            live = left > 0
            logits, cache = extend(params, self.config, self.policy, cache, tokens[:, None], live[:, None], self.fold)
            drawn = self.draw(logits, cache.length, rows, asked)
            if given is not None:
                drawn = replace(drawn, tokens=jnp.where(given[at] >= 0, given[at], drawn.tokens))
            tokens = drawn.tokens
            drawn = replace(drawn, tokens=jnp.where(live, tokens, -1))
            made = jax.tree.map(lambda all, one: all.at[at].set(one), made, drawn)
            ended = jnp.any(tokens[:, None] == ends, axis=1)
            left = jnp.where(live & ~ended, left - 1, 0)
            return at + 1, cache, tokens, left, made, going(left)

        none = Drawn.none((BLOCK, tokens.shape[0]), self.likeliest)
        state = (jnp.zeros((), jnp.int32), cache, tokens, left, none, going(left))
        _, cache, tokens, _, made, _ = lax.while_loop(more, step, state)
        return made, cache, tokens
