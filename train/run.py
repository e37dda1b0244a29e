"""``run.json`` in a run's folder: all that decides its numbers, its number of steps, and its scores so far."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from dsv41.config import ModelConfig, from_released, replace, to_released
from dsv41.errors import UserError
from dsv41.files import read_json, to_json, write_text
from train.checkpoint import Checkpoints
from train.corpus import STDLIB
from train.curve import Score
from train.data import Prepared
from train.options import CHECKPOINTS, MOST, TrainOptions
from train.recipes import recipe

NAME = "run.json"
_PLAIN = ("batch_size", "length", "lr", "seed", "accumulate", "recipe", "dtype", "remat", "index_teacher")
_PLAIN += ("qat_weights", "z_loss", "engram_rows", "synthetic")
_SOURCES = ("preset", "config", "data")
# Options that a run remembers: a resume that names none of them has them again.
OWN = (*_PLAIN, *_SOURCES, "steps")


@dataclass(frozen=True)
class Run:
    """identity: what a resume needs unchanged, as JSON. total: its steps, 0 while that is not known.

    sources: where its config and its text came from, which may be elsewhere in a resume.
    """

    identity: dict[str, Any]
    total: int
    scores: tuple[Score, ...] = ()
    sources: dict[str, Any] = field(default_factory=dict)


def identity(options: TrainOptions, config: ModelConfig, prepared: Prepared, starts: Sequence[int]) -> dict[str, Any]:
    """Whatever decides a run's numbers, as JSON: a resume needs all of it unchanged. starts: first steps of its phases."""
    digest = hashlib.sha256()
    for array in (*prepared.train, *prepared.heldout):
        digest.update(np.ascontiguousarray(array).tobytes())
    # The data ahead of the config, whose vocabulary is theirs.
    known = {"data": digest.hexdigest(), "config": to_released(config)}
    return {**known, "starts": list(starts), **_plain(options)}


def sources(options: TrainOptions) -> dict[str, Any]:
    """`Run.sources`: preset or config, and data, paths from the root."""
    whole = lambda path: str(Path(path).expanduser().absolute())  # noqa: E731
    model = {"preset": options.preset} if options.config is None else {"config": whole(options.config)}
    return {**model, "data": [entry if entry == STDLIB else whole(entry) for entry in options.data]}


def _plain(options: TrainOptions) -> dict[str, Any]:
    return json.loads(json.dumps({name: getattr(options, name) for name in _PLAIN}))


_DEFAULTS = {**_plain(TrainOptions()), "starts": [0]}


def write_run(out: Path, run: Run) -> None:
    """Writes ``run`` into its folder."""
    write_text(out / NAME, to_json({**run.identity, "total": run.total, "scores": run.scores, "sources": run.sources}) + "\n")


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
    kept = {name: value for name, value in values.items() if name not in ("total", "scores", "sources")}
    return Run(kept, values["total"], tuple(Score(*score) for score in values.get("scores", [])), values.get("sources", {}))


def _is_run(values: Any) -> TypeGuard[dict[str, Any]]:
    if not isinstance(values, dict) or not _is_count(values.get("total")) or not _are_sources(values.get("sources", {})):
        return False
    scores = values.get("scores", [])
    return isinstance(scores, list) and all(map(_is_score, scores))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST


def _is_score(score: Any) -> bool:
    if not isinstance(score, list) or [*map(type, score)] != [int, float, int, int]:
        return False
    step, nats, tokens, count = score
    return _is_count(step) and math.isfinite(nats) and min(nats, tokens, count) >= 0


def _are_sources(values: Any) -> bool:
    if not isinstance(values, dict) or not values.keys() <= {*_SOURCES}:
        return False
    data = values.get("data", [])
    named = [values[name] for name in ("preset", "config") if name in values]
    return isinstance(data, list) and all(isinstance(text, str) for text in (*named, *data))


def completed(given: dict[str, Any]) -> TrainOptions:
    """The options that a user gave, and for the others those of the run in ``out``, else what the recipe suggests.

    Raises `UserError` for an unknown recipe, preset beside config, and a damaged run.
    """
    if "preset" in given and "config" in given:
        raise UserError(f"config: found beside preset={given['preset']}, allowed is one of them")
    out = given.get("out", TrainOptions.out)
    begun = (out / CHECKPOINTS).is_dir() and Checkpoints(out / CHECKPOINTS).latest() is not None
    own = _own_options(read_run(out)) if begun else {}
    if "preset" in given or "config" in given:
        own = {name: value for name, value in own.items() if name not in ("preset", "config")}
    if "config" in own and not own["config"].exists():
        raise UserError(f"config: found nothing at {str(own['config'])!r}, which the run began with, allowed is where it is now")
    chosen = {**own, **given}
    return TrainOptions(**{**recipe(chosen.get("recipe", TrainOptions.recipe)).suggests, **chosen})


def _own_options(run: Run) -> dict[str, Any]:
    """The values of `OWN` that ``run`` was begun with, as `TrainOptions` takes them; what it does not say is left out."""
    found: dict[str, Any] = {"steps": run.total} if run.total else {}
    for name in _PLAIN:
        value, default = run.identity.get(name), getattr(TrainOptions, name)
        value = tuple(value) if isinstance(value, list) else value
        if type(value) is type(default):
            found[name] = value
    for name, value in run.sources.items():
        found[name] = {"config": Path, "data": tuple}.get(name, str)(value)
    return found


def own_data(out: Path) -> tuple[str, ...]:
    """The data of the run in ``out``; the standard library's where it does not say, or was not trained here."""
    sources = read_run(out).sources if (out / NAME).exists() else {}
    return tuple(sources.get("data", TrainOptions.data))


def check_same(run: Run, wanted: dict[str, Any], out: Path, model: str = "config") -> None:
    """Raises `UserError`, of everything at once, where ``wanted`` is not the run's. model: the option that names the config."""
    # A run of a version without the option had its default.
    old = {name: run.identity.get(name, _DEFAULTS.get(name)) for name in wanted}
    names = [name for name, value in wanted.items() if value != old[name]]
    if names == ["starts"]:
        raise UserError(f"steps: found other phases than in the run in {str(out)!r}, allowed are the {run.total} it began with")
    first, *more = [name for name in names if name != "starts"] or [None]
    if first is None:
        return
    labels = {"config": model, "data": "data"}
    if first in labels:
        say = f"found another {'text' if first == 'data' else 'config'} than that of the run in {str(out)!r}"
    else:
        say = f"found {wanted[first]!r}, the run in {str(out)!r} has {old[first]!r}"
    for name in more:
        say += (
            f", another {labels[name]}" if name in labels else f", {name}={_spell(wanted[name])} where it has {_spell(old[name])}"
        )
    raise UserError(f"{labels.get(first, first)}: {say}; resume with the same, or name another folder to write")


def _spell(value: Any) -> str:
    return (" ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def check_options_same(run: Run, options: TrainOptions, config: ModelConfig) -> None:
    """`check_same` for what is known before the data are read: all but them and the vocabulary they give."""
    try:
        old = from_released(run.identity.get("config"))
        config = replace(config, vocab_size=old.vocab_size, engram_compressed_vocab_size=old.engram_compressed_vocab_size)
    except UserError:
        old = None
    changed = {} if config == old else {"config": to_released(config)}
    check_same(run, {**_plain(options), **changed}, options.out, model_option(options))


def model_option(options: TrainOptions) -> str:
    """The option that names the model."""
    return "preset" if options.config is None else "config"
