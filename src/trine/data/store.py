"""The store: sources by name. ``data/NAME.json`` says which files a source is, with their hashes, and how to read them.

Texts are not copied: a source whose files vanished or changed since they were added is refused by name, so that the
name always means the same text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any, Literal

from trine.data._errors import DataError
from trine.data._files import file_hash, write_atomically
from trine.data.bundles import LARGEST, bundle
from trine.data.parquet import read_parquet
from trine.data.records import Named, read_json_lines
from trine.data.sources import (
    HELD_OUT_ONE_IN,
    NEVER_READ,
    Corpus,
    Dropped,
    folder_source,
    list_folder,
    make_corpus,
    no_documents,
    read_files,
    stdlib_source,
)

STORE = "data"
"""Folder of the store, below the working directory."""
FORMAT_VERSION = 1
Kind = Literal["auto", "text", "code", "jsonl", "parquet", "bundle"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ENDINGS = {".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_CODE = """
py pyi c h cc cpp hpp cu cuh rs go java js ts tsx jsx rb sh pl pm lua jl r scala kt swift hs ml el lisp clj sql S asm
cmake mk toml cfg ini yaml yml rst md txt
"""
CODE = (*(f".{ending}" for ending in _CODE.split()), "Makefile", "Kconfig")
"""Endings of the names of files that belong to a code tree."""
_SUFFIXES = {
    "code": CODE,
    "bundle": CODE,
    "jsonl": (".jsonl", ".jsonl.gz", ".ndjson"),
    "parquet": (".parquet",),
}
_NOT_CODE = frozenset(
    {"__pycache__", ".git", ".hg", ".svn", "node_modules", ".venv", "venv", ".tox", ".mypy_cache", "dist", "build"}
)


@dataclass(frozen=True)
class SourceFile:
    """One file of a source: its name in the source, where it lies, its size, and the SHA-256 of its content."""

    name: str
    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Reading:
    """How files become documents.

    Attributes:
        kind: ``text`` and ``code``: a document a file; ``jsonl`` and ``parquet``: a document a record; ``bundle``: a
            document a subtree.
        column: ``jsonl`` and ``parquet``: the field or column that holds the text.
        suffixes: endings of file names to take from folders; none takes all (``code``: ``CODE``).
        largest: ``bundle``: bytes of a document.
        questions: ``bundle``: questions at its end, at most.
    """

    kind: str = "text"
    column: str = "text"
    suffixes: tuple[str, ...] = ()
    largest: int = LARGEST
    questions: int = 0


@dataclass(frozen=True)
class StoredSource:
    """What the store knows about a source.

    Attributes:
        name, licence: its name and SPDX identifier.
        reading: how its files are read.
        files: its files.
        documents, bytes: what they gave when they were added.
        dropped: what was left out then.
        details: anything else worth keeping, for example licences of the packages it came from.
    """

    name: str
    licence: str
    reading: Reading
    files: tuple[SourceFile, ...]
    documents: int
    bytes: int
    dropped: tuple[Dropped, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def hash(self) -> str:
        """SHA-256 over what decides its documents: licence, reading, names and contents of the files."""
        parts = [self.licence, asdict(self.reading), [(file.name, file.sha256) for file in self.files]]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def origin(self) -> dict[str, str]:
        """See ``Corpus``."""
        return {"kind": "store", "reader": self.reading.kind, "hash": self.hash}

    def corpus(self, one_in: int = HELD_OUT_ONE_IN) -> Corpus:
        """Read the documents.

        Raises:
            DataError: a file vanished or changed since it was added.
        """
        for file in self.files:
            path = Path(file.path)
            if not path.is_file():
                raise DataError(
                    f"source {self.name}: {path} vanished since it was added; bring it back, or add the source again"
                )
            size = path.stat().st_size
            if size != file.bytes or file_hash(path) != file.sha256:
                raise DataError(
                    f"source {self.name}: {path} changed since it was added ({size} bytes, then {file.bytes}); "
                    "bring the old content back, or add the source again"
                )
        texts, dropped = read(self.reading, [(file.name, Path(file.path)) for file in self.files])
        corpus = make_corpus(
            *(self.name, texts), licence=self.licence, dropped=dropped, origin=self.origin, one_in=one_in
        )
        earlier = [one for one in self.dropped if one not in corpus.dropped]
        return replace_fields(corpus, dropped=(*earlier, *corpus.dropped))


def read(reading: Reading, files: Sequence[tuple[str, Path]]) -> Named:
    """The documents of files, as (name, content) pairs, and what was left out. Raises DataError."""
    if reading.kind in ("text", "code", "bundle"):
        texts, dropped = read_files(files)
        if reading.kind == "bundle":
            texts = bundle(texts, largest=reading.largest, questions=reading.questions)
        return texts, dropped
    reader: Callable[[str, Path, str], Named] = read_json_lines if reading.kind == "jsonl" else read_parquet
    texts, dropped = [], []
    for name, path in files:
        kept, lost = reader(name, path, reading.column)
        texts += kept
        dropped += lost
    return texts, dropped


def kind_of(path: Path) -> str:
    """How a path is read unless told otherwise: by the ending of a file's name, a folder as text."""
    endings = [kind for ending, kind in _ENDINGS.items() if path.is_file() and path.name.endswith(ending)]
    return endings[0] if endings else "text"


