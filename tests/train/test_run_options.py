"""What stops a run before anything is read or written, its run.json, and what it shows while it works."""

import io
import json
import math
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from dsv41 import cli
from dsv41.config import preset
from dsv41.errors import UserError
from dsv41.files import locked, make_writable
from train import options, progress
from train.curve import Score, plot_losses, running_mean
from train.loop import fit_vocabulary
from train.metrics import Log
from train.options import TrainOptions, check_options
from train.run import NAME, Run, read_run, write_run
from train.tokenizer import train_tokenizer


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--length", "65"), "--length: found 65, allowed is a multiple of 16, 16 to 2147483632; nearest is 64\n"),
        (("--length", "0"), "--length: found 0, allowed is a multiple of 16, 16 to 2147483632; nearest is 16\n"),
        (("--length", "-16", "--recipe", "long", "--batch-size", "16"), "--length: found -16, .*; nearest is 16\n"),
        (("--length", str(10**30)), f"--length: found {10**30}, .*; nearest is 2147483632\n"),
        (
            ("--synthetic", "0.1", "--length", "64"),
            "--length: found 64, allowed is a multiple of 16, 96 to 2147483632 for synthetic rows; nearest is 96\n",
        ),
        (("--recipe", "long", "--batch-size", "8"), "--batch-size: found 8, allowed is 16 or more for recipe 'long'"),
        (("--seed", "-1"), "--seed: found -1"),
        (("--seed", str(2**32)), "--seed: found 4294967296"),
        (("--batch-size", "0"), "--batch-size: found 0"),
        (("--accumulate", "3"), "--accumulate: found 3, allowed is a divisor of the 4 rows of a batch; nearest is"),
        (("--accumulate", "0"), "--accumulate: found 0, allowed is a divisor of the 4 rows of a batch; nearest is 1"),
        (("--checkpoint-every", "0"), "--checkpoint-every: found 0"),
        (("--max-seconds", "nan"), "--max-seconds: found nan"),
        (("--steps", "0", "--max-seconds", "inf"), "--max-seconds: found inf, allowed is a finite number above 0"),
        (("--steps", "-1"), "--steps: found -1 without --max-seconds, allowed is 1 or more; nearest is 1\n"),
        (("--steps", "-1", "--max-seconds", "9"), "--steps: found -1, allowed is 0 to 2147483647; nearest is 0\n"),
        (("--steps", str(10**30)), f"--steps: found {10**30}, allowed is 0 to 2147483647; nearest is 2147483647\n"),
        (("--batch-size", str(10**400)), r"--batch-size: found 10+, allowed is 1 to 2147483647; nearest is"),
        (("--batch-size", str(2**31 - 1), "--accumulate", "2"), "--accumulate: found 2, allowed .*; nearest is 1\n"),
        (
            ("--batch-size", "1000000"),
            r"--batch-size: found 1000000, which does not fit: a step's batch, logits and index scores take 2,101\.4 GB or more"
            r" beside the model's 0\.1 GB, allowed is what the [\d.]+ GB here hold; nearest that may fit is \d+\n",
        ),
        (("--batch-size", "1000000000", "--accumulate", "1000000000"), "--batch-size: found 1000000000, which does not fit"),
        (("--length", "160000000"), r"--length: found 160000000, which does not fit: .*; nearest that may fit is \d+\n"),
        (("--lr", "inf"), "--lr: found inf"),
        (("--data",), "--data: found nothing"),
        (("--data", "stdlib", ""), "--data: found '', allowed are 'stdlib', text files and folders"),
        (("--data", "stdlib", "/dev/null"), "--data: found a device"),
        (("--preset", "flash"), "--preset: found a model that does not fit: .* GB here hold; nearest is --preset toy"),
    ],
)
def test_bad_options_end_before_any_work_and_leave_no_folder(tmp_path, monkeypatch, capsys, argv, says):
    monkeypatch.setattr("train.loop.prepare", lambda *a: pytest.fail("read the data"))
    assert cli.run(["train", "--out", str(tmp_path / "a" / "run"), *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and re.match(f"dsv41: error: {says}", err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "config.json", "tokenizer.json", "loss.png", "best", "profile"])
def test_something_else_in_the_place_of_a_runs_file_is_one_line(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr("train.loop.prepare", lambda *a: pytest.fail("read the data"))
    there = tmp_path / name
    there.mkdir() if "." in name else there.write_text("x")
    assert cli.run(["train", "--out", str(tmp_path)]) == 2
    allowed = "a file" if "." in name else "a folder"
    says = f"dsv41: error: --out: found something else at {str(there)!r}, allowed is {allowed} or nothing there\n"
    assert capsys.readouterr() == ("", says)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_folder_is_locked_for_one_and_left_as_it_was(tmp_path):
    folder = tmp_path / "a" / "run"
    with locked(folder):
        with pytest.raises(UserError, match=r"^out: found a run at work in '.*run', allowed is one at a time$"), locked(folder):
            pass
        # Another process is told apart from this one, and a lock whose owner was killed is free.
        holder = "import sys; from pathlib import Path; from dsv41.files import locked\nwith locked(Path(sys.argv[1])): input()"
        other = subprocess.run([sys.executable, "-c", holder, str(folder)], input="", capture_output=True, text=True)
        assert "found a run at work" in other.stderr
    assert not list(tmp_path.iterdir())
    with subprocess.Popen([sys.executable, "-c", holder, str(folder)], stdin=subprocess.PIPE) as process:
        while not (folder / "lock").exists():
            assert process.poll() is None
        process.kill()
    with locked(folder):
        (folder / "kept").write_text("")
    assert [path.name for path in folder.iterdir()] == ["kept"]


def test_a_log_that_finds_the_disk_full_is_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    full = r"^out: cannot write '.*metrics\.jsonl' \(No space left on device\)$"
    with pytest.raises(UserError, match=full), Log(tmp_path, False, None, {}) as log:
        log.write({"step": 1})


def test_text_that_cannot_be_used_leaves_no_folder(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    assert cli.run(["train", "--out", str(tmp_path / "a" / "run"), "--data", str(tmp_path / "data")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("dsv41: error: --data: found no text") and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("cache", ["/proc/nope", "file", "file/cache"])
def test_a_cache_that_cannot_be_written_is_one_line_before_any_work(tmp_path, monkeypatch, capsys, cache):
    (tmp_path / "file").write_text("x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSV41_CACHE", cache)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    for argv in (("train", "--out", "run"), ("generate", "--checkpoint", "run", "--prompt", "x")):
        assert cli.run(argv) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert err.startswith(f"dsv41: error: cache: cannot write '{cache}/jax' (")
        assert err.endswith("), allowed is a writable folder in $DSV41_CACHE\n")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_checkpoints_that_are_a_file_are_one_line(tmp_path, capsys):
    file = tmp_path / "checkpoints"
    file.write_text("x")
    for argv, says in (
        (("train", "--out", str(tmp_path)), f"checkpoints: cannot read {str(file)!r} (Not a directory)"),
        (("generate", "--checkpoint", str(tmp_path), "--prompt", "x"), "--checkpoint: found no checkpoint in"),
    ):
        assert cli.run(argv) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"dsv41: error: {says}") and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_make_writable_leaves_what_was_there(tmp_path):
    (tmp_path / "there").mkdir()
    make_writable(tmp_path / "there" / "new" / "run")
    make_writable(tmp_path / "there")
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_make_writable_among_others_that_ask_the_same(tmp_path):
    """A process that began at the same time takes the folder away that it has made."""
    begin = threading.Barrier(4)

    def ask():
        begin.wait()
        for _ in range(50):
            make_writable(tmp_path / "new" / "run")
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(done.result() for done in [pool.submit(ask) for _ in range(4)])


def test_a_model_that_just_fits_is_taken(monkeypatch):
    monkeypatch.setattr(options, "memory", lambda: 10**9)
    assert check_options(TrainOptions()) == preset("toy")
    monkeypatch.setattr(options, "memory", lambda: 10**7)
    with pytest.raises(UserError, match=r"preset: .* take 0\.1 GB, allowed is what the 0\.0 GB"):
        check_options(TrainOptions())


@pytest.mark.parametrize("parts", [1, 4])
def test_the_nearest_batch_and_length_are_the_largest_that_fit(monkeypatch, parts):
    config, asked = preset("toy"), TrainOptions(batch_size=10**6, accumulate=parts)
    monkeypatch.setattr(options, "memory", lambda: 10**9)

    def nearest(asked: TrainOptions) -> int:
        with pytest.raises(UserError, match=r"nearest that may fit is \d+$") as error:
            options._check_room(asked, config)
        return int(str(error.value).split()[-1])

    rows = nearest(asked)
    options._check_room(replace(asked, batch_size=rows), config)
    assert nearest(replace(asked, batch_size=rows + 1)) == rows
    length = nearest(replace(asked, batch_size=1, length=16 * 10**6, accumulate=1))
    options._check_room(replace(asked, batch_size=1, length=length, accumulate=1), config)
    assert nearest(replace(asked, batch_size=1, length=length + 16, accumulate=1)) == length


def test_a_config_that_the_text_is_too_short_for_is_one_line():
    config = replace(preset("toy"), vision_config=preset("flash").vision_config, image_token_id=2000)
    with pytest.raises(UserError, match=r"^config: does not fit the 2\d\d tokens that the text gives: image_token_id"):
        fit_vocabulary(config, train_tokenizer(["x = 1\n"], 2048))


def test_run_json_comes_back_and_is_refused_in_another_form(tmp_path):
    scores = (Score(0, 1.5, 2, 3), Score(7, 1.0, 2, 3))
    run = Run({"config": {"a": 1}, "lr": 0.1}, 7, scores, {"config": "/x/config.json", "data": ["stdlib"]})
    write_run(tmp_path, run)
    assert read_run(tmp_path) == run
    whole = json.loads((tmp_path / NAME).read_text())
    (tmp_path / NAME).write_text(json.dumps({key: value for key, value in whole.items() if key not in ("scores", "sources")}))
    assert (read_run(tmp_path).scores, read_run(tmp_path).sources) == ((), {})
    for other in (
        [],
        3,
        {},
        {**whole, "total": None},
        {**whole, "total": True},
        {**whole, "total": -1},
        {**whole, "total": 2**31},
        {**whole, "sources": []},
        {**whole, "sources": {"steps": "3"}},
        {**whole, "sources": {"preset": 3}},
        {**whole, "sources": {"data": "stdlib"}},
        {**whole, "scores": [[-1, 1.0, 2, 3]]},
        {**whole, "scores": [[0, math.nan, 2, 3]]},
        {**whole, "scores": [[0, 1.0, 2, -3]]},
        {**whole, "scores": 3},
        {**whole, "scores": [[1]]},
    ):
        (tmp_path / NAME).write_text(json.dumps(other))
        with pytest.raises(UserError, match=r"run.json' is damaged"):
            read_run(tmp_path)
    (tmp_path / NAME).unlink()
    with pytest.raises(UserError, match=r"holds checkpoints but no run\.json"):
        read_run(tmp_path)


@settings(max_examples=100)
@given(st.lists(st.floats(0, 10) | st.just(math.nan) | st.just(math.inf), max_size=30))
def test_the_running_mean_weighs_every_finite_value_by_its_age_alone(values):
    for n, mean in enumerate(running_mean(values), 1):
        seen = [v for v in values[:n] if math.isfinite(v)]
        if not seen:
            assert math.isnan(mean)
            continue
        np.testing.assert_allclose(mean, np.average(seen, weights=0.95 ** np.arange(len(seen))[::-1]), atol=1e-12)


def test_scores_have_one_denominator_each():
    score = Score(3, 10 * math.log(2), 4, 5)
    assert score.bits_per_byte == 2 and score.nats_per_token == 2.5 * math.log(2)


@pytest.mark.parametrize("scores", [[], [Score(0, 700, 100, 300), Score(40, 300, 100, 300)]])
def test_the_curve_is_drawn_with_and_without_scores(tmp_path, scores):
    records = [{"step": n, "ce": 7 / n if n != 5 else math.nan} for n in range(1, 41)]
    plot_losses(records, scores, tmp_path / "loss.png", "toy", 2.5)
    assert np.ptp(matplotlib.image.imread(tmp_path / "loss.png")) > 0


def _shown(monkeypatch, terminal: bool) -> str:
    """What a run's report writes: three phases, two steps of an unknown number and two of a known one."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=80, color_system=None)
    monkeypatch.setattr(progress, "Console", lambda stderr: console)
    with progress.Report() as report:
        for call in (
            lambda: report.phase("reading the text", quiet=True),
            lambda: report.phase("compiling the training step"),
            lambda: report.step(1, 0, 7.5, 900.4),
            lambda: report.step(2, 300, 7.25, 9000),
            lambda: report.step(300, 300, 3.0, 9000),
            lambda: report.say("only 300 steps fit in 9 s here: " + 80 * "x"),
            lambda: report.phase("scoring held-out text"),
            lambda: report.part(12, 40),
        ):
            call()
            report._progress.refresh()
    return stream.getvalue()


def test_a_terminal_shows_the_phase_and_a_loss_once_there_is_one(monkeypatch):
    shown = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", _shown(monkeypatch, True))]
    assert not any("nan" in line or "0/0" in line for line in shown)
    assert max(len(line) for line in shown if "only" not in line) <= 80
    assert any("reading the text" in line for line in shown)
    before, after = (next(n for n, line in enumerate(shown) if text in line) for text in ("compiling the", "loss 7.500"))
    assert before < after and not any("loss" in line for line in shown[:after])
    assert any("step 1  loss 7.500  900 tokens/s" in line for line in shown)
    assert any("step 2/300  loss 7.250  9,000 tokens/s" in line for line in shown)
    assert "loss" not in [line for line in shown if line.strip()][-1]
    assert any("scoring held-out text  12/40" in line for line in shown)


def test_elsewhere_every_phase_is_a_line_but_the_quiet_ones(monkeypatch):
    assert _shown(monkeypatch, False).splitlines() == [
        "compiling the training step",
        "step 1  loss 7.500  900 tokens/s",
        "step 300/300  loss 3.000  9,000 tokens/s",
        "only 300 steps fit in 9 s here: " + 80 * "x",
        "scoring held-out text",
    ]
