"""The constraints of architecture §1-§13 on a `ModelConfig`; each failure names its field, what was found and what is allowed."""

from dataclasses import fields
from itertools import pairwise
from math import prod
from typing import Any

from dsv41.config import ConfigError, ModelConfig, VisionConfig
from dsv41.hashing import MAX_COLUMNS, MAX_PRIME, table_primes
from dsv41.quant import ACTIVATION, EXPERT_WEIGHT, INDEX_KEY, MAIN_KV, WINDOW_KV

MOST = 2**31 - 1  # arrays are indexed by int32


def _need(ok: bool, name: str, found: Any, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{name}: found {found!r}, allowed is {allowed}")


_POSITIVE = """vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim
q_lora_rank o_lora_rank o_groups max_position_embeddings n_routed_experts num_experts_per_tok sliding_window index_n_heads
index_head_dim index_topk candidate_topk_blocks candidate_block_size hc_mult hc_sinkhorn_iters engram_n_heads
engram_head_dim engram_compressed_vocab_size dspark_block_size dspark_markov_rank dspark_n_routed_experts
dspark_num_experts_per_tok rope_theta compress_rope_theta swiglu_limit rms_norm_eps hc_eps gate_temp
routed_scaling_factor initializer_range""".split()

_FIXED = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}


def validate(config: ModelConfig) -> None:
    """Raises `ConfigError` for the first constraint that does not hold."""
    for name in _POSITIVE:
        _need(getattr(config, name) > 0, name, getattr(config, name), "a value above 0")
    for name, value in ((f.name, getattr(config, f.name)) for f in fields(config)):
        for number in value if isinstance(value, tuple) else (value,):
            _need(type(number) is not int or -MOST <= number <= MOST, name, number, f"whole numbers up to {MOST}")
    for pair in (("num_attention_heads", "head_dim"), ("candidate_topk_blocks", "candidate_block_size")):
        product = prod(getattr(config, name) for name in pair)
        _need(product <= MOST, " * ".join(pair), product, f"up to {MOST}")
    for name, value in _FIXED.items():
        _need(getattr(config, name) == value, name, getattr(config, name), repr(value))
    _need(config.dtype in ("bfloat16", "float32"), "dtype", config.dtype, "'bfloat16' or 'float32'")
    _widths(config)
    _rope(config)
    _schedule(config)
    _moe(config)
    _engram(config)
    _tokens_and_drafts(config)
    if config.quantization_config is not None:
        quant = config.quantization_config
        block = quant.weight_block_size
        _need(
            len(block) == 2 and min(block) > 0,
            "quantization_config.weight_block_size",
            list(block),
            "two sizes above 0",
        )
        for name, allowed in (("quant_method", "fp8"), ("scale_fmt", "ue8m0"), ("expert_dtype", "fp4")):
            _need(getattr(quant, name) == allowed, f"quantization_config.{name}", getattr(quant, name), repr(allowed))
    if config.vision_config is not None:
        _vision(config.vision_config)


def _multiple(name: str, value: int, of: int, why: str) -> None:
    _need(value % of == 0, name, value, f"a multiple of {of} ({why})")


def _widths(c: ModelConfig) -> None:
    _multiple("head_dim", c.head_dim, max(MAIN_KV.group, WINDOW_KV.group), "the cache's quantisation groups, §8")
    _multiple("index_head_dim", c.index_head_dim, INDEX_KEY.group, "the index key's quantisation groups, §8.3")
    _multiple("engram_head_dim", c.engram_head_dim, ACTIVATION.group, "the table rows' quantisation groups, §8.6")
    _multiple("hidden_size", c.hidden_size, EXPERT_WEIGHT.group, "the experts' quantisation groups, §8.5")
    _multiple("moe_intermediate_size", c.moe_intermediate_size, EXPERT_WEIGHT.group, "the experts' quantisation groups, §8.5")
    _multiple("num_attention_heads", c.num_attention_heads, c.o_groups, "o_groups")
    _multiple("qk_rope_head_dim", c.qk_rope_head_dim, 2, "RoPE rotates pairs")
    narrowest = min(c.head_dim, c.index_head_dim)
    allowed = f"at most head_dim and index_head_dim, {narrowest}"
    _need(c.qk_rope_head_dim <= narrowest, "qk_rope_head_dim", c.qk_rope_head_dim, allowed)


