"""Exact top-k of rows of scores on Hopper: each CTA picks the k best of a slice, further kernels those of what is left."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.index_topk import program
from kernels_pallas.mosaic import global_address, inline, shared_address, thread_number


@dataclass(frozen=True)
class Slicing:
    """threads of a CTA, a multiple of 128; each: most scores that a thread takes."""

    threads: int = 512
    each: int = 16


def top_k(
    scores: jax.Array,
    limits: tuple[jax.Array, ...],
    k: int,
    slicing: Slicing = Slicing(),
    blocks: jax.Array | None = None,
    divisor: int = 1,
    interpret: Any = None,
) -> jax.Array:
    """Ids ``[R, k]`` of each row's ``k`` best scores, ascending, -1 behind them; ties take the lowest.

    scores float32 ``[R, n]``, n a multiple of 4. limits int32 ``[R]``: only a row's first so many count, the sum of all of them
    over ``divisor``, rounded up; none for all. -inf is never chosen. blocks int32 ``[R, n / 8]``: numbers of a row's blocks of 8,
    where its scores are theirs; ids count from the first of block 0.
    """
    rows, size = scores.shape
    names, kind = ([], "places") if blocks is None else ([blocks], "blocks")
    lengths: list[int] = []

    def reach(limits: list, before: tuple[int, ...]) -> Any:
        """How many of a row's scores count, after levels with slices of ``before``."""
        whole = sum(limits[1:], limits[0]) if limits else jnp.int32(size * divisor)
        count = jnp.clip(lax.div(whole + (divisor - 1), divisor), 0, size)
        for length in before:
            count = lax.div(count + (length - 1), length) * k
        return count

    while True:
        left = scores.shape[1]
        each = min(slicing.each, 4 if left <= 4 * slicing.threads else 8 * -(-left // (8 * slicing.threads)))
        length = slicing.threads * each
        slices = -(-left // length)
        level = _Level(k, slices, Slicing(slicing.threads, each), kind, partial(reach, before=tuple(lengths)))
        ids, scores = level.run(scores, names, limits, interpret)
        if slices == 1:
            return ids.reshape(rows, k)
        if length <= k:
            raise ValueError(f"k: found {k}, allowed are fewer than the {length} scores of a slice")
        lengths.append(length)
        names, kind, scores = [ids.reshape(rows, slices * k)], "ids", scores.reshape(rows, slices * k)


def top_k_of_blocks(scores: jax.Array, blocks: jax.Array, k: int, threads: int = 512, interpret: Any = None) -> jax.Array:
    """`top_k` of a row's entries in ``blocks`` int32 ``[R, n]``, ascending blocks of 8, -1 behind them: one CTA a row."""
    slicing = Slicing(threads, 8 * -(-blocks.shape[1] // threads))
    return _Level(k, 1, slicing, "fetched", lambda limits: 8 * blocks.shape[1]).run(scores, [blocks], (), interpret)[0]


@dataclass(frozen=True)
class _Level:
    """The best k of each slice of each row. kind: what the scores are called; reach: how many of a row's count, by its limits."""

    k: int
    slices: int
    slicing: Slicing
    kind: program.Names
    reach: Any

    def run(self, scores: jax.Array, names: list, limits: tuple, interpret: Any) -> tuple[jax.Array, jax.Array]:
        """Ids and scores ``[R * slices, k]``; a slice that begins past the limit is left as it is, unless it is the only one."""
        k, slices, rows = self.k, self.slices, scores.shape[0]
        length = self.slicing.threads * self.slicing.each
        only = slices == 1
        shape = jax.ShapeDtypeStruct
        best = shape((rows * slices, 1 if only else k), jnp.float32)

        def body(scores_ref: Any, *others: Any) -> None:
            *inputs, out_ids, out_scores, scratch = others
            names_ref, limit_refs = inputs[: len(names)], inputs[len(names) :]
            cta = lax.axis_index("cta")
            row, number = lax.div(cta, slices), lax.rem(cta, slices)
            first = number * length
            count = jnp.minimum(self.reach([ref[row] for ref in limit_refs]) - first, length)
            pick = self._native if interpret is None else self._interpreted

            @pl.when((count > 0) | only)
            def _() -> None:
                pick(scores_ref, names_ref, out_ids, [] if only else [out_scores], scratch, row, first, count, cta)

        return plgpu.kernel(
            body,
            out_type=(shape((rows * slices, k), jnp.int32), best),
            scratch_types=(plgpu.SMEM((program.scratch_bytes(k) // 4,), jnp.int32),),
            grid=(rows * slices,),
            grid_names=("cta",),
            num_threads=self.slicing.threads // 128,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
            interpret=interpret,
        )(scores, *names, *limits)

    def _native(self, scores, names, out_ids, out_scores, scratch, row, first, count, cta) -> None:
        size, per = scores.shape[1], 8 if self.kind == "blocks" else 1
        pitch = names[0].shape[1] if self.kind == "fetched" else size // per

        @inline([scores, out_ids, scratch, *names, *out_scores], [row, first, count, cta, lax.div(first, per)])
        def _(refs: Any, numbers: Any) -> tuple[str, list]:
            row, first, count, cta, named = numbers
            scores, out_ids, scratch, *rest = refs
            args = [global_address(scores, (row, size), (first, 1)), count, shared_address(scratch), thread_number()]
            args.append(global_address(out_ids, (cta, self.k)))
            args += [global_address(ref, (row, pitch), (named, 1)) for ref in rest[: len(names)]] or [first]
            args += [global_address(ref, (cta, self.k)) for ref in rest[len(names) :]]
            return program.program(self.slicing.threads, self.slicing.each, self.k, self.kind, bool(out_scores)), args

    def _interpreted(self, scores, names, out_ids, out_scores, scratch, row, first, count, cta) -> None:
        length, k = self.slicing.threads * self.slicing.each, self.k

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _() -> None:
            places = first + jnp.arange(length, dtype=jnp.int32)
            inside, called, there = jnp.minimum(places, scores.shape[1] - 1), places, places < first + count
            if self.kind == "fetched":
                block = names[0][row][jnp.minimum(places // 8, names[0].shape[1] - 1)]
                called = inside = jnp.where(block < 0, 0, block * 8 + places % 8)
                there &= block >= 0
            values = jnp.where(there, scores[row][inside], -jnp.inf)
            best, at = lax.top_k(values, min(k, length))
            at = jnp.sort(jnp.where(best > -jnp.inf, at, length))
            at = jnp.pad(at, (0, max(0, k - length)), constant_values=length)
            some, at = at < length, jnp.minimum(at, length - 1)
            if self.kind == "ids":
                called = names[0][row][inside]
            if self.kind == "blocks":
                called = names[0][row][inside // 8] * 8 + places % 8
            out_ids[cta] = jnp.where(some, called[at], -1)
            for ref in out_scores:
                ref[cta] = jnp.where(some, values[at], -jnp.inf)
