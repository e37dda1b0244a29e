"""`sparse_attention`: reference against float64, kernel against reference, on every small case; real shapes are lowered."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.quant import MAIN_KV, WINDOW_KV, row_values
from kernels_pallas.interpret import gpu_interpreter, gpu_races, tpu_interpreter, tpu_races
from kernels_pallas.registry import Refused, choose
from kernels_pallas.sparse_attention import cases, gpu, reference, tpu
from kernels_pallas.sparse_attention.api import merge, sparse_attention
from kernels_pallas.sparse_attention.cases import Case
from tests.kernels import WITHOUT_GPU

# The TPU kernel takes no 64 channels, and most small cases have one tile of each list.
TPU_CASES = {
    **{name: case for name, case in cases.SMALL.items() if tpu.refusal(*cases.abstract(case)) is None},
    "window only": Case(2, heads=4, width=128, topk=0, window=32, slots=1, rows=60, dtype="float32", empty=0.2),
    "several tiles of entries only": Case(2, heads=4, width=256, topk=260, window=0, slots=400, rows=1, empty=0.2),
    "several tiles of both": Case(1, heads=4, width=384, topk=130, window=140, slots=300, rows=200, dtype="float32", empty=0.1),
}

PACKED = [name for name, case in cases.REAL.items() if case.packed]


def exact(args: tuple) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp in float64, query by query."""
    q, entries, entry_ids, window, window_ids, sink = args
    lists = []
    for stored, ids, fmt in ((entries, entry_ids, MAIN_KV), (window, window_ids, WINDOW_KV)):
        lists.append((np.asarray(row_values(stored, fmt, jnp.float32), np.float64), np.asarray(ids)))
    outputs = np.zeros(q.shape)
    lse = np.full(q.shape[:2], -np.inf)
    for n, query in enumerate(np.asarray(q, np.float64)):
        keys = np.concatenate([values[ids[n][ids[n] >= 0]] for values, ids in lists])
        if not len(keys):
            continue
        scores = query @ keys.T * q.shape[-1] ** -0.5
        top = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=1)
        lse[n] = top[:, 0] + np.log(total)
        below = total if sink is None else total + np.exp(np.asarray(sink, np.float64) - top[:, 0])
        outputs[n] = weights / below[:, None] @ keys
    return outputs, lse


def check(got: tuple, args: tuple, tolerance: float) -> None:
    """Against float64, relative to the largest output, and in nats."""
    want, want_lse = exact(args)
    largest = max(np.abs(want).max(), 1e-30)
    np.testing.assert_allclose(np.asarray(got[0], np.float64) / largest, want / largest, rtol=0, atol=tolerance)
    np.testing.assert_allclose(np.asarray(got[1]), want_lse, rtol=0, atol=tolerance)
    assert got[0].dtype == args[0].dtype and got[0].shape == args[0].shape


def tolerance(case: Case) -> float:
    """bf16 output: half a step of 2**-8, 3.9e-3 of the largest; float32 queries round to fp16, 2**-12 of scores up to 10."""
    return 6e-3 if case.dtype == "bfloat16" else 3e-3


@pytest.mark.parametrize("name", cases.SMALL)
def test_reference(name):
    case = cases.SMALL[name]
    args = cases.arguments(case, poison=True)
    check(reference.run(*args), args, 6e-3 if case.dtype == "bfloat16" else 5e-6)


@pytest.mark.parametrize("name", cases.SMALL)
def test_gpu_kernel_interpreted(name):
    """Rows that no id names hold NaN; the interpreter watches for races between the warpgroups."""
    case = cases.SMALL[name]
    args = cases.arguments(case, poison=True)
    got = jax.jit(partial(gpu.run, tiling=gpu.Tiling(ctas=2), interpret=gpu_interpreter()))(*args)
    check(jax.block_until_ready(got), args, tolerance(case))
    assert not gpu_races()


