"""`sparse_attention` of float rows for Hopper: one CTA takes a query's 64 heads over a list of 64-key tiles.

Four warpgroups, each with one job, meet at barriers in shared memory:

    copy     rows by number into bfloat16 tiles (`gather`), queries and ids by bulk copies
    softmax  q k^T of the next tile while the scores of this one become probabilities
    value    two of them, each with half of the channels: rescale, add p v
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import store
from kernels_pallas.sparse_attention.gather import bias_of, copy_tile
from kernels_pallas.sparse_attention.producer import HEADS, TILED, publish
from kernels_pallas.sparse_attention.unpack import KEYS
from kernels_pallas.sparse_attention.write import write

STAGES = 2
ID_SLOTS = 4  # ids arrive two tiles ahead, and those of the two tiles before may still be read
SCRATCH = 12  # arrays and barriers in shared memory
FLOOR = -1e20  # below every score that is worth anything, above the masked ones
TO_LOG2 = math.log2(math.e)
ROW: Any = plgpu.Layout.WGMMA.reduce(1)
_COPY, _SOFTMAX, _VALUE = 0, 1, 2  # warpgroups; the second value warpgroup is _VALUE + 1
_REGISTERS = 72, 120, 160  # a thread of the copy, softmax and value warpgroups, of 512 for the four


@dataclass(frozen=True)
class Jobs:
    """A CTA's share of the jobs, each a query and a block of 64 heads. blocks: of a query, which share its list of tiles."""

    count: int
    blocks: int
    tiles: int
    ctas: int

    def turns(self) -> Any:
        """Jobs of this CTA."""
        return lax.div(self.count - lax.axis_index("cta") + self.ctas - 1, self.ctas)

    def number(self, turn: Any) -> Any:
        """The CTA's ``turn``-th job."""
        return lax.axis_index("cta") + turn * self.ctas

    def place(self, step: Any) -> tuple[Any, Any]:
        """Query and tile of the CTA's ``step``-th tile."""
        return lax.div(self.number(lax.div(step, self.tiles)), self.blocks), lax.rem(step, self.tiles)


def columns(width: int) -> list[Any]:
    """Slices of at most 128: one instruction must not name more registers than a thread has at launch."""
    size = min(width, 128)
    return [pl.ds(start, size) for start in range(0, width, size)]


def zeros(cuts: list[Any]) -> list[jax.Array]:
    """Accumulators of 64 rows, one a slice of columns."""
    return [plgpu.layout_cast(jnp.zeros((64, cut.size), jnp.float32), plgpu.Layout.WGMMA) for cut in cuts]


def accumulate(accs: list[jax.Array], steps: list[Any], native: bool) -> list[jax.Array]:
    """``accs`` plus products ``(i, a, b)``, ``accs[i] += a b``, all of them under way at once; a step may also be a function,
    which is called in its turn."""
    if native:

        def all_of_them(refs: list[Any]) -> None:
            for step in steps:
                if callable(step):
                    step()
                else:
                    plgpu.wgmma(refs[step[0]], *step[1:])

        sums: Any = pl.run_state(all_of_them)([plgpu.ACC.init(acc) for acc in accs])
        return sums

    def alone(a: Any, b: Any, ref: Any) -> jax.Array:
        plgpu.wgmma(ref, a, b)
        return ref[...]

    accs = list(accs)
    for step in steps:  # the interpreter knows no accumulator that starts from a value
        if callable(step):
            step()
        else:
            i, a, b = step
            accs[i] = accs[i] + pl.run_scoped(partial(alone, a, b), plgpu.ACC(accs[i].shape, jnp.float32))
    return accs


def drain(barrier: Any, steps: Any) -> None:
    """Sees the last completion of every slot, so that none is left to a kernel that has ended."""
    for slot in range(barrier.shape[0]):
        pl.when(steps > slot)(lambda slot=slot: plgpu.barrier_wait(barrier.at[slot]))


