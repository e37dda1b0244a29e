"""Writing: files by size with an index, whole or absent, exact where nothing changed and requantised where it did."""

import json

import ml_dtypes
import numpy as np
import pytest

from dsv41.config import replace
from dsv41.errors import UserError
from dsv41.hf.folder import INDEX, open_folder
from dsv41.hf.names import key_table
from dsv41.hf.save import (
    Unit,
    default_target,
    from_carried,
    from_master,
    new_folder,
    shard_units,
    target_config,
    write_weights,
)
from dsv41.hf.stored import decode, encode
from dsv41.params import ReleasedTensor
from tests.hf.release import random_tensor, released_config, write_release

CONFIG = released_config()
SLOTS = key_table(CONFIG)


def unit(name, size):
    return Unit((ReleasedTensor(name, "U8", (size,)),), lambda: [np.zeros(size, np.uint8)])


def test_files_by_size():
    sizes = [5, 5, 1, 20, 3, 8, 8]
    shards = shard_units([unit(str(n), size) for n, size in enumerate(sizes)], 10)
    assert [[u.tensors[0].bytes for u in shard] for shard in shards] == [[5, 5], [1], [20], [3], [8], [8]]


def test_index_and_determinism(tmp_path):
    one, two = (write_release(tmp_path / name, CONFIG, shard_bytes=50_000) for name in ("a", "b"))
    names = sorted(p.name for p in one.iterdir())
    assert {n: (one / n).read_bytes() for n in names} == {n: (two / n).read_bytes() for n in names}
    index = json.loads((one / INDEX).read_text())
    tensors = [t for slot in SLOTS.values() for t in slot.tensors]
    assert index["metadata"]["total_size"] == sum(t.bytes for t in tensors)
    assert set(index["weight_map"]) == {t.name for t in tensors}
    count = len(names) - 2
    assert count > 5
    assert set(index["weight_map"].values()) == {f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)}
    assert len(open_folder(one).files) == len(tensors)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), UserError("no")])
def test_nothing_is_left_of_a_failure(tmp_path, error):
    def fail():
        raise error

    units = [unit("a", 3), Unit((ReleasedTensor("b", "U8", (1,)),), fail)]
    with pytest.raises(UserError if isinstance(error, OSError) else type(error)), new_folder(tmp_path / "out") as folder:
        write_weights(folder, units, CONFIG, shard_bytes=3)
    assert list(tmp_path.iterdir()) == []


def test_new_folder(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "somebody's").touch()
    (tmp_path / "out").mkdir()
    with new_folder(tmp_path / "out") as folder:
        (folder / "x").touch()
        assert not any((tmp_path / "out").iterdir())
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["x"]
    with pytest.raises(UserError, match="found something there, allowed is a new or empty folder"), new_folder(tmp_path / "out"):
        pytest.fail("went on")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.partial"]
    assert (tmp_path / "out.partial" / "somebody's").exists()
    with pytest.raises(UserError, match="y: cannot be written: "), new_folder(tmp_path / "out" / "x" / "y"):
        pytest.fail("went on")


def test_targets_of_a_config():
    plain = replace(CONFIG, quantization_config=None, dtype="float32")
    assert [default_target(c) for c in (CONFIG, plain, replace(plain, dtype="bfloat16"))] == ["release", "fp32", "bf16"]
    for target in ("release", "bf16", "fp32"):
        assert default_target(target_config(CONFIG, target)) == default_target(target_config(plain, target)) == target


def test_masters_keep_the_scales_that_still_hold_them():
    slot = SLOTS["layers.0.attn.wq_b.weight"]
    rng = np.random.default_rng(0)
    codes, scales = (random_tensor(t, rng).view(np.uint8) for t in slot.tensors)
    value = decode(codes, scales, "fp8", (32, 32))
    same = from_master(slot, CONFIG, "release", lambda: value, lambda: scales).make()
    assert [a.dtype.name for a in same] == ["float8_e4m3fn", "float8_e8m0fnu"]
    assert np.array_equal(same[0].view(np.uint8), codes) and np.array_equal(same[1].view(np.uint8), scales)
    trained = rng.standard_normal(value.shape).astype(np.float32)
    for kept in (None, lambda: scales):
        fresh = from_master(slot, CONFIG, "release", lambda: trained, kept).make()
        assert all(np.array_equal(a.view(np.uint8), b) for a, b in zip(fresh, encode(trained, "fp8", (32, 32)), strict=True))
    trained[0, 0] = np.nan
    with pytest.raises(UserError, match=r"layers.0.attn.wq_b.weight: found values that are not finite"):
        from_master(slot, CONFIG, "release", lambda: trained, None).make()


@pytest.mark.pitfall("E6")
def test_plain_targets():
    matrix, mixing = SLOTS["layers.0.attn.wq_b.weight"], SLOTS["layers.0.hc_attn_fn"]
    rng = np.random.default_rng(0)
    for slot, dtype in ((matrix, ml_dtypes.bfloat16), (mixing, np.float32)):
        value = rng.standard_normal(slot.shape).astype(np.float32)
        (array,) = from_master(slot, CONFIG, "bf16", lambda value=value: value, None).make()
        assert array.dtype == dtype and np.array_equal(array, value.astype(dtype))
        (array,) = from_master(slot, CONFIG, "fp32", lambda value=value: value, None).make()
        assert array.dtype == np.float32 and np.array_equal(array, value)


@pytest.mark.parametrize("name", ["mtp.0.ffn.experts.1.w1.weight", "mtp.0.main_proj.weight", "vision.norm.weight"])
def test_carried_tensors_are_unchanged_or_converted(name):
    slot = SLOTS[name]
    held = {t.name: random_tensor(t, np.random.default_rng(0)) for t in slot.tensors}
    same = from_carried(slot, CONFIG, "release", held.__getitem__).make()
    assert [a.tobytes() for a in same] == [a.tobytes() for a in held.values()]
    (plain,) = from_carried(slot, CONFIG, "fp32", held.__getitem__).make()
    assert plain.dtype == np.float32 and plain.shape == slot.shape
    again = from_carried(slot, CONFIG, "release", lambda _: plain).make()
    assert [a.dtype for a in again] == [a.dtype for a in same]
    if slot.scale:
        values = [decode(*(a.view(np.uint8) for a in pair), slot.spec.stored, (32, 32)) for pair in (same, again)]
        # The least scale that holds a granule, which random bytes do not use, loses nothing above its own smallest step.
        assert np.allclose(*values, rtol=0, atol=np.abs(plain).max() * 2**-10)
