"""Kernels of independent threads: PTX that every thread runs, on pointers to whole arrays in device memory.

Mosaic GPU has no gather by an array of numbers and no casts to its smallest formats; what needs no tile in shared memory is
written as one thread's work, in blocks of one warpgroup.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import llvm
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS = 128  # of a block


def launch(name: str, ptx: str, inputs: Sequence[jax.Array], outputs: Sequence[Any], blocks: int) -> list[jax.Array]:
    """Runs ``ptx`` in ``blocks`` blocks of `THREADS`; ``$0``, ``$1``, .. are the inputs' addresses, then the outputs'.

    outputs: abstract arrays, or arrays whose buffers are written in place where nothing else reads them later.
    """
    given = [jax.new_ref(out) if isinstance(out, jax.Array) else None for out in outputs]
    fresh = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o, ref in zip(outputs, given, strict=True) if ref is None]
    held = [ref for ref in given if ref is not None]
    count = len(inputs)

    def body(*refs: Any) -> None:
        inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))

        @inline
        def threads(ctx: Any, *refs: Any) -> None:
            mine, new = iter(refs[count : count + len(held)]), iter(refs[count + len(held) :])
            ordered = [*refs[:count], *(next(new if ref is None else mine) for ref in given)]
            address = ir.IntegerType.get_signless(64)
            args = [llvm.ptrtoint(address, utils.memref_ptr(ref)) for ref in ordered]
            constraints = ",".join("l" * len(args))
            llvm.inline_asm(ir.Type.parse("!llvm.void"), args, f"{{ {ptx} }}", constraints, has_side_effects=True)

        threads(*refs)

    body.__name__ = name
    made = plgpu.kernel(
        body,
        out_type=tuple(fresh),
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name=name,
    )(*inputs, *held)
    rest = iter(made)
    return [next(rest) if ref is None else jax.freeze(ref) for ref in given]
