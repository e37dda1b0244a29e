"""What a model costs, as data: weights, products with cached rows, rows kept; and the sums over a context (serving §1.1, §9).

A context of n tokens counts the new token. FLOPs are two a multiply-add, times the cost of the product's format beside
bfloat16's; draft stages and the vision tower are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Format = Literal["bf16", "fp8", "fp4"]
FORMAT_COST: dict[Format, float] = {"bf16": 1.0, "fp8": 0.5, "fp4": 0.25}
CORE, SCORES = "attention core", "index scores"


@dataclass(frozen=True)
class Weights:
    """Weights of one part of a model: numbers in all, those that one token multiplies, and of these the ones in prefill.

    format: the one the products run in. A lookup table multiplies nothing.
    """

    part: str
    size: int
    active: int
    prefill: int
    format: Format = "fp8"


@dataclass(frozen=True)
class Reads:
    """Products of a new token with cached rows: ``layers`` times ``macs`` multiply-adds for each row that is read.

    ratio: tokens a row stands for. limit: most rows that are read. prefill: whether a prompt's every token does it.
    """

    part: str
    layers: int
    macs: int
    ratio: int
    limit: int | None
    format: Format = "bf16"
    prefill: bool = True

    def rows(self, context: int) -> int:
        """Rows that the last of ``context`` tokens reads."""
        seen = context // self.ratio
        return seen if self.limit is None else min(seen, self.limit)

    def rows_of_all(self, context: int) -> int:
        """Rows that all of ``context`` tokens read: the sum of `rows` over 1 .. context."""
        groups, rest = divmod(context, self.ratio)
        below = self.ratio * groups * (groups - 1) // 2 + groups * (rest + 1)  # sum of i // ratio
        if self.limit is None or groups <= self.limit:
            return below
        first = self.limit * self.ratio  # from here on the limit binds
        return self.ratio * self.limit * (self.limit - 1) // 2 + self.limit * (context - first + 1)


@dataclass(frozen=True)
class Rows:
    """Cached rows of one kind: ``layers`` of them, ``bytes`` each, for every ``ratio`` tokens."""

    kind: str
    layers: int
    bytes: int
    ratio: int = 1

    @property
    def bytes_per_token(self) -> float:
        return self.layers * self.bytes / self.ratio


@dataclass(frozen=True)
class Model:
    """A model's costs. fixed: cache bytes of a request that do not grow, by kind. tail: a prompt's last tokens that run the
    layers which its other tokens skip; None where every token runs every layer."""

    name: str
    title: str
    weights: tuple[Weights, ...]
    reads: tuple[Reads, ...]
    rows: tuple[Rows, ...]
    fixed: dict[str, int]
    tail: int | None = None

    @property
    def parameters(self) -> int:
        return sum(w.size for w in self.weights)

    @property
    def active(self) -> int:
        """Parameters that a decoded token multiplies."""
        return sum(w.active for w in self.weights)

    @property
    def active_in_prefill(self) -> int:
        """Parameters that every token of a prompt multiplies."""
        return sum(w.prefill for w in self.weights)

    @property
    def bytes_per_token(self) -> float:
        """Cache bytes of each further token."""
        return sum(r.bytes_per_token for r in self.rows)

    @property
    def fixed_bytes(self) -> int:
        """Cache bytes of a request at any length."""
        return sum(self.fixed.values())


def decode_flops(model: Model, context: int) -> dict[str, float]:
    """FLOPs of one decoded token, the last of ``context``, by part."""
    parts = {w.part: 2 * w.active * FORMAT_COST[w.format] for w in model.weights if w.active}
    for read in model.reads:
        cost = 2 * FORMAT_COST[read.format] * read.layers * read.macs * read.rows(context)
        parts[read.part] = parts.get(read.part, 0.0) + cost
    return parts


def prefill_macs(model: Model, context: int, every_layer: bool = False) -> Iterator[tuple[str, Format, int, int]]:
    """Of each part of a prompt of ``context`` tokens: its name, format, and multiply-adds in layers that every token runs and
    in those that the tail alone does; the head runs for the last token. every_layer: as if there were no tail."""
    tail = None if every_layer else model.tail
    last = context if tail is None else min(tail, context)
    for w in model.weights:
        if w.part == "head":
            yield w.part, w.format, w.active, 0
        elif tail is None:
            yield w.part, w.format, w.active * context, 0
        else:
            yield w.part, w.format, w.prefill * context, (w.active - w.prefill) * last
    for r in model.reads:
        of_all, cost = r.rows_of_all(context), r.layers * r.macs
        if r.prefill or tail is None:
            yield r.part, r.format, cost * of_all, 0
        else:
            yield r.part, r.format, 0, cost * (of_all - r.rows_of_all(context - last))


def prefill_flops(model: Model, context: int, every_layer: bool = False) -> dict[str, float]:
    """FLOPs of `prefill_macs` by part, those of the tail alone under "tail"."""
    parts: dict[str, float] = {}
    for part, format, of_all, of_tail in prefill_macs(model, context, every_layer):
        for name, macs in ((part, of_all), ("tail", of_tail)):
            if macs:
                parts[name] = parts.get(name, 0.0) + 2 * FORMAT_COST[format] * macs
    return parts


def cache_bytes(model: Model, context: int) -> dict[str, int]:
    """Bytes that a request of ``context`` tokens keeps, by kind; an incomplete group has no row yet."""
    kinds: dict[str, int] = {}
    for r in model.rows:
        kinds[r.kind] = kinds.get(r.kind, 0) + r.layers * r.bytes * (context // r.ratio)
    return kinds | model.fixed


def crossover(cheap_later: Model, other: Model, limit: int) -> int | None:
    """The least context from which on ``cheap_later`` decodes for less than ``other``; None outside 4096 .. ``limit``.

    Found by bisection: between these two the difference only grows.
    """
    less = lambda n: sum(decode_flops(cheap_later, n).values()) < sum(decode_flops(other, n).values())  # noqa: E731
    low, high = 4096, limit
    if less(low) or not less(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if less(middle) else (middle, high)
    return high
