"""`ModelConfig`: the released config.json as one frozen dataclass, validated, with presets (architecture §1).

Field names are the released ones. Facts the release leaves at a default are written back only when they differ from it.
"""

import json
import math
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin

from dsv41.errors import UserError, nearest
from dsv41.files import read_json, write_text
from dsv41.hashing import MAX_PRIME, TableHash, table_hashes, table_primes


class ConfigError(UserError):
    """An impossible or unreadable configuration; the message starts with the field's name."""


@dataclass(frozen=True)
class RopeScaling:
    """YaRN of the layers with ratio >= 1 (§4.3)."""

    rope_type: str = "yarn"
    factor: float = 16
    beta_fast: float = 32
    beta_slow: float = 1
    original_max_position_embeddings: int = 65536


@dataclass(frozen=True)
class QuantizationConfig:
    """How the release stores its weights (§1, §8.4-8.6)."""

    quant_method: str = "fp8"
    activation_scheme: str = "dynamic"
    weight_block_size: tuple[int, ...] = (32, 32)
    scale_fmt: str = "ue8m0"
    expert_dtype: str = "fp4"


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower and its aligner (§13)."""

    model_type: str = "deepseek_v41_vision"
    num_hidden_layers: int = 32
    hidden_size: int = 1024
    num_attention_heads: int = 16
    intermediate_size: int = 2816
    patch_size: int = 14
    rope_theta: float = 10000.0
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None


_OWN = {"own": True}  # not in the release: V4's options, kept out of config.json while at their defaults
_TOP = {"top": True}  # stands at the top level of config.json, not in text_config


@dataclass(frozen=True)
class ModelConfig:
    """Every architecture fact of the text model; defaults are the release, `flash` (§1).

    Raises `ConfigError` naming the field when a constraint of §1-§13 does not hold.
    """

    vocab_size: int = 129280
    hidden_size: int = 5120
    moe_intermediate_size: int = 2304
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_lora_rank: int = 1024
    o_groups: int = 8
    hidden_act: str = "silu"
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    attention_bias: bool = False
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    compress_rope_theta: float = 160000.0
    n_routed_experts: int = 384
    n_shared_experts: int = 1
    num_experts_per_tok: int = 6
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0, 0, *(2,) * 18, *(1,) * 20, 0, 0, 0)
    kv_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20)
    index_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_source_layer_id: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = (1, 14)
    engram_num_embeddings: tuple[int, ...] = (384006168, 384016682)
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16000000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092
    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799
    dspark_target_layer_ids: tuple[int, ...] = (37, 38, 39)
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    dtype: str = "bfloat16"
    gate_temp: float = field(default=1.0, metadata=_OWN)
    num_hash_layers: int = field(default=0, metadata=_OWN)
    hc_single_pass: bool = field(default=True, metadata=_OWN)
    bos_token_id: int = field(default=0, metadata=_TOP)
    eos_token_id: int = field(default=1, metadata=_TOP)
    pad_token_id: int = field(default=2, metadata=_TOP)
    image_token_id: int = field(default=129264, metadata=_TOP)
    transformers_version: str = field(default="5.6.0", metadata=_TOP)
    quantization_config: QuantizationConfig | None = field(default=QuantizationConfig(), metadata=_TOP)
    vision_config: VisionConfig | None = field(default=VisionConfig(), metadata=_TOP)

    def __post_init__(self):
        _check_types(self)
        from dsv41.validate import validate

        validate(self)

    @property
    def q_width(self) -> int:
        """Heads times head width: the width of the concatenated attention output."""
        return self.num_attention_heads * self.head_dim

    @property
    def engram_columns(self) -> int:
        """Rows fetched a token from each table: (orders 2..max) x heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def engram_hashes(self) -> tuple[TableHash, ...]:
        """Hash constants of each table, in the order of ``engram_layer_ids``."""
        return table_hashes(
            self.engram_layer_ids,
            self.engram_max_ngram_size,
            self.engram_n_heads,
            self.engram_vocab_size,
            self.engram_compressed_vocab_size,
        )

    @property
    def document_alignment(self) -> int:
        """Tokens at whose multiples packed documents start, so that groups and pool blocks never straddle two (§7)."""
        ratios = [r for r in self.compress_ratios if r > 0]
        return math.lcm(*ratios) * self.candidate_block_size if ratios else 1


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _coerce(name: str, kind: Any, value: Any) -> Any:
    """JSON value -> field value, or a `ConfigError` that names the field and the kind it wants."""
    if get_origin(kind) is tuple:
        if isinstance(value, list | tuple) and all(_is_int(v) for v in value):
            return tuple(value)
        raise ConfigError(f"{name}: found {value!r}, allowed is a list of whole numbers")
    options = get_args(kind)
    if options:  # `X | None`
        return None if value is None else _coerce(name, options[0], value)
    if kind is float and (_is_int(value) or isinstance(value, float)) and abs(value) <= sys.float_info.max:
        return value
    if (kind is int and _is_int(value)) or (kind in (bool, str) and isinstance(value, kind)):
        return value
    if kind in (RopeScaling, QuantizationConfig, VisionConfig):
        if isinstance(value, kind):
            return value
        if isinstance(value, dict):
            return _from_dict(kind, value, name)
    wanted = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a string"}
    raise ConfigError(f"{name}: found {value!r}, allowed is {wanted.get(kind, 'an object')}")


