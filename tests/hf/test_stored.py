"""Stored bytes -> values -> stored bytes is the identity for every legal byte, and agrees with the jnp codecs."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.hf.safetensors import open_safetensors
from dsv41.hf.stored import StoredWeight, decode, encode, granule, recode
from dsv41.quant import unpack_nibbles

FORMS = st.sampled_from([("fp8", (32, 32)), ("fp8", (128, 128)), ("fp8", (3, 5)), ("fp4", (32, 32)), ("fp8_rows", (32, 32))])
GOLDEN = Path(__file__).parents[1] / "golden" / "unit" / "weight_formats.safetensors"


def stored_bytes(form, rows, columns, seed, low=0, high=246):
    """Codes without NaN and scales of a weight; a zero granule, a subnormal scale and both zeros among them."""
    stored, tile = form
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, columns // 2 if stored == "fp4" else columns), dtype=np.uint8)
    if stored != "fp4":
        codes[(codes & 127) == 127] = 0x80
    codes[: rows // 3] = 0
    high_rows, wide = granule(stored, tile)
    scales = rng.integers(low, high + 1, (-(-rows // high_rows), -(-columns // wide)), dtype=np.uint8)
    scales.flat[-1] = low
    return codes, scales


@pytest.mark.pitfall("K3")
@given(FORMS, st.integers(1, 70), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_stored_bytes_come_back(form, rows, groups, seed):
    columns = 32 * groups if form[0] != "fp8" else 32 * groups - seed % 31
    codes, scales = stored_bytes(form, rows, columns, seed)
    values = decode(codes, scales, *form)
    assert values.shape == (rows, columns) and np.isfinite(values).all()
    assert np.array_equal(recode(values, scales, *form), codes)


@given(FORMS, st.integers(1, 40), st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_fresh_scales_hold_the_weight_closely_and_again_exactly(form, rows, seed):
    values = np.random.default_rng(seed).standard_normal((rows, 64)).astype(np.float32)
    values[0, :32] = 0
    codes, scales = encode(values, *form)
    held = decode(codes, scales, *form)
    assert np.abs(held - values).max() <= np.abs(values).max() / (4 if form[0] == "fp4" else 16)
    assert np.array_equal(recode(held, scales, *form), codes)
    if rows > 1:
        held[1, 3] += np.float32(1e-3) * held[1, 3] + np.float32(1e-6)
        assert recode(held, scales, *form) is None


def test_scales_may_be_other_than_the_least():
    # 449 asks for the scale 2 and rounds to 448, which alone would ask for the scale 1.
    codes, scales = encode(np.full((1, 32), 449, np.float32), "fp8_rows", (32, 32))
    held = decode(codes, scales, "fp8_rows", (32, 32))
    assert scales[0, 0] == 128 and held[0, 0] == 448
    assert encode(held, "fp8_rows", (32, 32))[1][0, 0] == 127
    assert np.array_equal(recode(held, scales, "fp8_rows", (32, 32)), codes)


@given(FORMS, st.integers(1, 40), st.integers(0, 2**32 - 1), st.data())
@settings(max_examples=30)
def test_blocks_cut_anywhere_are_the_whole(form, rows, seed, data):
    codes, scales = stored_bytes(form, rows, 64, seed)
    whole = decode(codes, scales, *form)
    packed = 2 if form[0] == "fp4" else 1
    start = (data.draw(st.integers(0, rows - 1)), 2 * data.draw(st.integers(0, 31)))
    part = codes[start[0] :, start[1] // packed :]
    assert np.array_equal(decode(part, scales, *form, start=start), whole[start[0] :, start[1] :])


@pytest.mark.pitfall("F7")
def test_all_packed_bytes():
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    scales = np.full((4, 4), 127, np.uint8)
    values = decode(codes, scales, "fp4", (32, 32))
    assert values.shape == (4, 128)
    four = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    assert np.array_equal(values[:, 0::2], four[codes & 15]) and np.array_equal(values[:, 1::2], four[codes >> 4])
    assert np.array_equal(recode(values, scales, "fp4", (32, 32)), codes)
    assert np.array_equal(np.asarray(unpack_nibbles(jnp.asarray(codes)))[:, 0::2], codes & 15)


@pytest.mark.parametrize("form", [("fp8", (32, 32)), ("fp8", (128, 128)), ("fp4", (32, 32)), ("fp8_rows", (32, 32))])
def test_containers_agree_with_the_host(form):
    # Scales from 2**-107 up: below, XLA's flush to zero shows.
    codes, scales = stored_bytes(form, 50, 96, 0, low=20)
    one = StoredWeight(jnp.asarray(codes), jnp.asarray(scales), *form)
    assert one.shape == (50, 96)
    assert np.array_equal(one.dequantize(), decode(codes, scales, *form))
    two = StoredWeight(jnp.stack([codes] * 2), jnp.stack([scales] * 2), *form)
    assert two.shape == (2, 50, 96) and np.array_equal(two.dequantize()[1], one.dequantize())


@pytest.mark.parametrize(
    ("kind", "codes", "stored"),
    [
        ("fp8", "weight_bytes", "fp8"),
        ("fp8_ragged", "weight_bytes", "fp8"),
        ("fp4", "packed", "fp4"),
        ("engram", "weight_bytes", "fp8_rows"),
    ],
)
def test_golden_bytes(kind, codes, stored):
    file = open_safetensors(GOLDEN)
    stored_form = (file.array(f"{kind}.{codes}"), file.array(f"{kind}.scale_bytes"))
    assert np.array_equal(decode(*stored_form, stored, (32, 32)), file.array(f"{kind}.dequant"))


@pytest.mark.parametrize("form", [("fp8", (32, 32)), ("fp4", (32, 32)), ("fp8_rows", (32, 32))])
def test_weights_larger_than_one_step(form):
    # Steps of 64 rows here, the first one cut inside a granule.
    codes, scales = stored_bytes(form, 200, 1024, 0)
    row = 7
    values = decode(codes[row:], scales, *form, start=(row, 0))
    for first in range(row, 200):
        assert np.array_equal(values[first - row], decode(codes[first : first + 1], scales, *form, start=(first, 0))[0])
    assert np.array_equal(recode(decode(codes, scales, *form), scales, *form), codes)
