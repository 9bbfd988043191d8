"""Where text comes from: a source is read into documents, in a fixed order, with everything left out counted by name.

Nothing here tokenises. A document carries its own split, decided by a hash of its name, so the split depends on neither
order nor machine and survives new files.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from trine.data._errors import DataError
from trine.data.families import near_copy_families

HELD_OUT_ONE_IN = 20
PYTHON_LICENCE = "PSF-2.0"

# Folders of an installed standard library that hold no library code: tests, third-party packages, binaries.
_NOT_LIBRARY = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload", ".git"}
)


@dataclass(frozen=True)
class Document:
    """One text and what is known about it.

    Attributes:
        name: unique path-like name inside its source.
        text: the text; ``text.encode()`` is what bits per byte are counted on.
        family: name of the first member of its group of near-copies; its own name when it has none.
        split: ``"train"`` or ``"held_out"``.
        near_copy: True when the family has other members, so that some of its text may be known from them.
        licence: SPDX identifier.
        sha256: hash of the UTF-8 bytes, hexadecimal.
        source: name of the source.
    """

    name: str
    text: str
    family: str
    split: str
    near_copy: bool
    licence: str
    sha256: str
    source: str = "stdlib"


@dataclass(frozen=True)
class Dropped:
    """Something a source held that did not become a document, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Corpus:
    """The documents of one source, in the order of their names, and what was dropped on the way.

    Attributes:
        source: name of the source.
        documents: the documents.
        dropped: files left out.
        origin: what the text was read from, in words that do not depend on where the machine keeps it.
        one_in: one document in this many is held out.
        place: where this machine keeps it; no part of the manifest's hash.
    """

    source: str
    documents: tuple[Document, ...]
    dropped: tuple[Dropped, ...]
    origin: dict[str, str] = field(default_factory=dict)
    one_in: int = HELD_OUT_ONE_IN
    place: str = ""

    def select(self, split: str | None = None, near_copy: bool | None = None) -> list[Document]:
        """The documents of a split, and of those only the near-copies or only the others, in order."""
        return [
            d
            for d in self.documents
            if (split is None or d.split == split) and (near_copy is None or d.near_copy == near_copy)
        ]


def split_of(name: str, one_in: int = HELD_OUT_ONE_IN) -> str:
    """``"held_out"`` for one name in ``one_in`` by its SHA-256, else ``"train"``."""
    if one_in < 2:
        raise DataError(f"one_in: found {one_in}, need at least 2 so that something is left to train on")
    value = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return "held_out" if value % one_in == 0 else "train"


def make_corpus(
    source: str,
    texts: Iterable[tuple[str, bytes]],
    *,
    licence: str,
    dropped: Iterable[Dropped] = (),
    origin: dict[str, str] | None = None,
    one_in: int = HELD_OUT_ONE_IN,
    place: str = "",
) -> Corpus:
    """Turn named bytes into documents: decode, drop duplicates, group near-copies, split.

    Args:
        source: name of the source.
        texts: (name, content) pairs in any order; the result is ordered by name.
        licence: SPDX identifier of all of them.
        dropped: what the reader left out before.
        origin: see ``Corpus``.
        one_in: one document in this many is held out.
        place: see ``Corpus``.

    Raises:
        DataError: two contents under one name, or nothing left.
    """
    kept: list[tuple[str, str, str]] = []
    lost = list(dropped)
    first_with: dict[str, str] = {}
    previous = None
    for name, content in sorted(texts, key=lambda pair: pair[0]):
        if name == previous:
            raise DataError(f"source {source}: two documents are named {name}")
        previous = name
        if not content:
            lost.append(Dropped(name, "empty"))
            continue
        digest = hashlib.sha256(content).hexdigest()
        if digest in first_with:
            lost.append(Dropped(name, f"exact duplicate of {first_with[digest]}"))
            continue
        if b"\0" in content:
            lost.append(Dropped(name, "binary (a NUL byte)"))
            continue
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            lost.append(Dropped(name, f"not UTF-8 at byte {error.start}"))
            continue
        first_with[digest] = name
        kept.append((name, text, digest))
    if not kept:
        raise DataError(f"source {source}: no documents ({len(lost)} dropped)")
    families = near_copy_families([text for _, text, _ in kept])
    documents = tuple(
        Document(
            name=name,
            text=text,
            family=kept[families.first[i]][0],
            split=split_of(name, one_in),
            near_copy=families.size[i] > 1,
            licence=licence,
            sha256=digest,
            source=source,
        )
        for i, (name, text, digest) in enumerate(kept)
    )
    return Corpus(source, documents, tuple(lost), dict(origin or {}), one_in, place)


