"""Where text comes from: a source is read into documents, in a fixed order, with everything left out counted by name.

Nothing here tokenises. A document carries its own split, decided by a hash of its name, so the split depends on neither
order nor machine and survives new files.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import stat
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trine.data._errors import DataError
from trine.data.families import near_copy_families

HELD_OUT_ONE_IN = 20
LARGEST_FILE = 1 << 26
"""Bytes of the largest file that becomes one document."""
NEVER_READ = ("cannot be read", "enormous", "not a regular file")
"""How the reasons begin for which `read_files` leaves a file out without looking into it."""
PYTHON_LICENCE = "PSF-2.0"

# Folders that are never entered and not worth a word: caches and histories.
_UNSEEN = frozenset({"__pycache__", ".git"})
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
        weights: ``(begin, end, weight)`` spans of characters; a token that lies in one, even in part, has its weight in
            the loss, the later span's where two meet, and 0 outside them all. Character ``len(text)`` is the end of the
            document. None: every token weighs 1.
    """

    name: str
    text: str
    family: str
    split: str
    near_copy: bool
    licence: str
    sha256: str
    source: str = "stdlib"
    weights: tuple[tuple[int, int, float], ...] | None = None

    @classmethod
    def make(
        cls,
        source: str,
        name: str,
        text: str,
        *,
        licence: str,
        split: str = "train",
        weights: Iterable[tuple[int, int, float]] | None = None,
    ) -> Document:
        """A document without near-copies, as a generator makes them.

        Raises:
            DataError: no text, text that is not valid Unicode, or a weight that is no number from 0 on or lies nowhere.
        """
        if not text:
            raise DataError(f"source {source}: document {name} is empty")
        try:
            digest = hashlib.sha256(text.encode()).hexdigest()
        except UnicodeEncodeError as error:
            raise DataError(f"source {source}: {name} is not valid Unicode at character {error.start}") from error
        spans = None if weights is None else tuple(weights)
        for begin, end, weight in spans or ():
            if not 0 <= begin < end <= len(text) + 1 or not 0 <= weight <= 65504:
                raise DataError(
                    f"source {source}: {name} has weight {weight} at characters {begin} to {end}, "
                    f"need a weight from 0 to 65504 and 0 <= begin < end <= {len(text) + 1}"
                )
        return cls(name, text, name, split, False, licence, digest, source, spans)


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
        vocabulary: whether a vocabulary is learnt from it; not from generated text.
    """

    source: str
    documents: tuple[Document, ...]
    dropped: tuple[Dropped, ...] = ()
    origin: dict[str, str] = field(default_factory=dict)
    one_in: int = HELD_OUT_ONE_IN
    place: str = ""
    vocabulary: bool = True

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
        DataError: a source name that is not valid Unicode, two contents under one name, or nothing left.
    """
    if _shown(source) != source:
        raise DataError(f"source {_shown(source)}: the name is not valid Unicode; give it another")
    kept: list[tuple[str, str, str]] = []
    lost = list(dropped)
    first_with: dict[str, str] = {}
    previous = None
    for name, content in sorted(texts, key=lambda pair: pair[0]):
        if name == previous:
            raise DataError(f"source {source}: two documents are named {name}")
        previous = name
        if _shown(name) != name:
            lost.append(Dropped(_shown(name), _NAME_NOT_UNICODE))
            continue
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
        raise no_documents(source, [place] if place else [], None, lost)
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


_NAME_NOT_UNICODE = "its name is not UTF-8"


