"""Engram's hash: primes, offsets, multipliers, and 64-bit-exact row ids on the host and inside jit (architecture §11.2-11.4).

JAX without x64 truncates int64 silently, so the jitted form carries each 64-bit product as two uint32 limbs. Both forms
give the same ids; `tests/test_hashing.py` holds them to the golden vectors.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

ArrayLike = jax.Array | np.ndarray
MAX_COLUMNS = 256  # rows that a token may read of a table; the release reads 24
MAX_PRIME = 2**31 - 1  # the modular reduction below keeps 2·remainder in uint32


@dataclass(frozen=True)
class TableHash:
    """Constants of one Engram table: ``C = (max_ngram - 1) * heads`` columns, n-gram major, head minor.

    multipliers: one odd int64 a look-back, ``[max_ngram]``; primes: ``[C]``; offsets: exclusive prefix sums, ``[C]``.
    """

    multipliers: tuple[int, ...]
    primes: tuple[int, ...]
    offsets: tuple[int, ...]
    heads: int

    @property
    def rows(self) -> int:
        """Rows the table needs: the sum of the primes. Rows past it are never addressed."""
        return sum(self.primes)


def _is_prime(n: int) -> bool:
    if n < 4:
        return n > 1
    if n % 2 == 0:
        return False
    return all(n % d for d in range(3, int(n**0.5) + 1, 2))


@cache
def table_primes(tables: int, max_ngram: int, heads: int, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Primes of each table (§11.3): each (table, n-gram) search restarts above ``vocab_size - 1``, none is used twice."""
    used: set[int] = set()
    result = []
    for _ in range(tables):
        row = []
        for _ in range(max_ngram - 1):
            candidate = vocab_size - 1
            for _ in range(heads):
                candidate += 1
                while candidate in used or not _is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                row.append(candidate)
        result.append(tuple(row))
    return tuple(result)


def multipliers(layer: int, max_ngram: int, compressed_vocab_size: int) -> tuple[int, ...]:
    """Odd multipliers of a layer (§11.2): their product with any compressed id stays below 2**63."""
    bound = (2**63 - 1) // compressed_vocab_size // 2
    draws = np.random.default_rng(10007 * layer).integers(0, bound, size=max_ngram, dtype=np.int64)
    return tuple(int(d) * 2 + 1 for d in draws)


@cache
def table_hashes(
    layers: tuple[int, ...], max_ngram: int, heads: int, vocab_size: int, compressed_vocab_size: int
) -> tuple[TableHash, ...]:
    """The constants of every table, in the order of ``layers``."""
    result = []
    for layer, primes in zip(layers, table_primes(len(layers), max_ngram, heads, vocab_size), strict=True):
        offsets = tuple(int(o) for o in np.cumsum((0, *primes[:-1])))
        result.append(TableHash(multipliers(layer, max_ngram, compressed_vocab_size), primes, offsets, heads))
    return tuple(result)


def lookback(
    ids: Int[ArrayLike, "B T"], positions: Int[ArrayLike, "B T"], dead: Bool[ArrayLike, "B T"], n: int, pad: Any
) -> Int[ArrayLike, "n B T"]:
    """Compressed ids at look-backs 0..n-1, ``[n, B, T]``: a blocked one turns itself and everything older into ``pad``.

    ids: compressed ids; positions: within the document (a look-back past position 0 is blocked, so packed documents and
    left padding restart); dead: padding and image tokens. Works on NumPy and JAX arrays alike.
    """
    xp = np if isinstance(ids, np.ndarray) else jnp
    blocked = dead
    rows = [xp.where(blocked, pad, ids)]
    for k in range(1, n):
        # A roll wraps the row's end to its start; position < k blocks exactly those.
        blocked = blocked | (positions < k) | xp.roll(dead, k, axis=1)
        rows.append(xp.where(blocked, pad, xp.roll(ids, k, axis=1)))
    return xp.stack(rows)


def hash_rows_host(rows: Int[np.ndarray, "n B T"], table: TableHash) -> np.ndarray:
    """Row ids ``int64 [B, T, C]`` with NumPy's 64-bit integers: the plain form of §11.4."""
    state = rows[0].astype(np.int64) * table.multipliers[0]
    columns = []
    for k in range(1, len(table.multipliers)):
        state = state ^ (rows[k].astype(np.int64) * table.multipliers[k])
        for _ in range(table.heads):
            column = len(columns)
            columns.append(state % table.primes[column] + table.offsets[column])
    return np.stack(columns, axis=-1)


def _multiply(a: UInt32[Array, "*s"], m: int) -> tuple[jax.Array, jax.Array]:
    """``a * m`` mod 2**64 as (high, low) uint32 limbs; 16-bit halves so that no partial product overflows."""
    low_m, high_m = jnp.uint32(m & 0xFFFFFFFF), jnp.uint32(m >> 32)
    mask = jnp.uint32(0xFFFF)
    a0, a1 = a & mask, a >> 16
    b0, b1 = low_m & mask, low_m >> 16
    p00, p01, p10, p11 = a0 * b0, a0 * b1, a1 * b0, a1 * b1
    middle = (p00 >> 16) + (p01 & mask) + (p10 & mask)
    low = (p00 & mask) | (middle << 16)
    high = p11 + (p01 >> 16) + (p10 >> 16) + (middle >> 16)
    return high + a * high_m, low


def _modulo(high: UInt32[Array, "*s"], low: UInt32[Array, "*s"], prime: int) -> jax.Array:
    """``(high * 2**32 + low) % prime`` by long division in digits of as many bits as leave the remainder in uint32."""
    p = jnp.uint32(prime)
    step = 32 - prime.bit_length()
    remainder = high % p
    left = 32
    while left > 0:
        bits = min(step, left)
        left -= bits
        digit = (low >> left) & jnp.uint32((1 << bits) - 1)
        remainder = ((remainder << bits) | digit) % p
    return remainder


def hash_rows(rows: Int[ArrayLike, "n B T"], table: TableHash) -> Int[Array, "B T C"]:
    """Row ids ``int32 [B, T, C]`` inside jit, equal to `hash_rows_host` with x64 off."""
    unsigned = jnp.asarray(rows).astype(jnp.uint32)
    high, low = _multiply(unsigned[0], table.multipliers[0])
    columns = []
    for k in range(1, len(table.multipliers)):
        next_high, next_low = _multiply(unsigned[k], table.multipliers[k])
        high, low = high ^ next_high, low ^ next_low
        for _ in range(table.heads):
            column = len(columns)
            row = _modulo(high, low, table.primes[column]).astype(jnp.int32)
            columns.append(row + jnp.int32(table.offsets[column]))
    return jnp.stack(columns, axis=-1)
