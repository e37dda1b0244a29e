"""Exact top-k of rows of scores on Hopper: each CTA picks the k best of a slice, further kernels those of what is left."""

from dataclasses import dataclass
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


def top_k(scores: jax.Array, limits: jax.Array, k: int, slicing: Slicing = Slicing(), interpret: Any = None) -> jax.Array:
    """Ids ``[R, k]`` of each row's ``k`` best scores, ascending, -1 behind them; ties take the lowest.

    scores float32 ``[R, n]``, n a multiple of 4; limits int32 ``[R]``: only a row's first so many count. -inf is never chosen.
    """
    ids, rows = None, scores.shape[0]
    reach = lambda limit, size=scores.shape[1]: jnp.clip(limit, 0, size)  # noqa: E731
    while True:
        size = scores.shape[1]
        each = min(slicing.each, 4 * -(-size // (4 * slicing.threads)))
        slices = -(-size // (slicing.threads * each))
        ids, scores = _level(scores, ids, limits, reach, k, slices, Slicing(slicing.threads, each), interpret)
        if slices == 1:
            return ids.reshape(rows, k)
        length = slicing.threads * each
        if length <= k:
            raise ValueError(f"k: found {k}, allowed are fewer than the {length} scores of a slice")
        reach = lambda limit, inner=reach, length=length: lax.div(inner(limit) + (length - 1), length) * k  # noqa: E731
        ids, scores = ids.reshape(rows, slices * k), scores.reshape(rows, slices * k)


def _level(
    scores: jax.Array, ids: Any, limits: jax.Array, reach: Any, k: int, slices: int, slicing: Slicing, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """The best of each slice, ids and scores ``[R * slices, k]``; a slice that begins past the limit is left as it is."""
    rows, size = scores.shape
    length = slicing.threads * slicing.each
    only = slices == 1
    out_type = (
        jax.ShapeDtypeStruct((rows * slices, k), jnp.int32),
        jax.ShapeDtypeStruct((rows * slices, 1 if only else k), jnp.float32),
    )

    def body(*refs):
        scores_ref, *ids_ref, limits_ref, out_ids, out_scores, scratch = refs
        cta = lax.axis_index("cta")
        row, number = lax.div(cta, slices), lax.rem(cta, slices)
        first = number * length
        count = jnp.minimum(reach(limits_ref[row]) - first, length)
        pick = _interpreted if interpret is not None else _native

        @pl.when((count > 0) | only)
        def _():
            pick(
                scores_ref,
                ids_ref[0] if ids_ref else None,
                out_ids,
                None if only else out_scores,
                scratch,
                row,
                first,
                count,
                cta,
            )

    def _native(scores_ref, ids_ref, out_ids, out_scores, scratch, row, first, count, cta):
        carried = ids_ref is not None
        refs = [scores_ref, out_ids, scratch, *([ids_ref] if carried else []), *([] if out_scores is None else [out_scores])]

        @inline(refs, [row * size + first, first, count, cta])
        def _(refs, numbers):
            begin, first, count, cta = numbers
            scores_ref, out_ids, scratch, *rest = refs
            source = rest.pop(0) if carried else None
            args = [global_address(scores_ref, begin), count, shared_address(scratch), thread_number()]
            args.append(global_address(out_ids, cta, k))
            args.append(global_address(source, begin) if carried else first)
            args += [global_address(ref, cta, k) for ref in rest]
            return program.program(slicing.threads, slicing.each, k, carried, bool(rest)), args

    def _interpreted(scores_ref, ids_ref, out_ids, out_scores, scratch, row, first, count, cta):
        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            places = first + jnp.arange(length, dtype=jnp.int32)
            inside = jnp.minimum(places, size - 1)
            values = jnp.where(places < first + count, scores_ref[row][inside], -jnp.inf)
            best, at = lax.top_k(values, min(k, length))
            at = jnp.sort(jnp.where(best > -jnp.inf, at, length))
            at = jnp.pad(at, (0, max(0, k - length)), constant_values=length)
            some, at = at < length, jnp.minimum(at, length - 1)
            names = places if ids_ref is None else ids_ref[row][inside]
            out_ids[cta] = jnp.where(some, names[at], -1)
            if out_scores is not None:
                out_scores[cta] = jnp.where(some, values[at], -jnp.inf)

    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=(plgpu.SMEM((program.SCRATCH_BYTES // 4,), jnp.int32),),
        grid=(rows * slices,),
        grid_names=("cta",),
        num_threads=slicing.threads // 128,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(scores, *([] if ids is None else [ids]), limits)
