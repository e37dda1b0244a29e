"""What unpacks stored weights on a device, on integers: where each thread reads, and what its PTX computes."""

import operator
from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv41.quant import EXPERT_WEIGHT, dequantize_tiles
from dsv41.quant import unpack as dequantize
from kernels_pallas.grouped_matmul import narrow, unpack
from kernels_pallas.grouped_matmul.unpack import BLOCK, FP4, FP8, LINE, SHIFT, TURNS

KINDS = {"FP4": FP4, "FP8": FP8}


def halves(word):
    """Both bfloat16 of a word, as float32."""
    return [np.asarray(part, np.uint16).view(ml_dtypes.bfloat16).astype(np.float32) for part in (word & 0xFFFF, word >> 16)]


def times(a, b):
    low, high = (
        np.asarray(x * y, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint64)
        for x, y in zip(halves(a), halves(b), strict=True)
    )
    return low | high << 16


PLAIN = {
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "shr.u32": operator.rshift,
    "and.b32": operator.and_,
    "min.u32": np.minimum,
    "mul.lo.u32": lambda a, b: a * b & 0xFFFFFFFF,
    "mov.b32": lambda a: a,
    "mad.lo.u32": lambda a, b, c: a * b + c & 0xFFFFFFFF,
    "lop3.b32": lambda a, b, c, table: (a & b) | c if table == 0xEA else 1 / 0,
    "mul.rn.bf16x2": times,
}

ARITH = {"addi": operator.add, "muli": operator.mul, "xori": operator.xor, "andi": operator.and_, "shrui": operator.rshift}


def execute(ptx, args, count, effects):
    """The words that a block of PTX computes, of arrays of operands."""
    names = {f"${count + i}": arg for i, arg in enumerate(args)}
    for line in (line.strip() for line in ptx.strip(" {}").split(";")):
        if line and not line.startswith(".reg"):
            op, rest = line.split(" ", 1)
            target, *operands = rest.split(", ")
            names[target] = PLAIN[op](*(names[o] if o in names else int(o, 0) for o in operands))
    return [names[f"${i}"] for i in range(count)]


