"""The safetensors reader and writer agree with the package, and no damaged file gives anything but one clear line."""

import json
import os
import re

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.errors import UserError
from dsv41.hf.safetensors import DTYPES, MAX_HEADER_BYTES, Entry, open_safetensors, write_safetensors


def file_bytes(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(dtype="U8", shape=(2,), offsets=(0, 2)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def patterns(dtype, shape, seed=0):
    """Any bytes of ``dtype``, NaN and subnormal values among them."""
    count = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2 if dtype == np.bool_ else 256, count, np.uint8)
    return data.view(dtype).reshape(shape)


def all_dtypes():
    return {f"t.{name}": patterns(dtype, (3, 4), n) for n, (name, dtype) in enumerate(DTYPES.items())}


def package_bytes(tensors, metadata=None):
    specs = {
        name: safetensors.TensorSpec(dtype=a.dtype.name, shape=list(a.shape), data_ptr=a.ctypes.data, data_len=a.nbytes)
        for name, a in tensors.items()
    }
    return bytes(safetensors.serialize(specs, metadata))


def same(a, b):
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def opens_or_fails(path, data):
    """Reads every tensor, or gives the one line about ``path`` that failing gives."""
    path.write_bytes(data)
    try:
        file = open_safetensors(path)
        for name, entry in file.entries.items():
            array = file.array(name)
            assert array.nbytes == len(array.tobytes()) == entry.stop - entry.start <= len(data)
        return ""
    except UserError as error:
        message = str(error)
    assert message.startswith(f"{path}: ")
    assert len(message.splitlines()) == 1
    assert len(message) < 1000
    return message.removeprefix(f"{path}: ")


def raises(message, function, *arguments):
    with pytest.raises(UserError, match=message):
        function(*arguments)


SHAPES = [(), (1,), (0,), (0, 7), (2, 0, 3), (5,), (3, 1, 2)]


def test_both_directions_with_the_package(tmp_path):
    path = tmp_path / "a.safetensors"
    tensors = all_dtypes() | {f"s{n}": patterns(np.dtype("<f4"), s) for n, s in enumerate(SHAPES)}
    tensors |= {'quote" \\ \n \x7f \u00e9 \U0001f600 \u2028': np.arange(3, dtype=np.int64), "": np.ones(1, np.uint8)}
    write_safetensors(path, tensors, {"b": "2", "a": "1"})
    theirs = dict(safetensors.deserialize(path.read_bytes()))
    assert {name: bytes(t["data"]) for name, t in theirs.items()} == {name: a.tobytes() for name, a in tensors.items()}
    assert all(t["dtype"] == name.removeprefix("t.") for name, t in theirs.items() if name.startswith("t."))
    path.write_bytes(package_bytes(tensors, {"b": "2", "a": "1"}))
    file = open_safetensors(path)
    assert (file.keys(), file.metadata) == (tensors.keys(), {"a": "1", "b": "2"})
    assert all(same(file.array(name), a) for name, a in tensors.items())
    write_safetensors(path, plain := {name: a for name, a in tensors.items() if a.dtype.isbuiltin == 1})
    assert all(same(a, plain[name]) for name, a in safetensors.numpy.load_file(path).items())


TEXT = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda text: text != "__metadata__")
ARRAYS = st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 4), max_size=4))


@given(st.dictionaries(TEXT, ARRAYS, max_size=6), st.none() | st.dictionaries(TEXT, TEXT, max_size=1))
@settings(max_examples=60)
def test_round_trip(tmp_path_factory, tensors, metadata):
    path = tmp_path_factory.getbasetemp() / "round.safetensors"
    tensors = {name: patterns(DTYPES[dtype], tuple(shape)) for name, (dtype, shape) in tensors.items()}
    write_safetensors(path, tensors, metadata)
    file = open_safetensors(path)
    assert (file.keys(), file.metadata) == (tensors.keys(), metadata or {})
    assert all(same(file.array(name), a) for name, a in tensors.items())
    # Of no tensors and empty metadata the package makes a header that it cannot read.
    if tensors or metadata != {}:
        assert path.read_bytes() == package_bytes(tensors, metadata)


