"""Small models for the tests: a config in which every role occurs at the smallest widths, with non-trivial weights."""

from functools import cache

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from dsv41.config import ModelConfig, RopeScaling, preset, replace
from dsv41.hashing import table_primes
from dsv41.model import forward
from dsv41.numerics import Policy
from dsv41.params import init_draft, init_params
from dsv41.tokenmap import token_map
from infer.model import Model
from train.tokenizer import train_tokenizer

VOCAB = 64
PLAIN = Policy()


def tiny_config(**changes) -> ModelConfig:
    """SWA, Full ratio 2, Reuse, Full ratio 1 with pool, Reuse, Reindex; window 4, top-k 4, a pool of 3 blocks of 2."""
    primes = table_primes(2, 3, 2, 53)
    base = replace(
        preset("toy"),
        vocab_size=VOCAB,
        hidden_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=2,
        head_dim=32,
        qk_rope_head_dim=8,
        q_lora_rank=16,
        o_lora_rank=8,
        rope_scaling=RopeScaling(original_max_position_embeddings=64),
        n_routed_experts=4,
        sliding_window=4,
        compress_ratios=(0, 2, 2, 1, 1, 1),
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 5),
        index_n_heads=16,
        index_topk=4,
        candidate_source_layer_id=3,
        candidate_topk_blocks=3,
        candidate_block_size=2,
        engram_layer_ids=(1, 2),
        engram_max_ngram_size=3,
        engram_vocab_size=53,
        engram_num_embeddings=tuple(sum(p) + 3 for p in primes),
        engram_compressed_vocab_size=VOCAB,
        dspark_target_layer_ids=(3, 4, 5),
    )
    return replace(base, **changes)


@cache
def tiny_params(config: ModelConfig, seed: int = 0):
    """Initial weights moved off their trivial values: gains, sinks, biases and mHC coefficients all differ."""
    return _shaken(init_params(config, jax.random.key(seed)), seed)


def _shaken(params, seed: int):
    rng = np.random.default_rng(seed)

    def shake(leaf):
        if leaf.dtype == jnp.int32:
            return leaf
        noise = rng.standard_normal(leaf.shape).astype(np.float32)
        return leaf + noise * np.float32(0.2 if leaf.ndim < 2 else 1.0 / leaf.shape[-1] ** 0.5)

    return jax.tree.map(shake, params)


def drafting_config(**changes) -> ModelConfig:
    """Four layers, SWA, Full of ratio 2, Full of ratio 1 with pool, Reindex, and two draft stages that read the last three."""
    base = tiny_config(
        num_hidden_layers=4,
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=2,
        num_nextn_predict_layers=2,
        dspark_target_layer_ids=(1, 2, 3),
        compress_ratios=(0, 2, 1, 1, 0, 0),
    )
    return replace(base, **changes)


@cache
def tiny_draft(config: ModelConfig, seed: int = 1):
    """`tiny_params` of a drafter."""
    return _shaken(init_draft(config, jax.random.key(seed)), seed)


@cache
def jitted(config: ModelConfig, policy: Policy = PLAIN):
    """``(params, ids, segments, image) -> dict`` of every recorded intermediate and the logits."""

    @jax.jit
    def run(params, ids, segments, image):
        taps: dict = {}
        forward(params, config, policy, ids, segments, jnp.arange(config.vocab_size, dtype=jnp.int32), taps, image)
        return taps

    def call(params, ids, segments=None, image=None):
        ids = np.asarray(ids, np.int32)
        segments = np.ones_like(ids) if segments is None else np.asarray(segments, np.int32)
        image = np.zeros(ids.shape, bool) if image is None else image
        return jax.tree.map(np.asarray, run(params, ids, segments, image))

    return call


def tiny_model(**changes) -> Model:
    """`tiny_config` with a tokenizer of 300 tokens, opened for inference."""
    tokenizer = train_tokenizer([f"def f{n}(a, b):\n    return a * {n} + b  # größer 🙂\n" for n in range(40)], 300)
    fold, classes = token_map(tokenizer)
    changes = {"engram_num_embeddings": tuple(sum(p) for p in table_primes(2, 3, 2, 53)), **changes}
    config = tiny_config(
        vocab_size=tokenizer.get_vocab_size(), engram_compressed_vocab_size=classes, max_position_embeddings=128, **changes
    )
    return Model(tiny_params(config), config, tokenizer, fold, 0)


def equations(jaxpr):
    """Every equation of a jaxpr, those inside its loops and calls included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def sizes(jaxpr):
    """The size of every array that a jaxpr makes."""
    for equation in equations(jaxpr):
        yield from (variable.aval.size for variable in equation.outvars if hasattr(variable.aval, "size"))


def close(a, b):
    """fp32 sums in another order, six layers deep: 2e-5 of the largest value, headroom about 4."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape and np.isfinite(a).all()
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1e-30, float(np.abs(b).max(initial=0.0))))
