"""`dsv41 convert` there and back: equal bytes, nothing dropped unasked, the full release planned from headers alone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import pytest

from dsv41 import cli, verify
from dsv41.config import load_config, preset, replace, save_config
from dsv41.hf import convert, folder
from dsv41.hf.draft import CARRIED, from_carried, has_draft, to_carried
from dsv41.hf.folder import INDEX, open_folder
from dsv41.hf.load import load_draft, load_params, one_device
from dsv41.hf.names import key_table
from dsv41.hf.save import SHARD_BYTES
from dsv41.params import abstract_params, init_params, text_specs
from infer.model import load_model
from tests.hf.release import released_config, write_headers, write_release
from tests.models import tiny_config
from train.checkpoint import Checkpoints
from train.loop import fit_vocabulary
from train.tokenizer import train_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "model_a"
TEXT_ONLY = ("--draft-stages", "0", "--no-vision")


def run(*argv):
    assert cli.run(["convert", *map(str, argv)]) == 0


def error(capsys, *argv):
    assert cli.run(["convert", *map(str, argv)]) == 2
    return capsys.readouterr().err


def contents(path):
    return {p.name: p.read_bytes() for p in path.iterdir()}


def arrays(path):
    folder = open_folder(path)
    return {name: (e.dtype, e.shape, folder.view(name).tobytes()) for name, e in folder.tensors()}


@pytest.fixture(autouse=True)
def _one_device(monkeypatch):
    """Orbax writes eight devices' shards slowly."""
    monkeypatch.setattr(convert, "_rule", lambda: one_device)


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return write_release(tmp_path_factory.mktemp("convert") / "release", released_config(), shard_bytes=SHARD_BYTES)


@pytest.fixture(scope="module")
def imported(tmp_path_factory, release):
    path = tmp_path_factory.mktemp("imported") / "run"
    run(release, path)
    return path


