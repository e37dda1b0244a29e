"""The command line `dsv41`: plan, train, eval, generate, serve, verify, demo, convert, bench, analyze, compile.

Exit codes: 0 done, 1 a check failed, 2 bad input, 3 another process of the run died, 130 interrupted. What a command
needs is imported when it runs.
"""

import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tyro

from dsv41 import __version__
from dsv41.commands import Analyze, Bench, Compile, Convert, Demo, Eval, Generate, Plan, Serve, Train, Verify
from dsv41.errors import UserError, cause, escaped

_LONGEST = 1000  # characters of an error's line
_SYSTEM_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP)


def _plan(args: Plan) -> int:
    from dsv41.params import count_parameters, text_specs
    from dsv41.plan import plan_table
    from train.optim import optimizer_report

    config = _configuration(args)
    if args.mesh is not None:
        from train.placed import plan_mesh

        print(plan_mesh(config, args.mesh, args.json))
        return 0
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
    from train.loop import finished, train
    from train.options import check_alone
    from train.processes import agreed, check_shared, join
    from train.recipes import DRAFTER
    from train.run import completed

    if args.recipe == DRAFTER:
        return _train_drafter(args)
    if args.source is not None:
        raise UserError(f"--from: found {str(args.source)!r} with recipe {args.recipe or 'toy'!r}, allowed with {DRAFTER}")
    given = {name: value for name, value in vars(args).items() if value is not None and name != "process"}
    options = completed(given)
    if args.process is not None:
        check_alone(options)
        join(args.process)
    with agreed("options"):
        done = finished(options)
    check_shared(options.out)
    if done:
        step, score = done
        said = f", held-out bits per byte {score.bits_per_byte:.4f}" if score else ""
        print(f"nothing to do: {str(args.out)!r} has all its steps (step {step}{said}); --steps above {step} goes on with it")
        return 0
    result = train(options)
    for last in result.records[-1:]:
        loss = f"cross-entropy {last['ce']:.4f} nats per token (whole loss {last['loss']:.4f})"
        print(
            f"step {last['step']}, {loss}, {result.tokens_per_second:,.0f} tokens/s, compiled in {result.compile_seconds:.1f} s"
        )
    if args.evaluate:
        print(f"held-out bits per byte: {result.scores[-1].bits_per_byte:.4f}")
    print(f"run: {args.out}")
    return 0


def _train_drafter(args: Train) -> int:
    from train.drafter_run import DrafterOptions, train_drafter

    if args.source is None:
        raise UserError("--from: found none, allowed with recipe dspark is the folder of a run")
    known = {f.name for f in dataclasses.fields(DrafterOptions)}
    for f in dataclasses.fields(args):
        value = getattr(args, f.name)
        if f.name not in (*known, "recipe", "evaluate") and value != f.default:
            raise UserError(f"{f.name}: found {str(value)!r}, allowed with recipe {args.recipe} is {str(f.default)!r}")
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.name in known}
    result = train_drafter(DrafterOptions(**{name: value for name, value in given.items() if value is not None}))
    if result.resumed_from:
        print(f"resumed from step {result.resumed_from}")
    found, slots = result.heldout, len(result.temperatures)
    print("accepted by slot: " + " ".join(f"{found[f'accept.{k + 1}']:.3f}" for k in range(slots)) + " (drawn at temperature 1)")
    print("accepted by slot: " + " ".join(f"{found[f'greedy.{k + 1}']:.3f}" for k in range(slots)) + " (greedy)")
    print(f"expected tokens of a round: {found['accepted']:.3f} drawn, {found['greedy_accepted']:.3f} greedy, of {slots + 1}")
    print(f"calibration error: {found['error']:.4f}, {found['calibrated_error']:.4f} with a temperature for each slot")
    print(f"run: {args.out}")
    return 0


def _compile(args: Compile) -> int:
    from train.lowering import report

    config, more = _configuration(args), (args.json, args.step, args.topology)
    print(report(config, args.mesh, args.rows, args.length, args.platform, *more))
    return 0


def _configuration(args: Plan | Compile) -> Any:
    from dsv41.config import load_config, preset

    if args.preset is not None and args.config is not None:
        raise UserError("--config: found beside --preset, allowed is one of them")
    return load_config(args.config) if args.config else preset("flash" if args.preset is None else args.preset)


def _eval(args: Eval) -> int:
    _use_compilation_cache()
    from train.evaluate import run

    return run(args)


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
    from infer.model import load_model, with_drafter
    from infer.schedule import NO_DRAFTS, drafting_of
    from infer.store import BlockStore

    policy, drafting = PACKED if args.packed else Policy(), NO_DRAFTS
    model = load_model(args.checkpoint, args.mesh)
    if args.draft != "off":
        model = with_drafter(model, args.checkpoint)
        drafting = drafting_of(args.checkpoint, model.config, args.draft, args.draft_length, args.draft_threshold)
    prefix = None
    if args.prefix_cache is not None:
        from infer.prefix import PrefixCache

        prefix = PrefixCache(model, policy, args.decoder_replay)
    generator = Generator(model, policy, args.decoder_replay, prefix, drafting)
    prompts = [generator.encode(text, f"prompt {n}" if len(texts) > 1 else "prompt") for n, text in enumerate(texts, 1)]
    generator.check(prompts, [sampling] * len(prompts))
    if prefix is not None:
        # No file is left where anything else is wrong.
        prefix.store = BlockStore(args.prefix_cache)
    stream = len(texts) == 1 and not args.json

    def show(_: int, piece: str) -> None:
        print(printable(piece), end="", flush=True)

    if stream:
        show(0, texts[0])
    with contextlib.closing(prefix) if prefix else contextlib.nullcontext():
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


