"""A folder is right as a whole or refused in one message that names everything wrong with it."""

import gc
import json
import os
import threading
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv41 import cli
from dsv41.config import preset, save_config
from dsv41.errors import UserError
from dsv41.hf.folder import INDEX, Selection, open_folder
from dsv41.hf.names import key_table
from dsv41.hf.safetensors import open_safetensors, write_safetensors
from tests.hf.release import released_config, write_release

# More in one go: DSV41_FUZZ=2000.
FUZZ = int(os.environ.get("DSV41_FUZZ", "100"))
# For names, problems and the text that is printed: less than half of it where nothing is wrong.
BESIDE_FILES = 1 << 20
CONFIG = released_config()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_release(tmp_path_factory.mktemp("folder") / "release", CONFIG, shard_bytes=1 << 30)


@pytest.fixture
def release(tmp_path, whole):
    """One file, in which tests change tensors; no index."""
    path = tmp_path / "release"
    path.mkdir()
    for name in ("config.json", "model-00001-of-00001.safetensors"):
        (path / name).write_bytes((whole / name).read_bytes())
    return path


def edit(path, change):
    (file,) = path.glob("*.safetensors")
    opened = open_safetensors(file)
    tensors = {name: np.array(opened.array(name)) for name in opened.keys()}  # noqa: SIM118
    change(tensors)
    write_safetensors(file, tensors)


def message(path, *arguments, **more):
    with pytest.raises(UserError) as found:
        open_folder(path, *arguments, **more)
    assert len(str(found.value).splitlines()) == 1
    assert str(found.value).startswith(str(path))
    return str(found.value)


def test_whole_folder(whole, release):
    folder = open_folder(whole)
    assert folder.left_out == ()
    assert set(folder.slots) == set(key_table(CONFIG))
    assert {name for name, _ in folder.tensors()} == set(open_folder(release).files)
    assert folder.bytes_read == 0


@pytest.mark.pitfall("K1")
def test_one_extra_and_one_missing_name(release):
    def rename(tensors):
        tensors["layers.3.attn.wq_c.weight"] = tensors.pop("layers.3.attn.wq_b.weight")

    edit(release, rename)
    text = message(release)
    assert ": 2 problems: " in text
    assert "'layers.3.attn.wq_b.weight' is missing; did you mean 'layers.3.attn.wq_c.weight'?" in text
    assert "'layers.3.attn.wq_c.weight' is unknown; did you mean 'layers.3.attn.wq_b.weight'?" in text


def test_everything_wrong_is_said_at_once(release):
    def spoil(tensors):
        tensors["norm.weight"] = tensors["norm.weight"][:-1]
        tensors["head.weight"] = tensors["head.weight"].astype(np.float16)
        tensors["layers.0.hc_attn_fn"] = tensors["layers.0.hc_attn_fn"].astype(tensors["norm.weight"].dtype)
        tensors["layers.1.attn.wkv.scale"] = tensors["layers.1.attn.wkv.scale"].repeat(2, 0)
        del tensors["layers.1.attn.wq_a.scale"]
        tensors["layers.2.attn.wo_b.weight"] = np.zeros((32, 40), np.float32)
        tensors["layers.2.ffn.experts.0.w1.weight"] = tensors["layers.2.ffn.experts.0.w1.weight"].view(np.uint8).repeat(2, 1)
        tensors["model.embed"] = np.zeros(2)
        del tensors["mtp.1.norm.weight"]

    edit(release, spoil)
    text = message(release)
    assert ": 9 problems: " in text
    for part in (
        "'norm.weight': found shape [31], allowed is [32]",
        "'head.weight': found dtype F16, allowed is BF16 or F32; did you mean 'BF16'?",
        "'layers.0.hc_attn_fn': found dtype BF16, allowed is F32",
        "'layers.1.attn.wkv.scale': found shape [2, 1], allowed is [1, 1]",
        "'layers.1.attn.wq_a.scale' is missing, the scales of 'layers.1.attn.wq_a.weight'",
        "'layers.2.attn.wo_b.weight': found dtype F32 beside scales, allowed is F8_E4M3",
        "'layers.2.ffn.experts.0.w1.weight': found shape [32, 32], allowed is [32, 16]",
        "'model.embed' is unknown",
        "'mtp.1.norm.weight' is missing",
    ):
        assert part in text


