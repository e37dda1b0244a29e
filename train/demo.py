"""`dsv41 demo`: trains the toy model for a while, restores it in a new process, lets it write code, reports."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from dsv41.config import preset
from dsv41.errors import UserError
from dsv41.files import locked, make_writable, write_text
from dsv41.params import spec_leaves, text_specs
from dsv41.plan import cache_bytes_per_token
from dsv41.show import printable
from infer.model import load_model
from infer.speed import measure
from train.corpus import Document
from train.curve import plot_losses, running_mean
from train.loop import TrainResult, train
from train.ngram import bits_per_byte
from train.options import TrainOptions
from train.progress import Report

_PROMPTS = 3
_PROMPT_LINES = 6
_NEW_TOKENS = 96
SPEED_BATCHES = (1, 16)


def _prompts(documents: list[Document]) -> list[str]:
    """The lines before and at the first function of held-out files, of different groups where there are enough."""
    found: dict[str, str] = {}
    spare: list[str] = []
    for document in documents:
        lines = document.text.splitlines()
        for n, line in enumerate(lines):
            if line.lstrip().startswith("def ") and line.endswith(":") and n + 1 >= _PROMPT_LINES:
                prompt = "\n".join(lines[n + 1 - _PROMPT_LINES : n + 1]) + "\n"
                # A prompt that starts with "-" would read as an option.
                if len(prompt) < 400 and prompt.strip() and not prompt.startswith("-"):
                    if document.group in found:
                        spare.append(prompt)
                    else:
                        found[document.group] = prompt
                    break
    prompts = [*found.values(), *spare][:_PROMPTS]
    return prompts or ["import os\n\n\ndef ", "class ", "for "]


def _generate(run: Path, prompts: list[str]) -> list[dict]:
    """Continuations, as one batch, by a new process, which sees nothing but the run's folder."""
    # -P and this process's own path: a file in the current folder must not stand in for one of these packages.
    command = [sys.executable, "-P", "-m", "dsv41.cli", "generate", "--checkpoint", str(run), "--json"]
    command += ["--max-new-tokens", str(_NEW_TOKENS), "--temperature", "0.5", "--prompt", *prompts]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise UserError(f"demo: generate ended with exit code {done.returncode}: {last[0]}")
    return [json.loads(line) for line in done.stdout.splitlines()][: len(prompts)]


def _speed_lines(speed: dict[str, float]) -> list[str]:
    plain = speed["plain_decode"]
    lines = [
        "## Generating",
        "",
        f"Each sequence goes from {speed['prompt']} tokens to {speed['context']}; medians, without compiling. Tokens/s count all",
        "sequences of a batch. The plain path has no cache and runs the whole sequence again for each new token.",
        "",
        "| path | sequences | prefill tokens/s | decode tokens/s | decode tokens/s of one sequence | cache bytes |",
        "|---|---|---|---|---|---|",
    ]
    for batch in SPEED_BATCHES:
        decode = speed[f"decode_batch_{batch}"]
        lines.append(
            f"| cache | {batch} | {speed[f'prefill_batch_{batch}']:,.0f} | {decode:,.0f} | {decode / batch:,.0f}"
            f" ({decode / batch / plain:.1f} times plain) | {speed[f'cache_bytes_batch_{batch}']:,} |"
        )
    return [*lines, f"| plain | 1 | - | {plain:,.1f} | {plain:,.1f} | - |", ""]


def _report(result: TrainResult, baseline: float, texts: list[dict], speed: dict[str, float], seconds: float) -> str:
    families: dict[str, int] = {}
    for spec in spec_leaves(text_specs(result.config)):
        families[spec.family] = families.get(spec.family, 0) + spec.size
    (first, last), step = result.scores, result.records[-1]
    lines = [
        "# dsv41 demo",
        "",
        f"The toy preset, trained on the standard library's source within {seconds:g} s ({result.steps} steps), then",
        "restored in a new process.",
        "",
        "![loss](loss.png)",
        "",
        f"held-out bits per byte: {last.bits_per_byte:.4f}",
        f"order-2 byte model: {baseline:.4f}",
        f"held-out bits per byte at step 0, of the first rows: {first.bits_per_byte:.4f}",
        f"held-out cross-entropy: {last.nats_per_token:.4f} nats per token",
        f"training cross-entropy, running mean: {running_mean([r['ce'] for r in result.records])[-1]:.4f} nats per token",
        f"training loss of the last step, with the routers' and the indexers' terms: {step['loss']:.4f}",
        f"tokens/s: {result.tokens_per_second:.0f}",
        f"compile time: {result.compile_seconds:.1f} s",
        f"parameters: {sum(families.values()):,}",
        *(f"- {family}: {count:,}" for family, count in sorted(families.items())),
        "",
        f"cache bytes per token of flash: {cache_bytes_per_token(preset('flash')):g}",
        f"cache bytes per token of toy: {cache_bytes_per_token(result.config):g}",
        "",
        *_speed_lines(speed),
        "## Generated text",
        "",
        "Prompts are from held-out files; temperature 0.5.",
    ]
    for n, text in enumerate(texts, 1):
        fence = "`" * 8
        lines += ["", f"### {n}. prompt", "", fence, text["prompt"].rstrip("\n"), fence, "", "continuation", ""]
        lines += [fence, text["text"].rstrip("\n"), fence]
    # Two spaces: line breaks that Markdown keeps.
    return "\n".join(line + "  " if ": " in line and not line.startswith(("#", "-")) else line for line in lines) + "\n"


def demo(seconds: float, out: Path) -> int:
    """Runs the demo and writes ``out/report.md``; 0, or a `UserError`. A folder with an older demo is begun again."""
    if not seconds > 0:
        raise UserError(f"seconds: found {seconds}, allowed is a number above 0")
    make_writable(out)
    with locked(out, user="a demo"):
        return _demo(seconds, out)


def _demo(seconds: float, out: Path) -> int:
    # Made whole by this function alone; anything else in the folder stays.
    run = out / "run"
    with locked(run):
        if (run / "run.json").exists():
            shutil.rmtree(run)
    result = train(TrainOptions(out=run, steps=0, max_seconds=seconds, checkpoint_every=10**9, keep=1))
    with Report() as progress:
        progress.phase("counting the byte model")
        baseline = bits_per_byte(result.prepared.train_documents, result.prepared.heldout_documents)
        plot_losses(result.records, result.scores, out / "loss.png", "toy", baseline)
        progress.phase("measuring prefill and decode speed")
        speed = measure(load_model(run), SPEED_BATCHES)
        progress.phase("generating text in a new process")
        texts = _generate(run, _prompts(result.prepared.heldout_documents))
    report = out / "report.md"
    write_text(report, _report(result, baseline, texts, speed, seconds))
    print(f"held-out bits per byte: {result.scores[-1].bits_per_byte:.4f}")
    print(f"order-2 byte model: {baseline:.4f}")
    ratio = speed["decode_batch_1"] / speed["plain_decode"]
    print(f"decode: {speed['decode_batch_1']:.0f} tokens/s through the cache, {ratio:.1f} times the path without one")
    for text in texts:
        print(printable(f"--- prompt\n{text['prompt']}--- continuation\n{text['text']}"))
    print(f"report: {report}")
    return 0
