"""`dsv41.verify` on the golden files: passes as they are, names what was changed, refuses what it cannot read."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dsv41 import cli, verify
from dsv41.errors import UserError
from dsv41.quant import INDEX_KEY, WINDOW_KV
from dsv41.verify import compare_codes, compare_floats, compare_ids, run

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the model folder with the float32 case only."""
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "model_a", folder, ignore=shutil.ignore_patterns("quant_*", "decode_*", "dspark_*"))
    return folder


def _change(file: Path, name: str, change: Callable[[np.ndarray], None]) -> None:
    tensors = {key: value.copy() for key, value in load_file(file).items()}
    change(tensors[name])
    save_file(tensors, file)


def test_a_changed_decode_step_is_found(tmp_path):
    shutil.copytree(GOLDEN / "model_a", tmp_path / "model", ignore=shutil.ignore_patterns("*len7*", "decode_quant*", "dspark_*"))

    def other(a: np.ndarray) -> None:
        a[0, 2, 0] = 1 if a[0, 2, 0] != 1 else 0

    def more(a: np.ndarray) -> None:
        a[1, 3, 7] += 1e-2

    case = tmp_path / "model" / "decode_fp32_p8_t20.safetensors"
    _change(case, "step_logits", more)
    _change(case, "step.layers.4.indexer.topk", other)
    _change(case, "final.layers.6.main_kv", more)
    assert _failed(tmp_path / "model") == (1, ["final.layers.6.main_kv", "step.layers.4.indexer.topk", "step_logits"])


@pytest.mark.parametrize("value", [None, 0, 20, -3, [3, 4], 2.5])
def test_an_impossible_prefill_length_is_one_error(tmp_path, value):
    shutil.copytree(GOLDEN / "model_a", tmp_path / "model", ignore=shutil.ignore_patterns("*len7*", "decode_quant*", "dspark_*"))
    case = tmp_path / "model" / "decode_fp32_p8_t20.safetensors"
    tensors = load_file(case)
    del tensors["prefill_len"]
    save_file(tensors if value is None else {**tensors, "prefill_len": np.asarray(value)}, case)
    with pytest.raises(UserError, match=r"prefill_len: found .* from 1 to 19"):
        run([tmp_path / "model"], None, [])


def test_a_quantised_draft_case_needs_what_its_stages_read(tmp_path):
    """From it the stages run: a moved code of the backbone would be in every draft behind it."""
    shutil.copytree(GOLDEN / "model_a", tmp_path / "model", ignore=shutil.ignore_patterns("*len7*", "decode_*", "dspark_fp32*"))
    case = tmp_path / "model" / "dspark_quant_p6_t14.safetensors"
    tensors = load_file(case)
    for other in ({}, {"draft.main_hidden": tensors["draft.main_hidden"][..., :5]}):
        save_file({**{name: a for name, a in tensors.items() if name != "draft.main_hidden"}, **other}, case)
        with pytest.raises(
            UserError, match=r"allowed are prefill_main_hidden and draft\.main_hidden of 192 numbers for each token"
        ):
            run([tmp_path / "model"], None, [])
    (tmp_path / "model" / "weights-draft.safetensors").unlink()
    with pytest.raises(UserError, match="draft: found none of the"):
        run([tmp_path / "model"], None, [])


def _failed(folder: Path) -> tuple[int, list[str]]:
    report = folder.parent / "report.json"
    code = run([folder], report, [])
    return code, [r["name"] for r in json.loads(report.read_text())["rows"] if r["verdict"] == "FAIL"]


