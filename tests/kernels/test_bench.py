"""`dsv41 bench` without a device: what it explains and what it refuses."""

import json
from dataclasses import asdict

import pytest

from bench import kernels
from dsv41 import cli
from dsv41.errors import UserError
from kernels_pallas import registry
from tests.kernels import WITHOUT_GPU


def test_explain_says_what_runs_where_and_why(capsys):
    assert cli.run(["bench", "explain", "sparse_attention", "queries=3", "width=96"]) == 0
    out = capsys.readouterr().out
    assert "on cpu: runs the reference\n" in out
    assert "on gpu: runs the reference, not the gpu kernel: a row has 96 channels" in out
    assert "47,185,920 FLOPs" in out
    assert cli.run(["bench", "explain", "mega_mhc", "tokens=7", "dtype=BFLOAT16", "eps=0"]) == 0
    assert "on gpu: runs the gpu kernel\non tpu: runs the tpu kernel\n" in capsys.readouterr().out


@pytest.mark.parametrize("op", registry.OPS)
def test_every_case_can_be_explained_and_no_field_takes_what_is_not_of_its_kind(op, capsys):
    cases = registry.module(op, "cases").CASES.values()
    for case in cases:
        assert cli.run(["bench", "explain", op, *(f"{name}={value}" for name, value in asdict(case).items())]) == 0
    for name, value in asdict(next(iter(cases))).items():
        others = ["", "nan", "inf", "-1", "1e400", "10" * 20, "maybe", "int7", "str", "0x1", "None"]
        others += [] if isinstance(value, float) else ["0.5"]
        for other in others:
            capsys.readouterr()
            assert cli.run(["bench", "explain", op, f"{name}={other}"]) == 2
            out, error = capsys.readouterr()
            assert out == "" and error.startswith(f"dsv41: error: {op}: {name}: found {other!r}, allowed is ")
            assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explain"], "op: found none, allowed are"),
        (["explain", "sparse_atention"], "did you mean 'sparse_attention'?"),
        (["explain", "sparse_attention", "quaries=1"], "did you mean 'queries'?"),
        (["explain", "sparse_attention", "queries=0"], "queries: found '0', allowed is a whole number from 1 to 1073741824\n"),
        (["explain", "sparse_attention", "topk=-1"], "topk: found '-1', allowed is a whole number from 0 to 1073741824\n"),
        (["explain", "sparse_attention", "empty=nan"], "empty: found 'nan', allowed is a number from 0 to 1\n"),
        (["explain", "sparse_attention", "sink=maybe"], "sink: found 'maybe', allowed is true or false\n"),
        (["explain", "sparse_attention", "dtype=str"], "dtype: found 'str', allowed is bfloat16 or float32\n"),
        (["explain", "sparse_attention", "dtype=bfloat"], "bfloat16 or float32; did you mean 'bfloat16'?\n"),
        (["explain", "sparse_attention", "width=48"], "found width=48, which even the reference cannot run: "),
        (["explain", "sparse_attention", "topk=0", "window=0"], "found topk=0 window=0, which even the reference cannot run: "),
        (["kernels", "sparse"], "op: found 'sparse', allowed are"),
        pytest.param(["kernels"], "backend: found cpu, allowed is gpu", marks=WITHOUT_GPU),
    ],
)
def test_mistakes_are_one_line(words, said, capsys):
    assert cli.run(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@WITHOUT_GPU
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
