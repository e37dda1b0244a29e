"""Time to the first token of a prompt that begins as others did, by what is left of those; and bytes of a token on disk.

Kinds: cold, nothing; pages, those of the device; file, the blocks in SQLite; windows, pages and a snapshot of the windows. Behind
pages and file the windows are lost, so the last tokens of the prefix run again. Weights are random, rows packed, the decoder's
replay bounded; medians, the first of each kind, which compiles, left out.
Run: python -m bench.prefix_times [--tokens 32768] [--preset toy] [--out FILE.json]
"""

import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import program, serving
from bench.kill_store import random_rows
from dsv41 import config
from dsv41.errors import UserError
from dsv41.files import check_outputs, write_text
from dsv41.numerics import PACKED
from infer.device import Chunk
from infer.engine import PAGE, Engine
from infer.payload import BlockFormat
from infer.prefix import PrefixCache
from infer.requests import Event, Request
from infer.sampling import Sampling
from infer.store import BlockStore
from infer.windows import WindowPool

KINDS = ("cold", "pages", "file", "windows")


@dataclass(frozen=True)
class Options:
    """Times first tokens behind a shared prefix."""

    tokens: int = 1 << 15
    """Of the shared prefix."""
    own: int = 64
    """Tokens that each prompt has of its own behind it."""
    repeats: int = 3
    """Prompts of each kind, of which the median is told."""
    preset: str = "toy"
    """A named configuration."""
    out: Path | None = None
    """Also write what was found to this JSON file."""


@dataclass(frozen=True)
class Found:
    """Seconds to the first token of a kind of hit; tokens of the prompt that were found, and that ran."""

    kind: str
    seconds: float
    found: int
    ran: int


def first_token(engine: Engine, ids: list[int], kind: str = "") -> Found:
    """What a prompt's first token took."""
    told: list[Event] = []
    began = time.perf_counter()
    engine.submit(Request(ids, Sampling(max_new_tokens=1)), told.append)
    ran, fill = 0, engine.device.fill

    def counted(chunks: list[Chunk]) -> Any:
        nonlocal ran
        ends, drawn = fill(chunks)
        ran += ends[0] - chunks[0].at
        return ends, drawn

    engine.device.fill = counted
    while not told:
        engine.step()
    seconds = time.perf_counter() - began
    engine.device.fill = fill
    while engine.step():
        pass
    assert told[-1].usage is not None, told
    return Found(kind, seconds, told[-1].usage.cached_tokens, ran)


def measure(options: Options, folder: Path, page: int = PAGE) -> list[Found]:
    """Each kind of `KINDS`; their files lie in ``folder``."""
    model, room = serving.open_model(serving.Options(preset=options.preset)), options.tokens + 2 * options.own
    model = replace(model, config=config.replace(model.config, max_position_embeddings=room), fingerprint=b"random")
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(3, model.config.vocab_size, n).tolist()  # noqa: E731
    prefix = PrefixCache(model, serving.policy(), "bounded", page, BlockStore(folder / "blocks.db"))
    pages = 2 * -(-room // page)
    engine = Engine(
        model, serving.policy(), decoder_replay="bounded", slots=1, longest=room, page=page, pages=pages, prefix=prefix
    )
    shared = draw(options.tokens)

    def times(kind: str) -> Found:
        told: list[Found] = []
        for _ in range(1 + options.repeats):
            ids = (draw(options.tokens) if kind == "cold" else shared) + draw(options.own)
            if kind != "pages":
                engine.device.reset()
                engine._reuse.forget()
            if kind == "windows":
                # The request at whose end the snapshot is taken.
                first_token(engine, shared)
            told.append(first_token(engine, ids, kind))
            prefix.flush()
        one = replace(told[-1], seconds=statistics.median(one.seconds for one in told[1:]))
        print(f"{kind:8} {one.seconds:8.3f} s to the first token, {one.found} tokens found, {one.ran} ran", flush=True)
        return one

    found = [times("cold")]
    first_token(engine, shared)
    prefix.flush()
    found += [times("pages"), times("file")]
    prefix.windows = WindowPool()
    found.append(times("windows"))
    prefix.close()
    return found


def bytes_on_disk(name: str, folder: Path, blocks: int = 64) -> dict[str, float]:
    """Bytes of a token of a preset's packed rows: of its entries and keys, and of the file that has its blocks."""
    fmt, file = BlockFormat(config.preset(name), PACKED, PAGE), folder / f"{name}.db"
    store = BlockStore(file)
    store.put(random_rows(fmt, blocks, np.random.default_rng(1)))
    store.close()
    return {"rows": fmt.row_bytes / PAGE, "file": os.path.getsize(file) / (PAGE * blocks)}


def main(options: Options) -> None:
    """Prints a line a kind and one a preset, and writes ``out``."""
    for name in ("tokens", "own", "repeats"):
        if (value := getattr(options, name)) < 1:
            raise UserError(f"{name}: found {value}, allowed is 1 or more; nearest is 1")
    if options.out is not None:
        check_outputs({"out": options.out})
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
        disk = {name: bytes_on_disk(name, Path(folder)) for name in dict.fromkeys((options.preset, "flash"))}
    for name, one in disk.items():
        print(f"{name}: {one['rows']:g} bytes a token, {one['file']:.1f} on disk, {one['file'] / one['rows'] - 1:.1%} more")
    if options.out is not None:
        facts = {"device": program.device(), "cores": os.cpu_count(), "preset": options.preset, "tokens": options.tokens}
        facts |= {"own": options.own, "times": [asdict(one) for one in found], "bytes_a_token": disk}
        write_text(options.out, json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    program.run(main, Options)
