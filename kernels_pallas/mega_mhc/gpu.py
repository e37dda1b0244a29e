"""`mega_mhc` on Hopper: two kernels of Pallas Mosaic GPU forward, `update` and `finish`, and two backward."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas.mega_mhc.backward import backward
from kernels_pallas.mega_mhc.finish import finish
from kernels_pallas.mega_mhc.gradient import differentiable
from kernels_pallas.mega_mhc.reference import high_and_low
from kernels_pallas.mega_mhc.update import COLS, ROWS, SHARED_BYTES, Tile, update

SMS = 132
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
    fp8: bool = False,
    tile: Tile | None = None,
) -> str | None:
    """Why these shapes or dtypes cannot run here."""
    *lead, n, d = streams.shape
    if n != STREAMS:
        return f"there are {n} streams, allowed are {STREAMS}"
    if d % COLS:
        return f"a row has {d} channels, allowed are multiples of {COLS}"
    if y.dtype != jnp.bfloat16 or streams.dtype != jnp.bfloat16:
        return f"y is {y.dtype} and the streams are {streams.dtype}, allowed is bfloat16"
    if 0 in lead:
        return "there are no tokens"
    needed = (choose(math.prod(lead), d) if tile is None else tile).shared_bytes(n)
    return f"the tile takes {needed} bytes of shared memory, allowed are {SHARED_BYTES}" if needed > SHARED_BYTES else None


def choose(tokens: int, d: int) -> Tile:
    """Tile sizes for ``[tokens, d]``."""
    tiles, columns = -(-tokens // ROWS), d // COLS
    # A CTA's second chunk arrives while it works on its first, and `finish` adds up every split's part.
    allowed = [s for s in range(1, 41) if columns % s == 0 and (s == 1 or columns // s >= 2)]
    # As many CTAs as there are SMs; of more tokens than that two CTAs a tile, or as few above as divide the columns.
    splits = next((s for s in reversed(allowed) if s * tiles <= SMS), allowed[0])
    splits = max(splits, next((s for s in allowed if s > 1 and s <= 4), 1))
    chunks = columns // splits
    return Tile(splits, min(4, chunks), min(6 if chunks > 4 else 8, STREAMS * chunks))


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
    fp8: bool = False,
    tile: Tile | None = None,
    interpret: Any = False,
) -> tuple[tuple[jax.Array, Any, jax.Array, jax.Array, jax.Array], jax.Array]:
    """`run` without its gradient, and what that needs besides (see `kernels_pallas.mega_mhc.finish.finish`)."""
    t, n, d = streams.shape
    f32 = jnp.float32
    tile = choose(t, d) if tile is None else tile

    new, hat, p, q = update(y, streams, post, comb, pre, high_and_low(hc.fn), tile, interpret)
    scale = hc.scale.astype(f32)[np.repeat(np.arange(3), (n, n, n * n))]
    predictor = (scale, hc.base.astype(f32))
    outs = finish(p, q, *predictor, hat, gain.astype(f32), n, iters, eps, rms_eps, fp8, interpret)
    own_pre, own_post, own_comb, stats, *x = outs
    x = (lax.bitcast_convert_type(x[0][:t], jnp.uint8), x[1][:t]) if fp8 else x[0]
    return (new, x, own_pre, own_post, own_comb.reshape(t, n, n)), stats


# A model has this op at every site: lowered once, not once a site.
_lowered_once = (
    jax.jit(forward, static_argnames=("iters", "eps", "rms_eps", "fp8", "tile", "interpret")),
    jax.jit(backward, static_argnums=(4, 5, 6, 7)),
)


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
    fp8: bool = False,
    tile: Tile | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, Any, jax.Array, jax.Array, jax.Array]:
    """See `kernels_pallas.mega_mhc.api.mega_mhc`. tile: other sizes than `choose` picks; interpret: parameters of Pallas'
    interpreter."""
    static = {"iters": iters, "eps": eps, "rms_eps": rms_eps}
    there, back = (forward, backward) if interpret else _lowered_once

    def keep(*args: Any) -> tuple[Any, Any]:
        outputs, stats = there(*args, **static, fp8=fp8, tile=tile, interpret=interpret)
        return outputs, (args, stats, outputs[1])

    def pull(kept: Any, cotangents: Any) -> Any:
        args, stats, x = kept
        if fp8:
            raise TypeError("mega_mhc: fp8: found a gradient, allowed are values only")
        return back(args, stats, x, cotangents, iters, eps, SMS, interpret)

    return differentiable(keep, pull, (y, streams, post, comb, pre, hc, gain))
