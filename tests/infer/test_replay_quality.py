"""Replays compared: nothing where nothing is left out, the exact result where enough runs again; pages have the numbers found."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot

from bench import replay_quality
from bench.replay_quality import Found, Options, draw, measure
from dsv41.errors import UserError
from tests.infer.test_engine import FOUR_LAYERS
from tests.models import tiny_model

ROOT = Path(__file__).parents[2]
RESULTS = {name: json.loads((ROOT / f"bench/results/{name}_cpu.json").read_text()) for name in ("replay_quality", "prefix_times")}


@pytest.mark.pitfall("C6", "C8")
def test_kinds_are_apart_where_they_leave_something_out():
    model = tiny_model(**FOUR_LAYERS)
    ids = np.random.default_rng(0).integers(3, 280, (3, 32)).astype(np.int32)
    found = measure(model, ids, Options(Path(), lengths=(4, 24), shares=(0.0, 0.5, 1.0), more=4))
    short, long = ([one for one in found if one.tokens == n] for n in (4, 24))
    # A prompt of one window: float32 sums in another order, squared by the KL at its minimum.
    assert all(abs(one.mean) < 1e-7 for one in short) and [one.kept for one in short] == [0, 0, 2, 4]
    assert all(one.mean > 1e-5 and one.last > 1e-6 for one in long) and [one.kept for one in long] == [0, 0, 12, 24]
    # With random weights no order of the kinds is promised, but that they differ.
    assert len({one.mean for one in long}) == 4
    figure = draw(found, "light")
    assert [list(line.get_ydata()) for line in figure.axes[0].get_lines()] == [
        [a.mean, b.mean] for a, b in zip(short, long, strict=True)
    ]
    pyplot.close(figure)


def test_what_cannot_be_compared(monkeypatch):
    model = tiny_model(**FOUR_LAYERS)
    monkeypatch.setattr(replay_quality, "load_model", lambda run: model)
    with pytest.raises(UserError, match="lengths: found 10, allowed are multiples of the window's 4 tokens"):
        replay_quality.main(Options(Path(), lengths=(8, 10)))
    with pytest.raises(UserError, match="more: found 5, allowed is up to the window's 4"):
        measure(model, np.zeros((1, 16), np.int32), Options(Path(), lengths=(8,), more=5))


def test_bounded_replay_is_nearer_than_the_window_alone():
    """Of the trained toy, at every length and hit; and the page has these numbers."""
    found = [Found(**one) for one in RESULTS["replay_quality"]["results"]]
    page = (ROOT / "docs/experiments.md").read_text(encoding="utf-8")
    for tokens in (64, 128, 256, 448):
        window, *bounded = (one for one in found if one.tokens == tokens)
        assert window.kind == "window" and len(bounded) == 5
        assert all(8 * one.mean < window.mean and one.last < window.last for one in bounded)
        assert "| ".join(["", f"{tokens} ", *(f"{one.mean:.5f} " for one in (window, *bounded))]) in page


def test_times_behind_a_prefix_are_those_of_the_results():
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    times = {one["kind"]: one for one in RESULTS["prefix_times"]["times"]}
    for kind, digits in (("cold", 1), ("pages", 2), ("file", 2), ("windows", 2)):
        assert f" | {times[kind]['ran']:,} | {times[kind]['seconds']:.{digits}f} |" in page
    disk = RESULTS["prefix_times"]["bytes_a_token"]
    assert disk["flash"]["rows"] == 890 and 890 < disk["flash"]["file"] < 890 * 1.03
    assert f"take {disk['flash']['file']:.1f} bytes a token on disk" in page and f"{disk['toy']['file']:.1f} in the place" in page