def test_arrays_are_read_only_views_that_outlive_the_file(tmp_path):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, ml_dtypes.bfloat16)})
    file = open_safetensors(path)
    size = path.stat().st_size
    assert file.entries == {"a": Entry("F32", (2, 3), size - 30, size - 6), "b": Entry("BF16", (3,), size - 6, size)}
    array = file.array("a")
    assert np.shares_memory(array, file.array("a"))
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True
    del file
    write_safetensors(path, {})
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_ranges_of_bytes_and_a_file_that_shrinks(tmp_path):
    path = tmp_path / "a.safetensors"
    values = patterns(np.dtype(np.uint8), (3, 5000))
    write_safetensors(path, {"a": values, "b": np.ones(3, np.float32)})
    file, out = open_safetensors(path), np.empty(7000, np.uint8)
    file.read_into(out, "a", 5000)
    assert np.array_equal(out, values.reshape(-1)[5000:12000])
    file.forget("a")
    assert np.array_equal(file.array("a"), values)
    os.truncate(path, file.entries["a"].start + 6000)
    raises("truncated since it was opened: found ", file.read_into, out, "a", 5000)


def test_reads_unaligned_unordered_and_packed_tensors(tmp_path):
    path = tmp_path / "a.safetensors"
    values = np.array([1.5, -2.0], np.float32)
    header = {
        "late": tensor("F32", [2], [3, 11]),
        "packed": tensor("F4", [1, 6], [0, 3]),
        "other": tensor("BF16", [1], [11, 13]) | {"unknown": None},
    }
    for spaces in range(8):
        text = json.dumps(header).encode() + b" " * spaces
        path.write_bytes(file_bytes(text, b"\x21\x43\x65" + values.tobytes() + b"\xc0\x3f"))
        file = open_safetensors(path)
        assert list(file.keys()) == ["packed", "late", "other"]
        assert (file.array("late") + np.float32(1)).tolist() == [2.5, -1.0]
        assert file.array("other").astype(np.float32).tolist() == [1.5]
        assert same(file.array("packed"), np.array([[0x21, 0x43, 0x65]], np.uint8))


def test_writer_takes_any_strides_and_byte_order(tmp_path):
    path = tmp_path / "a.safetensors"
    base = np.arange(24, dtype=np.int32).reshape(4, 6)
    tensors = {"transposed": base.T, "strided": base[::2, ::-3], "broadcast": np.broadcast_to(np.float32(7), (2, 2))}
    tensors |= {"big": base.astype(">i4"), "bf16": base.astype(ml_dtypes.bfloat16)[:, 1]}
    write_safetensors(path, tensors)
    file = open_safetensors(path)
    for name, array in tensors.items():
        assert file.array(name).dtype == array.dtype.newbyteorder("=")
        assert file.array(name).tolist() == array.tolist()


def test_writing_is_deterministic_and_leaves_no_temporary_files(tmp_path):
    path = tmp_path / "a.safetensors"
    tensors, metadata = all_dtypes(), {"b": "1", "a": "2", "c": "3"}
    write_safetensors(path, tensors, metadata)
    first = path.read_bytes()
    write_safetensors(path, dict(reversed(tensors.items())), dict(reversed(metadata.items())))
    assert path.read_bytes() == first
    bad = [
        ({"a": np.array([None])}, None, "tensor 'a': dtype: found object, allowed is bool, uint8"),
        ({"__metadata__": np.zeros(2)}, None, "tensor name: found '__metadata__'"),
        ({"a\ud800": np.zeros(2)}, None, "tensor name: found 'a.ud800', allowed is Unicode text"),
        ({"a": np.zeros(2)}, {"k": "\udfff"}, "__metadata__: found {'k': '.udfff'}"),
    ]
    for tensors, metadata, message in bad:
        raises(message, write_safetensors, path, tensors, metadata)
    (tmp_path / "folder").mkdir()
    raises("folder: cannot be written: Is a directory", write_safetensors, tmp_path / "folder", {})
    raises("missing/a: cannot be written: No such file", write_safetensors, tmp_path / "missing/a", {})
    assert path.read_bytes() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "folder"]


