"""A run of several phases: resume across them, scores on the way, the best checkpoint, logs, a trace; and its evaluation."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41 import cli
from dsv41.cache import init_cache
from dsv41.config import load_config
from dsv41.config import replace as configure
from dsv41.errors import UserError
from dsv41.model import extend, forward
from dsv41.numerics import PACKED, Policy
from infer.model import load_model
from tests.models import tiny_config
from tests.runs import records, small_data
from train import recipes
from train.checkpoint import Checkpoints
from train.loop import BEST, train
from train.metrics import Log, flops_per_token, profile_steps
from train.options import TrainOptions
from train.recipes import Phase, Recipe
from train.run import read_run
from train.tokenizer import encode_documents

# Every mechanism that a phase can turn on, in six steps.
PHASES = Recipe((Phase("short", 0.5, yarn=False, pool=False), Phase("long", 0.5, stretch=2, replay="mask", cache=True)))


def _tiny():
    """Three layers: window alone, Full with a table and a pool, Reindex."""
    config = tiny_config()
    return configure(
        config,
        vocab_size=300,
        engram_compressed_vocab_size=300,
        num_hidden_layers=3,
        compress_ratios=(0, 1, 1),
        kv_source_layer_ids=(1,),
        index_source_layer_ids=(1, 2),
        candidate_source_layer_id=1,
        engram_layer_ids=(1,),
        engram_num_embeddings=config.engram_num_embeddings[:1],
        dspark_target_layer_ids=(0, 1, 2),
    )


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    base = tmp_path_factory.mktemp("phases")
    with small_data(base, _tiny) as patch:
        patch.setitem(recipes.RECIPES, "both", PHASES)
        yield TrainOptions(
            out=base / "whole",
            preset="tiny",
            data=(str(base / "data"),),
            steps=6,
            batch_size=2,
            length=96,
            checkpoint_every=4,
            recipe="both",
            qat_weights=("fp4",),
            synthetic=0.5,
            engram_rows=200,
            eval_every=2,
            profile="1:2",
        )


@pytest.fixture(scope="module")
def whole(options):
    return train(options)


def test_a_run_of_two_phases_logs_scores_and_keeps_its_best(options, whole):
    logged = records(options.out)
    assert [record["step"] for record in logged] == list(range(1, 7))
    assert all(np.isfinite(value) for record in logged for value in record.values())
    scored = [record for record in logged if "heldout_bits_per_byte" in record]
    assert [record["step"] for record in scored] == [2, 4, 6]
    for name in ("index_recall.1", "index_recall.2", "pool_recall.2", "engram_gate.1", "engram_row_growth.1", "index_kl.1"):
        assert all(record[name] >= 0 for record in scored)
    assert all(record[name] <= 1.0001 for record in scored for name in record if "recall" in name or "pool_mass" in name)
    assert {"update_rms.muon", "sinkhorn_residual", "load_cv", "engram_lost"} <= set(logged[0])
    measured = json.loads((options.out / "metrics.jsonl").read_text().splitlines()[0])
    assert measured["memory_bytes"] > 2**20 and measured["tokens_per_second"] > 0
    assert [score.step for score in whole.scores] == [0, 2, 4, 6]
    best = min(whole.scores[1:], key=lambda score: score.bits_per_byte)
    assert Checkpoints(options.out / BEST, 1).steps() == [best.step]
    config = load_config(options.out)
    assert (config.rope_scaling.factor, config.rope_scaling.original_max_position_embeddings) == (2, 96)
    assert list((options.out / "profile").rglob("*.xplane.pb"))
    assert read_run(options.out).identity["starts"] == [0, 3]


@pytest.mark.pitfall("N11", "N8")
def test_resume_across_phases_gives_the_same_bits(options, whole, monkeypatch):
    """Ended in the first phase behind a checkpoint; what is drawn for tasks and prompts comes again too."""
    part, saved = replace(options, out=options.out.with_name("part"), profile=None), 2

    class Ended(Exception):
        pass

    def write(self, record, old=Log.write):
        old(self, record)
        if record["step"] == saved + 1:
            raise Ended

    with monkeypatch.context() as patch:
        patch.setattr(Log, "write", write)
        with pytest.raises(Ended):
            train(replace(part, checkpoint_every=saved))
    again = train(part)
    assert again.resumed_from == saved
    assert records(part.out) == records(options.out)
    chex.assert_trees_all_equal(whole.state, again.state)
    assert whole.scores == again.scores


def test_a_resume_with_phases_elsewhere_is_refused(options, whole):
    with pytest.raises(UserError, match=r"^steps: found other phases than in the run in .*, allowed are the 6 it began with$"):
        train(replace(options, steps=12))
    with pytest.raises(UserError, match="recipe: found 'toy', the run in"):
        train(replace(options, recipe="toy", qat_weights=("fp4",)))


def test_eval_scores_text_tasks_and_selections(options, whole, capsys):
    argv = ["eval", "--checkpoint", str(options.out), "--length", "192", "--rows", "3"]
    argv += ["--tasks", "copy", "--lengths", "96", "--depths", "0", "1", "--batch-size", "2", "--packed", "--dense"]
    assert cli.run([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # The last phase's model on the same text, in the cache's formats but with its masters and every visible entry.
    assert found["step"] == 6 and abs(found["bits_per_byte"] / whole.scores[-1].bits_per_byte - 1) < 0.05
    cells = {(row["task"], row["length"], row["depth"]): row["accuracy"] for row in found["tasks"]}
    assert set(cells) == {("copy", 96, depth) for depth in (0.0, 1.0)}
    assert all(0 <= accuracy <= 1 for accuracy in cells.values())
    assert found["inside"]["index_recall.1"] is None, "no query sees more than it may select"
    for wrong, says in (
        (("--depths", "2"), "--depths: found 2.0, allowed is 0 to 1"),
        (("--rows", "0"), "--rows: found 0"),
        (("--rows", str(2**31)), "--rows: found 2147483648, allowed is 1 to 2147483647; nearest is 2147483647"),
        (("--batch-size", str(10**30)), f"--batch-size: found {10**30}, allowed is 1 to 2147483647"),
        (("--batch-size", str(10**9)), r"--batch-size: found 1000000000, which does not fit: "),
        (("--seed", "-1"), "--seed: found -1, allowed is 0 to 4294967295; nearest is 0"),
        (("--seed", str(2**32)), "--seed: found 4294967296, allowed is 0 to 4294967295; nearest is 4294967295"),
        (("--tasks", "neddle"), "--tasks: found 'neddle', allowed are needle, recall, copy; did you mean 'needle'?"),
        (("--lengths", "12"), "--lengths: found 12, allowed is 40 to 2147483647 for tasks copy; nearest is 40"),
        (("--lengths", "96", str(10**8)), "--lengths: found 100000000, which does not fit: "),
        (("--length", "0"), "--length: found 0, allowed is a multiple of 2, 4 to 2147483646; nearest is 4"),
    ):
        assert cli.run([*argv, *wrong]) == 2
        assert says in capsys.readouterr().err


def test_text_costs_through_a_caches_bytes_what_the_score_of_quantised_forms_says(options, whole):
    """Nats of held-out text under the model trained for its stored forms: in whole rows, and behind FP4 and FP8 bytes."""
    model = load_model(options.out)
    config, fold = model.config, jnp.asarray(model.token_map, jnp.int32)
    stream = np.concatenate(encode_documents(model.tokenizer, whole.prepared.heldout_documents))
    ids = jnp.asarray(np.resize(stream, (2, 96)), jnp.int32)

    def nats(logits):
        return -float(jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids[:, 1:, None], axis=-1)))

    logits_of = jax.jit(lambda policy: forward(model.params, config, policy, ids, None, fold).logits, static_argnums=0)
    cache, live, through = init_cache(config, PACKED, 2, 96), jnp.ones((2, 48), bool), []
    step = jax.jit(lambda cache, chunk: extend(model.params, config, PACKED, cache, chunk, live, fold, every=True))
    for chunk in (ids[:, :48], ids[:, 48:]):
        logits, cache = step(cache, chunk)
        through.append(logits)
    assert all(source.main_kv.dtype == jnp.uint8 for source in cache.sources)
    found, quantised, plain = (nats(x) for x in (jnp.concatenate(through, axis=1), logits_of(PACKED), logits_of(Policy())))
    # The same values, added up in another order in float32; room for some code at a midpoint that moves by that.
    assert found == pytest.approx(quantised, rel=1e-4)
    assert quantised != plain and quantised == pytest.approx(plain, rel=5e-3)


def test_logs_of_other_packages_get_every_number(tmp_path, monkeypatch):
    board, runs = [], []

    class Writer:
        def __init__(self, folder):
            self.folder = folder

        def add_scalar(self, name, value, step):
            board.append((name, value, step))

        def close(self):
            board.append(self.folder)

    def init(**options):
        logged = []
        runs.append((options, logged))
        log = lambda values, step: logged.append((values, step))  # noqa: E731
        return SimpleNamespace(id=options["id"] or "abc", log=log, finish=lambda: logged.append("end"))

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for step in (1, 2):
        with Log(tmp_path, True, "mine", {"seed": 3}) as log:
            log.write({"step": step, "loss": 0.5, "note": "text"})
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert board == [("loss", 0.5, 1), str(tmp_path / "tensorboard"), ("loss", 0.5, 2), str(tmp_path / "tensorboard")]
    assert [options["id"] for options, _ in runs] == [None, "abc"], "a resume goes on with the same run"
    assert runs[1][1] == [({"loss": 0.5}, 2), "end"]


def test_operations_of_a_token():
    """By hand for a model of one expert's worth: six a weight, and twelve a head's channel for each key."""
    config = _tiny()
    slope = flops_per_token(config, 200) - flops_per_token(config, 100)
    # Window and selection are full at 100 tokens: what grows are the scores of two indexers, over half the row.
    assert slope == 2 * 6 * 16 * 32 * 100 / 2
    more = flops_per_token(configure(config, n_routed_experts=8), 100) - flops_per_token(config, 100)
    assert more == pytest.approx(6 * 3 * 4 * 32), "four more experts cost a token three layers of gate rows and nothing else"


def test_profiled_steps():
    assert list(profile_steps("20:23")) == [20, 21, 22] and not profile_steps(None)
