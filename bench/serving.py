"""Times of the engine's steps: decode by context, prefill with and without the decoder on all rows, a load of random requests.

Weights are random, or a run's; rows are packed; on an accelerator the passes are bfloat16.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tokenizers import Tokenizer, models

from bench import program
from bench.compile_time import forty_layers
from dsv41.analyze import counted
from dsv41.analyze.contexts import parse_contexts, spell
from dsv41.analyze.costs import prefill_flops
from dsv41.analyze.own import own_model
from dsv41.cache import Cache, stored
from dsv41.config import PRESETS, ModelConfig, preset
from dsv41.errors import UserError, nearest
from dsv41.files import check_outputs, write_text
from dsv41.numerics import PACKED, Policy
from dsv41.params import init_params
from dsv41.quant import INDEX_KEY, MAIN_KV, WINDOW_KV
from infer.device import ENDS, Chunk, Device
from infer.engine import Engine
from infer.model import Model, load_model
from infer.requests import Event, Request
from infer.sampling import Sampling
from infer.steps import BLOCK, CHUNKS, DecoderReplay, Steps
from kernels_pallas import registry

FORTY = "forty"  # the release's schedule at the toy's widths
PAGE, CHUNK, REPEATS = 128, 512, 5
USUAL = {"decode": "1k,4k,16k", "prefill": "4k,16k"}  # contexts where none is named


@dataclass(frozen=True)
class Options:
    """What a benchmark takes besides its words; see `dsv41.commands.Bench`."""

    preset: str | None = None
    checkpoint: Path | None = None
    batch: int | None = None
    decoder_replay: DecoderReplay = "bounded"


@dataclass
class Row:
    """One result: seconds of ``what`` at a context, or under a load."""

    what: str
    context: int
    batch: int
    seconds: float
    tokens_per_second: float
    more: dict[str, float]


def policy() -> Policy:
    """Packed rows; bfloat16 passes where there is an accelerator."""
    return PACKED if jax.default_backend() == "cpu" else Policy(jnp.bfloat16, True, True, True)


def open_model(options: Options) -> Model:
    """The run's model, or random weights of a named config with a tokenizer that says nothing."""
    if options.checkpoint is not None:
        if options.preset is not None:
            raise UserError("preset: found beside checkpoint, allowed is one of them")
        return load_model(options.checkpoint)
    name = options.preset or "toy"
    # The release's weights are more than one machine's.
    names = [*(one for one in PRESETS if one != "flash"), FORTY]
    if name not in names:
        raise UserError(f"preset: found {name!r}, allowed are {', '.join(names)}{nearest(name, names)}")
    return random_model(forty_layers() if name == FORTY else preset(name))


