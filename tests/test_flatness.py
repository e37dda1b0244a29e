"""The benchmark of decode steps by context: what it runs, and what it makes of times."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bench import flatness
from bench.flatness import Found
from dsv41.errors import UserError
from tests.models import tiny_model

ROOT = Path(__file__).parents[1]
TWO_SOURCES = {
    "num_hidden_layers": 2,
    "compress_ratios": (2, 1),
    "kv_source_layer_ids": (0, 1),
    "index_source_layer_ids": (0, 1),
    "candidate_source_layer_id": 1,
    "engram_layer_ids": (),
    "engram_num_embeddings": (),
    "dspark_target_layer_ids": (),
    "num_nextn_predict_layers": 0,
}


def test_a_step_reads_its_context_whatever_the_table(monkeypatch, capsys, tmp_path):
    """A wider table changes no bit; random rows are seen, and another context sees others."""
    monkeypatch.setattr(flatness, "PAGE", 16)
    monkeypatch.setattr(flatness, "REPEATS", 1)
    opened, warmed = [], flatness.warmed
    monkeypatch.setattr(flatness, "open_model", lambda *_: tiny_model(**TWO_SOURCES))
    monkeypatch.setattr(flatness, "warmed", lambda *args: opened.append(warmed(*args)) or opened[-1])
    out = tmp_path / "flat.json"
    flatness.main(flatness.Options("toy", "16,64", (2,), ("auto",), out=out))
    steps = opened[0]
    assert steps._device.widths == [1, 4] and steps._device.compiled() == 2
    own, wide, longer = (steps.run(*args, 3).logprobs for args in ((16, "own"), (16, "widest"), (64, "own")))
    assert np.isfinite(own[:3]).all() and (own == wide).all() and (own[:3] != longer[:3]).all()
    told = json.loads(out.read_text())
    assert [(one["table"], one["context"]) for one in told["results"]] == [
        ("own", 16),
        ("own", 64),
        ("widest", 16),
        ("widest", 64),
    ]
    assert "auto, 2 requests, widest table: x" in capsys.readouterr().out


def test_the_ratio_is_that_of_the_longest_to_the_shortest():
    found = [
        Found("auto", 1, "own", n, ms, us, 9) for n, ms, us in ((4096, 2.0, 1000.0), (65536, 2.2, 1050.0), (1 << 20, 2.5, 1100.0))
    ]
    assert flatness.ratios(found) == [{"impl": "auto", "batch": 1, "table": "own", "wall": 1.25, "device": 1.1}]


def test_a_step_is_what_long_blocks_have_beyond_short_ones(monkeypatch):
    def launched(run, args):
        steps = run(*args)
        return None, [("before", 50.0), *[("gemm", 3.0), ("scan", 1.0)] * steps]

    monkeypatch.setattr(flatness, "profiled", launched)
    assert flatness.kernels(lambda steps: steps) == (2, Counter(gemm=3.0, scan=1.0, before=0.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "toi"}, "preset: found 'toi', allowed are slice, release, toy"),
        ({"contexts": "8"}, "contexts: found 8, allowed is 16 or more"),
        ({"batches": (0,)}, "batches: found 0"),
    ],
)
def test_bad_input_is_one_line(changes, message):
    with pytest.raises(UserError, match=message):
        flatness.main(flatness.Options(**changes))


@pytest.mark.parametrize(
    ("title", "key"),
    [
        ("kernels, 1 request", ("auto", 1, "own")),
        ("kernels, 1 request, the program of 1M", ("auto", 1, "widest")),
        ("kernels, 8 requests", ("auto", 8, "own")),
        ("kernels, 8 requests, the program of 1M", ("auto", 8, "widest")),
        ("XLA, 1 request", ("reference", 1, "own")),
        ("XLA, 8 requests", ("reference", 8, "own")),
    ],
)
def test_the_page_says_what_was_measured(title, key):
    told = json.loads((ROOT / "bench/results/flatness_h200.json").read_text())
    us = [one["kernel_us"] for one in told["results"] if (one["impl"], one["batch"], one["table"]) == key]
    cells = [*(f"{value:,.0f}" for value in us), f"{us[-1] / us[0]:.2f}"]
    assert f"| {title} | {' | '.join(cells)} |" in (ROOT / "docs/serving.md").read_text()
