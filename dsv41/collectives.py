"""What a program on a mesh sends: each collective of its jaxpr, as often as it runs."""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax.extend

from dsv41.sharding import Sizes

# Of the bytes that go into a collective over n devices, what a device sends of them: of a ring where sums or copies go round.
_SENT = {
    "psum": lambda n: 2 * (n - 1) / n,
    "psum_invariant": lambda n: 2 * (n - 1) / n,
    "pmax": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "ragged_all_to_all": lambda n: (n - 1) / n,
    "ppermute": lambda n: 1,
}


def _axes(params: dict[str, Any]) -> tuple[str, ...]:
    found = params.get("axes", params.get("axis_name"))
    return (found,) if isinstance(found, str) else tuple(found or ())


def collectives(jaxpr: Any, sizes: Sizes, times: int = 1) -> Iterator[tuple[str, tuple[str, ...], int, float]]:
    """Each collective of a jaxpr: its name, mesh axes, how often it runs, and the bytes that a device sends each time.

    A loop's are counted as often as it runs, once where that is not known; those of a branch once. Rows of a ragged exchange are
    taken as spread evenly.
    """
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _SENT:
            axes = _axes(equation.params)
            sizes_of = [v.aval.size * v.aval.dtype.itemsize for v in equation.invars]
            # A ragged exchange's second operand is where rows arrive; the larger of the two is room for the worst case.
            size = min(sizes_of[:2]) if name == "ragged_all_to_all" else sum(sizes_of)
            yield name, axes, times, size * _SENT[name](math.prod(sizes[axis] for axis in axes))
        inside = times * equation.params["length"] if name == "scan" else times
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from collectives(inner, sizes, inside)


def summed_collectives(jaxpr: Any, sizes: Sizes) -> list[dict[str, Any]]:
    """`collectives` by name and axes: times and bytes of all of them, the most bytes first."""
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for name, axes, times, sent in collectives(jaxpr, sizes):
        total = found[(name, "*".join(axes))]
        total[0] += times
        total[1] += times * sent
    rows = sorted(found.items(), key=lambda item: -item[1][1])
    return [{"name": n, "axes": axes, "times": int(times), "bytes": round(sent)} for (n, axes), (times, sent) in rows]
