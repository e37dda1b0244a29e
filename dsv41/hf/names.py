"""The key table of the released checkpoint: every tensor's name, stored form and place in the parameters (architecture §14).

Derived from `ParamSpec` alone. The specs of the text model and of the draft stages (``mtp.*``) are those of `dsv41.params`; the
vision tower with its aligner and the three image vectors are declared here, so that their tensors can be carried through
before their modules exist.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import jax

from dsv41.config import ModelConfig, QuantizationConfig
from dsv41.params import ParamSpec, ReleasedTensor, draft_specs, spec_leaves, text_specs

Part = Literal["text", "draft", "vision"]
PARTS: tuple[Part, ...] = ("text", "draft", "vision")
# Stored with E8M0 scales, each in a tensor of its own.
QUANTIZED = ("fp8", "fp4", "fp8_rows")


@dataclass(frozen=True)
class Slot:
    """Where one released weight belongs.

    path: the dotted path of its leaf in `TextParams`, or its released name outside the text model. expert: its place on
    the leaf's leading axis, None where the leaf is no stack. weight, scale: as the release stores it, scale None where
    it has none.
    """

    part: Part
    path: str
    spec: ParamSpec
    expert: int | None
    weight: ReleasedTensor
    scale: ReleasedTensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's own shape, unpacked and without the expert axis."""
        return self.spec.shape[1:] if self.spec.stacked else self.spec.shape

    @property
    def tensors(self) -> tuple[ReleasedTensor, ...]:
        return (self.weight,) if self.scale is None else (self.weight, self.scale)


def tile(config: ModelConfig) -> tuple[int, int]:
    """Rows and columns that share one scale of an FP8 weight: (32, 32) in the release, (128, 128) in V4 (§8.4)."""
    rows, columns = (config.quantization_config or QuantizationConfig()).weight_block_size
    return rows, columns


def _matrix(shape: tuple[int, ...], key: str, *axes: str | None) -> ParamSpec:
    return ParamSpec(shape, axes, key, "bf16", "muon")


def _vector(size: int, key: str, init: Literal["ones", "zeros", "normal"] = "ones") -> ParamSpec:
    return ParamSpec((size,), ("embed",), key, "bf16", "adamw", init, decay=init == "ones")


@cache
def vision_specs(config: ModelConfig) -> tuple[ParamSpec, ...]:
    """The vision tower's, aligner's and image vectors' weights (§13); none where the config has no vision."""
    if config.vision_config is None:
        return ()
    vision, d = config.vision_config, config.hidden_size
    width, inner = vision.hidden_size, vision.intermediate_size

    def linear(out: int, inputs: int, key: str) -> Iterator[ParamSpec]:
        yield _matrix((out, inputs), f"{key}.weight", "vision_out", "vision_in")
        yield _vector(out, f"{key}.bias", "zeros")

    specs = [_vector(d, f"image_{name}", "normal") for name in ("start", "end", "newline")]
    specs += linear(width, 3 * vision.patch_size**2, "vision.patch_embed.proj")
    for n in range(vision.num_hidden_layers):
        block = f"vision.blocks.{n}"
        specs += (_vector(width, f"{block}.{norm}.weight") for norm in ("norm1", "norm2"))
        specs += linear(3 * width, width, f"{block}.attn.wqkv")
        specs += linear(width, width, f"{block}.attn.wo")
        specs.append(_matrix((2 * inner, width), f"{block}.mlp.w1.weight", "vision_out", "vision_in"))
        specs.append(_matrix((width, inner), f"{block}.mlp.w2.weight", "vision_out", "vision_in"))
    specs.append(_vector(width, "vision.norm.weight"))
    specs += linear(d, width * vision.downsample_ratio**2, "aligner.w1")
    specs += linear(d, d, "aligner.w2")
    return tuple(specs)


@cache
def text_leaves(config: ModelConfig) -> dict[str, ParamSpec]:
    """The text model's specs by dotted path, in leaf order."""
    leaves = jax.tree_util.tree_leaves_with_path(text_specs(config), is_leaf=lambda x: isinstance(x, ParamSpec))
    return {jax.tree_util.keystr(path, simple=True, separator="."): spec for path, spec in leaves}


def _slots(part: Part, path: str, spec: ParamSpec, block: tuple[int, int]) -> Iterator[Slot]:
    tensors = spec.released(block)
    for n in range(spec.shape[0] if spec.stacked else 1):
        weight = next(tensors)
        scale = next(tensors) if spec.stored in QUANTIZED else None
        expert = n if spec.stacked else None
        yield Slot(part, weight.name if part != "text" else path, spec, expert, weight, scale)


@cache
def key_table(config: ModelConfig) -> dict[str, Slot]:
    """Released weight name -> `Slot`, for every weight that ``config`` declares; scales are inside the slots.

    The release's has 96,085 tensors of 510,286,023,000 bytes, 93,418 of them in the text model (§14).
    """
    block = tile(config)
    specs: dict[Part, dict[str, ParamSpec]] = {
        "text": text_leaves(config),
        "draft": {spec.key: spec for spec in spec_leaves(draft_specs(config))},
        "vision": {spec.key: spec for spec in vision_specs(config)},
    }
    return {
        slot.weight.name: slot
        for part, leaves in specs.items()
        for path, spec in leaves.items()
        for slot in _slots(part, path, spec, block)
    }


def released_tensors(config: ModelConfig, *parts: Part) -> Iterator[ReleasedTensor]:
    """Every tensor of the given parts, of all where none is given, scales included."""
    for slot in key_table(config).values():
        if not parts or slot.part in parts:
            yield from slot.tensors
