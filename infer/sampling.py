"""Choosing the next token from logits: greedy, or drawn after temperature, top-k, top-p and min-p, row by row."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32, UInt32

from dsv41.errors import UserError

_FLOAT32 = np.finfo(np.float32)
MOST_STOP_IDS = 16  # of one request
_INT32_MAX, _UINT32_MAX = 2**31 - 1, 2**32 - 1
_USE_GREEDY = "for the likeliest token alone set temperature=0"


@struct.dataclass
class SamplingRows:
    """How each row of a batch is sampled; `sampling_rows` makes it from requests."""

    temperature: Float[Array, " B"]  # float32, 0: greedy
    top_k: Int32[Array, " B"]  # 0: off
    top_p: Float[Array, " B"]  # float32, 1: off
    min_p: Float[Array, " B"]  # float32, 0: off
    seed: UInt32[Array, " B"]


@dataclass(frozen=True)
class Sampling:
    """How one request is sampled and what ends it; raises `UserError` for a value that no request can mean.

    ``max_new_tokens`` 0 generates nothing. ``stop`` are texts and ``stop_ids`` token ids, up to
    `MOST_STOP_IDS`, besides the model's own EOS.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # Larger finite temperatures would become infinite in float32. NaN fails every comparison, hence "not".
        _check_range("temperature", self.temperature, 0.0, float(_FLOAT32.max))
        _check_range("top_k", self.top_k, 0, _INT32_MAX)
        if not 0 < self.top_p <= 1:
            hint = _USE_GREEDY if self.top_p <= 0 else "nearest is 1.0"
            raise UserError(f"top_p: found {self.top_p}, allowed is above 0, up to 1 (off); {hint}")
        if not 0 <= self.min_p < 1:
            hint = _USE_GREEDY if self.min_p >= 1 else "nearest is 0.0"
            raise UserError(f"min_p: found {self.min_p}, allowed is 0 (off) to below 1; {hint}")
        _check_range("seed", self.seed, 0, _UINT32_MAX)
        _check_range("max_new_tokens", self.max_new_tokens, 0, None)
        for text in self.stop:
            check_text(text, "stop")
        if len({*self.stop_ids}) > MOST_STOP_IDS:
            raise UserError(f"stop_ids: found {len({*self.stop_ids})} token ids, allowed are up to {MOST_STOP_IDS}")
        for token in self.stop_ids:
            _check_range("stop_ids", token, 0, None)


def check_text(text: str, name: str) -> None:
    """Raises `UserError` for empty text and for text that is not Unicode, as bytes from a command line may be."""
    if not text:
        raise UserError(f"{name}: found '', allowed is text of at least one character")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise UserError(f"{name}: found {text[:40]!a}, allowed is valid Unicode text")


def _check_range(name: str, value: float, low: float, high: float | None) -> None:
    if value >= low and (high is None or value <= high):
        return
    allowed = f"{low} or more" if high is None else f"{low} to {high}"
    near = high if high is not None and value > high else low
    raise UserError(f"{name}: found {value}, allowed is {allowed}; nearest is {near}")


def sampling_rows(requests: Sequence[Sampling]) -> SamplingRows:
    """The requests' settings as arrays of the host, one row each in the given order: a step takes them along in one transfer."""
    return SamplingRows(
        temperature=np.array([r.temperature for r in requests], np.float32),
        top_k=np.array([r.top_k for r in requests], np.int32),
        top_p=np.array([r.top_p for r in requests], np.float32),
        min_p=np.array([r.min_p for r in requests], np.float32),
        seed=np.array([r.seed for r in requests], np.uint32),
    )


def sample(
    logits: Float[Array, "B V"], position: Int[Array, " B"], rows: SamplingRows
) -> tuple[Int32[Array, " B"], Float[Array, " B"]]:
    """Each row's token for its ``position``, and that token's log-probability, float32, before any temperature or filter.

    Temperature 0 takes the likeliest token. Else temperature, top-k, top-p and min-p apply in this order; of equal logits
    the lower ids are kept first, and at least one token stays. A row's draw is keyed by its seed and position alone: the
    same logits give the same token in every slot of every batch.

    A row that holds NaN or +inf, or nothing but -inf, gets an id in [0, V) with log-probability NaN.
    """
    with jax.named_scope("sampling"):
        logits = logits.astype(jnp.float32)
        greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        # Below its smallest normal number float32 division may flush the temperature to 0.
        drawn = rows.temperature >= float(_FLOAT32.tiny)
        tokens = lax.cond(
            jnp.any(drawn),
            lambda: jnp.where(drawn, _draw(_scaled(logits, drawn, rows.temperature), position, rows), greedy),
            lambda: greedy,
        )
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[:, None], axis=-1)[:, 0]
        return tokens, logprobs