def _check_types(config: Any) -> None:
    for f in fields(config):
        value = getattr(config, f.name)
        coerced = _coerce(f.name, f.type, value)
        if coerced is not value:
            object.__setattr__(config, f.name, coerced)


def _from_dict(kind: Any, data: dict, where: str) -> Any:
    known = {f.name: f for f in fields(kind)}
    if kind is RopeScaling and "type" in data:
        data = {("rope_type" if k == "type" else k): v for k, v in data.items()}
    for key in data:
        if key not in known:
            raise ConfigError(f"{where}.{key}: unknown field{nearest(key, known)}")
    return kind(**{k: _coerce(f"{where}.{k}", known[k].type, v) for k, v in data.items()})


_KINDS = {f.name: f.type for f in fields(ModelConfig)}
_NAMES = {f.name for f in fields(ModelConfig)}
_TOP_NAMES = {f.name for f in fields(ModelConfig) if "top" in f.metadata}
_TEXT_NAMES = _NAMES - _TOP_NAMES
# Facts of the layout itself, checked but not stored.
_FIXED_TOP = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"}
_FIXED_TEXT = {"model_type": "deepseek_v41_text"}
_ALIASES = {"engram_pad_id": "engram_pad_token_id"}


def from_released(data: Any) -> ModelConfig:
    """`ModelConfig` from the object in a released config.json; unknown keys are errors naming the nearest."""
    if not isinstance(data, dict):
        raise ConfigError(f"config: found {type(data).__name__}, allowed is a JSON object")
    if not isinstance(data.get("text_config"), dict):
        raise ConfigError("text_config: missing, config.json must hold an object text_config")
    values: dict[str, Any] = {}
    for scope, section, names, fixed in (
        ("", {k: v for k, v in data.items() if k != "text_config"}, _TOP_NAMES | {"dtype"}, _FIXED_TOP),
        ("text_config.", data["text_config"], _TEXT_NAMES, _FIXED_TEXT),
    ):
        for key, value in section.items():
            name = _ALIASES.get(key, key)
            if name in fixed:
                if value != fixed[name]:
                    raise ConfigError(f"{scope}{key}: found {value!r}, allowed is {fixed[name]!r}")
            elif name in names:
                # Lists become tuples here: the annotations say tuples, and are checked at run time under test.
                values[name] = _coerce(f"{scope}{name}", _KINDS[name], value)
            else:
                raise ConfigError(f"{scope}{key}: unknown field{nearest(key, names | set(fixed))}")
    if "vision_config" not in data:
        values["vision_config"] = None
    if "quantization_config" not in data:
        values["quantization_config"] = None
    return ModelConfig(**values)


def to_released(config: ModelConfig) -> dict[str, Any]:
    """The released config.json layout of ``config``; `from_released` reads it back to an equal config."""
    top: dict[str, Any] = dict(_FIXED_TOP)
    text: dict[str, Any] = dict(_FIXED_TEXT)
    for f in fields(config):
        value = getattr(config, f.name)
        if "own" in f.metadata and value == f.default:
            continue
        if hasattr(value, "__dataclass_fields__"):
            value = asdict(value)
        (top if "top" in f.metadata else text)[f.name] = value
    top["dtype"] = config.dtype
    for name in ("vision_config", "quantization_config"):
        if top[name] is None:
            del top[name]
    return json.loads(json.dumps({**top, "text_config": text}))


def config_file(path: Path) -> Path:
    """The file at ``path``, or config.json in the folder there."""
    return path / "config.json" if path.is_dir() else path


def load_config(path: str | Path) -> ModelConfig:
    """Reads a config.json (a file, or a folder that holds one)."""
    file = config_file(Path(path))
    try:
        data = read_json(file)
    except UserError as error:
        raise ConfigError(f"config: {error}") from None
    try:
        return from_released(data)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def save_config(config: ModelConfig, file: Path) -> None:
    """Writes the released layout, by a temporary name."""
    write_text(file, json.dumps(to_released(config), indent=1) + "\n")