def random_model(config: ModelConfig) -> Model:
    """Random weights as passes take them, with a tokenizer that says nothing."""
    params = init_params(config, jax.random.key(0), policy().compute_dtype)
    words = {f"w{n}": n for n in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return Model(params, config, tokenizer, np.arange(config.vocab_size, dtype=np.int32), 0)


def _device(model: Model, longest: int, slots: int, replay: DecoderReplay, chunk: int) -> Device:
    pages = slots * -(-longest // PAGE)
    return Device(model, policy(), replay, slots, pages, PAGE, longest, (chunk,), 0)


def filled(cache: Cache, length: int) -> Cache:
    """The cache with random rows everywhere, and every slot at ``length`` tokens."""

    def rows(n: int, like: jax.Array, fmt: Any) -> jax.Array:
        # The format's width is the one whose rows have this many bytes.
        width = next(w for w in range(32, 8 * like.shape[-1], 32) if fmt.row_bytes(w) == like.shape[-1])
        few = min(like.shape[0], 64)
        # A part at a time: as values, rows take many times their bytes.
        part = lambda key: stored(jax.random.normal(key, (few, *like.shape[1:-1], width), jnp.float32), fmt, True)  # noqa: E731
        parts = lax.map(part, jax.random.split(jax.random.key(n), -(-like.shape[0] // few)))
        return parts.reshape(-1, *like.shape[1:])[: like.shape[0]]

    sources = tuple(
        replace(s, main_kv=rows(2 * n, s.main_kv, MAIN_KV), index_k=rows(2 * n + 1, s.index_k, INDEX_KEY))
        for n, s in enumerate(cache.sources)
    )
    windows = tuple(rows(100 + n, window, WINDOW_KV) for n, window in enumerate(cache.windows))
    return replace(cache, length=jnp.full_like(cache.length, length), sources=sources, windows=windows)


def decode(model: Model, contexts: Sequence[int], batch: int) -> list[Row]:
    """Seconds of one decode step of ``batch`` requests at each context, of blocks of steps; the cache's rows are random."""
    config, found = model.config, []
    for context in contexts:
        device = _device(model, context + REPEATS * BLOCK + BLOCK, batch, "full", CHUNK)
        device.cache = jax.jit(partial(filled, length=context), donate_argnums=0)(device.cache)
        per_slot = device.widths[-1]
        pages = [list(range(1 + n * per_slot, 1 + (n + 1) * per_slot)) for n in range(batch)]
        ids = np.random.default_rng(0).integers(3, config.vocab_size, batch).astype(np.int32)
        ends, given = np.full((batch, ENDS), -1, np.int32), np.full((BLOCK, batch), -1, np.int32)
        left = np.full(batch, 10**6, np.int32)
        run = lambda: device.decode(pages, ids, left, ends, [Sampling()] * batch, BLOCK, given, False)  # noqa: E731, B023
        step = _median(run, REPEATS) / BLOCK
        found.append(Row("decode", context, batch, step, batch / step, {}))
        print(f"decode  {spell(context):>6} context  {batch:3} requests  {1e3 * step:10.3f} ms a step", flush=True)
    return found


def _median(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call that ends when its result is on the host; the first, which compiles, is left out."""
    run()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _whole_prompt(device: Device, prompt: list[int]) -> None:
    at, pages = 0, list(range(1, 1 + device.widths[-1]))
    while at < len(prompt):
        (at,), _ = device.fill([Chunk(0, prompt, at, pages, Sampling())])


def prompt_products(model: Model, context: int, replay: DecoderReplay) -> int:
    """Multiply-adds of all matrix products of a prompt's chunks, counted in the traced steps with every op on its reference."""
    steps, width = Steps(model, policy(), replay), min(CHUNK, context)
    params, state, ids, live, _ = counted.step_arguments(model.config, width, context)
    args = params, state, ids, live, jax.ShapeDtypeStruct((1,), jnp.int32)
    each = cache(lambda early: counted.counted_total(partial(steps.fill, early=early), *args))
    with registry.automatic("reference"):
        return sum(each(steps.early(at + width, context)) for at in range(0, context, width))


def prefill(model: Model, contexts: Sequence[int], replay: DecoderReplay, repeats: int = 3) -> list[Row]:
    """Seconds of each prompt's prefill into an empty slot, with all rows in the decoder and with ``replay``, in turns.

    Of the FLOPs, ``flops_of_full`` is what products of the reference's static shapes have, ``needed_of_full`` the formula's.
    """
    found: list[Row] = []
    for context in contexts:
        prompt = np.random.default_rng(0).integers(3, model.config.vocab_size, context).tolist()
        kinds = tuple(dict.fromkeys(("full", replay)))
        devices = {kind: _device(model, context, 1, kind, min(CHUNK, context)) for kind in kinds}
        spent = _in_turns({kind: partial(_whole_prompt, device, prompt) for kind, device in devices.items()}, repeats)
        products = {kind: prompt_products(model, context, kind) for kind in kinds}
        for kind, (wall, cpu) in spent.items():
            more = {"of_full": wall / spent["full"][0], "flops_of_full": products[kind] / products["full"]}
            if kind != "halo":
                more["needed_of_full"] = _needed(model, context, kind == "full") / _needed(model, context, True)
            if jax.default_backend() == "cpu":
                more |= {"cpu_seconds": cpu, "cpu_of_full": cpu / spent["full"][1]}
            found.append(Row(f"prefill {kind}", context, 1, wall, context / wall, more))
            said = f"{wall:10.3f} s  {more['of_full']:.3f} of full, of its products' FLOPs {more['flops_of_full']:.3f}"
            print(f"prefill {spell(context):>6} tokens  {kind:8} {said}", flush=True)
    return found


def _needed(model: Model, context: int, every_layer: bool) -> float:
    return sum(prefill_flops(own_model(model.config, "", ""), context, every_layer).values())


def _in_turns(runs: dict[DecoderReplay, Callable[[], Any]], repeats: int) -> dict[DecoderReplay, tuple[float, float]]:
    """Median seconds of each call by the wall and of the CPU, one after the other so that all meet the same machine; a first
    one of each, which compiles, is left out."""
    for run in runs.values():
        run()
    seconds: dict[DecoderReplay, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            began = time.perf_counter(), time.process_time()
            run()
            seconds[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return {name: (median(w for w, _ in each), median(c for _, c in each)) for name, each in seconds.items()}


def serve(
    model: Model, requests: int, slots: int, replay: DecoderReplay, longest: int = 512, chunks: tuple[int, ...] = CHUNKS
) -> list[Row]:
    """Tokens a second of the engine, with ``requests`` random requests there at once; warm-up not counted."""
    longest = min(longest, model.config.max_position_embeddings)
    engine = Engine(model, policy(), decoder_replay=replay, slots=slots, longest=longest, page=PAGE, chunks=chunks)
    engine.warm_up()
    rng, ended = np.random.default_rng(0), []

    def hear(event: Event) -> None:
        if event.finish:
            ended.append(event.finish)

    began = time.perf_counter()
    for n in range(requests):
        new = int(rng.integers(1, longest // 4 + 1))
        ids = rng.integers(3, model.config.vocab_size, rng.integers(1, longest - new + 1)).tolist()
        engine.submit(Request(ids, Sampling(temperature=1.0, top_p=0.95, seed=n, max_new_tokens=new)), hear)
    while engine.step():
        pass
    seconds, now = time.perf_counter() - began, engine.metrics()
    first, later = (total / max(count, 1) for count, total in (now.time_to_first_token, now.time_per_token))
    more = {"first_token_seconds": first, "later_token_seconds": later, "prompt_tokens": now.prompt_tokens}
    row = Row("serve", longest, slots, seconds, now.new_tokens / seconds, {**more, "new_tokens": now.new_tokens})
    print(
        f"serve   {len(ended)} requests in {slots} slots: {now.prompt_tokens:,} prompt and {now.new_tokens:,} new tokens in"
        f" {seconds:.1f} s, {(now.prompt_tokens + now.new_tokens) / seconds:,.0f} tokens/s, {row.tokens_per_second:,.0f} new;"
        f" first after {first:.2f} s, then one each {1e3 * later:.1f} ms"
    )
    return [row]


def _requests(words: Sequence[str]) -> tuple[int, ...]:
    if len(words) > 1 or not all(word.isdecimal() and 0 < int(word) < 10**6 for word in words):
        raise UserError(f"serve: found {' '.join(words)!r}, allowed is a number of requests from 1 to 999999")
    return (int(words[0]),) if words else (64,)


def run(what: str, words: Sequence[str], out: Path | None, options: Options) -> None:
    """Runs one benchmark, prints its rows and writes ``out``; `UserError` for words it cannot mean."""
    check_outputs({"out": out})
    numbers = _requests(words) if what == "serve" else parse_contexts(",".join(words) or USUAL[what])
    if options.batch is not None and not 1 <= options.batch <= 4096:
        raise UserError(f"batch: found {options.batch}, allowed is 1 to 4096")
    model = open_model(options)
    if what == "serve":
        rows = serve(model, numbers[0], options.batch or 8, options.decoder_replay)
    elif what == "decode":
        rows = decode(model, numbers, options.batch or 1)
    else:
        rows = prefill(model, numbers, options.decoder_replay)
    if out is not None:
        named = {"model": str(options.checkpoint or options.preset or "toy"), "layers": model.config.num_hidden_layers}
        text = json.dumps({"device": program.device(), **named, "results": [asdict(row) for row in rows]}, indent=1)
        write_text(out, text + "\n")
