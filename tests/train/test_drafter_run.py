"""A drafter's run: the model stays, a resume is exact, the folder opens for drafting and converts; what cannot be asked."""

import shutil
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41 import cli
from dsv41.config import preset, save_config
from dsv41.errors import UserError
from dsv41.files import locked
from dsv41.hf.convert import Imported
from dsv41.hf.folder import open_folder
from dsv41.hf.load import load_draft
from infer.model import load_model, with_drafter
from infer.schedule import read_calibration
from tests.models import tiny_model
from tests.runs import records, small_data
from train.checkpoint import Checkpoints
from train.drafter_run import DrafterOptions, drafting_config, train_drafter

# Two layers without tables and one stage: what a run does is the same, and compiles fast.
LAYERS = {
    "num_hidden_layers": 2,
    "compress_ratios": (0, 1, 0),
    "kv_source_layer_ids": (1,),
    "index_source_layer_ids": (1,),
    "candidate_source_layer_id": 1,
    "engram_layer_ids": (),
    "engram_num_embeddings": (),
    "num_nextn_predict_layers": 1,
    "dspark_target_layer_ids": (0, 1),
}


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    base = tmp_path_factory.mktemp("drafter")
    model = tiny_model(**LAYERS)
    source = base / "source"
    source.mkdir()
    save_config(model.config, source / "config.json")
    (source / "tokenizer.json").write_text(model.tokenizer.to_str())
    (source / "run.json").write_text('{"total": 0}')
    Checkpoints(source / "checkpoints").save(0, Imported(model.params, jnp.zeros((), jnp.int32)), {})
    with small_data(base, lambda: model.config):
        data = (str(base / "data"),)
        yield DrafterOptions(source, base / "out", data, steps=4, batch_size=2, length=32, checkpoint_every=2, anchors=8)


def opened(run):
    return with_drafter(load_model(run), run)


@pytest.fixture(scope="module")
def whole(options):
    return train_drafter(options)


def test_a_run_and_its_resume(options, whole, tmp_path, capsys):
    """Four steps at once, and two behind the checkpoint of the second: equal numbers, equal drafters to the bit."""
    model, before = opened(options.out), load_model(options.source)
    chex.assert_trees_all_equal(model.params, before.params)
    assert [record["step"] for record in whole.records] == [1, 2, 3, 4]
    assert all(np.isfinite(record["loss"]) and record["skipped"] == 0 for record in whole.records)
    assert model.config == before.config and set(whole.heldout) >= {"accept.1", "greedy.5", "accepted", "error"}
    assert 1 <= whole.heldout["accepted"] <= 6 and len(whole.temperatures) == 5
    assert read_calibration(options.out, 5) == pytest.approx(whole.temperatures)

    shutil.copytree(options.out, tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "checkpoints" / "4")
    again = train_drafter(replace(options, out=tmp_path / "part"))
    assert again.resumed_from == 2 and again.heldout == whole.heldout
    assert [r["loss"] for r in again.records] == [r["loss"] for r in whole.records[2:]]
    chex.assert_trees_all_equal(opened(tmp_path / "part").draft, model.draft)
    assert len({record["loss"] for record in records(options.out) if "loss" in record}) == 4

    assert cli.run(["convert", str(options.out), str(tmp_path / "back"), "--quantize", "fp32"]) == 0
    chex.assert_trees_all_equal(load_draft(open_folder(tmp_path / "back")), jax.tree.map(np.asarray, model.draft))


def test_a_model_without_stages_gets_those_of_the_release():
    config = drafting_config(preset("toy"))
    assert config.num_nextn_predict_layers == 3 and config.compress_ratios == (*preset("toy").compress_ratios, 0, 0, 0)
    assert drafting_config(config) == config
    with pytest.raises(UserError, match="names no dspark_target_layer_ids"):
        drafting_config(preset("slice"))


def test_what_cannot_be_asked(options, whole, capsys, tmp_path):
    def error(*argv):
        assert cli.run(["train", "--recipe", "dspark", "--out", str(tmp_path / "x"), *argv]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and not (tmp_path / "x").exists()
        return err

    assert "--from: found none" in error()
    assert "found no checkpoint in" in error("--from", str(tmp_path))
    assert "--mesh: found 'data=2', allowed with recipe dspark is 'None'" in error(
        "--from", str(options.source), "--mesh", "data=2"
    )
    assert "--lr: found -1.0" in error("--from", str(options.source), "--lr", "-1")
    assert "allowed with dspark" in error("--recipe", "toy", "--from", str(options.source))
    with pytest.raises(UserError, match="the run to draft for, allowed is another folder"):
        train_drafter(replace(options, out=options.source))
    with locked(options.out), pytest.raises(UserError, match=r"^out: found a run at work in "):
        train_drafter(options)
    with pytest.raises(UserError, match="seed: found another than that of the run"):
        train_drafter(replace(options, seed=7))
    with pytest.raises(UserError, match="found no drafter in"):
        opened(options.source)


def test_a_run_that_diverges_ends(options, tmp_path, monkeypatch):
    """Half of its steps skipped in a row, as a run of the model ends; no checkpoint of them is kept."""
    nothing = {"loss": jnp.float32(jnp.nan), "skipped": jnp.int32(1)}
    monkeypatch.setattr("train.drafter_run.make_drafter_step", lambda *_: lambda state, *_: (state, nothing))
    with pytest.raises(UserError, match=r"^lr: found 0.01, .* steps 1 to 2 is not finite; no checkpoint is kept"):
        train_drafter(replace(options, out=tmp_path / "diverged", checkpoint_every=1))
    assert Checkpoints(tmp_path / "diverged" / "checkpoints").latest() is None
