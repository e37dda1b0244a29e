"""Gradients of `sparse_attention` of float rows for Hopper: one CTA takes a query's 64 heads over a list of 64-key tiles.

Three warpgroups meet at barriers in shared memory. One copies rows, as in `forward`. Of the other two the first computes
scores and probabilities p, the second the probabilities' gradient and from it the scores' gradient s; then each takes half of
the channels:

    dq   += s k             in registers over all tiles of the query
    rows  = s^T q + p^T g   the tile's part of the gradient of the rows that it names, as key and as value

The parts go to device memory, one row for each key that a query names; `row_sums` adds them up.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.sparse_attention.forward import (
    ID_SLOTS,
    ROW,
    TO_LOG2,
    Jobs,
    accumulate,
    columns,
    copy_tiles,
    kernel_options,
    zeros,
)
from kernels_pallas.sparse_attention.gather import bias_of
from kernels_pallas.sparse_attention.producer import HEADS, TILED, publish
from kernels_pallas.sparse_attention.unpack import KEYS
from kernels_pallas.sparse_attention.write import write

SCRATCH = 14  # arrays and barriers in shared memory
_SCORES, _GRADIENT, _COPY = 0, 1, 2  # warpgroups
_REGISTERS = 40, 232  # a thread of the copy warpgroup and of each other, of 504 for the three


def backward(
    q: jax.Array,
    gradient: jax.Array,
    pools: tuple[jax.Array, jax.Array],
    ids: jax.Array,
    entry_tiles: int,
    whole: jax.Array,
    shift: jax.Array,
    *,
    scale: float,
    out_dtype: Any,
    ctas: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Gradient of q ``[J, 64, K]`` and the rows' parts ``[J, tiles * 64, K]`` bfloat16 of J jobs.

    q, pools, ids: as in `forward`. gradient ``[J, 64, K]`` bfloat16: the output's cotangent. whole ``[J, 64]`` float32: the
    log-sum-exp with the sink, finite. shift ``[J, 64]`` float32: what is added to a probability's gradient.
    """
    count, _, width = q.shape
    tiles, half, native = ids.shape[1], width // 2, interpret is None
    jobs = Jobs(count, count // ids.shape[0], tiles, min(ctas, count))
    cuts = columns(half)

    def body(q_ref, gradient_ref, entries_ref, window_ref, ids_ref, whole_ref, shift_ref, dq_ref, parts_ref, *scratch):
        q_smem, g_smem, k_smem, p_smem, s_smem, ids_smem = scratch[:6]
        q_full, q_empty, ids_full, k_full, k_empty, p_full, s_full, free = scratch[6:]
        warpgroup = lax.axis_index("warpgroup")
        turns = jobs.turns()

        @pl.when(warpgroup == _COPY)
        def _():
            plgpu.set_max_registers(_REGISTERS[0], action="decrease")

            def query(turn):
                pl.when(turn > 0)(lambda: plgpu.barrier_wait(q_empty))
                plgpu.copy_gmem_to_smem(q_ref.at[jobs.number(turn)], q_smem, q_full)
                plgpu.copy_gmem_to_smem(gradient_ref.at[jobs.number(turn)], g_smem, q_full)

            pools = entries_ref, window_ref, entry_tiles
            copy_tiles(jobs, pools, (ids_ref, ids_smem, ids_full), (k_smem, k_full, k_empty), query, native)
            plgpu.barrier_wait(q_empty)

        def products(side):
            """The loop of one of the other two."""
            plgpu.set_max_registers(_REGISTERS[1], action="increase")
            others_free = free.at[1 - side]

            def at(cut):
                return pl.ds(side * half + cut.start, cut.size)

            def item(turn, _):
                number = jobs.number(turn)
                plgpu.barrier_wait(q_full)
                vector = plgpu.load((shift_ref if side else whole_ref).at[number], layout=ROW, optimized=False)
                vector = vector if side else vector * TO_LOG2

                def tile(t, dqs):
                    step = turn * tiles + t
                    plgpu.barrier_wait(k_full.at[0])

                    def product(acc):
                        plgpu.wgmma(acc, g_smem if side else q_smem, k_smem.at[0].transpose((1, 0)))
                        return acc[...]

                    scores = pl.run_scoped(product, plgpu.ACC((HEADS, KEYS), jnp.float32))
                    bound = lax.broadcast_in_dim(vector, scores.shape, [0])

                    def publish_own(values):
                        # The other warpgroup's products of the tile before read what is written here.
                        pl.when(step > 0)(lambda: plgpu.barrier_wait(others_free))
                        own = s_smem if side else p_smem
                        own[...] = values.astype(own.dtype)
                        publish(native, together=False)
                        plgpu.barrier_arrive(s_full if side else p_full)

                    if side == _SCORES:
                        bias = bias_of(ids_smem.at[lax.rem(step, ID_SLOTS)])
                        scores = scores * (scale * TO_LOG2) + lax.broadcast_in_dim(bias, scores.shape, [1])
                        publish_own(jnp.exp2(scores - bound))
                    plgpu.barrier_wait(p_full)

                    def gradient():
                        if side == _GRADIENT:
                            probs = plgpu.load(p_smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
                            publish_own(probs * (scores + bound) * scale)
                        plgpu.barrier_wait(s_full)

                    def free_keys():
                        if native:
                            plgpu.wgmma_wait(1)  # all but the last product, which reads no keys
                        plgpu.barrier_arrive(k_empty.at[0])

                    def as_value(cut):
                        return p_smem.transpose((1, 0)), g_smem.at[:, at(cut)]

                    def as_key(cut):
                        return s_smem.transpose((1, 0)), q_smem.at[:, at(cut)]

                    def put(part, cut):
                        write(parts_ref.at[number, pl.ds(t * KEYS, KEYS), at(cut)], part.astype(parts_ref.dtype), native)

                    first, *others = cuts
                    queries = [(i, s_smem, k_smem.at[0, :, at(cut)]) for i, cut in enumerate(cuts)]
                    own = [(len(cuts), *as_value(first)), gradient]
                    # While the second computes the scores' gradient, the first has a product to do. In the second it would be
                    # one accumulator too many at that time, and the compiler then waits for every product.
                    steps = [*(own[::-1] if side else own), *queries, (len(cuts), *as_key(first)), free_keys]
                    *dqs, part = accumulate([*dqs, *zeros([first])], steps, native)
                    for cut in others:
                        put(part, first)
                        first = cut
                        (part,) = accumulate(zeros([cut]), [(0, *as_value(cut)), (0, *as_key(cut))], native)
                    plgpu.barrier_arrive(free.at[side])
                    pl.when(t + 1 == tiles)(lambda: plgpu.barrier_arrive(q_empty))
                    put(part, first)
                    return dqs

                dqs = lax.fori_loop(0, tiles, tile, zeros(cuts))
                for dq, cut in zip(dqs, cuts, strict=True):
                    write(dq_ref.at[number, :, at(cut)], dq.astype(out_dtype), native)
                return 0

            lax.fori_loop(0, turns, item, 0)
            plgpu.barrier_wait(others_free)

        pl.when(warpgroup == _SCORES)(lambda: products(_SCORES))
        pl.when(warpgroup == _GRADIENT)(lambda: products(_GRADIENT))

    operand = partial(plgpu.SMEM, dtype=q.dtype, transforms=TILED)
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, out_dtype),
            jax.ShapeDtypeStruct((count, tiles * KEYS, width), jnp.bfloat16),
        ),
        scratch_types=(
            operand((HEADS, width)),
            operand((HEADS, width)),
            operand((1, KEYS, width)),
            operand((HEADS, KEYS)),
            operand((HEADS, KEYS)),
            plgpu.SMEM((ID_SLOTS, KEYS), jnp.int32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_barriers=ID_SLOTS),
            plgpu.Barrier(num_barriers=1),
            plgpu.Barrier(num_arrivals=2, num_barriers=1),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=2),
        ),
        grid=(jobs.ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=kernel_options(),
        interpret=interpret,
    )(q, gradient, *pools, ids, whole, shift)
