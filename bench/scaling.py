"""A training step on one device and on several: tokens a second, and the time of its collectives, by kind and uncovered.

Run: python -m bench.scaling [--preset small] [--meshes data=2 expert=2 fsdp=2] [--out FILE.json] ...

Each device along data, fsdp and expert has as many rows, of random ids, as the one has that it is compared with. A step is timed
whole, on the clock, and then traced: of a device's collectives, those parts count as uncovered in which it computes nothing.
A CPU's devices are threads of one process, whose operations a trace does not tell apart: there, times of collectives are of all
of them, waiting included, and nothing is said of what is uncovered.
"""

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from bench import program
from bench.train_cost import TRACED, Operation, named_one_by_one, operations, random_batch, timed_steps
from dsv41.collectives import summed_collectives
from dsv41.config import ModelConfig, preset
from dsv41.errors import UserError, nearest
from dsv41.files import check_outputs, write_text
from dsv41.numerics import Policy
from dsv41.params import count_parameters, text_specs
from dsv41.sharding import Sizes, check_mesh, make_mesh, parse_mesh, row_parts
from train.devices import Devices
from train.layout import check_tokens
from train.packing import check_length
from train.recipes import DTYPES
from train.step import StepOptions, make_train_step

_KINDS = ("ragged-all-to-all", "all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")
_COLLECTIVE = re.compile("|".join(_KINDS))
Span = tuple[float, float]


@dataclass(frozen=True)
class Options:
    """Times training steps on meshes."""

    preset: str = "small"
    """A named configuration."""
    meshes: tuple[str, ...] = ("data=2", "expert=2", "fsdp=2")
    """Devices by axis, one mesh after another; each is compared with one device."""
    rows: int = 8
    """Rows of each device along data, fsdp and expert."""
    length: int = 1024
    """Tokens a row."""
    dtype: str = "bfloat16"
    """Of the passes: float32 or bfloat16."""
    remat: str = "block"
    """What the backward pass computes again: none, attention or block."""
    repeats: int = 9
    """Steps that are timed; the median counts."""
    out: Path | None = None
    """Also write the rows to this JSON file."""


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time in spans that do not meet, in order."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def uncovered(spans: Iterable[Span], cover: Iterable[Span]) -> float:
    """How much of the time of ``spans`` no span of ``cover`` has."""
    length = lambda spans: sum(stop - start for start, stop in merged(spans))  # noqa: E731
    spans, cover = [*spans], [*cover]
    return length([*spans, *cover]) - length(cover)


def leaves(events: Iterable[Operation]) -> list[Operation]:
    """Of one line's events (start, stop, name), those within which no other begins: not the loops around them."""
    ordered = sorted(events, key=lambda event: (event[0], -event[1]))
    return [one for one, after in zip_longest(ordered, ordered[1:]) if after is None or after[0] >= one[1]]


def collective_seconds(planes: list[list[list[Operation]]], devices: bool) -> dict[str, Any]:
    """Of one step and one device: seconds of each kind of collective, of all, and of what is uncovered (None on a CPU)."""
    kinds: dict[str, float] = defaultdict(float)
    whole = bare = 0.0
    for lines in planes:
        events = [event for line in lines for event in leaves(line)]
        named = [(start, stop, found[0] if (found := _COLLECTIVE.search(op)) else "") for start, stop, op in events]
        for kind in _KINDS:
            kinds[kind] += sum(stop - start for start, stop in merged((a, b) for a, b, name in named if name == kind))
        sent = [(a, b) for a, b, name in named if name]
        whole += uncovered(sent, [])
        bare += uncovered(sent, [(a, b) for a, b, name in named if not name])
    count = TRACED * (len([lines for lines in planes if any(lines)]) or 1)
    return {
        "by_kind": {kind: seconds / count for kind, seconds in sorted(kinds.items()) if seconds},
        "seconds": whole / count,
        "uncovered": bare / count if devices else None,
        "overlap": 1 - bare / whole if devices and whole else None,
    }


