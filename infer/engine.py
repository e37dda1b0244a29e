"""Many requests at once over one pool of pages (serving §8).

A request waits, gets a slot and pages for its prompt, is filled chunk by chunk and decoded with the others, and takes more pages
as it grows. When there are none, the last in rank gives its own up and waits again: its prompt is filled once more in the
same chunks, and what it has said goes through the decode steps again, so that it goes on from the same state.
"""

import bisect
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dsv41.errors import UserError
from dsv41.numerics import Policy
from infer.allocator import PageAllocator
from infer.continuation import Continuation, check_prompt
from infer.device import ENDS, Chunk, Device
from infer.model import Model
from infer.prefix import PrefixCache
from infer.requests import MOST_LIKELIEST, Event, Finish, Metrics, OnEvent, Request, Usage
from infer.reuse import Reuse, Start
from infer.sampling import Sampling
from infer.steps import BLOCK, CHUNKS, DecoderReplay, Drawn

PAGE = 128  # tokens
_LOOK = 0.01  # seconds between two looks at them where there is nothing else to do
PATIENCE = 1.0  # seconds for which a prompt waits for its blocks to be read


@dataclass(eq=False)
class _Job:
    """A request on its way. filled: tokens of its prompt in the cache; known: of what it said, tokens that its slot has made.

    start: what of its prompt is known from others. leaves: whether it leaves anything to others.
    """

    id: int
    request: Request
    on_event: OnEvent
    said: Continuation
    arrived: float
    prompt: list[int]
    likeliest: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    first: float | None = None
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    filled: int = 0
    known: int = 0
    told: int = 0
    cached: int = 0
    start: Start = field(default_factory=Start)
    broken: bool = False
    leaves: bool = True

    @property
    def rank(self) -> tuple[int, int]:
        """What comes first is served first."""
        return self.request.priority, self.id

    @property
    def decoding(self) -> bool:
        """Whether its prompt is all in the cache."""
        return self.slot is not None and self.filled == len(self.prompt)


