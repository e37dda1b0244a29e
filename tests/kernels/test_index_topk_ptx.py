"""What `index_topk` does on a device, on integers: its blocks of PTX run in numpy, all threads of a CTA in step."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.quant import INDEX_KEY, row_values
from kernels_pallas.index_topk import keys, program
from kernels_pallas.index_topk.keys import BLOCK, HEADS, ROW, TILE, WARP, WARP_BYTES, WIDTH
from tests.kernels.ptx import Cta


def best(scores, k):
    """Places of the k best finite scores in ascending order, the lowest of equal ones; -0 is below 0, as for `lax.top_k`."""
    bits = scores.view(np.uint32)
    order = np.argsort(np.where(bits >> 31, bits, bits ^ 0x7FFFFFFF), kind="stable")
    return np.sort(order[scores[order] > -np.inf][:k])


def pick(scores, k, threads, each, names, count=None):
    """Checks one slice: the ids that come out, and the scores with them."""
    length, count = threads * each, len(scores) if count is None else count
    assert len(scores) <= length
    called = {"places": np.arange(length) + 1000, "ids": 3 * np.arange(length) + 5, "blocks": np.arange(length)[::-1].copy()}[
        names
    ]
    called = called.astype(np.int32)
    memory = np.full(2 * length + 2 * k + 8, 7, np.uint32)
    memory[: len(scores)] = scores.view(np.uint32)
    memory[length : 2 * length] = called.view(np.uint32)
    out = 2 * length
    shared = np.random.default_rng(0).integers(0, 1 << 32, program.scratch_bytes(k) // 4 + 16, dtype=np.uint32)
    source = 1000 if names == "places" else 4 * length
    operands = [0, count, 32, np.arange(threads), 4 * out, source, 4 * (out + k)]
    Cta(threads, memory, shared).run(program.program(threads, each, k, names, True), operands)
    chosen = best(scores[: max(count, 0)], k)
    want = np.full(k, -1)
    want[: len(chosen)] = 8 * called[chosen // 8] + chosen % 8 if names == "blocks" else called[chosen]
    np.testing.assert_array_equal(memory[out : out + k].view(np.int32), want)
    values = np.full(k, -np.inf, np.float32)
    values[: len(chosen)] = scores[chosen]
    np.testing.assert_array_equal(memory[out + k : out + 2 * k], values.view(np.uint32))
    np.testing.assert_array_equal(memory[out + 2 * k :], 7)


KINDS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "few values": lambda rng, n: rng.integers(-2, 3, n),
    "all equal": lambda rng, n: np.zeros(n),
    "both zeros": lambda rng, n: np.where(rng.random(n) < 0.5, 0.0, -0.0),
    "mostly nothing": lambda rng, n: np.where(rng.random(n) < 0.98, -np.inf, rng.standard_normal(n)),
    "neighbours": lambda rng, n: 1 + rng.integers(0, 40, n) * 2.0**-23,
    "rising": lambda rng, n: np.arange(n),
    "falling": lambda rng, n: -np.arange(n),
    "all exponents": lambda rng, n: np.ldexp(rng.standard_normal(n), rng.integers(-140, 120, n)),
    "with the best of all": lambda rng, n: np.where(rng.random(n) < 0.1, np.inf, rng.standard_normal(n)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_scores(kind):
    """Slices of a small and of a real CTA, full and not, with all three ways of naming."""
    rng = np.random.default_rng(1)
    for threads, each, k, names in (
        (64, 4, 64, "places"),
        (128, 8, 32, "ids"),
        (512, 16, 512, "blocks"),
        (1024, 16, 512, "places"),
    ):
        scores = KINDS[kind](rng, threads * each).astype(np.float32)
        pick(scores, k, threads, each, names)
        pick(scores, k, threads, each, names, count=threads * each // 2 + 3)


@settings(max_examples=60)
@given(st.data())
def test_ties_anywhere(data):
    """Any mixture of a few values, more or fewer than are wanted, and any length."""
    few = st.sampled_from([-np.inf, -1.5, -0.0, 0.0, 1.0, np.float32(1.0000001), 3.0])
    size = data.draw(st.integers(1, 256))
    scores = np.array(data.draw(st.lists(few, min_size=size, max_size=size)), np.float32)
    names = data.draw(st.sampled_from(["places", "ids", "blocks"]))
    pick(scores, data.draw(st.sampled_from([4, 32, 100])), 64, data.draw(st.sampled_from([4, 8])) if size > 128 else 4, names)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("threads", "each", "number"), [(64, 8, 50), (128, 16, 256)])
def test_scores_fetched_by_block(kind, threads, each, number):
    """Entries of ascending blocks, fewer than the CTA could take, -1 behind them."""
    rng, k = np.random.default_rng(3), 40
    scores = KINDS[kind](rng, 4096).astype(np.float32)
    blocks = np.sort(rng.choice(512, number, replace=False)).astype(np.int32)
    blocks[number - 3 :] = -1
    memory = np.full(4096 + number + 2 * k + 8, 7, np.uint32)
    memory[:4096], memory[4096 : 4096 + number] = scores.view(np.uint32), blocks.view(np.uint32)
    shared = rng.integers(0, 1 << 32, program.scratch_bytes(k) // 4 + 16, dtype=np.uint32)
    out = 4096 + number
    operands = [0, 8 * number, 32, np.arange(threads), 4 * out, 4 * 4096, 4 * (out + k)]
    Cta(threads, memory, shared).run(program.program(threads, each, k, "fetched", False), operands)
    there = np.repeat(np.isin(np.arange(512), blocks), 8)
    chosen = best(np.where(there, scores, -np.inf).astype(np.float32), k)
    want = np.pad(chosen, (0, k - len(chosen)), constant_values=-1)
    np.testing.assert_array_equal(memory[out : out + k].view(np.int32), want)
    np.testing.assert_array_equal(memory[out + k :], 7)


@pytest.mark.parametrize("count", [0, -5, 1, 3, 255, 256])
def test_counts_at_the_edges(count):
    pick(np.random.default_rng(2).standard_normal(256).astype(np.float32), 32, 64, 4, "ids", count=count)


PLACES = {"rows": 0, "starts": 16000, "q": 16384, "weights": 32768, "out": 33000, "best": 34000, "pool": 35000}  # words
QUERY, SIDE, SPANS, RING, BARRIERS = 1024, 36864, 37888, 38912, 43520  # bytes of shared memory


def operand(words):
    """The product's first operand from the registers of its 128 threads."""
    a = np.zeros((TILE, WIDTH), np.float16)
    thread = np.arange(128)
    for column in range(16):
        for half in range(2):
            pairs = np.ascontiguousarray(words[2 * column + half]).view(np.float16).reshape(-1, 2)
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * half
            for side in range(2):
                a[row, 8 * column + 2 * (thread % 4) + side] = pairs[:, side]
    return a


