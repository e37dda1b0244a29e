"""Recipes: their phases over the steps of a run, and whatever does not suit them."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from dsv41 import cli
from dsv41.config import PRESETS, preset
from dsv41.errors import UserError
from dsv41.params import count_parameters, text_specs
from dsv41.rope import layer_frequencies
from train.options import TrainOptions, check_options
from train.recipes import RECIPES, check_recipe, stages
from train.stage import origin

TOY = preset("toy")


def plan(total: int = 100, **options):
    options = replace(TrainOptions(steps=total), **options)
    return stages(options, check_recipe(options, TOY), total)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("total", [1, 2, 3, 7, 100, 12345])
def test_phases_share_all_steps_without_gap_or_overlap(name, total):
    assert sum(phase.share for phase in RECIPES[name].phases) == pytest.approx(1)
    found = plan(total, recipe=name, batch_size=32)
    assert [stage.first for stage in found] == [0, *(stage.last for stage in found[:-1])] and found[-1].last == total
    assert all(stage.last > stage.first for stage in found)


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_recipe_suggests_are_options_that_it_can_be_run_with(name):
    suggested = RECIPES[name].suggests
    options = TrainOptions(**{**suggested, "recipe": name})
    assert options.preset in PRESETS
    check_recipe(options, PRESETS[options.preset]())


def test_long_rows_come_with_scaled_rotation_at_equal_tokens():
    short, long = plan(recipe="long", length=64, batch_size=32)
    assert (short.first, short.last, long.last) == (0, 76, 100)
    assert (short.rows, short.length, long.rows, long.length) == (32, 64, 2, 1024)
    assert (long.config.rope_scaling.factor, long.config.rope_scaling.original_max_position_embeddings) == (16, 64)
    assert short.config.rope_scaling.factor == 1
    plain, scaled = (layer_frequencies(stage.config, 1) for stage in (short, long))
    # The slowest rotation is slowed by the whole factor, the fastest not at all.
    assert scaled[-1] == pytest.approx(plain[-1] / 16) and scaled[0] == plain[0]
    assert long.config.max_position_embeddings >= 1024
    assert origin((short, long)) == 76, "rows of another length are another stream"


def test_quantisation_pool_and_replay_come_at_the_end():
    pre, post = plan(recipe="qat", qat_weights=("fp4", "fp8"))
    assert (pre.first, pre.last, post.last) == (0, 80, 100)
    assert not (pre.policy.quantize_main_kv or pre.policy.candidate_pool or pre.step.weights) and pre.step.replay == "off"
    assert post.policy.quantize_main_kv and post.policy.quantize_index and post.policy.quantize_window
    assert post.policy.candidate_pool and post.step.weights == ("fp4", "fp8") and post.step.replay == "mask"
    assert origin((pre, post)) == 0, "the same rows go on where they were"


def test_options_reach_every_stage():
    (stage,) = plan(
        dtype="bfloat16", remat="block", index_teacher="served", accumulate=2, z_loss=1e-4, engram_rows=7, qat_weights=("fp4",)
    )
    assert (stage.policy.compute_dtype, stage.policy.remat, stage.policy.index_teacher) == (jnp.bfloat16, "block", "served")
    assert (stage.step.accumulate, stage.step.z_weight, stage.step.active_rows, stage.step.weights) == (2, 1e-4, 7, ())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"recipe": "smal"}, "recipe: found 'smal', allowed are toy, small, long, qat, dspark; did you mean 'small'"),
        ({"recipe": "qat", "steps": 0, "max_seconds": 9.0}, "steps: found 0, allowed is 1 or more for recipe 'qat'"),
        ({"recipe": "long"}, "batch_size: found 4, allowed is 16 or more for recipe 'long'.* nearest is 16"),
        ({"dtype": "bfloat"}, "dtype: found 'bfloat', allowed are float32, bfloat16; did you mean 'bfloat16'"),
        ({"remat": "blocks"}, "remat: found 'blocks', .* did you mean 'block'"),
        ({"index_teacher": "mine"}, "index_teacher: found 'mine', allowed are own, served"),
        ({"qat_weights": ("fp4", "fp16")}, "qat_weights: found 'fp16', allowed are fp4, fp8, fp8_rows"),
        ({"z_loss": float("nan")}, "z_loss: found nan"),
        ({"engram_rows": -1}, "engram_rows: found -1"),
        ({"synthetic": 1.5}, "synthetic: found 1.5, allowed is 0 to 1"),
        ({"synthetic": 0.5, "length": 64}, "length: found 64, allowed is a multiple of 16, 96 to 2147483632 for synthetic rows"),
        ({"eval_every": -5}, "eval_every: found -5"),
        ({"profile": "20-23"}, "profile: found '20-23', allowed is FIRST:LAST"),
        ({"profile": "23:20"}, "profile: found '23:20'"),
        ({"tensorboard": True}, "tensorboard: found no package tensorboardX, allowed where it is installed; pip install"),
        ({"wandb": "mine"}, "wandb: found no package wandb"),
    ],
)
def test_what_does_not_suit_is_said_before_anything_is_read(change, says, monkeypatch, tmp_path):
    for name in ("tensorboardX", "wandb"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(UserError, match=says):
        check_options(replace(TrainOptions(out=tmp_path / "run"), **change))
    assert not list(tmp_path.iterdir())


def test_the_command_line_takes_a_recipes_suggestions_and_the_users_own_values(monkeypatch):
    seen = []
    monkeypatch.setattr("train.loop.finished", lambda options: seen.append(options) or (1, None))
    assert cli.run(["train", "--recipe", "small", "--steps", "1000"]) == 0
    assert cli.run(["train"]) == 0
    small, plain = seen
    assert (small.preset, small.steps, small.dtype, small.remat) == ("small", 1000, "bfloat16", "block")
    assert plain == TrainOptions()


def test_the_small_preset_is_one_gpus():
    assert 100e6 < count_parameters(text_specs(preset("small"))) < 200e6
