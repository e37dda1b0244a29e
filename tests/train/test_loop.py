"""Runs: resume gives the same numbers, the folder's files, what stops a resume, steps that are not finite."""

import contextlib
import itertools
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41 import cli
from dsv41.config import RopeScaling, preset, save_config
from dsv41.config import replace as configure
from dsv41.errors import UserError
from dsv41.hashing import table_primes
from dsv41.numerics import Policy
from infer.model import load_model
from tests.runs import TEXT, records, small_data
from train import loop
from train.checkpoint import Checkpoints
from train.curve import Score
from train.data import to_batch
from train.devices import Devices
from train.loop import TrainOptions, fit_vocabulary, train
from train.metrics import Log
from train.packing import Packed
from train.run import completed, read_run, write_run
from train.step import StepOptions, init_state, make_train_step
from train.tokenizer import train_tokenizer


def _tiny():
    """Four layers with every role but the pool."""
    primes = table_primes(1, 3, 2, 64)
    return configure(
        preset("toy"),
        vocab_size=300,
        engram_compressed_vocab_size=300,
        hidden_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        head_dim=32,
        q_lora_rank=32,
        o_lora_rank=32,
        rope_scaling=RopeScaling(original_max_position_embeddings=64),
        n_routed_experts=4,
        sliding_window=16,
        compress_ratios=(0, 2, 1, 1),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3),
        index_n_heads=2,
        index_topk=8,
        candidate_source_layer_id=2,
        candidate_topk_blocks=2,
        engram_layer_ids=(1,),
        engram_num_embeddings=tuple(sum(p) for p in primes),
        engram_max_ngram_size=3,
        engram_vocab_size=64,
        dspark_target_layer_ids=(1, 2, 3),
    )


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    base = tmp_path_factory.mktemp("loop")
    with small_data(base, _tiny):
        yield TrainOptions(
            out=base / "whole",
            preset="tiny",
            data=(str(base / "data"),),
            steps=10,
            batch_size=6,
            accumulate=2,
            length=64,
            checkpoint_every=5,
        )


@pytest.fixture(scope="module")
def whole(options):
    return train(options)


def test_a_run_learns_and_leaves_its_files(options, whole):
    logged = records(options.out)
    assert [r["step"] for r in logged] == list(range(1, 11))
    assert all(math.isfinite(r["loss"]) and not r["skipped"] for r in logged)
    assert logged[-1]["ce"] < logged[0]["ce"]
    # What resumes to the same bits below adds up parts of a batch and goes past the end of an epoch.
    assert 5 * options.batch_size < len(whole.prepared.train.ids) < 10 * options.batch_size and options.accumulate == 2
    first, last = whole.scores
    assert (first.step, last.step) == (0, 10) and last.bits_per_byte < first.bits_per_byte
    for name in ("config.json", "tokenizer.json", "run.json", "loss.png"):
        assert (options.out / name).stat().st_size


def test_resume_gives_the_same_bits(options, whole, monkeypatch):
    part = replace(options, out=options.out.with_name("part"), evaluate=False)

    # Ends the first part by its seconds once five steps are logged.
    def clock():
        log = part.out / "metrics.jsonl"
        return 1e9 if log.exists() and len(records(part.out)) >= 5 else 0.0

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=clock))
    first = train(replace(part, max_seconds=1e6))
    monkeypatch.undo()
    assert first.steps == 5
    with open(part.out / "metrics.jsonl", "a") as log:
        log.write('{"step": 6, "loss": 1.0}\n{"step": 7, "lo')  # as after a crash past the checkpoint
    second = train(part)
    assert (second.resumed_from, second.steps) == (5, 10)
    assert first.scores == second.scores == []
    assert records(part.out) == records(options.out)
    chex.assert_trees_all_equal(whole.state, second.state)
    # Of arrays that are bound to their device, and of others, jax makes two programs: a resumed run would compile again.
    devices = Devices(None, whole.config)
    restored, _ = Checkpoints(part.out / "checkpoints").restore(10, devices.target())
    assert [a.committed for a in jax.tree.leaves(devices.init(0))] == [a.committed for a in jax.tree.leaves(restored)]


