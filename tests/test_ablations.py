"""The comparison of variants: every variant is a model of its own kind, and batched seeds train as they would alone."""

import sys
from collections import Counter
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import tyro

from bench import ablations
from bench.ablations import PLAIN, VARIANTS, Options, chunk_size, table
from dsv41.config import preset
from dsv41.errors import UserError
from dsv41.numerics import Policy
from dsv41.params import count_parameters, map_specs, spec_leaves, text_specs
from dsv41.plan import layer_plans
from tests.models import tiny_config
from train.data import Prepared, TrainData
from train.optim import optimizer_report, warmup_hold_cosine
from train.packing import Packed
from train.step import init_state, make_train_step
from train.tokenizer import train_tokenizer

TOY = preset("toy")


def test_each_variant_takes_one_thing_away():
    families = {}
    for name, variant in VARIANTS.items():
        config = variant.model(TOY, 256)
        specs = map_specs(variant.owner, text_specs(config))
        families[name] = {family for family, row in optimizer_report(specs).items() if row["parameters"]}
        changed = config != TOY
        owned = any(variant.owner(spec) != spec for spec in spec_leaves(text_specs(TOY)))
        policies = (variant.trained, variant.late, variant.scored) != (PLAIN, None, PLAIN)
        assert changed + owned + policies == (name != "full") or variant.rate != 1, name
    assert families["full"] == {"muon", "sinkhorn", "adamw", "sign"} and families["adamw"] == {"adamw", "sign"}
    assert "frozen" in families["frozen-indexer"]
    dense = VARIANTS["dense"].model(TOY, 256)
    assert {plan.mode for plan in layer_plans(dense)} == {"swa"} and dense.sliding_window == 256
    # The same size: what selects and compresses is a small part of the toy.
    sizes = [count_parameters(text_specs(config)) for config in (dense, TOY)]
    assert 0.95 < sizes[0] / sizes[1] < 1


def test_seeds_in_a_batch_train_as_they_would_alone(tmp_path):
    """AdamW alone, whose first steps have the size of the rate; float32 in a batch of two: 1e-4 of a cross-entropy of 4."""
    config = tiny_config(
        num_hidden_layers=1,
        compress_ratios=(0,),
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=-1,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        dspark_target_layer_ids=(0,),
    )
    ids = np.random.default_rng(0).integers(3, 64, (9, 32)).astype(np.int32)
    rows, none = Packed(ids, np.ones_like(ids)), np.ones(64, np.int32)
    prepared = Prepared(train_tokenizer(["abc"], 300), none, [], [], rows, rows, 9 * 32, 9 * 32)
    options = Options(steps=5, seeds=2, batch_size=2, length=32, chunk=3, lr=1e-2, out=tmp_path / "t.md")
    fold = np.arange(64, dtype=np.int32)
    both = list(ablations.Group(("adamw", "adamw-low"), config, fold, prepared, options, chunk_size(5, 3)).train(5))
    result = both[0]
    assert [r.name for r in both] == ["adamw", "adamw-low"] and both[0].scores != both[1].scores
    assert np.shape(result.losses) == (5, 2) and len(result.scores) == 2

    specs = map_specs(VARIANTS["adamw"].owner, text_specs(config))
    step, rates = make_train_step(config, Policy(), fold, specs=specs), warmup_hold_cosine(5, 1e-2)
    for seed in range(2):
        state, stream = init_state(config, seed, specs=specs), TrainData(rows, 2, seed)
        metrics = {}
        for n in range(5):
            state, metrics = step(state, stream.batch(n), jnp.float32(rates(n)))
        assert abs(float(metrics["ce"]) - result.losses[-1][seed]) < 1e-4 * 4
    assert result.losses[-1][0] != result.losses[-1][1]
    lines = table([replace(result, name="full"), result], options).splitlines()
    assert lines[3].startswith("python -m bench.ablations --steps 5 --seeds 2") and len(lines) == 10
    assert "+0.0000" in lines[-1]


def test_variants_with_the_same_passes_are_one_program():
    groups = Counter(variant.passes for variant in VARIANTS.values())
    alone = {name for name, variant in VARIANTS.items() if groups[variant.passes] == 1}
    assert alone == {"no-engram", "dense", "unshifted-mhc"}
    assert VARIANTS["pool-at-inference"].passes == VARIANTS["no-pool"].passes != VARIANTS["full"].passes
    assert [chunk_size(steps, 25) for steps in (2000, 600, 105, 7)] == [25, 24, 21, 1]


@pytest.mark.parametrize("failing", [None, 1])
def test_workers_share_out_the_variants(tmp_path, monkeypatch, capsys, failing):
    seen = []

    class Worker:
        def __init__(self, command, env):
            assert command[:3] == [sys.executable, "-m", "bench.ablations"] and env["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
            options = tyro.cli(Options, args=command[3:])
            self.code = int(len(seen) == failing)
            seen.append(options)
            if not self.code:
                ablations._write([ablations.Result(name, 1, [float(len(name))], [], 0.0) for name in options.variants], options)

        def wait(self):
            return self.code

    monkeypatch.setattr(ablations.subprocess, "Popen", Worker)
    names = ("full", "dense", "fp4-post-hoc", "no-engram")
    options = Options(variants=names, workers=2, steps=7, out=tmp_path / "t.md", data=("a", "b"))
    if failing is None:
        ablations.main(options)
    else:
        with pytest.raises(UserError, match="1 of 2 ended with an error"):
            ablations.main(options)
    assert [worker.variants for worker in seen] == [("full", "fp4-post-hoc", "no-engram"), ("dense",)]
    assert {(worker.steps, worker.data, worker.workers) for worker in seen} == {(7, ("a", "b"), 1)}
    rows = [line.split()[1] for line in (tmp_path / "t.md").read_text().splitlines()[8:]]
    assert rows == [name for name in ("full", "fp4-post-hoc", "dense", "no-engram") if failing is None or name != "dense"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "t.md"]
    assert f"| {'full'} |" in capsys.readouterr().out or failing


def test_an_unknown_variant_is_refused():
    with pytest.raises(UserError, match=r"variants: found 'ful', allowed are full, .*; did you mean 'full'"):
        ablations.main(Options(variants=("ful",)))
