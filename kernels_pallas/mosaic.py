"""What Mosaic GPU asks for differently in the versions of jax that this project runs on."""

from collections.abc import Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

SCALAR = plgpu.Layout.WG_SPLAT(())
TILED: Any = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
_FLAT: Any = (plgpu.SwizzleTransform(128),)  # pyright: ignore[reportAbstractUsage]


def store(ref: Any, value: Any) -> None:
    """Writes registers as they lie; jax 0.12 refuses by default what is not the widest transfer to its place."""
    own = getattr(plgpu, "store", None)
    if own is None:
        ref[...] = value
    else:
        own(ref, value, optimized=False)


def two_views(shape: tuple[int, ...], native: bool) -> Any:
    """Shared memory ``[.., R, 64]`` under two names: rows for copies of and to
    any number of rows from any of them on, tiles of 8 rows for arithmetic.

    Of one column of tiles both are the same bytes. The interpreter, which has no bytes, gets one name, see `views`.
    """
    tiled = plgpu.SMEM(shape, jnp.bfloat16, transforms=TILED)
    return plgpu.RefUnion(plgpu.SMEM(shape, jnp.bfloat16, transforms=_FLAT), tiled) if native else tiled


def views(ref: Any, native: bool) -> tuple[Any, Any]:
    """Rows and tiles of `two_views`."""
    return tuple(ref) if native else (ref, ref)


def inline(refs: Sequence[Any], numbers: Sequence[Any], kinds: Sequence[Any] | None = None) -> Any:
    """Runs the PTX that the decorated function gives: ``(refs, registers of numbers) -> (text, operands)``.

    kinds: of the references, plain ones where None.
    """
    types = ([plgpu.RefType() for _ in refs] if kinds is None else list(kinds), [SCALAR for _ in numbers])
    place: Any = plgpu.inline_mgpu(arg_types=types)

    def decorate(function: Any) -> None:
        def build(ctx: Any, refs: Any, numbers: Any) -> None:
            ptx, operands = function(refs, [array.registers.item() for array in numbers])
            assembly(ptx, operands, [])

        place(build)(list(refs), list(numbers))

    return decorate


def assembly(ptx: str, args: Sequence[ir.Value], results: Sequence[ir.Type]) -> list[ir.Value]:
    """A block of PTX; ``$i`` names the i-th result, then the arguments."""
    kinds = {"i32": "r", "i64": "l", "f32": "f"}
    constraints = ",".join(["=" + kinds[str(t)] for t in results] + [kinds[str(a.type)] for a in args])
    result = results[0] if len(results) == 1 else llvm.StructType.get_literal(list(results)) if results else None
    kind = result if result is not None else ir.Type.parse("!llvm.void")
    out = llvm.inline_asm(kind, list(args), ptx, constraints, has_side_effects=True)
    if not results:
        return []
    return [out] if len(results) == 1 else [llvm.extractvalue(t, out, [i]) for i, t in enumerate(results)]


def shared_address(ref: ir.Value) -> ir.Value:
    """32-bit shared address of a reference."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))


def global_address(ref: ir.Value, *steps: tuple[ir.Value, int]) -> ir.Value:
    """64-bit global address of a reference, plus each number times so many 32-bit words."""
    wide = ir.IntegerType.get_signless(64)
    address = llvm.ptrtoint(wide, utils.memref_ptr(ref))
    for number, words in steps:
        address = arith.addi(address, arith.muli(arith.extsi(wide, number), mgpu.c(4 * words, wide)))
    return address


def thread_number() -> ir.Value:
    """The thread's number in its CTA."""
    return utils.thread_idx()
