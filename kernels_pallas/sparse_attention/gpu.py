"""`sparse_attention` for Hopper: one CTA takes a query (64 heads at a time) over a list of 64-key tiles.

Four warpgroups, each with one job, meet at barriers in shared memory:

    unpack   gathers rows by id straight from device memory, dequantises them in registers, writes tiles
    softmax  q k^T of a tile, running maximum and sum, probabilities and the factor for what came before
    value    two of them, each with half of the channels: rescale, add p v

A tile serves as K and as V. Both products run in bfloat16, or in fp16 for float32 queries: the stored values are exact in
either; sums are float32. A small batch splits each query's tiles over several CTAs, and a merge follows.
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
from kernels_pallas.sparse_attention import float_rows, producer, refusals
from kernels_pallas.sparse_attention.producer import HEADS, ID_SLOTS, TILED, Interpreted, Native, Refs, ring_bytes
from kernels_pallas.sparse_attention.reference import merge_parts
from kernels_pallas.sparse_attention.unpack import KEYS, Geometry, padded_width

STAGES, PROBS = 2, 1  # tiles of keys and of probabilities in shared memory
SCRATCH = 11  # arrays and barriers in shared memory
_FLOOR = -1e20  # below every score that is worth anything, above the masked ones
_UNPACK, _SOFTMAX, _VALUE = 0, 1, 2  # warpgroups; the second value warpgroup is _VALUE + 1


@dataclass(frozen=True)
class Tiling:
    """ctas: of the grid (one a multiprocessor); parts: CTAs that share a query, None for as many as fill the grid; registers
    a thread of the unpack, softmax and value warpgroups, of 512 for the four."""

    ctas: int = 132
    parts: int | None = None
    registers: tuple[int, int, int] = (80, 112, 160)


def refusal(
    q: Any,
    entries: Any,
    entry_ids: Any,
    window: Any,
    window_ids: Any,
    sink: Any,
    mass: bool = False,
    tiling: Tiling | None = None,
) -> str | None:
    """Why these shapes or dtypes cannot run here."""
    width = q.shape[-1]
    if width != 64 and (width % 128 or width > 512):
        return f"a row has {width} channels, allowed are 64 and the multiples of 128 up to 512"
    if mass and entries.dtype == jnp.uint8:
        return "probabilities are asked for, allowed with bfloat16 rows"
    return refusals.refusal(q, entries, entry_ids, window, window_ids, floats=True)


def _padded_ids(ids: jax.Array) -> jax.Array:
    extra = -ids.shape[-1] % KEYS
    return jnp.pad(ids, ((0, 0), (0, extra)), constant_values=-1) if extra else ids


def _parts(queries: int, tiles: int, tiling: Tiling) -> int:
    """As many CTAs a query as the grid has room for, without one more tile for any of them than that needs."""
    if tiling.parts is not None:
        return min(tiling.parts, tiles)
    parts = max(1, min(tiles, tiling.ctas // queries))
    return -(-tiles // -(-tiles // parts))


def run(
    q: jax.Array,
    entries: jax.Array,
    entry_ids: jax.Array,
    window: jax.Array,
    window_ids: jax.Array,
    sink: jax.Array | None,
    mass: bool = False,
    tiling: Tiling = Tiling(),
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """See `kernels_pallas.sparse_attention.api.sparse_attention`. interpret: parameters of Pallas' interpreter."""
    if entries.dtype != jnp.uint8:
        return float_rows.run(
            q, entries, entry_ids, window, window_ids, sink, mass, float_rows.Device(tiling.ctas, interpret=interpret)
        )
    queries, heads, width = q.shape
    entry_ids, window_ids = _padded_ids(entry_ids), _padded_ids(window_ids)
    tiles = (entry_ids.shape[1] + window_ids.shape[1]) // KEYS
    parts = _parts(queries, tiles, tiling)
    head_blocks = -(-heads // HEADS)
    # A part knows nothing of the sink: it goes into the denominator of the whole.
    below = jnp.pad(sink.astype(jnp.float32), (0, head_blocks * HEADS - heads)) if sink is not None and parts == 1 else None
    out_dtype = q.dtype if parts == 1 or q.dtype == jnp.float32 else jnp.float16
    static = {"width": width, "out_dtype": out_dtype, "parts": parts, "tiling": tiling, "interpret": interpret}
    out, lse = _kernel(_queries(q), entries, entry_ids, window, window_ids, below, **static)
    out, lse = out[:, :, :heads, :width], lse[:, :, :heads]
    if parts == 1:
        return out[:, 0], lse[:, 0]
    merged, total = merge_parts(jnp.moveaxis(out, 1, 0), jnp.moveaxis(lse, 1, 0), sink)
    return merged.astype(q.dtype), total


def _queries(q: jax.Array) -> jax.Array:
    """Whole blocks of heads, rows as wide as a tile's; float32 as fp16, whose three more bits outweigh its range here."""
    _, heads, width = q.shape
    more = ((0, 0), (0, -heads % HEADS), (0, padded_width(width) - width))
    q = jnp.pad(q, more) if any(high for _, high in more) else q
    return q if q.dtype == jnp.bfloat16 else q.astype(jnp.float16)


def _accumulate(accs: list[Any], a: Any, b: list[Any], interpreted: bool) -> list[Any]:
    """``acc + a b`` of each pair."""

    def multiply(b: Any) -> Any:
        def run(ref: Any) -> jax.Array:
            plgpu.wgmma(ref, a, b)
            return ref[...]

        return run

    if interpreted:  # the interpreter knows no accumulator that starts from a value
        return [acc + pl.run_scoped(multiply(b), plgpu.ACC(acc.shape, acc.dtype)) for acc, b in zip(accs, b, strict=True)]

    def all_of_them(refs: list[Any]) -> None:
        for ref, columns in zip(refs, b, strict=True):
            plgpu.wgmma(ref, a, columns)

    return pl.run_state(all_of_them)([plgpu.ACC.init(acc) for acc in accs])


def _columns(width: int) -> list[Any]:
    """Slices of at most 128: one instruction must not name more registers than a thread has at launch."""
    size = min(width, 128)
    return [pl.ds(start, size) for start in range(0, width, size)]


def _kernel(
    q: jax.Array,
    entries: jax.Array,
    entry_ids: jax.Array,
    window: jax.Array,
    window_ids: jax.Array,
    sink: jax.Array | None,
    *,
    width: int,
    out_dtype: Any,
    parts: int,
    tiling: Tiling,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Outputs ``[N, parts, H, K]`` and log-sum-exps ``[N, parts, H]`` of each part, H a multiple of 64.

    q: rows of ``width`` channels, padded as tiles are; tiles and probabilities have its dtype.
    """
    queries, heads, padded = q.shape
    geometry = Geometry(width, padded)
    entry_tiles, window_tiles = entry_ids.shape[1] // KEYS, window_ids.shape[1] // KEYS
    tiles = entry_tiles + window_tiles
    per_part = -(-tiles // parts)
    head_blocks = heads // HEADS
    items = queries * head_blocks * parts
    ctas = min(tiling.ctas, items)
    half = padded // 2
    ids = [a if a.shape[1] else jnp.full((queries, KEYS), -1, jnp.int32) for a in (entry_ids, window_ids)]
    to_log2 = math.log2(math.e)
    scale = width**-0.5 * to_log2
    row = plgpu.Layout.WGMMA.reduce(1)
    column = plgpu.Layout.WGMMA.reduce(0)

    def body(q_ref, entries_ref, entry_ids_ref, window_ref, window_ids_ref, *others):
        (*sinks, out_ref, lse_ref), scratch = others[:-SCRATCH], others[-SCRATCH:]
        sink_ref = sinks[0] if sinks else None
        q_smem, k_smem, p_smem, small, ring, ids_smem = scratch[:6]
        bias_smem, factor_smem = small.at[0], small.at[1]
        q_full, k_full, k_empty, p_full, p_empty = scratch[6:]
        warpgroup = lax.axis_index("warpgroup")
        cta = lax.axis_index("cta")

        def item_of(turn):
            """Query, head block and part of a CTA's ``turn``-th item."""
            number = jnp.minimum(cta + turn * ctas, items - 1)
            part, rest = lax.rem(number, parts), lax.div(number, parts)
            return lax.div(rest, head_blocks), lax.rem(rest, head_blocks), part

        def drain(barrier, steps, slots):
            """Sees the last completion of every slot, so that none is left to a kernel that has ended."""
            for slot in range(slots):
                pl.when(steps > slot)(lambda slot=slot: plgpu.barrier_wait(barrier.at[slot]))

        turns = lax.div(items - cta + ctas - 1, ctas)

        refs = Refs(
            geometry,
            entries_ref,
            entry_ids_ref,
            window_ref,
            window_ids_ref,
            q_smem,
            k_smem,
            bias_smem,
            ring,
            ids_smem,
            entry_tiles,
            tiles,
            q.dtype == jnp.bfloat16,
        )
        rows = Native(refs) if interpret is None else Interpreted(refs)

        @pl.when(warpgroup == _UNPACK)
        def _():
            plgpu.set_max_registers(tiling.registers[0], action="decrease")
            steps = turns * per_part

            def place(step):
                query, _, part = item_of(lax.div(step, per_part))
                return query, part * per_part + lax.rem(step, per_part)

            def tile(step, _):
                slot = lax.rem(step, STAGES)
                ready = partial(pl.when(step >= STAGES), lambda: plgpu.barrier_wait(k_empty.at[slot]))
                rows.tile(step, place(step), place(step + 1), place(step + 2), slot, ready)
                producer.publish(interpret is None, together=False)
                plgpu.barrier_arrive(k_full.at[slot])
                return 0

            rows.start(place(0), place(1))
            lax.fori_loop(0, steps, tile, 0)
            drain(k_empty, turns * per_part, STAGES)

        @pl.when(warpgroup == _SOFTMAX)
        def _():
            plgpu.set_max_registers(tiling.registers[1], action="decrease")

            def ask(turn):
                query, block, _ = item_of(turn)
                for side in range(2):
                    source = q_ref.at[query, pl.ds(block * HEADS, HEADS), pl.ds(side * half, half)]
                    plgpu.copy_gmem_to_smem(source, q_smem.at[side], q_full)

            ask(0)

            def item(turn, _):
                query, block, part = item_of(turn)
                plgpu.barrier_wait(q_full)
                start = plgpu.layout_cast(jnp.full((HEADS,), _FLOOR, jnp.float32), row)
                zero = plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), row)

                def tile(t, carry):
                    top, total = carry
                    step, stage = turn * per_part + t, turn * (per_part + 1) + t
                    slot, out = lax.rem(step, STAGES), lax.rem(stage, PROBS)
                    plgpu.barrier_wait(k_full.at[slot])

                    def products(acc):
                        plgpu.wgmma(acc, q_smem.at[0], k_smem.at[slot, 0].transpose((1, 0)))
                        plgpu.wgmma(acc, q_smem.at[1], k_smem.at[slot, 1].transpose((1, 0)))
                        return acc[...]

                    scores = pl.run_scoped(products, plgpu.ACC((HEADS, KEYS), jnp.float32))
                    pl.when((t == per_part - 1) & (turn + 1 < turns))(lambda: ask(turn + 1))
                    bias = plgpu.load(bias_smem.at[slot], layout=column, optimized=False)
                    scores = scores * scale + lax.broadcast_in_dim(bias, (HEADS, KEYS), [1])
                    plgpu.barrier_arrive(k_empty.at[slot])
                    high = jnp.maximum(top, scores.max(axis=1))
                    factor = jnp.exp2(top - high)
                    probs = jnp.exp2(scores - lax.broadcast_in_dim(high, (HEADS, KEYS), [0]))
                    total = total * factor + probs.sum(axis=1)
                    pl.when(stage >= PROBS)(lambda: plgpu.barrier_wait(p_empty.at[out]))
                    p_smem[out] = probs.astype(q.dtype)
                    factor_smem[out] = factor
                    producer.publish(interpret is None, together=False)
                    plgpu.barrier_arrive(p_full.at[out])
                    return high, total

                top, total = lax.fori_loop(0, per_part, tile, (start, zero))
                stage = turn * (per_part + 1) + per_part
                out = lax.rem(stage, PROBS)
                if sink_ref is None:
                    sink_at = plgpu.layout_cast(jnp.full((HEADS,), -jnp.inf, jnp.float32), row)
                else:
                    sink_at = plgpu.load(sink_ref.at[pl.ds(block * HEADS, HEADS)], layout=row, optimized=False) * to_log2
                high = jnp.maximum(top, sink_at)
                whole = total * jnp.exp2(top - high) + jnp.exp2(sink_at - high)
                some = total > 0
                last = jnp.where(some, jnp.exp2(top - high) / jnp.where(some, whole, 1.0), 0.0)
                lse = jnp.where(some, (top + jnp.log2(jnp.where(some, total, 1.0))) / to_log2, -jnp.inf)
                store(lse_ref.at[query, part, pl.ds(block * HEADS, HEADS)], lse)
                pl.when(stage >= PROBS)(lambda: plgpu.barrier_wait(p_empty.at[out]))
                factor_smem[out] = last
                producer.publish(interpret is None, together=False)
                plgpu.barrier_arrive(p_full.at[out])
                return 0

            lax.fori_loop(0, turns, item, 0)
            drain(p_empty, turns * (per_part + 1), PROBS)

        @pl.when(warpgroup >= _VALUE)
        def _():
            plgpu.set_max_registers(tiling.registers[2], action="increase")
            side = warpgroup - _VALUE

            def item(turn, _):
                query, block, part = item_of(turn)
                columns = _columns(half)
                zero = jnp.zeros((HEADS, columns[0].size), jnp.float32)
                accs = [plgpu.layout_cast(zero, plgpu.Layout.WGMMA) for _ in columns]

                def scaled(accs, out):
                    factor = plgpu.load(factor_smem.at[out], layout=row, optimized=False)
                    return [acc * lax.broadcast_in_dim(factor, acc.shape, [0]) for acc in accs]

                def tile(t, accs):
                    step, stage = turn * per_part + t, turn * (per_part + 1) + t
                    slot, out = lax.rem(step, STAGES), lax.rem(stage, PROBS)
                    plgpu.barrier_wait(p_full.at[out])
                    values = [k_smem.at[slot, side, :, cut] for cut in columns]
                    accs = _accumulate(scaled(accs, out), p_smem.at[out], values, interpret is not None)
                    plgpu.barrier_arrive(k_empty.at[slot])
                    plgpu.barrier_arrive(p_empty.at[out])
                    return accs

                accs = lax.fori_loop(0, per_part, tile, accs)
                out = lax.rem(turn * (per_part + 1) + per_part, PROBS)
                plgpu.barrier_wait(p_full.at[out])
                accs = scaled(accs, out)
                plgpu.barrier_arrive(p_empty.at[out])
                for acc, cut in zip(accs, columns, strict=True):
                    head, channel = block * HEADS, side * half + cut.start
                    if out_dtype == jnp.float32:
                        place = out_ref.at[query, part, pl.ds(head, HEADS), pl.ds(channel, cut.size)]
                        store(place, acc)
                    else:
                        rows.write(out_ref, (query, part, head, channel), acc.astype(out_dtype))
                return 0

            lax.fori_loop(0, turns, item, 0)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((queries, parts, heads, padded), out_dtype),
            jax.ShapeDtypeStruct((queries, parts, heads), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((2, HEADS, half), q.dtype, transforms=TILED),
            plgpu.SMEM((STAGES, 2, KEYS, half), q.dtype, transforms=TILED),
            plgpu.SMEM((PROBS, HEADS, KEYS), q.dtype, transforms=TILED),
            plgpu.SMEM((2, STAGES, KEYS), jnp.float32),  # one array for two: each is padded to a kilobyte
            plgpu.SMEM((ring_bytes(width) // 4,), jnp.int32),
            plgpu.SMEM((ID_SLOTS, KEYS), jnp.int32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=1, num_barriers=PROBS),
            plgpu.Barrier(num_arrivals=2, num_barriers=PROBS),
        ),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=4,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=256,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
    )(q, entries, ids[0], window, ids[1], *([] if sink is None else [sink]))
