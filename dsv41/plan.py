"""The layer schedule as data: config lists -> one `LayerPlan` a layer (architecture §2).

Model code reads this table and never a layer number.
"""

from dataclasses import asdict, dataclass
from functools import cache
from typing import Literal

from dsv41.config import ModelConfig, replace
from dsv41.quant import INDEX_KEY, MAIN_KV, WINDOW_KV

Mode = Literal["swa", "full", "reindex", "reuse"]


@dataclass(frozen=True)
class LayerPlan:
    """What one layer does. ``None`` stands for "has none"; the byte counts are of the layer's own cache."""

    layer: int
    half: Literal["encoder", "decoder", "draft"]
    ratio: int
    mode: Mode
    kv_source: int | None
    index_source: int | None
    pool: Literal["publishes", "consumes"] | None
    engram: int | None  # table number
    routing: Literal["score", "hash"]
    cache_bytes_per_token: float
    cache_bytes_window: int
    tapped: bool = False  # the draft stages read the mean of the streams that enter

    @property
    def name(self) -> str:
        """Of the block among released weights and recorded values."""
        return f"{'mtp' if self.half == 'draft' else 'layers'}.{self.layer}"

    @property
    def owns_kv(self) -> bool:
        """Compresses its own attention input into main KV and index keys."""
        return self.mode == "full"

    @property
    def selects(self) -> bool:
        """Scores index keys and chooses the entries that it and its followers read."""
        return self.mode in ("full", "reindex")


@cache
def layer_plans(config: ModelConfig) -> tuple[LayerPlan, ...]:
    """The static schedule (§2): Full at kv sources, Reindex at the other index sources, Reuse elsewhere with ratio > 0.

    The decoder half starts at the last kv source, whose compressor consumes the encoder's output (§6.2).
    """
    decoder = config.kv_source_layer_ids[-1] if config.kv_source_layer_ids else config.num_hidden_layers
    row = MAIN_KV.row_bytes(config.head_dim) + INDEX_KEY.row_bytes(config.index_head_dim)
    window = config.sliding_window * WINDOW_KV.row_bytes(config.head_dim)
    plans = []
    for layer in range(config.num_hidden_layers):
        ratio = config.compress_ratios[layer]
        full = layer in config.kv_source_layer_ids
        selects = layer in config.index_source_layer_ids
        source = config.candidate_source_layer_id
        plans.append(
            LayerPlan(
                layer=layer,
                half="decoder" if layer >= decoder else "encoder",
                ratio=ratio,
                mode="swa" if ratio == 0 else "full" if full else "reindex" if selects else "reuse",
                kv_source=max(s for s in config.kv_source_layer_ids if s <= layer) if ratio else None,
                index_source=max(s for s in config.index_source_layer_ids if s <= layer) if ratio else None,
                pool="publishes" if layer == source else "consumes" if selects and 0 <= source < layer else None,
                engram=config.engram_layer_ids.index(layer) if layer in config.engram_layer_ids else None,
                routing="hash" if layer < config.num_hash_layers else "score",
                cache_bytes_per_token=row / ratio if full else 0,
                cache_bytes_window=window,
                tapped=bool(config.num_nextn_predict_layers) and layer in config.dspark_target_layer_ids,
            )
        )
    return tuple(plans)


@cache
def draft_plans(config: ModelConfig) -> tuple[LayerPlan, ...]:
    """The draft stages: windows alone, whatever the backbone does, with experts of their own (§12.1)."""
    window = config.sliding_window * WINDOW_KV.row_bytes(config.head_dim)
    stages = range(config.num_nextn_predict_layers)
    return tuple(LayerPlan(n, "draft", 0, "swa", None, None, None, None, "score", 0, window) for n in stages)


@cache
def stage_config(config: ModelConfig) -> ModelConfig:
    """The config of the draft stages' blocks: their numbers of experts in place of the backbone's."""
    experts = {"n_routed_experts": config.dspark_n_routed_experts, "num_experts_per_tok": config.dspark_num_experts_per_tok}
    return replace(config, **experts)


def cache_bytes_per_token(config: ModelConfig) -> float:
    """Bytes that each further token adds to the cache over all layers: 890 for the release (§8)."""
    return sum(plan.cache_bytes_per_token for plan in layer_plans(config))


def plan_table(config: ModelConfig, parameters: dict[int, int], other_parameters: int) -> dict:
    """``{"layers": [...], "totals": {...}}``; ``parameters`` counts each layer's, ``other_parameters`` the rest."""
    plans = layer_plans(config)
    modes = {mode: sum(p.mode == mode for p in plans) for mode in ("swa", "full", "reindex", "reuse")}
    return {
        "layers": [{**asdict(p), "parameters": parameters[p.layer]} for p in plans],
        "totals": {
            "layers": len(plans),
            **modes,
            "engram": sum(p.engram is not None for p in plans),
            "parameters": sum(parameters.values()) + other_parameters,
            "cache_bytes_per_token": cache_bytes_per_token(config),
            "cache_bytes_window": sum(p.cache_bytes_window for p in plans),
        },
    }