def test_parts_are_left_out_only_by_name(release):
    def drop(tensors):
        for name in list(tensors):
            if name.startswith(("mtp.", "vision.", "aligner.", "image_")):
                del tensors[name]

    whole = open_folder(release, Selection(draft=False, vision=False))
    assert whole.left_out and whole.config.num_nextn_predict_layers == 0 and whole.config.vision_config is None
    edit(release, drop)
    text = message(release)
    assert "draft: found none of the " in text and "--draft-stages 0 leaves it out; vision: found none of the " in text
    assert open_folder(release, Selection(draft=False, vision=False)).left_out == ()
    assert open_folder(release, parts=("text",)).left_out == ()
    assert "--no-vision" in message(release, Selection(draft=False))


def test_first_layers(release):
    folder = open_folder(release, Selection(3, draft=False))
    config = folder.config
    assert (config.num_hidden_layers, config.compress_ratios) == (3, (0, 2, 1))
    assert (config.index_source_layer_ids, config.candidate_source_layer_id, config.engram_layer_ids) == ((1, 2), 2, (1, 2))
    assert any(name.startswith("layers.3.") for name in folder.left_out)
    assert open_folder(release, Selection(2, draft=False)).config.candidate_source_layer_id == -1
    with pytest.raises(UserError, match=r"draft_stages: found 2 with layers 0-2, allowed is 0"):
        open_folder(release, Selection(3))
    with pytest.raises(UserError, match=r"layers: found the first 7, allowed is 0-0 to 0-3"):
        open_folder(release, Selection(7, draft=False))


def test_slice_of_a_folder_that_holds_no_more(release):
    def drop(tensors):
        for name in list(tensors):
            if name.startswith(("layers.2.", "layers.3.", "mtp.")):
                del tensors[name]

    edit(release, drop)
    assert "is missing" in message(release)
    assert open_folder(release, Selection(2, draft=False)).left_out == ()


def test_table_rows_must_hold_the_primes(release):
    config = json.loads((release / "config.json").read_text())
    config["text_config"]["engram_num_embeddings"][0] -= 4
    (release / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"engram_num_embeddings: found .*, allowed is at least"):
        open_folder(release)
    config["text_config"]["engram_num_embeddings"][0] += 5
    (release / "config.json").write_text(json.dumps(config))
    assert "layers.1.engram.embed.weight': found shape" in message(release)


def test_index_and_files_agree(tmp_path):
    path = write_release(tmp_path / "release", CONFIG, shard_bytes=1 << 16)
    files = sorted(path.glob("*.safetensors"))
    index = json.loads((path / INDEX).read_text())
    names = list(index["weight_map"])
    moved, gone, invented = names[0], names[1], "layers.0.attn.wq_bb.weight"
    where = index["weight_map"]
    old = where[moved]
    where[moved] = next(f.name for f in files if f.name != old)
    del where[gone]
    where[invented] = files[0].name
    (path / INDEX).write_text(json.dumps(index))
    text = message(path)
    assert f"{INDEX} says '{moved}' is in {where[moved]}, but it is in {old}" in text
    assert f"'{gone}' of " in text and f"is not in {INDEX}" in text
    assert f"says '{invented}' is in {files[0].name}, but it is not there; did you mean 'layers.0.attn.wq_b.weight'?" in text
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-1])
    files[2].rename(path / "model-00009-of-00008.safetensors")
    text = message(path)
    assert f"{files[0].name}: found nothing there" in text
    assert f"{files[1].name}: file size, truncated: found " in text
    assert f"model-00009-of-00008.safetensors is not in {INDEX}" in text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "index: found Expecting value"),
        ("[]", "index: found [], allowed is a JSON object"),
        ("{}", "weight_map: found none"),
        ('{"weight_map": {}}', "weight_map: found none"),
        ('{"weight_map": {"a": 1}}', "weight_map: found 1 for 'a', allowed is a safetensors file beside it"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "found '../b.safetensors' for 'a'"),
        ('{"weight_map": {"a": ".b.safetensors"}}', "found '.b.safetensors' for 'a'"),
        ('{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}', "the key 'a' twice"),
        ('{"a":' * 100_000, "too deep a nesting"),
    ],
)
def test_bad_index(release, text, wanted):
    (release / INDEX).write_text(text)
    assert wanted in message(release)


def test_no_weights_and_no_config(tmp_path):
    with pytest.raises(UserError, match="no file"):
        open_folder(tmp_path / "none")
    save_config(CONFIG, tmp_path / "config.json")
    assert "found no weights" in message(tmp_path)


