"""Token shards: every document's tokens in one memory-mapped file, with an index, checksums and a manifest.

A shard folder holds

- ``tokens.npy``: uint16 or uint32, the documents one after another; each begins with the end-of-document token;
- ``offsets.npy``: int64 ``[D + 1]``, where each document begins;
- ``tokenizer.json``;
- ``manifest.json``: format version, sources and licences, every document's name, family, split, sizes and hash, what
  was dropped, and the checksums of the files above.

The manifest is written last, so a folder without one is half-written. Its hash names the data of a run.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trine.data._errors import DataError
from trine.data._files import write_atomically
from trine.data.sources import Corpus, Document
from trine.data.tokenizer import Tokenizer

FORMAT_VERSION = 1
_FILES = ("tokens.npy", "offsets.npy", "tokenizer.json")


@dataclass(frozen=True)
class DocumentEntry:
    """What the manifest says of one document.

    Attributes:
        name, source, family, split, near_copy, licence, sha256: as in ``Document``.
        bytes: UTF-8 bytes of the text.
        tokens: tokens of the text, without the end-of-document token.
    """

    name: str
    source: str
    family: str
    split: str
    near_copy: bool
    licence: str
    sha256: str
    bytes: int
    tokens: int


def manifest_hash(manifest: dict[str, Any]) -> str:
    """SHA-256 of a manifest in canonical JSON, hexadecimal; without ``places``, which differ between machines."""
    text = json.dumps(
        {key: value for key, value in manifest.items() if key != "places"},
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _file_hash(path: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _npy(array: NDArray[Any]) -> bytes:
    """The content of the ``.npy`` file of an array."""
    buffer = BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def write_shards(folder: str | Path, corpora: Sequence[Corpus], tokenizer: Tokenizer) -> Shards:
    """Tokenise corpora into ``folder``, which is made if need be, and open it.

    The same corpora and tokenizer give the same files and manifest hash on every machine.

    Raises:
        DataError: no documents, one source twice, or the folder cannot be written.
    """
    root = Path(folder)
    names = [corpus.source for corpus in corpora]
    if len(set(names)) != len(names):
        raise DataError(f"shards {root}: one source twice in {names}")
    documents = [document for corpus in corpora for document in corpus.documents]
    if not documents:
        raise DataError(f"shards {root}: no documents")
    encoded = tokenizer.encode_batch([document.text for document in documents])
    lengths = np.array([ids.size + 1 for ids in encoded], dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    tokens = np.empty(int(offsets[-1]), dtype=np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    for ids, start in zip(encoded, offsets[:-1].tolist(), strict=True):
        tokens[start] = tokenizer.eod_id
        tokens[start + 1 : start + 1 + ids.size] = ids
    contents = {
        "tokens.npy": _npy(tokens),
        "offsets.npy": _npy(offsets),
        "tokenizer.json": tokenizer.to_json().encode(),
    }
    manifest: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "sources": [_describe(corpus) for corpus in corpora],
        "documents": [_entry(document, ids.size).__dict__ for document, ids in zip(documents, encoded, strict=True)],
        "vocab_size": tokenizer.vocab_size,
        "places": {corpus.source: corpus.place for corpus in corpora},
        "files": {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in contents.items()
        },
    }
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / "manifest.json").unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"shards {root}: cannot be made ({error.strerror})") from error
    need = sum(len(content) for content in contents.values())
    if shutil.disk_usage(root).free < need:
        raise DataError(f"shards {root}: needs {need} bytes of disk, found {shutil.disk_usage(root).free} free")
    for name, content in contents.items():
        write_atomically(root / name, content)
    write_atomically(root / "manifest.json", json.dumps(manifest, indent=1, ensure_ascii=True).encode())
    return Shards.open(root)


def _entry(document: Document, tokens: int) -> DocumentEntry:
    """The manifest's line for a document."""
    return DocumentEntry(
        name=document.name,
        source=document.source,
        family=document.family,
        split=document.split,
        near_copy=document.near_copy,
        licence=document.licence,
        sha256=document.sha256,
        bytes=len(document.text.encode()),
        tokens=tokens,
    )


def _describe(corpus: Corpus) -> dict[str, Any]:
    """The manifest's paragraph for a source."""
    counts = {}
    for split in ("train", "held_out"):
        for near_copy in (False, True):
            chosen = corpus.select(split, near_copy)
            key = split + ("_near_copies" if near_copy else "")
            counts[key] = {"documents": len(chosen), "bytes": sum(len(d.text.encode()) for d in chosen)}
    return {
        "name": corpus.source,
        "origin": corpus.origin,
        "held_out_one_in": corpus.one_in,
        "licences": sorted({document.licence for document in corpus.documents}),
        "counts": counts,
        "dropped": [{"name": d.name, "reason": d.reason} for d in corpus.dropped],
    }