def query_operand(shared, queries):
    """The second operand as the tensor cores read it: rows of 64 numbers, 16-byte pieces swizzled over eight rows."""
    n, k = np.arange(queries * HEADS)[:, None], np.arange(WIDTH)[None]
    at = (n // 8 * 2 + k // 64) * 1024 + n % 8 * 128 + ((k % 64 // 8) ^ (n % 8)) * 16 + k % 8 * 2
    return shared.view(np.float16)[(QUERY + at) // 2]


@pytest.mark.parametrize(
    ("queries", "pool", "wide", "first", "count", "size", "scales"),
    [
        (1, False, False, 0, 128, 128, (115, 121)),
        (1, False, True, 3, 50, 72, (115, 121)),
        (1, True, False, 0, 300, 128, (115, 121)),
        (1, True, True, 50, 90, 128, (115, 121)),
        (1, False, False, 0, 0, 72, (115, 121)),
        (1, False, False, 0, 72, 72, (2, 14)),
        (1, False, False, 0, 72, 72, (100, 123)),
        (2, False, True, 5, 60, 72, (115, 121)),
        (4, False, False, 3, 100, 128, (115, 121)),
        (4, False, True, 0, 60, 72, (115, 121)),
        (1, False, False, 3, 60, 72, "values"),
        (1, True, False, 50, 90, 128, "values"),
        (4, False, False, 0, 128, 128, "values"),
    ],
)
def test_tiles_of_keys(queries, pool, wide, first, count, size, scales):
    """Copy, unpacking, the queries' side and the last step of tiles, with numpy for the product; of four queries the third is not
    there. float32 sums of 32 heads: 2**-24 each, of the largest score; scales within 2**23 of each other lose nothing before, nor
    do values within 2**28, whose scores are compared over the largest of their own key."""
    rng = np.random.default_rng(3)
    if scales == "values":
        rows = rng.standard_normal((200, WIDTH)) * np.exp(20 * rng.standard_normal((200, 1)))
        rows = jnp.asarray(rows, jnp.bfloat16).at[7].set(0)
    else:
        rows = rng.integers(0, 256, (200, ROW)).astype(np.uint8)
        rows[:, WIDTH // 2 :] = rng.integers(*scales, (200, 4))
    q = rng.standard_normal((queries, HEADS, WIDTH)) * np.exp(2 * rng.standard_normal((queries, HEADS, 1)))
    q[:, 5] = 0
    weights = rng.standard_normal((queries, HEADS))
    q, weights = (np.array(jnp.asarray(a, jnp.bfloat16).astype(jnp.float32)) for a in (q, weights))
    if pool:
        starts = 8 * rng.integers(0, 24, size // BLOCK).astype(np.int32)
        starts[3] = -1
        numbers = np.where(starts < 0, -1, starts // 8 + 5).astype(np.int32)
    else:
        starts, numbers = np.array([40], np.int32), None
    memory = np.full(40000, 7, np.uint32)

    def put(name, array, narrow=False):
        words = np.ascontiguousarray(array).reshape(-1).view(np.uint32)
        words = (words >> 16).astype(np.uint16).view(np.uint32) if narrow else words
        memory[PLACES[name] : PLACES[name] + len(words)] = words

    put("rows", np.asarray(rows))
    put("starts", starts)
    put("q", q, not wide)
    put("weights", weights, not wide)
    if pool:
        put("pool", numbers)
    at = {name: 4 * place for name, place in PLACES.items()}
    shared = np.full(11000, 0x7FC07FC0, np.uint32)  # NaN
    thread = np.arange(128)
    lane, warp = thread % 32, thread // 32
    cta = Cta(128, memory, shared)
    each = 4 if wide else 2
    spans = [(first + 7 * j, max(count - 20 * j, 0)) for j in range(queries)]
    for j, span in enumerate(spans):
        operands = [at["q"] + each * j * HEADS * WIDTH, at["weights"] + each * j * HEADS, QUERY + 2 * j * HEADS * WIDTH]
        operands += [SIDE + 4 * j * HEADS, thread, SPANS + 16 * j, *span, -1 if j == 2 else j]
        cta.run(keys.prepare_query(wide, wide), operands)
    granule, pitch, pin = BLOCK if pool else size, TILE * -(-size // TILE), wide
    for tile in range(pitch // TILE):
        place = tile * TILE + warp * WARP
        ring, barrier = RING + warp * WARP_BYTES, BARRIERS + warp * 8
        if scales == "values":
            cta.run(keys.load(size, granule), [np.zeros(128)] * 34 + [at["rows"], at["starts"], place, lane])
        else:
            cta.run(keys.start_copy(size, granule), [at["rows"], at["starts"], ring, barrier, place, lane])
            cta.run(keys.wait(), [barrier, 0])
            cta.run(keys.unpack(), [np.zeros(128)] * 34 + [ring, lane])
        words = [cta.registers[f"%{i}"].astype(np.uint32) for i in range(34)]
        b = query_operand(shared, queries).astype(np.float64)
        with np.errstate(invalid="ignore"):
            product = (operand(words).astype(np.float64) @ b.T).astype(np.float32)
        registers = []
        for column in range(4 * queries):
            for half in range(2):
                for side in range(2):
                    at_row, at_column = 16 * warp + lane // 4 + 8 * half, 8 * column + 2 * (lane % 4) + side
                    registers.append(product[at_row, at_column].view(np.uint32))
        operands = [*registers, words[32], words[33], SIDE, SPANS, place, lane, at["out"], at["best"], at["pool"]]
        with np.errstate(invalid="ignore"):
            cta.run(keys.finish(pitch, pool, queries, pin), operands)
    entry = np.arange(size)
    start = starts[entry // granule]
    name = entry if numbers is None else np.where(start < 0, -1, numbers[entry // 8] * 8 + entry % 8)
    values = np.asarray(row_values(jnp.asarray(rows), INDEX_KEY, jnp.float32), np.float64)[np.maximum(start, 0) + entry % granule]
    for j, (begin, number) in enumerate(spans):
        got = memory[PLACES["out"] + j * pitch :].view(np.float32)[:size]
        if j == 2:
            assert np.all(got.view(np.uint32) == 7)
            continue
        want = np.sum(np.maximum(values @ q[j].astype(np.float64).T, 0) * weights[j], axis=1)
        seen = (name >= begin) & (name < begin + number)
        np.testing.assert_array_equal(np.isfinite(got), seen)
        assert np.all(got[~seen] == -np.inf)
        if seen.any():
            # Keys of values are of very different sizes.
            size_of = np.abs(values).max(axis=1) if scales == "values" else np.ones(size)
            size_of = np.where(size_of > 0, size_of, 1)
            got_each, want_each = got[seen] / size_of[seen], want[seen] / size_of[seen]
            np.testing.assert_allclose(got_each, want_each, rtol=0, atol=5e-7 * np.abs(want_each).max())
        if not pool:
            blocks = got.reshape(-1, BLOCK).max(axis=1)
            if number and pin:
                blocks[(begin + number - 1) // BLOCK] = np.inf
            best = memory[PLACES["best"] + j * pitch // BLOCK :].view(np.float32)
            np.testing.assert_array_equal(best[: size // BLOCK], blocks)
