"""Checkpoints come back bit for bit or not at all, whatever happened while they were written or since."""

import gc
import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv41.errors import UserError
from dsv41.params import ParamSpec
from train.checkpoint import Checkpoints, _checksum
from train.optim import make_optimizer

SPECS = {
    "wq": ParamSpec((8, 6), (None, None), "wq", "f32", "muon"),
    "gain": ParamSpec((6,), (None,), "gain", "f32", "adamw"),
    "embed": ParamSpec((40, 6), (None, None), "embed", "f32", "sinkhorn", decay=False),
    "gate.bias": ParamSpec((4,), (None,), "gate.bias", "f32", "sign", decay=False),
    "ids": ParamSpec((5, 2), (None, None), "ids", "i64", "frozen", decay=False),
}


@struct.dataclass
class State:
    params: Any
    opt_state: Any
    step: Any


def make_state(seed: int = 0) -> State:
    rng = np.random.default_rng(seed)
    params = {
        name: jnp.asarray(rng.integers(0, 9, s.shape), jnp.int32)
        if s.family == "frozen"
        else jnp.asarray(rng.standard_normal(s.shape, dtype=np.float32))
        for name, s in SPECS.items()
    }
    opt_state = make_optimizer(SPECS, lambda _: jnp.float32(0)).init(params)
    opt_state = jax.tree.map(
        lambda a: jnp.asarray(rng.standard_normal(a.shape, dtype=np.float32)) if a.ndim else a + seed, opt_state
    )
    return State({**params, "layers": ({"absent": None, "a": jnp.ones(3)},)}, opt_state, jnp.int32(seed))


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def assert_same_bits(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert isinstance(a, jax.Array) and (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def error_of(call, *args) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    return str(caught.value)


@pytest.fixture
def saved(tmp_path) -> tuple[Checkpoints, State]:
    checkpoints, state = Checkpoints(tmp_path / "run" / "checkpoints"), make_state(3)
    checkpoints.save(3, state, {"position": 3})
    return checkpoints, state


@pytest.mark.pitfall("N11", "H3")
def test_round_trip(saved):
    checkpoints, state = saved
    found, meta = checkpoints.restore(3, abstract(state))
    assert_same_bits(found, state)
    assert meta == checkpoints.meta(3) == {"position": 3}
    assert_same_bits(checkpoints.restore_params(3, abstract(state.params)), state.params)
    checkpoints.check(3)


@pytest.mark.pitfall("N11")
def test_every_dtype_and_every_bit(tmp_path):
    odd = np.array([0x7FC00123, 0x80000000, 0x00000001, 0xFF800000], np.uint32)
    params = {
        "f32": jnp.asarray(odd.view(np.float32)),
        "bf16": jnp.asarray(np.arange(6, dtype=np.float32), jnp.bfloat16),
        "f8": jnp.asarray([1.0, -2.0, 0.5], jnp.float8_e4m3fn),
        "i8": jnp.array([-128, 127], jnp.int8),
        "u32": jnp.array([0, 2**32 - 1], jnp.uint32),
        "bool": jnp.array([True, False]),
        "scalar": jnp.float32(1e-40),
    }
    state = State(params, {"m": params["bf16"]}, jnp.int32(1))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, state, {})
    assert_same_bits(checkpoints.restore(0, abstract(state))[0], state)


@pytest.mark.pitfall("N11")
def test_a_save_behind_the_run_has_the_state_of_its_call(tmp_path):
    checkpoints, state = Checkpoints(tmp_path / "checkpoints"), make_state(1)
    kept = jax.tree.map(lambda a: jnp.array(a, copy=True), state)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda a: a + 1, s), donate_argnums=0)
    checkpoints.save_behind(1, state, {"position": 1})
    checkpoints.save_behind(2, overwrite(state), {"position": 2})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]
    assert_same_bits(checkpoints.restore(1, abstract(kept))[0], kept)
    assert_same_bits(checkpoints.restore(2, abstract(kept))[0], overwrite(kept))


def test_a_save_behind_the_run_that_fails_says_so_when_waited_for(tmp_path):
    (tmp_path / "file").write_text("")
    checkpoints, state = Checkpoints(tmp_path / "file"), make_state(1)
    checkpoints.save_behind(1, state, {})
    assert "cannot write step 1" in error_of(checkpoints.save_behind, 2, state, {})
    checkpoints.wait()  # nothing is left of it


