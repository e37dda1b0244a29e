"""Sums of the rows that go to one place, the same bits at every run: in the order of a stable sort, and nothing is atomic."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import store
from kernels_pallas.sparse_attention.forward import kernel_options

AT_ONCE = 8  # rows that a warpgroup has under way
LONG = 64  # rows to one place, on average, from which several warpgroups share it
SHARING = 4


def segments(places: jax.Array, rows: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``rows`` int32 ``[P]`` in the order of their ``places``, and where each of ``count`` places begins and ends in it.

    A negative place is none.
    """
    # A radix sort takes half as long over half as many bits.
    keys = jnp.where(places < 0, count, places).astype(jnp.uint16 if count <= 0xFFFF else jnp.uint32)
    keys, rows = lax.sort((keys, rows), num_keys=1, is_stable=True)
    at = jnp.arange(len(keys), dtype=jnp.int32)
    changes, edge = keys[1:] != keys[:-1], jnp.ones((1,), bool)

    def put(here: jax.Array, value: jax.Array) -> jax.Array:
        # Where it is not here, past the end and unlike any other.
        index = jnp.where(here, keys.astype(jnp.int32), count + at)
        return jnp.zeros((count,), jnp.int32).at[index].set(value, mode="drop", unique_indices=True)

    return rows, put(jnp.concatenate([edge, changes]), at), put(jnp.concatenate([changes, edge]), at + 1)


def sums(values: jax.Array, order: jax.Array, begins: jax.Array, ends: jax.Array, dtype: Any, interpret: Any) -> jax.Array:
    """``[count, K]`` in ``dtype``: row i is the sum of ``values[order[begins[i] : ends[i]]]``, in float32.

    values: ``[P, K]`` bfloat16.
    """
    count, width = len(begins), values.shape[1]
    group = SHARING if order.shape[0] >= LONG * count else 1
    layout: Any = plgpu.Layout.WG_STRIDED((width,), vec_size=max(1, width // 128))

    def body(values_ref, order_ref, begins_ref, ends_ref, out_ref, partial_smem, barrier):
        warpgroup, place = lax.axis_index("warpgroup"), lax.axis_index("place")
        begin, end = begins_ref[place], ends_ref[place]
        size = lax.div(end - begin + group - 1, jnp.int32(group))
        begin = jnp.minimum(begin + warpgroup * size, end)
        end = jnp.minimum(begin + size, end)

        def some(i, total):
            first = begin + i * AT_ONCE
            rows = []
            for j in range(AT_ONCE):
                number = order_ref[jnp.minimum(first + j, end - 1)]
                rows.append(plgpu.load(values_ref.at[number], layout=layout, optimized=False))
            for j, row in enumerate(rows):
                total = total + jnp.where(first + j < end, row.astype(jnp.float32), 0.0)
            return total

        zero = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)
        total = lax.fori_loop(0, lax.div(end - begin + AT_ONCE - 1, jnp.int32(AT_ONCE)), some, zero)
        if group == 1:
            store(out_ref.at[place], total.astype(dtype))
            return
        partial_smem[warpgroup] = total
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)

        @pl.when(warpgroup == 0)
        def _():
            whole = zero
            for i in range(group):
                whole = whole + plgpu.load(partial_smem.at[i], layout=layout, optimized=False)
            store(out_ref.at[place], whole.astype(dtype))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((count, width), dtype),
        scratch_types=(plgpu.SMEM((group, width), jnp.float32), plgpu.Barrier(num_arrivals=group)),
        grid=(count,),
        grid_names=("place",),
        num_threads=group,
        thread_name="warpgroup",
        compiler_params=kernel_options(),
        interpret=interpret,
    )(values, order, begins, ends)
