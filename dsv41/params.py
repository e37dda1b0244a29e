"""Every weight, declared once: shape, axes, initialiser, optimizer family, released name and stored form (architecture §14).

`text_specs` and `draft_specs` give trees of `ParamSpec` in the shape of `TextParams` and `DraftParams`; initial values, counts,
stored bytes, checkpoint names and the optimizer's partition are derived from them. Weights keep the released orientation
``[out, in]``, y = x W^T; the experts of a layer are stacked on a leading axis where the release has one tensor an expert.
"""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import PRNGKeyArray

from dsv41.config import ModelConfig
from dsv41.plan import LayerPlan, draft_plans, layer_plans, stage_config
from dsv41.quant import ENGRAM_ROW, EXPERT_WEIGHT

Family = Literal["muon", "adamw", "sinkhorn", "sign", "frozen"]
Stored = Literal["bf16", "f32", "fp8", "fp4", "fp8_rows", "i64"]
Init = Literal["normal", "zeros", "ones", "scale", "balanced_experts"]


@dataclass(frozen=True)
class ReleasedTensor:
    """One tensor of the released checkpoint: name, safetensors dtype, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * {"BF16": 2, "F32": 4, "I64": 8}.get(self.dtype, 1)


@dataclass(frozen=True)
class ParamSpec:
    """One weight. ``key`` is the released name, with ``{expert}`` for a stack over experts (leading axis).

    family: which optimizer owns it. blocks: equal parts of the output axis (axis -2) that Muon treats as matrices of
    their own (heads, groups). decay, lr_scale: decoupled weight decay and learning-rate factor of the family.
    stored: the release's storage; see `released`.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    key: str
    stored: Stored
    family: Family
    init: Init = "normal"
    blocks: int = 1
    decay: bool = True
    lr_scale: float = 1.0

    @property
    def dtype(self) -> Any:
        """Masters are float32; tables of ids are int32."""
        return jnp.int32 if self.stored == "i64" else jnp.float32

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stacked(self) -> bool:
        """Whether the leading axis stands for one released tensor an expert."""
        return "{expert}" in self.key

    def released(self, block: tuple[int, int] = (32, 32)) -> Iterator[ReleasedTensor]:
        """The released tensors that hold this weight, scales included (§8.4-8.6, §14)."""
        for index in range(self.shape[0] if self.stacked else 1):
            yield from self._released(self.key.format(expert=index), block)

    def released_bytes(self, block: tuple[int, int] = (32, 32)) -> int:
        """Bytes of all of them."""
        return (self.shape[0] if self.stacked else 1) * sum(tensor.bytes for tensor in self._released(self.key, block))

    def _released(self, name: str, block: tuple[int, int]) -> Iterator[ReleasedTensor]:
        shape = self.shape[1:] if self.stacked else self.shape
        scale = name.removesuffix("weight") + "scale"
        if self.stored == "fp8":
            yield ReleasedTensor(name, "F8_E4M3", shape)
            yield ReleasedTensor(scale, "F8_E8M0", (-(-shape[0] // block[0]), -(-shape[1] // block[1])))
        elif self.stored == "fp4":
            yield ReleasedTensor(name, "I8", (shape[0], shape[1] // 2))
            yield ReleasedTensor(scale, "F8_E8M0", (shape[0], shape[1] // EXPERT_WEIGHT.group))
        elif self.stored == "fp8_rows":
            yield ReleasedTensor(name, "F8_E4M3", shape)
            yield ReleasedTensor(scale, "F8_E8M0", (shape[0], shape[1] // ENGRAM_ROW.group))
        else:
            yield ReleasedTensor(name, {"bf16": "BF16", "f32": "F32", "i64": "I64"}[self.stored], shape)


@struct.dataclass
class HyperConnection:
    """Coefficient predictor of one mHC site (§10): fn ``[M, N*D]``, base ``[M]``, scale; float32 always.

    ``M = N*(N+2)`` (pre, post, comb) and three scales at a sub-block; ``M = N`` and one scale at the V4 form's head.
    """

    fn: Any
    base: Any
    scale: Any


@struct.dataclass
class CompressorParams:
    """Main KV projection of a kv source (§5): wkv ``[K, D]``, wgate ``[K, D]`` where ratio > 1, norm ``[K]``."""

    wkv: Any
    wgate: Any | None
    norm: Any


@struct.dataclass
class IndexerParams:
    """Index query of an index source (§7), and at a kv source the index key: wk ``[KI, K]``, k_norm ``[KI]``."""

    wq_b: Any
    weights_proj: Any
    wk: Any | None
    k_norm: Any | None


@struct.dataclass
class AttentionParams:
    """Low-rank query, shared K=V latent of the window, sink, grouped low-rank output (§4)."""

    wq_a: Any
    q_norm: Any
    wq_b: Any
    wkv: Any
    kv_norm: Any
    sink: Any
    wo_a: Any
    wo_b: Any
    compressor: CompressorParams | None
    indexer: IndexerParams | None


@struct.dataclass
class ExpertParams:
    """SwiGLU weights: w1, w3 ``[E, F, D]``, w2 ``[E, D, F]`` for a stack; no ``E`` for the shared expert (§9)."""

    w1: Any
    w3: Any
    w2: Any


@struct.dataclass
class MoEParams:
    """Router and experts (§9). A hash layer has ``tid2eid [V, k]`` in place of the correction biases."""

    gate: Any
    bias: Any | None
    bias_vl: Any | None
    tid2eid: Any | None
    experts: ExpertParams
    shared: ExpertParams


@struct.dataclass
class EngramParams:
    """Table ``[rows, KE]``, key/value projection, per-stream norm gains ``[N, D]`` (§11.5)."""

    embed: Any
    wkv: Any
    q_weight: Any
    k_weight: Any


@struct.dataclass
class LayerParams:
    """One block (§10)."""

    attn_norm: Any
    ffn_norm: Any
    hc_attn: HyperConnection
    hc_ffn: HyperConnection
    attn: AttentionParams
    ffn: MoEParams
    engram: EngramParams | None


@struct.dataclass
class TextParams:
    """The text model (§3). ``hc_head`` only in the unshifted V4 form of mHC."""

    embed: Any
    layers: tuple[LayerParams, ...]
    norm: Any
    head: Any
    hc_head: HyperConnection | None


@struct.dataclass
class DraftParams:
    """The drafter (§12.1): main_proj ``[D, M]``, M widths of the tapped layers, main_norm, norm ``[D]``, the Markov head's two
    tables ``[V, R]``, confidence ``[1, D + R]``; embedding and head are the text model's."""

    main_proj: Any
    main_norm: Any
    stages: tuple[LayerParams, ...]
    norm: Any
    markov_embed: Any
    markov_head: Any
    confidence: Any


def _gain(width: int, key: str, axis: str | None = None) -> ParamSpec:
    return ParamSpec((width,), (axis,), key, "bf16", "adamw", "ones")


def _hyper(config: ModelConfig, key: str, outputs: int, scales: int) -> HyperConnection:
    width = config.hc_mult * config.hidden_size
    return HyperConnection(
        fn=ParamSpec((outputs, width), ("mix", "embed"), f"{key}_fn", "f32", "muon"),
        base=ParamSpec((outputs,), ("mix",), f"{key}_base", "f32", "adamw", "zeros", decay=False),
        scale=ParamSpec((scales,), (None,), f"{key}_scale", "f32", "adamw", "scale", decay=False),
    )


def _attention(config: ModelConfig, plan: LayerPlan, prefix: str) -> AttentionParams:
    d, k, rank = config.hidden_size, config.head_dim, config.q_lora_rank
    heads, groups = config.num_attention_heads, config.o_groups
    compressor = indexer = None
    if plan.owns_kv:
        compressor = CompressorParams(
            wkv=ParamSpec((k, d), ("kv", "embed"), f"{prefix}.compressor.wkv.weight", "bf16", "muon"),
            wgate=ParamSpec((k, d), ("kv", "embed"), f"{prefix}.compressor.wgate.weight", "bf16", "muon")
            if plan.ratio > 1
            else None,
            norm=_gain(k, f"{prefix}.compressor.norm.weight", "kv"),
        )
    if plan.selects:
        h, width = config.index_n_heads, config.index_head_dim
        owns = plan.owns_kv
        key = f"{prefix}.indexer"
        indexer = IndexerParams(
            wq_b=ParamSpec((h * width, rank), ("index_heads", "q_rank"), f"{key}.wq_b.weight", "fp8", "muon", blocks=h),
            weights_proj=ParamSpec((h, d), ("index_heads", "embed"), f"{key}.weights_proj.weight", "bf16", "muon"),
            wk=ParamSpec((width, k), ("index_key", "kv"), f"{key}.wk.weight", "bf16", "muon") if owns else None,
            k_norm=_gain(width, f"{key}.k_norm.weight", "index_key") if owns else None,
        )
    return AttentionParams(
        wq_a=ParamSpec((rank, d), ("q_rank", "embed"), f"{prefix}.wq_a.weight", "fp8", "muon"),
        q_norm=_gain(rank, f"{prefix}.q_norm.weight", "q_rank"),
        wq_b=ParamSpec((heads * k, rank), ("heads", "q_rank"), f"{prefix}.wq_b.weight", "fp8", "muon", blocks=heads),
        wkv=ParamSpec((k, d), ("kv", "embed"), f"{prefix}.wkv.weight", "fp8", "muon"),
        kv_norm=_gain(k, f"{prefix}.kv_norm.weight", "kv"),
        sink=ParamSpec((heads,), ("heads",), f"{prefix}.attn_sink", "f32", "adamw", "zeros", decay=False),
        wo_a=ParamSpec(
            (groups * config.o_lora_rank, config.q_width // groups),
            ("heads", "group_in"),
            f"{prefix}.wo_a.weight",
            "fp8",
            "muon",
            blocks=groups,
        ),
        wo_b=ParamSpec((d, groups * config.o_lora_rank), ("embed", "heads"), f"{prefix}.wo_b.weight", "fp8", "muon"),
        compressor=compressor,
        indexer=indexer,
    )


def _experts(count: int | None, d: int, f: int, prefix: str) -> ExpertParams:
    lead, axis = ((count,), ("experts",)) if count else ((), ())
    stored: Stored = "fp4" if count else "fp8"
    into = {"shape": (*lead, f, d), "axes": (*axis, "expert_mlp", "embed"), "stored": stored, "family": "muon"}
    return ExpertParams(
        w1=ParamSpec(key=f"{prefix}.w1.weight", **into),
        w3=ParamSpec(key=f"{prefix}.w3.weight", **into),
        w2=ParamSpec((*lead, d, f), (*axis, "embed", "expert_mlp"), f"{prefix}.w2.weight", stored, "muon"),
    )


def _moe(config: ModelConfig, plan: LayerPlan, prefix: str) -> MoEParams:
    d, f, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    hashed = plan.routing == "hash"
    bias = ParamSpec((experts,), ("routes",), f"{prefix}.gate.bias", "f32", "sign", "zeros", decay=False)
    bias_vl = ParamSpec((experts,), ("routes",), f"{prefix}.gate.bias_vl", "f32", "sign", "zeros", decay=False)
    table = (config.vocab_size, config.num_experts_per_tok)
    return MoEParams(
        gate=ParamSpec((experts, d), ("routes", "embed"), f"{prefix}.gate.weight", "bf16", "muon"),
        bias=None if hashed else bias,
        bias_vl=None if hashed else bias_vl,
        tid2eid=ParamSpec(table, (None, None), f"{prefix}.gate.tid2eid", "i64", "frozen", "balanced_experts", decay=False)
        if hashed
        else None,
        experts=_experts(experts, d, f, f"{prefix}.experts.{{expert}}"),
        shared=_experts(None, d, f, f"{prefix}.shared_experts"),
    )


def _engram(config: ModelConfig, table: int, prefix: str) -> EngramParams:
    rows, width = config.engram_num_embeddings[table], config.engram_head_dim
    n, d = config.hc_mult, config.hidden_size
    inputs = config.engram_columns * width
    return EngramParams(
        embed=ParamSpec(
            (rows, width),
            ("table_rows", None),
            f"{prefix}.embed.weight",
            "fp8_rows",
            "sinkhorn",
            decay=False,
            lr_scale=5.0,
        ),
        wkv=ParamSpec(((n + 1) * d, inputs), ("embed", None), f"{prefix}.wkv.weight", "fp8", "muon"),
        q_weight=ParamSpec((n, d), (None, "embed"), f"{prefix}.q_weight", "bf16", "adamw", "ones"),
        k_weight=ParamSpec((n, d), (None, "embed"), f"{prefix}.k_weight", "bf16", "adamw", "ones"),
    )


def layer_specs(config: ModelConfig, plan: LayerPlan, prefix: str) -> LayerParams:
    """The weights of one block that does what ``plan`` says, under released names that start with ``prefix``."""
    n = config.hc_mult
    return LayerParams(
        attn_norm=_gain(config.hidden_size, f"{prefix}.attn_norm.weight", "embed"),
        ffn_norm=_gain(config.hidden_size, f"{prefix}.ffn_norm.weight", "embed"),
        hc_attn=_hyper(config, f"{prefix}.hc_attn", n * (n + 2), 3),
        hc_ffn=_hyper(config, f"{prefix}.hc_ffn", n * (n + 2), 3),
        attn=_attention(config, plan, f"{prefix}.attn"),
        ffn=_moe(config, plan, f"{prefix}.ffn"),
        engram=None if plan.engram is None else _engram(config, plan.engram, f"{prefix}.engram"),
    )


@cache
def text_specs(config: ModelConfig) -> TextParams:
    """The text model's weights as a tree of `ParamSpec` (a leaf each) in the shape of `TextParams`."""
    table = (config.vocab_size, config.hidden_size)
    return TextParams(
        embed=ParamSpec(table, ("vocab", "embed"), "embed.weight", "bf16", "sinkhorn", decay=False),
        layers=tuple(layer_specs(config, plan, plan.name) for plan in layer_plans(config)),
        norm=_gain(config.hidden_size, "norm.weight", "embed"),
        head=ParamSpec(table, ("vocab", "embed"), "head.weight", "bf16", "sinkhorn", decay=False),
        hc_head=None if config.hc_single_pass else _hyper(config, "hc_head", config.hc_mult, 1),
    )


@cache
def draft_specs(config: ModelConfig) -> DraftParams | None:
    """The draft stages' weights in the shape of `DraftParams`; None where the config has no stage."""
    plans, d, rank = draft_plans(config), config.hidden_size, config.dspark_markov_rank
    if not plans:
        return None
    last, inputs = f"mtp.{len(plans) - 1}", d * len(config.dspark_target_layer_ids)
    table = lambda key: ParamSpec((config.vocab_size, rank), ("vocab", None), key, "bf16", "sinkhorn", decay=False)  # noqa: E731
    confidence = f"{last}.confidence_head.proj.weight"
    return DraftParams(
        main_proj=ParamSpec((d, inputs), ("embed", None), "mtp.0.main_proj.weight", "fp8", "muon"),
        main_norm=_gain(d, "mtp.0.main_norm.weight", "embed"),
        stages=tuple(layer_specs(stage_config(config), plan, plan.name) for plan in plans),
        norm=_gain(d, f"{last}.norm.weight", "embed"),
        markov_embed=table(f"{last}.markov_head.embed.weight"),
        markov_head=table(f"{last}.markov_head.head.weight"),
        confidence=ParamSpec((1, d + rank), (None, None), confidence, "bf16", "adamw", "zeros", decay=False),
    )


def block_specs(config: ModelConfig, plan: LayerPlan) -> LayerParams:
    """The weights of the block that ``plan`` is of, a layer's or a draft stage's."""
    draft = draft_specs(config)
    return draft.stages[plan.layer] if draft is not None and plan.half == "draft" else text_specs(config).layers[plan.layer]


def map_specs(function: Any, specs: Any, *rest: Any) -> Any:
    """`jax.tree.map` over a tree whose leaves are `ParamSpec`."""
    return jax.tree.map(function, specs, *rest, is_leaf=lambda x: isinstance(x, ParamSpec))


def spec_leaves(specs: Any) -> list[ParamSpec]:
    """The specs of a tree, in leaf order."""
    return jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ParamSpec))


def count_parameters(specs: Any) -> int:
    """Trained numbers in a tree of specs; id tables are not parameters."""
    return sum(spec.size for spec in spec_leaves(specs) if spec.family != "frozen")


def abstract_params(specs: Any) -> Any:
    """The tree as `jax.ShapeDtypeStruct` leaves."""
    return map_specs(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)


def _balanced_experts(key: PRNGKeyArray, spec: ParamSpec, experts: int) -> jax.Array:
    """``k`` distinct experts an id, each expert equally often: a permuted round robin over the vocabulary."""
    vocab, k = spec.shape
    order = jax.random.permutation(key, vocab)
    first = (order[:, None] * k + jnp.arange(k)[None, :]) % experts
    return first.astype(jnp.int32)


def init_std(config: ModelConfig, spec: ParamSpec) -> float:
    """Standard deviation that initial values of a matrix are drawn with, before they are cut at three of it."""
    return min(config.initializer_range, spec.shape[-1] ** -0.5)


def _initial(config: ModelConfig, specs: Any, key: PRNGKeyArray, dtype: Any = None) -> Any:
    """Initial weights of a tree of specs."""

    def master(spec: ParamSpec) -> jax.Array:
        own = jax.random.fold_in(key, np.uint32(zlib.crc32(spec.key.encode())))
        if spec.init == "zeros":
            return jnp.zeros(spec.shape, spec.dtype)
        if spec.init in ("ones", "scale"):
            return jnp.full(spec.shape, 1.0 if spec.init == "ones" else 0.01, spec.dtype)
        if spec.init == "balanced_experts":
            return _balanced_experts(own, spec, config.n_routed_experts)
        return jnp.float32(init_std(config, spec)) * jax.random.truncated_normal(own, -3.0, 3.0, spec.shape, jnp.float32)

    def leaf(spec: ParamSpec) -> jax.Array:
        return master(spec) if dtype is None or spec.stored in ("f32", "i64") else master(spec).astype(dtype)

    return map_specs(leaf, specs)


def init_params(config: ModelConfig, key: PRNGKeyArray, dtype: Any = None) -> TextParams:
    """Initial weights. Each leaf's key is folded from its name, so a value does not depend on the tree around it.

    Matrices: truncated normal of std min(initializer_range, 1/sqrt(fan_in)); gains 1; biases and sinks 0; mHC scales
    0.01 (training §3.4). dtype: of the weights that the release does not store as float32; float32 where not given.
    """
    return _initial(config, text_specs(config), key, dtype)


def init_draft(config: ModelConfig, key: PRNGKeyArray) -> DraftParams:
    """`init_params` of the drafter; the config has draft stages."""
    return _initial(config, draft_specs(config), key)
