"""Multiply-adds of a step of this code by formula: what the model needs, and what static shapes add to it.

A step of T tokens behind a cache scores every slot of the cache's capacity, pads each expert's tokens to whole blocks, and
meets window keys block by block. Where a token or a few go through, next to nothing is added.
"""

from dsv41.analyze.costs import CORE, FORMAT_COST, SCORES, Model
from dsv41.config import ModelConfig
from dsv41.plan import layer_plans


def formats(model: Model) -> dict[str, float]:
    """Cost of a FLOP of each part beside bfloat16's."""
    costs = {w.part: FORMAT_COST[w.format] for w in model.weights}
    return costs | {r.part: FORMAT_COST[r.format] for r in model.reads}


def needed(model: Model, tokens: int, context: int) -> dict[str, int]:
    """What the last ``tokens`` of ``context`` need where every layer runs them all; the head for one."""
    parts = {w.part: w.active * (1 if w.part == "head" else tokens) for w in model.weights if w.active}
    for r in model.reads:
        rows = r.rows_of_all(context) - r.rows_of_all(context - tokens)
        parts[r.part] = parts.get(r.part, 0) + r.layers * r.macs * rows
    return parts


def as_run(config: ModelConfig, model: Model, tokens: int, capacity: int) -> dict[str, int]:
    """What `dsv41.model.extend` multiplies in a step of ``tokens`` of one request behind a cache of ``capacity``."""
    c, plans = config, layer_plans(config)
    parts = needed(model, tokens, tokens)
    owners = [p for p in plans if p.owns_kv]
    # A group's key is made in the step that may complete it.
    groups = sum((p.ratio - 1 + tokens) // p.ratio for p in owners)
    parts["index keys"] = groups * c.head_dim * c.index_head_dim
    parts["mHC"] += len(plans) * 2 * tokens * c.hc_mult**2 * c.hidden_size  # streams mixed by their coefficients
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    parts["routed experts"] = len(plans) * expert * expert_rows(tokens * c.num_experts_per_tok, c.n_routed_experts)
    parts[CORE] = parts[SCORES] = 0
    size = min(tokens, c.sliding_window)
    blocks = -(-tokens // size)
    for p in plans:
        read = blocks * size * (c.sliding_window + size)
        if p.ratio:
            entries, pool = capacity // p.ratio, pooled(c, capacity)
            gathered = p.pool == "consumes" and tokens * pool <= entries
            scored = pool if gathered else entries
            k = min(c.index_topk, scored if p.index_source == p.layer else entries)
            read += tokens * (k if entries > 8 * k or tokens * k <= entries else entries)
            if p.selects:
                # Each head's products, then their weighted sum.
                parts[SCORES] += tokens * scored * c.index_n_heads * (c.index_head_dim + 1)
        parts[CORE] += 2 * c.q_width * read
    return {part: macs for part, macs in parts.items() if macs}


def expert_rows(items: int, experts: int) -> int:
    """Rows of the grouped products of ``items`` token-expert pairs, blocks filled up (`dsv41.moe.grouped_experts`)."""
    if items <= experts:
        return items
    block = 8
    while block < 64 and block * experts * 2 <= items:
        block *= 2
    return (-(-items // block) + experts) * block


def pooled(config: ModelConfig, capacity: int) -> int:
    """Entries of the candidate pool behind a cache of ``capacity``."""
    block = config.candidate_block_size
    return min(config.candidate_topk_blocks, -(-capacity // block)) * block
