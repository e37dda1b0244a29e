"""What the kernels of `sparse_attention` cannot take, whatever their device."""

from typing import Any

import jax.numpy as jnp

from dsv41.quant import MAIN_KV, WINDOW_KV


def refusal(q: Any, entries: Any, entry_ids: Any, window: Any, window_ids: Any, floats: bool = False) -> str | None:
    """Why these shapes or dtypes cannot run. floats: whether bfloat16 rows can, beside packed ones."""
    width = q.shape[-1]
    for name, rows, fmt in (("entries", entries, MAIN_KV), ("window", window, WINDOW_KV)):
        if rows.dtype != jnp.uint8 and not (floats and rows.dtype == jnp.bfloat16):
            return f"{name} are {rows.dtype}, allowed {'are bfloat16 and' if floats else 'is'} the packed form"
        unit, size = ("bytes", fmt.row_bytes(width)) if rows.dtype == jnp.uint8 else ("channels", width)
        if rows.shape[-1] != size:
            return f"{name} have rows of {rows.shape[-1]} {unit}, allowed are {size}"
        if rows.shape[0] == 0:
            return f"{name} have no rows"
    if entries.dtype != window.dtype:
        return f"window are {window.dtype}, allowed is {entries.dtype} as entries are"
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"q is {q.dtype}, allowed are bfloat16 and float32"
    if q.shape[0] == 0:
        return "there are no queries"
    if entry_ids.shape[-1] + window_ids.shape[-1] == 0:
        return "a query has no keys"
    return None