def test_a_finished_run_says_so_before_it_reads_or_compiles_anything(options, whole, monkeypatch, capsys):
    for name in ("prepare", "make_train_step", "Examiner", "Devices"):
        monkeypatch.setattr(loop, name, lambda *a: pytest.fail("started to work"))
    argv = ["train", "--out", str(options.out)]
    same = ["--preset", "tiny", "--data", *options.data, "--batch-size", "6", "--accumulate", "2", "--length", "64"]
    for more in ([], ["--steps", "4"], [*same, "--steps", "10"]):
        assert cli.run([*argv, *more]) == 0
        out, err = capsys.readouterr()
        assert out.startswith(f"nothing to do: {str(options.out)!r} has all its steps (step 10, held-out bits per byte ")
        assert out.count("\n") == 1 and err == ""
    assert f"{whole.scores[-1].bits_per_byte:.4f}" in out
    capsys.readouterr()
    assert cli.run([*argv, "--preset", "toy", "--seed", "3", "--lr", "1", "--qat-weights", "fp4"]) == 2
    assert capsys.readouterr().err == (
        f"dsv41: error: --lr: found 1.0, the run in {str(options.out)!r} has 0.015, --seed 3 where it has 0,"
        " --qat-weights fp4 where it has none, another preset; resume with the same, or name another folder to write\n"
    )
    run = read_run(options.out)
    write_run(options.out, replace(run, scores=run.scores[:1]))
    assert loop.finished(options) is None  # the score is still to be had
    assert loop.finished(replace(options, evaluate=False)) == (10, None)
    write_run(options.out, run)
    assert loop.finished(replace(options, steps=11)) is None
    assert loop.finished(replace(options, out=options.out / "none")) is None


@pytest.mark.parametrize("harm", ["a byte", "an empty folder"])
def test_a_finished_run_with_a_damaged_newest_checkpoint_ends_as_a_resume_of_it_does(options, whole, tmp_path, harm):
    run = replace(options, out=tmp_path / "run", evaluate=False)
    shutil.copytree(options.out, run.out)
    if harm == "a byte":
        file = max((run.out / "checkpoints" / "10").rglob("d/*"), key=lambda path: path.stat().st_size)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        (run.out / "checkpoints" / "99").mkdir()
    said = []
    for end in (loop.finished, train):
        with pytest.raises(UserError, match=r"^checkpoint ") as error:
            end(run)
        said.append(str(error.value))
    assert said[0] == said[1] and ("10' is damaged" if harm == "a byte" else "99': cannot read checkpoint.json") in said[0]


def _steps_of(monkeypatch, skipped):
    """Steps that compute nothing, of which those that ``skipped`` names are not finite."""

    def step(state, batch, rate):
        loss = math.nan if int(state.step) + 1 in skipped else 1.0
        return state.replace(step=state.step + 1), {"loss": loss, "ce": loss, "skipped": float(math.isnan(loss))}

    compiled = SimpleNamespace(lower=lambda *a: SimpleNamespace(compile=lambda: step))
    monkeypatch.setattr(loop, "make_train_step", lambda *a, **k: compiled)


