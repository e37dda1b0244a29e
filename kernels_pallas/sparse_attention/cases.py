"""Shapes that tests and benchmarks of `sparse_attention` share, and what they cost."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from dsv41.quant import MAIN_KV, WINDOW_KV


@dataclass(frozen=True)
class Case:
    """N queries of H heads and width K, each with up to ``topk`` of ``slots`` entries and ``window`` of ``rows`` rows."""

    queries: int
    heads: int = 64
    width: int = 512
    topk: int = 512
    window: int = 128
    slots: int = 65536
    rows: int = 16384
    dtype: str = "bfloat16"
    sink: bool = True
    empty: float = 0.0  # share of ids that are -1


REAL = {
    "decode, 1 request": Case(1),
    "decode, 32 requests": Case(32),
    "decode, 128 requests": Case(128),
    "verify, 32 requests of 6 rows": Case(192),
    "prefill, 4096 tokens": Case(4096, rows=4096 + 127),
}
SMALL = {
    "one wide head": Case(2, heads=1, width=512, topk=64, window=16, slots=200, rows=40),
    "toy": Case(5, heads=4, width=64, topk=32, window=32, slots=77, rows=50, dtype="float32"),
    "ragged lists": Case(3, heads=8, width=128, topk=70, window=33, slots=300, rows=90, empty=0.3),
    "nothing selected": Case(2, heads=4, width=128, topk=64, window=64, slots=64, rows=64, empty=1.0),
    "no sink": Case(2, heads=4, width=128, topk=64, window=64, slots=200, rows=90, sink=False, empty=0.1),
    "two blocks of heads": Case(2, heads=72, width=128, topk=64, window=64, slots=200, rows=90),
    "window only": Case(3, heads=4, width=64, topk=0, window=32, slots=1, rows=60),
    "entries only": Case(3, heads=4, width=64, topk=64, window=0, slots=90, rows=1),
}
CASES = {**SMALL, **REAL}


def abstract(case: Case) -> tuple:
    """Shapes and dtypes of the op's arguments."""
    shape = jax.ShapeDtypeStruct
    return (
        shape((case.queries, case.heads, case.width), jnp.dtype(case.dtype)),
        shape((case.slots, MAIN_KV.row_bytes(case.width)), jnp.uint8),
        shape((case.queries, case.topk), jnp.int32),
        shape((case.rows, WINDOW_KV.row_bytes(case.width)), jnp.uint8),
        shape((case.queries, case.window), jnp.int32),
        shape((case.heads,), jnp.float32) if case.sink else None,
    )


def arguments(case: Case, seed: int = 0, poison: bool = False) -> tuple:
    """Random arguments: every id of a query is another row. poison: NaN scales in every row that no id names."""
    keys = jax.random.split(jax.random.key(seed), 8)

    def rows(key: jax.Array, count: int, fmt: object) -> jax.Array:
        body, scale = (MAIN_KV, 8) if fmt is MAIN_KV else (WINDOW_KV, 0)
        split = body.row_bytes(case.width) - case.width // body.group
        elements = jax.random.randint(key, (count, split), 0, 256, jnp.int32).astype(jnp.uint8)
        if body is WINDOW_KV:
            elements = jnp.where((elements & 0x7F) == 0x7F, elements - 1, elements)  # E4M3 has NaN there
            scales = jax.random.randint(keys[6], (count, case.width // body.group), 117, 120, jnp.int32)
        else:
            scales = jax.random.randint(keys[7], (count, case.width // body.group), 36 + scale, 60, jnp.int32)
        return jnp.concatenate([elements, scales.astype(jnp.uint8)], axis=-1)

    def ids(key: jax.Array, count: int, of: int) -> jax.Array:
        a, b = jax.random.split(key)
        start = jax.random.randint(a, (case.queries, 1), 0, of, jnp.int32)
        # A stride without a common factor with the number of rows visits each once: no permutation of a long list.
        step = next(s for s in (7919, 104729, 1) if of % s)
        picked = (start + step * jnp.arange(count, dtype=jnp.int32)[None]) % of
        return jnp.where(jax.random.uniform(b, picked.shape) < case.empty, -1, picked)

    entries, window = rows(keys[0], case.slots, MAIN_KV), rows(keys[1], case.rows, WINDOW_KV)
    entry_ids, window_ids = ids(keys[2], case.topk, case.slots), ids(keys[3], case.window, case.rows)
    if poison:
        entries, window = (_poisoned(a, i) for a, i in ((entries, entry_ids), (window, window_ids)))
    q = jax.random.normal(keys[4], (case.queries, case.heads, case.width), jnp.float32)
    sink = jax.random.normal(keys[5], (case.heads,), jnp.float32) if case.sink else None
    return q.astype(case.dtype), entries, entry_ids, window, window_ids, sink


def _poisoned(rows: jax.Array, ids: jax.Array) -> jax.Array:
    named = jnp.zeros((rows.shape[0] + 1,), bool).at[jnp.where(ids < 0, rows.shape[0], ids).reshape(-1)].set(True)[:-1]
    return jnp.where(named[:, None], rows, jnp.uint8(0xFF))


def cost(case: Case) -> tuple[int, int]:
    """Bytes that must move (each row that a query names, q, output, ids) and FLOPs of both products."""
    row = case.topk * MAIN_KV.row_bytes(case.width) + case.window * WINDOW_KV.row_bytes(case.width)
    io = 2 * case.heads * case.width * jnp.dtype(case.dtype).itemsize + 4 * (case.topk + case.window)
    unique = min(case.queries * row, (case.slots * MAIN_KV.row_bytes(case.width) + case.rows * WINDOW_KV.row_bytes(case.width)))
    flops = case.queries * 2 * case.heads * (case.topk + case.window) * 2 * case.width
    return unique + case.queries * io, flops


def small(case: Case) -> Case:
    """The same ratios with few queries, for implementations that are slow here."""
    return replace(case, queries=min(case.queries, 2))


def options(case: Case) -> dict:
    """Static options of the op."""
    return {}


def peers(case: Case) -> dict:
    """Other forms to time beside the kernel, of the op's signature."""
    from kernels_pallas.sparse_attention.reference import run

    # In one program XLA fuses the gather into both products and does it twice.
    return {
        "XLA, bf16": jax.jit(partial(run, dtype=jnp.bfloat16)),
        "XLA, bf16, rows once": jax.jit(partial(run, dtype=jnp.bfloat16, barrier=True)),
    }
