"""mega_mhc: gradients of every implementation against float64, and the backward kernels by themselves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.interpret import gpu_interpreter, gpu_races
from kernels_pallas.mega_mhc import backward, cases, gpu, reference, tpu
from kernels_pallas.mega_mhc.backward_streams import Work, backward_streams
from kernels_pallas.mega_mhc.backward_tokens import HALF
from kernels_pallas.mega_mhc.update import COLS, ROWS, Tile


def exact(case, y, x, post, comb, pre, hc, gain):
    """The op in float64, with values rounded to bfloat16 where the op stores them and gradients straight through."""

    def stored(v):
        return v + jax.lax.stop_gradient(v.astype(jnp.bfloat16).astype(v.dtype) - v)

    n = case.streams
    new = stored(post[..., None] * y[:, None] + jnp.einsum("tjk,tjd->tkd", comb, x))
    hat = stored(jnp.einsum("tk,tkd->td", pre, new))
    out = hat / jnp.sqrt(jnp.mean(hat**2, axis=1, keepdims=True) + case.rms_eps) * gain[None]
    flat = new.reshape(len(new), -1)
    mix = flat @ hc.fn.T / jnp.sqrt(jnp.mean(flat**2, axis=1, keepdims=True) + case.rms_eps)
    mix = mix * hc.scale[np.repeat(np.arange(3), (n, n, n * n))][None] + hc.base[None]
    m = jax.nn.softmax(mix[:, 2 * n :].reshape(-1, n, n), axis=2) + case.eps
    m /= jnp.sum(m, axis=1, keepdims=True) + case.eps
    for _ in range(case.iters - 1):
        m /= jnp.sum(m, axis=2, keepdims=True) + case.eps
        m /= jnp.sum(m, axis=1, keepdims=True) + case.eps
    return new, out, jax.nn.sigmoid(mix[:, :n]) + case.eps, 2 * jax.nn.sigmoid(mix[:, n : 2 * n]), m


def stored(v):
    return v.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)


def wide(tree):
    """float64, to be called where x64 is enabled."""
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a.astype(jnp.float32)), jnp.float64), tree)


def worst(got, want):
    got, want = (np.asarray(a).astype(np.float64) for a in (got, want))
    assert got.shape == want.shape
    return np.abs(got - want).max() / np.abs(want).max()


@pytest.mark.parametrize("name", ["reference", "unrolled", "tpu", "gpu"])
def test_gradients_agree_with_float64(name, monkeypatch):
    case = cases.Case(21 if name == "tpu" else 5, width=128, iters=3)  # more than a block of 16
    args = cases.arguments(case)
    run = {"unrolled": reference.unrolled, "reference": reference.run, "tpu": tpu.run, "gpu": gpu.run}[name]
    races = []
    if name == "gpu":

        def watched(kernel):
            def call(*args):
                out = jax.block_until_ready(kernel(*args))
                races.append(gpu_races())
                return out

            return call

        monkeypatch.setattr(gpu, "SMS", 3)  # two blocks, each with a chunk
        monkeypatch.setattr(backward, "backward_tokens", watched(backward.backward_tokens))
        monkeypatch.setattr(backward, "backward_streams", watched(backward.backward_streams))
        run = functools.partial(run, tile=Tile(splits=1, slots=2, pieces=2), interpret=gpu_interpreter())
    if name == "tpu":
        run = functools.partial(run, interpret=pltpu.InterpretParams())
    run = functools.partial(run, **cases.options(case))
    outs = jax.eval_shape(run, *args)
    cotangents = jax.tree.map(lambda a: jax.random.normal(jax.random.key(7), a.shape, jnp.float32).astype(a.dtype), outs)

    def pull(run, args, cotangents):
        return jax.vjp(run, *args)[1](cotangents)

    # What waits for a kernel's races cannot be traced.
    got = (pull if name == "gpu" else jax.jit(pull, static_argnums=0))(run, args, cotangents)
    assert races == ([False, False] if name == "gpu" else [])
    with jax.enable_x64(True):
        want = jax.jit(pull, static_argnums=0)(functools.partial(exact, case), wide(args), wide(cotangents))
        for (path, g), w, a in zip(
            jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), jax.tree.leaves(args), strict=True
        ):
            assert g.dtype == a.dtype
            # Cotangents of rows pass through bfloat16 (2**-9 of a value), and what is summed from them over channels with
            # them; those of parameters come from float32, rounding of streams to the other neighbour apart. Twice what is seen.
            limit = 2**-6 if a.dtype == jnp.bfloat16 else 1e-2 if path[0].idx < 5 else 2e-4
            assert worst(g.astype(jnp.float32), w) <= limit, jax.tree_util.keystr(path)


def test_a_block_carries_sums_over_tiles_and_from_chunk_to_chunk():
    t, n, d, m, blocks = 3 * ROWS, 4, 2 * COLS, 24, 4
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.float32)

    y, x, dnew, dx = (normal(*shape).astype(jnp.bfloat16) for shape in ((t, d), (t, n, d), (t, n, d), (t, d)))
    scalar, w, gain, p = normal(28, t), normal(m, n * d).astype(jnp.bfloat16), normal(d), normal(t, m)
    high = p.astype(jnp.bfloat16)
    halves = [high, (p - high.astype(jnp.float32)).astype(jnp.bfloat16)]
    dp = jnp.concatenate([jnp.pad(half, ((0, 0), (0, HALF - m))) for half in halves], axis=1)
    dpt = jnp.concatenate(halves, axis=1).T
    rows = jnp.pad(w, ((0, HALF - m), (0, 0)))
    got = backward_streams(y, x, dnew, dx, scalar, dp, dpt, rows, gain, blocks, gpu_interpreter())
    assert not gpu_races()

    y, x, dnew, dx, s, w, gain, p = (np.asarray(a).astype(np.float64) for a in (y, x, dnew, dx, scalar, w, gain, p))
    post, comb, pre, (rms, norm, shrink) = s[:4].T, s[4:20].T.reshape(t, n, n), s[20:24].T, s[24:27, :, None]
    new = stored(post[..., None] * y[:, None] + np.einsum("tjk,tjd->tkd", comb, x))
    hat = stored(np.einsum("tk,tkd->td", pre, new))
    dhat = rms * gain * dx - norm * hat
    grad = dnew + (p @ w).reshape(t, n, d) + pre[..., None] * dhat[:, None] + shrink[:, None] * new
    dcomb = np.einsum("tkd,tjd->tjk", grad, x).reshape(t, -1)
    sums = [np.einsum("tkd,td->tk", grad, y), dcomb, np.einsum("td,tkd->tk", dhat, new)]
    work = Work(t // ROWS, d // COLS, blocks)
    parts = work.parts()
    assert parts.tolist() == [2, 3]
    written = np.repeat(np.arange(3)[:, None] < parts, COLS, axis=1)
    # What is stored is rounded, to 2**-9 of a value, and so is a cotangent with the projection's part before it is used;
    # sums average that. Here and there a new stream is rounded to the other neighbour. Four times what is seen.
    assert worst(got[0].astype(jnp.float32), np.einsum("tjk,tkd->tjd", comb, grad)) < 2**-7
    assert worst(got[1].astype(jnp.float32), np.einsum("tk,tkd->td", post, grad)) < 2**-7
    assert worst(np.asarray(got[2]).sum(axis=0), np.concatenate(sums, axis=1).T) < 3e-4
    assert worst(np.where(written[:, None, :, None], got[3], 0).sum(axis=0), np.einsum("to,tkd->kdo", p, new)) < 1e-4
    assert worst(np.where(written[:, None, None], got[4], 0).sum(axis=(0, 1, 2)), (rms * dx * hat).sum(axis=0)) < 1e-4


@pytest.mark.parametrize(
    ("tiles", "chunks", "blocks"), [(2, 3, 4), (64, 80, 132), (1, 80, 80), (3, 7, 5), (2, 80, 132), (1, 1, 1)]
)
def test_tiles_are_shared_out_once(tiles, chunks, blocks):
    work = Work(tiles, chunks, blocks)
    ends = [int(work.begin(jnp.int32(b))) for b in range(blocks + 1)]
    assert ends[0] == 0 and ends[-1] == tiles * chunks
    owners = [b for b in range(blocks) for _ in range(ends[b], ends[b + 1])]
    assert work.owner(jnp.arange(tiles * chunks, dtype=jnp.int32)).tolist() == owners
    assert work.parts().tolist() == [len(set(owners[c * tiles : (c + 1) * tiles])) for c in range(chunks)]