@pytest.mark.pitfall("K1", "K3")
def test_released_weights_come_back_to_the_byte(tmp_path, release, imported):
    run(imported, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(release)


@pytest.mark.parametrize("tile", [(128, 128), (16, 32)])
def test_other_tiles_and_files_come_back(tmp_path, tile):
    config = released_config()
    config = replace(config, quantization_config=replace(config.quantization_config, weight_block_size=tile))
    write_release(tmp_path / "release", config, seed=1, shard_bytes=40_000)
    run(tmp_path / "release", tmp_path / "run")
    run(tmp_path / "run", tmp_path / "back")
    assert arrays(tmp_path / "back") == arrays(tmp_path / "release")


def test_eight_devices_come_back_to_the_byte(tmp_path, release, monkeypatch):
    monkeypatch.undo()
    run(release, tmp_path / "run", "--layers", "0-0", *TEXT_ONLY)
    run(tmp_path / "run", tmp_path / "back")
    found, whole = arrays(tmp_path / "back"), arrays(release)
    assert found == {name: whole[name] for name in found}


def test_every_tensor_is_in_the_plan(capsys, tmp_path, release, imported):
    for source in (release, imported):
        run(source, tmp_path / "out", "--dry-run")
        lines = capsys.readouterr().out.splitlines()
        planned = {line.split("  ")[0]: int(line.split("  ")[2].split()[0]) for line in lines if " -> " in line}
        tensors = [t for slot in key_table(released_config()).values() for t in slot.tensors]
        assert planned == {t.name: t.bytes for t in tensors}
        assert f"total: {len(tensors):,} tensors, {sum(planned.values()):,} bytes" in lines
        vision = [t for slot in key_table(released_config()).values() if slot.part == "vision" for t in slot.tensors]
        assert f"vision: {len(vision)} tensors, {sum(t.bytes for t in vision):,} bytes" in lines
    assert not (tmp_path / "out").exists()


def test_plan_names_source_and_shards(capsys, monkeypatch, release):
    monkeypatch.undo()
    run(release, "out", "--dry-run")
    out = capsys.readouterr().out
    file = "model-00001-of-00001.safetensors"
    assert f"layers.0.attn.wq_a.weight  F8_E4M3[40,32]  1280 bytes  {file} -> params.layers.0.attn.wq_a  " in out
    assert "'fsdp'" in out
    assert f"layers.0.ffn.experts.3.w2.scale  F8_E8M0[32,1]  32 bytes  {file} -> scales.layers.0.ffn.experts.w2[3]  " in out
    assert f"vision.norm.weight  BF16[16]  32 bytes  {file} -> carried.vision.norm.weight  " in out


@pytest.mark.parametrize(("count", "says"), [(1, "bytes on 1 device; left out"), (8, "bytes on 8 devices; left out")])
def test_the_plan_counts_devices(capsys, monkeypatch, release, count, says):
    monkeypatch.setattr(jax, "device_count", lambda: count)
    run(release, "out", "--dry-run")
    assert says in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("target", ["bf16", "fp32"])
def test_plain_weights_there_and_back(tmp_path, imported, target):
    run(imported, tmp_path / "plain", "--quantize", target)
    folder = open_folder(tmp_path / "plain")
    assert folder.config.quantization_config is None
    assert {e.dtype for _, e in folder.tensors()} <= {"BF16", "F32"}
    assert len(list(folder.tensors())) == len(key_table(folder.config))
    run(tmp_path / "plain", tmp_path / "run")
    run(tmp_path / "run", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "plain")


@pytest.mark.pitfall("K3")
def test_golden_weights_come_back(tmp_path):
    run(GOLDEN, tmp_path / "run", *TEXT_ONLY)
    run(tmp_path / "run", tmp_path / "back")
    folder = open_folder(GOLDEN, parts=("text",))
    assert arrays(tmp_path / "back") == {n: (e.dtype, e.shape, folder.view(n).tobytes()) for n, e in folder.tensors()}
    assert (tmp_path / "back" / "engram_token_map.json").read_bytes() == (GOLDEN / "engram_token_map.json").read_bytes()


def test_verify_takes_quantised_folders(tmp_path, release, capsys, monkeypatch):
    assert cli.run(["verify", str(release)]) == 0
    assert "model-00001-of-00001.safetensors  *  -  " in capsys.readouterr().out
    shutil.copytree(release, tmp_path / "release")
    shutil.copy(GOLDEN / "fp32_len7.safetensors", tmp_path / "release")
    (tmp_path / "release" / "engram_token_map.json").write_text(json.dumps([0] * 64))
    ran = []
    monkeypatch.setattr(verify, "_run_case", lambda file, config, params, *rest: ran.append(params) or iter(()))
    assert list(verify.check([tmp_path / "release"], [])) == []
    held = load_params(open_folder(tmp_path / "release"))
    chex.assert_trees_all_equal(ran[0], held)


def test_slices(tmp_path, release, capsys):
    run(release, tmp_path / "run", "--layers", "0-2", *TEXT_ONLY)
    run(tmp_path / "run", tmp_path / "back")
    found, whole = arrays(tmp_path / "back"), arrays(release)
    assert found == {name: whole[name] for name in found}
    assert {name.split(".")[1] for name in found if name.startswith("layers.")} == {"0", "1", "2"}
    assert not any(name.startswith(("mtp", "vision", "image", "aligner")) for name in found)
    capsys.readouterr()
    assert "allowed is 0" in error(capsys, release, tmp_path / "x", "--layers", "0-2")
    assert "allowed is 0-N" in error(capsys, release, tmp_path / "x", "--layers", "2-3")
    assert "allowed is 0 or all 2" in error(capsys, release, tmp_path / "x", "--draft-stages", "1")
    assert not (tmp_path / "x").exists()


def test_a_drafter_goes_in_and_out(tmp_path, release, imported):
    """Carried bytes give the masters that the folder gives; masters in their place, as training leaves them, go out too."""
    config = load_config(release)
    store = Checkpoints(imported / "checkpoints", 1)
    masters = from_carried(config, store.restore_extra(0, CARRIED))
    chex.assert_trees_all_equal(masters, load_draft(open_folder(release)))
    trained = tmp_path / "trained"
    shutil.copytree(imported, trained, ignore=shutil.ignore_patterns("checkpoints"))
    rest = {name: a for name, a in store.restore_extra(0, CARRIED).items() if not has_draft([name])}
    params = store.restore_params(0, abstract_params(text_specs(config)))
    state = convert.Imported(params, jnp.zeros((), jnp.int32))
    Checkpoints(trained / "checkpoints", 1).save(0, state, {}, {CARRIED: {**rest, **to_carried(config, masters)}})
    run(trained, tmp_path / "back", "--quantize", "fp32")
    chex.assert_trees_all_equal(load_draft(open_folder(tmp_path / "back")), masters)


def test_slices_of_a_run(tmp_path, release, imported):
    run(imported, tmp_path / "back", "--layers", "0-1", "--draft-stages", "0")
    found, whole = arrays(tmp_path / "back"), arrays(release)
    assert found == {name: whole[name] for name in found}
    assert load_config(tmp_path / "back").num_hidden_layers == 2


def test_bad_sources_and_targets(capsys, tmp_path, release, imported):
    assert "found nothing there" in error(capsys, tmp_path / "none", tmp_path / "x")
    assert "no config.json" in error(capsys, tmp_path, tmp_path / "x")
    assert "found something there" in error(capsys, release, imported)
    assert "quantize: found 'bf16'" in error(capsys, release, tmp_path / "x", "--quantize", "bf16")
    assert "vision: found none" in error(capsys, GOLDEN, tmp_path / "x")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert "found no checkpoint" in error(capsys, tmp_path / "run", tmp_path / "x")
    shutil.copytree(release, tmp_path / "odd")
    (tmp_path / "odd" / "tokenizer.json").write_text("{}")
    assert "found no tokenizer" in error(capsys, tmp_path / "odd", tmp_path / "x")
    for name, says in (("config.json", "config: found a device"), (folder.INDEX, "found a device or pipe")):
        shutil.copytree(release, tmp_path / name)
        (tmp_path / name / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name / name)
        assert says in error(capsys, tmp_path / name, tmp_path / "x")
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob("x.*"))


