"""The drafter's weights among the tensors that a run folder carries by their released names (architecture §14)."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.config import ModelConfig
from dsv41.errors import UserError
from dsv41.hf.names import tile
from dsv41.hf.stored import decode
from dsv41.params import DraftParams, ParamSpec, draft_specs, map_specs, spec_leaves

CARRIED = "carried"  # a checkpoint's item


def has_draft(names: Iterable[str]) -> bool:
    """Whether some of a run's carried tensors are a drafter's."""
    return any(name.startswith("mtp.") for name in names)


def from_carried(config: ModelConfig, carried: dict[str, Any]) -> DraftParams:
    """float32 masters of carried tensors, as released or unquantised; `UserError` where one is missing."""

    def one(spec: ParamSpec, name: str) -> np.ndarray:
        weight, scale = carried.get(name), carried.get(name.removesuffix("weight") + "scale")
        if weight is None:
            raise UserError(f"draft: found no {name!r} among the carried tensors, allowed are all that config.json declares")
        if scale is None:
            return np.asarray(weight).astype(np.float32)
        return decode(np.asarray(weight).view(np.uint8), np.asarray(scale).view(np.uint8), spec.stored, tile(config))

    def leaf(spec: ParamSpec) -> Any:
        if not spec.stacked:
            return jnp.asarray(one(spec, spec.key))
        return jnp.asarray(np.stack([one(spec, spec.key.format(expert=n)) for n in range(spec.shape[0])]))

    return map_specs(leaf, draft_specs(config))


def to_carried(config: ModelConfig, draft: DraftParams) -> dict[str, np.ndarray]:
    """The drafter's float32 weights by their released names, one tensor an expert."""
    found: dict[str, np.ndarray] = {}
    for spec, leaf in zip(spec_leaves(draft_specs(config)), jax.tree.leaves(draft), strict=True):
        array = np.asarray(leaf)
        names = [spec.key.format(expert=n) for n in range(spec.shape[0] if spec.stacked else 1)]
        found.update(zip(names, array if spec.stacked else [array], strict=True))
    return found
