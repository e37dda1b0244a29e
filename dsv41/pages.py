"""Rows that grow with the context, in pages behind block tables: requests share one pool, any may grow (serving §1.5).

A page stands for the same number of tokens in every source, ``n r``: n entries of ratio r. So one table serves all sources.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int


@struct.dataclass
class Pages:
    """The rows of a batch of requests, in the place of an array ``[B, S, row]``.

    pool ``[P, n, row]``; table int32 ``[B, m]``: the page of each n rows of a request, 0 where there is none. Page 0 is
    nobody's: it may be read, where nothing in it is visible, and is never written.
    """

    pool: jax.Array
    table: jax.Array

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the array in whose place this stands."""
        return self.table.shape[0], self.table.shape[1] * self.pool.shape[1], self.pool.shape[2]

    @property
    def dtype(self) -> Any:
        """Of the rows."""
        return self.pool.dtype

    def flat(self) -> Array:
        """All rows ``[P n, row]``."""
        return self.pool.reshape(-1, self.pool.shape[-1])

    def places(self, ids: Int[Array, "B *t"]) -> Int[Array, "B *t"]:
        """Where in `flat` a request's rows are: -1 for -1, the end for those past the request's last page."""
        size = self.shape[1]
        inside = jnp.clip(ids, 0, size - 1)
        per_page = self.pool.shape[1]
        page = jnp.take_along_axis(self.table, (inside // per_page).reshape(ids.shape[0], -1), axis=1).reshape(ids.shape)
        absent = (ids >= size) | (page == 0)
        return jnp.where(ids < 0, -1, jnp.where(absent, self.pool.shape[0] * per_page, page * per_page + inside % per_page))

    def take(self, ids: Int[Array, "B *t"]) -> Array:
        """``[B, *t, row]``; anything where there is none."""
        rows = self.flat()
        return rows[jnp.clip(self.places(ids), 0, rows.shape[0] - 1)]


Rows = jax.Array | Pages


def dense(rows: Rows) -> Array:
    """``[B, S, row]``; rows of absent pages may be anything."""
    return rows.pool[rows.table].reshape(rows.shape) if isinstance(rows, Pages) else rows