def copy_tiles(
    jobs: Jobs, pools: tuple[Any, Any, int], ids: tuple[Any, Any, Any], tiles: tuple[Any, Any, Any], begin: Any, native: bool
) -> None:
    """The copy warpgroup's loop: ids two tiles ahead, rows as soon as a slot is free.

    pools: entries, window, tiles of entries. ids: in device memory, in shared memory, its barrier. tiles: the slots, the
    barriers of full and of empty ones. begin: what a job needs besides, called once its first tile is there.
    """
    entries, window, entry_tiles = pools
    ids_ref, ids_smem, ids_full = ids
    tiles_smem, full, empty = tiles
    slots, steps = tiles_smem.shape[0], jobs.turns() * jobs.tiles

    def ask(step: Any) -> None:
        @pl.when(step < steps)
        def _() -> None:
            query, tile = jobs.place(step)
            slot = lax.rem(step, ID_SLOTS)
            plgpu.copy_gmem_to_smem(ids_ref.at[query, tile], ids_smem.at[slot], ids_full.at[slot])

    def body(step: Any, _: Any) -> Any:
        slot, own, tile = lax.rem(step, slots), lax.rem(step, ID_SLOTS), lax.rem(step, jobs.tiles)
        pl.when(step >= slots)(lambda: plgpu.barrier_wait(empty.at[slot]))
        ask(step + 2)
        plgpu.barrier_wait(ids_full.at[own])
        copy_tile(entries, window, ids_smem.at[own], tiles_smem.at[slot], tile < entry_tiles, native)
        publish(native, together=False)
        plgpu.barrier_arrive(full.at[slot])
        pl.when(tile == 0)(lambda: begin(lax.div(step, jobs.tiles)))
        return 0

    ask(jnp.int32(0))
    ask(jnp.int32(1))
    lax.fori_loop(0, steps, body, 0)
    drain(empty, steps)


def kernel_options() -> Any:
    """Compiler parameters of the kernels of float rows."""
    return plgpu.CompilerParams(
        approx_math=True,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=256,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
    )


