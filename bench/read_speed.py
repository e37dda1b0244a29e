"""Reading speed of released weights beside `cat FILE > /dev/null` on the same cached file, and peak memory.

Rows: read in place (every tensor opened, checked and viewed, every byte touched), own arrays (`load_params` into memory
that does not depend on the file), and their floor, the same bytes copied by as many threads into fresh memory and nothing
else. Fresh memory is cleared by the kernel; a virtual machine that gives freed memory back to its host also waits for the
host at the first touch. So rounds differ severalfold in both of the latter, and best and median are told apart.
One layer at the release's widths, its experts so many that the file has about 4 GiB; FP4 and FP8 stay in the stored form.
Run: python -m bench.read_speed [FILE.json [FOLDER]]    (FOLDER: where the file may lie for a while)
"""

import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from dsv41.config import ModelConfig, preset, replace, save_config
from dsv41.files import write_text
from dsv41.hf.folder import open_folder
from dsv41.hf.load import load_params
from dsv41.hf.names import released_tensors

EXPERTS, ROUNDS = 228, 9
_CHUNK, _PIECE = 1 << 26, 1 << 24
_FINITE = np.uint8(0x7E)  # the bits that make no NaN or infinity of any dtype here


def config() -> ModelConfig:
    """About 4 GiB of stored weights."""
    return replace(
        preset("flash"),
        num_hidden_layers=1,
        compress_ratios=(0,),
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=-1,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        num_nextn_predict_layers=0,
        vision_config=None,
        vocab_size=1 << 11,
        engram_compressed_vocab_size=1 << 11,
        dspark_noise_token_id=2,
        image_token_id=2,
        n_routed_experts=EXPERTS,
    )


def write_random(folder: Path) -> Path:
    """One file of random bytes under the released names."""
    save_config(config(), folder / "config.json")
    header, stop = {}, 0
    for tensor in released_tensors(config()):
        start, stop = stop, stop + tensor.bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    file = folder / "model-00001-of-00001.safetensors"
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for at in range(0, stop, _CHUNK):
            stream.write(rng.integers(0, 256, min(_CHUNK, stop - at), np.uint8) & _FINITE)
    return file


def memory(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) << 10


def cat(file: Path) -> float:
    """Seconds that the shell's cat takes."""
    began = time.perf_counter()
    subprocess.run(["sh", "-c", 'cat "$1" > /dev/null', "sh", str(file)], check=True)
    return time.perf_counter() - began


def read(folder: Path) -> float:
    """Seconds from an unopened folder to every byte of its tensors touched, where they are."""

    def touch(name: str) -> None:
        flat = opened.view(name).view(np.uint8).reshape(-1)
        flat[: len(flat) // 8 * 8].view(np.uint64).max(initial=0)

    began = time.perf_counter()
    opened = open_folder(folder)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(touch, [name for name, _ in opened.tensors()]):
            pass
    return time.perf_counter() - began


def fill(file: Path) -> float:
    """Seconds to copy the file's bytes into fresh memory."""
    size = file.stat().st_size
    began = time.perf_counter()
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    with open(file, "rb", buffering=0) as stream, memoryview(buffer) as view, ThreadPoolExecutor(os.cpu_count()) as pool:

        def copy(at: int) -> None:
            stop = min(at + _PIECE, size)
            while at < stop:
                at += os.preadv(stream.fileno(), [view[at:stop]], at)

        for _ in pool.map(copy, range(0, size, _PIECE)):
            pass
    return time.perf_counter() - began


def load(folder: Path) -> tuple[float, int]:
    """Seconds from an unopened folder to arrays on the device, and their bytes."""
    began = time.perf_counter()
    arrays = jax.block_until_ready(jax.tree.leaves(load_params(open_folder(folder), "stored")))
    return time.perf_counter() - began, sum(array.nbytes for array in arrays)


def main() -> None:
    """Prints the rounds and writes them."""
    where = sys.argv[2] if len(sys.argv) > 2 else None
    jax.device_put(np.zeros(1))
    with tempfile.TemporaryDirectory(dir=where, prefix="read-speed-") as name:
        folder = Path(name)
        file = write_random(folder)
        size = file.stat().st_size
        cat(file)
        before, began_load = memory("VmRSS"), os.getloadavg()[0]
        rounds, peak, held = [], 0, 0
        for _ in range(ROUNDS):
            loaded, held = load(folder)
            # Of the first load alone: afterwards the mapped file counts too.
            peak = peak or memory("VmHWM") - before
            row = {"cat": cat(file), "read_in_place": read(folder), "own_arrays": loaded, "own_arrays_floor": fill(file)}
            rounds.append({f"{name}_seconds": round(seconds, 3) for name, seconds in row.items()})
            print(rounds[-1], flush=True)
    shares = {}
    for what, of in (("best", min), ("median", statistics.median)):
        seconds = {name: of([r[name] for r in rounds]) for name in rounds[0]}
        for name in ("read_in_place", "own_arrays", "own_arrays_floor"):
            shares[f"{name}_share_of_cat_{what}"] = round(seconds["cat_seconds"] / seconds[f"{name}_seconds"], 3)
    report = {
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "load_average": [round(began_load, 2), round(os.getloadavg()[0], 2)],
        "file_bytes": size,
        "rounds": rounds,
        **shares,
        "own_arrays_peak_bytes_beyond_tensors": peak - held,
    }
    print({name: report[name] for name in report if "share" in name or "peak" in name or "average" in name})
    if len(sys.argv) > 1:
        out = Path(sys.argv[1])
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