class Engine:
    """Continues requests side by side; what a request gets does not depend on the others.

    `submit`, `abort`, `wait` and `metrics` may be called from any thread, `step` from one at a time. Events are told in the
    thread that runs `step`, with no lock held: a callback may submit and abort, must not step, and should be quick. An
    exception of a callback ends its request alone.

    slots: requests at once. longest: tokens that a request may have, the model's own where not given. page: tokens of a page;
    pages: of the pool, by default for the longest requests in all slots. chunks: widths of prefill chunks; budget: tokens of
    chunks beside one block of decode steps, the widest chunk where not given; block: decode steps of a block, of which there is
    one step alone while prompts are being filled. clock: seconds. prefix: of the same model, policy and replay, with blocks of a
    page: prompts begin with the pages of others, with blocks of its store and with its snapshots of windows, and what they leave
    stays in pages until those are wanted. What a request gets then depends on what was found, by rounding, and where the replay
    is bounded by its approximation.
    """

    def __init__(
        self,
        model: Model,
        policy: Policy | None = None,
        *,
        decoder_replay: DecoderReplay = "full",
        slots: int = 8,
        longest: int | None = None,
        page: int = PAGE,
        pages: int | None = None,
        chunks: tuple[int, ...] = CHUNKS,
        budget: int | None = None,
        block: int = 4,
        clock: Callable[[], float] = time.monotonic,
        prefix: PrefixCache | None = None,
    ):
        room = model.config.max_position_embeddings
        self.model, self.longest, self.page = model, room if longest is None else longest, page
        for name, value, most in (("slots", slots, None), ("block", block, BLOCK), ("longest", self.longest, room)):
            if value < 1 or (most is not None and value > most):
                raise UserError(f"{name}: found {value}, allowed is 1 {f'to {most}' if most else 'or more'}")
        pages, parts = slots * -(-self.longest // page) if pages is None else pages, model.row_parts
        if pages < 1:
            raise UserError(f"pages: found {pages}, allowed is 1 or more")
        for name, value in (("slots", slots), ("pages", pages)):
            if value % parts:
                near = -(-value // parts) * parts
                raise UserError(f"{name}: found {value}, allowed on this mesh is a multiple of {parts}; nearest is {near}")
        if prefix is not None and prefix.block != page:
            raise UserError(f"page: found {page} beside blocks of {prefix.block}, allowed is the same number of tokens")
        sizes = slots, pages, page, self.longest, chunks
        self.device = Device(model, policy or Policy(), decoder_replay, *sizes, MOST_LIKELIEST, prefix is not None)
        self.allocator = PageAllocator(pages, parts)
        self._reuse = Reuse(prefix, self.device, self.allocator)
        self._ends, self._block, self._clock = {model.config.eos_token_id}, block, clock
        self._budget = chunks[-1] if budget is None else budget
        self._slots: list[_Job | None] = [None] * slots
        self._waiting: list[_Job] = []
        self._jobs: dict[int, _Job] = {}
        self._wake = threading.Condition()
        # Between threads, under the lock: who came, who is to go, and what `metrics` tells.
        self._arrived: list[_Job] = []
        self._aborted: set[int] = set()
        self._next = 0
        self._busy = False
        self._counts: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._finished: Counter[Finish] = Counter()
        self._now = self._gauges()

    def submit(self, request: Request, on_event: OnEvent) -> int:
        """Queues a request and gives its id; `UserError` for one that can never run. Events begin with the next step."""
        room = min(self.longest, self.allocator.most * self.page)
        check_prompt(request.ids, request.sampling, self.model.config, room, "prompt")
        if not 0 <= request.logprobs <= MOST_LIKELIEST:
            raise UserError(f"logprobs: found {request.logprobs}, allowed is 0 to {MOST_LIKELIEST}")
        said = Continuation.begin(request.sampling, self.model.tokenizer)
        with self._wake:
            job = _Job(self._next, request, on_event, said, self._clock(), list(map(int, request.ids)))
            self._next += 1
            self._arrived.append(job)
            self._wake.notify_all()
            return job.id

    def abort(self, id: int) -> None:
        """Ends a request in whatever state it is, with an event of finish "abort"; nothing where it has ended already."""
        with self._wake:
            self._aborted.add(id)
            self._wake.notify_all()

    def wait(self, timeout: float) -> bool:
        """Waits until there is something to do, at most so many seconds; whether there is."""
        ready = lambda: self._busy or bool(self._arrived) or bool(self._aborted)  # noqa: E731
        with self._wake:
            return self._wake.wait_for(ready, timeout)

    def warm_up(self) -> None:
        """Compiles every program that requests may need; no later step compiles. Before any request."""
        self.device.warm_up()
        self._reuse.warm_up()

    def metrics(self) -> Metrics:
        """Counts and gauges as of the last step."""
        with self._wake:
            return replace(self._now, waiting=self._now.waiting + len(self._arrived))

    def step(self) -> bool:
        """Does one round of prefill and decode; False where there was nothing to do."""
        with self._wake:
            arrived, self._arrived = self._arrived, []
            aborted, self._aborted = self._aborted, set()
        for job in arrived:
            self._jobs[job.id] = job
            job.start = self._reuse.look_up(job.prompt)
            bisect.insort(self._waiting, job, key=lambda job: job.rank)
        worked = bool(self._jobs)
        for id in sorted(aborted & self._jobs.keys()):
            self._end(self._jobs[id], "abort")
        for job in [job for job in arrived if job.said.finish and job.id in self._jobs]:
            self._end(job, job.said.finish)
        self._admit()
        filled = self._fill()
        self._decode(1 if filled else self._block)
        with self._wake:
            self._busy, self._now = bool(self._jobs), self._gauges()
        return worked

    def _gauges(self) -> Metrics:
        counts, seconds = self._counts, self._seconds
        return Metrics(
            prompt_tokens=counts["prompt"],
            cached_tokens=counts["cached"],
            new_tokens=counts["new"],
            finished={**dict.fromkeys(("stop", "length", "abort", "error"), 0), **self._finished},
            preempted=counts["preempted"],
            waiting=len(self._waiting),
            running=sum(job is not None for job in self._slots),
            pages=self.allocator.pages,
            free_pages=self.allocator.free,
            time_to_first_token=(counts["first"], seconds["first"]),
            time_per_token=(counts["later"], seconds["later"]),
            **self._reuse.counts(),
        )

    def _running(self, shard: int | None = None) -> list[_Job]:
        """Jobs with a slot, in a shard where one is given, first in rank first."""
        jobs = (job for n, job in enumerate(self._slots) if job is not None and shard in (None, self.device.shard(n)))
        return sorted(jobs, key=lambda job: job.rank)

    def _admit(self) -> None:
        """Gives slots and pages to those that wait, in rank; none overtakes another, but takes the place of a lower priority."""
        while self._waiting:
            job = self._waiting[0]
            if job.start.reading and self._clock() - job.arrived < PATIENCE:
                if not self._running():
                    # Looking again and again would take time from who reads.
                    job.start.wait(_LOOK)
                return
            # One that had to go comes back only where it can go on.
            need = self._count(len(job.prompt) + len(job.said.ids) + 1)
            if any(self._start(job, need, slot) for slot in self._free_slots(job)):
                continue
            running = self._running()
            if running and running[-1].request.priority > job.request.priority:
                self._preempt(running[-1])
            else:
                return

    def _free_slots(self, job: _Job) -> list[int]:
        """A slot of each shard that has one: first where most pages are that the job begins with, then where most are free."""
        shards = [self.device.shard(slot) for slot in range(len(self._slots))]
        first = {shards[n]: n for n in reversed(range(len(self._slots))) if self._slots[n] is None}
        order = sorted(first, key=lambda s: (-len(self._reuse.held(job.start, s)), -self.allocator.free_in(s), s))
        return [first[shard] for shard in order]

    def _start(self, job: _Job, need: int, slot: int) -> bool:
        """Gives the first that waits a slot and ``need`` pages; False where its shard has not so many."""
        shard = self.device.shard(slot)
        shared = self._reuse.adopt(job.start, job.prompt, shard)
        need -= len(shared)
        # Each of those that run may soon want one more, and would take it from the newcomer.
        if not self._reuse.free(need + len(self._running(shard)), shard):
            self.allocator.release(shared)
            return False
        job.slot, job.pages = slot, shared + (self.allocator.take(need, shard) or [])
        self._slots[slot] = self._waiting.pop(0)
        job.filled, job.cached = job.start.hit.start, job.start.hit.kept
        self._run([job], self._reuse.begin, job.start, slot, job.pages, len(shared))
        return True

    def _count(self, tokens: int) -> int:
        return min(-(-tokens // self.page), self.allocator.most)

    def _grow(self, job: _Job, tokens: int) -> bool:
        """Pages for so many tokens of a job, if need be of those behind it in rank; False where it had to go itself."""
        assert job.slot is not None
        need, shard = self._count(tokens) - len(job.pages), self.device.shard(job.slot)
        while need > 0:
            if self._reuse.free(need, shard) and (pages := self.allocator.take(need, shard)) is not None:
                job.pages += pages
                break
            last = self._running(shard)[-1]
            self._preempt(last)
            if last is job:
                return False
        return True

    def _leave(self, job: _Job) -> None:
        """Takes a job's slot and pages from it."""
        if job.slot is not None:
            self._slots[job.slot] = None
        self.allocator.release(job.pages)
        job.slot, job.pages, job.filled, job.known = None, [], 0, 0

    def _preempt(self, job: _Job) -> None:
        self._leave(job)
        self._counts["preempted"] += 1
        bisect.insort(self._waiting, job, key=lambda job: job.rank)

    def _end(self, job: _Job, finish: Finish, text: str = "", error: str | None = None) -> None:
        """Takes a job out of wherever it is and tells its last event."""
        if job.decoding and finish != "error":
            self._publish(job, [*job.prompt, *job.said.ids])
        if job.slot is None:
            self._waiting.remove(job)
        self._leave(job)
        del self._jobs[job.id]
        self._finished[finish] += 1
        self._counts["prompt"] += len(job.prompt)
        self._counts["cached"] += job.cached
        if job.first is not None:
            self._counts["later"] += max(len(job.said.ids) - 1, 0)
            self._seconds["later"] += self._clock() - job.first
        self._tell(job, text, finish, error)

    def _publish(self, job: _Job, ids: list[int]) -> None:
        """Leaves what a job's slot holds of its tokens to others; where that fails, all start again, and it leaves no more."""
        if job.leaves:
            job.leaves = self._run([], self._reuse.publish, job.start, job.slot, job.pages, ids) is not None

    def _tell(self, job: _Job, text: str, finish: Finish | None = None, error: str | None = None) -> None:
        said, new = job.said, slice(job.told, len(job.said.ids))
        usage = Usage(len(job.prompt), job.cached, len(said.ids)) if finish else None
        event = Event(
            job.id, text, tuple(said.ids[new]), tuple(said.logprobs[new]), tuple(job.likeliest[new]), finish, usage, error
        )
        job.told = len(said.ids)
        if not (event.text or event.ids or finish):
            return
        try:
            job.on_event(event)
        except Exception:
            # Nobody is there to hear of it any more.
            if job.id in self._jobs:
                job.on_event = lambda _: None
                self._end(job, "error")

    def _take(self, job: _Job, drawn: Drawn, at: tuple[int, ...]) -> str:
        """Accounts for what was drawn for a job; the text that is final now."""
        if np.isnan(drawn.logprobs[at]):
            job.broken = True
            return ""
        if job.known < len(job.said.ids):
            job.known += 1
            return ""
        text = job.said.take(int(drawn.tokens[at]), float(drawn.logprobs[at]), self._ends)
        if len(job.said.ids) > job.known:
            job.known += 1
            self._counts["new"] += 1
            ids, values = (a[at][: job.request.logprobs].tolist() for a in (drawn.likeliest, drawn.likeliest_logprobs))
            job.likeliest.append(tuple(zip(ids, values, strict=True)))
        if job.first is None:
            job.first = self._clock()
            self._counts["first"] += 1
            self._seconds["first"] += job.first - job.arrived
        return text

    def _heard(self, job: _Job, text: str) -> None:
        if job.broken:
            self._end(
                job, "error", text, "logits: found NaN or infinity, allowed are numbers; the weights or the cache are damaged"
            )
        elif job.said.finish:
            self._end(job, job.said.finish, text)
        else:
            self._tell(job, text)

    def _run(self, jobs: list[_Job], step: Callable[..., Any], *args: Any) -> Any:
        """What the device gives; None where it failed, which ends these jobs and makes all others start again."""
        try:
            return step(*args)
        except Exception as error:
            # Its cache may have been donated.
            for job in self._running():
                if job in jobs:
                    self._reuse.failed(job.start)
                    self._end(job, "error", error=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
                else:
                    self._preempt(job)
            self.device.reset()
            self._reuse.forget()
            return None

    def _fill(self) -> bool:
        """Chunks of prompts, first in rank first, until the budget is spent; whether there was any."""
        budget, any_ = self._budget, False
        for job in self._running():
            while job.slot is not None and not job.decoding and (budget > 0 or not any_):
                jobs = self._beside(job)
                if (done := self._run(list(jobs), self.device.fill, list(jobs.values()))) is None:
                    return True
                ends, drawn = done
                any_ = True
                budget -= ends[0] - job.filled
                for one, end in zip(jobs, ends, strict=True):
                    one.filled = end
                    if one.decoding:
                        text = self._take(one, drawn, (self.device.shard(jobs[one].slot),))
                        if not one.broken:
                            self._publish(one, one.prompt)
                        self._heard(one, text)
        return any_

    def _beside(self, job: _Job) -> dict[_Job, Chunk]:
        """The next chunk of a job, and of the first in rank of each other shard whose chunk takes the same program."""

        def chunk(job: _Job) -> Chunk:
            assert job.slot is not None
            more = job.request.sampling, job.request.logprobs > 0, job.start.hit, job.start.history
            return Chunk(job.slot, job.prompt, job.filled, job.pages, *more)

        found = {job: chunk(job)}
        for one in self._running() if self.device.shards > 1 else ():
            taken = {self.device.shard(other.slot) for other in found.values()}
            if not one.decoding and one.slot is not None and self.device.shard(one.slot) not in taken:
                other = chunk(one)
                if self.device.shape(other) == self.device.shape(found[job]):
                    found[one] = other
        return found

    def _decode(self, steps: int) -> None:
        """A block of decode steps of every job whose prompt is filled."""
        for job in self._running():
            if job.decoding:
                ahead = min(steps, job.request.sampling.max_new_tokens - job.known)
                self._grow(job, len(job.prompt) + job.known - 1 + ahead)
        jobs = [job for job in self._running() if job.decoding]
        if not jobs:
            return
        slots = len(self._slots)
        tokens, left = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        ends, given = np.full((slots, ENDS), -1, np.int32), np.full((BLOCK, slots), -1, np.int32)
        pages: list[list[int]] = [[] for _ in range(slots)]
        samplings = [Sampling()] * slots
        for job in jobs:
            n, said, sampling = job.slot, job.said.ids, job.request.sampling
            assert n is not None
            tokens[n], left[n] = said[job.known - 1], sampling.max_new_tokens - job.known
            stops = sorted({*self._ends, *sampling.stop_ids})
            ends[n, : len(stops)] = stops
            again = said[job.known : job.known + BLOCK]
            given[: len(again), n] = again
            pages[n], samplings[n] = job.pages, sampling
        asked = any(job.request.logprobs for job in jobs)
        drawn = self._run(jobs, self.device.decode, pages, tokens, left, ends, samplings, steps, given, asked)
        if drawn is None:
            return
        for job in jobs:
            if (n := job.slot) is None:
                # The end of one before it failed: its tokens are made again.
                continue
            text = ""
            for at in range(steps):
                if job.said.finish or job.broken or drawn.tokens[at, n] < 0:
                    break
                text += self._take(job, drawn, (at, n))
            self._heard(job, text)
