"""Recorded numbers against this program: every tensor of the case files of a model folder and of the unit files.

A model folder holds config.json, weights in any form that `dsv41.hf` reads, the Engram token map and case files; a unit
folder holds vectors of single components (`dsv41.verify_units`). One row a tensor, with its error relative to the largest
recorded value.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.config import ModelConfig, load_config
from dsv41.errors import UserError, cause, nearest
from dsv41.files import check_outputs, read_json, write_text
from dsv41.hf.folder import open_folder
from dsv41.hf.load import load_draft, load_params
from dsv41.hf.safetensors import open_safetensors
from dsv41.model import forward
from dsv41.numerics import Policy, Taps
from dsv41.params import DraftParams, TextParams
from dsv41.plan import layer_plans
from dsv41.quant import INDEX_KEY, MAIN_KV, WINDOW_KV, Format, e2m1_codes, e4m3, quantize, scale_values
from dsv41.show import print_table
from dsv41.verify_decode import decode_taps
from dsv41.verify_draft import draft_taps
from dsv41.verify_layers import layer_taps

Verdict = Literal["pass", "FAIL", "skipped"]
Tensors = dict[str, np.ndarray]

FP32_TOLERANCE, QUANT_TOLERANCE = 2e-5, 2e-4  # of a tensor's largest value
MOVED_CODES = 1e-3  # share of a quantised tensor's elements that may differ, by one code
TOKEN_MAP, FRAGILE = "engram_token_map.json", "fragile.json"
DECODE_TOLERANCE = 2e-3  # quantised decode: a moved code reaches the steps behind it
_DECODED = ("prefill_logits", "step_logits", "forward_logits", "draft.main_hidden")  # what the backbone's decode steps give
_CASE = re.compile(r"(decode_|dspark_)?(fp32|quant)_(len\d+|p\d+_t\d+)")
_NOT_RUN = {"vision_": "the vision tower is not part of the text run"}
_FORMATS = {
    "attn.swa_kv": WINDOW_KV,
    "attn.main_kv": MAIN_KV,
    "main_kv": MAIN_KV,
    "indexer.k": INDEX_KEY,
    "indexer.q": INDEX_KEY,
    "index_k": INDEX_KEY,
}
_LAYER = re.compile(r"(?:step\.|final\.)?layers\.(\d+)\.(.+)")
_DRAFT_ROWS = re.compile(r"prefill\.mtp\.\d+\.attn\.main_kv")
# What the published decode loop gave before its defect was corrected: no value to agree with.
_INFORMATION = "step_logits_reference_literal"


@dataclass(frozen=True)
class Row:
    """The outcome for one tensor. error: relative to the largest recorded value; sets: agreeing rows where ids are."""

    file: str
    name: str
    error: float | None
    sets: str | None
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True)
class Job:
    """A file by name (none: the weights of a folder), what gives its rows, and why it is left out where it is."""

    file: str
    rows: Callable[[], Iterator[Row]]
    left_out: str = ""


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over the largest recorded magnitude, finite entries only; NaN where a NaN is."""
    finite = np.isfinite(want)
    if not finite.any():
        return 0.0
    worst = np.max(np.abs(got[finite].astype(np.float64) - want[finite].astype(np.float64)))
    largest = np.max(np.abs(want[finite].astype(np.float64)))
    return float(worst / largest) if largest > 0 else float(worst)


def compare_floats(file: str, name: str, got: np.ndarray, want: np.ndarray, tolerance: float) -> Row:
    """Within ``tolerance`` of the largest value, and infinities (masked scores) in the same places."""
    if got.shape != want.shape:
        return Row(file, name, None, None, "FAIL", f"found shape {got.shape}, allowed is {want.shape}")
    error = relative_error(got, want)
    if not np.array_equal(np.where(np.isfinite(got), 0, got), np.where(np.isfinite(want), 0, want)):
        return Row(file, name, error, None, "FAIL", "infinite or NaN entries are in other places")
    if error <= tolerance:
        return Row(file, name, error, None, "pass")
    return Row(file, name, error, None, "FAIL", f"error above {tolerance:g}")


