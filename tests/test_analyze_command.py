"""`dsv41 analyze` at the command line: lengths, bad input, reports as tables and files, pictures on either ground."""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from xml.etree import ElementTree

import pytest

from dsv41 import cli
from dsv41.analyze import counted, figures
from dsv41.analyze.command import subject
from dsv41.analyze.contexts import USUAL, parse_contexts, spell, usual_contexts
from dsv41.analyze.costs import decode_flops
from dsv41.config import preset, replace, save_config

NAMES = ("flash", "v4-flash", "v3.2", "v1")
MODELS = [subject(name).model for name in NAMES]


def test_contexts():
    assert parse_contexts("4k, 1M,64K,4096") == (4096, 65536, 1 << 20)
    assert parse_contexts("4k..1m") == tuple(4096 << n for n in range(9))
    assert parse_contexts("3..13,5") == (3, 5, 6, 12)
    assert [spell(n) for n in (4096, 1 << 20, 100, 3 << 20)] == ["4k", "1m", "100", "3m"]
    assert usual_contexts(1 << 20) == USUAL and usual_contexts(4096) == (256, 512, 1024, 2048, 4096)
    assert usual_contexts(3) == (1, 3)


def test_bad_input_is_one_line_and_writes_nothing(capsys, tmp_path):
    broken, wrong = tmp_path / "broken.json", tmp_path / "wrong.json"
    broken.write_text('{"text_config": {')
    wrong.write_text('{"text_config": {"head_dims": 3}}')
    lengths = "allowed is 1 to 1073741824 tokens as 4096, 4k or 1m, or a range 4k..1m"
    before = sorted(tmp_path.iterdir())
    for argv, message in (
        (
            ("flops", "--preset", "flahs"),
            "--preset: found 'flahs', allowed are flash, slice, toy, small, v4-flash, v3.2, v1; did you mean 'flash'?",
        ),
        (("flops", "--contexts", "-4k"), f"--contexts: found '-4k', {lengths}"),
        (("flops", "--contexts", "4k,-1"), f"--contexts: found '-1', {lengths}"),
        (("flops", "--contexts", "0"), f"--contexts: found '0', {lengths}"),
        (("flops", "--contexts", "4096m"), f"--contexts: found '4096m', {lengths}"),
        (("flops", "--contexts", ""), f"--contexts: found '', {lengths}"),
        (
            ("flops", "--contexts", "1m..4k"),
            "--contexts: found '1m..4k', allowed is a range that goes up; did you mean '4k..1m'?",
        ),
        (
            ("flops", "--contexts", "1..1024m,3..1024m,5..1024m"),
            "--contexts: found 88 lengths, allowed are up to 64",
        ),
        (("kv", "--contexts", "4k"), "--contexts: found with kv, allowed with flops, prefill, memory"),
        (("flops", "--config", str(broken)), f"config: {str(broken)!r} is not JSON"),
        (("flops", "--config", str(wrong)), "text_config.head_dims: unknown field; did you mean 'head_dim'?"),
        (("flops", "--config", str(tmp_path / "none")), "no file"),
        (("flops", "--config", str(wrong), "--preset", "toy"), "--config: found beside --preset"),
        (("kv", "--plot", str(tmp_path / "x.gif")), "--plot: found 'x.gif', allowed is a name that ends in .png, .svg, .pdf"),
        (("kv", "--plot", str(tmp_path / "none" / "x.png")), "allowed is a file in a folder that exists"),
        (("kv", "--csv", str(tmp_path)), "--csv: found"),
        (("flops", "--contexts", "4k.."), f"--contexts: found '4k..', {lengths}"),
        (("flops", "--contexts", "4\N{KELVIN SIGN}"), f"--contexts: found '4\N{KELVIN SIGN}', {lengths}"),
        (("kv", "--theme", "dark"), "--theme: found without --plot"),
        (("kvs",), "kvs"),
    ):
        own = {"--plot", "--csv", "--theme"} & set(argv)
        outputs = () if own else ("--csv", str(tmp_path / "a.csv"), "--plot", str(tmp_path / "a.png"))
        assert cli.run(["analyze", *argv, *outputs]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("dsv41: error: ") and err.count("\n") == 1 and message in err
        assert sorted(tmp_path.iterdir()) == before


def test_files_that_are_not_to_be_replaced(capsys, tmp_path):
    config = tmp_path / "config.json"
    save_config(preset("toy"), config)
    os.mkfifo(tmp_path / "pipe.svg")
    (tmp_path / "to_config.csv").symlink_to(config)
    kept, before = config.read_bytes(), sorted(tmp_path.iterdir())
    for csv_file, plot, message in (
        ("pipe.svg", None, "--csv: found a device or pipe"),
        (None, "pipe.svg", "--plot: found a device or pipe"),
        ("config.json", None, "--csv: found '"),
        ("to_config.csv", None, "which is an input"),
        ("a.svg", "a.svg", "which is the file of csv too"),
        ("x" * 300, None, "File name too long"),
        ("/dev/null", None, "--csv: found a device or pipe at '/dev/null'"),
        ("/proc/x.csv", None, "--csv: cannot write '/proc/x.csv'"),
    ):
        files = [word for name, file in (("--csv", csv_file), ("--plot", plot)) if file for word in (name, str(tmp_path / file))]
        assert cli.run(["analyze", "kv", "--config", str(tmp_path), *files]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and message in err
    assert sorted(tmp_path.iterdir()) == before and config.read_bytes() == kept


def test_a_link_stays_one(tmp_path):
    (tmp_path / "link.csv").symlink_to(tmp_path / "rows.csv")
    assert cli.run(["analyze", "kv", "--preset", "toy", "--csv", str(tmp_path / "link.csv")]) == 0
    assert (tmp_path / "link.csv").is_symlink() and (tmp_path / "rows.csv").stat().st_size > 100


@pytest.mark.parametrize("width", [0, 20, 60, 80, 100])
@pytest.mark.parametrize("what", ["kv", "flops", "prefill", "params", "memory"])
@pytest.mark.parametrize("of", [(), ("--preset", "v3.2")])
def test_numbers_stay_whole_at_any_width(capsys, monkeypatch, width, what, of):
    monkeypatch.setenv("COLUMNS", "300")
    cli.run(["analyze", what, *of])
    numbers = re.findall(r"[\d,.]+[BKMx]?", capsys.readouterr().out)
    monkeypatch.setenv("COLUMNS", str(width))
    cli.run(["analyze", what, *of])
    found = Counter(re.findall(r"[\d,.]+[BKMx]?", capsys.readouterr().out))
    assert not Counter(numbers) - found and len(numbers) > 4


def test_a_width_beyond_reason_is_counted_at_once(tmp_path):
    save_config(replace(preset("toy"), n_routed_experts=2**31 - 1), tmp_path / "config.json")
    assert cli.run(["analyze", "params", "--config", str(tmp_path)]) == 0


def test_lengths_that_no_cache_has(capsys, tmp_path):
    save_config(replace(preset("toy"), compress_ratios=(0, *[2**30 - 1] * 3, *[1] * 4)), tmp_path / "config.json")
    assert cli.run(["analyze", "flops", "--config", str(tmp_path), "--contexts", "1024m"]) == 0
    save_config(replace(preset("toy"), compress_ratios=(0, *[2**30 - 1] * 3, *[2**30] * 4)), tmp_path / "config.json")
    assert cli.run(["analyze", "flops", "--config", str(tmp_path), "--contexts", "5"]) == 2
    assert "allowed are caches up to 2147483647" in capsys.readouterr().err


def test_a_name_that_is_no_text(capsys, tmp_path):
    file = tmp_path / os.fsdecode(b"x\xff\x1b[31m\n.json")
    save_config(preset("toy"), file)
    files = ["--plot", str(tmp_path / "a.svg"), "--csv", str(tmp_path / "a.csv")]
    assert cli.run(["analyze", "kv", "--config", str(file), *files]) == 0
    out = capsys.readouterr().out
    assert r"x\udcff\x1b[31m\n.json" in out.replace("\n", "") and "\x1b" not in out
    ElementTree.parse(tmp_path / "a.svg")
    file.write_text('{"text_config": {"a\\u001b[31m": 1}}')
    assert cli.run(["analyze", "kv", "--config", str(file)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "\x1b" not in err
    file.write_text(json.dumps({"text_config": {"hidden_act": "x" * 20_000}}))
    assert cli.run(["analyze", "kv", "--config", str(file)]) == 2
    assert len(capsys.readouterr().err) < 1100


def test_a_closed_pipe_is_no_failure():
    command = f"{shlex.quote(sys.executable)} -P -m dsv41.cli analyze params --preset toy | true; echo ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert ended.stdout == "0\n" and "Traceback" not in ended.stderr


def test_a_count_that_differs_is_said_and_ends_with_one(capsys, monkeypatch):
    real = counted.counted_cache
    monkeypatch.setattr(counted, "counted_cache", lambda *a: {**real(*a), "windows": 1})
    assert cli.run(["analyze", "kv", "--preset", "toy"]) == 1
    assert "disagree: windows: the formula gives 16,896, the count 1\n" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["kv", "flops", "prefill", "params", "memory"])
@pytest.mark.parametrize("of", [("--preset", "v4-flash"), ("--config", "tests/golden/model_a"), ()])
def test_every_report_with_csv(capsys, tmp_path, monkeypatch, what, of):
    monkeypatch.setattr(counted, "compiled_cost", lambda *a: {"flops": 1e6, "kernels": 60})
    contexts = ("--contexts", "129") if what not in ("kv", "params") else ()
    monkeypatch.chdir(cli.__file__.rsplit("/", 2)[0])
    file = tmp_path / "rows.csv"
    assert cli.run(["analyze", what, *of, *contexts, "--csv", str(file), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    with file.open() as lines:
        table = list(csv.DictReader(lines))
    assert [{k: "" if v is None else str(v) for k, v in row.items()} for row in rows] == table
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
    assert cli.run(["analyze", what, *of, *contexts]) == 0
    title, header, *lines = capsys.readouterr().out.strip().splitlines()
    assert title and len(header) <= 80 and len(lines) >= 3


def _contrast(a: str, b: str) -> float:
    """WCAG's contrast ratio of two #rrggbb colours."""

    def luminance(color: str) -> float:
        channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_name_their_axes_with_units_on_either_ground(theme):
    from matplotlib import pyplot
    from matplotlib.colors import to_hex

    units = {"kv": "bytes", "flops": "GFLOPs", "prefill": "GFLOPs", "params": "parameters", "memory": "GiB"}
    for what, unit in units.items():
        for shown in (MODELS, MODELS[:1]):
            figure = figures.draw(what, shown, USUAL, theme)
            axes = figure.axes[0]
            labels = axes.get_xlabel() + " " + axes.get_ylabel()
            assert (unit if len(shown) > 1 or what != "memory" else "bytes") in labels
            assert figure._suptitle or axes.get_title(loc="left")
            # Large or bold shapes need 3 to 1, text 4.5 to 1.
            ground = to_hex(axes.get_facecolor())
            assert _contrast(to_hex(axes.xaxis.label.get_color()), ground) > 4.5
            assert all(_contrast(color, ground) > 3 for color in figures._COLORS[theme][:7])
            pyplot.close(figure)
    figure = figures.draw("flops", MODELS, USUAL, theme)
    *lines, crossing = figure.axes[0].get_lines()
    assert [list(line.get_ydata()) for line in lines] == [[sum(decode_flops(m, n).values()) / 1e9 for n in USUAL] for m in MODELS]
    assert list(crossing.get_xdata()) == [107652, 107652]


def test_a_picture_is_whole_or_not_there(tmp_path, monkeypatch):
    file = tmp_path / "a.svg"
    arguments = "kv", MODELS, USUAL, "light", file
    figures.plot(*arguments)
    first = file.read_bytes()
    figures.plot(*arguments)
    assert file.read_bytes() == first and b"cache bytes" in first

    def fail(self, file, **kwargs):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        figures.plot(*arguments)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.svg", first)]