def test_a_run_that_diverges_ends_in_one_line_and_keeps_the_checkpoints_before(options, monkeypatch, capsys):
    out = options.out.with_name("diverged")
    argv = ["train", "--out", str(out), "--preset", "tiny", "--data", *options.data, "--batch-size", "6", "--length", "64"]
    argv += ["--no-evaluate", "--checkpoint-every", "2", "--keep", "2", "--steps", "60"]
    _steps_of(monkeypatch, {3, 4, *range(9, 99)})
    says = (
        "dsv41: error: --lr: found 0.015, with which the run diverged: the loss or gradient of steps 9 to 28 is not finite;"
        " the last checkpoint is that of step 8; nearest is a lower rate in another folder\n"
    )
    for more in ([], ["--checkpoint-every", "1"]):  # the second from the checkpoint of step 8
        assert cli.run([*argv, *more]) == 2
        assert capsys.readouterr().err.endswith(says)
        assert Checkpoints(out / "checkpoints", 2).steps() == [6, 8]
    text = (out / "metrics.jsonl").read_text()
    assert len(text.splitlines()) == 28 and "NaN" not in text and '"loss": null' in text.splitlines()[2]
    losses = [record["ce"] for record in loop._read_metrics(out / "metrics.jsonl", 9)]
    assert [step for step, loss in enumerate(losses, 1) if math.isnan(loss)] == [3, 4, 9]
    assert {path.name for path in out.iterdir()} == {"checkpoints", "config.json", "metrics.jsonl", "run.json", "tokenizer.json"}


def test_a_checkpoint_waits_for_a_step_that_counts(options, monkeypatch):
    """Of ten steps half may be skipped in a row; none of the last ones takes the place of an older checkpoint before the end."""
    part = replace(options, out=options.out.with_name("skips"), evaluate=False, checkpoint_every=2, keep=9)
    _steps_of(monkeypatch, {2, 3, 6, 9, 10})
    train(part)
    assert Checkpoints(part.out / "checkpoints", 9).steps() == [4, 7, 8, 10]
    _steps_of(monkeypatch, {1, 2, 3, 4, 5})
    with pytest.raises(UserError, match=r"steps 1 to 5 is not finite; no checkpoint is kept; nearest"):
        train(replace(part, out=options.out.with_name("first")))


def test_a_score_that_is_no_number_ends_the_run_and_is_not_kept(options, monkeypatch):
    part = replace(options, out=options.out.with_name("unscored"), eval_every=4)
    _steps_of(monkeypatch, ())
    found = iter([Score(0, 9.0, 9, 9), Score(4, math.nan, 9, 9), Score(8, 8.0, 9, 9), Score(10, math.inf, 9, 9)])
    examiner = SimpleNamespace(score=lambda *a: next(found), diagnose=lambda state: {})
    monkeypatch.setattr(loop, "Examiner", lambda *a: examiner)
    with pytest.raises(UserError, match=r"^lr: found 0.015, with which the run diverged: the score after the last step is not a"):
        train(part)
    assert [score.step for score in read_run(part.out).scores] == [0, 8]
    assert Checkpoints(part.out / "best", 1).steps() == [8]
    assert [record["heldout_bits_per_byte"] is None for record in records(part.out) if record["step"] % 4 == 0] == [True, False]


def test_more_steps_on_a_resume_are_said_first_and_are_the_runs_at_once(options, monkeypatch, capsys):
    part = replace(options, out=options.out.with_name("more"), evaluate=False)
    _steps_of(monkeypatch, ())
    train(part)
    capsys.readouterr()

    class Ended(Exception):
        pass

    with monkeypatch.context() as patch:
        patch.setattr(loop, "Log", lambda *a: (_ for _ in ()).throw(Ended))
        with pytest.raises(Ended):
            train(replace(part, steps=20))
    assert capsys.readouterr().err.splitlines()[:2] == [
        "resumed from step 10",
        "20 steps in place of 10: from here on the learning rate is that of a run of 20 steps",
    ]
    assert completed({"out": part.out}) == replace(part, steps=20, checkpoint_every=500, evaluate=True)
    assert completed({"out": part.out, "preset": "toy", "steps": 3}).preset == "toy"
    write_run(part.out, replace(read_run(part.out), sources={"config": "/nowhere/config.json"}))
    with pytest.raises(
        UserError, match=r"^config: found nothing at '/nowhere/config.json', which the run began with, allowed is"
    ):
        completed({"out": part.out})
    assert completed({"out": part.out, "preset": "tiny"}).config is None


