"""A fragile case layer by layer: each layer runs from its recorded inputs, so that a moved code cannot reach the next."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.block import block, first_mix
from dsv41.config import ModelConfig
from dsv41.indexer import candidate_blocks
from dsv41.mhc import Residual, settle
from dsv41.model import draft_input, embed, make_tokens, unembed
from dsv41.numerics import Policy, Taps, record
from dsv41.params import TextParams
from dsv41.plan import LayerPlan, layer_plans
from dsv41.site import Shared


def _shared(want: dict[str, jax.Array], plan: LayerPlan, config: ModelConfig) -> Shared:
    """What earlier layers published, as recorded; the layer itself replaces what it owns."""
    if plan.ratio == 0:
        return Shared()
    name = "layers.{}.{}".format
    pool = None
    if plan.pool == "consumes":
        recorded = want[name(plan.kv_source, "indexer.candidates")]
        none = jnp.zeros(recorded.shape[:2], jnp.int32)
        scores = jnp.where(recorded, 0.0, -jnp.inf)
        pool = candidate_blocks(scores, none, none, config.candidate_block_size, config.candidate_topk_blocks)
    return Shared(
        main_kv=want[name(plan.kv_source, "attn.main_kv")],
        index_k=want[name(plan.kv_source, "indexer.k")],
        ids=want[name(plan.index_source, "indexer.topk")],
        pool=pool,
    )


@partial(jax.jit, static_argnames=("config", "policy"))
def _run(params: TextParams, config: ModelConfig, policy: Policy, want: dict[str, jax.Array], token_map: jax.Array) -> Taps:
    taps: Taps = {}
    ids = want["input_ids"]
    tokens = make_tokens(ids, jnp.ones_like(ids), None, token_map, config)
    residual = Residual(embed(params, ids, config, policy), first_mix(ids, config))
    means = []
    for plan, layer in zip(layer_plans(config), params.layers, strict=True):
        out = block(residual, layer, plan, _shared(want, plan, config), tokens, config, policy, taps)
        settle(out.residual, taps)
        means.append(out.mean)
        residual = Residual(want[f"layers.{plan.layer}.streams"], want[f"layers.{plan.layer}.hc_ffn.pre"])
    draft_input(means, taps)
    record(taps, "logits", unembed(params, residual.streams, residual.pre, config, taps))
    return taps


def layer_taps(
    params: TextParams, config: ModelConfig, policy: Policy, want: dict[str, np.ndarray], token_map: jax.Array
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(got, want) of batch row 0, the one whose residual streams long files keep."""
    first = {name: value[:1] for name, value in want.items()}
    got = _run(params, config, policy, {name: jnp.asarray(value) for name, value in first.items()}, token_map)
    return jax.device_get(got), first
