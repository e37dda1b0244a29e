"""Float rows to tiles in shared memory, by number: asynchronous copies on the device, array code under the interpreter.

Eight rows of a tile's 64 columns are an atom of 1024 bytes, in which the 16-byte pieces of row r are permuted by ``r % 8``
(the 128-byte swizzle). A warp copies a row's pieces side by side, so that it reads whole lines of device memory and the eight
pieces that one atom takes fall into different banks.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import llvm
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.sparse_attention.producer import MASKED, TILED
from kernels_pallas.sparse_attention.unpack import KEYS


def tile_ids(ids: jax.Array) -> jax.Array:
    """``[N, n]`` row numbers as ``[N, ceil(n / 64), 64]``, -1 past the end."""
    extra = -ids.shape[1] % KEYS
    return jnp.pad(ids, ((0, 0), (0, extra)), constant_values=-1).reshape(ids.shape[0], -1, KEYS)


def bias_of(ids_ref: Any) -> jax.Array:
    """What a tile's ids add to its scores, one value a column: 0, or `MASKED` for -1."""
    ids = plgpu.load(ids_ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return jnp.where(ids >= 0, 0.0, MASKED)


def copy_tile(entries: Any, window: Any, ids: Any, tile: Any, selected: Any, native: bool) -> None:
    """Fills ``tile`` ``[64, K]`` with the rows of ``entries`` (where ``selected``) or ``window`` that ``ids`` ``[64]`` names.

    Zeros for -1. The whole warpgroup calls it; the copies are complete when it returns, but not yet visible to products.
    """
    if not native:
        for pool, mine in ((entries, selected), (window, jnp.logical_not(selected))):

            @pl.when(mine)
            def _(pool: Any = pool) -> None:
                numbers = ids[...]

                def row(i: Any, rows: jax.Array) -> jax.Array:
                    values = pool[pl.ds(jnp.maximum(numbers[i], 0), 1)]
                    return lax.dynamic_update_slice(rows, jnp.where(numbers[i] >= 0, values, jnp.zeros_like(values)), (i, 0))

                tile[...] = lax.fori_loop(0, KEYS, row, jnp.zeros(tile.shape, tile.dtype))

        return
    types = (plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), plgpu.RefType(TILED), plgpu.Layout.WG_SPLAT(()))
    ptx = _ptx(tile.shape[-1])
    inline: Any = plgpu.inline_mgpu(arg_types=types)

    @inline
    def copy(ctx: Any, entries: Any, window: Any, ids: Any, tile: Any, selected: Any) -> None:
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        refs = (i64, entries), (i64, window), (i32, ids), (i32, tile)
        args = [llvm.ptrtoint(kind, utils.memref_ptr(ref)) for kind, ref in refs] + [selected.registers.item()]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), args, ptx, "l,l,r,r,r", has_side_effects=True)

    copy(entries, window, ids, tile, selected.astype(jnp.int32))


def _ptx(width: int) -> str:
    """A warpgroup's copies of a tile; $0 and $1 the pools, $2 the ids, $3 the tile, $4 whether the first pool is meant."""
    pieces, atoms = width // 8, width // 64 * 1024
    across = max(1, 32 // pieces)  # rows of one instruction
    shift = pieces.bit_length() - 1
    lines = [
        ".reg .pred p; .reg .b64 pool, source;",
        ".reg .b32 lane, first, piece, own, base, low, number, size, row, place;",
        "setp.ne.b32 p, $4, 0; selp.b64 pool, $0, $1, p;",
        # A warp has 16 rows: two groups of eight, whose atoms follow each other.
        "mov.u32 lane, %tid.x; and.b32 first, lane, 96; shr.b32 first, first, 1; and.b32 lane, lane, 31;",
        f"and.b32 piece, lane, {pieces - 1}; shr.b32 own, lane, {shift};",
        f"shr.b32 base, first, 3; mad.lo.u32 base, base, {atoms}, $3;",
        "shr.b32 row, piece, 3; mad.lo.u32 base, row, 1024, base; mad.lo.u32 base, own, 128, base;",
        "add.u32 first, first, own; mad.lo.u32 first, first, 4, $2;",
        "mul.wide.u32 source, piece, 16; add.u64 pool, pool, source; and.b32 low, piece, 7;",
    ]
    for i in range(0, KEYS // 4, across):
        lines += [
            f"ld.shared.b32 number, [first + {4 * i}]; setp.ge.s32 p, number, 0; selp.b32 size, 16, 0, p;",
            f"mad.wide.s32 source, number, {2 * width}, pool;",
            f"add.u32 row, own, {i % 8}; xor.b32 row, row, low; mad.lo.u32 place, row, 16, base;",
        ]
        for j in range(max(1, pieces // 32)):
            at = i // 8 * atoms + i % 8 * 128 + 4096 * j
            lines.append(f"cp.async.cg.shared.global [place + {at}], [source + {512 * j}], 16, size;")
    return "{ " + " ".join([*lines, "cp.async.commit_group; cp.async.wait_group 0;"]) + " }"
