"""The model with mega_mhc's kernels in it: values and gradients against the model without, and where they run."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from dsv41.config import preset, replace
from dsv41.model import forward
from dsv41.numerics import Policy
from dsv41.params import abstract_params, text_specs
from kernels_pallas.mega_mhc import gpu, reference, tpu
from tests.models import VOCAB, tiny_config, tiny_params

# Three sites that have something to add, one of them of the layer before. Every token takes every expert: no router's
# rounding decides.
CONFIG = tiny_config(
    hidden_size=64,
    num_hidden_layers=2,
    compress_ratios=(0, 0),
    kv_source_layer_ids=(),
    index_source_layer_ids=(),
    candidate_source_layer_id=-1,
    engram_layer_ids=(),
    engram_num_embeddings=(),
    n_routed_experts=2,
    num_experts_per_tok=2,
    hc_sinkhorn_iters=3,
    dspark_target_layer_ids=(),
)
IDS = np.random.default_rng(0).integers(3, VOCAB, (2, 8)).astype(np.int32)
KERNELS = {
    "gpu": (CONFIG, functools.partial(gpu.run, interpret=plgpu.InterpretGPUParams())),
    "tpu": (replace(CONFIG, hidden_size=tpu.LANES), functools.partial(tpu.run, interpret=pltpu.InterpretParams())),
}


def results(config, run, monkeypatch, dtype=jnp.bfloat16):
    """Logits, taps and gradients of the model with ``run`` for the op, and how often that ran."""
    calls = []

    def counted(*args, **options):
        calls.append(args[0].shape)
        return run(*args, **options)

    monkeypatch.setattr("dsv41.mhc.mega_mhc", counted)
    fold = jnp.arange(VOCAB, dtype=jnp.int32)

    def loss(params):
        taps = {}
        logits = forward(params, config, Policy(dtype), jnp.asarray(IDS), None, fold, taps).logits
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 5]), (logits, taps)

    grads, (logits, taps) = jax.jit(jax.grad(loss, has_aux=True, allow_int=True))(tiny_params(config))
    floats = {jax.tree_util.keystr(k): g for k, g in jax.tree_util.tree_leaves_with_path(grads) if g.dtype == jnp.float32}
    return logits, taps, floats, calls


def apart(got, want):
    """Largest difference over the largest value."""
    got, want = (np.asarray(a.astype(jnp.float32)) for a in (got, want))
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-30))


@pytest.mark.parametrize("name", KERNELS)
def test_the_model_through_the_kernel_is_the_model(name, monkeypatch):
    config, run = KERNELS[name]
    logits, taps, grads, _ = results(config, reference.run, monkeypatch)
    ours = results(config, run, monkeypatch)
    assert ours[3] == [(*IDS.shape, config.hidden_size)] * 3
    assert ours[1].keys() == taps.keys() and ours[2].keys() == grads.keys()
    # The same sums of the same bfloat16 rows; a float32 of another order may round one to its other neighbour (2**-8 of it).
    assert apart(ours[0], logits) < 2**-7
    for key, value in ours[1].items():
        assert apart(value, taps[key]) < (2**-7 if value.dtype == jnp.bfloat16 else 2**-8), key
    # Cotangents pass through bfloat16 in both, at other places, and what cancels in a sum over tokens shows it. So both are
    # held to the float32 model: the kernel's error is at most 1.3 times the reference's and one rounding.
    exact = results(config, reference.run, monkeypatch, jnp.float32)[2]
    for key, value in ours[2].items():
        assert apart(value, exact[key]) < 2 * (apart(grads[key], exact[key]) + 2**-8), key


def test_the_slice_runs_it_at_every_site_on_the_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config = preset("slice")
    fold = jnp.arange(config.vocab_size, dtype=jnp.int32)

    def logits(params, ids):
        return forward(params, config, Policy(jnp.bfloat16, True, True, True), ids, None, fold).logits

    shapes = abstract_params(text_specs(config)), jax.ShapeDtypeStruct((1, 64), jnp.int32)
    text = jax.jit(logits).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    functions = dict(re.findall(r"func\.func private @(\w+)\((.*?)(?=\n  func\.func |\Z)", text, re.S))
    [holds] = [name for name, body in functions.items() if "mega_mhc_finish" in body]

    def calls(name: str) -> int:
        """How often the program comes by a function."""
        callers = re.findall(rf"call @{name}\(", text), [other for other, body in functions.items() if f"call @{name}(" in body]
        return max(len(callers[0]), sum(map(calls, callers[1])))

    # Two sites a layer, of which the first has nothing to add; of all of them one kernel is traced and lowered.
    assert calls(holds) == 2 * config.num_hidden_layers - 1
