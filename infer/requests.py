"""What the engine is asked and what it tells (serving §8)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from infer.sampling import Sampling

MOST_LIKELIEST = 20  # alternatives of each token that a request may ask for
Finish = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Request:
    """A prompt of token ids (BOS included) and how to continue it.

    logprobs: how many of the likeliest tokens to tell with each new one, 0 to `MOST_LIKELIEST`. The log-probability of the new
    one itself is always told. priority: lower goes first; of equals the one that came first.
    """

    ids: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    logprobs: int = 0
    priority: int = 0


@dataclass(frozen=True)
class Usage:
    """Tokens of a request: of its prompt, of those the ones found in a cache, and new ones."""

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class Event:
    """What became final of a request since the event before; the last one has ``finish`` and ``usage``.

    text may lag behind ids, where a character is incomplete or a stop string may have begun; of the last event on, all texts
    joined are the continuation. logprobs: of each id, before any temperature. likeliest: for each id, as many pairs (id,
    log-probability) as were asked for, the likeliest first. error: one line, where ``finish`` is "error".
    """

    id: int
    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    likeliest: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish: Finish | None = None
    usage: Usage | None = None
    error: str | None = None


OnEvent = Callable[[Event], None]


@dataclass(frozen=True)
class Metrics:
    """Counts since the start, and what is there now; seconds by the engine's clock.

    time_to_first_token: how many requests have had one, and the sum of their seconds since they came. time_per_token: how many
    tokens came after the first ones of requests that ended, and the sum of their seconds. corrupt_blocks, dropped_blocks: of
    the prefix cache's file, damaged ones that were found and new ones that were not written.
    """

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    finished: dict[Finish, int]
    preempted: int
    waiting: int
    running: int
    pages: int
    free_pages: int
    time_to_first_token: tuple[int, float]
    time_per_token: tuple[int, float]
    corrupt_blocks: int = 0
    dropped_blocks: int = 0
