"""`dsv41 bench` without a device: what it explains and what it refuses."""

import json

import pytest

from bench import kernels
from dsv41 import cli
from dsv41.errors import UserError
from kernels_pallas import registry


def test_explain_says_what_runs_where_and_why(capsys):
    assert cli.run(["bench", "explain", "sparse_attention", "queries=3", "width=96"]) == 0
    out = capsys.readouterr().out
    assert "on cpu: reference\n" in out
    assert "on gpu: reference (not gpu: a row has 96 channels" in out
    assert "47,185,920 FLOPs" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explain"], "op: found none, allowed are"),
        (["explain", "sparse_atention"], "did you mean 'sparse_attention'?"),
        (["explain", "sparse_attention", "quaries=1"], "did you mean 'queries'?"),
        (["explain", "sparse_attention", "queries=-1"], "queries: found '-1', allowed is a value like 1"),
        (["explain", "sparse_attention", "heads=many"], "heads: found 'many', allowed is a value like 64"),
        (["kernels", "sparse"], "op: found 'sparse', allowed are"),
        (["kernels"], "backend: found cpu, allowed is gpu"),
    ],
)
def test_mistakes_are_one_line(words, said, capsys):
    assert cli.run(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_report_without_a_device_is_not_begun(tmp_path):
    with pytest.raises(UserError):
        kernels.run([], tmp_path / "times.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("op", registry.OPS)
def test_every_op_has_its_parts(op):
    cases = registry.module(op, "cases")
    for case in cases.CASES.values():
        registry.choose(op, "auto", *cases.abstract(case), **cases.options(case))
        bytes_, flops = cases.cost(case)
        assert bytes_ > 0 and flops >= 0
    json.dumps([cases.cost(case) for case in cases.REAL.values()])
