"""The costs of a `ModelConfig` by formula, from its widths and layer schedule (serving §1.1, §9); `counted` has them counted."""

from collections.abc import Callable

from dsv41.analyze.costs import CORE, SCORES, Format, Model, Reads, Rows, Weights
from dsv41.config import ModelConfig
from dsv41.plan import LayerPlan, layer_plans


def own_model(config: ModelConfig, name: str, title: str) -> Model:
    """Costs of ``config``. A prompt's tokens run the encoder half and what makes the decoder's main KV and index keys; the
    last window's tokens alone run the rest."""
    weights = _weights(config)
    decoder = any(p.half == "decoder" for p in layer_plans(config))
    return Model(name, title, weights, _reads(config), _rows(config), _fixed(config), config.sliding_window if decoder else None)


def _weights(c: ModelConfig) -> tuple[Weights, ...]:
    plans, d, k, n = layer_plans(c), c.hidden_size, c.head_dim, c.hc_mult
    decoder = any(p.half == "decoder" for p in plans)

    def part(
        name: str,
        layer: Callable[[LayerPlan], int],
        format: Format = "fp8",
        chosen: tuple[int, int] = (1, 1),
        prefill: Callable[[LayerPlan], bool] = lambda p: p.half == "encoder",
    ) -> Weights:
        """layer: numbers of one layer; chosen: which share of them a token multiplies."""
        share = lambda size: size * chosen[0] // chosen[1]  # noqa: E731
        size = sum(layer(p) for p in plans)
        return Weights(name, size, share(size), share(sum(layer(p) for p in plans if prefill(p))), format)

    def vectors(p: LayerPlan) -> int:
        gains = 2 * d + c.q_lora_rank + k + (k + c.index_head_dim if p.owns_kv else 0)
        biases = 0 if p.routing == "hash" else 2 * c.n_routed_experts
        return gains + biases + c.num_attention_heads + 2 * (n * (n + 2) + 3) + (2 * n * d if p.engram is not None else 0)

    heads_out = c.q_width * c.o_lora_rank + c.o_groups * c.o_lora_rank * d  # a group's heads to its rank, all ranks to d
    attention = d * c.q_lora_rank + c.q_lora_rank * c.q_width + d * k + heads_out
    expert, index_q = 3 * d * c.moe_intermediate_size, c.index_n_heads * c.index_head_dim
    every = lambda p: True  # noqa: E731
    table = c.vocab_size * d
    predictor, last = n * d * n * (n + 2), 0 if c.hc_single_pass else n * d * n
    norms = part("gains, biases, sinks", vectors, chosen=(0, 1))
    columns = c.engram_columns * c.engram_head_dim
    rows = dict(zip(c.engram_layer_ids, c.engram_num_embeddings, strict=True))
    parts = (
        Weights("embedding", table, 0, 0),
        part("attention projections", lambda p: attention),
        part("compressors", lambda p: d * k * min(p.ratio, 2) if p.owns_kv else 0, "bf16", prefill=every),
        part("index keys", lambda p: k * c.index_head_dim if p.owns_kv else 0, "bf16", prefill=every),
        part("index queries", lambda p: c.q_lora_rank * index_q if p.selects else 0),
        part("index head weights", lambda p: d * c.index_n_heads if p.selects else 0, "bf16"),
        part("router", lambda p: d * c.n_routed_experts, "bf16"),
        # Stored in FP4 and multiplied by FP8 activations: the product runs at FP8's rate.
        part("routed experts", lambda p: expert * c.n_routed_experts, chosen=(c.num_experts_per_tok, c.n_routed_experts)),
        part("shared experts", lambda p: expert),
        part("mHC", lambda p: 2 * predictor, "bf16"),
        part("Engram tables", lambda p: rows.get(p.layer, 0) * c.engram_head_dim, chosen=(0, 1)),
        part("Engram projections", lambda p: 0 if p.engram is None else (n + 1) * d * columns),
        # With the V4 form's predictor of the final collapse, which runs where the head does.
        Weights("head", table + last, table + last, 0 if decoder else table + last, "bf16"),
        Weights(norms.part, norms.size + d + (n + 1 if last else 0), 0, 0),
    )
    return tuple(w for w in parts if w.size)


def _reads(c: ModelConfig) -> tuple[Reads, ...]:
    plans = layer_plans(c)

    def part(
        name: str, layers: list[LayerPlan], macs: int, limit: int | None, format: Format, window: bool = False
    ) -> list[Reads]:
        kinds = [(1 if window else p.ratio, p.half == "encoder") for p in layers]
        return [
            Reads(name, kinds.count(kind), macs, kind[0], limit, format, kind[1]) for kind in sorted(set(kinds), reverse=True)
        ]

    core, score = 2 * c.q_width, c.index_n_heads * c.index_head_dim
    pool = c.candidate_topk_blocks * c.candidate_block_size
    return (
        *part(CORE, list(plans), core, c.sliding_window, "bf16", window=True),
        *part(CORE, [p for p in plans if p.ratio], core, c.index_topk, "bf16"),
        *part(SCORES, [p for p in plans if p.selects and p.pool != "consumes"], score, None, "fp4"),
        *part(SCORES, [p for p in plans if p.pool == "consumes"], score, pool, "fp4"),
    )


def _rows(c: ModelConfig) -> tuple[Rows, ...]:
    ratios = [p.ratio for p in layer_plans(c) if p.owns_kv]
    # E2M1 is half a byte; a scale byte for every 16 channels of main KV, for every 32 of an index key.
    widths = {"main KV": c.head_dim // 2 + c.head_dim // 16, "index keys": c.index_head_dim // 2 + c.index_head_dim // 32}
    return tuple(Rows(kind, ratios.count(r), width, r) for kind, width in widths.items() for r in sorted(set(ratios)))


def _fixed(c: ModelConfig) -> dict[str, int]:
    plans = layer_plans(c)
    return {
        # E4M3 is a byte; a scale byte for every 32 channels.
        "windows": len(plans) * c.sliding_window * (c.head_dim + c.head_dim // 32),
        "pair tails": sum(2 * (p.ratio - 1) * c.head_dim * 4 for p in plans if p.owns_kv),
        "history, length": 4 * (c.engram_max_ngram_size - 1 if c.engram_layer_ids else 0) + 4,
    }
