"""Recipes: which mechanism is on in which part of a run, as data (training §0, §3, §5, §6).

A recipe is a few `Phase` rows and the options it suggests; `stages` lays its phases over the steps of a run.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax.numpy as jnp

from dsv41.config import ModelConfig, RopeScaling
from dsv41.config import replace as configure
from dsv41.errors import UserError, nearest
from dsv41.numerics import Policy
from dsv41.params import Stored
from train.metrics import check_logs, profile_steps
from train.packing import check_length
from train.step import StepOptions
from train.synthetic import TASKS, least_length

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
Replay = Literal["off", "mask", "gather"]


@dataclass(frozen=True)
class Phase:
    """A part of a run.

    share: of its steps. stretch: rows are so many times as long as the first phase's, and so many times fewer. yarn: RoPE
    is scaled for the longest phase. pool: Reindex layers select within the candidate pool. replay: decoder replay is
    simulated, by masks or by gathering. cache: main KV, index keys and window are trained in the cache's formats, and
    weights in those that the options name.
    """

    name: str
    share: float
    stretch: int = 1
    yarn: bool = True
    pool: bool = True
    replay: Replay = "off"
    cache: bool = False


@dataclass(frozen=True)
class Recipe:
    """phases: their shares add up to 1. suggests: values of options that the user did not give."""

    phases: tuple[Phase, ...]
    suggests: dict[str, Any] = field(default_factory=dict)


DRAFTER = "dspark"  # no phases: `train.drafter_run`
_SMALL = {"preset": "small", "steps": 20_000, "batch_size": 64, "length": 1024, "lr": 4e-3, "dtype": "bfloat16", "remat": "block"}
RECIPES = {
    "toy": Recipe((Phase("whole", 1.0),)),
    "small": Recipe(
        # The pool is trained at the end alone, as the release did.
        (Phase("pretrain", 0.9, pool=False), Phase("pool", 0.1)),
        _SMALL,
    ),
    # The release went from 64K to 1M at 34 of 45T tokens. That YaRN came with it is not said; its numbers say so.
    "long": Recipe(
        (Phase("short", 34 / 45, yarn=False, pool=False), Phase("long", 11 / 45, stretch=16)),
        {"steps": 2000, "batch_size": 32},
    ),
    "qat": Recipe(
        (Phase("pretrain", 0.8, pool=False), Phase("post-train", 0.2, replay="mask", cache=True)),
        {"steps": 2000},
    ),
}


@dataclass(frozen=True)
class Stage:
    """A phase of one run: steps ``first`` to ``last - 1`` on ``rows`` rows of ``length`` tokens, and all that is static."""

    name: str
    first: int
    last: int
    rows: int
    length: int
    config: ModelConfig
    policy: Policy
    step: StepOptions


def recipe(name: str) -> Recipe:
    """A named recipe; raises `UserError` with the nearest name."""
    if name not in RECIPES:
        allowed = (*RECIPES, DRAFTER)
        raise UserError(f"recipe: found {name!r}, allowed are {', '.join(allowed)}{nearest(name, allowed)}")
    return RECIPES[name]


def run_config(options: Any, config: ModelConfig) -> ModelConfig:
    """``config`` with the rotary scaling of the recipe: from the first phase's rows to its longest ones (training §3.2)."""
    stretch = max(phase.stretch for phase in recipe(options.recipe).phases)
    if stretch == 1:
        return config
    scaling = replace(config.rope_scaling, factor=stretch, original_max_position_embeddings=options.length)
    return configure(
        config, rope_scaling=scaling, max_position_embeddings=max(config.max_position_embeddings, options.length * stretch)
    )


def stages(options: Any, config: ModelConfig, total: int) -> tuple[Stage, ...]:
    """The stages of a run of ``total`` steps, those without a step left out; 0 while it is unknown, for a single phase.

    config: of the whole run, as `run_config` gives it. Raises `UserError` for options that do not suit the recipe.
    """
    phases = recipe(options.recipe).phases
    if not total and len(phases) > 1:
        raise UserError(f"steps: found 0, allowed is 1 or more for recipe {options.recipe!r}, whose phases are parts of them")
    made, share, first = [], 0.0, 0
    for phase in phases:
        share += phase.share
        last = round(share * total) if total else 2**31 - 1
        if last > first:
            made.append(_stage(options, config, phase, first, last))
        first = max(first, last)
    return tuple(made)


def _stage(options: Any, config: ModelConfig, phase: Phase, first: int, last: int) -> Stage:
    if not phase.yarn:
        scaling: RopeScaling = replace(config.rope_scaling, factor=1)
        config = configure(config, rope_scaling=scaling)
    rows = options.batch_size // phase.stretch
    if not rows:
        raise UserError(
            f"batch_size: found {options.batch_size}, allowed is {phase.stretch} or more for recipe {options.recipe!r}, one phase"
            f" of which has rows {phase.stretch} times as long; nearest is {phase.stretch}"
        )
    policy = Policy(
        DTYPES[options.dtype],
        quantize_main_kv=phase.cache,
        quantize_index=phase.cache,
        quantize_window=phase.cache,
        candidate_pool=phase.pool,
        index_teacher=options.index_teacher,
        remat=options.remat,
    )
    weights: tuple[Stored, ...] = tuple(options.qat_weights) if phase.cache else ()
    step = StepOptions(math.gcd(options.accumulate, rows), weights, options.engram_rows, options.z_loss, phase.replay)
    return Stage(phase.name, first, last, rows, options.length * phase.stretch, config, policy, step)


def check_recipe(options: Any, config: ModelConfig) -> ModelConfig:
    """`run_config`; raises `UserError` for whatever does not suit the recipe, before anything is read."""
    for name, allowed in (("dtype", tuple(DTYPES)), ("remat", _REMATS), ("index_teacher", _TEACHERS)):
        if (value := getattr(options, name)) not in allowed:
            raise UserError(f"{name}: found {value!r}, allowed are {', '.join(allowed)}{nearest(value, allowed)}")
    for form in options.qat_weights:
        if form not in _FORMS:
            raise UserError(f"qat_weights: found {form!r}, allowed are {', '.join(_FORMS)}{nearest(form, _FORMS)}")
    if options.engram_rows < 0:
        raise UserError(f"engram_rows: found {options.engram_rows}, allowed is 0 or more; nearest is 0")
    if not 0 <= options.z_loss < math.inf:
        raise UserError(f"z_loss: found {options.z_loss}, allowed is a finite number, 0 or more; nearest is 0")
    if not 0 <= options.synthetic <= 1:
        raise UserError(f"synthetic: found {options.synthetic}, allowed is 0 to 1")
    if options.synthetic:
        check_length(options.length, config.document_alignment, max(map(least_length, TASKS)), "for synthetic rows")
    if options.eval_every < 0:
        raise UserError(f"eval_every: found {options.eval_every}, allowed is 0 or more; nearest is 0")
    profile_steps(options.profile)
    check_logs(options.tensorboard, options.wandb)
    config = run_config(options, config)
    stages(options, config, options.steps)
    return config


_REMATS = ("none", "attention", "block")
_TEACHERS = ("own", "served")
_FORMS = ("fp4", "fp8", "fp8_rows")
