"""Shapes that tests and benchmarks of `mega_mhc` share, and what they cost."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dsv41.mhc import coefficients, collapse, expand
from dsv41.numerics import rms_norm
from dsv41.params import HyperConnection
from dsv41.quant import ACTIVATION, pack


@dataclass(frozen=True)
class Case:
    """T tokens of N streams and width D. fp8: the next input in FP8; backward: the gradients too."""

    tokens: int
    streams: int = 4
    width: int = 5120
    dtype: str = "bfloat16"
    iters: int = 20
    eps: float = 1e-6
    rms_eps: float = 1e-20
    fp8: bool = False
    backward: bool = False


REAL = {
    "1 token": Case(1),
    "128 tokens": Case(128),
    "4096 tokens": Case(4096),
    "8192 tokens": Case(8192),
    "128 tokens, FP8 input": Case(128, fp8=True),
    "4096 tokens, FP8 input": Case(4096, fp8=True),
    "4096 tokens and back": Case(4096, backward=True),
    "8192 tokens and back": Case(8192, backward=True),
}
SMALL = {
    "one token": Case(1, width=256),
    "a whole tile": Case(64, width=256),
    "ragged tokens": Case(72, width=256),
    "more tiles than run at once": Case(131, width=256),
    "float32": Case(9, width=128, dtype="float32"),
    "two streams": Case(9, streams=2, width=128),
    "one Sinkhorn step": Case(5, width=128, iters=1),
}
CASES = {**SMALL, **REAL}


def abstract(case: Case) -> tuple:
    """Shapes and dtypes of the op's arguments."""
    t, n, d, m = case.tokens, case.streams, case.width, case.streams * (case.streams + 2)

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    y, x = (jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype)) for shape in ((t, d), (t, n, d)))
    hc = HyperConnection(fn=floats(m, n * d), base=floats(m), scale=floats(3))
    return y, x, floats(t, n), floats(t, n, n), floats(t, n), hc, floats(d)


def arguments(case: Case, seed: int = 0) -> tuple:
    """Random arguments; post, comb and pre are what another site would predict."""
    t, n, d, m = case.tokens, case.streams, case.width, case.streams * (case.streams + 2)
    keys = iter(jax.random.split(jax.random.key(seed), 9))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32)

    def site() -> HyperConnection:
        return HyperConnection(
            fn=normal(m, n * d) * (n * d) ** -0.5, base=normal(m), scale=jnp.asarray([0.7, 1.1, 0.9], jnp.float32)
        )

    y, x = normal(t, d), normal(t, n, d)
    pre, post, comb = coefficients(x, site(), case.iters, case.eps, case.rms_eps)
    return y.astype(case.dtype), x.astype(case.dtype), post, comb, pre, site(), 1 + 0.2 * normal(d)


def cost(case: Case) -> tuple[int, int]:
    """Bytes that must move (streams both ways, y, the next input, coefficients, the predictor) and FLOPs of the projection.

    With the gradients: streams, y and the cotangents of both outputs once more, gradients of both, and two products more.
    """
    t, n, d, m = case.tokens, case.streams, case.width, case.streams * (case.streams + 2)
    row = d * jnp.dtype(case.dtype).itemsize
    out = ACTIVATION.row_bytes(d) if case.fp8 else row
    coefficients, predictor, product = 4 * (m + m), 4 * m * n * d + 4 * d, 2 * t * m * n * d
    forward = t * ((2 * n + 1) * row + out + coefficients) + predictor
    if not case.backward:
        return forward, product
    return forward + t * ((3 * n + 3) * row + 2 * coefficients) + 2 * predictor, 3 * product


def timed(case: Case, run: Callable) -> Callable:
    """What is timed of an implementation's ``run``: itself, or with it the gradients at its own outputs as cotangents."""
    if not case.backward:
        return run

    def back(*args: Any) -> Any:
        out, pull = jax.vjp(run, *args)
        return out, pull(out)

    return back


def options(case: Case) -> dict:
    """Static options of the op."""
    return {"iters": case.iters, "eps": case.eps, "rms_eps": case.rms_eps, "fp8": case.fp8}


def peers(case: Case) -> dict:
    """Other forms to time beside the kernel, of the op's signature."""
    from kernels_pallas.mega_mhc.reference import unrolled

    static = options(case)
    return {
        "XLA, sums written out": timed(case, partial(unrolled, **static)),
        "XLA, written out, bf16 product": timed(case, partial(unrolled, **static, split=True)),
    }


def three_parts(case: Case) -> list[tuple]:
    """The op as three programs, with the shapes that each takes: update; coefficients and collapse; norm."""
    y, x, post, comb, pre, hc, gain = abstract(case)

    def mix(new: jax.Array, pre: jax.Array, hc: HyperConnection) -> tuple:
        return collapse(pre, new), *coefficients(new, hc, case.iters, case.eps, case.rms_eps)

    def norm(hat: jax.Array, gain: jax.Array) -> Any:
        x = rms_norm(hat, gain, case.rms_eps)
        return pack(x, ACTIVATION) if case.fp8 else x

    return [(expand, (y, x, post, comb)), (mix, (x, pre, hc)), (norm, (y, gain))]
