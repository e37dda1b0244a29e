"""The command line `dsv41`: plan, train, eval, generate, verify, demo, convert, bench, analyze.

Exit codes: 0 done, 1 a check failed, 2 bad input, 130 interrupted. What a command needs is imported when it runs.
"""

import contextlib
import dataclasses
import errno
import io
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from dsv41 import __version__
from dsv41.errors import UserError, cause

_SYSTEM_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP)


@dataclass(frozen=True)
class Bench:
    """Time kernels beside their floors and peers, or say which implementation of an op runs and why."""

    what: tyro.conf.Positional[Literal["kernels", "explain"]]
    """kernels: time the named ops, all without a name. explain: an op, then FIELD=VALUE of its case."""
    words: tyro.conf.Positional[tuple[str, ...]] = ()
    """Ops by name, such as sparse_attention; after explain also, for example, queries=128 heads=64."""
    out: Path | None = None
    """Also write the times to this JSON file."""


@dataclass(frozen=True)
class Analyze:
    """Cache bytes, FLOPs, prefill cost, parameters and memory: by formula and, of this code's models, counted.

    Without --preset and --config, the release beside V4-Flash, V3.2 and V1 67B; with one, its parts.
    """

    what: tyro.conf.Positional[Literal["kv", "flops", "prefill", "params", "memory"]]
    """kv: cache bytes of a token. flops: of a decoded token. prefill: of a prompt. params. memory: a request's cache."""
    preset: str | None = None
    """One model: flash, slice, toy, small, v4-flash, v3.2 or v1."""
    config: Path | None = None
    """A config.json, or a folder that holds one."""
    contexts: str | None = None
    """Lengths in tokens, as 4k,64k,1m, or doublings, as 4k..1m; k is 1024."""
    json: bool = False
    """Print the rows as JSON."""
    csv: Path | None = None
    """Also write the rows to this CSV file."""
    plot: Path | None = None
    """Also draw them to this .png, .svg or .pdf file."""
    theme: Literal["light", "dark"] | None = None
    """Which pages the picture is for; light without it."""


@dataclass(frozen=True)
class Plan:
    """Show what each layer does, how many parameters it has and what it adds to the cache."""

    preset: str | None = None
    """A named configuration: flash (default), small, slice or toy."""
    config: Path | None = None
    """A config.json, or a folder that holds one."""
    json: bool = False
    """Print the table as JSON."""


@dataclass(frozen=True)
class Train:
    """Train a model, or go on with the run in --out."""

    out: Path = Path("runs/train")
    """The run's folder: config, tokenizer, metrics, checkpoints, loss curve."""
    recipe: str = "toy"
    """What is on when: toy (all of the release's inference), small (one GPU), long (rows become 16 times as long), qat."""
    preset: str | None = None
    """A named configuration; the recipe's or toy where not given."""
    config: Path | None = None
    """A config.json in place of a preset."""
    data: tuple[str, ...] = ("stdlib",)
    """Text files, folders, or stdlib: the standard library's source."""
    steps: int | None = None
    """Steps in all, the recipe's or 1000 where not given; 0 for as many as --max-seconds allow."""
    batch_size: int | None = None
    """Rows a step; the recipe's or 4 where not given."""
    accumulate: int = 1
    """Parts of a batch that go through the model one after another, to save memory; a divisor of its rows."""
    length: int | None = None
    """Tokens a row; the recipe's or 256 where not given."""
    lr: float | None = None
    """Peak learning rate; the recipe's or 0.015 where not given."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""
    checkpoint_every: int = 500
    """Steps between checkpoints; the last step always has one."""
    keep: int = 2
    """Newest checkpoints to keep."""
    max_seconds: float | None = None
    """Stop after so many seconds, with a checkpoint."""
    evaluate: bool = True
    """Score the held-out text before and after."""
    eval_every: int = 0
    """Steps between scores of the held-out text, of which the best one's checkpoint is kept in OUT/best; 0 for none."""
    dtype: str | None = None
    """Of the passes: float32 or bfloat16; masters and momenta are float32. The recipe's or float32 where not given."""
    remat: str | None = None
    """What the backward pass computes again to save memory: none, attention or block; the recipe's where not given."""
    index_teacher: str = "own"
    """Whose attention an indexer learns: its own layer's, or served for the mean over all that read its selection."""
    qat_weights: tuple[str, ...] = ()
    """In quantised phases, weights trained as released: fp4 (experts), fp8 (other linears), fp8_rows (Engram tables)."""
    z_loss: float = 0.0
    """Weight of the mean squared log partition."""
    engram_rows: int = 0
    """Rows of each Engram table that keep momentum, so that a large table costs what its touched rows do; 0 for all."""
    synthetic: float = 0.0
    """Share of each batch's rows made into needle, recall and copy tasks."""
    profile: str | None = None
    """Steps to trace, as 20:23, into OUT/profile."""
    tensorboard: bool = False
    """Also write TensorBoard events."""
    wandb: str | None = None
    """Also log to this Weights & Biases project; a resume goes on with the same run."""


