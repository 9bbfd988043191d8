"""Recipes over the system's package tool, which is played by scripts on PATH."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest

from trine.data import DataError, load_source, stored
from trine.data.fetch import RECIPES, fetch, html_text

COPYRIGHT = "Format: x\n\nFiles: *\nLicense: GPL-2.0-only\n text\n\nFiles: b\nLicense: MIT\n\nLicense: MIT\n"
PAGE = (
    "<html><head><title>T</title></head><body><nav>menu</nav><h1>A&nbsp;title</h1><script>var x;</script>"
    "<p>Some   words\nin <b>bold</b>.</p><pre>  kept\n    as is</pre></div></nav><ul><li>one<li>two</ul></body>"
)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages (a folder each, with a VERSION file), and tools that serve them."""
    tools, packages = tmp_path / "bin", tmp_path / "packages"
    tools.mkdir()
    packages.mkdir()
    scripts = {
        "apt-cache": f"for p in {packages}/*; do n=$(basename $p); "
        'echo "$n" | grep -Eq "$3" && echo "$n - text"; done; :',
        "apt-get": f'test -e {packages}/$2/BROKEN && {{ echo one; echo "E: no network" >&2; exit 100; }}; '
        f"echo {packages}/$2 > $2_1_all.deb",
        "dpkg-deb": "p=$(cat $2); case $1 in -f) cat $p/VERSION;; -x) cp -a $p/. $3; rm $3/VERSION;; esac",
    }
    for name, script in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return packages


def _package(packages: Path, name: str, files: dict[str, bytes]) -> None:
    for path, content in {"VERSION": b"1.2-3\n", **files}.items():
        (packages / name / path).parent.mkdir(parents=True, exist_ok=True)
        (packages / name / path).write_bytes(content)


def _debian_docs(packages: Path) -> None:
    _package(packages, "linux-doc-6.1", {"usr/share/doc/linux-doc/old.rst": b"old"})
    files = {
        "usr/share/doc/linux-doc-6.12/copyright": COPYRIGHT.encode(),
        "usr/share/doc/linux-doc-6.12/a.rst.gz": gzip.compress(b"about a\n"),
        "usr/share/doc/linux-doc-6.12/b.txt": b"about b\n",
        "usr/share/doc/linux-doc-6.12/html/b.txt": b"about b again\n",
        "usr/share/doc/linux-doc-6.12/c.png": b"\x89PNG",
    }
    _package(packages, "linux-doc-6.12", files)
    _package(packages, "sqlite3-doc", {"usr/share/doc/sqlite3/index.html": PAGE.encode()})


def test_documents_of_packages_with_a_table_of_licences(system: Path, caplog: pytest.LogCaptureFixture) -> None:
    _debian_docs(system)
    with caplog.at_level("WARNING", logger="trine"):
        source, table = fetch("debian-docs")
    assert "no package postgresql-doc-[0-9]+ here; left out" in caplog.text
    assert [(one.package, one.version, one.licence, one.files) for one in table] == [
        ("linux-doc-6.12", "1.2-3", "GPL-2.0-only", 2),
        ("sqlite3-doc", "1.2-3", "blessing", 1),
    ]
    assert table[0].stated == ("GPL-2.0-only", "MIT") and len(table[0].copyright_sha256) == 64
    assert table[1].stated == () and table[1].copyright_sha256 == ""
    assert source.licence == "GPL-2.0-only AND blessing"
    texts = {document.name: document.text for document in load_source("debian-docs").documents}
    assert texts == {
        "linux-doc-6.12/usr/share/doc/linux-doc-6.12/a.rst": "about a\n",
        "linux-doc-6.12/usr/share/doc/linux-doc-6.12/b.txt": "about b\n",
        "sqlite3-doc/usr/share/doc/sqlite3/index.html.txt": html_text(PAGE),
    }
    assert stored("debian-docs").details["packages"][0]["package"] == "linux-doc-6.12"
    assert sorted(path.name for path in Path("data/files").iterdir()) == ["debian-docs"], "nothing temporary is left"