def _suffixes(reading: Reading) -> tuple[str, ...] | None:
    """Endings of the files that are read from folders; None for all."""
    return reading.suffixes or _SUFFIXES.get(reading.kind)


def list_paths(paths: Sequence[str | Path], reading: Reading) -> tuple[list[tuple[str, Path]], list[Dropped]]:
    """The files that paths stand for, named below them; below their own names when there are several paths.

    Raises:
        DataError: a path does not exist or cannot be listed.
    """
    found: list[tuple[str, Path]] = []
    dropped: list[Dropped] = []
    suffixes = _suffixes(reading)
    skip = frozenset({"__pycache__", ".git"}) if reading.kind == "text" else _NOT_CODE
    for path in map(Path, paths):
        if path.is_file():
            found.append((path.name, path.resolve()))
            continue
        prefix = f"{path.resolve().name}/" if len(paths) > 1 else ""
        files, lost = list_folder(path, suffixes=suffixes, skip_folders=skip)
        found += [(prefix + name, file.resolve()) for name, file in files]
        dropped += [Dropped(prefix + one.name, one.reason) for one in lost]
    return found, dropped


def add(
    name: str,
    paths: Sequence[str | Path],
    *,
    licence: str = "unknown",
    kind: Kind = "auto",
    column: str = "text",
    suffixes: Sequence[str] = (),
    largest: int = LARGEST,
    questions: int = 0,
    replace: bool = False,
    store: str | Path = STORE,
    details: dict[str, Any] | None = None,
) -> StoredSource:
    """Put a source into the store under a name.

    Args:
        name: letters, digits, ``.``, ``_`` and ``-``.
        paths: folders and files.
        licence: SPDX identifier of the text.
        kind: see ``Reading``; ``auto`` goes by the names of the files, which must then agree.
        column, suffixes, largest, questions: see ``Reading``.
        replace: take the place of a source of this name.
        store: folder of the store.
        details: see ``StoredSource``.

    Raises:
        DataError: a name that cannot be or is taken, a path that does not exist, or no documents. Nothing is then
            written.
    """
    where = _entry(name, store)
    if where.exists() and not replace:
        raise DataError(f"source {name}: is in the store already ({where}); choose another name, or replace it")
    if not paths:
        raise DataError(f"source {name}: found no path, need at least one")
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(f"source {name}: {path} does not exist")
    kinds = sorted({kind_of(Path(path)) for path in paths}) if kind == "auto" else [kind]
    if len(kinds) > 1:
        raise DataError(f"source {name}: found files of the kinds {', '.join(kinds)}, need one; name each by itself")
    reading = Reading(kinds[0], column, tuple(suffixes), largest, questions)
    files, dropped = list_paths(paths, reading)
    texts, lost = read(reading, files)
    # What is no document whatever its content is no part of the source: its content is not even hashed.
    unread = {one.name: one for one in lost if one.reason.startswith(NEVER_READ)}
    dropped += [unread[n] for n, _ in files if n in unread]
    files = [(n, path) for n, path in files if n not in unread]
    if not texts:
        raise no_documents(name, paths, _suffixes(reading), [*dropped, *lost])
    corpus = make_corpus(name, texts, licence=licence, dropped=[*dropped, *lost])
    source = StoredSource(
        name=name,
        licence=licence,
        reading=reading,
        files=tuple(SourceFile(n, str(path), path.stat().st_size, file_hash(path)) for n, path in files),
        documents=len(corpus.documents),
        bytes=sum(len(document.text.encode()) for document in corpus.documents),
        dropped=tuple(sorted(corpus.dropped, key=lambda one: one.name)),
        details=dict(details or {}),
    )
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"store {where.parent}: cannot be made ({error.strerror})") from error
    content = {"format_version": FORMAT_VERSION, "hash": source.hash, **asdict(source)}
    write_atomically(where, json.dumps(content, ensure_ascii=True).encode())
    return source