def test_arrays_come_back_on_the_shardings_asked_for(saved):
    checkpoints, state = saved
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    target = abstract(state.params)
    target["embed"] = jax.ShapeDtypeStruct((40, 6), jnp.float32, sharding=rows)
    params = checkpoints.restore_params(3, target)
    assert params["embed"].sharding == rows
    assert_same_bits(params, state.params)


@pytest.mark.pitfall("N9")
def test_saved_on_four_devices_and_restored_on_two_and_one(tmp_path):
    """Weights and momenta in parts of rows on four devices, and again on fewer; what it holds is read without any array."""

    def on(count: int, tree: Any, place: Any) -> Any:
        mesh = jax.make_mesh((count,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:count])
        rows, all_of_it = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (("x",), ()))
        return jax.tree.map(lambda a: place(a, rows if a.ndim and a.shape[0] % 4 == 0 else all_of_it), tree)

    state, checkpoints = make_state(3), Checkpoints(tmp_path)
    checkpoints.save(3, on(4, state, jax.device_put), {"position": 3})
    described = checkpoints.described(3)
    assert described["params"]["embed"] == [[40, 6], "float32"] and checkpoints.meta(3) == {"position": 3}
    for count in (2, 1):
        target = on(count, state, lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding))
        found, _ = checkpoints.restore(3, target)
        assert_same_bits(found, state)
        assert len(found.params["embed"].sharding.device_set) == count
        assert all(leaf.sharding == want.sharding for leaf, want in zip(*map(jax.tree.leaves, (found, target)), strict=True))


def test_the_newest_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new", keep=2)
    assert checkpoints.steps() == [] and checkpoints.latest() is None
    assert not (tmp_path / "new").exists()
    for step in (0, 9, 10, 100):
        checkpoints.save(step, make_state(step), {"step": step})
    assert checkpoints.steps() == [10, 100] and checkpoints.latest() == 100
    assert sorted(os.listdir(tmp_path / "new")) == ["10", "100"]
    checkpoints.save(100, make_state(7), {"step": 7})
    assert_same_bits(checkpoints.restore(100, abstract(make_state()))[0], make_state(7))
    assert checkpoints.steps() == [10, 100] and checkpoints.meta(100) == {"step": 7}


def test_leftovers_are_ignored_and_go_at_the_next_save(saved, tmp_path):
    checkpoints, _ = saved
    folder = tmp_path / "run" / "checkpoints"
    for name in ("4.partial", "4.partial.orbax-checkpoint-tmp", "2.removed"):
        (folder / name / "params").mkdir(parents=True)
    (folder / "notes").mkdir()
    (folder / "07").mkdir()
    (folder / "5").write_text("a file")
    assert checkpoints.steps() == [3]
    checkpoints.save(6, make_state(), {})
    assert sorted(os.listdir(folder)) == ["07", "3", "5", "6", "notes"]


def test_missing(saved, tmp_path):
    checkpoints, state = saved
    folder = str(tmp_path / "run" / "checkpoints")
    for call in (checkpoints.meta, lambda s: checkpoints.restore(s, abstract(state))):
        assert error_of(call, 4) == f"checkpoints: no step 4 in {folder!r}, found steps 3"
    nowhere = Checkpoints(tmp_path / "nowhere")
    assert error_of(nowhere.restore_params, 1, abstract(state.params)).endswith("nowhere', found none")
    (tmp_path / "file").write_text("x")
    assert "Not a directory" in error_of(Checkpoints(tmp_path / "file").steps)


def data_file(folder: Path) -> Path:
    return max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [cut, flip, os.remove])
@pytest.mark.parametrize("file", ["data", "manifest.ocdbt", "_METADATA"])
@pytest.mark.parametrize("item", ["params", "rest"])
def test_damaged_arrays(saved, tmp_path, item, file, harm):
    checkpoints, state = saved
    folder = tmp_path / "run" / "checkpoints" / "3" / item
    path = data_file(folder) if file == "data" else folder / file
    harm(path)
    message = error_of(checkpoints.restore, 3, abstract(state))
    assert message.startswith(f"checkpoint {str(folder.parent)!r} is damaged: ")
    assert str(path.relative_to(folder.parent)) in message
    assert error_of(checkpoints.check, 3) == message
    if item == "rest":
        assert_same_bits(checkpoints.restore_params(3, abstract(state.params)), state.params)
    else:
        error_of(checkpoints.restore_params, 3, abstract(state.params))


