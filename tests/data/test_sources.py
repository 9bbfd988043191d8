"""Sources: what becomes a document, what is dropped and counted, who is held out."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pytest

from trine.data import DataError, folder_source, load_source, stdlib_source
from trine.data.sources import Dropped, list_folder, make_corpus, read_files, split_of


def test_documents_come_in_the_order_of_their_names_whatever_the_order_given() -> None:
    texts = [("b", b"two words here"), ("a", b"one"), ("c", b"three")]
    forth = make_corpus("s", texts, licence="MIT")
    back = make_corpus("s", texts[::-1], licence="MIT")
    assert [d.name for d in forth.documents] == ["a", "b", "c"]
    assert forth == back
    assert forth.documents[1].sha256 == hashlib.sha256(b"two words here").hexdigest()
    assert forth.documents[1].licence == "MIT"


def test_everything_left_out_is_counted_by_name_and_reason() -> None:
    corpus = make_corpus(
        "s",
        [("a", b"text"), ("b", b"text"), ("c", b""), ("d", b"caf\xe9"), ("e", b"x\0y"), ("f", "café".encode())],
        licence="MIT",
        dropped=[Dropped("z", "cannot be read")],
    )
    assert [d.name for d in corpus.documents] == ["a", "f"]
    assert {d.name: d.reason for d in corpus.dropped} == {
        "b": "exact duplicate of a",
        "c": "empty",
        "d": "not UTF-8 at byte 3",
        "e": "binary (a NUL byte)",
        "z": "cannot be read",
    }


def test_text_keeps_its_line_ends_and_marks() -> None:
    content = b"\xef\xbb\xbfa\r\nb\rc\n\x0c\t"
    (document,) = make_corpus("s", [("a", content)], licence="MIT").documents
    assert document.text.encode() == content


def test_split_is_the_hash_of_the_name_alone() -> None:
    held = [name for name in (f"file{i}" for i in range(4000)) if split_of(name) == "held_out"]
    assert 150 < len(held) < 250, "1 in 20 of 4000"
    digest = int.from_bytes(hashlib.sha256(b"file7").digest()[:8], "big")
    assert split_of("file7", 3) == ("held_out" if digest % 3 == 0 else "train")
    alone = make_corpus("s", [(held[0], b"some text")], licence="MIT")
    among = make_corpus("s", [(held[0], b"some text"), ("other", b"other text")], licence="MIT")
    assert alone.documents[0].split == among.select("held_out")[0].split == "held_out"


def test_held_out_documents_without_near_copies_share_no_family_with_training() -> None:
    table = "\n".join(f"{i:#06x}: 'LATIN SMALL LETTER NUMBER {i}'," for i in range(60))
    texts = [(f"table{i:02d}", f"{table}\nthe name of this one is {i}".encode()) for i in range(40)]
    texts += [
        (f"own{i:02d}", "\n".join(f"line {i} {j} {i * j} of my own" for j in range(40)).encode()) for i in range(40)
    ]
    corpus = make_corpus("s", texts, licence="MIT", one_in=5)
    assert {d.family for d in corpus.documents if d.name.startswith("table")} == {"table00"}
    assert all(d.near_copy == d.name.startswith("table") for d in corpus.documents)
    honest = {d.family for d in corpus.select("held_out", near_copy=False)}
    flattered = {d.family for d in corpus.select("held_out", near_copy=True)}
    trained = {d.family for d in corpus.select("train")}
    assert honest and not honest & trained
    assert flattered & trained, "the tables are held out by file, so that their number can be told apart"


def test_two_documents_of_one_name_and_no_documents_are_refused() -> None:
    with pytest.raises(DataError, match=r"^source s: two documents are named a$"):
        make_corpus("s", [("a", b"1"), ("a", b"2")], licence="MIT")
    with pytest.raises(DataError, match=r"^source s: no documents \(1 dropped; a: empty\)$"):
        make_corpus("s", [("a", b"")], licence="MIT")
    with pytest.raises(DataError, match="one_in: found 1, need at least 2"):
        make_corpus("s", [("a", b"1")], licence="MIT", one_in=1)


def test_folder_is_read_in_order_and_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_text("in b")
    (tmp_path / "a.txt").write_text("in a")
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "c.txt").write_text("cached")
    every = folder_source(tmp_path, name="mine", licence="MIT")
    assert [d.name for d in every.documents] == ["a.txt", "b/x.txt"]
    assert {d.name: d.reason for d in every.dropped} == {
        "a.bin": "not UTF-8 at byte 0",
        "link.txt": "a link",
        "loop": "a link",
    }
    assert [d.name for d in folder_source(tmp_path / "b").documents] == ["x.txt"]
    assert load_source(str(tmp_path / "b")).source == "b"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "absent", "does not exist"),
        (lambda p: p / "file", "is not a folder"),
        (lambda p: p / "empty", r"source empty: no documents in /.*/empty \(0 dropped\)"),
    ],
)
def test_folder_without_data_is_refused(tmp_path: Path, make, message: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        folder_source(make(tmp_path))


def test_an_empty_folder_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError) as error:
        folder_source(tmp_path, name="mine", suffixes=(".py", ".md"))
    assert str(error.value) == (
        f"source mine: no documents in {tmp_path} (looked for names ending in .py, .md; 1 dropped; "
        "*.txt: 1 not read: no such names were asked for)"
    )
    with pytest.raises(
        DataError, match=r"^data source '': found no name, need 'stdlib', a name in the store or a path$"
    ):
        load_source("")


def test_what_is_left_out_by_ending_or_folder_is_counted(tmp_path: Path) -> None:
    for name in ("a.py", "b.md", "c.md", "LICENSE", "x/test/d.py", "test/e.py", "__pycache__/f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    files, dropped = list_folder(tmp_path, suffixes=(".py",), skip_folders=frozenset({"test", "__pycache__"}))
    assert [name for name, _ in files] == ["a.py"]
    assert [(one.name, one.reason) for one in dropped] == [
        ("*.md", "2 not read: no such names were asked for"),
        ("LICENSE", "1 not read: no such names were asked for"),
        ("test/", "2 not entered"),
    ]
    assert not list_folder(tmp_path, suffixes=(".py",), count_others=False)[1]


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "pipe.txt")
    assert folder_source(tmp_path).dropped == (Dropped("pipe.txt", "not a regular file"),)
    assert read_files([("pipe.txt", tmp_path / "pipe.txt")]) == ([], [Dropped("pipe.txt", "not a regular file")])
    with pytest.raises(DataError, match=r"data source .*pipe.txt: is neither a regular file nor a folder"):
        load_source(str(tmp_path / "pipe.txt"))


def test_names_that_are_not_utf_8_are_left_out_and_shown(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for name in (b"caf\xe9.txt", b"d\xff/inside.txt"):
        path = tmp_path / os.fsdecode(name)
        path.parent.mkdir(exist_ok=True)
        path.write_text("lost")
    corpus = folder_source(tmp_path, name="mine")
    assert [d.name for d in corpus.documents] == ["a.txt"]
    assert {d.name: d.reason for d in corpus.dropped} == {
        "caf\\xe9.txt": "its name is not UTF-8",
        "d\\xff/inside.txt": "its name is not UTF-8",
    }
    corpus = make_corpus("s", [("a", b"1"), ("caf\udce9", b"2")], licence="MIT")
    assert corpus.dropped == (Dropped("caf\\xe9", "its name is not UTF-8"),)
    with pytest.raises(DataError, match=r"^source d\\xff: the name is not valid Unicode; give it another$"):
        folder_source(tmp_path / os.fsdecode(b"d\xff"))


def test_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shut").mkdir()
    real = os.scandir

    def scandir(path: str) -> object:  # permission bits do not stop the superuser, so the refusal is played
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"data folder .*shut: cannot be read \(Permission denied\)"):
        folder_source(tmp_path)


def test_file_that_cannot_be_read_is_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good").write_text("x")
    (tmp_path / "bad").write_text("y")
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == "bad":
            raise OSError(5, "Input/output error")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert folder_source(tmp_path).dropped == (Dropped("bad", "cannot be read (Input/output error)"),)


def test_unknown_source_is_named() -> None:
    with pytest.raises(
        DataError, match=r"data source nowhere: neither 'stdlib', nor a name in the store.*, nor an existing path"
    ):
        load_source("nowhere")


def test_standard_library_without_tests_packages_and_build_files(tmp_path: Path) -> None:
    for name in ["os.py", "json/decoder.py", "test/test_os.py", "ctypes/test/x.py", "idlelib/idle_test/y.py"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    for name in [
        "site-packages/torch.py",
        "_sysconfigdata_linux.py",
        "config-3.11/python-config.py",
        "pydoc_data/topics.py",
    ]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    corpus = stdlib_source(tmp_path)
    code = [d.name for d in corpus.documents if not d.name.startswith("topics/")]
    topics = {d.name: d.text for d in corpus.documents if d.name.startswith("topics/")}
    assert code == ["json/decoder.py", "os.py"]
    import pydoc_data.topics

    assert topics["topics/lambda.txt"] == pydoc_data.topics.topics["lambda"]
    assert {d.licence for d in corpus.documents} == {"PSF-2.0"}
    assert corpus.origin["version"] == ".".join(map(str, sys.version_info[:3]))
    assert Dropped("pydoc_data/topics.py", "taken apart into topics") in corpus.dropped
    (tmp_path / "site-packages" / "none").mkdir()
    with pytest.raises(DataError, match="source stdlib: no Python files in"):
        stdlib_source(tmp_path / "site-packages" / "none")


def test_the_running_interpreter_has_a_library_and_its_tables_are_one_family() -> None:
    corpus = stdlib_source()
    held, honest = corpus.select("held_out"), corpus.select("held_out", near_copy=False)
    size = sum(len(d.text.encode()) for d in corpus.documents)
    assert len(corpus.documents) > 500 and size > 8e6
    assert 0.01 < sum(len(d.text.encode()) for d in held) / size < 0.12
    tables = {d.family for d in corpus.documents if d.name.startswith("encodings/cp12")}
    assert len(tables) == 1
    assert not [d.name for d in honest if d.name.startswith("encodings/cp")]
    assert not {d.family for d in honest} & {d.family for d in corpus.select("train")}
    assert len({d.sha256 for d in corpus.documents}) == len(corpus.documents)
