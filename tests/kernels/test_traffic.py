"""Bytes counted from programs: kernels, loops and workspaces in a compiled one, mega_mhc's own in a lowered one."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from bench import traffic
from dsv41.errors import UserError
from kernels_pallas.mega_mhc import cases, gpu
from tests.kernels import WITHOUT_GPU

PROGRAM = """HloModule m

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %twice = f32[8,4]{1,0} fusion(%x, %x), kind=kLoop, calls=%f
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%i, %twice)
}

ENTRY %main (a: bf16[8,4], b: f8e4m3fn[4,4]) -> f32[8,4] {
  %a = bf16[8,4]{1,0} parameter(0)
  %b = f8e4m3fn[4,4]{1,0} parameter(1)
  %gemm = (f32[8,4]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", metadata={op_name="(%a)"}
  %c = f32[8,4]{1,0} get-tuple-element(%gemm), index=0
  %zero = s32[] constant(0)
  %state = (s32[], f32[8,4]{1,0}) tuple(%zero, %c)
  %loop = (s32[], f32[8,4]{1,0}) while(%state), condition=%g, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %out = f32[8,4]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_operands_once_results_rounds_of_a_loop_and_no_workspace():
    assert traffic.kernel_bytes(PROGRAM) == {"gemm": 64 + 16 + 128, "twice": 3 * (128 + 128)}


def test_a_program_of_this_backend():
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    assert traffic.compiled_bytes(lambda x: jnp.sin(x) + 1, x) == 2 * 64 * 32 * 4


def test_the_kernels_move_what_must_be_moved_and_little_more():
    case = cases.REAL["4096 tokens"]
    run = jax.jit(partial(gpu.run, **cases.options(case)))
    text = run.trace(*cases.abstract(case)).lower(lowering_platforms=("cuda",)).as_text()
    moved = sum(traffic.lowered_kernel_bytes(text))
    must, _ = cases.cost(case)
    # `finish` reads the collapsed row again and writes it normalised; partial sums are less than a hundredth.
    again = 2 * case.tokens * case.width * 2
    assert must + again <= moved <= 1.01 * (must + again)
    # Three kernels that know nothing of each other: 2 N + 1, N + 1 and 2 rows a token.
    assert moved <= 0.76 * (3 * case.streams + 4) * case.tokens * case.width * 2


@WITHOUT_GPU
def test_without_a_gpu_is_one_line():
    with pytest.raises(UserError, match="backend: found cpu, allowed is gpu"):
        traffic.main()