@dataclass(frozen=True)
class Eval:
    """Score a run: bits per byte of held-out text, tasks by length and depth, what its selections catch."""

    checkpoint: Path
    """The folder of a run that `dsv41 train` or `dsv41 convert` wrote."""
    data: tuple[str, ...] = ("stdlib",)
    """Text whose held-out part is scored, and is the tasks' hay: text files, folders, or stdlib."""
    length: int = 256
    """Tokens a row of text."""
    batch_size: int = 4
    """Rows at a time."""
    tasks: tuple[str, ...] = ("needle",)
    """needle, recall (of one among eight keys) and copy; nothing for none."""
    lengths: tuple[int, ...] = ()
    """Tokens a row of a task; --length where not given."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Where in its row an answer stands: 0 at the beginning, 1 just before the question."""
    rows: int = 16
    """Rows of each task, length and depth."""
    seed: int = 0
    """Seed of the tasks."""
    packed: bool = False
    """With the caches' FP4 and FP8 rows."""
    dense: bool = False
    """Read every visible entry in place of the selected ones."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class Generate:
    """Continue prompts with a trained model; several prompts run as one batch."""

    checkpoint: Path
    """The folder of a run that `dsv41 train` or `dsv41 convert` wrote."""
    prompt: tuple[str, ...] = ()
    """One or more texts to continue."""
    prompts_file: Path | None = None
    """A file of prompts: one a line, or in a .jsonl file a JSON string or {"prompt": ...} a line."""
    max_new_tokens: int = 64
    """New tokens at most."""
    temperature: float = 0.0
    """0 for the likeliest token, else how freely to draw."""
    top_k: int = 0
    """Draw from so many likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that hold this share of the probability."""
    min_p: float = 0.0
    """Draw from tokens at least this share as likely as the likeliest."""
    seed: int = 0
    """Seed of each prompt's draws, which do not depend on the other prompts."""
    stop: tuple[str, ...] = ()
    """Texts that end a continuation."""
    packed: bool = False
    """Keep the cache in the release's FP4 and FP8 rows."""
    json: bool = False
    """Print a JSON object a line, the last one on speed."""


@dataclass(frozen=True)
class Verify:
    """Check recorded tensors, or a released checkpoint's names and shapes, against this code."""

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER...")]
    """A released checkpoint, a model folder with recorded numbers, or a folder of such folders."""
    json: Path | None = None
    """Also write the results to this file."""
    skip: tuple[str, ...] = ()
    """Names or patterns of files to leave out, as fp32_len7 or 'quant_*'."""
    all: bool = False
    """Print every row, not only the failed and skipped ones."""


@dataclass(frozen=True)
class Demo:
    """Train the toy on the standard library, restore it in a new process and let it write code."""

    seconds: float = 300.0
    """Seconds until training ends, reading and compiling included; scoring, timing and generating come on top."""
    out: Path = Path("runs/demo")
    """Folder of the run and of report.md."""


@dataclass(frozen=True)
class Convert:
    """Turn released weights into a run folder, or a run folder into released weights."""

    src: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """A folder of released weights (config.json, *.safetensors), or the folder of a run (config.json, checkpoints/)."""
    dst: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """The folder to make, of the other kind: a run where SRC holds released weights, and the other way round."""
    dry_run: bool = False
    """Print what would become of each tensor, and write nothing."""
    quantize: Literal["release", "bf16", "fp32"] | None = None
    """How to write weights: as the release stores them, or plain; as config.json says where not given."""
    layers: str | None = None
    """The first layers alone, as 0-4; all where not given."""
    draft_stages: int | None = None
    """0 leaves the draft stages out; all where not given."""
    vision: bool = True
    """Take the vision tower, aligner and image vectors along."""


def _plan(args: Plan) -> int:
    from dsv41.config import load_config, preset
    from dsv41.params import count_parameters, text_specs
    from dsv41.plan import plan_table
    from train.optim import optimizer_report

    if args.preset is not None and args.config is not None:
        raise UserError("--config: found beside --preset, allowed is one of them")
    config = load_config(args.config) if args.config else preset(args.preset or "flash")
    specs = text_specs(config)
    layers = {n: count_parameters(layer) for n, layer in enumerate(specs.layers)}
    table = plan_table(config, layers, count_parameters(specs) - sum(layers.values()))
    table["optimizer"] = optimizer_report(specs)
    if args.json:
        print(json.dumps(table, indent=1))
        return 0
    from dsv41.show import show_plan

    show_plan(table)
    return 0