@pytest.mark.parametrize("name", TPU_CASES)
def test_tpu_kernel_interpreted(name):
    """Rows that no id names hold NaN; the interpreter watches for races between copies and arithmetic. float32 queries
    leave nothing to round but sums, so they also show that every stored value is read exactly."""
    case = TPU_CASES[name]
    args = cases.arguments(case, poison=True)
    got = jax.jit(partial(tpu.run, interpret=tpu_interpreter()))(*args)
    check(jax.block_until_ready(got), args, 6e-3 if case.dtype == "bfloat16" else 5e-6)
    assert not tpu_races()


def test_tpu_tiles_without_keys():
    """A tile that names nothing, before and after those that do, and a query that names nothing between others."""
    case = Case(3, heads=4, width=128, topk=260, window=16, slots=300, rows=40, dtype="float32")
    q, entries, entry_ids, window, window_ids, sink = cases.arguments(case)
    entry_ids = entry_ids.at[0, :250].set(-1).at[1].set(-1).at[2, 9:].set(-1)
    window_ids = window_ids.at[1:].set(-1)
    args = q, entries, entry_ids, window, window_ids, sink
    check(jax.jit(partial(tpu.run, interpret=tpu_interpreter()))(*args), args, 5e-6)
    assert not tpu_races()


def test_tpu_reads_every_code_exactly():
    """All E2M1 and E4M3 codes, NaN's two aside: a query of one key returns its row."""
    codes = jnp.arange(256, dtype=jnp.int32).reshape(2, 128).astype(jnp.uint8)
    codes = jnp.where((codes & 0x7F) == 0x7F, 0, codes)
    window = jnp.concatenate([codes, jnp.array([[127, 100, 140, 1]] * 2, jnp.uint8)], axis=1)
    scales = jnp.arange(120, dtype=jnp.int32).reshape(15, 8).astype(jnp.uint8)  # subnormal scales too
    nibbles = jnp.tile(jnp.arange(64, dtype=jnp.int32).astype(jnp.uint8) * 37, (15, 1))
    entries = jnp.concatenate([nibbles, scales], axis=1)
    ids = jnp.full((17, 2), -1).at[jnp.arange(17), jnp.r_[jnp.zeros(15, int), 1, 1]].set(jnp.r_[jnp.arange(15), 0, 1])
    q = jnp.zeros((17, 8, 128), jnp.float32)
    got, _ = tpu.run(q, entries, ids[:, :1], window, ids[:, 1:], None, interpret=tpu_interpreter())
    want = jnp.concatenate([row_values(entries, MAIN_KV, jnp.float32), row_values(window, WINDOW_KV, jnp.float32)])
    chex.assert_trees_all_equal(got, jnp.broadcast_to(want[:, None], got.shape))


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_gpu_parts_merge(parts):
    """However many CTAs share a query, and whether or not its tiles divide by them."""
    case = Case(2, heads=4, width=128, topk=192, window=100, slots=250, rows=110, empty=0.2)
    args = cases.arguments(case)
    got = gpu.run(*args, tiling=gpu.Tiling(parts=parts), interpret=gpu_interpreter())
    check(got, args, 6e-3)


def test_merge_is_the_whole():
    """Parts over disjoint keys, one of them empty for some queries."""
    case = Case(3, heads=4, width=64, topk=24, window=16, slots=64, rows=32, dtype="float32", empty=0.5)
    q, entries, entry_ids, window, window_ids, sink = args = cases.arguments(case)
    none = jnp.full_like(window_ids, -1)
    lists = [
        (entry_ids[:, :8], none),
        (entry_ids[:, 8:], none),
        (jnp.full_like(entry_ids, -1).at[1:].set(entry_ids[1:] * 0 - 1), window_ids.at[0].set(-1)),
    ]
    whole_ids = window_ids.at[0].set(-1)
    parts = [sparse_attention(q, entries, e, window, w, None, impl="reference") for e, w in lists]
    out, lse = merge(jnp.stack([p[0] for p in parts]), jnp.stack([p[1] for p in parts]), sink)
    check((out, lse), (*args[:4], whole_ids, sink), 5e-6)


