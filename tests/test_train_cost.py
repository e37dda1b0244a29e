"""The cost of a step: where an operation of a compiled step counts, and a row of a small model's."""

import json
import sys
from pathlib import Path

import pytest

from bench import program, train_cost
from bench.train_cost import Options, place
from dsv41.config import PRESETS
from dsv41.errors import UserError
from tests.models import tiny_config

ROOT = Path(__file__).parents[1]
REMATS = {"none": "nothing", "attention": "attention sites", "block": "blocks"}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("jit(step)/jvp(attention)/dot_general", ("attention", "forward")),
        ("jit(step)/jvp(attention)/indexer/dot_general", ("indexer", "forward")),
        ("jit(step)/transpose(jvp(moe))/reduce_sum", ("moe", "backward")),
        ("jit(step)/transpose(jvp(checkpoint))/rematted_computation/mhc/add", ("mhc", "again")),
        ("jit(step)/optimizer/while/body/dot_general", ("optimizer", "forward")),
        ("jit(step)/add", ("rest", "forward")),
    ],
)
def test_an_operation_counts_under_the_innermost_scope_of_its_name(name, where):
    assert place(name) == where


def test_a_row_has_every_scope_and_what_is_computed_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(PRESETS, "tiny", tiny_config)
    train_cost.main(Options(preset="tiny", batch_size=2, length=32, remats=("block",), repeats=1, out=tmp_path / "t.json"))
    [row] = json.loads((tmp_path / "t.json").read_text())
    assert {f"{scope}.forward" for scope in train_cost.SCOPES} <= set(row["scopes"])
    again = {name for name in row["scopes"] if name.endswith(".again")}
    assert {"attention.again", "indexer.again", "mhc.again", "moe.again"} <= again and "optimizer.again" not in again
    assert all(seconds > 0 for seconds in row["scopes"].values()) and 0 < row["again_share"] < 1
    assert sum(row["scopes"].values()) == pytest.approx(row["traced_seconds"])
    assert row["tokens_per_second"] == pytest.approx(64 / row["seconds"]) and row["temporary_bytes"] > 0
    assert "remat block" in capsys.readouterr().out


def test_the_page_has_the_results_of_the_gpu():
    page = (ROOT / "docs" / "experiments.md").read_text()
    for row in json.loads((ROOT / "bench" / "results" / "train_cost_h200.json").read_text()):
        spent = row["scopes"]
        share = lambda part: f"{sum(s for n, s in spent.items() if part in n.split('.')) / sum(spent.values()):.0%}"  # noqa: B023, E731
        parts = " | ".join(map(share, ("attention", "moe", "optimizer", "mhc", "again")))
        taken = f"{row['temporary_bytes'] / 1e9:.1f} | {row['state_bytes'] / 1e9:.1f}"
        assert f"| `{row['preset']}` | {REMATS[row['remat']]} | {parts} | {taken} |" in page


def test_an_unknown_policy_is_refused():
    with pytest.raises(UserError, match="remats: found 'blok', allowed are none, attention, block; did you mean 'block'"):
        train_cost.main(Options(remats=("blok",)))


def test_bad_options_of_a_program_end_with_one_line_and_two(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_cost", "--remats", "blok"])
    with pytest.raises(SystemExit) as found:
        program.run(train_cost.main, Options)
    assert found.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --remats: found 'blok'") and "did you mean 'block'" in said and said.count("\n") == 1
