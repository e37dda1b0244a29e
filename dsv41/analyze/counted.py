"""The numbers of `own`, counted: parameters from `ParamSpec`, cache bytes from the cache pytree, products from the jaxpr."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from dsv41.analyze.costs import CORE, SCORES
from dsv41.cache import Cache, init_cache
from dsv41.config import ModelConfig
from dsv41.model import extend
from dsv41.numerics import PACKED
from dsv41.params import ParamSpec, abstract_params, text_specs
from dsv41.plan import layer_plans
from dsv41.prefill import prefill

POLICY = replace(PACKED, compute_dtype=jnp.bfloat16)
# The first of these names on a weight's way through the parameter tree says its part.
_PARTS = {
    "compressor": "compressors",
    "wk": "index keys",
    "weights_proj": "index head weights",
    "indexer": "index queries",
    "gate": "router",
    "experts": "routed experts",
    "shared": "shared experts",
    "hc_attn": "mHC",
    "hc_ffn": "mHC",
    "hc_head": "head",
    "attn": "attention projections",
    "head": "head",
}
_NO_PRODUCT = ("embedding", "Engram tables", "gains, biases, sinks")


@dataclass
class Counted:
    """Of one part: parameters, the matrices among them that one token multiplies, and bytes as released."""

    size: int = 0
    active: int = 0
    bytes: int = 0


def _part(path: tuple, spec: ParamSpec) -> str:
    names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    if spec.init != "normal":
        return "gains, biases, sinks"
    if "engram" in names:
        return "Engram tables" if names[-1] == "embed" else "Engram projections"
    return next((part for name, part in _PARTS.items() if name in names), "embedding")


@cache
def _spec_parts(config: ModelConfig) -> list[tuple[str, ParamSpec]]:
    leaves = jax.tree_util.tree_leaves_with_path(text_specs(config), is_leaf=lambda x: isinstance(x, ParamSpec))
    return [(_part(path, spec), spec) for path, spec in leaves]


def counted_weights(config: ModelConfig) -> dict[str, Counted]:
    """`Counted` of every part; tables of ids are no parameters, but have bytes."""
    block = config.quantization_config.weight_block_size if config.quantization_config else (32, 32)
    parts: dict[str, Counted] = {}
    for part, spec in _spec_parts(config):
        one = parts.setdefault(part, Counted())
        one.bytes += spec.released_bytes((block[0], block[1]))
        if spec.family == "frozen":
            continue
        one.size += spec.size
        if part not in _NO_PRODUCT:
            one.active += spec.size * config.num_experts_per_tok // spec.shape[0] if spec.stacked else spec.size
    return parts


def abstract_cache(config: ModelConfig, capacity: int) -> Cache:
    """The packed cache of one request, as shapes."""
    return jax.eval_shape(lambda: init_cache(config, POLICY, 1, capacity))


def alignment(config: ModelConfig) -> int:
    """What a cache's capacity is a multiple of."""
    return math.lcm(*(p.ratio for p in layer_plans(config) if p.owns_kv))


def counted_cache(config: ModelConfig, capacity: int) -> dict[str, int]:
    """Bytes of a request's cache by the kinds of `own`."""
    tree = abstract_cache(config, capacity)
    size = lambda part: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(part))  # noqa: E731
    return {
        "main KV": size([s.main_kv for s in tree.sources]),
        "index keys": size([s.index_k for s in tree.sources]),
        "windows": size(tree.windows),
        "pair tails": size([(s.tail_value, s.tail_score) for s in tree.sources]),
        "history, length": size((tree.history, tree.length)),
    }


def step_arguments(config: ModelConfig, tokens: int, capacity: int) -> tuple:
    """Shapes of `extend`'s arrays: parameters, cache, ids, live, token map."""
    shape = jax.ShapeDtypeStruct
    ids, live = shape((1, tokens), jnp.int32), shape((1, tokens), jnp.bool)
    folding = shape((config.vocab_size,), jnp.int32)
    return abstract_params(text_specs(config)), abstract_cache(config, capacity), ids, live, folding


