"""quantize: bytes of every implementation against NumPy's, for all codes; what the kernel's threads do, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv41.cache import put
from dsv41.quant import ACTIVATION, E2M1_VALUES, INDEX_KEY, MAIN_KV, WINDOW_KV, fake_quant, pack_rows
from kernels_pallas import registry
from kernels_pallas.quantize import cases, gpu, reference
from kernels_pallas.quantize.api import quantize_apart, quantize_append, quantize_rows
from tests.kernels.threads import execute

FORMATS = [MAIN_KV, WINDOW_KV, INDEX_KEY]
GPU_CASES = {n: c for n, c in cases.SMALL.items() if gpu.refusal(*cases.abstract(c), **cases.options(c)) is None}


def nearest_even(values, grid):
    """Index of the number in ascending ``grid`` nearest to each of ``values``; a tie to the even index."""
    grid = np.asarray(grid, np.longdouble)
    above = np.clip(np.searchsorted(grid, values), 1, len(grid) - 1)
    low, high = values - grid[above - 1], grid[above] - values
    return np.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1)


def exact(x, fmt):
    """`pack` by search in the table of all numbers, in long double."""
    e4m3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    groups = np.asarray(x, np.float32).reshape(-1, x.shape[-1] // fmt.group, fmt.group)
    amax = np.maximum(np.abs(groups).max(-1), np.float32(fmt.floor))
    if fmt.scale == "e4m3":
        scale = nearest_even(amax.astype(np.longdouble) / 6, e4m3)
        divisor = e4m3[scale].astype(np.longdouble)
    else:
        least = (amax * (np.float32(1) / np.float32(fmt.max))).astype(np.float64)
        scale = 127 + np.ceil(np.log2(least)).astype(np.int64)
        scale += np.exp2(scale - 127.0) < least
        scale -= np.exp2(scale - 128.0) >= least
        divisor = np.exp2(scale - 127.0).astype(np.longdouble)
    scaled = groups.astype(np.longdouble) / divisor[..., None]
    codes = nearest_even(np.abs(scaled), E2M1_VALUES if fmt.element == "e2m1" else e4m3)
    sign = np.signbit(groups).astype(np.uint8) << (3 if fmt.element == "e2m1" else 7)
    codes = (codes.astype(np.uint8) | sign).reshape(x.shape)
    if fmt.element == "e2m1":
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    return codes, scale.astype(np.uint8).reshape(*x.shape[:-1], -1)


def values(fmt, width, dtype):
    """Rows of all magnitudes, of exact ties and of zeros; every code of the elements is among what they become."""
    random = np.random.default_rng(0)
    grid = np.asarray(E2M1_VALUES if fmt.element == "e2m1" else np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn))
    grid = grid.astype(np.float32)
    points = np.sort(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]))  # numbers and ties
    scales = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    if fmt.scale == "e8m0":
        scales = np.exp2(np.arange(-9, 9)).astype(np.float32)
    tied = np.resize(random.permutation(np.concatenate([points, -points])), (len(scales), width))
    tied[:, :: fmt.group] = grid[-1]  # so that the scale is the one meant
    between = np.repeat(grid[-1] * (scales[1:, None] + scales[:-1, None]) / 2, width, 1)  # ties of scales
    near = np.nextafter(tied * scales[:, None], random.choice(np.float32([-1e9, 1e9]), tied.shape))
    return np.concatenate(
        [
            tied * scales[:, None],
            near,  # to ties
            between,
            np.nextafter(between, random.choice(np.float32([-1e9, 1e9]), between.shape[:1])[:, None]),
            random.standard_normal((40, width)) * np.exp2(random.integers(-40, 40, (40, 1))),
            random.integers(-24, 25, (40, width)) / 4,
            np.where(np.arange(width) % fmt.group == 3, 1e-30, 0)[None],
            [np.zeros(width), np.full(width, -0.0), np.full(width, 3.3e38)],
        ]
    ).astype(dtype)


@pytest.mark.pitfall("F1", "F2", "F3")
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("fmt", [*FORMATS, ACTIVATION])
def test_reference_and_threads_give_the_exact_bytes(fmt, dtype):
    width = 64
    x = values(fmt, width, dtype)
    codes, scales = exact(x, fmt)
    elements = np.concatenate([codes & 15, codes >> 4]) if fmt.element == "e2m1" else codes
    assert len(np.unique(elements)) == (16 if fmt.element == "e2m1" else 254)
    want = np.concatenate([codes, scales], axis=-1)
    np.testing.assert_array_equal(quantize_rows(jnp.asarray(x), fmt, impl="reference"), want)
    apart = jax.jit(functools.partial(quantize_apart, fmt=fmt, impl="reference"))(jnp.asarray(x))
    np.testing.assert_array_equal(apart[0], codes)
    np.testing.assert_array_equal(apart[1], scales)
    program = gpu.program(fmt, width, len(x), jnp.dtype(dtype), None, apart=True)
    blocks = -(-x.size // (gpu.CHANNELS * gpu.THREADS))
    (_, *got), (_, *times) = execute(program, [x, np.zeros_like(codes), np.zeros_like(scales)], gpu.THREADS, blocks)
    np.testing.assert_array_equal(got[0], codes.reshape(-1))
    np.testing.assert_array_equal(got[1], scales.reshape(-1))
    assert all((count == 1).all() for count in times)


def test_fake_quantisation_divides_where_xla_would_multiply():
    """0.5859375 is two and a half times the scale that 1.390625 asks for: a tie, between 2 and 3 times."""
    x = jnp.zeros((1, 16), jnp.float32).at[0, :2].set(jnp.asarray([1.390625, 0.5859375]))
    for run in (fake_quant, jax.jit(fake_quant, static_argnums=1)):
        assert float(run(x, MAIN_KV)[0, 1]) == 2 * 0.234375


@pytest.mark.parametrize("name", GPU_CASES)
def test_threads_write_what_the_reference_does_and_nothing_else(name):
    case = cases.SMALL[name]
    x, pool, slots = cases.arguments(case)
    static = cases.options(case)
    want = jax.tree.leaves(reference.run(x, pool, slots, **static))
    where = None if pool is None else (case.time, case.slots)
    program = gpu.program(static["fmt"], case.width, case.batch * case.time, x.dtype, where, static["apart"])
    given = [np.asarray(x)] if pool is None else [np.asarray(x), np.asarray(slots)]
    outs = [np.zeros(w.shape, np.uint8) for w in want] if pool is None else [np.asarray(pool)]
    blocks = -(-x.size // (gpu.CHANNELS * gpu.THREADS))
    buffers, times = execute(program, [*given, *outs], gpu.THREADS, blocks)
    for got, count, w in zip(buffers[len(given) :], times[len(given) :], want, strict=True):
        np.testing.assert_array_equal(got.reshape(w.shape), w)
        if pool is None:
            assert (count == 1).all()
        else:
            assert (count.reshape(w.shape)[(got.reshape(w.shape) == np.asarray(pool))] <= 1).all() and count.max() == 1
            kept = sum(int((s < case.slots).sum()) for s in np.asarray(slots))
            assert count.sum() == kept * w.shape[-1]


def test_appending_is_packing_and_putting():
    case = cases.SMALL["main KV"]
    x, pool, slots = cases.arguments(case, seed=3)
    want = put(pool, pack_rows(x, MAIN_KV), slots)
    np.testing.assert_array_equal(quantize_append(pool, x, slots, MAIN_KV), want)
    negative = slots.at[0, 0].set(-1)
    kept = put(pool, pack_rows(x, MAIN_KV), negative.at[0, 0].set(case.slots))
    np.testing.assert_array_equal(quantize_append(pool, x, negative, MAIN_KV), kept)


@pytest.mark.parametrize("name", cases.REAL)
def test_real_shapes_lower_for_the_device_and_pools_are_written_in_place(name):
    case = cases.REAL[name]
    args = cases.abstract(case)
    assert gpu.refusal(*args, **cases.options(case)) is None
    run = jax.jit(functools.partial(gpu.run, **cases.options(case)), donate_argnums=1 if case.slots else ())
    text = run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and ("output_operand_alias" in text) == bool(case.slots)


def test_refusals_say_what_is_allowed():
    def reason(**changes):
        case = cases.Case(**{"batch": 2, "time": 1, "format": "main", "width": 64, **changes})
        return gpu.refusal(*cases.abstract(case), **cases.options(case))

    assert reason() is None
    assert "allowed are multiples of 32" in reason(format="window", width=48)
    assert "takes 18 bytes, allowed are multiples of 4" in reason(width=32)
    assert "allowed is one of bfloat16 and float32" in reason(dtype="float16")
    case = cases.Case(2, 1, "main", width=32)
    choice = registry.choose("quantize", "auto", *cases.abstract(case), **cases.options(case), backend="gpu")
    assert choice.impl == "reference" and "18 bytes" in choice.refusals["gpu"]
