"""grouped_matmul: every implementation against float64, gradients against the reference, what the kernels refuse."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.hf.stored import StoredWeight
from kernels_pallas import registry
from kernels_pallas.grouped_matmul import cases, gpu, reference, tpu
from kernels_pallas.grouped_matmul.api import grouped_matmul, grouped_swiglu
from kernels_pallas.grouped_matmul.cases import Case
from kernels_pallas.interpret import gpu_interpreter, gpu_races

DEVICE = gpu.Device(ctas=3, interpret=gpu_interpreter())
GPU_CASES = [name for name, case in cases.SMALL.items() if gpu.refusal(*cases.abstract(case)) is None]
TPU_CASES = {
    "random": Case(200, 3, 128, 256, dead=5),
    "SwiGLU, float32": Case(70, 4, 128, 128, "skewed", weights="float32", dtype="float32", paired=True, dead=70),
}


def dense(weight) -> np.ndarray:
    values = weight.dequantize() if isinstance(weight, StoredWeight) else weight
    return np.asarray(values, np.float64)


def exact(x, weights, sizes, scale, limit=0.0) -> np.ndarray:
    """In float64, group by group."""
    x, out, start = np.asarray(x, np.float64), np.zeros((x.shape[0], weights[0].shape[1])), 0
    for group, size in enumerate(np.asarray(sizes)):
        rows = slice(start, start + size)
        products = [x[rows] @ dense(w)[group].T for w in weights]
        if scale is not None:
            gate, up = np.minimum(products[0], limit), np.clip(products[1], -limit, limit)
            products = [np.asarray(scale, np.float64)[rows, None] * gate / (1 + np.exp(-gate)) * up]
        out[rows] = products[0]
        start += size
    return out


def check(got, case: Case, args: tuple) -> None:
    """bfloat16 rounds the result to half a step of 2**-8 of itself, and the reference SwiGLU's two operands before it, of which
    silu passes on 1.28 of a relative error: 2**-9 (1 + 1 + 1.28) = 6.4e-3. float32 sums of at most 512 products: 1e-6."""
    want = exact(*args, **cases.options(case))
    assert got.shape == want.shape and got.dtype == args[0].dtype
    tolerance = 6.5e-3 if got.dtype == jnp.bfloat16 else 2e-6
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=tolerance * max(np.abs(want).max(), 1e-30))


@pytest.mark.parametrize("name", cases.SMALL)
def test_reference(name):
    case = cases.SMALL[name]
    args = cases.arguments(case, poison=True)
    check(jax.jit(partial(reference.run, **cases.options(case)))(*args), case, args)


@pytest.mark.parametrize("name", GPU_CASES)
def test_gpu_kernels_interpreted(name):
    """Rows of no group hold NaN; the interpreter watches for races between the warpgroups."""
    case = cases.SMALL[name]
    args = cases.arguments(case, poison=True)
    got = jax.block_until_ready(gpu.run(*args, **cases.options(case), device=DEVICE))
    assert not gpu_races()
    check(got, case, args)


@pytest.mark.parametrize("name", TPU_CASES)
def test_tpu_interpreted(name):
    case = TPU_CASES[name]
    args = cases.arguments(case, poison=True)
    assert tpu.refusal(*args, **cases.options(case)) is None
    check(tpu.run(*args, **cases.options(case), interpret=True), case, args)


def gradients(run, args, cotangent, **options):
    @jax.jit
    def pulled(x, weights, sizes, scale, cotangent):
        return jax.vjp(lambda x, weights, scale: run(x, weights, sizes, scale, **options), x, weights, scale)[1](cotangent)

    return pulled(*args, cotangent)


GRADIENTS = {
    "product": Case(150, 4, 128, 128, dead=9),
    "SwiGLU": Case(90, 3, 128, 128, "skewed", paired=True, dead=4),
    "FP4, SwiGLU": Case(20, 2, 256, 64, weights="fp4", paired=True, dead=2),
}


# jax's kernel for TPU takes no stored weights.
@pytest.mark.parametrize(("impl", "name"), [("gpu", n) for n in GRADIENTS] + [("tpu", n) for n in ("product", "SwiGLU")])
def test_gradients_agree_with_the_reference(impl, name):
    """bfloat16 gradients differ by the rounding of SwiGLU's operands and results, 2**-9 each, a few of them."""
    case = GRADIENTS[name]
    args, options = cases.arguments(case, seed=1, poison=True), cases.options(case)
    run = partial(gpu.run, device=DEVICE) if impl == "gpu" else partial(tpu.run, interpret=True)
    out = jax.eval_shape(partial(reference.run, **options), *args)
    cotangent = jax.random.normal(jax.random.key(2), out.shape, out.dtype)
    # jax's own kernel for TPU is not written for strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        got = gradients(run, args, cotangent, **options)
    want = gradients(reference.run, args, cotangent, **options)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape
        if g.dtype != jax.dtypes.float0:
            g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
            np.testing.assert_allclose(g, w, rtol=0, atol=2e-2 * np.abs(w).max())