def test_twice_the_same_name(release):
    write_safetensors(release / "model-00002-of-00002.safetensors", {"norm.weight": np.zeros(32, np.float32)})
    assert "'norm.weight' is both in model-00001-of-00001.safetensors and in model-00002" in message(release)


def test_sizes_in_a_header_allocate_nothing(tmp_path):
    save_config(preset("flash"), tmp_path / "config.json")
    key_table(preset("flash"))
    header = {"embed.weight": {"dtype": "BF16", "shape": [129280, 5120], "data_offsets": [0, 129280 * 5120 * 2]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with allocates_at_most(1 << 26):
        assert "truncated" in message(tmp_path)


@contextmanager
def allocates_at_most(size):
    """Everything that Python and NumPy hold beyond what they held before, at any moment, and so each allocation too.

    Of the whole process: what earlier tests left to the garbage collector is not ended in here, and threads are named.
    """
    gc.disable()
    tracemalloc.start()
    try:
        yield
        if (peak := tracemalloc.get_traced_memory()[1]) > size:
            most = [str(line) for line in tracemalloc.take_snapshot().statistics("lineno")[:5]]
            threads = [thread.name for thread in threading.enumerate()]
            raise MemoryError(f"{peak} bytes held, allowed are {size}; now by {most}; threads {threads}")
    finally:
        tracemalloc.stop()
        gc.enable()


def says_one_line(capsys, path):
    """The command line takes the folder or ends with one line, and never otherwise; it never believes a size."""
    size = sum(file.stat().st_size for file in path.iterdir())
    capsys.readouterr()
    with allocates_at_most(size + BESIDE_FILES):
        # Outside the source, or that alone would be the error.
        code = cli.run(["convert", str(path), f"{path}-out", "--dry-run"])
    out, err = capsys.readouterr()
    if code == 0:
        assert err == "" and "total: " in out
    else:
        assert code == 2 and out == "" and err.startswith("dsv41: error: ") and err.count("\n") == 1 and len(err) < 20_000
    return code


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory, whole):
    path = tmp_path_factory.mktemp("fuzz")
    # The first call also fills tables that depend on the configuration alone.
    assert cli.run(["convert", str(whole), str(path / "out"), "--dry-run"]) == 0
    (path / "config.json").write_bytes((whole / "config.json").read_bytes())
    return path


def test_what_is_mutated_is_whole_before(fuzzed, whole, capsys):
    for name in (INDEX, "model-00001-of-00001.safetensors"):
        (fuzzed / name).write_bytes((whole / name).read_bytes())
    assert says_one_line(capsys, fuzzed) == 0
    (fuzzed / INDEX).unlink()
    assert says_one_line(capsys, fuzzed) == 0


PATCHES = st.lists(
    st.tuples(
        st.integers(0, 2**16),
        st.sampled_from([0, 1, 3, 20]),
        st.binary(max_size=3) | st.sampled_from([b"0", b"9" * 20, b"[", b'"', b"}", b"-", b",", b"F32", b"..", b"\xff"]),
    ),
    min_size=1,
    max_size=3,
)


def patched(data, patches, low, high):
    changed = bytearray(data)
    for at, length, new in patches:
        start = low + at % max(high - low, 1)
        changed[start : start + length] = new
    return bytes(changed)


@given(patches=PATCHES, fix=st.booleans(), cut=st.booleans())
@settings(max_examples=FUZZ, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_headers(fuzzed, whole, capsys, patches, fix, cut):
    data = (whole / "model-00001-of-00001.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    changed = patched(data, patches, 8 if fix else 0, end)
    if fix:
        changed = (end - 8 + len(changed) - len(data)).to_bytes(8, "little") + changed[8:]
    (fuzzed / INDEX).unlink(missing_ok=True)
    (fuzzed / "model-00001-of-00001.safetensors").write_bytes(changed[:-1] if cut else changed)
    says_one_line(capsys, fuzzed)


@given(patches=PATCHES)
@settings(max_examples=FUZZ, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_indexes(fuzzed, whole, capsys, patches):
    name = "model-00001-of-00001.safetensors"
    (fuzzed / name).write_bytes((whole / name).read_bytes())
    data = (whole / INDEX).read_bytes()
    (fuzzed / INDEX).write_bytes(patched(data, patches, 0, len(data)))
    says_one_line(capsys, fuzzed)