def stored(name: str, store: str | Path = STORE) -> StoredSource:
    """What the store knows about a source.

    Raises:
        DataError: there is none of this name, its entry is damaged, or a newer release wrote it.
    """
    where = _entry(name, store)
    try:
        content = json.loads(where.read_text(encoding="utf-8"))
        version = content.pop("format_version")
        if version != FORMAT_VERSION:
            raise DataError(f"store entry {where}: format_version {version}, this release reads {FORMAT_VERSION}")
        known = content.pop("hash")
        content["reading"] = Reading(**{**content["reading"], "suffixes": tuple(content["reading"]["suffixes"])})
        content["files"] = tuple(SourceFile(**file) for file in content["files"])
        content["dropped"] = tuple(Dropped(**one) for one in content["dropped"])
        source = StoredSource(**content)
    except FileNotFoundError as error:
        raise DataError(f"store {where.parent}: has no source {name}") from error
    except OSError as error:
        raise DataError(f"store entry {where}: cannot be read ({error.strerror})") from error
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"store entry {where}: damaged ({type(error).__name__}: {error})") from error
    if source.hash != known:
        raise DataError(f"store entry {where}: damaged (its hash is {source.hash[:12]}, it says {str(known)[:12]})")
    return source


def stored_names(store: str | Path = STORE) -> list[str]:
    """Names of the sources in the store, sorted."""
    return sorted(path.stem for path in Path(store).glob("*.json"))


def _entry(name: str, store: str | Path) -> Path:
    """File of a source in the store. Raises DataError for a name that cannot be."""
    if not _NAME.fullmatch(name) or name == "stdlib":
        raise DataError(f"source {name!r}: need a name of letters, digits, '.', '_' and '-' other than stdlib")
    return Path(store) / f"{name}.json"


def _is_stored(name: str, store: str | Path) -> bool:
    return name != "stdlib" and bool(_NAME.fullmatch(name)) and (Path(store) / f"{name}.json").is_file()


def load_source(source: str, *, one_in: int = HELD_OUT_ONE_IN, store: str | Path = STORE) -> Corpus:
    """The corpus that ``source`` names: ``"stdlib"``, a name in the store, or a folder or file of text.

    Raises:
        DataError: it names nothing, holds nothing, or is not what was added to the store.
    """
    if not source:
        raise DataError("data source '': found no name, need 'stdlib', a name in the store or a path")
    if source == "stdlib":
        return stdlib_source(one_in=one_in)
    if _is_stored(source, store):
        return stored(source, store).corpus(one_in)
    path = Path(source)
    if not path.exists():
        names = stored_names(store)
        known = f" ({', '.join(names)})" if names else ""
        raise DataError(f"data source {source}: neither 'stdlib', nor a name in the store{known}, nor an existing path")
    if path.is_dir():
        return folder_source(path, one_in=one_in)
    if not path.is_file():
        raise DataError(f"data source {source}: is neither a regular file nor a folder")
    texts, dropped = read(Reading(kind_of(path)), [(path.name, path)])
    return make_corpus(
        *(path.name.split(".")[0], texts),
        licence="unknown",
        dropped=dropped,
        origin={"kind": "folder"},
        one_in=one_in,
        place=str(path.resolve()),
    )


def source_identity(source: str, store: str | Path = STORE) -> tuple[str, dict[str, str], str]:
    """Name, origin and place of the corpus that ``source`` names, as ``load_source`` would give, without its texts."""
    if source == "stdlib":
        return "stdlib", {"kind": "python standard library"}, ""
    if _is_stored(source, store):
        return source, stored(source, store).origin, ""
    return Path(source).resolve().name, {"kind": "folder"}, str(Path(source).resolve())