def measure(options: Options, mesh: str | None) -> dict[str, Any]:
    """The row of one mesh, None for one device."""
    config = preset(options.preset)
    sizes: Sizes = parse_mesh(mesh or "data=1")
    devices, rows = Devices(mesh, config), options.rows * row_parts(sizes)
    fold = np.arange(config.vocab_size, dtype=np.int32) % config.engram_compressed_vocab_size
    policy = Policy(DTYPES[options.dtype], remat=options.remat)  # pyright: ignore
    step: Any = make_train_step(config, policy, fold, StepOptions(), mesh=devices.mesh)
    batch, rate = devices.place(random_batch(config, rows, options.length)), np.float32(1e-3)
    began = time.perf_counter()
    state = devices.init(0)
    traced = step.trace(state, batch, rate)
    compiled = traced.lower().compile(named_one_by_one())
    compiling = time.perf_counter() - began
    read = lambda folder: collective_seconds(*operations(folder))  # noqa: E731
    seconds, metrics, spent = timed_steps(compiled, state, batch, rate, options.repeats, read)
    return {
        "mesh": mesh or "one device",
        "devices": int(np.prod([*sizes.values()])),
        "batch_size": rows,
        "compile_seconds": round(compiling, 1),
        "seconds": seconds,
        "tokens_per_second": rows * options.length / seconds,
        "loss": float(metrics["loss"]),
        "collectives": spent,
        "sent": summed_collectives(traced.jaxpr.jaxpr, sizes) if mesh else [],
    }


def say(row: dict[str, Any], one: dict[str, Any]) -> str:
    """A row as a line."""
    spent = row["collectives"]
    kinds = ", ".join(f"{kind} {1e3 * seconds:.2f}" for kind, seconds in spent["by_kind"].items())
    bare = "" if spent["uncovered"] is None else f", of them {1e3 * spent['uncovered']:.2f} uncovered"
    return (
        f"{row['mesh']}: {1e3 * row['seconds']:.2f} ms, {row['tokens_per_second']:,.0f} tokens/s,"
        f" {row['tokens_per_second'] / one['tokens_per_second']:.2f} times one device;"
        f" collectives {1e3 * spent['seconds']:.2f} ms{bare}{f' ({kinds})' if kinds else ''}"
    )


def _check(options: Options, config: ModelConfig) -> None:
    for name, value, allowed in (("dtype", options.dtype, (*DTYPES,)), ("remat", options.remat, ("none", "attention", "block"))):
        if value not in allowed:
            raise UserError(f"{name}: found {value!r}, allowed are {', '.join(allowed)}{nearest(value, allowed)}")
    for name, value in (("rows", options.rows), ("repeats", options.repeats)):
        if value < 1:
            raise UserError(f"{name}: found {value}, allowed is 1 or more; nearest is 1")
    check_length(options.length, config.document_alignment)
    for mesh in options.meshes:
        sizes = parse_mesh(mesh)
        check_mesh(config, sizes)
        check_tokens(sizes, options.length, config.document_alignment)
        make_mesh(sizes)
    check_outputs({"out": options.out})


def main(options: Options) -> None:
    """Prints a row for one device and one for each mesh, and writes what there is after each of them."""
    config = preset(options.preset)
    _check(options, config)
    rows: list[dict[str, Any]] = []
    meshes: Sequence[str | None] = (None, *options.meshes)
    for mesh in meshes:
        rows.append(measure(options, mesh))
        print(say(rows[-1], rows[0]), flush=True)
        if options.out is not None:
            facts = {"preset": options.preset, "parameters": count_parameters(text_specs(config)), "length": options.length}
            told = {"device": program.device(), **facts, "dtype": options.dtype, "remat": options.remat, "rows": rows}
            write_text(options.out, json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    program.run(main, Options)
