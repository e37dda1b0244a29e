"""`sparse_attention` of float rows: values and gradients of reference and kernel against float64, real shapes are lowered."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.interpret import gpu_interpreter, gpu_races
from kernels_pallas.registry import Refused, choose
from kernels_pallas.sparse_attention import cases, float_rows, gpu, reference
from kernels_pallas.sparse_attention.api import sparse_attention
from kernels_pallas.sparse_attention.cases import Case
from kernels_pallas.sparse_attention.row_sums import LONG, segments, sums
from tests.kernels import WITHOUT_GPU
from tests.kernels.test_sparse_attention import exact

NAMES = "out lse mass q entries window sink".split()


def arguments(name):
    """A case's arguments with poison, and what is hard: a row named twice by one list, and a query that names nothing."""
    q, entries, entry_ids, window, window_ids, sink = cases.arguments(cases.FLOATS[name], poison=True)
    if name == "ragged lists":
        assert all(len(np.unique(ids)) < ids.size for ids in (entry_ids, window_ids))
        entry_ids = entry_ids.at[0, 3].set(entry_ids[0, 2]).at[1].set(-1)
        window_ids = window_ids.at[1].set(-1)
    return q, entries, entry_ids, window, window_ids, sink


def cotangents(args):
    """Of output and log-sum-exp; none where there is nothing to differentiate."""
    q, _, entry_ids, _, window_ids, _ = args
    g = jax.random.normal(jax.random.key(7), q.shape).astype(q.dtype)
    some = jnp.any(entry_ids >= 0, axis=1) | jnp.any(window_ids >= 0, axis=1)
    return g, jnp.where(some[:, None], jax.random.normal(jax.random.key(8), q.shape[:2]), 0.0)


def exact_gradients(args, cot):
    """Mass and the gradients of q, entries, window and sink in float64, query by query."""
    q, entries, entry_ids, window, window_ids, sink = (None if a is None else np.asarray(a, np.float64) for a in args)
    g, g_lse = (np.asarray(a, np.float64) for a in cot)
    scale = q.shape[-1] ** -0.5
    mass, g_q = np.zeros(entry_ids.shape), np.zeros(q.shape)
    g_entries, g_window, g_sink = np.zeros(entries.shape), np.zeros(window.shape), np.zeros(q.shape[1])
    for n in range(len(q)):
        lists = [ids[n].astype(int) for ids in (entry_ids, window_ids)]
        live = [ids >= 0 for ids in lists]
        keys = np.concatenate([entries[lists[0][live[0]]], window[lists[1][live[1]]]])
        if not len(keys):
            continue
        weights = np.exp(q[n] @ keys.T * scale)
        alone = weights / weights.sum(1, keepdims=True)
        below = weights.sum(1, keepdims=True) + (0 if sink is None else np.exp(sink)[:, None])
        probs = weights / below
        g_probs = g[n] @ keys.T
        inner = (probs * g_probs).sum(1, keepdims=True)
        g_scores = probs * (g_probs - inner) + alone * g_lse[n][:, None]
        g_q[n] = g_scores @ keys * scale
        rows = g_scores.T @ q[n] * scale + probs.T @ g[n]
        g_sink -= inner[:, 0] * (0 if sink is None else np.exp(sink) / below[:, 0])
        count = live[0].sum()
        np.add.at(g_entries, lists[0][live[0]], rows[:count])
        np.add.at(g_window, lists[1][live[1]], rows[count:])
        mass[n][live[0]] = probs[:, :count].sum(0)
    return [mass, g_q, g_entries, g_window, *([] if sink is None else [g_sink])]


def everything(run, args, cot):
    """Output, log-sum-exp and mass of ``run``, and the gradients."""
    q, entries, entry_ids, window, window_ids, sink = args

    def call(q, entries, window, sink):
        return run(q, entries, entry_ids, window, window_ids, sink, mass=True)

    @jax.jit
    def both(q, entries, window, sink, g, g_lse):
        values, pull = jax.vjp(call, q, entries, window, sink)
        return *values, *pull((g, g_lse, jnp.ones_like(values[2])))

    return [a for a in jax.block_until_ready(both(q, entries, window, sink, *cot)) if a is not None]


def check(got, args, cot, tolerance):
    """Each against float64, relative to its largest value. Rows that no id names are NaN: they get zeros."""
    want = [*exact(args), *exact_gradients(args, cot)]
    for name, a, b in zip(NAMES, got, want, strict=args[-1] is not None):
        a, finite = np.asarray(a, np.float64), np.isfinite(b)
        assert a.shape == b.shape and np.array_equal(np.isfinite(a), finite), name
        if finite.any():
            assert np.abs(a[finite] - b[finite]).max() <= tolerance * np.abs(b[finite]).max(), name


@pytest.mark.pitfall("L1", "L2", "L4", "L5", "G6", "G8")
@pytest.mark.parametrize("name", ["float32 queries, entries alone", "ragged lists", "two blocks of heads, no sink"])
def test_reference_has_exact_gradients(name):
    """float32 sums of up to 500 products; results rounded to bfloat16 where q or rows are."""
    args = arguments(name)
    check(everything(reference.run, args, cotangents(args)), args, cotangents(args), 4e-3)