def _rope(c: ModelConfig) -> None:
    scaling = c.rope_scaling
    _need(scaling.rope_type == "yarn", "rope_scaling.rope_type", scaling.rope_type, "'yarn'")
    _need(scaling.factor >= 1, "rope_scaling.factor", scaling.factor, "1 or more")
    original = scaling.original_max_position_embeddings
    _need(original > 0, "rope_scaling.original_max_position_embeddings", original, "a value above 0")
    _need(scaling.beta_slow > 0, "rope_scaling.beta_slow", scaling.beta_slow, "a value above 0")
    allowed = f"more than beta_slow, {scaling.beta_slow}"
    _need(scaling.beta_fast > scaling.beta_slow, "rope_scaling.beta_fast", scaling.beta_fast, allowed)
    for name in ("rope_theta", "compress_rope_theta"):
        _need(getattr(c, name) > 1, name, getattr(c, name), "a value above 1")


def _increasing(name: str, values: tuple[int, ...], below: int) -> None:
    ok = all(a < b for a, b in pairwise(values)) and all(0 <= v < below for v in values)
    _need(ok, name, list(values), f"increasing layer numbers in 0..{below - 1}")


def _schedule(c: ModelConfig) -> None:
    layers, ratios = c.num_hidden_layers, c.compress_ratios
    stages = c.num_nextn_predict_layers
    _need(stages >= 0, "num_nextn_predict_layers", stages, "0 or more")
    wanted = layers + stages
    allowed = f"num_hidden_layers + num_nextn_predict_layers = {wanted}"
    _need(len(ratios) == wanted, "compress_ratios", f"{len(ratios)} entries", allowed)
    _need(min(ratios) >= 0, "compress_ratios", min(ratios), "0 (window only) or a ratio of 1 or more")
    _need(not any(ratios[layers:]), "compress_ratios", list(ratios[layers:]), "0 for every draft stage")
    _increasing("kv_source_layer_ids", c.kv_source_layer_ids, layers)
    _increasing("index_source_layer_ids", c.index_source_layer_ids, layers)
    missing = sorted(set(c.kv_source_layer_ids) - set(c.index_source_layer_ids))
    _need(not missing, "index_source_layer_ids", list(c.index_source_layer_ids), f"all kv sources, {missing} too")
    for layer in c.index_source_layer_ids:
        allowed = f"layers with compress_ratios above 0; layer {layer} has 0"
        _need(ratios[layer] > 0, "index_source_layer_ids", layer, allowed)
    for layer in range(layers):
        if ratios[layer] == 0:
            continue
        source = max((s for s in c.kv_source_layer_ids if s <= layer), default=None)
        if source is None:
            found = f"layer {layer} with ratio {ratios[layer]} before every source"
            raise ConfigError(f"kv_source_layer_ids: found {found}, allowed is a source at or before it")
        allowed = f"{ratios[source]}, the ratio of its kv source, layer {source}"
        _need(ratios[layer] == ratios[source], "compress_ratios", f"{ratios[layer]} at layer {layer}", allowed)
    _pool(c)


def _pool(c: ModelConfig) -> None:
    source = c.candidate_source_layer_id
    if source == -1:
        return
    allowed = f"-1 (no pool) or one of index_source_layer_ids {list(c.index_source_layer_ids)}"
    _need(source in c.index_source_layer_ids, "candidate_source_layer_id", source, allowed)
    later = [s for s in c.kv_source_layer_ids if s > source]
    allowed = f"a layer at or after the last kv source; {later} come later and read other entries"
    _need(not later, "candidate_source_layer_id", source, allowed)
    holds = (c.candidate_topk_blocks - 1) * c.candidate_block_size + 1
    allowed = f"enough blocks to hold index_topk {c.index_topk}: (blocks - 1) * {c.candidate_block_size} + 1 = {holds}"
    _need(holds >= c.index_topk, "candidate_topk_blocks", c.candidate_topk_blocks, allowed)


