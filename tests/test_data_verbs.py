"""`trine data`: what each verb prints, its exit code, and the one line that a mistake gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trine import cli

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def data(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run `trine data ...` in a folder that holds two folders of text; returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
        for i in range(6):
            text = "".join(f"{name} {i} has line {n} about {n * n + i}\n" for n in range(40))
            (tmp_path / name / f"{i}.txt").write_text(text)
    (tmp_path / "mine" / "bad.bin").write_bytes(b"\0")

    def run(*args: str) -> tuple[int, str, str]:
        try:
            code = cli.main(["data", *args])
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_help_lists_the_verbs_and_each_has_its_own(data: Run) -> None:
    code, out, _ = data("--help")
    assert code == 0 and all(f"\n  {verb}" in out for verb in ("add NAME", "fetch RECIPE", "list", "preview SOURCE"))
    code, out, _ = data("add", "--help")
    assert code == 0 and "--licence" in out and "SPDX" in out


def test_added_and_listed(data: Run) -> None:
    code, out, _ = data("add", "texts", "mine", "--licence", "MIT")
    assert code == 0 and out.startswith("texts: 6 documents, 0.0 MB, licence MIT\n")
    assert "Next: trine data preview texts" in out
    code, out, _ = data("list")
    assert code == 0 and "texts" in out and "MIT" in out
    code, out, _ = data("list", "--json")
    (entry,) = json.loads(out)
    assert (entry["name"], entry["kind"], entry["documents"]) == ("texts", "text", 6) and len(entry["hash"]) == 64


def test_rows_are_shown_as_the_model_sees_them(data: Run) -> None:
    data("add", "texts", "mine")
    sizes = ["--length", "64", "--rows", "2", "--vocabulary", "300"]
    code, out, _ = data("preview", "texts", "other", "--weights", "1", "1", *sizes)
    assert code == 0 and "micro-batch 1: 64 tokens" in out
    assert "texts: " in out and "other: " in out and "has line" in out
    code, again, _ = data("preview", "texts", "other", "--weights", "1", "1", *sizes)
    assert again == out and not list(Path().glob("tmp*"))


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((), 2, "trine data: found no verb of trine data; need one of add, fetch, list, preview"),
        (("ad",), 2, "trine data: found 'ad', which is no verb of trine data; did you mean add?"),
        (("add", "x", "absent"), 1, "trine data: source x: absent does not exist"),
        (("add", "x", "mine", "--license", "MIT"), 2, "no option --license; did you mean --licence?"),
        (("fetch", "x"), 1, "trine data: fetch: no recipe 'x', need one of debian-docs, linux-source"),
        (("preview", "absent"), 1, "trine data: data source absent: neither 'stdlib', nor a name in the store"),
        (("preview", "mine", "--weights", "1", "2"), 1, "trine data: weights: found 2 for 1 sources, need one each"),
        (("preview", "mine", "--vocabulary", "9000"), 1, "vocab_size: the training texts fill only"),
    ],
)
def test_mistakes_get_one_line(data: Run, args: tuple[str, ...], code: int, message: str) -> None:
    got, out, err = data(*args)
    assert got == code and message in err and err.count("\n") == 1 and not out
