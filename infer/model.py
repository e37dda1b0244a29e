"""A trained run's folder, opened for inference."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tokenizers import Tokenizer

from dsv41.config import ModelConfig, load_config
from dsv41.errors import UserError
from dsv41.hf.draft import CARRIED, from_carried, has_draft
from dsv41.params import abstract_params, text_specs
from dsv41.sharding import ROWS, Sizes, check_mesh, make_mesh, mesh_sizes, parse_mesh, row_parts, shardings
from dsv41.tokenmap import token_map
from infer.sampling import check_text
from train.checkpoint import Checkpoints
from train.layout import from_stored, stored_target
from train.tokenizer import foreign_tokenizer, tokenizer_from_json


@dataclass(frozen=True)
class Model:
    """A restored run: weights, config, tokenizer and its folding map int32 ``[V]``; fingerprint: of the weights, where known.

    mesh: where the weights lie, each computed with in place: cut by heads, experts, vocabulary and a table's rows alone.
    draft: the drafter's `dsv41.params.DraftParams`, where it was asked for.
    """

    params: Any
    config: ModelConfig
    tokenizer: Tokenizer
    token_map: np.ndarray
    step: int
    fingerprint: bytes = b""
    mesh: Mesh | None = None
    draft: Any = None

    @property
    def row_parts(self) -> int:
        """Parts that a batch's rows are cut into."""
        return 1 if self.mesh is None else row_parts(mesh_sizes(self.mesh))

    @property
    def rows(self) -> NamedSharding | None:
        """Where a batch's rows lie on the mesh."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec(ROWS))

    def encode(self, text: str, name: str = "prompt") -> list[int]:
        """BOS and the text's ids; raises `UserError`, which calls the text ``name``, for one that cannot be continued."""
        check_text(text, name)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if not ids:
            raise UserError(f"{name}: found {text[:40]!r}, allowed is text of at least one token")
        return [self.config.bos_token_id, *ids]


def model_digest(model: Model) -> bytes:
    """SHA-256 of what a model computes with beside its config: equal weights and folding maps have equal ones."""
    found = hashlib.sha256(np.asarray(model.token_map, "<i4").tobytes())
    if model.fingerprint:
        found.update(model.fingerprint)
    else:
        for leaf in jax.tree.leaves(model.params):
            found.update(np.asarray(leaf).tobytes())
    return found.digest()


def load_model(run: Path, mesh: str | None = None) -> Model:
    """The newest checkpoint in the folder of a run, weights only; raises `UserError` when there is none.

    mesh: devices by axis, as `dsv41.sharding.parse_mesh` reads it, in place of one device; `UserError` where the model or this
    machine cannot have it.
    """
    checkpoint_folder = run / "checkpoints"
    latest = Checkpoints(checkpoint_folder, 1).latest() if checkpoint_folder.is_dir() else None
    if latest is None:
        raise UserError(f"checkpoint: found no checkpoint in {str(run)!r}, allowed is a folder that dsv41 train or convert wrote")
    config = load_config(run)
    on = None if mesh is None else _make_mesh(mesh, config)
    file = run / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            f"checkpoint: found no {file.name} in {str(run)!r}, allowed is a folder with the tokenizer of its weights;"
            f" put the {file.name} that was released with them there"
        )
    try:
        # A folder that dsv41 convert made has no run.json, and the tokenizer of its source.
        read = tokenizer_from_json if (run / "run.json").exists() else foreign_tokenizer
        tokenizer = read(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"checkpoint: cannot read {str(file)!r} ({reason})") from error
    fold, _ = token_map(tokenizer, config.engram_compressed_vocab_size)
    fingerprint = Checkpoints(checkpoint_folder, 1).fingerprint(latest)
    return Model(_restore(checkpoint_folder, latest, config, on), config, tokenizer, fold, latest, fingerprint, on)


def with_drafter(model: Model, run: Path) -> Model:
    """A model of `load_model` with the drafter beside it; `UserError` where its run has none, and on a mesh."""
    if model.mesh is not None:
        raise UserError("draft: found a drafter on a mesh, allowed is 'off'")
    checkpoints = Checkpoints(run / "checkpoints", 1)
    if not has_draft(checkpoints.described(model.step).get(CARRIED, {})):
        raise UserError(
            f"draft: found no drafter in {str(run)!r}, allowed is a folder with one: of dsv41 train --recipe dspark, or of"
            " dsv41 convert from weights with draft stages; nearest is 'off'"
        )
    return replace(model, draft=from_carried(model.config, checkpoints.restore_extra(model.step, CARRIED)))


def _make_mesh(text: str, config: ModelConfig) -> Mesh:
    sizes = parse_mesh(text)
    check_decoding_mesh(sizes, config)
    return make_mesh(sizes)


def check_decoding_mesh(sizes: Sizes, config: ModelConfig) -> None:
    """Raises `UserError` for a mesh that the model cannot be decoded on."""
    check_mesh(config, sizes)
    if sizes["context"] > 1:
        raise UserError(f"mesh: found 'context={sizes['context']}', allowed behind a cache is 'context=1'")


def place_params(params: Any, config: ModelConfig, mesh: Mesh) -> Any:
    """Weights as a checkpoint holds them, laid out for `Model.mesh`."""
    specs = text_specs(config)
    return jax.device_put(from_stored(params, specs, mesh), shardings(specs, mesh, stored=()))


def weight_parts(config: ModelConfig, mesh: Mesh) -> Any:
    """How `Model.mesh` cuts each weight, a tree of `PartitionSpec`."""
    return jax.tree.map(lambda s: s.spec, shardings(text_specs(config), mesh, stored=()))


def _restore(folder: Path, step: int, config: ModelConfig, mesh: Mesh | None) -> Any:
    if mesh is not None:
        found = Checkpoints(folder, 1).restore_params(step, stored_target(text_specs(config), mesh))
        return place_params(found, config, mesh)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), abstract_params(text_specs(config))
    )
    return Checkpoints(folder, 1).restore_params(step, abstract)