def test_missing_names_and_paths(tmp_path):
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"embed.weight": np.ones(1)})
    file = open_safetensors(tmp_path / "model-00001-of-00002.safetensors")
    raises(r"found no 'embed.weigth', .* did you mean 'embed.weight'\?$", file.array, "embed.weigth")
    hint = r"found nothing there, .* did you mean 'model-00001-of-00002.safetensors'\?$"
    raises(hint, open_safetensors, tmp_path / "model-0001-of-00002.safetensors")
    raises("found something else, allowed is a safetensors file", open_safetensors, tmp_path)
    raises("cannot be read: File name too long", open_safetensors, tmp_path / ("a" * 300))
    os.mkfifo(tmp_path / "pipe")
    raises("found something else", open_safetensors, tmp_path / "pipe")


def test_every_truncation_and_extension_says_both_sizes(tmp_path):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"a": np.ones(2, np.float32), "empty": np.ones((0, 2))})
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little") + 8
    for size in range(len(whole)):
        expected = 8 if size < 8 else header if size < header else len(whole)
        message = opens_or_fails(path, whole[:size])
        assert re.search(f"^file size.*: found {size} bytes, allowed is .*\\b{expected} ", message)
    message = opens_or_fails(path, whole + b"x")
    assert f"after the last tensor: found {len(whole) + 1} bytes, allowed is the {len(whole)} its header" in message


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "header: found Expecting value"),
        (b"\xff{}", "header: found 'utf-8' codec can't decode byte 0xff"),
        (b"\xef\xbb\xbf{}", "header: found Unexpected UTF-8 BOM"),
        (b"[]", "header: found [], allowed is a JSON object"),
        (b'{"a":' * 200_000, "header: found too deep a nesting"),
        (b'{"a":' + b"[" * 500 + b"]" * 500 + b"}", "tensor 'a': found [[[...]]], allowed is a JSON object of dtype"),
        (b'{"a":NaN}', "header: found NaN, which is not JSON"),
        (b'{"a":' + b"1" * 5000 + b"}", "header: found Exceeds the limit (4300 digits)"),
        (b'{"a":1,"\\u0061":2}', "header: found the key 'a' twice, allowed is UTF-8 JSON without repeated keys"),
        (b'{"a":{"dtype":"U8","dtype":"I8"}}', "header: found the key 'dtype' twice"),
        (b'{"\\ud800":{}}', "tensor name: found '\\ud800', allowed is Unicode text"),
        ({"__metadata__": None}, "__metadata__: found None, allowed is a JSON object of Unicode strings"),
        ({"a": []}, "tensor 'a': found [], allowed is a JSON object of dtype, shape and data_offsets"),
        ({"a": {}}, "tensor 'a': dtype: found none among no key"),
        ({"a": {"dtype": "U8", "shpae": [], "data_offsets": [0, 1]}}, "shape: found none among 'dtype', 'shpae', "),
        ({"a": tensor(), "b": tensor(offsets=[3, 5])}, "found 3, which leaves a hole after tensor 'a', allowed is 2"),
        ({"a": tensor(), "b": tensor(offsets=[1, 3])}, "found 1, which overlaps tensor 'a', allowed is 2"),
        ({"a": tensor(), "b": tensor()}, "tensor 'b': data_offsets start: found 0, which overlaps tensor 'a'"),
        ({"a\n" * 10_000: []}, "tensor 'a\\na\\n"),
    ],
)
def test_bad_headers(tmp_path, header, message):
    assert message in opens_or_fails(tmp_path / "a.safetensors", file_bytes(header, b"\0" * 2))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (tensor("F8_E4M3FN"), "; did you mean 'F8_E4M3'?"),
        (tensor("bf16"), "dtype: found 'bf16', allowed is BOOL, U8, "),
        (tensor(["U8"]), "dtype: found ['U8']"),
        (tensor("BOOL"), "found the BOOL byte 2, allowed is 0 or 1"),
        (tensor(shape=[-2]), "shape: found [-2], allowed is a list of at most 64 integers of 0 or more"),
        (tensor(shape=[2.0]), "shape: found [2.0]"),
        (tensor(shape=[2, True]), "shape: found [2, True]"),
        (tensor(shape=2), "shape: found 2"),
        (tensor(shape=[1] * 65), "shape: found [1, 1, 1, 1, 1, 1, 1, 1, ...]"),
        (tensor(shape=[0, 2**62, 2**62], offsets=[0, 0]), "allowed is less than 2**63 bytes"),
        (tensor("F4", [2, 3], [0, 3]), "shape: found [2, 3], allowed is an even last axis"),
        (tensor("F4", [], [0, 0]), "shape: found [], allowed is an even last axis"),
        (tensor(offsets=[0, 3]), "data_offsets [0, 3]: found 3 bytes, allowed is the 2 of U8 [2]"),
        (tensor(offsets=[2, 0]), "data_offsets: found [2, 0], allowed is [start, stop] with 0 <= start <= stop"),
        (tensor(offsets=[-2, 0]), "data_offsets: found [-2, 0]"),
        (tensor(offsets="02"), "data_offsets: found '02'"),
        (tensor(offsets=[1, 3]), "data_offsets start: found 1, which leaves a hole after the header, allowed is 0"),
        (tensor(shape=[10**12], offsets=[0, 10**12]), "file size, truncated: found "),
    ],
)
def test_bad_entries(tmp_path, entry, message):
    assert message in opens_or_fails(tmp_path / "a.safetensors", file_bytes({"a": entry}, b"\1\2"))


