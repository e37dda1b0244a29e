"""Many requests at once over one pool of pages: what is asked, what is told, and the engine between."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from infer.generate import DecoderReplay
from infer.model import Model
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

    time_to_first_token, time_per_token: of requests that ended: their number, and the sum of their seconds.
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


class Engine:
    """Continues requests side by side; what a request gets does not depend on the others.

    `submit`, `abort`, `wait` and `metrics` may be called from any thread, `step` from one at a time. Events are told in the
    thread that runs `step`, with no lock held: a callback may submit and abort, must not step, and should be quick. An
    exception of a callback ends its request alone.
    """

    def __init__(self, model: Model, decoder_replay: DecoderReplay = "full"):
        raise NotImplementedError

    def submit(self, request: Request, on_event: OnEvent) -> int:
        """Queues a request and gives its id; `UserError` for one that can never run. Events begin with the next step."""
        raise NotImplementedError

    def abort(self, id: int) -> None:
        """Ends a request in whatever state it is, with an event of finish "abort"; nothing where it has ended already."""
        raise NotImplementedError

    def step(self) -> bool:
        """Does one round of prefill and decode; False where there was nothing to do."""
        raise NotImplementedError

    def wait(self, timeout: float) -> bool:
        """Waits until there is something to do, at most so many seconds; whether there is."""
        raise NotImplementedError

    def warm_up(self) -> None:
        """Compiles every program that requests may need; no later step compiles."""
        raise NotImplementedError

    def metrics(self) -> Metrics:
        """Counts and gauges now."""
        raise NotImplementedError