def compare_ids(file: str, name: str, got: np.ndarray, want: np.ndarray, as_sets: bool = False) -> Row:
    """Equal ids; ``as_sets`` compares each row (last axis) without order, -1 standing for none."""
    if as_sets and got.ndim == want.ndim and got.ndim:
        width = max(got.shape[-1], want.shape[-1])
        got, want = (
            np.sort(np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, width - a.shape[-1])], constant_values=-1), axis=-1)
            for a in (got, want)
        )
    if got.shape != want.shape:
        return Row(file, name, None, None, "FAIL", f"found shape {got.shape}, allowed is {want.shape}")
    equal = got == want
    if equal.ndim > 1:
        equal = equal.all(axis=-1)
    agreement = f"{int(equal.sum())}/{equal.size}"
    if equal.all():
        return Row(file, name, None, agreement, "pass")
    first = tuple(int(i) for i in np.argwhere(~np.atleast_1d(equal))[0])
    return Row(file, name, None, agreement, "FAIL", f"first difference at {first}")


def _signed_codes(x: np.ndarray, scales: np.ndarray, fmt: Format) -> np.ndarray:
    """Codes of already quantised values under given group scales, in value order (zero has one code)."""
    scaled = jnp.asarray((x.reshape(*scales.shape, fmt.group) / scales[..., None]).astype(np.float32))
    if fmt.element == "e2m1":
        codes, sign = np.asarray(e2m1_codes(scaled)).astype(np.int32), 8
    else:
        codes, sign = np.asarray(e4m3(scaled)).view(np.uint8).astype(np.int32), 128
    return np.where(codes >= sign, sign - codes, codes).reshape(x.shape)


def compare_codes(file: str, name: str, got: np.ndarray, want: np.ndarray, fmt: Format) -> Row:
    """Dequantised values equal, except at most 1 element in 1,000, by one code of its group's scale.

    A code that moved by less than the float32 tolerance (a small group's) is no difference at all.
    """
    if got.shape != want.shape:
        return Row(file, name, None, None, "FAIL", f"found shape {got.shape}, allowed is {want.shape}")
    error = relative_error(got, want)
    largest = np.max(np.abs(want), initial=0.0)
    moved = np.abs(got - want) > FP32_TOLERANCE * largest
    agreement = f"{moved.size - int(moved.sum())}/{moved.size}"
    if not np.isfinite(got).all():
        return Row(file, name, error, agreement, "FAIL", "infinite or NaN entries")
    if not moved.any():
        return Row(file, name, error, agreement, "pass")
    scales = [np.asarray(scale_values(quantize(jnp.asarray(a), fmt)[1], fmt)) for a in (got, want)]
    shared = np.maximum(*scales)
    steps = int(np.max(np.abs(_signed_codes(got, shared, fmt) - _signed_codes(want, shared, fmt)), where=moved, initial=0))
    count, allowed = int(moved.sum()), int(moved.size * MOVED_CODES)
    if count <= allowed and steps <= 1:
        return Row(file, name, error, agreement, "pass", f"{count} of {moved.size} codes moved by one")
    reason = f"{count} of {moved.size} codes moved by up to {steps}, allowed is {allowed} by 1"
    return Row(file, name, error, agreement, "FAIL", reason)


def read_tensors(file: Path) -> Tensors:
    """Every tensor of a file; `UserError` when it cannot be read."""
    try:
        opened = open_safetensors(file)
        return {name: np.asarray(opened.array(name)) for name in opened.keys()}  # noqa: SIM118
    except UserError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{file}: cannot be read: {cause(error)}") from None


@partial(jax.jit, static_argnames=("config", "policy"))
def _taps(params: TextParams, config: ModelConfig, policy: Policy, ids: jax.Array, token_map: jax.Array) -> Taps:
    taps: Taps = {}
    output = forward(params, config, policy, ids, jnp.ones_like(ids), token_map, taps)
    return {**taps, "logits": output.logits}


