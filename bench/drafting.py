"""Drafts on held-out code: acceptance by slot with and without the Markov head, tokens of a round, tokens a second.

Run: python -m bench.drafting --checkpoint RUN [--steps 300] [--out FILE.json]

Acceptance by slot is behind the tokens of the text; tokens of a round are of continuations, prompt by prompt, where each mode
runs beside plain decode in turns, so that a machine that does other work too slows both. RUN is of `dsv41 train --recipe dspark`.
"""

import json
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import program
from dsv41.config import ModelConfig
from dsv41.files import write_text
from dsv41.numerics import Policy
from dsv41.params import DraftParams
from infer.generate import Generator
from infer.model import Model, load_model, with_drafter
from infer.sampling import Sampling
from infer.schedule import Drafting, Mode, read_calibration
from train.corpus import STDLIB, load_corpus, split_corpus
from train.data import TrainData
from train.drafter import DrafterState, init_drafter, make_drafter_step
from train.drafter_run import DrafterOptions, examine
from train.optim import warmup_hold_cosine
from train.packing import pack
from train.tokenizer import encode_documents

_PROMPT = 64  # tokens of held-out text before each continuation


@dataclass(frozen=True)
class Options:
    """Measures drafts."""

    checkpoint: Path
    """A run of recipe dspark."""
    data: tuple[str, ...] = (STDLIB,)
    """The text that it was trained on, of which the held-out part is taken."""
    steps: int = 0
    """Also train a drafter whose Markov head stays zero for so many steps, on the same rows; 0 for none."""
    prompts: int = 8
    """Held-out files that are continued."""
    new_tokens: int = 64
    """Of each continuation."""
    modes: tuple[Mode, ...] = ("fixed", "threshold", "scheduled")
    """Of drafting that run beside plain decode."""
    out: Path | None = None
    """Also write the numbers to this JSON file."""


def _without(draft: DraftParams) -> DraftParams:
    return replace(draft, markov_embed=jnp.zeros_like(draft.markov_embed), markov_head=jnp.zeros_like(draft.markov_head))


def train_without(model: Model, rows: Any, options: DrafterOptions, steps: int) -> DraftParams:
    """A drafter trained as the run's, but for a Markov head that is zero behind every step."""
    config = model.config
    state = init_drafter(config, options.seed)
    step = make_drafter_step(config, Policy(), model.token_map, options.anchors, options.seed)
    data, rate = TrainData(rows, options.batch_size, options.seed), warmup_hold_cosine(steps, options.lr)
    for n in range(steps):
        state, _ = step(replace(state, draft=_without(state.draft)), model.params, data.batch(n), np.float32(rate(n)))
    return _without(state.draft)


def accepted_by_slot(model: Model, draft: DraftParams, heldout: Any, options: DrafterOptions) -> dict[str, Any]:
    """What `train.drafter_run.examine` finds of a drafter."""
    state = DrafterState(draft, None, jnp.zeros((), jnp.int32))
    return examine(state, model.params, model.config, model.token_map, heldout, options)[0]


def continuations(model: Model, prompts: list[list[int]], temperature: float, options: Options) -> dict[str, Any]:
    """Each mode beside plain decode: tokens of a round, drafts that stayed, tokens a second and times plain decode's."""
    slots = model.config.dspark_block_size
    modes: dict[str, Generator] = {"off": Generator(model)}
    modes |= {mode: Generator(model, drafting=_drafting(mode, options.checkpoint, slots)) for mode in options.modes}
    sums: dict[str, Counter] = {name: Counter() for name in modes}
    ratios: dict[str, list[float]] = {name: [] for name in modes}
    same: Counter[str] = Counter()
    for seed, ids in enumerate([prompts[0], *prompts]):
        rule, took, said = [Sampling(temperature=temperature, seed=seed, max_new_tokens=options.new_tokens)], {}, {}
        for name, generator in modes.items():
            (found,), speed = generator.generate([ids], rule)
            took[name], said[name] = speed.decode_seconds / max(len(found.ids), 1), found.ids
            if seed:  # the first prompt once more: for compiling alone
                new = {"tokens": len(found.ids), "seconds": speed.decode_seconds}
                sums[name].update({**new, "rounds": speed.rounds, "drafted": speed.drafted, "accepted": speed.accepted})
        for name in modes if seed else ():
            ratios[name].append(took["off"] / took[name])
            same[name] += said[name] == said["off"]
    table = {}
    for name, total in sums.items():
        rounds = total["rounds"]
        table[name] = {
            "tokens_per_second": total["tokens"] / total["seconds"],
            "times_plain": median(ratios[name]),
            # The first token comes of the prompt.
            "tokens_of_a_round": (total["tokens"] - len(prompts)) / rounds if rounds else 1.0,
            "drafts_of_a_round": total["drafted"] / rounds if rounds else 0.0,
            "kept": total["accepted"] / total["drafted"] if total["drafted"] else 0.0,
            "same_text": same[name],
        }
    return table


def _drafting(mode: Mode, run: Path, slots: int) -> Drafting:
    return Drafting(mode, temperatures=read_calibration(run, slots))


def main(options: Options) -> None:
    """Prints all numbers as they come."""
    model = with_drafter(load_model(options.checkpoint), options.checkpoint)
    config: ModelConfig = model.config
    rule = DrafterOptions(options.checkpoint)
    documents = split_corpus(load_corpus(options.data))
    rows, heldout = (pack(encode_documents(model.tokenizer, part), rule.length, config.document_alignment) for part in documents)
    found: dict[str, Any] = {"device": jax.devices()[0].device_kind, "step": model.step}
    found["by_slot"] = {"markov": accepted_by_slot(model, model.draft, heldout, rule)}
    found["by_slot"]["markov left out"] = accepted_by_slot(model, _without(model.draft), heldout, rule)
    print(json.dumps(found, indent=1), flush=True)
    texts = [ids for ids in encode_documents(model.tokenizer, documents[1]) if len(ids) >= _PROMPT][: options.prompts]
    prompts = [[config.bos_token_id, *ids[:_PROMPT].tolist()] for ids in texts]
    for temperature in (0.0, 1.0):
        part = continuations(model, prompts, temperature, options)
        found[f"temperature {temperature:g}"] = part
        print(json.dumps(part, indent=1), flush=True)
    if options.steps:
        began = time.monotonic()
        draft = train_without(model, rows, rule, options.steps)
        found["by_slot"]["trained without"] = accepted_by_slot(model, draft, heldout, rule)
        print(json.dumps(found["by_slot"]["trained without"], indent=1), f"{time.monotonic() - began:.0f} s", flush=True)
    if options.out is not None:
        write_text(options.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    program.run(main, Options)
