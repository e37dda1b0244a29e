"""mega_mhc: every implementation against the model's own functions, values and gradients, and what the kernels refuse."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from dsv41.quant import ACTIVATION, pack, unpack
from kernels_pallas import registry
from kernels_pallas.interpret import gpu_interpreter, gpu_races
from kernels_pallas.mega_mhc import cases, gpu, reference, tpu
from kernels_pallas.mega_mhc.api import mega_mhc
from kernels_pallas.mega_mhc.finish import normalisers
from kernels_pallas.mega_mhc.update import COLS, SHARED_BYTES, Tile

NAMES = ("streams", "x", "pre", "post", "comb")
SMALL_TILE = Tile(splits=2, slots=2, pieces=3, groups=2)
GPU_CASES = {
    name: case for name, case in cases.SMALL.items() if gpu.refusal(*cases.abstract(case), **cases.options(case)) is None
}


def assert_close(got, want, names=NAMES, bf16=2**-7, f32=2e-4):
    for name, g, w in zip(names, got, want, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape, name
        limit = bf16 if g.dtype == jnp.bfloat16 else f32
        g, w = (np.asarray(a.astype(jnp.float32)) for a in (g, w))
        assert np.abs(g - w).max() <= limit * max(np.abs(w).max(), 1e-30), name


def gpu_outputs(case, args, tile, monkeypatch):
    """What the GPU kernels give, neither of them with a race."""
    races = []

    def watched(kernel):
        def call(*args):
            # The interpreter forgets a kernel's races when it begins the next.
            out = jax.block_until_ready(kernel(*args))
            races.append(gpu_races())
            return out

        return call

    monkeypatch.setattr(gpu, "update", watched(gpu.update))
    monkeypatch.setattr(gpu, "finish", watched(gpu.finish))
    out, _ = gpu.forward(*args, **cases.options(case), tile=tile, interpret=gpu_interpreter())
    assert races == [False, False]
    return out


def implementation(name: str, case: cases.Case, **more):
    run = {
        "unrolled": reference.unrolled,
        "split": functools.partial(reference.unrolled, split=True),
        "gpu": gpu.run,
        "tpu": tpu.run,
    }[name]
    return functools.partial(run, **cases.options(case), **more)


@pytest.mark.parametrize("name", cases.SMALL)
def test_written_out_sums_agree_with_the_reference(name):
    case = cases.SMALL[name]
    args = cases.arguments(case)
    want = mega_mhc(*args, **cases.options(case), impl="reference")
    assert_close(implementation("unrolled", case)(*args), want)
    assert_close(implementation("split", case)(*args), want)


@pytest.mark.parametrize("name", GPU_CASES)
def test_gpu_kernel_agrees_with_the_reference_and_has_no_races(name, monkeypatch):
    case = cases.SMALL[name]
    args = cases.arguments(case)
    got = gpu_outputs(case, args, SMALL_TILE, monkeypatch)
    assert_close(got, reference.run(*args, **cases.options(case)))


@pytest.mark.parametrize("name", cases.SMALL)
def test_tpu_kernel_agrees_with_the_reference(name):
    case = cases.SMALL[name]
    args = cases.arguments(case)
    assert tpu.refusal(*args, **cases.options(case)) is None
    got = implementation("tpu", case, interpret=pltpu.InterpretParams())(*args)
    assert_close(got, reference.run(*args, **cases.options(case)))


@pytest.mark.parametrize(
    "tile",
    [
        Tile(splits=1, slots=2, pieces=5),
        Tile(splits=3, slots=1, pieces=1),
    ],
    ids=["one split", "nothing in flight"],
)
def test_every_tiling_gives_the_same(tile, monkeypatch):
    case = cases.Case(61, width=192)
    args = cases.arguments(case, seed=1)
    got = gpu_outputs(case, args, tile, monkeypatch)
    assert_close(got, reference.run(*args, **cases.options(case)))


@pytest.mark.parametrize("name", cases.REAL)
def test_real_shapes_lower_for_the_device(name):
    case = cases.REAL[name]
    args = cases.abstract(case)
    for impl, platform in ((gpu, "cuda"), (tpu, "tpu")):
        assert impl.refusal(*args, **cases.options(case)) is None
        run = jax.jit(cases.timed(case, functools.partial(impl.run, **cases.options(case))))
        text = run.trace(*args).lower(lowering_platforms=(platform,)).as_text()
        assert "mega_mhc" in text and ("mega_mhc_backward" in text) == case.backward


@pytest.mark.parametrize("tokens", [3, 100])
def test_any_number_of_tokens_lowers_for_the_device(tokens):
    case = cases.Case(tokens, width=256)
    run = jax.jit(functools.partial(gpu.run, **cases.options(case)))
    assert "mega_mhc" in run.trace(*cases.abstract(case)).lower(lowering_platforms=("cuda",)).as_text()


def test_fp8_input_is_the_packed_input_bit_for_bit(monkeypatch):
    case = cases.Case(72, width=256)
    y, x, *rest = cases.arguments(case)
    # Groups of zeros, and of values below the least scale.
    args = (y.at[3].set(0).at[5].multiply(1e-5), x.at[3].set(0).at[5].multiply(1e-5), *rest[:-1], rest[-1].at[32:64].set(0))
    plain = gpu_outputs(case, args, SMALL_TILE, monkeypatch)
    got = gpu_outputs(replace(case, fp8=True), args, SMALL_TILE, monkeypatch)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves((plain[0], pack(plain[1], ACTIVATION), *plain[2:])), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(g, w)
    others = [mega_mhc(*args, **cases.options(replace(case, fp8=True)))[1]]
    others.append(implementation("tpu", replace(case, fp8=True), interpret=pltpu.InterpretParams())(*args)[1])
    for other in others:
        assert jax.tree.map(lambda a: (a.shape, a.dtype), other) == jax.tree.map(lambda a: (a.shape, a.dtype), got[1])
        # A row rounded to its other neighbour may change a code by one, to the next of eight steps of a power of two.
        values, want = unpack(*other, ACTIVATION), unpack(*got[1], ACTIVATION)
        assert float(jnp.max(jnp.abs(values - want)) / jnp.max(jnp.abs(want))) <= 2**-3


def test_fp8_has_no_gradient():
    case = cases.Case(4, width=128, fp8=True)
    run = functools.partial(gpu.run, **cases.options(case), interpret=gpu_interpreter())
    with pytest.raises(TypeError, match="allowed are values only"):
        jax.eval_shape(lambda *args: jax.vjp(run, *args)[1](run(*args)), *cases.abstract(case))


def test_tiles_cover_the_columns_and_fit_shared_memory():
    for tokens in (1, 64, 65, 128, 300, 500, 1000, 1024, 4096, 8192, 16385):
        for d in (64, 128, 192, 512, 4096, 5120, 7168, 16384, 97 * COLS):
            tile, columns = gpu.choose(tokens, d), d // COLS
            assert columns % tile.splits == 0 and tile.slots <= columns // tile.splits
            assert tile.shared_bytes(gpu.STREAMS) <= SHARED_BYTES
            assert columns % normalisers(d) == 0
            assert columns // normalisers(d) * 64 * COLS * 2 + (12 << 10) < SHARED_BYTES


def test_tiles_are_those_that_were_measured():
    assert gpu.choose(4096, 5120) == gpu.choose(8192, 5120) == Tile(2, 4, 6)
    assert gpu.choose(1, 5120) == gpu.choose(64, 5120) == gpu.choose(128, 5120) == Tile(40, 2, 8)
    assert normalisers(5120) == 8


def test_refusals_say_what_is_allowed():
    def reason(**changes):
        case = cases.Case(**{"tokens": 4, "width": 128, **changes})
        return gpu.refusal(*cases.abstract(case), **cases.options(case))

    assert reason() is None
    assert "allowed are 4" in reason(streams=2)
    assert "multiples of 64" in reason(width=96)
    assert "allowed is bfloat16" in reason(dtype="float32")
    small, tile = cases.Case(4, width=128), Tile(splits=1, slots=6)
    assert "allowed are 232448" in gpu.refusal(*cases.abstract(small), **cases.options(small), tile=tile)
    args, kwargs = cases.abstract(cases.SMALL["two streams"]), cases.options(cases.SMALL["two streams"])
    assert registry.choose("mega_mhc", "auto", *args, **kwargs, backend="gpu").impl == "reference"
    with pytest.raises(registry.Refused, match="streams"):
        registry.choose("mega_mhc", "gpu", *args, **kwargs, backend="gpu")