def step(config: ModelConfig, rows: int | None = None) -> Any:
    """`extend` of one request behind a packed cache, of `step_arguments`; with ``rows``, `prefill` of a chunk of its prompt.

    rows: of the decoder. The prompt ends with the chunk.
    """
    if rows is None:
        return lambda params, cache, ids, live, folding: extend(params, config, POLICY, cache, ids, live, folding)

    def run(params: Any, cache: Cache, ids: Any, live: Any, folding: Any) -> Any:
        return prefill(params, config, POLICY, cache, ids, live, folding, cache.length + ids.shape[1], rows)

    return run


@cache
def counted_products(config: ModelConfig, tokens: int, capacity: int, rows: int | None = None) -> dict[str, int]:
    """Multiply-adds of every matrix product in a `step` of ``tokens`` new tokens, by part; nothing is allocated.

    A product with a weight belongs to the weight's part; of the others `index scores`, the attention's and mHC's.
    """
    closed = jax.make_jaxpr(step(config, rows))(*step_arguments(config, tokens, capacity))
    parts = [part for part, _ in _spec_parts(config)]
    weights = {v: part for v, part in zip(closed.jaxpr.invars, parts, strict=False) if part not in _NO_PRODUCT}
    found: Counter[str] = Counter()
    for part, macs in _products(closed.jaxpr, weights, "", 1):
        found[part] += macs
    return dict(found)


def counted_total(run: Any, *arguments: Any) -> int:
    """Multiply-adds of every matrix product in ``run`` of arrays or shapes."""
    return sum(macs for _, macs in _products(jax.make_jaxpr(run)(*arguments).jaxpr, {}, "", 1))


# A weight behind these is still that weight.
_SAME = {"convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "slice", "gather", "copy"}


def _products(jaxpr: Any, weights: dict[Any, str], scope: str, times: int) -> Iterator[tuple[str, int]]:
    """(part, multiply-adds) of each product; ``weights`` names the variables that are weights and learns those behind them."""
    for eqn in jaxpr.eqns:
        name, here = eqn.primitive.name, f"{scope}/{eqn.source_info.name_stack}"
        known = [None if hasattr(v, "val") else weights.get(v) for v in eqn.invars]
        if name == "dot_general":
            yield next(filter(None, known), _activation_part(here)), times * _macs(eqn)
        elif name in _SAME and known[0]:
            weights[eqn.outvars[0]] = known[0]
        for inner in _inner(eqn):
            given = dict(zip(inner.invars, known, strict=True)) if len(inner.invars) == len(known) else {}
            own = {v: part for v, part in given.items() if part}
            trips = eqn.params["length"] if name == "scan" else 1
            products = list(_products(inner, own, here, times * trips))
            if products and name in ("while", "cond"):
                raise NotImplementedError(f"products in a {name}: how often they run is not known")
            yield from products
            if name != "scan":
                behind = zip(eqn.outvars, inner.outvars, strict=False)
                weights |= {out: own[v] for out, v in behind if not hasattr(v, "val") and v in own}


def _inner(eqn: Any) -> list[Any]:
    values = [v for value in eqn.params.values() for v in (value if isinstance(value, tuple | list) else (value,))]
    return [getattr(v, "jaxpr", v) for v in values if hasattr(v, "eqns")]


def _macs(eqn: Any) -> int:
    (contract, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    return math.prod(eqn.outvars[0].aval.shape) * math.prod(left[i] for i in contract)


def _activation_part(scope: str) -> str:
    names = scope.split("/")
    for name, part in (("indexer", SCORES), ("mhc", "mHC"), ("attention", CORE)):
        if name in names:
            return part
    return "other"


# What an HLO instruction of these does is known before the program runs, or costs nothing.
_NO_KERNEL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}


def compiled_cost(config: ModelConfig, tokens: int, capacity: int, rows: int | None = None) -> dict[str, float]:
    """XLA's own count of the compiled step: FLOPs of all operations (a loop's body once), and the kernels of its program."""
    compiled: Any = jax.jit(step(config, rows)).lower(*step_arguments(config, tokens, capacity)).compile()
    cost = compiled.cost_analysis()
    entry = compiled.as_text().split("\nENTRY ", 1)[1].split("\n}", 1)[0]
    operations = re.findall(r"^ +(?:ROOT )?%?[\w.-]+ = (?:\([^=]*?\)|\S+) ([\w-]+)\(", entry, re.MULTILINE)
    return {"flops": cost["flops"], "kernels": sum(name not in _NO_KERNEL for name in operations)}
