"""Multiply-adds of a step of this code by formula: what the model needs, and what static shapes add to it.

A step of T tokens behind a cache scores every slot of the cache's capacity, pads each expert's tokens to whole blocks, and
meets window keys block by block. Where a token or a few go through, next to nothing is added.
"""

from collections import Counter

from dsv41.analyze.costs import CORE, FORMAT_COST, SCORES, Model, prefill_macs
from dsv41.config import ModelConfig
from dsv41.plan import layer_plans


def formats(model: Model) -> dict[str, float]:
    """Cost of a FLOP of each part beside bfloat16's."""
    costs = {w.part: FORMAT_COST[w.format] for w in model.weights}
    return costs | {r.part: FORMAT_COST[r.format] for r in model.reads}


def as_run(config: ModelConfig, model: Model, tokens: int, capacity: int, rows: int | None = None) -> dict[str, int]:
    """What a step of ``tokens`` of one request behind a cache of ``capacity`` multiplies, by part.

    `dsv41.model.extend` takes them through every layer; with ``rows``, `dsv41.prefill.prefill` takes so many of them at most
    through the decoder's.
    """
    c, plans = config, layer_plans(config)
    last = tokens if rows is None else min(rows, tokens)
    parts = {w.part: w.prefill * tokens + (w.active - w.prefill) * last for w in model.weights if w.active}
    parts["head"] = next(w.active for w in model.weights if w.part == "head") if last else 0
    owners = [p for p in plans if p.owns_kv]
    # A group's key is made in the step that may complete it.
    groups = sum((p.ratio - 1 + tokens) // p.ratio for p in owners)
    parts["index keys"] = groups * c.head_dim * c.index_head_dim
    mixed = c.hc_mult**2 * c.hidden_size  # a token's streams, by their coefficients
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    parts["routed experts"] = parts[CORE] = parts[SCORES] = 0
    if rows is not None:
        # The decoder's first site is worked out for what it compresses, of every token, and again for the last ones.
        parts["mHC"] += last * mixed if any(p.half == "encoder" for p in plans) else 0
        if not c.hc_single_pass:
            parts["mHC"] += tokens * c.hc_mult * (c.hc_mult + 2) * c.hc_mult * c.hidden_size
        if next(p for p in plans if p.half == "decoder").engram is not None:
            parts["Engram projections"] += tokens * (c.hc_mult + 1) * c.hidden_size * c.engram_columns * c.engram_head_dim
    for p in plans:
        time = tokens if p.half == "encoder" else last
        if not time:
            continue
        parts["mHC"] += 2 * time * mixed
        parts["routed experts"] += expert * expert_rows(time * c.num_experts_per_tok, c.n_routed_experts)
        size = min(time, c.sliding_window)
        read = -(-time // size) * size * (c.sliding_window + size)
        if p.ratio:
            entries, pool = capacity // p.ratio, pooled(c, capacity)
            gathered = p.pool == "consumes" and time * pool <= entries
            scored = pool if gathered else entries
            k = min(c.index_topk, scored if p.index_source == p.layer else entries)
            read += time * (k if entries > 8 * k or time * k <= entries else entries)
            if p.selects:
                # Each head's products, then their weighted sum.
                parts[SCORES] += time * scored * c.index_n_heads * (c.index_head_dim + 1)
        parts[CORE] += 2 * c.q_width * read
    return {part: macs for part, macs in parts.items() if macs}


def chunks(config: ModelConfig, model: Model, context: int) -> list[tuple[int, int, int | None]]:
    """Steps of a prompt of ``context`` tokens: how many, tokens of each, `as_run`'s rows; chunks of 32 windows, the rest last."""
    width, rows = 32 * config.sliding_window, model.tail
    early, rest = divmod(context - 1, width)
    return [*([(early, width, None if rows is None else 0)] if early else []), (1, rest + 1, rows)]


def prompt_as_run(config: ModelConfig, model: Model, context: int, capacity: int) -> Counter[str]:
    """What the `chunks` of a prompt multiply, by part, behind a cache of ``capacity``."""
    parts: Counter[str] = Counter()
    for times, tokens, rows in chunks(config, model, context):
        parts.update({part: times * macs for part, macs in as_run(config, model, tokens, capacity, rows).items()})
    return parts


def prompt_needed(model: Model, context: int) -> Counter[str]:
    """What a prompt of ``context`` tokens needs, by part, that of its tail among it."""
    parts: Counter[str] = Counter()
    for part, _, of_all, of_tail in prefill_macs(model, context):
        parts[part] += of_all + of_tail
    return +parts


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
