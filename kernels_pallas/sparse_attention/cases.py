"""Shapes that tests and benchmarks of `sparse_attention` share, and what they cost."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from dsv41.quant import MAIN_KV, WINDOW_KV, Format


@dataclass(frozen=True)
class Case:
    """N queries of H heads and width K, each with up to ``topk`` of ``slots`` entries and ``window`` of ``rows`` rows.

    packed: rows as the cache stores them, else bfloat16. backward: the gradients too, which float rows have.
    """

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
    packed: bool = True
    backward: bool = False


REAL = {
    "decode, 1 request": Case(1),
    "decode, 32 requests": Case(32),
    "decode, 128 requests": Case(128),
    "verify, 32 requests of 6 rows": Case(192),
    "prefill, 4096 tokens": Case(4096, rows=4096 + 127),
    "training, 4096 tokens": Case(4096, slots=2048, rows=4096, packed=False),
    "training and back, 4096 tokens": Case(4096, slots=2048, rows=4096, packed=False, backward=True),
    "training and back, 64K entries": Case(4096, slots=65536, rows=4096, packed=False, backward=True),
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
FLOATS = {
    "wide rows": Case(1, heads=8, width=512, topk=64, window=16, slots=200, rows=40, packed=False),
    "float32 queries, entries alone": Case(
        3, heads=4, width=64, topk=32, window=0, slots=77, rows=1, dtype="float32", packed=False
    ),
    "ragged lists": Case(3, heads=8, width=128, topk=70, window=33, slots=90, rows=70, empty=0.3, packed=False),
    "two blocks of heads, no sink": Case(1, heads=72, width=128, topk=64, window=64, slots=99, rows=90, sink=False, packed=False),
    "window alone": Case(3, heads=4, width=64, topk=0, window=32, slots=1, rows=60, packed=False),
}
CASES = {**SMALL, **REAL}


def abstract(case: Case) -> tuple:
    """Shapes and dtypes of the op's arguments."""
    shape = jax.ShapeDtypeStruct

    def rows(count: int, fmt: Format) -> jax.ShapeDtypeStruct:
        return shape((count, fmt.row_bytes(case.width)), jnp.uint8) if case.packed else shape((count, case.width), jnp.bfloat16)

    return (
        shape((case.queries, case.heads, case.width), jnp.dtype(case.dtype)),
        rows(case.slots, MAIN_KV),
        shape((case.queries, case.topk), jnp.int32),
        rows(case.rows, WINDOW_KV),
        shape((case.queries, case.window), jnp.int32),
        shape((case.heads,), jnp.float32) if case.sink else None,
    )


def arguments(case: Case, seed: int = 0, poison: bool = False) -> tuple:
    """Random arguments: every id of a query is another row. poison: NaN in every row that no id names."""
    keys = jax.random.split(jax.random.key(seed), 8)

    def rows(key: jax.Array, count: int, fmt: Format) -> jax.Array:
        if not case.packed:
            return jax.random.normal(key, (count, case.width), jnp.bfloat16)
        groups = case.width // fmt.group
        a, b = jax.random.split(key)
        elements = jax.random.randint(a, (count, fmt.row_bytes(case.width) - groups), 0, 256, jnp.int32).astype(jnp.uint8)
        if fmt.element == "e4m3":
            elements = jnp.where((elements & 0x7F) == 0x7F, elements - 1, elements)  # NaN is there
        least, most = (44, 60) if fmt.scale == "e4m3" else (117, 120)  # values of order 1
        scales = jax.random.randint(b, (count, groups), least, most, jnp.int32)
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
    return jnp.where(named[:, None], rows, jnp.uint8(0xFF) if rows.dtype == jnp.uint8 else jnp.asarray(jnp.nan, rows.dtype))


def cost(case: Case) -> tuple[int, int]:
    """Bytes that must move (each row that a query names, q, output, ids) and FLOPs of both products.

    With the gradients: q, rows, output and its cotangent once more, their gradients, and five products more.
    """
    entry, near = (MAIN_KV.row_bytes(case.width), WINDOW_KV.row_bytes(case.width)) if case.packed else (2 * case.width,) * 2
    named = min(case.queries * (case.topk * entry + case.window * near), case.slots * entry + case.rows * near)
    head = case.queries * case.heads * case.width * jnp.dtype(case.dtype).itemsize
    ids = 4 * case.queries * (case.topk + case.window)
    flops = case.queries * 2 * case.heads * (case.topk + case.window) * 2 * case.width
    if case.backward:
        return 3 * named + 6 * head + 2 * ids, flops * 7 // 2
    return named + 2 * head + ids, flops


def timed(case: Case, run: Callable) -> Callable:
    """What is timed of an implementation's ``run``: itself, or with it the gradients at its own queries as cotangent."""
    if not case.backward:
        return run

    def back(q: jax.Array, entries: jax.Array, entry_ids: jax.Array, window: jax.Array, *rest: jax.Array) -> tuple:
        window_ids, sink = rest
        call = lambda q, entries, window, sink: run(q, entries, entry_ids, window, window_ids, sink)[0]  # noqa: E731
        out, pull = jax.vjp(call, q, entries, window, sink)
        return out, *pull(q)

    return back


def options(case: Case) -> dict:
    """Static options of the op."""
    return {}


def peers(case: Case) -> dict:
    """Other forms to time beside the kernel, of the op's signature."""
    from kernels_pallas.sparse_attention.reference import run

    # In one program XLA fuses the gather into both products and does it twice.
    return {
        "XLA, bf16": timed(case, partial(run, dtype=jnp.bfloat16)),
        "XLA, bf16, rows once": timed(case, partial(run, dtype=jnp.bfloat16, barrier=True)),
    }