@pytest.mark.parametrize("dry", [("--dry-run",), ()])
def test_a_run_with_the_config_of_another_model_is_refused_whole(tmp_path, imported, capsys, monkeypatch, dry):
    """Every array that does not fit, of weights, scales and carried tensors, planned or written."""
    monkeypatch.setattr(folder, "_SHOWN", 1000)
    monkeypatch.setattr(cli, "_LONGEST", 10**6)
    shutil.copytree(imported, tmp_path / "run")
    config = load_config(imported)
    vision = replace(config.vision_config, intermediate_size=2 * config.vision_config.intermediate_size)
    for change, says in (
        (
            {"n_routed_experts": config.n_routed_experts + 1},
            ("ffn.experts.w1': found float32", "scales 'layers.0.ffn.experts.w1'"),
        ),
        ({"num_hash_layers": 1}, ("'layers.0.ffn.tid2eid' is missing", "'layers.0.ffn.bias' is unknown")),
        ({"vision_config": vision}, ("carried 'vision.blocks.0.mlp.w1.weight': found shape",)),
        ({"vision_config": None}, ("carried 'vision.norm.weight' is unknown to config.json",)),
        ({"dspark_markov_rank": config.dspark_markov_rank + 8}, ("carried 'mtp.", "found shape")),
    ):
        save_config(replace(config, **change), tmp_path / "run" / "config.json")
        said = error(capsys, tmp_path / "run", tmp_path / "back", *dry)
        assert said.startswith(f"dsv41: error: {tmp_path / 'run'}: ") and " problems: " in said and said.count("\n") == 1
        assert all(text in said for text in says), said
    assert not (tmp_path / "back").exists()