def test_a_second_run_in_a_folder_at_work_is_one_line(options, monkeypatch, capsys):
    part = replace(options, out=options.out.with_name("taken"), evaluate=False)
    argv = ["train", "--out", str(part.out), "--preset", "tiny", "--data", *part.data, "--length", "64"]
    _steps_of(monkeypatch, ())
    codes = []
    monkeypatch.setattr(Log, "write", lambda *a: codes.append(cli.run(argv)) if not codes else None)
    train(part)
    assert codes == [2]
    assert f"error: --out: found a run at work in {str(part.out)!r}, allowed is one at a time\n" in capsys.readouterr().err
    assert not (part.out / "lock").exists()


def test_resume_with_another_text_names_the_data(options, whole, tmp_path):
    (tmp_path / "other.py").write_text("".join(f"class C{n}:\n    value = {n}\n" for n in range(400)))
    for data in ((str(tmp_path / "other.py"),), (*options.data, str(tmp_path / "other.py"))):
        with pytest.raises(UserError, match=r"^data: found another text than that of the run in "):
            train(replace(options, data=data))


@pytest.mark.parametrize(("few", "warned"), [(50, True), (3, False)])
def test_a_run_by_seconds_says_where_few_steps_fit(options, monkeypatch, capsys, few, warned):
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    monkeypatch.setattr(loop, "_FEW_STEPS", few)
    _steps_of(monkeypatch, ())
    run = replace(options, out=options.out.with_name(f"seconds-{few}"), steps=0, max_seconds=40.0, evaluate=False)
    result = train(run)
    total = read_run(run.out).total
    assert 4 < total < 50 and result.steps <= total
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("only ")]
    assert said == ([f"only {total} steps fit in 40 s here: the model will learn little"] if warned else [])


