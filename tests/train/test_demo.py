"""The demo: its table's numbers say what they count, and its new process runs these packages whatever lies around."""

from pathlib import Path

import pytest

from dsv41.errors import UserError
from dsv41.files import locked
from train import demo
from train.demo import SPEED_BATCHES, _generate, _speed_lines


def test_files_in_the_current_folder_do_not_stand_in_for_ours(tmp_path, monkeypatch):
    for name in ("dsv41", "train", "infer", "json"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the current folder')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"exit code 2: dsv41: error: --checkpoint: found no checkpoint in 'run'"):
        _generate(Path("run"), ["x"])


def test_a_demo_keeps_out_of_a_folder_at_work(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "train", lambda options: (_ for _ in ()).throw(KeyboardInterrupt))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with locked(tmp_path), pytest.raises(UserError, match=r"^out: found a demo at work in "):
        demo.demo(9.0, tmp_path)
    with locked(tmp_path / "run"), pytest.raises(UserError, match=r"^out: found a run at work in "):
        demo.demo(9.0, tmp_path)
    assert (tmp_path / "run" / "run.json").exists()
    with pytest.raises(KeyboardInterrupt):
        demo.demo(9.0, tmp_path)
    assert not list(tmp_path.iterdir())


def test_speed_is_compared_sequence_by_sequence():
    speed = {"context": 256, "prompt": 192, "plain_decode": 25.0}
    for batch in SPEED_BATCHES:
        speed |= {f"prefill_batch_{batch}": 4000.0, f"decode_batch_{batch}": 100.0 * batch, f"cache_bytes_batch_{batch}": 1000}
    lines = _speed_lines(speed)
    assert any("from 192 tokens to 256" in line for line in lines)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert len({len(row) for row in rows}) == 1
    header, _, *paths = rows
    assert header[1] == "sequences" and [row[1] for row in paths] == ["1", "16", "1"]
    # Twice the sequences at the same speed each are no faster for any of them.
    assert [row[4] for row in paths] == ["100 (4.0 times plain)", "100 (4.0 times plain)", "25.0"]
