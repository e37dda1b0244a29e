"""One run by two processes: the numbers of one; one that is late, is killed, never comes, or finds alone that it cannot go on."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from dsv41.config import save_config
from dsv41.errors import UserError
from infer.model import load_model
from tests.models import tiny_config
from tests.runs import records, small_data
from train.checkpoint import Checkpoints
from train.loop import TrainOptions, train
from train.processes import LOST, join
from train.step import init_state

ROOT = Path(__file__).parents[2]
LIMIT = 300  # seconds; what hangs fails
# The command line, with less patience for the dead; and one that dies after its third step.
START = "import sys, train.processes as p; p.HEARTBEAT = 10; from dsv41 import cli; sys.exit(cli.run(sys.argv[1:]))"
DIE = """
import os, train.metrics as m
write = m.Log.write
m.Log.write = lambda self, record: write(self, record) if record["step"] < 3 else os.kill(os.getpid(), 9)
"""
FULL = DIE.replace("os.kill(os.getpid(), 9)", '(_ for _ in ()).throw(OSError(28, "No space left on device"))')


def one_layer():
    """A source of pairs, and a table whose rows do not divide."""
    return tiny_config(
        vocab_size=300,
        engram_compressed_vocab_size=300,
        num_hidden_layers=1,
        compress_ratios=(2,),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0,),
        candidate_source_layer_id=-1,
        engram_layer_ids=(0,),
        engram_num_embeddings=tiny_config().engram_num_embeddings[:1],
        dspark_target_layer_ids=(0,),
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("processes")
    with small_data(base, one_layer):
        save_config(one_layer(), base / "config.json")
        yield base


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(number, port, out, base, code=START, data="data"):
    flags = re.sub("device_count=[0-9]+", "device_count=1", os.environ["XLA_FLAGS"])
    words = ["train", "--config", base / "config.json", "--data", base / data, "--out", out, "--steps", 4, "--batch-size", 4]
    words += ["--length", 32, "--checkpoint-every", 2, "--no-evaluate", "--mesh", "fsdp=2"]
    with open(f"{out}.{number}.txt", "a") as log:
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, words), "--process", f"{number}/2@127.0.0.1:{port}"],
            env={**os.environ, "XLA_FLAGS": flags},
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )


def ended(*running):
    """Exit codes, and what the processes said."""
    try:
        return [process.wait(LIMIT) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()


def test_two_processes_have_the_numbers_of_one(base):
    """One comes late; then one is killed between two checkpoints, and both start again."""
    options = TrainOptions(config=base / "config.json", data=(str(base / "data"),), steps=4, batch_size=4, evaluate=False)
    whole = train(replace(options, out=base / "whole", length=32, mesh="fsdp=2"))
    out, port = base / "two", free_port()
    first = start(0, port, out, base)
    time.sleep(5)
    codes = ended(first, start(1, port, out, base, DIE + START))
    told = (base / "two.0.txt").read_text()
    assert codes == [LOST, -signal.SIGKILL], told
    last = told.rstrip().splitlines()[-1]
    assert last == "dsv41: error: process: lost another of 2; start all again, and they go on from the newest checkpoint"
    assert Checkpoints(out / "checkpoints").latest() == 2 and len(records(out)) in (2, 3), told
    port = free_port()
    codes = ended(*(start(number, port, out, base) for number in (0, 1)))
    told = (base / "two.0.txt").read_text()
    assert codes == [0, 0] and "resumed from step 2" in told, told
    # Sums over two devices have one order: the same bits.
    assert records(out) == records(base / "whole")
    found, _ = Checkpoints(out / "checkpoints").restore(4, jax.eval_shape(lambda: init_state(whole.config, 0)))
    there, _ = Checkpoints(base / "whole" / "checkpoints").restore(4, jax.eval_shape(lambda: init_state(whole.config, 0)))
    # And for inference on a mesh of its own, tables filled up.
    model = load_model(out, "expert=2,model=2")
    assert len(model.params.layers[0].engram.embed.addressable_shards) == 4
    spread = jax.tree.map(lambda a, b: a[: len(b)], model.params, there.params)
    for a, b in zip(jax.tree.leaves((found, spread)), jax.tree.leaves((there, there.params)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("wrong", "codes", "says"),
    [
        ("text", [2, 2], ["process: found bad input in process 1 of 2, which says what it is", "--data: found nothing at"]),
        ("folder", [2, 2], ["process: found bad input in process 1 of 2", "apart from the first process's, allowed is a folder"]),
        ("step", [LOST, 2], ["process: lost another of 2", "No space left on device"]),
        ("step of the first", [2, LOST], ["No space left on device", "process: lost another of 2"]),
    ],
)
def test_what_one_process_finds_wrong_ends_both_with_a_line(base, wrong, codes, says):
    """Its text, its folder, which is not the other's, or what it writes behind its third step."""
    port, outs, bad = free_port(), [base / wrong] * 2, 0 if wrong.endswith("first") else 1
    outs[1] = base / "elsewhere" if wrong == "folder" else outs[1]
    code = [FULL + START if "step" in wrong and n == bad else START for n in (0, 1)]
    data = ["nothing" if wrong == "text" and n == bad else "data" for n in (0, 1)]
    found = ended(*(start(n, port, outs[n], base, code[n], data[n]) for n in (0, 1)))
    told = [Path(f"{outs[n]}.{n}.txt").read_text().rstrip().splitlines() for n in (0, 1)]
    assert found == codes, told
    for lines, line in zip(told, says, strict=True):
        assert lines[-1].startswith("dsv41: error: ") and line in lines[-1], told


def test_a_process_without_the_others_ends_with_one_line():
    code = "from train.processes import join; join('1/2@127.0.0.1:%d', 3)" % free_port()  # noqa: UP031
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "process: waited 3 s, allowed are all 2 processes" in done.stderr
    for text in ("2/2@host:1", "0/2", "0/2@host", "a/2@host:1", "0/2@host:0", "0/2@host:65536"):
        with pytest.raises(UserError, match="allowed is NUMBER/COUNT@HOST:PORT"):
            join(text)