def test_ids_in_any_order_give_the_same():
    """The sum's order differs, so not bit for bit: a few float32 roundings."""
    q, entries, ids, window, window_ids, sink = cases.arguments(cases.SMALL["toy"])
    got = reference.run(q, entries, ids[:, ::-1], window, window_ids[:, ::-1], sink)
    chex.assert_trees_all_close(got, reference.run(q, entries, ids, window, window_ids, sink), atol=2e-5)


@pytest.mark.parametrize("name", PACKED)
def test_real_shapes_lower_for_hopper(name):
    lowered = jax.jit(gpu.run).trace(*cases.abstract(cases.REAL[name])).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("name", PACKED)
def test_real_shapes_lower_for_tpu(name):
    args = cases.abstract(cases.REAL[name])
    assert choose("sparse_attention", "auto", *args, backend="tpu").impl == "tpu"
    lowered = jax.jit(tpu.run).trace(*args).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"width": 96}, "96 channels"),
        ({"width": 1024}, "1024 channels"),
        ({"dtype": "float16"}, "q is float16"),
        ({"topk": 0, "window": 0}, "no keys"),
    ],
)
def test_what_the_kernel_refuses(change, reason):
    case = Case(**{"queries": 2, "heads": 4, "width": 128, "topk": 64, "window": 64, "slots": 99, "rows": 99, **change})
    assert reason in gpu.refusal(*cases.abstract(case))
    choice = choose("sparse_attention", "auto", *cases.abstract(case), backend="gpu")
    assert choice.impl == "reference" and reason in choice.refusals["gpu"]
    with pytest.raises(Refused, match=reason):
        choose("sparse_attention", "gpu", *cases.abstract(case), backend="gpu")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"width": 64}, "64 channels"),
        ({"width": 640}, "640 channels"),
        ({"dtype": "float16"}, "q is float16"),
        ({"heads": 257}, "257 heads"),
        ({"queries": 0}, "no queries"),
        ({"topk": 0, "window": 0}, "no keys"),
    ],
)
def test_what_the_tpu_kernel_refuses(change, reason):
    case = Case(**{"queries": 2, "heads": 4, "width": 128, "topk": 64, "window": 64, "slots": 99, "rows": 99, **change})
    choice = choose("sparse_attention", "auto", *cases.abstract(case), backend="tpu")
    assert choice.impl == "reference" and reason in choice.refusals["tpu"]
    with pytest.raises(Refused, match=reason):
        choose("sparse_attention", "tpu", *cases.abstract(case), backend="tpu")


def test_float_rows_are_refused_by_name():
    q, _, ids, window, window_ids, sink = cases.abstract(cases.SMALL["no sink"])
    values = jax.ShapeDtypeStruct((77, 128), jnp.float32)
    assert tpu.refusal(q, values, ids, window, window_ids, sink) == "entries are float32, allowed is the packed form"
    assert (
        gpu.refusal(q, values, ids, window, window_ids, sink) == "entries are float32, allowed are bfloat16 and the packed form"
    )


@WITHOUT_GPU
def test_auto_on_cpu_is_the_reference():
    args = cases.arguments(cases.SMALL["toy"])
    assert choose("sparse_attention", "auto", *args).impl == "reference"
    chex.assert_trees_all_equal(sparse_attention(*args), jax.jit(reference.run)(*args))
    with pytest.raises(Refused, match="the backend is cpu"):
        sparse_attention(*args, impl="gpu")


def test_on_a_gpu_the_kernel_runs_every_real_case():
    for case in cases.REAL.values():
        assert choose("sparse_attention", "auto", *cases.abstract(case), backend="cuda").impl == "gpu"


def test_cost_counts_shared_rows_once():
    """348,160 bytes and 83.9 MFLOP of performance notes' query, plus the window's ids; a prefill reads its pool once."""
    bytes_, flops = cases.cost(Case(1))
    assert bytes_ == 512 * 288 + 128 * 528 + 2 * 65536 + 4 * 640
    assert flops == 2 * 64 * 640 * 1024
    many, _ = cases.cost(Case(4096))
    assert many == 65536 * 288 + 16384 * 528 + 4096 * (2 * 65536 + 4 * 640)
