"""Shapes that tests and benchmarks of `engram_gather` share, and what they cost."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv41.quant import ENGRAM_ROW


@dataclass(frozen=True)
class Case:
    """``columns`` rows of a table of ``rows`` by width W for each token; packed: as released, else floats of ``dtype``."""

    tokens: int
    columns: int = 24
    rows: int = 1 << 24
    width: int = 256
    packed: bool = True
    dtype: str = "bfloat16"


REAL = {
    "1 token": Case(1),
    "32 tokens": Case(32),
    "128 tokens": Case(128),
    "4096 tokens": Case(4096),
}
SMALL = {
    "one row": Case(1, columns=1, rows=1),
    "ragged": Case(7, columns=3, rows=50),
    "float32": Case(5, columns=6, rows=90, width=32, dtype="float32"),
    "wide": Case(3, columns=2, rows=9, width=1024),
    "floats": Case(5, columns=6, rows=90, width=32, packed=False, dtype="float32"),
}
CASES = {**SMALL, **REAL}


def abstract(case: Case) -> tuple:
    """Shapes and dtypes of the op's arguments."""
    shape = jax.ShapeDtypeStruct
    ids = shape((case.tokens, case.columns), jnp.int32)
    if not case.packed:
        return shape((case.rows, case.width), jnp.dtype(case.dtype)), None, ids
    codes = shape((case.rows, case.width), jnp.uint8)
    return codes, shape((case.rows, case.width // ENGRAM_ROW.group), jnp.uint8), ids


def arguments(case: Case, seed: int = 0) -> tuple:
    """Random rows without NaN, values of order 1; any row may be named more than once."""
    keys = jax.random.split(jax.random.key(seed), 3)
    table, scales, ids = abstract(case)
    at = jax.random.randint(keys[0], ids.shape, 0, case.rows, jnp.int32)
    if scales is None:
        return jax.random.normal(keys[1], table.shape, table.dtype), None, at
    # As words, and by one mask: what makes random bytes one by one would need many times the table's size.
    words = jax.random.bits(keys[1], (case.rows, case.width // 4), jnp.uint32) & jnp.uint32(0xBFBFBFBF)
    codes = lax.bitcast_convert_type(words, jnp.uint8).reshape(table.shape)
    return codes, 124 + (jax.random.bits(keys[2], scales.shape, jnp.uint8) & 7), at


def cost(case: Case) -> tuple[int, int]:
    """Bytes that must move: ids, each row that is named, values out. No sectors are counted that rows have to themselves."""
    count, row = case.tokens * case.columns, case.width * jnp.dtype(case.dtype).itemsize
    stored = ENGRAM_ROW.row_bytes(case.width) if case.packed else row
    return 4 * count + min(count, case.rows) * stored + count * row, 0


def options(case: Case) -> dict:
    """Static options of the op."""
    return {"dtype": jnp.dtype(case.dtype)}


def peers(case: Case) -> dict[str, Any]:
    """Other forms to time beside the kernel, of the op's signature."""
    return {}