def _moe(c: ModelConfig) -> None:
    for kind in ("num_experts_per_tok", "dspark_num_experts_per_tok"):
        total = c.n_routed_experts if kind == "num_experts_per_tok" else c.dspark_n_routed_experts
        _need(getattr(c, kind) <= total, kind, getattr(c, kind), f"at most the {total} routed experts")
    allowed = f"0..{c.num_hidden_layers}"
    _need(0 <= c.num_hash_layers <= c.num_hidden_layers, "num_hash_layers", c.num_hash_layers, allowed)


def _engram(c: ModelConfig) -> None:
    _increasing("engram_layer_ids", c.engram_layer_ids, c.num_hidden_layers)
    count = len(c.engram_layer_ids)
    found = f"{len(c.engram_num_embeddings)} entries"
    _need(len(c.engram_num_embeddings) == count, "engram_num_embeddings", found, f"one for each of {count} tables")
    _need(c.engram_max_ngram_size >= 2, "engram_max_ngram_size", c.engram_max_ngram_size, "2 or more")
    _need(2 <= c.engram_vocab_size < MAX_PRIME, "engram_vocab_size", c.engram_vocab_size, f"2..{MAX_PRIME - 1}")
    allowed = f"at most vocab_size, {c.vocab_size}"
    size = c.engram_compressed_vocab_size
    _need(size <= c.vocab_size, "engram_compressed_vocab_size", size, allowed)
    allowed = f"a token id, 0..{c.vocab_size - 1}"
    _need(0 <= c.engram_pad_token_id < c.vocab_size, "engram_pad_token_id", c.engram_pad_token_id, allowed)
    columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads
    allowed = f"at most {MAX_COLUMNS} rows a token, (engram_max_ngram_size - 1) x engram_n_heads"
    # Before the search for as many primes.
    _need(columns <= MAX_COLUMNS, "engram_n_heads", f"{c.engram_n_heads} ({columns} rows)", allowed)
    primes = table_primes(count, c.engram_max_ngram_size, c.engram_n_heads, c.engram_vocab_size)
    for layer, rows, row_primes in zip(c.engram_layer_ids, c.engram_num_embeddings, primes, strict=True):
        total = sum(row_primes)
        allowed = f"at least {total}, the sum of its primes (layer {layer})"
        _need(rows >= total, "engram_num_embeddings", rows, allowed)
        allowed = f"at most {MAX_PRIME} (32-bit row ids)"
        _need(rows <= MAX_PRIME, "engram_num_embeddings", rows, allowed)


def _tokens_and_drafts(c: ModelConfig) -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "dspark_noise_token_id"):
        value = getattr(c, name)
        _need(0 <= value < c.vocab_size, name, value, f"a token id, 0..{c.vocab_size - 1}")
    if c.num_nextn_predict_layers:
        _increasing("dspark_target_layer_ids", c.dspark_target_layer_ids, c.num_hidden_layers)
        _need(bool(c.dspark_target_layer_ids), "dspark_target_layer_ids", [], "at least one layer")


def _vision(v: VisionConfig) -> None:
    for name in """num_hidden_layers hidden_size num_attention_heads intermediate_size patch_size rope_theta
    downsample_ratio max_image_tokens min_pixels""".split():
        _need(getattr(v, name) > 0, f"vision_config.{name}", getattr(v, name), "a value above 0")
    _need(v.model_type == "deepseek_v41_vision", "vision_config.model_type", v.model_type, "'deepseek_v41_vision'")
    allowed = f"a multiple of 4 x num_attention_heads, {4 * v.num_attention_heads} (2-D RoPE)"
    _need(v.hidden_size % (4 * v.num_attention_heads) == 0, "vision_config.hidden_size", v.hidden_size, allowed)
    if v.max_wh_ratio is not None:
        _need(v.max_wh_ratio > 0, "vision_config.max_wh_ratio", v.max_wh_ratio, "null or a value above 0")