@pytest.mark.parametrize("harm", [cut, os.remove, lambda path: path.write_text("[]"), lambda path: path.write_bytes(b"\xff")])
def test_damaged_manifest(saved, tmp_path, harm):
    checkpoints, state = saved
    folder = tmp_path / "run" / "checkpoints" / "3"
    harm(folder / "checkpoint.json")
    for call in (lambda: checkpoints.restore(3, abstract(state)), lambda: checkpoints.meta(3), lambda: checkpoints.check(3)):
        message = error_of(call)
        assert message.startswith(f"checkpoint {str(folder)!r}: ") and "checkpoint.json" in message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The way to every value in a JSON value, itself included."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in inside for place in places(inner, (*path, key)))]


@pytest.fixture
def manifest_text(saved, tmp_path) -> str:
    return (tmp_path / "run" / "checkpoints" / "3" / "checkpoint.json").read_text()


@pytest.fixture
def failing_loads(monkeypatch):
    """Orbax leaves coroutines without an end when a load fails; they die here and not in a later test."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    yield
    gc.collect()


@pytest.mark.usefixtures("failing_loads")
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), other=JSON)
def test_a_manifest_of_another_form_is_one_line(saved, manifest_text, tmp_path, data, other):
    """Any value anywhere in it in place of what was written."""
    checkpoints, state = saved
    manifest = json.loads(manifest_text)
    path = data.draw(st.sampled_from(places(manifest)))
    changed = [manifest]
    for key in path[:-1]:
        changed.append(changed[-1][key])
    if path:
        changed[-1][path[-1]] = other
    (tmp_path / "run" / "checkpoints" / "3" / "checkpoint.json").write_text(json.dumps(manifest if path else other))
    calls = (
        lambda: checkpoints.restore(3, abstract(state)),
        lambda: checkpoints.restore_params(3, abstract(state.params)),
        lambda: checkpoints.restore_extra(3, "params"),
        lambda: [[*shape, dtype] for item in checkpoints.described(3).values() for shape, dtype in item.values()],
        lambda: checkpoints.meta(3).items(),
    )
    said = []
    for call in calls:
        try:
            call()
        except UserError as error:
            said.append(str(error))
    assert all(line.startswith("checkpoint ") and "\n" not in line for line in said)


def test_files_without_a_checksum_and_another_step_are_damage(saved, tmp_path):
    checkpoints, state = saved
    folder = tmp_path / "run" / "checkpoints" / "3"
    (folder / "params" / ".nfs0001").write_text("an operating system's")
    checkpoints.check(3)
    manifest = json.loads((folder / "checkpoint.json").read_text())
    one = next(name for name in manifest["files"] if name.startswith("params/"))
    for files in ({}, {name: checksum for name, checksum in manifest["files"].items() if name != one}):
        (folder / "checkpoint.json").write_text(json.dumps({**manifest, "files": files}))
        for call in (lambda: checkpoints.restore_params(3, abstract(state.params)), lambda: checkpoints.check(3)):
            message = error_of(call)
            assert message.startswith(f"checkpoint {str(folder)!r} is damaged: ") and message.endswith(" has no checksum")
    (folder / "checkpoint.json").write_text(json.dumps({name: part for name, part in manifest.items() if name != "step"}))
    checkpoints.check(3)  # as an older version wrote it
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    folder.rename(folder.with_name("12"))
    for call in (lambda: checkpoints.restore_params(12, abstract(state.params)), lambda: checkpoints.check(12)):
        assert error_of(call).endswith("checkpoints/12' is damaged: what it holds was written as step 3")


@pytest.mark.usefixtures("failing_loads")
def test_what_orbax_cannot_read_is_one_line(saved, tmp_path):
    checkpoints, state = saved
    folder = tmp_path / "run" / "checkpoints" / "3"
    manifest = json.loads((folder / "checkpoint.json").read_text())
    path = data_file(folder / "params")
    cut(path)
    manifest["files"][str(path.relative_to(folder))] = _checksum(path)
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    assert "cannot read the arrays" in error_of(checkpoints.restore, 3, abstract(state))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"embed": jnp.zeros((41, 6))}, "params: embed is float32[40, 6], the model's is float32[41, 6]"),
        ({"embed": jnp.zeros((40, 6), jnp.bfloat16)}, "embed is float32[40, 6], the model's is bfloat16[40, 6]"),
        ({"extra": jnp.zeros(2)}, "extra is absent, the model's is float32[2]"),
        ({"gain": None}, "gain is float32[6], the model's is absent"),
        ({"gain": None, "extra": jnp.zeros(2)}, "(and 1 more arrays differ)"),
    ],
    ids=["shape", "dtype", "more", "fewer", "several"],
)
def test_a_checkpoint_of_another_model(saved, change, says):
    checkpoints, state = saved
    other = abstract({**state.params, **change})
    for call in (checkpoints.restore_params, lambda s, p: checkpoints.restore(s, abstract(state).replace(params=p))):
        message = error_of(call, 3, other)
        assert "3' is of another model: " in message and says.removeprefix("params: ") in message
    message = error_of(checkpoints.restore, 3, abstract(state).replace(step=jax.ShapeDtypeStruct((2,), jnp.int32)))
    assert "step is int32[], the model's is int32[2]" in message


def test_a_full_disk_leaves_the_previous_checkpoint(saved, tmp_path, capfd):
    """Many arrays, of which the ones behind the first that fails have no event loop left to say so."""
    checkpoints, state = saved
    rng = np.random.default_rng(0)
    big = state.replace(params={f"w{n}": jnp.asarray(rng.standard_normal((64, 64)), jnp.float32) for n in range(150)})
    capfd.readouterr()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        message = error_of(checkpoints.save, 4, big, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    folder = tmp_path / "run" / "checkpoints"
    assert message == f"checkpoints: cannot write step 4 to {str(folder)!r} (File too large)"
    assert os.listdir(folder) == ["3"]
    assert capfd.readouterr() == ("", "")
    assert_same_bits(checkpoints.restore(3, abstract(state))[0], state)
    checkpoints.save(4, big, {})
    assert checkpoints.steps() == [3, 4]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    message = error_of(Checkpoints(tmp_path / "file" / "checkpoints").save, 1, make_state(), {})
    assert message.endswith("(Not a directory)")


SAVER = """
import os, signal, sys, time
from train.checkpoint import Checkpoints
from saved_content import content