def test_weight_gradient_of_rows_that_begin_anywhere():
    """Every alignment of a group's first row to the 8 rows of a tile, NaN around them, an empty group between."""
    from kernels_pallas.grouped_matmul.gradient import Tile, weight_gradient

    sizes = np.asarray([9, 70, 0, 1, 12], np.int32)
    keys = jax.random.split(jax.random.key(0), 2)
    g, x = (jax.random.normal(key, (104, 64 * n), jnp.bfloat16) for key, n in zip(keys, (2, 2), strict=True))
    g, x = (jnp.where(jnp.arange(104)[:, None] < 92, a, jnp.nan) for a in (g, x))
    got = weight_gradient(g, x, jnp.asarray(sizes), tile=Tile(stages=2), ctas=2, interpret=gpu_interpreter())
    assert not gpu_races()
    start = 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        want = np.asarray(g[rows], np.float64).T @ np.asarray(x[rows], np.float64)
        # One rounding to bfloat16, 2**-9 of the value.
        np.testing.assert_allclose(np.asarray(got[group], np.float64), want, rtol=4e-3, atol=1e-6)
        start += size


@pytest.mark.parametrize("name", cases.REAL)
def test_real_shapes_lower_for_the_device(name):
    case = cases.REAL[name]
    args, options = cases.abstract(case), cases.options(case)
    assert gpu.refusal(*args, **options) is None
    run = cases.timed(case, partial(gpu.run, **options))
    assert "mosaic_gpu" in jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    if tpu.refusal(*args, **options) is None and case.groups < 100:
        run = cases.timed(case, partial(tpu.run, **options))
        with jax.numpy_dtype_promotion("standard"):  # which jax's own kernel asks for
            assert "tpu_custom_call" in jax.jit(run).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


def test_refusals_say_what_is_allowed():
    def reason(kernel=gpu, **changes):
        case = Case(**{"rows": 4, "groups": 2, "depth": 256, "width": 128, **changes})
        return kernel.refusal(*cases.abstract(case), **cases.options(case))

    assert reason() is None and reason(tpu) is None and reason(weights="fp8") is None
    assert "allowed is bfloat16" in reason(dtype="float32")
    assert "128 x 96, allowed are multiples of 64" in reason(depth=96)
    assert "fp4 weights have 320 columns, allowed are multiples of 256" in reason(depth=320, weights="fp4")
    assert "multiples of 128" in reason(tpu, width=64)
    assert "allowed are arrays" in reason(tpu, weights="fp4")
    x, (weight,), sizes, _ = cases.abstract(Case(4, 2, 256, 128, weights="fp8"))
    assert "64 x 64" in str(gpu.refusal(x, (weight.replace(tile=(64, 64)),), sizes))
    args = cases.abstract(Case(4, 2, 96, 128))
    assert registry.choose("grouped_matmul", "auto", *args, backend="gpu").impl == "reference"
    with pytest.raises(registry.Refused, match="multiples of 64"):
        registry.choose("grouped_matmul", "gpu", *args, backend="gpu")


def test_both_functions_of_the_op():
    case = Case(20, 3, 32, 16, paired=True, weights="float32", dtype="float32", dead=2)
    x, (gate, up), sizes, scale = cases.arguments(case)
    check(grouped_matmul(x, gate, sizes), Case(20, 3, 32, 16), (x, (gate,), sizes, None))
    got = grouped_swiglu(x, gate, up, sizes, scale, limit=10.0, impl="reference")
    check(got, case, (x, (gate, up), sizes, scale))


def test_tiles_of_stored_weights_hold_most_groups():
    assert gpu.choose(192, 48, True).rows == gpu.choose(192, 48, False).rows == 8
    assert gpu.choose(193, 48, True).rows == 16
    assert gpu.choose(24576, 384, False).rows == 128
    assert gpu.choose(16384, 64, False).rows == 128
