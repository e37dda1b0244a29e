"""Loading: the same numbers in every form and sharding, each byte read once, and nothing that is no weight."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv41.config import QuantizationConfig, replace
from dsv41.errors import UserError
from dsv41.hf import load
from dsv41.hf.folder import open_folder
from dsv41.hf.load import fsdp, load_carried, load_params, load_scales, text_slots
from dsv41.hf.names import key_table, text_leaves
from dsv41.hf.safetensors import open_safetensors, write_safetensors
from dsv41.hf.stored import StoredWeight, decode
from tests.hf.release import released_config, write_release


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return write_release(tmp_path_factory.mktemp("load") / "release", released_config())


def leaves(params):
    is_stored = lambda x: isinstance(x, StoredWeight)  # noqa: E731
    return jax.tree.leaves(params, is_leaf=is_stored)


def change(path, name, value, *without):
    """Writes one tensor anew, in the file that holds it."""
    for file in path.glob("*.safetensors"):
        opened = open_safetensors(file)
        if name in opened.keys():  # noqa: SIM118
            kept = {n: np.array(opened.array(n)) for n in opened.keys() if n not in without}  # noqa: SIM118
            write_safetensors(file, kept | {name: value}, opened.metadata)


@pytest.mark.pitfall("K1", "K3")
def test_masters_are_the_files_numbers(release):
    folder = open_folder(release)
    params = dict(zip(text_leaves(folder.config), jax.tree.leaves(load_params(folder)), strict=True))
    for path, slots in text_slots(folder).items():
        assert params[path].dtype == jnp.float32 and params[path].shape == slots[0].spec.shape
        for slot in slots:
            wanted = folder.view(slot.weight.name)
            if slot.scale:
                wanted = decode(wanted.view(np.uint8), folder.view(slot.scale.name).view(np.uint8), slot.spec.stored, (32, 32))
            found = np.asarray(params[path] if slot.expert is None else params[path][slot.expert])
            assert np.array_equal(found, wanted.astype(np.float32))


@pytest.mark.parametrize("form", ["masters", "stored"])
@pytest.mark.parametrize("devices", [2, 8])
def test_shards_equal_one_device_and_read_each_byte_once(release, form, devices):
    one, many = open_folder(release), open_folder(release)
    rule = fsdp(jax.make_mesh((devices,), ("fsdp",), devices=jax.devices()[:devices]))
    whole, sharded = load_params(one, form), load_params(many, form, rule)
    assert jax.tree.structure(whole) == jax.tree.structure(sharded)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(sharded), strict=True):
        assert a.dtype == b.dtype and np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
    split = [a for a in jax.tree.leaves(sharded) if a.addressable_shards[0].data.size < a.size]
    assert len(split) > 30
    text = sum(t.bytes for slot in many.slots.values() if slot.part == "text" for t in slot.tensors)
    assert one.bytes_read == many.bytes_read == text
    load_carried(many, rule)
    assert many.bytes_read == sum(entry.stop - entry.start for _, entry in many.tensors())


def test_a_process_reads_no_more_than_its_shards(release, monkeypatch):
    folder, keys = open_folder(release), load._keys
    whole = sum(t.bytes for slot in folder.slots.values() if slot.part == "text" for t in slot.tensors)
    monkeypatch.setattr(load, "_keys", lambda sharding, shape: keys(sharding, shape)[:4])
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", lambda shape, sharding, arrays: jnp.zeros(shape))
    load_params(folder, sharding=fsdp(jax.make_mesh((8,), ("fsdp",))))
    # Half, and what is too small to be split.
    assert 0.5 * whole < folder.bytes_read < 0.6 * whole


@pytest.mark.parametrize("form", ["masters", "stored"])
def test_pieces_of_any_size(release, form, monkeypatch):
    whole = load_params(open_folder(release), form)
    monkeypatch.setattr(load, "_PIECE_BYTES", 100)
    monkeypatch.setattr(load, "_DECODE_BYTES", 100)
    folder = open_folder(release)
    pieces = load_params(folder, form, threads=3)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(pieces), strict=True):
        assert a.dtype == b.dtype and np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
    assert folder.bytes_read == sum(t.bytes for slot in folder.slots.values() if slot.part == "text" for t in slot.tensors)


@pytest.mark.parametrize("tile", [(32, 32), (128, 128), (16, 8)])
def test_stored_form_dequantizes_to_the_masters(tmp_path, tile):
    config = released_config(quantization_config=QuantizationConfig(weight_block_size=tile))
    folder = open_folder(write_release(tmp_path / "release", config))
    for (path, spec), held, master in zip(
        text_leaves(config).items(), leaves(load_params(folder, "stored")), jax.tree.leaves(load_params(folder)), strict=True
    ):
        parts = path.split(".")
        if "wo_a" in parts:
            assert held.dtype == jnp.bfloat16
        elif "head" in parts or "compressor" in parts:
            assert held.dtype == jnp.float32
        elif spec.stored == "bf16":
            assert held.dtype == jnp.bfloat16
        else:
            assert isinstance(held, StoredWeight) == (spec.stored != "f32")
        if isinstance(held, StoredWeight):
            assert held.tile == tile and held.shape == spec.shape
            held = held.dequantize()
        # Below, XLA takes values for 0 and bfloat16 rounds.
        normal = np.abs(master) > 1e-30
        assert np.array_equal(np.where(normal, np.asarray(held).astype(np.float32), 0), np.where(normal, master, 0))


def test_scales_by_leaf(release):
    folder = open_folder(release)
    scales = load_scales(folder)
    assert set(scales) == {path for path, spec in text_leaves(folder.config).items() if spec.stored not in ("bf16", "f32")}
    name = "layers.0.ffn.experts.2.w1.scale"
    assert np.array_equal(scales["layers.0.ffn.experts.w1"][2], folder.view(name).view(np.uint8))


@pytest.mark.pitfall("F7")
@pytest.mark.parametrize("dtype", ["U8", "F4"])
def test_other_spellings_of_packed_fp4(tmp_path, release, dtype):
    name = "layers.2.ffn.experts.1.w2.weight"
    path = write_release(tmp_path / "release", released_config())
    packed = np.array(open_folder(path).view(name)).view(np.uint8)
    change(path, name, packed)
    if dtype == "F4":
        (file,) = {f.path for n, f in open_folder(path).files.items() if n == name}
        rows, half = packed.shape
        old = f'"dtype":"U8","shape":[{rows},{half}]'.encode()
        data = file.read_bytes()
        assert old in data
        new = f'"dtype":"F4","shape":[{rows},{2 * half}]'.encode().ljust(len(old))
        data = data.replace(old, new, 1)
        file.write_bytes(data)
    found = open_folder(path)
    assert found.entry(name).dtype == dtype
    a, b = (load_params(f).layers[2].ffn.experts.w2 for f in (found, open_folder(release)))
    assert np.array_equal(a, b)


def test_unquantised_weights_beside_quantised_ones(tmp_path):
    path = write_release(tmp_path / "release", released_config())
    name, scale = "layers.2.ffn.experts.1.w2.weight", "layers.2.ffn.experts.1.w2.scale"
    values = np.random.default_rng(0).standard_normal(key_table(released_config())[name].shape).astype(ml_dtypes.bfloat16)
    (path / "model.safetensors.index.json").unlink()
    change(path, name, values, scale)
    folder = open_folder(path)
    assert np.array_equal(load_params(folder).layers[2].ffn.experts.w2[1], values.astype(np.float32))
    assert "layers.2.ffn.experts.w2" not in load_scales(folder)
    assert load_params(folder, "stored").layers[2].ffn.experts.w2.dtype == jnp.float32


@pytest.mark.parametrize("what", ["nan code", "nan scale", "overflow", "bf16"])
def test_values_that_are_not_finite_are_refused(tmp_path, what):
    path = write_release(tmp_path / "release", released_config())
    name = "norm.weight" if what == "bf16" else "layers.0.attn.wq_b.scale" if "scale" in what else "layers.0.attn.wq_b.weight"
    value = np.array(open_folder(path).view(name))
    if what == "overflow":
        value.view(np.uint8)[-1, -1] = 0x7E
        change(path, name, value)
        name = "layers.0.attn.wq_b.scale"
        value = np.array(open_folder(path).view(name))
        value.view(np.uint8)[:] = 254
    elif what == "bf16":
        value[-1] = np.inf
    else:
        value.view(np.uint8)[-1, -1] = 0x7F if what == "nan code" else 255
    change(path, name, value)
    with pytest.raises(UserError, match=rf"{name.rpartition('.')[0]}.*not finite"):
        load_params(open_folder(path))


def test_expert_tables_of_hash_layers(tmp_path):
    config = replace(released_config(), num_hash_layers=1)
    path = write_release(tmp_path / "release", config)
    params = load_params(open_folder(path))
    assert params.layers[0].ffn.tid2eid.dtype == jnp.int32
    assert load_params(open_folder(path), "stored").layers[0].ffn.tid2eid.dtype == jnp.int32
    change(path, "layers.0.ffn.gate.tid2eid", np.full((64, 2), 2**40))
    with pytest.raises(UserError, match=r"tid2eid.*beyond int32"):
        load_params(open_folder(path))


@pytest.mark.pitfall("K3", "E6")
def test_orientation_and_groups(tmp_path):
    # Square, so that no shape would tell a transpose; two groups of unlike content.
    path = write_release(
        tmp_path / "release", released_config(q_lora_rank=32, num_nextn_predict_layers=0, compress_ratios=(0, 2, 1, 1))
    )
    folder = open_folder(path)
    change(path, "layers.0.attn.wq_a.weight", np.arange(1024, dtype=np.float32).reshape(32, 32), "layers.0.attn.wq_a.scale")
    (path / "model.safetensors.index.json").unlink()
    attention = load_params(open_folder(path)).layers[0].attn
    x = np.arange(32, dtype=np.float32)
    wanted = np.arange(1024, dtype=np.float32).reshape(32, 32) @ x
    assert np.allclose(jnp.einsum("i,oi->o", x, attention.wq_a), wanted)
    rank = folder.config.o_lora_rank
    groups = np.asarray(attention.wo_a).reshape(2, rank, -1)
    stored = folder.view("layers.0.attn.wo_a.weight").view(np.uint8)
    scales = folder.view("layers.0.attn.wo_a.scale").view(np.uint8)
    assert np.array_equal(groups[1], decode(stored, scales, "fp8", (32, 32))[rank:])
    assert load_params(open_folder(path)).layers[0].hc_attn.fn.dtype == jnp.float32