def _toy() -> ModelConfig:
    """Eight layers in which every role occurs, for a laptop CPU (rows of 256 tokens: the pool of 64 entries binds)."""
    layers, orders, heads, rows = (1, 3), 4, 2, 4096
    primes = table_primes(len(layers), orders, heads, rows)
    return ModelConfig(
        vocab_size=2048,
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=64,
        o_lora_rank=64,
        o_groups=2,
        max_position_embeddings=4096,
        rope_scaling=RopeScaling(original_max_position_embeddings=256),
        n_routed_experts=8,
        num_experts_per_tok=2,
        sliding_window=32,
        compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1),
        kv_source_layer_ids=(1, 4),
        index_source_layer_ids=(1, 4, 6),
        index_n_heads=8,
        index_head_dim=32,
        index_topk=32,
        candidate_source_layer_id=4,
        candidate_topk_blocks=8,
        engram_layer_ids=layers,
        engram_num_embeddings=tuple(sum(p) for p in primes),
        engram_max_ngram_size=orders,
        engram_vocab_size=rows,
        engram_n_heads=heads,
        engram_head_dim=32,
        engram_compressed_vocab_size=2048,
        num_nextn_predict_layers=0,
        dspark_noise_token_id=2,
        dspark_target_layer_ids=(5, 6, 7),
        dspark_markov_rank=32,
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
        image_token_id=2,
        quantization_config=QuantizationConfig(),
        vision_config=None,
    )


def _small() -> ModelConfig:
    """About 190M parameters, 50M of them in tables, for one GPU: sixteen layers, rows from 1,024 tokens."""
    layers, orders, heads, rows = (1, 6), 4, 4, 65536
    primes = table_primes(len(layers), orders, heads, rows)
    return ModelConfig(
        vocab_size=16384,
        hidden_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=16,
        num_attention_heads=8,
        head_dim=128,
        qk_rope_head_dim=32,
        q_lora_rank=256,
        o_lora_rank=128,
        o_groups=4,
        max_position_embeddings=16384,
        rope_scaling=RopeScaling(original_max_position_embeddings=1024),
        n_routed_experts=16,
        num_experts_per_tok=4,
        sliding_window=64,
        compress_ratios=(0, 0, *(2,) * 6, *(1,) * 8),
        kv_source_layer_ids=(2, 5, 8),
        index_source_layer_ids=(2, 5, 8, 11, 14),
        index_n_heads=8,
        index_head_dim=64,
        index_topk=128,
        candidate_source_layer_id=8,
        candidate_topk_blocks=48,
        engram_layer_ids=layers,
        engram_num_embeddings=tuple(sum(p) for p in primes),
        engram_max_ngram_size=orders,
        engram_vocab_size=rows,
        engram_n_heads=heads,
        engram_head_dim=32,
        engram_compressed_vocab_size=16384,
        num_nextn_predict_layers=0,
        dspark_noise_token_id=2,
        dspark_target_layer_ids=(13, 14, 15),
        dspark_markov_rank=64,
        dspark_n_routed_experts=8,
        dspark_num_experts_per_tok=2,
        image_token_id=2,
        quantization_config=QuantizationConfig(),
        vision_config=None,
    )


def _slice() -> ModelConfig:
    """Four layers of the release's width: window only, Full of ratio 2, Full of ratio 1 with a pool that binds, Reindex.

    Every token takes every expert: a router of random weights is so near to even that rounding would decide.
    """
    return ModelConfig(
        vocab_size=2048,
        num_hidden_layers=4,
        max_position_embeddings=4096,
        rope_scaling=RopeScaling(original_max_position_embeddings=256),
        moe_intermediate_size=512,
        n_routed_experts=6,
        compress_ratios=(0, 2, 1, 1),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=2,
        candidate_topk_blocks=72,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        engram_compressed_vocab_size=2048,
        engram_pad_token_id=2,
        num_nextn_predict_layers=0,
        dspark_noise_token_id=2,
        dspark_target_layer_ids=(),
        image_token_id=2,
        quantization_config=None,
        vision_config=None,
    )


PRESETS = {"flash": ModelConfig, "slice": _slice, "toy": _toy, "small": _small}


def preset(name: str) -> ModelConfig:
    """A named config.

    `flash` is the release, `slice` four layers of its width, `toy` trains on a laptop CPU, `small` on one GPU.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset: found {name!r}, allowed are {', '.join(PRESETS)}{nearest(name, PRESETS)}")
    return PRESETS[name]()


__all__ = [
    "MAX_PRIME",
    "ConfigError",
    "ModelConfig",
    "QuantizationConfig",
    "RopeScaling",
    "VisionConfig",
    "from_released",
    "load_config",
    "preset",
    "replace",
    "save_config",
    "to_released",
]