@pytest.mark.parametrize("line", ["3", "[]", '{"step": 3}', '{"step": "3", "ce": 1.0, "loss": 1.0}', '{"st', "\xff"])
def test_metrics_end_before_a_line_of_another_form(tmp_path, line):
    good = [{"step": n, "ce": 1.0, "loss": float("nan")} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_bytes("\n".join([*map(json.dumps, good), line, "{}"]).encode("latin-1"))
    assert [record["step"] for record in loop._read_metrics(tmp_path / "metrics.jsonl", 9)] == [1, 2]
    assert len(loop._read_metrics(tmp_path / "metrics.jsonl", 1)) == 1


@pytest.mark.parametrize("change", [{"lr": 1e-3}, {"batch_size": 4}, {"seed": 1}, {"accumulate": 3}, {"preset": "toy"}])
def test_resume_with_other_options_is_an_error(options, whole, change):
    with pytest.raises(UserError, match=f"^{next(iter(change))}: found "):
        train(replace(options, **change))


def test_the_weights_of_a_run_open_for_inference(options, whole, tmp_path):
    model = load_model(options.out)
    assert model.step == 10
    chex.assert_trees_all_equal(whole.state.params, model.params)
    shutil.copytree(options.out, tmp_path / "run")
    save_config(replace(model.config, hidden_size=64), tmp_path / "run" / "config.json")
    with pytest.raises(UserError, match="checkpoint"):
        load_model(tmp_path / "run")


@pytest.fixture(scope="module")
def undivided():
    """The config, its folding, and the step that takes a batch as a whole."""
    config, fold = fit_vocabulary(_tiny(), train_tokenizer([TEXT], 300))
    return config, fold, make_train_step(config, Policy(), fold)


def test_a_step_that_is_not_finite_changes_nothing(undivided):
    config, _, step = undivided
    state = init_state(config, 0)
    state = state.replace(params=state.params.replace(norm=state.params.norm.at[0].set(jnp.nan)))
    before = jax.tree.map(np.asarray, state)
    ids = np.full((4, 64), 5, np.int32)

    batch = to_batch(Packed(ids, np.ones_like(ids)))
    after, metrics = step(state, batch, jnp.float32(1e-3))
    assert int(metrics["skipped"]) == 1
    assert int(after.step) == 1
    chex.assert_trees_all_equal(before, after.replace(step=before.step))


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_a_batch_add_up_to_it(undivided, parts):
    """Rows of unequal length, so that a mean of the parts' means would be another number; float32 sums in another order."""
    config, fold, step = undivided
    divided = make_train_step(config, Policy(), fold, StepOptions(parts))
    ids = np.random.default_rng(3).integers(3, config.vocab_size, (4, 64)).astype(np.int32)
    for lengths in ([64, 64, 64, 64], [64, 40, 9, 23]):
        segments = (np.arange(64)[None] < np.array(lengths)[:, None]).astype(np.int32)
        batch = to_batch(Packed(ids, segments))
        want, whole = step(init_state(config, 0), batch, jnp.float32(1e-3))
        got, metrics = divided(init_state(config, 0), batch, jnp.float32(1e-3))
        np.testing.assert_allclose(metrics["ce"], whole["ce"], rtol=2e-6)
        np.testing.assert_allclose(metrics["max_load"], whole["max_load"], rtol=1e-6)
        if min(lengths) == 64:
            # Means over the parts are the batch's, so its gradient is too. An update has a size of 2e-4; orthogonalising
            # raises what is small in a gradient, so an element moves by up to some hundredths of that.
            np.testing.assert_allclose(metrics["loss"], whole["loss"], rtol=2e-6)
            np.testing.assert_allclose(metrics["grad_norm"], whole["grad_norm"], rtol=2e-5)
            large = lambda p: (p.embed, p.head, [(a.attn.wkv, a.attn.wq_b, a.ffn.shared) for a in p.layers])  # noqa: E731
            chex.assert_trees_all_close(large(got.params), large(want.params), atol=6e-6)


def _command(options, name):
    """The options of a run of its own, as a process would be started with."""
    base = options.out.parent
    save_config(_tiny(), base / "tiny.json")
    part = replace(options, out=base / name, preset="toy", config=base / "tiny.json", checkpoint_every=2, keep=1)
    command = [sys.executable, "-m", "dsv41.cli", "train", "--out", str(part.out), "--config", str(part.config)]
    command += ["--data", *part.data, "--steps", "10", "--batch-size", "6", "--accumulate", "2", "--length", "64"]
    return part, [*command, "--checkpoint-every", "2", "--keep", "1", "--no-evaluate"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_asked_to_end_saves_the_step_it_is_at(options, whole, number, code):
    part, command = _command(options, f"asked-{code}")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    log = part.out / "metrics.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n")):
        time.sleep(0.005)
    process.send_signal(number)
    assert process.wait() == code
    done = len(records(part.out))
    assert [int(p.name) for p in (part.out / "checkpoints").iterdir()] == [done]
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    assert records(part.out) == records(options.out)


@pytest.mark.pitfall("N11")
def test_a_run_killed_twice_ends_with_the_same_bits(options, whole):
    """kill -9 at an arbitrary moment behind a checkpoint, then during a save; the last process ends as the unbroken run did."""
    part, command = _command(options, "killed")
    saves, log = part.out / "checkpoints", part.out / "metrics.jsonl"

    def saved():
        return any(p.name.isdecimal() for p in saves.iterdir()) and len(log.read_text().splitlines()) >= 3

    def saving():
        return any(not p.name.isdecimal() and p.stat().st_mtime > began for p in saves.iterdir())

    for killed in (saved, saving, None):
        began, process = time.time(), subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while killed and process.poll() is None:
            with contextlib.suppress(FileNotFoundError):  # not there yet, or gone meanwhile
                if killed():
                    break
            time.sleep(0.005)
        if killed:
            process.kill()
        said = process.communicate()[1].splitlines()
        assert killed or process.returncode == 0
    assert said[0].startswith("resumed from step")
    assert records(part.out) == records(options.out)
    state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), whole.state)
    restored, _ = Checkpoints(saves, 1).restore(10, state)
    chex.assert_trees_all_equal(whole.state, restored)