def read_folder(
    folder: str | Path,
    *,
    suffixes: tuple[str, ...] | None = None,
    skip_folders: frozenset[str] = frozenset({"__pycache__", ".git"}),
) -> tuple[list[tuple[str, bytes]], list[Dropped]]:
    """Read every regular file below ``folder`` in a fixed order; links are not followed.

    Args:
        folder: where to look.
        suffixes: file-name endings to take, all when None.
        skip_folders: folder names not entered.

    Returns:
        (name, content) pairs with names relative to ``folder`` in POSIX form, and the files that could not be read.

    Raises:
        DataError: the folder does not exist, is no folder or cannot be listed.
    """
    root = Path(folder)
    if not root.exists():
        raise DataError(f"data folder {root}: does not exist")
    if not root.is_dir():
        raise DataError(f"data folder {root}: is not a folder")

    def refuse(error: OSError) -> None:
        raise DataError(f"data folder {error.filename}: cannot be read ({error.strerror})") from error

    texts: list[tuple[str, bytes]] = []
    dropped: list[Dropped] = []
    for here, folders, files in os.walk(root, onerror=refuse, followlinks=False):
        folders[:] = sorted(name for name in folders if name not in skip_folders)
        linked = [name for name in folders if Path(here, name).is_symlink()]
        dropped += [Dropped(Path(here, name).relative_to(root).as_posix(), "a link") for name in linked]
        for file in sorted(files):
            if suffixes is not None and not file.endswith(suffixes):
                continue
            path = Path(here, file)
            name = path.relative_to(root).as_posix()
            if path.is_symlink():
                dropped.append(Dropped(name, "a link"))
                continue
            try:
                texts.append((name, path.read_bytes()))
            except OSError as error:
                dropped.append(Dropped(name, f"cannot be read ({error.strerror})"))
    return texts, dropped


def folder_source(
    folder: str | Path,
    *,
    name: str | None = None,
    licence: str = "unknown",
    suffixes: tuple[str, ...] | None = None,
    one_in: int = HELD_OUT_ONE_IN,
) -> Corpus:
    """The text files below a folder, one document a file. Raises DataError when there are none."""
    texts, dropped = read_folder(folder, suffixes=suffixes)
    return make_corpus(
        name or Path(folder).resolve().name,
        texts,
        licence=licence,
        dropped=dropped,
        origin={"kind": "folder"},
        one_in=one_in,
        place=str(Path(folder).resolve()),
    )


def stdlib_source(folder: str | Path | None = None, *, one_in: int = HELD_OUT_ONE_IN) -> Corpus:
    """The standard library of the running interpreter: its Python code without tests, and its language reference.

    The prose is ``pydoc_data.topics``, one document a topic; the file that holds it is left out, since it is the same
    text. Files written by the build of this one interpreter (``_sysconfigdata*``, ``config-*``) are left out too.

    Args:
        folder: another copy of the library; default is that of the interpreter.
        one_in: one document in this many is held out.

    Raises:
        DataError: no readable library there.
    """
    root = Path(folder) if folder is not None else Path(sysconfig.get_path("stdlib"))
    texts, dropped = read_folder(root, suffixes=(".py",), skip_folders=_NOT_LIBRARY)
    code: list[tuple[str, bytes]] = []
    for name, content in texts:
        if name == "pydoc_data/topics.py":
            dropped.append(Dropped(name, "taken apart into topics"))
        elif name.startswith(("_sysconfigdata", "config-")):
            dropped.append(Dropped(name, "written by the build"))
        else:
            code.append((name, content))
    if not code:
        raise DataError(f"source stdlib: no Python files in {root}")
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        topics = {}
        dropped.append(Dropped("topics", "pydoc_data.topics is not installed"))
    prose = [(f"topics/{name}.txt", text.encode()) for name, text in topics.items()]
    version = ".".join(map(str, sys.version_info[:3]))
    return make_corpus(
        "stdlib",
        code + prose,
        licence=PYTHON_LICENCE,
        dropped=dropped,
        origin={"kind": "python standard library", "implementation": sys.implementation.name, "version": version},
        one_in=one_in,
        place=str(root),
    )


def load_source(source: str, *, one_in: int = HELD_OUT_ONE_IN) -> Corpus:
    """The corpus that ``source`` names: ``"stdlib"``, or the path of a folder of text files."""
    if source == "stdlib":
        return stdlib_source(one_in=one_in)
    if not Path(source).exists():
        raise DataError(f"data source {source}: neither 'stdlib' nor an existing folder")
    return folder_source(source, one_in=one_in)