def _shown(name: str) -> str:
    """A name with the bytes that are not UTF-8 spelt out, as ``caf\\xe9``."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return os.fsencode(name).decode("utf-8", "backslashreplace")
    return name


def no_documents(
    source: str, places: Sequence[str | Path], suffixes: Sequence[str] | None, lost: Sequence[Dropped]
) -> DataError:
    """The error of a source without a document: where it looked, for what, and the first of what it left out."""
    where = f" in {', '.join(map(str, places))}" if places else ""
    looked = f"looked for names ending in {', '.join(suffixes)}; " if suffixes else ""
    first = "".join(f"; {one.name}: {one.reason}" for one in lost[:3])
    return DataError(f"source {source}: no documents{where} ({looked}{len(lost)} dropped{first})")


def list_folder(
    folder: str | Path,
    *,
    suffixes: tuple[str, ...] | None = None,
    skip_folders: frozenset[str] = _UNSEEN,
    count_others: bool = True,
) -> tuple[list[tuple[str, Path]], list[Dropped]]:
    """Every regular file below ``folder`` in a fixed order; links are not followed.

    Args:
        folder: where to look.
        suffixes: file-name endings to take, all when None.
        skip_folders: folder names not entered.
        count_others: name what is left out by its ending or its folder, one line an ending (``*.md``) or a folder's
            name, but for folders of caches and histories.

    Returns:
        (name, path) pairs with names relative to ``folder`` in POSIX form, and what else was found there.

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

    found: list[tuple[str, Path]] = []
    dropped: list[Dropped] = []
    unread: Counter[str] = Counter()
    for here, folders, files in os.walk(root, onerror=refuse, followlinks=False):
        unread.update(f"{name}/" for name in folders if name in skip_folders - _UNSEEN)
        folders[:] = sorted(name for name in folders if name not in skip_folders)
        linked = [name for name in folders if Path(here, name).is_symlink()]
        dropped += [Dropped(_shown(Path(here, name).relative_to(root).as_posix()), "a link") for name in linked]
        for file in sorted(files):
            if suffixes is not None and not file.endswith(suffixes):
                ending = Path(file).suffix
                unread[f"*{ending}" if ending else file] += 1
                continue
            path = Path(here, file)
            name = path.relative_to(root).as_posix()
            if _shown(name) != name:
                dropped.append(Dropped(_shown(name), _NAME_NOT_UNICODE))
            elif path.is_symlink():
                dropped.append(Dropped(name, "a link"))
            elif not path.is_file():
                dropped.append(Dropped(name, "not a regular file"))
            else:
                found.append((name, path))
    if count_others:
        for what, count in sorted(unread.items()):
            reason = "not entered" if what.endswith("/") else "not read: no such names were asked for"
            dropped.append(Dropped(_shown(what), f"{count} {reason}"))
    return found, dropped


def read_files(files: Iterable[tuple[str, Path]]) -> tuple[list[tuple[str, bytes]], list[Dropped]]:
    """The contents of files, and those that are too large for one document or cannot be read."""
    texts: list[tuple[str, bytes]] = []
    dropped: list[Dropped] = []
    for name, path in files:
        try:
            status = path.stat()
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
                dropped.append(Dropped(name, "not a regular file"))
            elif size > LARGEST_FILE:
                dropped.append(Dropped(name, f"enormous ({size} bytes, at most {LARGEST_FILE}; split it)"))
            else:
                texts.append((name, path.read_bytes()))
        except OSError as error:
            dropped.append(Dropped(name, f"cannot be read ({error.strerror})"))
    return texts, dropped


def read_folder(
    folder: str | Path,
    *,
    suffixes: tuple[str, ...] | None = None,
    skip_folders: frozenset[str] = _UNSEEN,
    count_others: bool = True,
) -> tuple[list[tuple[str, bytes]], list[Dropped]]:
    """``list_folder`` and ``read_files`` in one: (name, content) pairs, and what was left out."""
    files, dropped = list_folder(folder, suffixes=suffixes, skip_folders=skip_folders, count_others=count_others)
    texts, unread = read_files(files)
    return texts, dropped + unread


def folder_source(
    folder: str | Path,
    *,
    name: str | None = None,
    licence: str = "unknown",
    suffixes: tuple[str, ...] | None = None,
    one_in: int = HELD_OUT_ONE_IN,
) -> Corpus:
    """The text files below a folder, one document a file. Raises DataError when there are none."""
    name = name or Path(folder).resolve().name
    texts, dropped = read_folder(folder, suffixes=suffixes)
    if not texts:
        raise no_documents(name, [folder], suffixes, dropped)
    return make_corpus(
        name,
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
    # Libraries, caches and tests are no text that was passed over: they differ from machine to machine.
    texts, dropped = read_folder(root, suffixes=(".py",), skip_folders=_NOT_LIBRARY, count_others=False)
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
