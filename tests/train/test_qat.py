"""Quantisation-aware training: the golden block, weights as the release stores them, gradients of the masters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.params import spec_leaves, text_specs
from dsv41.quant import EXPERT_WEIGHT, MAIN_KV, fake_quant, pack, quantize, scale_values, unpack
from tests.models import tiny_config, tiny_params
from train.qat import fake_quant_tiles, fake_quantized

CONFIG = tiny_config()


def test_golden_main_kv_block():
    x = jnp.asarray([0.1 * (n + 1) * (-1) ** n for n in range(16)], jnp.float32)
    codes, scales = quantize(x, MAIN_KV)
    assert codes.shape == (16,) and scale_values(scales, MAIN_KV).tolist() == [0.28125]
    magnitudes = [0.140625, 0.140625, 0.28125, 0.421875, *[0.5625] * 3, *[0.84375] * 2, *[1.125] * 5, 1.6875, 1.6875]
    np.testing.assert_array_equal(fake_quant(x, MAIN_KV), [m * (-1) ** n for n, m in enumerate(magnitudes)])


@pytest.mark.pitfall("F6")
def test_weights_stand_as_the_release_stores_them_and_no_others():
    params, specs = tiny_params(CONFIG), text_specs(CONFIG)
    found = fake_quantized(params, specs, ("fp4", "fp8", "fp8_rows"))
    kinds = set()
    for spec, old, new in zip(spec_leaves(specs), *map(jax.tree.leaves, (params, found)), strict=True):
        if spec.stored not in ("fp4", "fp8", "fp8_rows"):
            np.testing.assert_array_equal(new, old)
            continue
        kinds.add(spec.stored)
        assert np.any(new != old), spec.key
        # Half of E2M1's widest step, 4 to 6, is a fifth of a group's largest number where that is 5; E4M3's is a sixteenth.
        assert np.abs(new - old).max() <= (1 / 5 if spec.stored == "fp4" else 1 / 16) * np.abs(old).max()
    assert kinds == {"fp4", "fp8", "fp8_rows"}
    expert = params.layers[0].ffn.experts.w1
    np.testing.assert_array_equal(found.layers[0].ffn.experts.w1, unpack(*pack(expert, EXPERT_WEIGHT), EXPERT_WEIGHT))
    only = fake_quantized(params, specs, ("fp4",))
    np.testing.assert_array_equal(only.layers[0].attn.wq_a, params.layers[0].attn.wq_a)
    again = fake_quantized(found, specs, ("fp4", "fp8", "fp8_rows"))
    for a, b in zip(*map(jax.tree.leaves, (found, again)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", [(32, 64), (40, 50), (2, 33, 32)])
def test_tiles_of_any_shape_with_the_gradient_of_the_identity(shape):
    weight = jnp.asarray(np.random.default_rng(0).standard_normal(shape, dtype=np.float32))
    seen = fake_quant_tiles(weight)
    found = jax.grad(lambda w: jnp.sum(fake_quant_tiles(w) ** 2))(weight)
    # Both passes see the dequantised weight, and its gradient goes to the master unchanged.
    np.testing.assert_allclose(found, 2 * seen, rtol=1e-6)
    for one, tile in zip(np.asarray(seen).reshape(-1, *shape[-2:]), weight.reshape(-1, *shape[-2:]), strict=True):
        np.testing.assert_array_equal(fake_quant_tiles(tile), one)