def _scaled(logits: Float[Array, "B V"], drawn: Bool[Array, " B"], temperature: Float[Array, " B"]) -> Float[Array, "B V"]:
    """Logits over temperature with the row's maximum at 0: nothing overflows, however low the temperature."""
    return (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(drawn, temperature, 1.0)[:, None]


def _key(seed: Array, at: Array, purpose: int) -> Array:
    """Of a position's draw: 0 the token itself, 1 a draft of it, 2 whether a draft stays."""
    # The one generator whose numbers are the same under vmap.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), at)
    return jax.random.fold_in(key, purpose) if purpose else key


def noise(rows: SamplingRows, position: Int[Array, " B"], vocab: int, purpose: int = 0) -> Float[Array, "B V"]:
    """Gumbel noise of each row's position: the largest of logits and noise is a draw."""

    def one(seed: Array, at: Array) -> Array:
        # "high" because 129280 draws of 23 bits tie at the top.
        return jax.random.gumbel(_key(seed, at, purpose), (vocab,), jnp.float32, mode="high")

    return jax.vmap(one)(rows.seed, position)


def uniforms(rows: SamplingRows, position: Int[Array, "B n"], purpose: int) -> Float[Array, "B n"]:
    """Numbers of [0, 1), one for each of a row's positions."""
    one = lambda seed, at: jax.random.uniform(_key(seed, at, purpose), (), jnp.float32)  # noqa: E731
    return jax.vmap(jax.vmap(one, (None, 0)))(rows.seed, position)


def distribution(logits: Float[Array, "B n V"], rows: SamplingRows) -> Float[Array, "B n V"]:
    """Probabilities that `sample` draws by, of n positions of each row; those of a greedy row are 1 and 0."""
    batch, count, vocab = logits.shape
    flat, rows = logits.astype(jnp.float32).reshape(-1, vocab), jax.tree.map(lambda a: jnp.repeat(a, count), rows)
    greedy = jax.nn.one_hot(jnp.argmax(flat, axis=-1), vocab, dtype=jnp.float32)
    drawn = rows.temperature >= float(_FLOAT32.tiny)

    def spread() -> Array:
        scaled = _scaled(flat, drawn, rows.temperature)
        found = jax.nn.softmax(jnp.where(_kept(scaled, rows), scaled, -jnp.inf), axis=-1)
        return jnp.where(drawn[:, None], found, greedy)

    return lax.cond(jnp.any(drawn), spread, lambda: greedy).reshape(batch, count, vocab)


def pick(probs: Float[Array, "B V"], position: Int[Array, " B"], rows: SamplingRows, purpose: int = 0) -> Int32[Array, " B"]:
    """A draw of each row from its `distribution`, or the rest of one, for a position; of a greedy row the likeliest."""
    likeliest = jnp.argmax(probs, axis=-1).astype(jnp.int32)
    drawn = rows.temperature >= float(_FLOAT32.tiny)

    def draw() -> Array:
        noisy = jnp.log(probs) + noise(rows, position, probs.shape[-1], purpose)
        return jnp.where(drawn, jnp.argmax(noisy, axis=-1).astype(jnp.int32), likeliest)

    return lax.cond(jnp.any(drawn), draw, lambda: likeliest)


def _kept(scaled: Float[Array, "B V"], rows: SamplingRows) -> Bool[Array, "B V"]:
    """Which tokens the filters leave."""
    # Every other filter keeps the likeliest tokens too, so min-p may come from the same logits as top-k and top-p.
    kept = jnp.exp(scaled) >= rows.min_p[:, None]
    cut = (rows.top_k > 0) | (rows.top_p < 1)
    kept &= lax.cond(jnp.any(cut), lambda: _top_k_top_p(scaled, rows), lambda: jnp.ones(scaled.shape, bool))
    return kept


def _draw(scaled: Float[Array, "B V"], position: Int[Array, " B"], rows: SamplingRows) -> Int32[Array, " B"]:
    # Noise belongs to an id, not to a rank: logits that differ in the last bit give the same token nearly always.
    noisy = jnp.where(_kept(scaled, rows), scaled + noise(rows, position, scaled.shape[-1]), -jnp.inf)
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32)


def _top_k_top_p(scaled: Float[Array, "B V"], rows: SamplingRows) -> Bool[Array, "B V"]:
    """Which tokens top-k and then top-p keep: a number of the likeliest, so one sort of the values finds the last of them."""
    vocab = scaled.shape[-1]
    ordered = -jnp.sort(-scaled, axis=-1)
    size = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)[:, None]
    rank = jnp.arange(vocab, dtype=jnp.int32)[None]
    mass = jnp.cumsum(jnp.where(rank < size, jnp.exp(ordered), 0.0), axis=-1)
    # The first token that makes the mass reach top_p is the last one in. Rounding must not shorten a row with top-p off.
    reached = jnp.sum((mass < rows.top_p[:, None] * mass[:, -1:]).astype(jnp.int32), axis=-1, keepdims=True) + 1
    size = jnp.where(rows.top_p[:, None] < 1, jnp.minimum(size, reached), size)
    last = jnp.take_along_axis(ordered, size - 1, axis=-1)
    tied = scaled == last
    above = jnp.sum((scaled > last).astype(jnp.int32), axis=-1, keepdims=True)
    return (scaled > last) | (tied & (jnp.cumsum(tied.astype(jnp.int32), axis=-1) <= size - above))