def stored(codes, seed=0):
    """Codes ``[64, 128]`` and scales of 64 rows' line, every byte among them but NaN's."""
    random = np.random.default_rng(seed)
    values = random.permuted(np.tile(np.arange(256), 32)).astype(np.uint8).reshape(64, LINE)
    if codes is FP8:
        values[(values & 0x7F) == 0x7F] = 0
    scales = random.integers(70, 190, (64 // codes.rows, codes.depth // 32)).astype(np.uint8)
    return values, scales


def exact(values, scales, codes):
    values, scales = jnp.asarray(values), jnp.asarray(scales)
    return dequantize(values, scales, EXPERT_WEIGHT) if codes is FP4 else dequantize_tiles(values, scales)


@pytest.mark.parametrize("name", KINDS)
def test_a_thread_reads_and_computes_what_its_registers_stand_for(name, monkeypatch):
    """Against the other operand's order: value of the weight at each place of the instruction's first operand."""
    codes = KINDS[name]
    monkeypatch.setattr(unpack, "arith", SimpleNamespace(**ARITH))
    monkeypatch.setattr(unpack, "constant", lambda value: value)
    monkeypatch.setattr(unpack, "asm", execute)
    values, scales = stored(codes)
    row = np.arange(64)[:, None]
    shared = np.zeros(64 * LINE, np.uint8)
    shared[row * LINE + (np.arange(LINE)[None] // 16 ^ row % 8) * 16 + np.arange(LINE)[None] % 16] = values
    want = np.asarray(unpack._in_order(exact(values, scales, codes), codes)) * 2.0**-SHIFT
    # What each thread of a row loads: two scales of FP4, one of FP8.
    scale_words = np.repeat(scales, codes.rows, axis=0).view(np.uint16 if codes is FP4 else np.uint8).astype(np.uint64)
    thread = np.arange(128)
    warp, inner, column = thread // 32, thread // 4 % 8, thread % 4
    monkeypatch.setattr(unpack, "_thread", lambda: (warp, inner, column))
    for turn in range(TURNS):
        for half in range(2):
            rows = 16 * warp + inner + 8 * half
            at = unpack.place(0, turn, half)
            # Eight neighbouring threads, whose 16 bytes each are read at once, use all banks.
            assert all(len(set(banks)) == 8 for banks in at.reshape(-1, 8) // 16 % 8)
            factor = unpack._factor(scale_words[rows, column], codes, turn)
            for index in range(4):
                own = shared[(at + 4 * index)[:, None] + np.arange(4)[None]].copy().view(np.uint32)[:, 0].astype(np.uint64)
                for register, pair in enumerate(unpack._values(own, factor, codes)):
                    tile = index * (codes.word // 2) + register
                    for side, got in enumerate(halves(pair)):
                        np.testing.assert_array_equal(got, want[rows, turn * codes.turn + 8 * tile + 2 * column + side])


@pytest.mark.parametrize("name", KINDS)
def test_scales_beyond_the_range_saturate(name, monkeypatch):
    """A factor stays a positive finite power of two, whatever the byte."""
    codes = KINDS[name]
    monkeypatch.setattr(unpack, "asm", execute)
    every = np.arange(256, dtype=np.uint64)
    factor = halves(unpack._factor(every, codes, 0))
    for half in factor:
        assert (half > 0).all() and np.isfinite(half).all()
        inside = (every > 60) & (every < 190)
        np.testing.assert_array_equal(half[inside], 2.0 ** (every[inside].astype(float) - 127 + codes.bias - SHIFT))


@pytest.mark.parametrize("rows", [8, 16])
def test_products_of_a_warp_are_those_of_its_registers(rows, monkeypatch):
    """What each lane loads of the rows and which registers meet, with the two instructions as the PTX manual has them."""
    monkeypatch.setattr(narrow, "arith", SimpleNamespace(**ARITH))
    monkeypatch.setattr(narrow, "constant", lambda value: value)
    lane, random = np.arange(32), np.random.default_rng(0)
    group, column = lane // 4, lane % 4
    depth = 2 * BLOCK
    a, x = (random.integers(-8, 8, (n, depth)).astype(np.float64) for n in (16, rows))
    blocks = []
    for block in np.split(x, 2, axis=1):
        # A row's 16-byte pieces are swizzled; a piece is 8 values.
        row, piece = np.arange(rows)[:, None], np.arange(8)[None]
        shared = np.zeros((rows * 8, 8))
        shared[row * 8 + (piece ^ row % 8)] = block.reshape(rows, 8, 8)
        words = []
        for first in range(0, rows, 8):
            for half in range(2):
                at = narrow.place(0, lane, first, half)
                for lanes in np.split(at, 4):
                    # A matrix's rows lie in all banks; word c of row g goes to lane 4 g + c.
                    assert len(set(lanes // 16 % 8)) == 8
                    words.append(shared[lanes // 16].reshape(8, 4, 2)[group, column])
        blocks.append(words)

    def weights(eight, half):
        return a[group + 8 * half][lane[:, None], 8 * eight + 2 * column[:, None] + np.arange(2)]

    def instruction(acc, a, b):
        first, second = np.zeros((16, 16)), np.zeros((16, 8))
        for word in range(4):
            for side in range(2):
                first[group + word % 2 * 8, word // 2 * 8 + 2 * column + side] = a[word][:, side]
        for word in range(2):
            for side in range(2):
                second[8 * word + 2 * column + side, group] = b[word][:, side]
        out = first @ second
        return [acc[i] + out[group + i // 2 * 8, 2 * column + i % 2] for i in range(4)]

    got = narrow.products([[np.zeros(32)] * 4 for _ in range(rows // 8)], weights, blocks, instruction)
    for tile, values in enumerate(got):
        for i, value in enumerate(values):
            np.testing.assert_array_equal(value, (a @ x.T)[group + i // 2 * 8, 8 * tile + 2 * column + i % 2])
