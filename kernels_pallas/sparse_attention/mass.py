"""What the indexer learns from: each selected entry's probability summed over heads, on Hopper (training §4.3).

One warpgroup copies rows, as in `forward`; the other multiplies with keys as rows, so that a sum over heads is one over columns.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import store
from kernels_pallas.sparse_attention.forward import ID_SLOTS, ROW, STAGES, TO_LOG2, Jobs, copy_tiles, kernel_options
from kernels_pallas.sparse_attention.producer import HEADS, TILED
from kernels_pallas.sparse_attention.unpack import KEYS

_COPY, _PRODUCT = 0, 1  # warpgroups


def mass(
    q: jax.Array, entries: jax.Array, ids: jax.Array, whole: jax.Array, *, scale: float, ctas: int, interpret: Any
) -> jax.Array:
    """``[J, tiles, 64]`` float32 of J jobs: sums over a job's heads; 0 for -1.

    q, ids: as in `forward`, of entries alone. whole ``[J, 64]`` float32: the log-sum-exp with the sink, infinite for heads
    that are padding.
    """
    count, _, width = q.shape
    tiles, native = ids.shape[1], interpret is None
    jobs = Jobs(count, count // ids.shape[0], tiles, min(ctas, count))

    def body(q_ref, entries_ref, ids_ref, whole_ref, out_ref, *scratch):
        q_smem, k_smem, ids_smem, q_full, q_empty, ids_full, k_full, k_empty = scratch
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _COPY)
        def _():
            def query(turn):
                pl.when(turn > 0)(lambda: plgpu.barrier_wait(q_empty))
                plgpu.copy_gmem_to_smem(q_ref.at[jobs.number(turn)], q_smem, q_full)

            pools = entries_ref, entries_ref, tiles
            copy_tiles(jobs, pools, (ids_ref, ids_smem, ids_full), (k_smem, k_full, k_empty), query, native)
            plgpu.barrier_wait(q_empty)

        @pl.when(warpgroup == _PRODUCT)
        def _():
            def item(turn, _):
                number = jobs.number(turn)
                plgpu.barrier_wait(q_full)
                bound = plgpu.load(whole_ref.at[number], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False) * TO_LOG2

                def tile(t, _):
                    step = turn * tiles + t
                    slot = lax.rem(step, STAGES)
                    plgpu.barrier_wait(k_full.at[slot])

                    def product(acc):
                        plgpu.wgmma(acc, k_smem.at[slot], q_smem.transpose((1, 0)))
                        return acc[...]

                    scores = pl.run_scoped(product, plgpu.ACC((KEYS, HEADS), jnp.float32))
                    numbers = plgpu.load(ids_smem.at[lax.rem(step, ID_SLOTS)], layout=ROW, optimized=False)
                    plgpu.barrier_arrive(k_empty.at[slot])
                    pl.when(t + 1 == tiles)(lambda: plgpu.barrier_arrive(q_empty))
                    probs = jnp.exp2(scores * (scale * TO_LOG2) - lax.broadcast_in_dim(bound, scores.shape, [1]))
                    store(out_ref.at[number, t], jnp.where(numbers >= 0, probs.sum(axis=1), 0.0))
                    return 0

                return lax.fori_loop(0, tiles, tile, 0)

            lax.fori_loop(0, jobs.turns(), item, 0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((count, tiles, KEYS), jnp.float32),
        scratch_types=(
            plgpu.SMEM((HEADS, width), q.dtype, transforms=TILED),
            plgpu.SMEM((STAGES, KEYS, width), q.dtype, transforms=TILED),
            plgpu.SMEM((ID_SLOTS, KEYS), jnp.int32),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=ID_SLOTS),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES),
        ),
        grid=(jobs.ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=kernel_options(),
        interpret=interpret,
    )(q, entries, ids, whole)