def _train(args: Train) -> int:
    _use_compilation_cache()
    from train.loop import TrainOptions, finished, train
    from train.recipes import recipe

    suggested = recipe(args.recipe).suggests
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(args)}
    options = TrainOptions(**{**suggested, **{name: value for name, value in given.items() if value is not None}})
    if done := finished(options):
        step, score = done
        said = f", held-out bits per byte {score.bits_per_byte:.4f}" if score else ""
        print(f"nothing to do: {str(args.out)!r} has all its steps (step {step}{said}); --steps above {step} goes on with it")
        return 0
    result = train(options)
    if result.resumed_from:
        print(f"resumed from step {result.resumed_from}")
    for last in result.records[-1:]:
        loss = f"cross-entropy {last['ce']:.4f} nats per token (whole loss {last['loss']:.4f})"
        print(
            f"step {last['step']}, {loss}, {result.tokens_per_second:,.0f} tokens/s, compiled in {result.compile_seconds:.1f} s"
        )
    if args.evaluate:
        print(f"held-out bits per byte: {result.scores[-1].bits_per_byte:.4f}")
    print(f"run: {args.out}")
    return 0


def _eval(args: Eval) -> int:
    _use_compilation_cache()
    from train.evaluate import EvalOptions, run

    return run(EvalOptions(**{f.name: getattr(args, f.name) for f in dataclasses.fields(EvalOptions)}), args.json)


def _prompts(args: Generate) -> list[str]:
    from infer.sampling import check_text

    prompts = list(args.prompt)
    if args.prompts_file is not None:
        try:
            # Not splitlines, which also cuts at form feeds and Unicode's own separators.
            lines = args.prompts_file.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"prompts_file: cannot read {str(args.prompts_file)!r} ({cause(error)})") from None
        lines = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
        prompts += [_json_prompt(n, line) if args.prompts_file.suffix.lower() == ".jsonl" else line for n, line in lines]
    if not prompts:
        raise UserError("prompt: found none, allowed is one text or more, or --prompts-file")
    for n, text in enumerate(prompts, 1):
        check_text(text, f"prompt {n}" if len(prompts) > 1 else "prompt")
    return prompts


def _json_prompt(number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    text = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise UserError(f'prompts_file: line {number}: found {line[:40]!r}, allowed is a JSON string or {{"prompt": "..."}}')
    return text


def _generate(args: Generate) -> int:
    from infer.sampling import Sampling

    names = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "max_new_tokens")
    sampling, texts = Sampling(**{name: getattr(args, name) for name in names}), _prompts(args)
    _use_compilation_cache()
    from dsv41.numerics import PACKED, Policy
    from dsv41.show import printable
    from infer.generate import Generator
    from infer.model import load_model

    generator = Generator(load_model(args.checkpoint), PACKED if args.packed else Policy())
    prompts = [generator.encode(text, f"prompt {n}" if len(texts) > 1 else "prompt") for n, text in enumerate(texts, 1)]
    stream = len(texts) == 1 and not args.json

    def show(_: int, piece: str) -> None:
        print(printable(piece), end="", flush=True)

    if stream:
        generator.check(prompts, [sampling])
        show(0, texts[0])
    found, speed = generator.generate(prompts, [sampling] * len(prompts), show if stream else None)
    for text, one in zip(texts, found, strict=True):
        if args.json:
            print(json.dumps({"prompt": text, **dataclasses.asdict(one)}))
        elif not stream:
            print(printable(f"{text}{one.text}\n---"))
    if args.json:
        print(json.dumps(dataclasses.asdict(speed)))
    else:
        if stream:
            print()
        print(speed.line(), file=sys.stderr)
    return 0


def _verify(args: Verify) -> int:
    from dsv41.verify import run

    return run(list(args.paths), args.json, list(args.skip), args.all)


def _convert(args: Convert) -> int:
    from dsv41.hf.convert import ConvertOptions, convert
    from train.checkpoint import Checkpoints

    convert(ConvertOptions(**{f.name: getattr(args, f.name) for f in dataclasses.fields(args)}), Checkpoints)
    return 0


def _demo(args: Demo) -> int:
    # Without the compilation cache: the report says what compiling costs.
    from train.demo import demo

    return demo(args.seconds, args.out)


