"""`mega_mhc` on Hopper: two kernels of Pallas Mosaic GPU, `update` and `finish`; gradients by recomputation in XLA."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.mega_mhc.finish import finish
from kernels_pallas.mega_mhc.reference import high_and_low, unrolled
from kernels_pallas.mega_mhc.update import COLS, ROWS, Tile, update

CTAS = 132  # every CTA of a launch must be resident: those that share a tile of tokens wait for each other
STREAMS = 4  # a row of N float32 must be whole 16 bytes, and N (N + 2) weight rows whole blocks of 8


def refusal(
    y: Any,
    streams: Any,
    post: Any,
    comb: Any,
    pre: Any,
    hc: Any,
    gain: Any,
    *,
    iters: int,
    eps: float,
    rms_eps: float,
    tile: Tile | None = None,
) -> str | None:
    """Why these shapes or dtypes cannot run here."""
    _, n, d = streams.shape
    if n != STREAMS:
        return f"there are {n} streams, allowed are {STREAMS}"
    if d % COLS:
        return f"a row has {d} channels, allowed are multiples of {COLS}"
    if y.dtype != jnp.bfloat16 or streams.dtype != jnp.bfloat16:
        return f"y is {y.dtype} and the streams are {streams.dtype}, allowed is bfloat16"
    if streams.shape[0] == 0:
        return "there are no tokens"
    return None if tile is not None or choose(streams.shape[0], d) else f"no tiling for {d} channels"


def choose(tokens: int, d: int) -> Tile | None:
    """Tile sizes for ``[tokens, d]``."""
    tiles, columns = -(-tokens // ROWS), d // COLS
    divisors = [s for s in range(1, min(columns, 128) + 1) if columns % s == 0]
    # Few tokens: as many CTAs as there are SMs. Many: no more than hold a tile's collapsed rows, as a CTA with more columns
    # of them has fewer partial sums to write.
    fitting = [s for s in divisors if columns // s <= 10]
    if not fitting:
        return None
    splits = next((s for s in reversed(fitting) if s * tiles <= CTAS), fitting[0])
    chunks = columns // splits
    slots = min(3, max(2, chunks)) if chunks > 5 else min(4, max(1, chunks))
    return Tile(splits, COLS, slots, 3, min(tiles, CTAS // splits), chunks + 3)


def forward(
    y: jax.Array,
    streams: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    pre: jax.Array,
    hc: Any,
    gain: jax.Array,
    *,
    iters: int,
    eps: float,
    rms_eps: float,
    tile: Tile | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """`run` without its gradient."""
    t, _, d = streams.shape
    tile = choose(t, d) if tile is None else tile
    assert tile is not None
    new, x, p, q = update(y, streams, post, comb, pre, high_and_low(hc.fn), gain.astype(jnp.float32), tile, rms_eps, interpret)
    return new, x, *finish(p, q, hc.scale, hc.base, d, t, iters, eps, rms_eps, interpret)


def run(
    y: jax.Array,
    streams: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    pre: jax.Array,
    hc: Any,
    gain: jax.Array,
    *,
    iters: int,
    eps: float,
    rms_eps: float,
    tile: Tile | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """See `kernels_pallas.mega_mhc.api.mega_mhc`. tile: other sizes than `choose` picks; interpret: parameters of Pallas'
    interpreter."""
    static = {"iters": iters, "eps": eps, "rms_eps": rms_eps}
    call = jax.custom_vjp(functools.partial(forward, **static, tile=tile, interpret=interpret))

    def keep(*args: Any) -> tuple[Any, Any]:
        return call(*args), args

    def pull(args: Any, cotangents: Any) -> Any:
        return jax.vjp(functools.partial(unrolled, **static), *args)[1](cotangents)

    call.defvjp(keep, pull)
    return call(y, streams, post, comb, pre, hc, gain)