def _serve(args: Serve) -> int:
    try:
        from infer.server import Limits, Service, listen, serve
    except ModuleNotFoundError as error:
        raise UserError(f"serve: found no package {error.name!r}, allowed is what pip install 'dsv41[serve]' installs") from None
    limits = Limits(args.max_requests, args.max_body, args.timeout)
    if not 0 < args.prefix_gib < math.inf:
        raise UserError(f"prefix_gib: found {args.prefix_gib}, allowed is a number above 0")
    key = os.environ.get("DSV41_API_KEY", "") if args.api_key is None else args.api_key
    with listen(args.host, args.port) as listening:
        _use_compilation_cache()
        from dsv41.numerics import PACKED, Policy
        from infer.chat import speaking
        from infer.engine import PAGE, Engine
        from infer.model import load_model
        from infer.store import BlockStore

        model = load_model(args.checkpoint, args.mesh)
        model = dataclasses.replace(model, tokenizer=speaking(model.tokenizer))
        longest = min(args.longest, model.config.max_position_embeddings)
        policy, replay = PACKED if args.packed else Policy(), args.decoder_replay
        prefix = None
        if args.prefix_cache is not None:
            from infer.prefix import PrefixCache
            from infer.windows import WindowPool

            prefix = PrefixCache(model, policy, replay, PAGE, windows=WindowPool())
        sizes = {"slots": args.slots, "longest": longest, "pages": args.pages}
        engine = Engine(model, policy, decoder_replay=replay, prefix=prefix, **sizes)
        service = Service(engine, args.name or args.checkpoint.resolve().name, limits, key)
        if prefix is not None:
            # No file is left where anything else is wrong.
            prefix.store = BlockStore(args.prefix_cache, int(args.prefix_gib * 2**30))
        host, port = listening.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(f"serving {service.api.name} at {address}/v1; compiling", flush=True)
        if not key and host not in ("127.0.0.1", "::1"):
            print(f"dsv41: warning: without --api-key all that reach {host} may ask", file=sys.stderr)
        with contextlib.closing(prefix) if prefix else contextlib.nullcontext():
            serve(service, listening, lambda: print("ready", flush=True))
    return 0


def _verify(args: Verify) -> int:
    from dsv41.verify import run

    return run(list(args.paths), args.json, list(args.skip), args.all)


def _convert(args: Convert) -> int:
    from dsv41.hf.convert import convert
    from train.checkpoint import Checkpoints

    convert(args, Checkpoints)
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
    if args.what in ("decode", "prefill", "serve"):
        _use_compilation_cache()
        from bench import serving

        options = serving.Options(args.preset, args.checkpoint, args.batch, args.decoder_replay)
        serving.run(args.what, args.words, args.out, options)
        return 0
    if args.preset is not None or args.checkpoint is not None or args.batch is not None:
        raise UserError(f"{args.what}: found --preset, --checkpoint or --batch, allowed with decode, prefill and serve")
    from bench import kernels

    if args.what == "explain":
        kernels.explain(args.words)
    else:
        kernels.run(args.words, args.out)
    return 0


def _analyze(args: Analyze) -> int:
    _use_compilation_cache()
    from dsv41.analyze.command import analyze

    return analyze(args)


_COMMANDS = {
    "plan": (Plan, _plan),
    "train": (Train, _train),
    "eval": (Eval, _eval),
    "generate": (Generate, _generate),
    "serve": (Serve, _serve),
    "verify": (Verify, _verify),
    "demo": (Demo, _demo),
    "convert": (Convert, _convert),
    "bench": (Bench, _bench),
    "analyze": (Analyze, _analyze),
    "compile": (Compile, _compile),
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
    (r"Error parsing (\S+): .*an empty path", r"\1: found '', allowed is a path"),
    # Behind an option's name its help.
    (r"(--\S+ \S+|[A-Z]{2,}|\{\S+\}) [^;]*?\(required\)", r"\1"),
    (r"Missing from (dsv41 \w+): ", r"\1: found no "),
    (r"Expected one of \{(plan, .*)\}", r"found no command, allowed are \1; see dsv41 --help"),
)


_TYPES = tyro.constructors.ConstructorRegistry()


@_TYPES.primitive_rule
def _path_type(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """Paths, of which an empty one, to Python the current folder, is none."""

    def path(words: list[str]) -> Path:
        if not words[0]:
            raise ValueError("an empty path")
        return Path(words[0])

    if info.type is not Path:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        1, "PATH", path, lambda value: isinstance(value, Path), lambda value: [str(value)]
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
                registry=_TYPES,
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


def spelled(message: str, kind: type) -> str:
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
        return _fail(str(error) if args is None else spelled(str(error), type(args)))
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
    message = escaped(" ".join(message.split()))
    if len(message) > _LONGEST:
        message = f"{message[: _LONGEST * 2 // 3]} ... {message[-_LONGEST // 3 :]}"
    print(f"dsv41: error: {message}", file=sys.stderr)
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
