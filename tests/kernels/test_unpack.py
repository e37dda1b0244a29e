"""What the unpack warpgroup does on a device, on integers: where each thread reads and writes, and what its PTX computes."""

import re
from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv41.quant import MAIN_KV, WINDOW_KV, row_values
from kernels_pallas.sparse_attention import producer, unpack
from kernels_pallas.sparse_attention.unpack import KEYS, Geometry, Lane, padded_width

WIDTHS = (64, 128, 256, 384, 512)


class Threads:
    """A warpgroup in which one thread at a time is looked at."""

    now = 0

    def __init__(self, monkeypatch):
        names = {"addi": "add", "muli": "mul", "andi": "and_", "xori": "xor", "shrui": "rshift"}
        operations = {name: getattr(__import__("operator"), plain) for name, plain in names.items()}
        quotients = {"divui": lambda a, b: a // b, "remui": lambda a, b: a % b}
        monkeypatch.setattr(unpack, "arith", SimpleNamespace(**operations, **quotients))
        monkeypatch.setattr(unpack, "_c", lambda value: value)
        monkeypatch.setattr(unpack, "own_thread", lambda: self.now)

    def lanes(self, geometry, rows):
        for self.now in range(128):
            yield Lane(geometry, rows)


def crowded(addresses):
    """The most of eight neighbouring threads' 16-byte accesses that share a bank group."""
    groups = [[a // 16 % 8 for a in addresses[i : i + 8] if a is not None] for i in range(0, 128, 8)]
    return max(max((group.count(g) for g in group), default=0) for group in groups)


@pytest.mark.parametrize("selected", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_piece_of_a_tile_is_written_once(width, selected, monkeypatch):
    """Each where the 8 x 64 tiles and their 128-byte swizzle have it, without bank conflicts."""
    geometry = Geometry(width, padded_width(width))
    kind = next(kind for kind in producer.kinds(width) if kind.selected == selected)
    lanes, half, written = list(Threads(monkeypatch).lanes(geometry, kind.rows)), geometry.padded // 2, set()
    for turn in range(kind.turns):
        for index in range(lanes[0].per_thread):
            for piece in range(4):
                addresses = []
                for lane in lanes:
                    chunk, row = lane.chunk(index), 16 * lane.warp + kind.rows * turn + lane.row
                    if chunk >= geometry.chunks:
                        addresses.append(None)
                        continue
                    odd = 4 * (lane.step * index % 2)
                    place = lane.pieces(0, kind.rows * turn % 8)[odd + piece] + lane.offset(turn, index)
                    side, column = divmod(32 * chunk + 8 * piece, half)
                    tile = (row // 8 * (half // 64) + column // 64) * 1024
                    swizzled = row % 8 * 128 + (column % 64 // 8 ^ row % 8) * 16
                    assert place == side * KEYS * half * 2 + tile + swizzled
                    written.add((row, chunk, piece))
                    addresses.append(place)
                assert crowded(addresses) == 1
            size = 16 if selected else 32
            chunks = [(lane.row, lane.chunk(index)) for lane in lanes]
            reads = [row * kind.pitch + chunk * size if chunk < geometry.chunks else None for row, chunk in chunks]
            assert crowded(reads) <= (1 if selected else 2)
    assert len(written) == KEYS * geometry.chunks * 4


def permuted(a, b, selector):
    octets = [(a >> 8 * i) & 255 for i in range(4)] + [(b >> 8 * i) & 255 for i in range(4)]
    return sum(octets[(selector >> 4 * i) & 7] << 8 * i for i in range(4))


def as_floats(word, dtype):
    return np.array([word & 0xFFFF, word >> 16], np.uint16).view(dtype).astype(np.float32)


def as_word(values, dtype):
    low, high = np.asarray(values, np.float32).astype(dtype).view(np.uint16)
    return int(low) | int(high) << 16


PAIRS = {"f16x2": np.float16, "bf16x2": ml_dtypes.bfloat16}


def executed(ptx, inputs):
    """The words that a block of PTX stores, by address; ``inputs`` are its operands."""
    names = {f"${i}": value for i, value in enumerate(inputs)}
    stored = {}

    def value(word):
        return names[word] if word in names else int(word, 0)

    for line in (line.strip() for line in ptx.strip(" {}").split(";")):
        if not line or line.startswith(".reg"):
            continue
        op, rest = line.split(" ", 1)
        if op.startswith("st.shared"):
            [(base, offset, words)] = re.findall(r"\[(\$\d+) \+ (\d+)\], \{(.*)", rest.rstrip("}"))
            at = names[base] + int(offset)
            stored |= {at + 4 * i: names[word] for i, word in enumerate(words.split(", "))}
            continue
        if rest.startswith("{"):  # a word to its halves
            [(low, high, source)] = re.findall(r"\{(\w+), (\w+)\}, (\S+)", rest)
            names[low], names[high] = value(source) & 0xFFFF, value(source) >> 16
            continue
        target, *operands = rest.split(", ")
        a = [value(operand) for operand in operands]
        kind = op.split(".")[-1]
        if op == "cvt.u16.u32":
            names[target] = a[0] & 0xFFFF
        elif op == "cvt.rn.f16x2.e4m3x2":
            codes = np.array([a[0] & 255, a[0] >> 8], np.uint8).view(ml_dtypes.float8_e4m3fn)
            names[target] = as_word(codes.astype(np.float32), np.float16)
        elif op == "cvt.f32.f16":
            names[target] = int(np.uint16(a[0]).view(np.float16).astype(np.float32).view(np.uint32))
        elif op in ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"):
            high, low = (np.uint32(word).view(np.float32) for word in a)
            names[target] = as_word([low, high], PAIRS[op.split(".")[2]])
        elif op.startswith("mul.rn"):
            names[target] = as_word(as_floats(a[0], PAIRS[kind]) * as_floats(a[1], PAIRS[kind]), PAIRS[kind])
        else:
            plain = {
                "and": lambda x, y: x & y,
                "or": lambda x, y: x | y,
                "shr": lambda x, y: x >> y,
                "shl": lambda x, y: x << y & 0xFFFFFFFF,
                "mov": lambda x: x,
                "prmt": permuted,
            }
            names[target] = plain[op.split(".")[0]](*a)
    return stored


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("fmt", [MAIN_KV, WINDOW_KV])
def test_every_code_is_exact(fmt, bf16, monkeypatch):
    """Chunks of 32 channels, all codes and scales among them (of window rows those that fp16 holds)."""
    selected = fmt is MAIN_KV
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (256, 16 if selected else 32)).astype(np.uint8)
    codes[:, 0] = np.arange(256)
    if selected:
        scales = np.stack([np.arange(256) & 0x7F, (np.arange(256) * 37) & 0x7F], 1).astype(np.uint8)
        scales[scales == 0x7F] = 0x7E
    else:
        codes[(codes & 0x7F) == 0x7F] = 0
        scales = (np.arange(256)[:, None] % 19 + 115).astype(np.uint8)
    dtype = ml_dtypes.bfloat16 if bf16 else np.float16
    want = np.asarray(row_values(jnp.asarray(np.concatenate([codes, scales], 1)), fmt, jnp.float32))
    blocks = []
    monkeypatch.setattr(unpack, "_asm", lambda ptx, args, results: blocks.append((ptx, args)))
    for code, scale in zip(codes, scales, strict=True):
        words = [int(w) for w in code.view(np.uint32)]
        last = int(scale[0]) | int(scale[-1]) << 8 if selected else int(scale[0])
        (unpack.store_e2m1 if selected else unpack.store_e4m3)(words, last, [0, 16, 32, 48], 64, bf16)
    for (ptx, args), row in zip(blocks, want, strict=True):
        stored = executed(ptx, args)
        got = np.array([stored[64 + 4 * i] for i in range(16)], np.uint32).view(dtype).astype(np.float32)
        np.testing.assert_array_equal(got, row)