# Forked before anything starts a thread: importing takes far longer than saving.
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        checkpoints = Checkpoints(sys.argv[1])
        step = -1 if checkpoints.latest() is None else checkpoints.latest()
        while True:
            step += 1
            checkpoints.save(step, content(step), {"step": step})
            os.write(1, f"{step}\\n".encode())  # whole or not at all, also where Python is unbuffered
    while not Checkpoints(sys.argv[1]).steps():
        time.sleep(0.01)
    time.sleep(float(line))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.write(1, b"killed\\n")
"""
CONTENT = """
from typing import Any
import jax.numpy as jnp, numpy as np
from flax import struct

@struct.dataclass
class State:
    params: Any
    opt_state: Any
    step: Any

def content(step):
    rng = np.random.default_rng(step)
    params = {f"w{n}": jnp.asarray(rng.standard_normal((64, 256), dtype=np.float32)) for n in range(8)}
    return State(params, {"m": jnp.asarray(rng.standard_normal((64, 256), dtype=np.float32))}, jnp.int32(step))
"""


def test_kill_at_any_moment(tmp_path, monkeypatch):
    (tmp_path / "saved_content.py").write_text(CONTENT)
    (tmp_path / "saver.py").write_text(SAVER)
    monkeypatch.syspath_prepend(str(tmp_path))
    from saved_content import content  # pyright: ignore

    folder = tmp_path / "checkpoints"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{tmp_path}", "PYTHONWARNINGS": "ignore"}
    moments = random.Random(0)
    checkpoints, target = Checkpoints(folder), abstract(content(0))
    latest, leftovers, saves = 0, 0, 0
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "saver.py"), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin and process.stdout
        try:
            for _ in range(6):
                process.stdin.write(f"{moments.uniform(0.3, 1.2)}\n")
                process.stdin.flush()
                while (line := process.stdout.readline().strip()) != "killed":
                    assert line.isdigit(), line
                    saves += 1
                steps = checkpoints.steps()
                assert steps and steps[-1] >= latest
                latest = steps[-1]
                for step in steps:
                    state, meta = checkpoints.restore(step, target)
                    assert meta == {"step": step}
                    assert_same_bits(state.params, content(step).params)
                leftovers += any(not name.isdigit() for name in os.listdir(folder))
        finally:
            process.stdin.close()
    assert process.returncode == 0 and saves >= 3 and leftovers >= 1
    checkpoints.save(latest + 1, content(latest + 1), {})
    assert all(name.isdigit() for name in os.listdir(folder)) and len(checkpoints.steps()) == 2
