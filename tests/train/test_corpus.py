"""Which texts are read, and that no group stands on both sides of the split."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dsv41.errors import UserError
from train.corpus import Document, load_corpus, split_corpus, text_bytes

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def stdlib() -> list[Document]:
    return load_corpus()


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_stdlib_has_modules_and_no_tests(stdlib):
    names = [d.name for d in stdlib]
    assert {"ast.py", "json/decoder.py", "email/message.py"} <= set(names)
    assert len(names) == len(set(names))
    for name in names:
        assert not {"test", "tests", "idle_test", "site-packages", "_bundled"} & set(name.split("/"))
    assert not [n for n in names if n.startswith(("_sysconfigdata", "config-"))]
    assert all(d.text for d in stdlib)


def test_stdlib_near_copies_share_a_group(stdlib):
    group = {d.name: d.group for d in stdlib}
    for twin, module in (("_pydecimal", "decimal"), ("_pyio", "io"), ("_pydatetime", "datetime"), ("_py_abc", "abc")):
        if f"{twin}.py" in group:
            assert group[f"{twin}.py"] == group[f"{module}.py"]
    assert group["_strptime.py"] == "strptime"
    assert group["pickle.py"] != group["pickletools.py"]
    assert group["pydoc.py"] == "pydoc" and group["py_compile.py"] == "py_compile"
    assert len({g for n, g in group.items() if n.startswith("encodings/")}) == 1


def test_stdlib_split_is_the_same_in_another_process(stdlib):
    train, heldout = split_corpus(stdlib)
    assert not {d.group for d in train} & {d.group for d in heldout}
    assert 300_000 < text_bytes(heldout) < 600_000
    assert text_bytes(train) + text_bytes(heldout) == text_bytes(stdlib)
    code = "from train.corpus import *; print(*[d.name for d in split_corpus(load_corpus())[1]])"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [d.name for d in heldout]


def test_folders_and_files(tmp_path):
    top = tmp_path / "top"
    write(top / "b.txt", "b\r\nß")
    write(top / "a" / "x.txt", "ax")
    write(top / "a" / "deep" / "y.md", "ay")
    write(top / "a" / "empty.txt", "")
    write(top / "a" / "latin.txt", b"caf\xe9")
    write(top / "a" / "binary.txt", b"a\0b")
    write(top / ".git" / "config", "hidden")
    write(top / "a" / ".hidden", "hidden")
    os.mkfifo(top / "pipe")
    (top / "broken").symlink_to(top / "nowhere")
    single = write(tmp_path / "one.txt", "one")
    documents = load_corpus([str(top), str(single)])
    assert documents == [
        Document("top/a/deep/y.md", "a", "ay"),
        Document("top/a/x.txt", "a", "ax"),
        Document("top/b.txt", "b.txt", "b\r\nß"),
        Document("one.txt", "one.txt", "one"),
    ]


def test_link_loops_end_and_no_file_is_read_twice(tmp_path):
    top = tmp_path / "top"
    write(top / "a" / "x.txt", "x")
    (top / "a" / "up").symlink_to(top)
    (top / "self").symlink_to(top / "self")
    (top / "copy.txt").symlink_to(top / "a" / "x.txt")
    documents = load_corpus([str(top), str(top / "a"), str(top)])
    assert [d.name for d in documents] == ["top/a/x.txt"]


def test_file_names_may_be_any_bytes(tmp_path):
    for name in (b"caf\xe9", b"b", b"c"):
        write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)), "text" * 50)
    train, heldout = split_corpus(load_corpus([str(tmp_path)]))
    assert len({d.name for d in train + heldout}) == 3


def test_errors_name_what_was_found(tmp_path, monkeypatch):
    write(tmp_path / "novel.txt", "text")
    (tmp_path / "hollow").mkdir()
    binary = write(tmp_path / "image.png", b"\x89PNG\0")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("lost")
    monkeypatch.chdir(tmp_path)
    for data, words in (
        (["novle.txt"], "nothing at 'novle.txt'.*did you mean 'novel.txt'"),
        ([f"{tmp_path}/novle.txt"], "did you mean '.*/novel.txt'"),
        (["~nobody-by-this-name/novel.txt"], "nothing at '~nobody-by-this-name/novel.txt'"),
        (["/dev/null"], "a device or pipe at '/dev/null'"),
        (["pipe"], "a device or pipe at 'pipe'"),
        (["link"], "a link to nothing at 'link'"),
        (["stdlb"], "did you mean 'stdlib'"),
        (["gone/deep/x"], "nothing at 'gone/deep/x'"),
        (["hollow"], "no text in 'hollow'"),
        ([str(binary)], "no text in .*image.png"),
        (["novel.txt", "hollow"], "no text in 'hollow'"),
        ([], "found nothing"),
    ):
        with pytest.raises(UserError, match=words) as error:
            load_corpus(data)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError) as error:
        load_corpus([f"{tmp_path}/quite/elsewhere", f"{tmp_path}/dc"])
    assert "did you mean" not in str(error.value)  # that the folders agree makes no path alike


texts = st.text(min_size=1, max_size=40)
corpora = st.lists(st.tuples(st.integers(0, 4), texts), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(corpora, st.floats(0.01, 0.5))
def test_split_loses_nothing_and_leaves_neither_side_empty(entries, fraction):
    documents = [Document(f"{g}/{i}", str(g), text) for i, (g, text) in enumerate(entries)]
    assume(len(documents) > 1 or len(documents[0].text) > 1)
    train, heldout = split_corpus(documents, fraction)
    assert train and heldout and all(d.text for d in train + heldout)
    whole: dict[str, str] = {}
    for d in train + heldout:
        whole[d.name] = whole.get(d.name, "") + d.text
    assert whole == {d.name: d.text for d in documents}
    both = {d.group for d in train} & {d.group for d in heldout}
    assert len(both) <= 1


def test_single_document_is_cut_after_a_line_near_the_end():
    text = "".join(f"line {i}\n" for i in range(1000))
    (head,), (tail,) = split_corpus([Document("a", "a", text)])
    assert head.text + tail.text == text
    assert head.text.endswith("\n")
    assert 0.03 < len(tail.text) / len(text) < 0.05


def test_single_group_holds_out_its_last_documents():
    documents = [Document(f"a/{i}", "a", "x" * 100) for i in range(50)]
    train, heldout = split_corpus(documents)
    assert [d.name for d in train + heldout] == [d.name for d in documents]
    assert len(heldout) == 2


def test_no_small_group_holds_out_the_smallest_whole():
    books = [Document(f"book{i}", f"book{i}", "x" * (1000 + i)) for i in range(10)]
    assert [d.name for d in split_corpus(books)[1]] == ["book0"]


@pytest.mark.parametrize("fraction", [0, 1, -0.1, float("nan")])
def test_split_errors(fraction):
    with pytest.raises(UserError, match="heldout_fraction"):
        split_corpus([Document("a", "a", "xy")], fraction)
    with pytest.raises(UserError, match="single character"):
        split_corpus([Document("a", "a", "x")])
