"""Gradient of mega_mhc on Hopper: two kernels, and the small sums of what they leave."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.mega_mhc.backward_streams import Work, backward_streams
from kernels_pallas.mega_mhc.backward_tokens import HALF, backward_tokens
from kernels_pallas.mega_mhc.update import COLS, ROWS


def backward(
    args: tuple, stats: jax.Array, x: jax.Array, cotangents: tuple, iters: int, eps: float, blocks: int, interpret: Any
) -> tuple[Any, ...]:
    """Cotangents of ``args``, the arguments of `kernels_pallas.mega_mhc.api.mega_mhc`.

    stats: as `kernels_pallas.mega_mhc.finish.finish` gives them; x: the next input that the forward gave; cotangents: of the
    forward's outputs. blocks: how many thread blocks the device runs at once.
    """
    y, streams, post, comb, pre, hc, gain = args
    t, n, d = streams.shape
    f32 = jnp.float32

    def whole(a: jax.Array) -> jax.Array:
        """With whole tiles of tokens; a token of zeros adds nothing to any sum."""
        return jnp.pad(a, ((0, -t % ROWS), *((0, 0) for _ in a.shape[1:])))

    def flat(a: jax.Array) -> jax.Array:
        return whole(a.reshape(t, -1))

    dnew, dx, dpre, dpost, dcomb = cotangents
    spread = np.repeat(np.arange(3), (n, n, n * n))
    predictor = jnp.stack([hc.scale.astype(f32)[spread], hc.base.astype(f32)])
    old, new = (whole(post), flat(comb), whole(pre)), (whole(dpre), whole(dpost), flat(dcomb))
    scalar, dp, dpt, dm = backward_tokens(whole(dx), whole(x), whole(stats), predictor, old, new, iters, eps, interpret)

    m, tiles, chunks = len(spread), dp.shape[0] // ROWS, d // COLS
    w = jnp.pad(hc.fn.astype(jnp.bfloat16), ((0, HALF - m), (0, 0)))
    work = Work(tiles, chunks, min(blocks, tiles * chunks))
    dstreams, dy, sums, dw, dgain = backward_streams(
        whole(y), whole(streams), whole(dnew), whole(dx), scalar, dp, dpt, w, gain.astype(f32), work.blocks, interpret
    )
    written = np.repeat(np.arange(work.parts().max())[:, None] < work.parts()[None], COLS, axis=1)

    total = jnp.sum(sums, axis=0)[:, :t].T
    dfn = jnp.sum(jnp.where(written[:, None, :, None], dw, 0), axis=0)
    dscale = jax.ops.segment_sum(jnp.sum(dm[:, :t] * stats[:, :m].T, axis=1), spread, num_segments=3, indices_are_sorted=True)
    dhc = type(hc)(
        fn=jnp.transpose(dfn, (2, 0, 1)).reshape(m, n * d).astype(hc.fn.dtype),
        base=jnp.sum(dm, axis=1).astype(hc.base.dtype),
        scale=dscale.astype(hc.scale.dtype),
    )
    return (
        dy[:t],
        dstreams[:t],
        total[:, :n],
        total[:, n : n + n * n].reshape(t, n, n),
        total[:, n + n * n :],
        dhc,
        jnp.sum(jnp.where(written[:, None, None], dgain, 0), axis=(0, 1, 2)).astype(gain.dtype),
    )