@pytest.mark.slow
def test_golden_files_pass(tmp_path):
    """By the command, in optimised code: this test's process compiles without LLVM's optimiser."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "dsv41.cli", "verify", str(GOLDEN), "--json", str(report)]
    plain = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, capture_output=True, text=True, env=plain, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    lines = done.stdout.splitlines()
    data = json.loads(report.read_text())
    assert lines[-1] == f"{data['passed']} passed, 0 failed, 0 skipped"
    files = list(dict.fromkeys(r["file"] for r in data["rows"]))
    totals = [f"{file}: {sum(r['file'] == file for r in data['rows'])} passed, 0 failed, 0 skipped" for file in files]
    assert lines[:-1] == totals and len(data["rows"]) == data["passed"] > 500
    assert {r["file"] for r in data["rows"]} >= {
        "fp32_len7.safetensors",
        "quant_len7.safetensors",
        "decode_fp32_p8_t20.safetensors",
        "decode_quant_p1_t12.safetensors",
        "dspark_fp32_p6_t14.safetensors",
        "dspark_quant_p6_t14.safetensors",
        "rope.safetensors",
    }
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.slow
def test_changes_are_found_and_named(model):
    def more(a: np.ndarray) -> None:
        a[0, 3, 5] += 1e-2

    def other_expert(a: np.ndarray) -> None:
        a[1, 2, 0] = (a[1, 2, 0] + 1) % 8

    def heavier(a: np.ndarray) -> None:
        a[0, 0] += 0.1

    case = model / "fp32_len7.safetensors"
    _change(case, "logits", more)
    _change(case, "layers.3.ffn.expert_ids", other_expert)
    assert _failed(model) == (1, ["layers.3.ffn.expert_ids", "logits"])
    shutil.copy(GOLDEN / "model_a" / case.name, case)
    _change(model / "weights-1-of-2.safetensors", "layers.0.attn.wo_b.weight", heavier)
    code, names = _failed(model)
    assert code == 1
    assert "layers.0.attn.out" in names
    assert "layers.0.attn.core" not in names


def test_changed_unit_is_named(tmp_path):
    def move(a: np.ndarray) -> None:
        a[0, 1] += 1

    unit = tmp_path / "unit"
    unit.mkdir()
    shutil.copy(GOLDEN / "unit" / "router.safetensors", unit)
    assert _failed(unit) == (0, [])
    _change(unit / "router.safetensors", "r1.ids_vl", move)
    assert _failed(unit) == (1, ["r1.ids_vl"])


@pytest.mark.parametrize("name", ["fp32_len7.safetensors", "weights-2-of-2.safetensors"])
def test_truncated_file_is_refused(model, name):
    data = (model / name).read_bytes()
    (model / name).write_bytes(data[:-100])
    if not name.startswith("weights"):
        from dsv41.verify import read_tensors

        with pytest.raises(UserError, match=name):
            read_tensors(model / name)
        return
    with pytest.raises(UserError, match=name):
        run([model], None, [])


def test_folders_without_cases_config_or_weights_are_refused(model, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, found in (("nothing", "nothing there"), ("model/config.json", "a file"), ("pipe", "something else")):
        with pytest.raises(UserError, match=f"found {found}, allowed is a folder"):
            run([tmp_path / path], None, [])
    for file in model.glob("weights*"):
        file.unlink()
    with pytest.raises(UserError, match="weights"):
        run([model], None, [])
    (model / "fp32_len7.safetensors").unlink()
    with pytest.raises(UserError, match="no case files"):
        run([model], None, [])
    (model / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        run([model], None, [])


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """Two unit files."""
    folder = tmp_path / "unit"
    folder.mkdir()
    for name in ("router", "candidates"):
        shutil.copy(GOLDEN / "unit" / f"{name}.safetensors", folder)
    return folder


def test_totals_failed_and_skipped_rows_are_printed_and_every_row_where_asked_for(unit, capsys):
    def move(a: np.ndarray) -> None:
        a[0, 1] += 1

    _change(unit / "router.safetensors", "r1.ids_vl", move)
    count = len(list(verify.check([unit], ["candidates"]))) - 1
    assert cli.run(["verify", str(unit), "--skip", "candidates"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "candidates.safetensors  *  -  -  skipped (left out by --skip)"
    assert lines[1] == "candidates.safetensors: 0 passed, 0 failed, 1 skipped"
    assert lines[2].startswith("router.safetensors  r1.ids_vl  -  ") and "  FAIL (first difference at " in lines[2]
    assert lines[3] == f"router.safetensors: {count - 1} passed, 1 failed, 0 skipped"
    assert lines[4:] == [f"{count - 1} passed, 1 failed, 1 skipped"]
    assert cli.run(["verify", str(unit), "--skip", "candidates", "--all"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("router.safetensors  ") for line in lines) == count == len(lines) - 4


@pytest.mark.parametrize("patterns", [["*"], ["router", "candidates*"]])
def test_nothing_checked_is_no_success(unit, tmp_path, capsys, patterns):
    assert cli.run(["verify", str(unit), "--json", str(tmp_path / "report.json"), "--skip", *patterns]) == 2
    out, err = capsys.readouterr()
    said = "dsv41: error: found nothing to check (left out by --skip), allowed is one file or more\n"
    assert (out, err) == ("", said) and not (tmp_path / "report.json").exists()


def test_files_without_anything_to_compare_are_no_success(model, tmp_path):
    case = model / "fp32_len7.safetensors"
    save_file({"input_ids": load_file(case)["input_ids"]}, case)
    with pytest.raises(UserError, match="no tensor to compare"):
        run([model], tmp_path / "report.json", [])
    case.rename(model / "vision_case.safetensors")
    with pytest.raises(UserError, match=r"nothing to check \(the vision tower is not part"):
        run([model], tmp_path / "report.json", [])
    assert not (tmp_path / "report.json").exists()


def test_a_name_that_no_file_has_is_refused(model):
    with pytest.raises(UserError, match="did you mean 'fp32_len7'"):
        run([model], None, ["fp32_len*", "fp32_len8"])


@pytest.mark.parametrize("output", ["gone/report.json", "model", "model/config.json/report.json"])
def test_what_could_not_be_written_or_skipped_is_refused_before_any_work(model, tmp_path, monkeypatch, output):
    monkeypatch.setattr(verify, "_run_case", lambda *a: pytest.fail("ran a case"))
    monkeypatch.setattr(verify, "load_params", lambda *a: pytest.fail("read the weights"))
    with pytest.raises(UserError, match=r"json: (cannot write|found a folder at)"):
        run([model], tmp_path / output, [])
    with pytest.raises(UserError, match="skip: no case"):
        run([model, GOLDEN / "unit"], tmp_path / "report.json", ["fp32_len8"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("columns", ["40", "80"])
def test_a_terminal_shows_every_name_whole(monkeypatch, capsys, columns):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", columns)
    names = ["step.layers.4.indexer.candidates", "layers.39.ffn.experts.383.w2.weight.scale_bytes"]
    rows = [verify.Row("decode_quant_p1_t12.safetensors", name, 1e-9, "123456/123456", "FAIL", "no " * 30) for name in names]
    assert verify._print(rows, False) == rows
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert lines.pop() == "decode_quant_p1_t12.safetensors: 0 passed, 2 failed, 0 skipped"
    assert max(map(len, lines)) <= int(columns)
    # A name that is longer than its column goes on below itself.
    assert all(name in "".join(line.split(" ")[0] for line in lines) for name in names)
    assert any("decode_quant_p1_t12.safetensors" in line for line in lines)
    if columns == "80":
        assert all(any(line.startswith(name) for line in lines) for name in names)


def test_comparisons():
    want = np.array([[1.0, -np.inf, 0.5]], np.float32)
    assert compare_floats("f", "n", want + np.float32(1e-5), want, 2e-5).verdict == "pass"
    assert compare_floats("f", "n", want + np.float32(1e-4), want, 2e-5).verdict == "FAIL"
    assert compare_floats("f", "n", np.where(np.isinf(want), -1e30, want), want, 2e-5).verdict == "FAIL"
    assert compare_floats("f", "n", np.full_like(want, np.nan), want, 2e-5).verdict == "FAIL"
    ids = np.array([[0, 3, -1], [1, 2, 4]])
    swapped = ids[:, ::-1]
    assert compare_ids("f", "n", swapped, ids).verdict == "FAIL"
    assert compare_ids("f", "n", swapped, ids, as_sets=True).sets == "2/2"


@pytest.mark.parametrize("fmt", [WINDOW_KV, INDEX_KEY])
def test_codes_may_move_by_one_in_a_thousand(fmt):
    codes = np.tile(np.array([fmt.max, 1.0, 0.5, 0.0], np.float32), (2, 500))[:, : 30 * fmt.group]
    one, two = codes.copy(), codes.copy()
    one[0, 1] = 1.125 if fmt.element == "e4m3" else 1.5
    two[0, 1] = 2.0
    assert compare_codes("f", "n", codes, codes, fmt).verdict == "pass"
    assert compare_codes("f", "n", one, codes, fmt).sets == f"{codes.size - 1}/{codes.size}"
    assert compare_codes("f", "n", one, codes, fmt).verdict == "pass"
    assert compare_codes("f", "n", two, codes, fmt).verdict == "FAIL"
    one[:, 1] = one[0, 1]
    assert compare_codes("f", "n", one, codes, fmt).verdict == "FAIL"
