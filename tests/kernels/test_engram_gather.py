"""engram_gather: what the kernel's threads do against the reference, for all codes and scales, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41 import model, owners
from dsv41.cache import init_cache
from dsv41.engram import apply_engram
from dsv41.hf.stored import StoredWeight
from dsv41.layout import make_layout
from dsv41.params import EngramParams
from dsv41.quant import ENGRAM_ROW, pack, unpack
from kernels_pallas import registry
from kernels_pallas.engram_gather import cases, gpu, reference
from kernels_pallas.engram_gather.api import engram_gather, in_host_memory
from tests.kernels.threads import execute
from tests.models import PLAIN, VOCAB, tiny_config, tiny_params

PACKED = {name: case for name, case in cases.SMALL.items() if case.packed}


def executed(table, scales, ids, dtype, depth):
    """What the kernel's threads write; every byte of it once."""
    (rows, width), count = table.shape, ids.size
    out = np.zeros((*ids.shape, width), jnp.dtype(dtype))
    program = gpu.program(rows, count, width, dtype, depth)
    blocks = -(-count * width // (gpu.THREADS * gpu.CHANNELS * depth))
    (*_, got), (*_, times) = execute(program, [np.asarray(a) for a in (table, scales, ids)] + [out], gpu.THREADS, blocks)
    assert (times == 1).all()
    return got.view(out.dtype).reshape(out.shape)


@pytest.mark.parametrize("depth", [1, gpu.DEPTH])
@pytest.mark.parametrize("name", PACKED)
def test_threads_give_the_reference_s_values(name, depth):
    case = cases.SMALL[name]
    args, dtype = cases.arguments(case), jnp.dtype(case.dtype)
    np.testing.assert_array_equal(executed(*args, dtype, depth), reference.run(*args, dtype=dtype))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_code_under_every_scale_is_exact(dtype):
    codes = np.arange(256, dtype=np.uint8)[None].repeat(256, 0)
    codes = np.where((codes & 0x7F) == 0x7F, 0, codes)
    scales = np.arange(256, dtype=np.uint8)[:, None].repeat(8, 1)
    got = executed(codes, scales, np.arange(256, dtype=np.int32), dtype, 2)
    # NumPy: XLA on CPU takes subnormal numbers for 0.
    exact = codes.view(jnp.float8_e4m3fn).astype(np.float64) * np.exp2(np.arange(256)[:, None] - 127.0)
    with np.errstate(over="ignore"):
        want = exact.astype(np.float32).astype(dtype)
    # A scale of 255 is none: 0 times it is not a number.
    np.testing.assert_array_equal(got[:255], want[:255])
    assert np.isfinite(got[:240].astype(np.float32)).all() and len(np.unique(got[127])) == 253


@pytest.mark.parametrize("name", cases.REAL)
def test_real_shapes_lower_for_the_device(name):
    case = cases.REAL[name]
    args = cases.abstract(case)
    assert gpu.refusal(*args, **cases.options(case)) is None
    run = jax.jit(functools.partial(gpu.run, **cases.options(case)))
    assert "mosaic_gpu" in run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_reference_is_the_codec_and_floats_have_gradients():
    codes, scales, ids = cases.arguments(cases.SMALL["ragged"])
    want = unpack(codes, scales, ENGRAM_ROW)[ids]
    np.testing.assert_array_equal(engram_gather(codes, scales, ids, jnp.float32), want)
    table, _, ids = cases.arguments(cases.SMALL["floats"])
    pull = jax.vjp(lambda t: engram_gather(t, None, ids, jnp.float32), table)[1]
    counts = np.bincount(np.asarray(ids).reshape(-1), minlength=len(table))
    np.testing.assert_array_equal(pull(jnp.ones((*ids.shape, 32)))[0], np.repeat(counts[:, None], 32, 1))


def layer(config, seed=0):
    """Random weights of an Engram layer, its table in the stored form and as floats."""
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    n, d, width = config.hc_mult, config.hidden_size, config.engram_head_dim
    stored = StoredWeight(*pack(jax.random.normal(next(keys), (90, width)), ENGRAM_ROW), "fp8_rows", (32, 32))
    wkv = jax.random.normal(next(keys), ((n + 1) * d, config.engram_columns * width)) * 0.1
    rest = EngramParams(None, wkv, *(1 + 0.1 * jax.random.normal(next(keys), (n, d)) for _ in range(2)))
    return rest.replace(embed=stored), rest.replace(embed=stored.dequantize())


def test_a_stored_table_gives_the_layer_what_its_values_do():
    config = tiny_config()
    streams = jax.random.normal(jax.random.key(1), (2, 5, config.hc_mult, config.hidden_size))
    rows = jax.random.randint(jax.random.key(2), (2, 5, config.engram_columns), 0, 90)
    layout = make_layout(jnp.ones((2, 5), jnp.int32))
    got, want = (apply_engram(streams, rows, layout, params, config, None, "") for params in layer(config))
    np.testing.assert_array_equal(got, want)


def in_host(tree):
    """The arrays in pinned host memory."""
    return jax.device_put(tree, jax.memory.Space.Host)


@pytest.mark.parametrize("name", ["ragged", "floats"])
def test_a_table_in_host_memory_gives_the_same_rows(name):
    table, scales, ids = cases.arguments(cases.SMALL[name])
    run = jax.jit(functools.partial(engram_gather, dtype=jnp.float32))
    got = run(*in_host((table, scales)), ids)
    assert not in_host_memory(got) and in_host_memory(in_host(table))
    np.testing.assert_array_equal(got, run(table, scales, ids))


def test_a_kernel_takes_a_table_in_host_memory_on_a_stream_of_its_own():
    table, scales, ids = cases.arguments(cases.SMALL["ragged"])
    run = jax.jit(functools.partial(gpu.run, dtype=jnp.bfloat16))
    texts = [
        run.trace(*args, ids).lower(lowering_platforms=("cuda",)).as_text()
        for args in (in_host((table, scales)), (table, scales))
    ]
    assert ['_xla_stream_annotation = "1"' in text for text in texts] == [True, False]
    assert all("mosaic_gpu" in text for text in texts)


def test_a_step_fetches_the_rows_of_host_tables_before_its_first_layer(monkeypatch):
    """The same logits to the bit."""
    config, order, logits = tiny_config(), [], []
    params = tiny_params(config)
    moved = [layer.replace(engram=e and e.replace(embed=in_host(e.embed))) for layer in params.layers for e in [layer.engram]]
    ids, token_map = jnp.asarray([[5], [9]], jnp.int32), jnp.arange(VOCAB, dtype=jnp.int32)
    for name, module in (("engram_gather", owners), ("block", model)):
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, plain=plain, name=name: (order.append(name), plain(*args))[1])
    for layers in (params.layers, tuple(moved)):
        step = jax.jit(lambda p, c: model.extend(p, config, PLAIN, c, ids, jnp.ones(ids.shape, bool), token_map)[0])
        logits.append(step(params.replace(layers=layers), init_cache(config, PLAIN, 2, 64)))
    blocks = ["block"] * len(moved)
    assert order[-2 - len(blocks) :] == ["engram_gather", "engram_gather", *blocks] and order[0] == "block"
    np.testing.assert_array_equal(*logits)


def test_refusals_say_what_is_allowed():
    def reason(**changes):
        case = cases.Case(**{"tokens": 2, "rows": 9, **changes})
        return gpu.refusal(*cases.abstract(case), **cases.options(case))

    assert reason() is None
    assert "96 channels, allowed are 32, 64" in reason(width=96)
    assert "wanted as float16" in reason(dtype="float16")
    assert "XLA gathers" in reason(packed=False)
    case = cases.Case(2, rows=9, width=96)
    choice = registry.choose("engram_gather", "auto", *cases.abstract(case), **cases.options(case), backend="gpu")
    assert choice.impl == "reference" and "96" in choice.refusals["gpu"]
