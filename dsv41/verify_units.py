"""The unit files of `dsv41.verify`: codecs, weight formats, hash, mHC, rotation, candidate pool, router, token map."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dsv41.config import RopeScaling, preset, replace
from dsv41.errors import UserError
from dsv41.files import read_json
from dsv41.hashing import hash_rows, lookback, table_hashes
from dsv41.indexer import candidate_blocks, candidate_mask
from dsv41.mhc import coefficients, collapse, expand
from dsv41.moe import route
from dsv41.params import ExpertParams, HyperConnection, MoEParams
from dsv41.quant import (
    ACTIVATION,
    ENGRAM_ROW,
    EXPERT_WEIGHT,
    INDEX_KEY,
    MAIN_KV,
    WINDOW_KV,
    dequantize,
    dequantize_tiles,
    fake_quant,
    pack_nibbles,
    quantize,
    quantized_linear,
    scale_values,
    unpack,
    unpack_nibbles,
)
from dsv41.rope import frequencies, rotate_heads
from dsv41.tokenmap import fold_tokens
from dsv41.verify import FP32_TOLERANCE, Row, Tensors, compare_floats, compare_ids, read_tensors

ROPE_TOLERANCE = 1e-6
_Check = Callable[[str, Tensors], Iterator[Row]]


def _groups(tensors: Tensors) -> dict[str, Tensors]:
    """``{"a.x": ...}`` -> ``{"a": {"x": ...}}``, in order of first appearance."""
    groups: dict[str, Tensors] = {}
    for name, value in tensors.items():
        head, _, rest = name.partition(".")
        groups.setdefault(head, {})[rest] = value
    return groups


def _exact(file: str, name: str, got: Any, want: np.ndarray) -> Row:
    """Equal element for element."""
    got = np.asarray(got)
    if want.dtype.kind == "f":
        return compare_floats(file, name, got, want, 0.0)
    return compare_ids(file, name, got, want)


def _unsigned_zero(codes: np.ndarray, sign: int) -> np.ndarray:
    """The sign of a zero code is not significant."""
    return np.where(codes == sign, np.uint8(0), codes)


def _quant_codecs(file: str, t: Tensors) -> Iterator[Row]:
    for key, fmt in (("kv_fp4", MAIN_KV), ("index_fp4", INDEX_KEY), ("swa_fp8", WINDOW_KV)):
        codes, scales = quantize(jnp.asarray(t[f"{key}.input"]), fmt)
        got = np.asarray(codes)
        if fmt.element == "e2m1":
            want = t[f"{key}.codes"]
            yield _exact(file, f"{key}.codes", _unsigned_zero(got, 8), _unsigned_zero(want, 8))
            packed = np.asarray(unpack_nibbles(pack_nibbles(codes))), np.asarray(unpack_nibbles(jnp.asarray(t[f"{key}.packed"])))
            yield _exact(file, f"{key}.packed", *(_unsigned_zero(p, 8) for p in packed))
        else:
            yield _exact(file, f"{key}.bytes", _unsigned_zero(got, 128), _unsigned_zero(t[f"{key}.bytes"], 128))
        yield _exact(file, f"{key}.scale_bytes", scales, t[f"{key}.scale_bytes"])
        yield _exact(file, f"{key}.scale", scale_values(scales, fmt), t[f"{key}.scale"])
        yield _exact(file, f"{key}.dequant", dequantize(codes, scales, fmt), t[f"{key}.dequant"])


def _weight_formats(file: str, t: Tensors) -> Iterator[Row]:
    a = {name: jnp.asarray(value) for name, value in t.items()}
    for key in ("fp8", "fp8_ragged"):
        got = dequantize_tiles(a[f"{key}.weight_bytes"], a[f"{key}.scale_bytes"])
        yield _exact(file, f"{key}.dequant", got, t[f"{key}.dequant"])
    fp4 = unpack(a["fp4.packed"], a["fp4.scale_bytes"], EXPERT_WEIGHT)
    yield _exact(file, "fp4.dequant", fp4, t["fp4.dequant"])
    rows = unpack(a["engram.weight_bytes"], a["engram.scale_bytes"], ENGRAM_ROW)
    yield _exact(file, "engram.dequant", rows, t["engram.dequant"])
    yield _exact(file, "linear.x_fp8_dequant", fake_quant(a["linear.x"], ACTIVATION), t["linear.x_fp8_dequant"])
    for key in ("fp8", "fp4"):
        got = np.asarray(quantized_linear(a["linear.x"], a[f"{key}.dequant"]))
        yield compare_floats(file, f"linear.{key}_out", got, t[f"linear.{key}_out"], FP32_TOLERANCE)


def _engram_hash(file: str, t: Tensors) -> Iterator[Row]:
    for key, g in _groups(t).items():
        n, heads, vocab, compressed, pad = (int(v) for v in g["config"])
        tables = table_hashes(tuple(int(i) for i in g["layer_ids"]), n, heads, vocab, compressed)
        for name in ("primes", "offsets", "multipliers"):
            got = np.array([getattr(table, name) for table in tables], np.int64)
            yield _exact(file, f"{key}.{name}", got, g[name])
        yield _exact(file, f"{key}.rows_needed", np.array([table.rows for table in tables]), g["rows_needed"])
        fold = g["token_map"]
        if fold.size:
            pad = int(fold[pad])
        for name in (k.removesuffix(".ids") for k in g if k.endswith(".ids")):
            ids = g[f"{name}.ids"]
            dead = ~g[f"{name}.token_mask"] if f"{name}.token_mask" in g else np.zeros(ids.shape, bool)
            ids = (fold[ids] if fold.size else ids).astype(np.int32)
            positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
            rows = lookback(jnp.asarray(ids), jnp.asarray(positions), jnp.asarray(dead), n, pad)
            got = np.stack([np.asarray(hash_rows(rows, table)) for table in tables], axis=2)
            yield _exact(file, f"{key}.{name}.hash_ids", got, g[f"{name}.hash_ids"])


def _mhc(file: str, t: Tensors) -> Iterator[Row]:
    for key, g in _groups(t).items():
        a = {name: jnp.asarray(value) for name, value in g.items() if name != "iters"}
        hc = HyperConnection(fn=a["fn"], base=a["base"], scale=a["scale"])
        pre, post, comb = coefficients(a["streams"], hc, int(g["iters"]), float(g["eps"]), 1e-20)
        got = {
            "pre": pre,
            "post": post,
            "comb": comb,
            "collapsed": collapse(a["carried_pre"], a["streams"]),
            "expanded": expand(a["sublayer_out"], a["streams"], post, comb),
        }
        for name, value in got.items():
            yield compare_floats(file, f"{key}.{name}", np.asarray(value), g[name], FP32_TOLERANCE)


def _rope(file: str, t: Tensors) -> Iterator[Row]:
    for key, g in _groups(t).items():
        width, original, theta, factor, fast, slow = (float(v) for v in g["params"])
        scaling = RopeScaling("yarn", factor, fast, slow, int(original)) if original else None
        table = frequencies(int(width), theta, scaling)
        phase = jnp.arange(g["cos"].shape[0], dtype=jnp.float32)[:, None] * jnp.asarray(table)[None]
        x = jnp.asarray(g["x"])
        positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape[:2])
        rotated = rotate_heads(x, positions, table)
        got = {
            "cos": jnp.cos(phase),
            "sin": jnp.sin(phase),
            "rotated": rotated,
            "back": rotate_heads(rotated, positions, table, inverse=True),
        }
        for name, value in got.items():
            yield compare_floats(file, f"{key}.{name}", np.asarray(value), g[name], ROPE_TOLERANCE)


def _candidates(file: str, t: Tensors) -> Iterator[Row]:
    for key, g in _groups(t).items():
        scores = jnp.asarray(g["logits"])
        count = jnp.broadcast_to(jnp.asarray(g["visible"].astype(np.int32))[None], scores.shape[:2])
        block = int(g["block_size"])
        blocks = candidate_blocks(scores, jnp.zeros_like(count), count, block, int(g["topk_blocks"]))
        got = candidate_mask(blocks, block, scores.shape[-1])
        seen = np.arange(scores.shape[2])[None, None] < np.asarray(count)[..., None]
        yield compare_ids(file, f"{key}.mask", np.asarray(got) & seen, g["mask"] & seen)


def _router(file: str, t: Tensors) -> Iterator[Row]:
    for key, g in _groups(t).items():
        config = replace(
            preset("toy"),
            n_routed_experts=g["weight"].shape[0],
            num_experts_per_tok=g["ids"].shape[1],
            routed_scaling_factor=float(g["route_scale"]),
        )
        none = ExpertParams(None, None, None)
        bias, bias_vl, gate = (jnp.asarray(g[name]) for name in ("bias", "bias_vl", "weight"))
        params = MoEParams(gate, bias, bias_vl, None, none, none)
        image = jnp.asarray(g["image_mask"])
        unused = jnp.zeros(image.shape, jnp.int32)
        for suffix, mask in (("", jnp.zeros_like(image)), ("_vl", image)):
            routing = route(jnp.asarray(g["x"]), params, config, mask, unused)
            yield compare_ids(file, f"{key}.ids{suffix}", np.asarray(routing.ids), g[f"ids{suffix}"])
            weights = np.asarray(routing.weights)
            yield compare_floats(file, f"{key}.weights{suffix}", weights, g[f"weights{suffix}"], FP32_TOLERANCE)


def _token_map(file: Path) -> Iterator[Row]:
    data = read_json(file)
    got = np.asarray(fold_tokens(data["decoded"], data["byte_level_tokens"])[0])
    yield compare_ids(file.name, "compressed_ids", got, np.asarray(data["compressed_ids"]))
    size = np.asarray(int(got.max()) + 1)
    yield compare_ids(file.name, "compressed_vocab_size", size, np.asarray(data["compressed_vocab_size"]))


_CHECKS: dict[str, _Check] = {
    "quant_codecs.safetensors": _quant_codecs,
    "weight_formats.safetensors": _weight_formats,
    "engram_hash.safetensors": _engram_hash,
    "mhc.safetensors": _mhc,
    "rope.safetensors": _rope,
    "candidates.safetensors": _candidates,
    "router.safetensors": _router,
}
_TOKEN_MAP = "token_map_builder.json"
UNITS = (*_CHECKS, _TOKEN_MAP)


def unit_rows(file: Path) -> Iterator[Row]:
    """The rows of one unit file; `UserError` when it cannot be read or lacks a tensor."""
    try:
        if file.name == _TOKEN_MAP:
            yield from _token_map(file)
        else:
            yield from _CHECKS[file.name](file.name, read_tensors(file))
    except KeyError as error:
        raise UserError(f"{file}: holds no {error}") from None
    except (ValueError, TypeError, IndexError) as error:
        raise UserError(f"{file}: its tensors do not fit together: {str(error).splitlines()[0][:200]}") from None