def forward(
    q: jax.Array,
    pools: tuple[jax.Array, jax.Array],
    ids: jax.Array,
    entry_tiles: int,
    sink: jax.Array | None,
    *,
    scale: float,
    out_dtype: Any,
    ctas: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Outputs ``[J, 64, K]`` and log-sum-exps ``[J, 64]`` of J jobs, a query's blocks of heads side by side.

    q ``[J, 64, K]`` and pools (entries, window) ``[*, K]``: bfloat16. ids ``[N, tiles, 64]``: those of entries first. sink:
    ``[blocks, 64]`` float32, or None.
    """
    count, _, width = q.shape
    tiles, half, native = ids.shape[1], width // 2, interpret is None
    jobs = Jobs(count, count // ids.shape[0], tiles, min(ctas, count))
    stages = tiles + 1  # what the value warpgroups take of a job: its tiles, and the last factor

    def body(q_ref, entries_ref, window_ref, ids_ref, *others):
        (*sinks, out_ref, lse_ref), scratch = others[:-SCRATCH], others[-SCRATCH:]
        q_smem, k_smem, p_smem, factor_smem, ids_smem = scratch[:5]
        q_full, q_empty, ids_full, k_full, k_empty, p_full, p_empty = scratch[5:]
        warpgroup = lax.axis_index("warpgroup")
        turns = jobs.turns()

        @pl.when(warpgroup == _COPY)
        def _():
            plgpu.set_max_registers(_REGISTERS[0], action="decrease")

            def query(turn):
                pl.when(turn > 0)(lambda: plgpu.barrier_wait(q_empty))
                plgpu.copy_gmem_to_smem(q_ref.at[jobs.number(turn)], q_smem, q_full)

            pools = entries_ref, window_ref, entry_tiles
            copy_tiles(jobs, pools, (ids_ref, ids_smem, ids_full), (k_smem, k_full, k_empty), query, native)
            plgpu.barrier_wait(q_empty)

        @pl.when(warpgroup == _SOFTMAX)
        def _():
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")

            def item(turn, _):
                start = plgpu.layout_cast(jnp.full((HEADS,), FLOOR, jnp.float32), ROW)
                zero = plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), ROW)
                plgpu.barrier_wait(q_full)

                def tile(t, carry):
                    top, total = carry
                    step, stage = turn * tiles + t, turn * stages + t
                    slot, out = lax.rem(step, STAGES), lax.rem(stage, STAGES)
                    plgpu.barrier_wait(k_full.at[slot])

                    def product(acc):
                        plgpu.wgmma(acc, q_smem, k_smem.at[slot].transpose((1, 0)))
                        return acc[...]

                    scores = pl.run_scoped(product, plgpu.ACC((HEADS, KEYS), jnp.float32))
                    bias = bias_of(ids_smem.at[lax.rem(step, ID_SLOTS)])
                    plgpu.barrier_arrive(k_empty.at[slot])
                    pl.when(t + 1 == tiles)(lambda: plgpu.barrier_arrive(q_empty))
                    scores = scores * (scale * TO_LOG2) + lax.broadcast_in_dim(bias, scores.shape, [1])
                    high = jnp.maximum(top, scores.max(axis=1))
                    factor = jnp.exp2(top - high)
                    probs = jnp.exp2(scores - lax.broadcast_in_dim(high, scores.shape, [0]))
                    pl.when(stage >= STAGES)(lambda: plgpu.barrier_wait(p_empty.at[out]))
                    p_smem[out] = probs.astype(p_smem.dtype)
                    factor_smem[out] = factor
                    publish(native, together=False)
                    plgpu.barrier_arrive(p_full.at[out])
                    return high, total * factor + probs.sum(axis=1)

                top, total = lax.fori_loop(0, tiles, tile, (start, zero))
                stage = turn * stages + tiles
                out = lax.rem(stage, STAGES)
                number = jobs.number(turn)
                some = total > 0
                whole = jnp.where(some, total, 1.0)
                store(lse_ref.at[number], jnp.where(some, top / TO_LOG2 + jnp.log(whole), -jnp.inf))
                if sinks:
                    sink_at = plgpu.load(sinks[0].at[lax.rem(number, jobs.blocks)], layout=ROW, optimized=False) * TO_LOG2
                    high = jnp.maximum(top, sink_at)
                    last = jnp.exp2(top - high) / (whole * jnp.exp2(top - high) + jnp.exp2(sink_at - high))
                else:
                    last = 1.0 / whole
                pl.when(stage >= STAGES)(lambda: plgpu.barrier_wait(p_empty.at[out]))
                factor_smem[out] = jnp.where(some, last, 0.0)
                publish(native, together=False)
                plgpu.barrier_arrive(p_full.at[out])
                return 0

            lax.fori_loop(0, turns, item, 0)
            drain(p_empty, turns * stages)

        @pl.when(warpgroup >= _VALUE)
        def _():
            plgpu.set_max_registers(_REGISTERS[2], action="increase")
            side = warpgroup - _VALUE
            cuts = columns(half)

            def scaled(accs, out):
                factor = plgpu.load(factor_smem.at[out], layout=ROW, optimized=False)
                return [acc * lax.broadcast_in_dim(factor, acc.shape, [0]) for acc in accs]

            def item(turn, _):
                def tile(t, accs):
                    slot, out = lax.rem(turn * tiles + t, STAGES), lax.rem(turn * stages + t, STAGES)
                    plgpu.barrier_wait(p_full.at[out])
                    values = [k_smem.at[slot, :, pl.ds(side * half + cut.start, cut.size)] for cut in cuts]
                    accs = accumulate(scaled(accs, out), [(i, p_smem.at[out], value) for i, value in enumerate(values)], native)
                    plgpu.barrier_arrive(k_empty.at[slot])
                    plgpu.barrier_arrive(p_empty.at[out])
                    return accs

                accs = lax.fori_loop(0, tiles, tile, zeros(cuts))
                out = lax.rem(turn * stages + tiles, STAGES)
                plgpu.barrier_wait(p_full.at[out])
                accs = scaled(accs, out)
                plgpu.barrier_arrive(p_empty.at[out])
                for acc, cut in zip(accs, cuts, strict=True):
                    at = out_ref.at[jobs.number(turn), :, pl.ds(side * half + cut.start, cut.size)]
                    write(at, acc.astype(out_dtype), native)
                return 0

            lax.fori_loop(0, turns, item, 0)

    barrier = partial(plgpu.Barrier, num_barriers=STAGES)
    return plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(q.shape, out_dtype), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)),
        scratch_types=(
            plgpu.SMEM((HEADS, width), q.dtype, transforms=TILED),
            plgpu.SMEM((STAGES, KEYS, width), q.dtype, transforms=TILED),
            plgpu.SMEM((STAGES, HEADS, KEYS), q.dtype, transforms=TILED),
            plgpu.SMEM((STAGES, HEADS), jnp.float32),
            plgpu.SMEM((ID_SLOTS, KEYS), jnp.int32),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=ID_SLOTS),
            barrier(),
            barrier(num_arrivals=3),
            barrier(),
            barrier(num_arrivals=2),
        ),
        grid=(jobs.ctas,),
        grid_names=("cta",),
        num_threads=4,
        thread_name="warpgroup",
        compiler_params=kernel_options(),
        interpret=interpret,
    )(q, *pools, ids, *([] if sink is None else [sink]))
