"""Shapes that tests and benchmarks of `quantize` share, and what they cost."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dsv41.quant import ACTIVATION, INDEX_KEY, MAIN_KV, WINDOW_KV

FORMATS = {"main": MAIN_KV, "index": INDEX_KEY, "window": WINDOW_KV, "activation": ACTIVATION}


@dataclass(frozen=True)
class Case:
    """``time`` rows of width K for each of ``batch`` requests.

    slots: those of a request's pool, which the rows are written to; 0 for rows by themselves. An activation's scales are an
    array of their own.
    """

    batch: int
    time: int
    format: str
    width: int = 512
    slots: int = 0
    dtype: str = "bfloat16"


REAL = {
    "window, decode, 1 request": Case(1, 1, "window", slots=128),
    "window, decode, 32 requests": Case(32, 1, "window", slots=128),
    "window, decode, 128 requests": Case(128, 1, "window", slots=128),
    "main KV, decode, 128 requests": Case(128, 1, "main", slots=8192),
    "index key, decode, 128 requests": Case(128, 1, "index", width=128, slots=8192),
    "window, prefill, 4096 tokens": Case(1, 4096, "window"),
    "main KV, prefill, 4096 tokens": Case(1, 4096, "main", slots=65536),
    "index key, prefill, 4096 tokens": Case(1, 4096, "index", width=128, slots=65536),
    "activation, 32 tokens": Case(32, 1, "activation", width=5120),
    "activation, 4096 tokens": Case(4096, 1, "activation", width=5120),
}
SMALL = {
    "main KV": Case(2, 5, "main", width=128, slots=9),
    "index key": Case(3, 3, "index", width=128, slots=4),
    "window": Case(2, 3, "window", width=128, slots=7),
    "window of float32": Case(2, 3, "window", width=128, slots=7, dtype="float32"),
    "rows of main KV": Case(3, 7, "main", width=64, dtype="float32"),
    "wide rows of main KV": Case(1, 2, "main"),
    "rows of index keys": Case(1, 9, "index", width=128),
    "activation": Case(9, 1, "activation", width=96),
    "activation of float32": Case(1, 5, "activation", width=64, dtype="float32"),
}
CASES = {**SMALL, **REAL}


def abstract(case: Case) -> tuple:
    """Shapes and dtypes of the op's arguments."""
    shape, fmt = jax.ShapeDtypeStruct, FORMATS[case.format]
    x = shape((case.batch, case.time, case.width), jnp.dtype(case.dtype))
    if not case.slots:
        return x, None, None
    pool = shape((case.batch, case.slots, fmt.row_bytes(case.width)), jnp.uint8)
    return x, pool, shape((case.batch, case.time), jnp.int32)


def arguments(case: Case, seed: int = 0) -> tuple:
    """Random values of many magnitudes; slots are different ones, the last row's outside the pool where there is another."""
    keys = jax.random.split(jax.random.key(seed), 4)
    x, pool, _ = abstract(case)
    values = jax.random.normal(keys[0], x.shape, jnp.float32)
    values = (values * jnp.exp2(jax.random.randint(keys[1], (*x.shape[:-1], 1), -12, 12).astype(jnp.float32))).astype(x.dtype)
    if pool is None:
        return values, None, None
    first = jax.random.randint(keys[2], (case.batch, 1), 0, case.slots, jnp.int32)
    at = (first + jnp.arange(case.time, dtype=jnp.int32)[None]) % case.slots
    at = at.at[:, -1].set(case.slots) if case.time > 1 else at
    return values, jax.random.bits(keys[3], pool.shape, jnp.uint8), at


def cost(case: Case) -> tuple[int, int]:
    """Bytes that must move (values, rows, slots); arithmetic is not what bounds it."""
    rows, fmt = case.batch * case.time, FORMATS[case.format]
    slot = 4 if case.slots else 0
    return rows * (case.width * jnp.dtype(case.dtype).itemsize + fmt.row_bytes(case.width) + slot), 0


def options(case: Case) -> dict:
    """Static options of the op."""
    return {"fmt": FORMATS[case.format], "apart": case.format == "activation"}


def replaced(case: Case) -> int | None:
    """The argument that a call gives back written to, and that is not copied first."""
    return 1 if case.slots else None


def peers(case: Case) -> dict[str, Any]:
    """Other forms to time beside the kernel, of the op's signature."""
    return {}