def _compare(file: str, name: str, got: np.ndarray, want: np.ndarray, config: ModelConfig, quantized: bool) -> Row:
    """The comparison that a tensor's name asks for."""
    got = got[: want.shape[0]] if got.ndim == want.ndim and got.ndim else got  # long files keep batch row 0 of some
    match = _LAYER.fullmatch(name)
    kind = match[2] if match else name
    if kind == "indexer.candidates" and match and got.shape == want.shape:
        ratio = layer_plans(config)[int(match[1])].ratio
        seen = (np.arange(want.shape[1])[:, None] + 1) // ratio > np.arange(want.shape[2])[None]
        return compare_ids(file, name, got & seen, want & seen)
    if want.dtype.kind in "iub":
        return compare_ids(file, name, got, want, as_sets=kind == "indexer.topk")
    if quantized and _DRAFT_ROWS.fullmatch(name):
        return compare_codes(file, name, got, want, WINDOW_KV)
    if quantized and kind in _FORMATS:
        return compare_codes(file, name, got, want, _FORMATS[kind])
    tolerance = DECODE_TOLERANCE if name.endswith(_DECODED) else QUANT_TOLERANCE
    return compare_floats(file, name, got, want, tolerance if quantized else FP32_TOLERANCE)


def _order(name: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


def _prefill_length(file: Path, value: np.ndarray | None, time: int) -> int:
    if value is None or value.ndim or value.dtype.kind not in "iu" or not 1 <= value < time:
        found = "none" if value is None else value.tolist()
        raise UserError(f"{file}: prefill_len: found {found}, allowed is a whole number from 1 to {time - 1}")
    return int(value)


def _recorded(file: Path, want: Tensors, config: ModelConfig) -> np.ndarray:
    """What the draft stages read: from it a quantised case runs, so that a moved code of the backbone is not in all behind it."""
    parts = [want.get("prefill_main_hidden"), want.get("draft.main_hidden")]
    batch, time = want["input_ids"].shape
    found = [part.reshape(batch, -1, part.shape[-1]) for part in parts if part is not None and part.ndim > 2]
    width = config.hidden_size * len(config.dspark_target_layer_ids)
    if sum(part.shape[1] * (part.shape[2] == width) for part in found) != time:
        raise UserError(f"{file}: allowed are prefill_main_hidden and draft.main_hidden of {width} numbers for each token")
    return np.concatenate(found, axis=1)


def _run_case(
    file: Path, config: ModelConfig, params: TextParams, drafter: DraftParams | None, token_map: jax.Array, fragile: bool
) -> Iterator[Row]:
    """Rows of a case: end to end, or layer by layer from the recorded inputs where it is fragile."""
    want = read_tensors(file)
    ids = want.get("input_ids")
    if ids is None or ids.ndim != 2 or not ids.size or ids.dtype.kind not in "iu":
        found = "none" if ids is None else f"{ids.dtype} {ids.shape}"
        raise UserError(f"{file}: input_ids: found {found}, allowed are whole numbers [batch, length], not empty")
    if not (ids.min() >= 0 and ids.max() < config.vocab_size):
        raise UserError(f"{file}: input_ids: found {ids.min()} to {ids.max()}, allowed are 0 to {config.vocab_size - 1}")
    ids = want["input_ids"] = ids.astype(np.int32)
    on = "quant" in file.stem
    policy = Policy(quantize_main_kv=on, quantize_index=on, quantize_window=on)
    if file.stem.startswith(("decode_", "dspark_")):
        prefill = _prefill_length(file, want.pop("prefill_len", None), ids.shape[1])
        want.pop(_INFORMATION, None)
        run = (
            decode_taps
            if drafter is None
            else partial(draft_taps, drafter=drafter, inputs=_recorded(file, want, config) if on else None)
        )
        got = run(params=params, config=config, policy=policy, ids=ids, prefill=prefill, token_map=token_map)
    elif fragile:
        try:
            got, want = layer_taps(params, config, policy, want, token_map)
        except KeyError as error:
            raise UserError(f"{file}: holds no {error}, which a case in {FRAGILE} needs") from None
    else:
        got = jax.device_get(_taps(params, config, policy, jnp.asarray(ids), token_map))
    del want["input_ids"]
    for name in sorted(want, key=_order):
        if name in got:
            yield _compare(file.name, name, np.asarray(got[name]), want[name], config, on)
        else:
            yield Row(file.name, name, None, None, "FAIL", "the model records no such value")


def _model_jobs(folder: Path) -> Iterator[Job]:
    config = load_config(folder)
    files = [f for f in folder.glob("*.safetensors") if not f.name.startswith("weights")]
    cases = sorted((f for f in files if _CASE.fullmatch(f.stem)), key=lambda f: _order(f.name))
    others = sorted(f for f in files if f.name.startswith(tuple(_NOT_RUN)))
    if not cases and not others and any(folder.glob("model*.safetensors")):
        yield Job("", partial(_weight_rows, folder, config))
        return
    if not cases and not others:
        raise UserError(f"{folder}: no case files; allowed are fp32_len*, quant_len*, decode_*, dspark_*, vision_*")
    fragile = read_json(folder / FRAGILE) if (folder / FRAGILE).exists() else []
    if not isinstance(fragile, list) or not all(isinstance(name, str) for name in fragile):
        raise UserError(f"{folder / FRAGILE}: allowed is a list of file names")

    @cache
    def weights() -> tuple[TextParams, jax.Array]:
        params = load_params(open_folder(folder, parts=("text",), config=config))
        return params, jnp.asarray(_token_map(folder, config))

    @cache
    def drafter() -> DraftParams:
        return load_draft(open_folder(folder, parts=("draft",), config=config))

    def run_case(file: Path) -> Iterator[Row]:
        params, token_map = weights()
        used = drafter() if file.stem.startswith("dspark_") else None
        return _run_case(file, config, params, used, token_map, file.stem in fragile)

    for file in cases:
        yield Job(file.name, partial(run_case, file))
    for file in others:
        why = next(text for start, text in _NOT_RUN.items() if file.name.startswith(start))
        yield Job(file.name, partial(iter, ()), why)


def _weight_rows(folder: Path, config: ModelConfig) -> Iterator[Row]:
    """Of a checkpoint without recorded numbers: that its names, dtypes, shapes and sizes are those of its config.json."""
    counts: Counter[str] = Counter()
    opened = open_folder(folder, config=config)
    for name, _ in opened.tensors():
        counts[opened.files[name].path.name] += 1
    for file, count in sorted(counts.items()):
        yield Row(file, "*", None, f"{count}/{count}", "pass", "names, dtypes and shapes; no recorded numbers beside them")


def _token_map(folder: Path, config: ModelConfig) -> np.ndarray:
    file = folder / TOKEN_MAP
    if not file.exists():
        if config.engram_layer_ids:
            raise UserError(f"{folder}: no {TOKEN_MAP}, which the Engram layers need")
        return np.zeros(config.vocab_size, np.int32)
    values = read_json(file, 16 << 20)  # an id for each token: of the release about a megabyte
    classes = config.engram_compressed_vocab_size
    whole = isinstance(values, list) and all(type(v) is int and 0 <= v < classes for v in values)
    if not whole or len(values) != config.vocab_size:
        raise UserError(f"{file}: allowed is a list of {config.vocab_size} whole numbers from 0 to {classes - 1}")
    return np.asarray(values, np.int32)


def _jobs(path: Path, deeper: bool = True) -> Iterator[Job]:
    from dsv41.verify_units import UNITS, unit_rows

    if not path.is_dir():
        found = "found something else" if path.exists() else "found nothing there"
        raise UserError(f"{path}: {'found a file' if path.is_file() else found}, allowed is a folder")
    if (path / "config.json").exists():
        yield from _model_jobs(path)
        return
    units = [name for name in UNITS if (path / name).exists()]
    for name in units:
        yield Job(name, partial(unit_rows, path / name))
    if units:
        return
    inner = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")) if deeper else []
    if not inner:
        raise UserError(f"{path}: no config.json with cases and no unit files; unit files are {', '.join(UNITS)}")
    for folder in inner:
        yield from _jobs(folder, deeper=False)


def check(paths: list[Path], skip: list[str]) -> Iterator[Row]:
    """The rows of every folder, as they are found.

    skip: names (or patterns) of files to leave out. One that fits no file is an error before anything is run, and so are
    a folder with nothing to check and patterns that leave nothing to check.
    """
    if not paths:
        raise UserError("found no folder, allowed is one or more")
    jobs = [job for path in paths for job in _jobs(Path(path))]
    stems = [Path(job.file).stem for job in jobs if job.file]
    patterns = {name: name.removesuffix(".safetensors").removesuffix(".json") for name in skip}
    for name, pattern in patterns.items():
        if not any(fnmatchcase(stem, pattern) for stem in stems):
            raise UserError(f"skip: no case or unit file is named {name!r}{nearest(name, stems)}")
    jobs = [
        replace(job, left_out="left out by --skip")
        if job.file and any(fnmatchcase(Path(job.file).stem, pattern) for pattern in patterns.values())
        else job
        for job in jobs
    ]
    if all(job.left_out for job in jobs):
        why = ", ".join(sorted({job.left_out for job in jobs}))
        raise UserError(f"found nothing to check ({why}), allowed is one file or more")

    def rows() -> Iterator[Row]:
        for job in jobs:
            if job.left_out:
                yield Row(job.file, "*", None, None, "skipped", job.left_out)
            else:
                yield from job.rows()

    return rows()


def _cells(row: Row) -> tuple[str, ...]:
    verdict = f"{row.verdict} ({row.reason})" if row.reason else row.verdict
    return row.file, row.name, "-" if row.error is None else f"{row.error:.2e}", row.sets or "-", verdict


def _counts(rows: list[Row]) -> dict[str, int]:
    verdicts = {"passed": "pass", "failed": "FAIL", "skipped": "skipped"}
    return {word: sum(row.verdict == verdict for row in rows) for word, verdict in verdicts.items()}


def _total(rows: list[Row]) -> str:
    return ", ".join(f"{number} {word}" for word, number in _counts(rows).items())


def _print(rows: Iterable[Row], every: bool) -> list[Row]:
    """Prints each file's total once its rows are all there, behind ``every`` row or those to look at; hands all of them back."""
    done = []
    style = {"pass": None, "FAIL": "bold red", "skipped": "dim"}
    for file, group in groupby(rows, key=lambda row: row.file):
        of_file = list(group)
        # What stands for a whole file says what was not compared in it.
        shown = [row for row in of_file if every or row.verdict != "pass" or row.name == "*"]
        if sys.stdout.isatty() and shown:
            # The file's name stands above its rows: beside them it would leave no room for the tensor's.
            cells = [(_cells(row)[1:], style[row.verdict]) for row in shown]
            print_table(("tensor", "error", "agreement", "verdict"), cells, title=file)
        else:
            for row in shown:
                print("  ".join(_cells(row)))
        print(f"{file}: {_total(of_file)}", flush=True)
        done += of_file
    return done


def _write_json(file: Path, rows: list[Row], counts: dict[str, int]) -> None:
    # JSON has no NaN.
    plain = [{**asdict(r), "error": r.error if r.error is None or np.isfinite(r.error) else str(r.error)} for r in rows]
    try:
        write_text(file, json.dumps({"rows": plain, **counts}, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"json: cannot write {str(file)!r} ({cause(error)})") from None


def run(paths: list[Path], json_file: Path | None, skip: list[str], every: bool = False) -> int:
    """Checks the folders and prints totals, failed and skipped rows, or ``every`` row; 1 when any fails, else 0.

    `UserError` for input that cannot be read, and where nothing was compared.
    """
    check_outputs({"json": json_file})
    rows = _print(check(paths, skip), every)
    counts = _counts(rows)
    if not counts["passed"] + counts["failed"]:
        raise UserError("found no tensor to compare, allowed is one or more in the files that are not left out")
    if json_file is not None:
        _write_json(Path(json_file), rows, counts)
    print(_total(rows))
    return 1 if counts["failed"] else 0
