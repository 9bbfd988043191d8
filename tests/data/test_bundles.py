"""Bundles: which files a document holds, in which order, and what is asked at its end."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.data import DataError
from trine.data.bundles import HEADER, ask, bundle, in_order

TREE = {
    "pkg/__init__.py": "from .core import run\n",
    "pkg/core.py": "import os\nfrom pkg.util import helper, LIMIT\nfrom . import zeta\n\n"
    "def run():\n    return helper()\n",
    "pkg/util.py": "LIMIT_OF_ALL = 17\n\ndef helper():\n    return LIMIT_OF_ALL\n",
    "pkg/zeta.py": "from .alpha import thing\n",
    "pkg/alpha.py": "from .zeta import other\n",
    "README.md": "read me",
}


def test_modules_stand_after_what_they_import_and_cycles_are_cut() -> None:
    order = in_order(TREE)
    assert sorted(order) == sorted(TREE)
    at = {path: i for i, path in enumerate(order)}
    assert at["pkg/util.py"] < at["pkg/core.py"] < at["pkg/__init__.py"]
    assert at["pkg/alpha.py"] < at["pkg/zeta.py"] < at["pkg/core.py"]
    assert order == ["README.md", "pkg/util.py", "pkg/alpha.py", "pkg/zeta.py", "pkg/core.py", "pkg/__init__.py"]


@pytest.mark.parametrize(
    ("line", "first"),
    [
        ("import a.b as x, z_mod", "z_mod.py"),
        ("from a import (z_mod, q)", "a/z_mod.py"),
        ("from .. import z_mod", "a/z_mod.py"),
        ("from ..z_mod import thing as t", "a/z_mod.py"),
        ("  from z_mod import thing", "z_mod.py"),
    ],
)
def test_every_form_of_import_is_followed(line: str, first: str) -> None:
    texts = {"a/b/aa.py": line + "\n", first: "x = 1\n"}
    assert in_order(texts) == [first, "a/b/aa.py"]


def test_without_python_files_come_by_path() -> None:
    assert in_order({"b.c": "", "a.h": "", "b.h": "import a"}) == ["a.h", "b.c", "b.h"]


def test_a_document_is_a_subtree_with_headers() -> None:
    ((name, content),) = bundle((path, text.encode()) for path, text in TREE.items())
    text = content.decode()
    assert name == "."
    assert re.findall(r"==> (.*) <==", text) == in_order(TREE)
    assert HEADER.format(path="README.md") + "read me\n\n==> pkg/util.py <==\nLIMIT_OF_ALL" in text


paths = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map("/".join)


@settings(max_examples=60, deadline=None, database=None)
@given(st.dictionaries(paths, st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 120))
def test_every_file_is_in_one_bundle_and_none_is_too_large(sizes: dict[str, int], largest: int) -> None:
    sizes = {f"{path}.txt": size for path, size in sizes.items()}
    made = bundle(((path, b"x" * size) for path, size in sizes.items()), largest=largest)
    found = [re.findall(r"==> (.*) <==", content.decode()) for _, content in made]
    assert sorted(path for inside in found for path in inside) == sorted(sizes)
    assert len({name for name, _ in made}) == len(made)
    for inside in found:
        assert sum(sizes[path] for path in inside) <= largest or len(inside) == 1


def test_what_is_no_text_is_left_for_others_to_name() -> None:
    made = dict(bundle([("a.py", b"x"), ("b.bin", b"\xff"), ("c", b"a\0b"), ("d", b"")]))
    assert set(made) == {".", "b.bin", "c", "d"} and b"b.bin" not in made["."]


def test_questions_have_one_answer_and_the_answer_is_right() -> None:
    text = ask(TREE, 20, random.Random(0))
    asked = dict(re.findall(r"Question: (.*)\nAnswer: (.*)\n", text))
    assert asked["In which file is `helper` defined?"] == "pkg/util.py"
    assert asked["Which other file uses `helper`?"] == "pkg/core.py"
    assert asked["Which value has `LIMIT_OF_ALL` in pkg/util.py?"] == "17"
    twice = {**TREE, "other.py": "LIMIT_OF_ALL = 18\ndef helper(): pass\n"}
    assert "helper" not in ask(twice, 20, random.Random(0)) and "LIMIT_OF_ALL" not in ask(twice, 20, random.Random(0))


def test_questions_depend_on_the_seed_alone_and_come_last() -> None:
    files = [(path, text.encode()) for path, text in TREE.items()]
    ((_, one),) = bundle(files, questions=2, seed=1)
    assert bundle(files, questions=2, seed=1)[0][1] == one
    assert any(bundle(files, questions=2, seed=seed)[0][1] != one for seed in range(2, 8))
    assert one.decode().count("\nQuestion: ") == 2 and one.decode().rindex("==>") < one.decode().index("\nQuestion: ")


def test_sizes_out_of_range_are_refused() -> None:
    with pytest.raises(DataError, match="bundle: found largest 0, questions 0, need 1 or more"):
        bundle([("a", b"x")], largest=0)
