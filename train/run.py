"""``run.json`` in a run's folder: all that decides its numbers, its number of steps, and its scores so far."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from dsv41.config import ModelConfig, from_released, replace, to_released
from dsv41.errors import UserError
from dsv41.files import read_json, write_text
from train.curve import Score
from train.data import Prepared
from train.options import TrainOptions

NAME = "run.json"
_PLAIN = ("batch_size", "length", "lr", "seed", "accumulate", "recipe", "dtype", "remat", "index_teacher")
_PLAIN += ("qat_weights", "z_loss", "engram_rows", "synthetic")


@dataclass(frozen=True)
class Run:
    """identity: what a resume needs unchanged, as JSON. total: its steps, 0 while that is not known."""

    identity: dict[str, Any]
    total: int
    scores: tuple[Score, ...] = ()


def identity(options: TrainOptions, config: ModelConfig, prepared: Prepared, starts: Sequence[int]) -> dict[str, Any]:
    """Whatever decides a run's numbers, as JSON: a resume needs all of it unchanged. starts: first steps of its phases."""
    digest = hashlib.sha256()
    for array in (*prepared.train, *prepared.heldout):
        digest.update(np.ascontiguousarray(array).tobytes())
    # The data ahead of the config, whose vocabulary is theirs.
    known = {"data": digest.hexdigest(), "config": to_released(config)}
    return {**known, "starts": list(starts), **_plain(options)}


def _plain(options: TrainOptions) -> dict[str, Any]:
    return json.loads(json.dumps({name: getattr(options, name) for name in _PLAIN}))


_DEFAULTS = {**_plain(TrainOptions()), "starts": [0]}


def write_run(out: Path, run: Run) -> None:
    """Writes ``run`` into its folder."""
    write_text(out / NAME, json.dumps({**run.identity, "total": run.total, "scores": run.scores}) + "\n")


def read_run(out: Path) -> Run:
    """Reads a folder's run; raises `UserError` where there is none, or a damaged one."""
    if not (out / NAME).exists():
        raise UserError(f"out: {str(out)!r} holds checkpoints but no {NAME}, allowed is a new folder")
    try:
        values = read_json(out / NAME)
    except UserError:
        values = None
    if not _is_run(values):
        raise UserError(f"out: {str(out / NAME)!r} is damaged, allowed is a new folder")
    kept = {name: value for name, value in values.items() if name not in ("total", "scores")}
    return Run(kept, values["total"], tuple(Score(*score) for score in values.get("scores", [])))


def _is_run(values: Any) -> TypeGuard[dict[str, Any]]:
    if not isinstance(values, dict) or type(values.get("total")) is not int:
        return False
    scores = values.get("scores", [])
    return isinstance(scores, list) and all(
        isinstance(score, list) and [*map(type, score)] == [int, float, int, int] for score in scores
    )


def check_same(run: Run, wanted: dict[str, Any], out: Path) -> None:
    """Raises `UserError` where ``wanted`` is not the run's."""
    for name, value in wanted.items():
        # A run of a version without the option had its default.
        old = run.identity.get(name, _DEFAULTS.get(name))
        if old == value:
            continue
        if name == "starts":
            raise UserError(
                f"steps: found other phases than in the run in {str(out)!r}, allowed are the steps that it began with"
            )
        say = f"found {value!r}, the run in {str(out)!r} has {old!r}"
        if name in ("config", "data"):
            say = f"found another {'text' if name == 'data' else name} than that of the run in {str(out)!r}"
        raise UserError(f"{name}: {say}; resume with the same, or name another folder to write")


def check_options_same(run: Run, options: TrainOptions, config: ModelConfig) -> None:
    """`check_same` for what is known before the data are read: all but them and the vocabulary they give."""
    check_same(run, _plain(options), options.out)
    try:
        old = from_released(run.identity.get("config"))
        config = replace(config, vocab_size=old.vocab_size, engram_compressed_vocab_size=old.engram_compressed_vocab_size)
    except UserError:
        old = None
    if config != old:
        check_same(run, {"config": to_released(config)}, options.out)