def test_a_source_tree_becomes_bundles(system: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
        for name, content in {
            "linux-source-6.12/kernel/a.c": b"int a;\n",
            "linux-source-6.12/kernel/Makefile": b"obj-y += a.o\n",
            "linux-source-6.12/drivers/gpu/drm/amd/include/regs.h": b"#define A 1\n",
            "linux-source-6.12/logo.ppm": b"P3",
            "linux-source-6.12/huge.c": b"x" * ((1 << 20) + 1),
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("linux-source-6.12/link.c")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    _package(system, "linux-source-6.12", {"usr/src/linux-source-6.12.tar.xz": buffer.getvalue()})
    source, table = fetch("linux-source")
    assert table[0].files == 2 and source.reading.kind == "bundle"
    (document,) = load_source("linux-source").documents
    path = "linux-source-6.12/linux-source-6.12/kernel"
    assert document.text == f"==> {path}/Makefile <==\nobj-y += a.o\n\n==> {path}/a.c <==\nint a;\n"


def test_an_archive_that_leads_outside_is_refused(system: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member = tarfile.TarInfo("../../evil.c")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    _package(system, "linux-source-6.12", {"usr/src/linux-source-6.12.tar.gz": buffer.getvalue()})
    with pytest.raises(DataError, match=r"holds a file outside itself \(\.\./\.\./evil\.c\)"):
        fetch("linux-source")
    damaged = io.BytesIO()
    with tarfile.open(fileobj=damaged, mode="w:gz") as archive:
        member = tarfile.TarInfo("a.c")
        member.size = 50_000
        archive.addfile(member, io.BytesIO(os.urandom(50_000)))
    _package(system, "linux-source-6.12", {"usr/src/linux-source-6.12.tar.gz": damaged.getvalue()[:20_000]})
    with pytest.raises(DataError, match=r"archive linux-source-6\.12\.tar\.gz: damaged"):
        fetch("linux-source")
    assert not list(Path("data/files").iterdir())


def test_what_goes_wrong_is_named_and_what_was_there_stays(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"^fetch: no recipe 'x', need one of debian-docs, linux-source$"):
        fetch("x")
    with pytest.raises(DataError, match=r"apt-cache knows none of linux-source-\[0-9\.\]\+; run apt-get update"):
        fetch("linux-source")
    _debian_docs(system)
    fetch("debian-docs")
    with pytest.raises(DataError, match="source debian-docs: is in the store already; replace it to fetch it again"):
        fetch("debian-docs")
    (system / "sqlite3-doc" / "BROKEN").touch()
    with pytest.raises(DataError, match=r"^apt-get download sqlite3-doc: exit code 100 \(E: no network\)$"):
        fetch("debian-docs", replace=True)
    assert len(load_source("debian-docs").documents) == 3
    (system / "sqlite3-doc" / "BROKEN").unlink()
    (system / "sqlite3-doc" / "usr/share/doc/sqlite3/index.html").write_text("<p>new")
    fetch("debian-docs", replace=True)
    assert "new\n" in {document.text for document in load_source("debian-docs").documents}
    assert sorted(path.name for path in Path("data/files").iterdir()) == ["debian-docs"]
    (system.parent / "bin" / "dpkg-deb").unlink()
    monkeypatch.setenv("PATH", str(system.parent / "bin"))
    with pytest.raises(DataError, match=r"^fetch debian-docs: needs dpkg-deb, which is not on this system"):
        fetch("debian-docs", replace=True)


def test_packages_without_text_are_refused(system: Path) -> None:
    _package(system, "linux-source-6.12", {"usr/share/doc/x": b"x"})
    with pytest.raises(DataError, match=r"^fetch linux-source: found no text in linux-source-6\.12$"):
        fetch("linux-source")
    assert not Path("data/linux-source.json").exists()


def test_html_is_read_as_a_reader_would() -> None:
    assert html_text(PAGE) == "A title\n\nSome words\nin bold.\n\n  kept\n    as is\n\none\ntwo\n".replace(
        "words\nin", "words in"
    )
    assert html_text("no tags &amp; one &lt;") == "no tags & one <\n"
    assert html_text("<p>a<script>b</p>") == "a\n"


def test_every_recipe_names_a_licence_for_every_package() -> None:
    assert all(package.licence and package.suffixes for recipe in RECIPES.values() for package in recipe.packages)
    assert sorted(RECIPES) == ["debian-docs", "linux-source"]
