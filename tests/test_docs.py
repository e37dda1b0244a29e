"""The pages under docs/: every command runs and prints what stands below it, links lead somewhere, numbers are the measured ones.

A fence ``sh`` is run; ``sh long`` is parsed by the command line's own parser alone; ``text`` behind a ``sh`` of one command is
what that prints; ``python`` is run.
"""

import importlib.util
import json
import re
import shlex
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dsv41 import cli

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def fences(page: Path) -> list[tuple[str, str]]:
    """(kind, text) of each fenced block."""
    return _FENCE.findall(page.read_text(encoding="utf-8"))


def commands(*kinds: str) -> list:
    """``pytest.param(words, what it prints or None)`` of every command in fences of these kinds."""
    found = []
    for page in PAGES:
        blocks = fences(page)
        for n, (kind, text) in enumerate(blocks):
            if kind in kinds:
                lines = text.splitlines()
                shown = blocks[n + 1][1] if blocks[n + 1 : n + 2] and blocks[n + 1][0] == "text" else None
                assert shown is None or len(lines) == 1
                found += [pytest.param(shlex.split(line), shown, id=f"{page.stem}: {line}") for line in lines]
    return found


def test_no_block_is_left_out():
    kinds = {kind for page in PAGES for kind, _ in fences(page)}
    assert kinds <= {"sh", "sh long", "text", "python"} and {"sh", "sh long", "python"} <= kinds
    assert all(text.count("```") == 2 * len(_FENCE.findall(text)) for text in (page.read_text() for page in PAGES))


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder that looks like the repository to a command, whose outputs are thrown away."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "docs" / "img").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.mark.parametrize(("words", "shown"), commands("sh"))
def test_command(capsys, repository, words, shown):
    assert words[0] == "dsv41"
    assert cli.run(words[1:]) == 0
    out, err = capsys.readouterr()
    assert out.strip() and err == ""
    if shown is not None:
        assert [line.rstrip() for line in out.strip("\n").splitlines()] == shown.splitlines()
    for file in (repository / "docs" / "img").iterdir():
        assert texts(file) == texts(ROOT / "docs" / "img" / file.name)


def texts(picture: Path) -> list[str]:
    """What is written in an SVG: matplotlib keeps each text beside its outlines."""
    found = re.findall("<!-- (.*?) -->", picture.read_text(encoding="utf-8"))
    assert len(found) > 5
    return found


@pytest.mark.parametrize(("words", "shown"), commands("sh long"))
def test_long_command_is_spelled_right(words, shown):
    assert shown is None
    program, *rest = words
    if program == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert rest and set(rest) <= set(targets)
    elif program == ".venv/bin/python":
        assert rest[0] == "-m" and importlib.util.find_spec(rest[1]) is not None
    else:
        assert program == "dsv41"
        kind, _ = cli._COMMANDS[rest[0]]
        assert isinstance(cli._parse(rest), kind)


def test_a_wrong_option_would_be_found():
    with pytest.raises(cli.UserError):
        cli._parse(["train", "--presets", "toy"])


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda page: page.stem)
def test_python(page, capsys):
    for kind, text in fences(page):
        if kind == "python":
            exec(compile(text, page.name, "exec"), {})
    assert capsys.readouterr().out.strip() == "(1, 2048) [33]"


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_somewhere(page):
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    local = [urlsplit(t).path for t in targets if not urlsplit(t).scheme]
    assert local and [t for t in local if not (page.parent / t).exists()] == []


def test_every_page_and_picture_is_reached():
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in PAGES if page.name != "README.md" and f"({page.name})" not in index] == []
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()
    text = "".join(page.read_text() for page in PAGES)
    pictures = {file.name for file in (ROOT / "docs" / "img").iterdir()}
    assert {name for name in pictures if f'"img/{name}"' not in text} == set()
    assert {name.replace("-dark", "-light") for name in pictures} == {name for name in pictures if "-light" in name}


def test_measured_times_are_those_of_the_results():
    """Each row of the page from the committed results; what is wanted is shown where they moved on."""
    page = (ROOT / "docs" / "kernels.md").read_text()
    results = lambda name: json.loads((ROOT / "bench" / "results" / f"{name}_h200.json").read_text())["results"]  # noqa: E731
    attention = {(r["case"], r["name"]): r for r in results("sparse_attention")}
    wanted = []
    decode = ("decode, 1 request", "decode, 32 requests", "decode, 128 requests")
    for case in (*decode, "prefill, 4096 tokens", "training, 4096 tokens", "training and back, 4096 tokens"):
        ours, peer = attention[case, "ours"], attention[case, "XLA, bf16, rows once"]
        wanted.append(f"| {case} | {ours['median']} | {peer['median']} | {ours['floor']} |")
    mhc = results("mega_mhc")
    for tokens in (128, 4096, 8192):
        ours = min((r for r in mhc if r["tokens"] == tokens and r["name"].startswith("version 1,")), key=lambda r: r["us"])
        peer = next(r for r in mhc if r["tokens"] == tokens and r["name"].startswith("XLA, sums written out"))
        wanted.append(f"| {tokens} | {ours['us']} | {peer['us']} | {ours['floor_us']} |")
    both = {r["name"]: r["us"] for r in mhc if r["tokens"] == 4096 and r["name"].startswith("forward and backward")}
    ours = both.pop("forward and backward: backward kernels")
    wanted.append(f"take {ours} µs, XLA's best form {min(both.values())}")
    for op, cases in (("engram_gather", {"128 tokens": 128, "4096 tokens": 4096}), ("quantize", None)):
        rows = {(r["case"], r["name"]): r for r in results(op)}
        for case in cases or {case for case, _ in rows}:
            ours, peer = rows[case, "ours"], rows[case, "XLA"]
            wanted.append(f"| {cases[case] if cases else case} | {ours['median']} | {peer['median']} | {ours['floor']} |")
    assert [row for row in wanted if row not in page] == []