def test_trained_weights_are_requantised(tmp_path, imported):
    store = Checkpoints(imported / "checkpoints", 1)
    config = load_config(imported)
    abstract = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    params = store.restore_params(0, abstract)
    layer = params.layers[0]
    attn = replace(layer.attn, wq_b=layer.attn.wq_b + 1e-3 * jax.random.normal(jax.random.key(0), layer.attn.wq_b.shape))
    params = replace(params, layers=(replace(layer, attn=attn), *params.layers[1:]))
    shutil.copytree(imported, tmp_path / "run")
    extra = {item: store.restore_extra(0, item) for item in ("scales", "carried")}
    Checkpoints(tmp_path / "run" / "checkpoints", 1).save(1, convert.Imported(params, jax.numpy.int32(1)), {}, extra)
    run(tmp_path / "run", tmp_path / "back")
    run(imported, tmp_path / "before")
    before, after = arrays(tmp_path / "before"), arrays(tmp_path / "back")
    changed = {name for name in before if before[name] != after[name]}
    assert changed and changed <= {"layers.0.attn.wq_b.weight", "layers.0.attn.wq_b.scale"}


def test_a_converted_folder_generates(tmp_path, capsys):
    tokenizer = train_tokenizer(["import os\n" * 20, "def main():\n    return 0\n"], 280)
    config, _ = fit_vocabulary(tiny_config(), tokenizer)
    write_release(tmp_path / "release", config)
    text = tokenizer.to_str().replace("<bos>", "<|begin|>")  # of other special tokens than ours
    (tmp_path / "release" / "tokenizer.json").write_text(text)
    run(tmp_path / "release", tmp_path / "run")
    model = load_model(tmp_path / "run")
    assert model.step == 0 and model.tokenizer.to_str() == text
    wanted = load_params(open_folder(tmp_path / "release"))
    chex.assert_trees_all_equal(model.params, wanted)
    save_config(
        replace(config, engram_compressed_vocab_size=config.engram_compressed_vocab_size - 1), tmp_path / "release/config.json"
    )
    assert "engram_compressed_vocab_size: found" in error(capsys, tmp_path / "release", tmp_path / "x")


@pytest.mark.pitfall("K1", "K2")
def test_the_full_release_is_planned_from_headers(tmp_path):
    config = preset("flash")
    files = {f"model-{n:05}-of-00048.safetensors": [] for n in range(1, 49)}
    names = list(files)
    tables = {f"layers.{layer}.engram.embed.weight": name for layer, name in ((1, names[46]), (14, names[47]))}
    for n, slot in enumerate(key_table(config).values()):
        files[tables.get(slot.weight.name, names[n * 46 // len(key_table(config))])] += slot.tensors
    try:
        write_headers(tmp_path / "release", files)
    except OSError as reason:
        pytest.skip(f"no room for holes of 510 GB here: {reason}")
    save_config(config, tmp_path / "release" / "config.json")
    script = "import sys; from dsv41 import cli; code = cli.run(sys.argv[1:]); "
    script += "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0], file=sys.stderr); sys.exit(code)"
    argv = [sys.executable, "-c", script, "convert", tmp_path / "release", tmp_path / "run", "--dry-run"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split()[-1]) < 2 << 20  # KiB
    lines = done.stdout.splitlines()
    assert len(lines) == 96_085 + 5 and sum(" -> " in line for line in lines) == 96_085
    assert lines[-5].startswith("text: 93,418 tensors, ")
    assert lines[-2] == "total: 96,085 tensors, 510,286,023,000 bytes"
    assert lines[-1].startswith("masters: 2,993,978,739,136 bytes on 8 devices; left out: 0")
    assert json.loads((tmp_path / "release" / INDEX).read_text())["weight_map"].keys() == {line.split()[0] for line in lines[:-5]}