def _use_compilation_cache() -> None:
    """Keeps compiled programs between runs, where the user named no folder for them."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        import jax

        from dsv41.files import make_writable
        from train.tokenizer import CACHE_ALLOWED, cache_root

        folder = cache_root() / "jax"
        make_writable(folder, "cache", CACHE_ALLOWED)
        jax.config.update("jax_compilation_cache_dir", str(folder))


def _bench(args: Bench) -> int:
    from bench import kernels

    if args.what == "explain":
        kernels.explain(args.words)
    else:
        kernels.run(args.words, args.out)
    return 0


def _analyze(args: Analyze) -> int:
    _use_compilation_cache()
    from dsv41.analyze.command import AnalyzeOptions, analyze

    return analyze(AnalyzeOptions(**{f.name: getattr(args, f.name) for f in dataclasses.fields(args)}))


_COMMANDS = {
    "plan": (Plan, _plan),
    "train": (Train, _train),
    "eval": (Eval, _eval),
    "generate": (Generate, _generate),
    "verify": (Verify, _verify),
    "demo": (Demo, _demo),
    "convert": (Convert, _convert),
    "bench": (Bench, _bench),
    "analyze": (Analyze, _analyze),
}


_POSITIONAL = {"src", "dst", "paths", "what", "words"}
# What tyro passes on from Python, in this program's words.
_PLAINER = (
    (
        r"Error parsing (\S+): (?:no type matching .*)?invalid literal for int\(\) with base 10: (.*)",
        r"\1: found \2, allowed is a whole number",
    ),
    (
        r"Error parsing (\S+): (?:no type matching .*)?could not convert string to float: (.*)",
        r"\1: found \2, allowed is a number",
    ),
    (r"Expected one of \{(plan, .*)\}", r"found no command, allowed are \1; see dsv41 --help"),
)


def _parse(argv: Sequence[str] | None) -> Any:
    """The command's arguments; a mistake in them is a `UserError` of one line in place of tyro's box."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.extras.subcommand_cli_from_dict(
                {name: kind for name, (kind, _) in _COMMANDS.items()},
                prog="dsv41",
                description="DeepSeek-V4.1-Flash in JAX. `dsv41 --version` prints versions, `dsv41 COMMAND --help` options.",
                args=argv,
            )
    except SystemExit as end:
        if end.code != 2:
            raise
        raise UserError(_mistake(said.getvalue())) from None


def _mistake(box: str) -> str:
    """One line of what tyro's box says."""
    lines = [line.strip("╭╮╰╯│+| ") for line in box.splitlines()[1:]]
    # Sections of the box stand between rules, drawn in ASCII where the terminal has no more; the last points to --help.
    sections = [" ".join(s.split()).rstrip(".") for s in re.split("─{5,}|-{5,}", " ".join(lines))]
    kept = [s for s in sections if s and not s.startswith(("For full", "Argument helptext"))]
    text = "; ".join(kept[:2]) or "bad arguments, see dsv41 --help"
    for found, plain in _PLAINER:
        text = re.sub(found, plain, text)
    return text


def _spelled(message: str, kind: type) -> str:
    """``message`` with the command's fields spelled as its options: the library's ``top_p`` is ``--top-p`` here."""
    names = {f.name for f in dataclasses.fields(kind)} - _POSITIONAL
    first = re.match(r"(\w+): ", message)
    if first and first[1] in names:
        message = f"--{first[1].replace('_', '-')}{message[first.end(1) :]}"
    # A single word may be any word, unless a value is given to it.
    words, given = "|".join(name for name in names if "_" in name) or "(?!)", "|".join(names)

    def spell(match: re.Match) -> str:
        return f"--{(match[1] or match[2]).replace('_', '-')}{' ' if match[1] else ''}"

    find = rf"(?<![\w./-])(?:({given})=(?=\w)|(?:--)?({words})(?![\w./-]))"
    # What stands in quotes is the user's.
    parts = re.split(r"((?<!\w)'(?:[^'\\]|\\.)*')", message)
    return "".join(part if n % 2 else re.sub(find, spell, part) for n, part in enumerate(parts))


def run(argv: Sequence[str] | None = None) -> int:
    """Parses and runs a command; the exit code."""
    args = None
    try:
        if (sys.argv[1:] if argv is None else list(argv))[:1] == ["--version"]:
            print(f"dsv41 {__version__} (jax {version('jax')}, Python {sys.version.split()[0]})")
            return 0
        args = _parse(argv)
        code = next(command for kind, command in _COMMANDS.values() if type(args) is kind)(args)
        sys.stdout.flush()
        return code
    except UserError as error:
        return _fail(str(error) if args is None else _spelled(str(error), type(args)))
    except BrokenPipeError:
        # The reader (head, a pager) has seen enough; what is left to flush has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in _SYSTEM_ERRORS:
            raise
        return _fail(f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror))
    except MemoryError as error:
        return _fail(f"out of memory: {error}")
    except KeyboardInterrupt:
        print("dsv41: interrupted", file=sys.stderr)
        return 130


def _fail(message: str) -> int:
    print(f"dsv41: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def main() -> None:
    """The entry point."""
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        if stream is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Ends as an exception does, so that what is half-written is cleared away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(run())


if __name__ == "__main__":
    main()
