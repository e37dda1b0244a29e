"""The command line: one line and exit code 2 for bad input, no traceback, and a plan that reads the same everywhere."""

import dataclasses
import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import dsv41
from dsv41 import cli
from infer.generate import Generation, Speed
from train.loop import TrainOptions
from train.recipes import RECIPES
from train.run import OWN


def _error(capsys, *argv: str) -> str:
    assert cli.run(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dsv41: error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err


def test_bad_input_is_one_line(capsys, tmp_path):
    assert _error(capsys, "serve", "X") == "dsv41: error: dsv41 serve: found no --checkpoint PATH; Unrecognized options: X\n"
    assert _error(capsys, "convert") == "dsv41: error: dsv41 convert: found no SRC DST\n"
    assert "did you mean 'toy'" in _error(capsys, "plan", "--preset", "tox")
    assert "no file" in _error(capsys, "plan", "--config", str(tmp_path / "none.json"))
    assert "File name too long" in _error(capsys, "verify", "x" * 5000)
    assert "--config: found beside --preset" in _error(capsys, "plan", "--preset", "toy", "--config", "x")
    assert "no checkpoint" in _error(capsys, "generate", "--checkpoint", str(tmp_path), "--prompt", "x")
    assert "steps" in _error(capsys, "train", "--steps", "-1", "--out", str(tmp_path / "run"))
    assert "--steps: found 0 without --max-seconds" in _error(capsys, "train", "--steps", "0", "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    assert "data" in _error(capsys, "train", "--data", str(tmp_path / "gone"), "--out", str(tmp_path / "run"))


def test_impossible_generation_is_one_line_before_any_work(capsys, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": 1}\n')
    (tmp_path / "hole.jsonl").write_text('"a"\n""\n')
    (tmp_path / "empty.txt").write_text("\n\n")
    for argv, message in (
        ((), "prompt: found none"),
        (("--prompts-file", str(tmp_path / "empty.txt")), "prompt: found none"),
        (("--prompts-file", str(tmp_path / "gone.txt")), "gone.txt' (No such file or directory)\n"),
        (("--prompts-file", str(tmp_path / "hole.jsonl")), "error: prompt 2: found ''"),
        (("--prompt", "x", "y", ""), "error: prompt 3: found ''"),
        (("--prompt", "x", "\udcff"), "error: prompt 2: found '\\udcff'"),
        (("--prompt", ""), "error: --prompt: found ''"),
        (("--prompts-file", str(tmp_path / "bad.jsonl")), "line 1"),
        (("--prompt", "x", "--temperature", "-1"), "--temperature: found -1.0"),
        (("--prompt", "x", "--temperature", "nan"), "temperature"),
        (
            ("--prompt", "x", "--top-p", "0"),
            "--top-p: found 0.0, allowed is above 0, up to 1 (off); for the likeliest token alone set --temperature 0",
        ),
        (("--prompt", "x", "--top-k", "-3"), "--top-k: found -3"),
        (("--prompt", "x", "--min-p", "1.5"), "--min-p: found 1.5"),
        (("--prompt", "x", "--seed", "-1"), "--seed: found -1"),
        (("--prompt", "x", "--max-new-tokens", "-1"), "--max-new-tokens: found -1"),
        (("--prompt", "x", "--stop", ""), "stop: found ''"),
        (("--prompt", "x", "--stop", "\udcff"), "allowed is valid Unicode"),
    ):
        assert message in _error(capsys, "generate", "--checkpoint", str(tmp_path), *argv)


def test_a_prompts_file_has_a_prompt_a_line_and_no_other_cuts(tmp_path):
    plain, lines = tmp_path / "a.txt", tmp_path / "b.JSONL"
    plain.write_text("\ufeffa\u2028b\x0cc\n\nd\r\n", encoding="utf-8")
    lines.write_text('"a\u2028b"\n{"prompt": "c"}\n', encoding="utf-8")
    assert cli._prompts(cli.Generate(tmp_path, prompts_file=plain)) == ["a\u2028b\x0cc", "d"]
    assert cli._prompts(cli.Generate(tmp_path, prompts_file=lines)) == ["a\u2028b", "c"]


@pytest.mark.parametrize("closing", ["1>&-", "2>&-", "1>&- 2>&-"])
def test_closed_streams_are_no_traceback(closing):
    command = f"{sys.executable} -m dsv41.cli plan --preset toy {closing}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_out_is_checked_before_any_work(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr("train.loop.prepare", lambda *a: pytest.fail("read the data first"))
    assert "out: cannot write" in _error(capsys, "train", "--out", str(tmp_path / "file" / "run"))


def test_mistakes_in_arguments_are_one_line_too(capsys):
    assert "plan, train, eval, generate, serve, verify, demo" in _error(capsys, "plam")
    assert "--preset" in _error(capsys, "plan", "--presett", "toy").replace("--presett", "")
    assert _error(capsys) == (
        "dsv41: error: found no command, allowed are plan, train, eval, generate, serve, verify, demo, convert, bench, analyze,"
        " compile;"
        " see dsv41 --help\n"
    )
    assert "error: --steps: found 'many', allowed is a whole number\n" in _error(capsys, "train", "--steps", "many")
    assert "error: --lr: found 'x', allowed is a number\n" in _error(capsys, "train", "--lr", "x")
    assert "--checkpoint" in _error(capsys, "generate", "--prompt", "x")
    # To Python an empty path is the current folder.
    for argv in (("train", "--out", ""), ("train", "--config="), ("demo", "--out="), ("eval", "--checkpoint", "")):
        assert f"error: {argv[1].strip('=')}: found '', allowed is a path\n" in _error(capsys, *argv)
    assert "--config: found beside --preset toy" in _error(capsys, "train", "--preset", "toy", "--config", "x")
    with pytest.raises(SystemExit) as found:
        cli.run(["--help"])
    assert found.value.code == 0


@pytest.mark.parametrize("kind", [kind for kind, _ in cli._COMMANDS.values()])
def test_messages_name_options_as_they_are_typed(kind):
    """Of every command, whichever field of it the library names."""
    options = {f.name: f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(kind) if f.name not in cli._POSITIONAL}
    for name, option in options.items():
        assert cli.spelled(f"{name}: found 1", kind) == f"{option}: found 1"
        assert cli.spelled(f"x: set {name}=1, not 'a {name}=2'", kind) == f"x: set {option} 1, not 'a {name}=2'"
    for name, option in options.items():
        if "_" in name:
            said = f"x: found '{name}' without {name}, --{name} or {name}; /x/{name}/y, {name}.json, a_{name}_b"
            want = f"x: found '{name}' without {option}, {option} or {option}; /x/{name}/y, {name}.json, a_{name}_b"
            assert cli.spelled(said, kind) == want


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"dsv41 {dsv41.__version__} (jax {jax.__version__}") and out.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "f"), 2, "dsv41: error: No space left on device: f\n"),
        (KeyboardInterrupt(), 130, "dsv41: interrupted\n"),
    ],
)
def test_system_errors(capsys, monkeypatch, error, code, message):
    def fail(args):
        raise error

    monkeypatch.setitem(cli._COMMANDS, "plan", (cli.Plan, fail))
    assert cli.run(["plan"]) == code
    assert capsys.readouterr().err == message