def test_header_length_limit(tmp_path):
    path = tmp_path / "a.safetensors"
    for length in (MAX_HEADER_BYTES + 1, 2**64 - 1):
        message = opens_or_fails(path, length.to_bytes(8, "little") + b"{}")
        assert f"found {length}, allowed is at most {MAX_HEADER_BYTES}" in message
    message = opens_or_fails(path, MAX_HEADER_BYTES.to_bytes(8, "little") + b"{}")
    assert message == f"file size, truncated: found 10 bytes, allowed is {MAX_HEADER_BYTES + 8} or more for its header"


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("U8"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
SIZES = st.lists(st.integers(-1, 4) | st.sampled_from([2**31, 2**62, 2**63, 2**64]), max_size=3)
DTYPE_NAMES = st.sampled_from([*DTYPES, "F4", "F6", ""])
FIELDS = {"dtype": DTYPE_NAMES | ANY_JSON, "shape": SIZES | ANY_JSON, "data_offsets": SIZES | ANY_JSON}
NAMES = st.text(max_size=3) | st.just("__metadata__")


@given(st.dictionaries(NAMES, st.fixed_dictionaries({}, optional=FIELDS) | ANY_JSON, max_size=3), st.binary(max_size=8))
@settings(max_examples=200)
def test_any_header_opens_or_fails(tmp_path_factory, header, data):
    opens_or_fails(tmp_path_factory.getbasetemp() / "any.safetensors", file_bytes(header, data))


WHOLE = package_bytes({"a": np.ones((2, 2), np.float32), "b.scale": np.ones(3, np.uint8)}, {"format": "np"})


@given(st.data())
@settings(max_examples=200)
def test_mutated_files_open_or_fail(tmp_path_factory, data):
    changed = bytearray(data.draw(st.just(WHOLE) | st.binary(max_size=40)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed)))
        new = data.draw(st.binary(max_size=3) | st.sampled_from([b"0", b"9" * 20, b"[", b'"', b"}", b"-", b"repeat"]))
        until = at + data.draw(st.sampled_from([0, len(new), 20]))
        changed[at:until] = changed[at : at + 40] * 2 if new == b"repeat" else new
    # Most changes shift the header's end; half of them get their length right again.
    end = changed.rfind(b"}", 8)
    if data.draw(st.booleans()) and end > 0:
        changed[:8] = (end - 7).to_bytes(8, "little")
    opens_or_fails(tmp_path_factory.getbasetemp() / "mutated.safetensors", bytes(changed))