class Shards:
    """An open shard folder. Tokens are memory-mapped; nothing is read before it is asked for, except to verify.

    Attributes:
        folder: where it lies.
        manifest: the manifest as read.
        hash: hash of the manifest; the identity of the data.
        documents: one entry a document, in the order of the tokens.
        sources: source names; ``Batch.source_N`` indexes them.
        tokens: the mapped tokens of all documents.
        offsets: int64 [D + 1].
        tokenizer: the vocabulary the tokens belong to.
    """

    def __init__(
        self, folder: Path, manifest: dict[str, Any], tokens: NDArray[Any], offsets: NDArray[np.int64]
    ) -> None:
        """Use ``Shards.open``."""
        self.folder = folder
        self.manifest = manifest
        self.hash = manifest_hash(manifest)
        self.documents: tuple[DocumentEntry, ...] = tuple(DocumentEntry(**entry) for entry in manifest["documents"])
        self.sources: tuple[str, ...] = tuple(source["name"] for source in manifest["sources"])
        self.tokens = tokens
        self.offsets = offsets
        self.tokenizer = Tokenizer.load(folder / "tokenizer.json")

    @classmethod
    def open(cls, folder: str | Path, verify: bool = True) -> Shards:
        """Open a shard folder.

        Args:
            folder: the folder.
            verify: compare checksums and look for ids out of range; without it only sizes are compared.

        Raises:
            DataError: no manifest, a newer format, a file missing, shortened or changed, ids out of range. The message
                names the file.
        """
        root = Path(folder)
        manifest = _read_manifest(root / "manifest.json")
        for name in _FILES:
            _check_file(root / name, manifest["files"][name], verify)
        try:
            tokens = np.load(root / "tokens.npy", mmap_mode="r", allow_pickle=False)
            offsets = np.load(root / "offsets.npy", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"shards {root}: cannot be mapped ({error})") from error
        if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
            found = f"shape {tokens.shape}, {tokens.dtype}"
            raise DataError(f"shards {root / 'tokens.npy'}: found {found}, need one vector of uint16 or uint32")
        count = len(manifest["documents"])
        if (
            offsets.shape != (count + 1,)
            or offsets[0] != 0
            or offsets[-1] != tokens.size
            or (np.diff(offsets) < 1).any()
        ):
            raise DataError(f"shards {root / 'offsets.npy'}: does not fit {count} documents and {tokens.size} tokens")
        shards = cls(root, manifest, tokens, offsets)
        if verify and tokens.size and int(tokens.max()) >= shards.tokenizer.vocab_size:
            where = int(np.argmax(tokens >= shards.tokenizer.vocab_size))
            raise DataError(
                f"shards {root / 'tokens.npy'}: token {where} is {int(tokens[where])}, "
                f"need ids below {shards.tokenizer.vocab_size}"
            )
        return shards

    def stream(self, document: int) -> NDArray[Any]:
        """The end-of-document token and then the tokens of a document; mapped, read-only."""
        return self.tokens[self.offsets[document] : self.offsets[document + 1]]

    def text(self, document: int) -> str:
        """The text of a document, exact; raises DataError when it is not what the manifest hashed."""
        content = self.tokenizer.decode_bytes(self.stream(document)[1:])
        entry = self.documents[document]
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise DataError(f"shards {self.folder}: the text of {entry.name} is not what the manifest says")
        return content.decode()

    def select(
        self, split: str | None = None, near_copy: bool | None = None, source: str | None = None
    ) -> NDArray[np.int64]:
        """Indices of the documents that fit, ascending."""
        return np.array(
            [
                i
                for i, entry in enumerate(self.documents)
                if (split is None or entry.split == split)
                and (near_copy is None or entry.near_copy == near_copy)
                and (source is None or entry.source == source)
            ],
            dtype=np.int64,
        )

    @property
    def licences(self) -> tuple[str, ...]:
        """SPDX identifiers of the documents, sorted."""
        return tuple(sorted({entry.licence for entry in self.documents}))


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read and check a manifest. Raises DataError."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"shards {path.parent}: has no manifest.json (half-written, or no shard folder)") from error
    except OSError as error:
        raise DataError(f"shards {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DataError(f"shards {path}: is not JSON ({error})") from error
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if not isinstance(version, int):
        raise DataError(f"shards {path}: has no format_version")
    if version != FORMAT_VERSION:
        raise DataError(f"shards {path}: format_version {version}, this release reads {FORMAT_VERSION}")
    missing = [key for key in ("sources", "documents", "files", "vocab_size") if key not in manifest]
    missing += [f"files.{name}" for name in _FILES if name not in manifest.get("files", {})]
    if missing:
        raise DataError(f"shards {path}: lacks {', '.join(missing)}")
    return manifest


def _check_file(path: Path, expected: dict[str, Any], verify: bool) -> None:
    """Compare a file with what the manifest says of it. Raises DataError."""
    if not path.is_file():
        raise DataError(f"shards {path}: missing")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise DataError(f"shards {path}: {size} bytes, the manifest says {expected['bytes']} (truncated or changed)")
    if verify and _file_hash(path) != expected["sha256"]:
        raise DataError(f"shards {path}: checksum differs from the manifest (corrupt)")