def test_plan(capsys):
    assert cli.run(["plan", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert len(table["layers"]) == 40
    assert table["totals"]["cache_bytes_per_token"] == 890
    assert cli.run(["plan", "--preset", "toy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    total, families = re.fullmatch(r"optimizer state in training: ([\d,]+) bytes \((.*)\)", lines[-1]).groups()
    number = lambda text: int(text.replace(",", ""))  # noqa: E731
    assert number(total) == 4 + sum(number(part.split()[1]) for part in families.split(", "))
    assert lines[1].startswith("layer=1 half=encoder ratio=2 mode=full ")


@pytest.mark.parametrize("preset", ["flash", "toy"])
def test_plan_fits_a_terminal_of_eighty_columns(capsys, monkeypatch, preset):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run(["plan", "--preset", preset]) == 0
    *lines, closing, _ = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    monkeypatch.undo()
    assert cli.run(["plan", "--preset", preset, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert len(lines) == len(table["layers"]) + 2 and max(map(len, lines)) <= 80
    for line, layer in zip(lines[2:], table["layers"], strict=True):
        cells = line.split()
        assert [cells[1], cells[3], cells[-1]] == [layer["half"], layer["mode"], f"{layer['parameters']:,}"]
    assert closing.endswith("routing by score in all")


class _Says:
    """A generator whose every continuation has all controls, and what reorders text."""

    CONTROLS = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]))
    TEXT = f"aé\u200b{CONTROLS}中z"

    def __init__(self, *_):
        pass

    def encode(self, text, name):
        return [1]

    def check(self, prompts, samplings):
        pass

    def generate(self, prompts, samplings, on_text):
        if on_text is not None:
            for piece in self.TEXT:
                on_text(0, piece)
        return [Generation([1], [0.0], self.TEXT, "length")] * len(prompts), Speed()


@pytest.mark.parametrize("prompts", [["p\x1b[2J"], ["p\x1b[2J", "q"]])
def test_generated_controls_do_not_reach_a_terminal(capsys, monkeypatch, tmp_path, prompts):
    monkeypatch.setattr("infer.generate.Generator", _Says)
    monkeypatch.setattr("infer.model.load_model", lambda *_: None)
    argv = ["generate", "--checkpoint", str(tmp_path), "--prompt", *prompts]
    assert cli.run(argv) == 0
    raw = capsys.readouterr().out
    assert raw.count(_Says.TEXT) == len(prompts) and raw.startswith("p\x1b[2Ja")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert cli.run(argv) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(r"p\x1b[2Jaé") and {c for c in shown if c in _Says.CONTROLS} == {"\n", "\t"}
    assert all(text in shown for text in (r"\x00", r"\x0d", r"\x7f", r"\x9b", r"\u202e", r"\u2069中z", "\u200b"))
    # Nothing is lost or moved.
    assert re.sub(r"\\x(..)|\\u(....)", lambda found: chr(int(found[1] or found[2], 16)), shown) == raw


def test_the_readme_says_of_a_command_what_its_help_says():
    lines = re.findall(r"^dsv41 (\w+) .*?# (.+)$", (Path(__file__).parents[1] / "README.md").read_text(), re.MULTILINE)
    said = {name: text for name, text in lines if name != "bench"}  # of whose two uses each has a line of its own
    assert {"plan", "verify", "convert", "demo"} <= set(said)
    for name, text in said.items():
        assert f"{text[0].upper()}{text[1:]}." == cli._COMMANDS[name][0].__doc__.splitlines()[0]


def test_train_arguments_are_the_options_of_the_loop():
    defaults = lambda kind: {f.name: f.default for f in dataclasses.fields(kind)}  # noqa: E731
    mine, theirs = defaults(cli.Train), defaults(TrainOptions)
    assert mine.pop("source") is None and mine.pop("process") is None  # of the drafter's run, and of none
    assert mine.keys() == theirs.keys()
    # Not given is not the default where a recipe suggests another value, or the run has one.
    suggested = {*OWN, *(name for recipe in RECIPES.values() for name in recipe.suggests)}
    assert {name: theirs[name] if mine[name] is None and name in suggested else mine[name] for name in mine} == theirs