@pytest.mark.parametrize("name", cases.FLOATS)
def test_gpu_kernels_interpreted(name):
    """Operands of products, the rows' parts among them, are bfloat16: a few of 2**-9 of the largest each; headroom 2.

    The parts of the ragged lists are in memory for two of their three queries at once.
    """
    args = arguments(name)
    parts_bytes = 2 * 3 * 64 * 128 * 2 if name == "ragged lists" else float_rows.Device.parts_bytes
    device = float_rows.Device(2, parts_bytes, gpu_interpreter())

    def run(*args, mass):
        return float_rows.run(*args, mass=mass, device=device)

    check(everything(run, args, cotangents(args)), args, cotangents(args), 1.5e-2)
    assert not gpu_races()


@pytest.mark.parametrize("each", [LONG // 2, 2 * LONG])
def test_row_sums(each):
    """Few rows to a place, and so many that warpgroups share it; places that get none, rows that go nowhere; in float64."""
    count, total = 5, 5 * each
    values = jax.random.normal(jax.random.key(0), (total + 3, 128), jnp.bfloat16).at[total:].set(jnp.nan)
    places = jax.random.randint(jax.random.key(1), (total,), -1, count - 1, jnp.int32)
    rows = jax.random.permutation(jax.random.key(2), total).astype(jnp.int32)
    order, begins, ends = segments(places, rows, count)
    assert np.array_equal(ends - begins, np.bincount(places + 1, minlength=count + 1)[1:]) and ends[-1] == 0
    got = sums(values, order, begins, ends, jnp.float32, gpu_interpreter())
    want = np.zeros((count, 128))
    np.add.at(want, places[places >= 0], np.asarray(values, np.float64)[rows[places >= 0]])
    # float32 sums of up to 130 numbers of order 1.
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    assert not gpu_races()


@pytest.mark.parametrize("name", [name for name, case in cases.REAL.items() if not case.packed])
def test_real_shapes_lower_for_hopper(name):
    case = cases.REAL[name]
    args = cases.abstract(case)
    assert choose("sparse_attention", "auto", *args, backend="cuda").impl == "gpu"
    text = jax.jit(cases.timed(case, gpu.run)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    # Forward; with the gradients also theirs and the sums of both pools' rows.
    assert text.count("custom_call @mosaic_gpu") == (4 if case.backward else 1)


def test_mass_lowers_for_hopper():
    args = cases.abstract(cases.REAL["training, 4096 tokens"])
    text = jax.jit(partial(gpu.run, mass=True)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"entries": ((99, 128), "float32")}, "entries are float32, allowed are bfloat16 and the packed form"),
        ({"window": ((99, 132), "uint8")}, "window are uint8, allowed is bfloat16 as entries are"),
        ({"window": ((99, 64), "bfloat16")}, "window have rows of 64 channels, allowed are 128"),
        ({"window": ((0, 128), "bfloat16")}, "window have no rows"),
        ({"q": ((0, 4, 128), "bfloat16")}, "there are no queries"),
        ({"q": ((2, 4, 96), "bfloat16")}, "96 channels"),
    ],
)
def test_what_the_kernel_refuses(change, reason):
    base = cases.abstract(Case(2, heads=4, width=128, topk=64, window=64, slots=99, rows=99, packed=False))
    names = dict(zip("q entries entry_ids window window_ids sink".split(), base, strict=True))
    names |= {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in change.items()}
    found = gpu.refusal(*names.values(), mass=True)
    assert (found is None and reason is None) or reason in found
    on_tpu = choose("sparse_attention", "auto", *names.values(), backend="tpu")
    assert on_tpu.impl == "reference"


def test_packed_rows_give_no_probabilities_on_a_gpu():
    args = cases.abstract(cases.REAL["decode, 1 request"])
    assert "bfloat16 rows" in gpu.refusal(*args, mass=True)
    assert choose("sparse_attention", "auto", *args, mass=True, backend="tpu").impl == "reference"


@WITHOUT_GPU
def test_auto_on_cpu_is_the_reference():
    args = cases.arguments(cases.FLOATS["ragged lists"])
    chex.assert_trees_all_equal(sparse_attention(*args, mass=True), jax.jit(partial(reference.run, mass=True))(*args))
    with pytest.raises(Refused, match="the backend is cpu"):
        sparse_attention(*args, impl="gpu")


def test_cost_of_the_gradients():
    """Seven products instead of two; at least each operand and result once more."""
    case = cases.REAL["training, 4096 tokens"]
    (bytes_, flops), (more, most) = cases.cost(case), cases.cost(replace(case, backward=True))
    assert flops == 4096 * 64 * 640 * 512 * 4 and most * 2 == flops * 7
    assert bytes_ == (2048 + 4096) * 1024 + 2 * 4096 * 65536 + 4096 * 640 * 4 and more > 2 * bytes_
