"""Token shards: every document's tokens in one memory-mapped file, with an index, checksums and a manifest.

A shard folder holds

- ``tokens.npy``: uint16 or uint32, the documents one after another; each begins with the end-of-document token;
- ``offsets.npy``: int64 ``[D + 1]``, where each document begins;
- ``weights.npy``, only where some document asks for it: float16, the weight of each token as a target of the loss; that
  of a document's end stands at its first token;
- ``tokenizer.json``;
- ``manifest.json``: format version, sources and licences, every document's name, family, split, sizes and hash, what
  was dropped, and the checksums of the files above.

The manifest is written last, so a folder without one is half-written. Its hash names the data of a run.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from trine.data._errors import DataError
from trine.data._files import file_hash, write_atomically
from trine.data.sources import Corpus, Document
from trine.data.tokenizer import Tokenizer

FORMAT_VERSION = 2
"""Newest version read. Written is the oldest that says it all: 2 with weights, 1 without."""
_FILES = ("tokens.npy", "offsets.npy", "tokenizer.json")
_BLOCK = 1 << 20
_ENCODED_AT_ONCE = 1 << 25


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
    """SHA-256 of a manifest in canonical JSON, hexadecimal.

    Without ``places``, which differ between machines, and ``blocks``, which say nothing that ``files`` does not.
    """
    text = json.dumps(
        {key: value for key, value in manifest.items() if key not in ("places", "blocks")},
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _block_hashes(file: IO[bytes]) -> list[str]:
    """The first 16 digits of the SHA-256 of each block of a file."""
    return [hashlib.sha256(block).hexdigest()[:16] for block in iter(lambda: file.read(_BLOCK), b"")]


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
    tokens, weights, offsets = _encode(documents, tokenizer)
    counts = (np.diff(offsets) - 1).tolist()
    contents = {"tokens.npy": _npy(tokens), "offsets.npy": _npy(offsets)}
    if weights is not None:
        contents["weights.npy"] = _npy(weights)
    contents["tokenizer.json"] = tokenizer.to_json().encode()
    manifest: dict[str, Any] = {
        "format_version": 1 if weights is None else 2,
        "sources": [_describe(corpus) for corpus in corpora],
        "documents": [_entry(document, count).__dict__ for document, count in zip(documents, counts, strict=True)],
        "vocab_size": tokenizer.vocab_size,
        "places": {corpus.source: corpus.place for corpus in corpora},
        "files": {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in contents.items()
        },
        "blocks": {
            "bytes": _BLOCK,
            "sha256": {name: _block_hashes(BytesIO(content)) for name, content in contents.items()},
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


def _encode(
    documents: Sequence[Document], tokenizer: Tokenizer
) -> tuple[NDArray[Any], NDArray[np.float16] | None, NDArray[np.int64]]:
    """Tokens and weights of all documents, each after the end-of-document token, and where each begins."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    weighted = any(document.weights is not None for document in documents)
    end = np.array([tokenizer.eod_id], dtype=dtype)
    tokens: list[NDArray[Any]] = []
    weights: list[NDArray[np.float16]] = []
    lengths = [0]
    for part in _parts(documents, _ENCODED_AT_ONCE):
        for document, ids in zip(part, tokenizer.encode_batch([one.text for one in part]), strict=True):
            tokens += [end, ids.astype(dtype)]
            lengths.append(ids.size + 1)
            if weighted:
                weights.append(token_weights(document, tokenizer.byte_lengths[ids]))
    return np.concatenate(tokens), np.concatenate(weights) if weighted else None, np.cumsum(lengths, dtype=np.int64)


def _parts(documents: Sequence[Document], size: int) -> Iterator[Sequence[Document]]:
    """Documents in runs of at least ``size`` characters, so that not all of them are encoded at once."""
    begin = have = 0
    for i, document in enumerate(documents):
        have += len(document.text)
        if have >= size or i + 1 == len(documents):
            yield documents[begin : i + 1]
            begin, have = i + 1, 0


def token_weights(document: Document, lengths_T: NDArray[np.int32]) -> NDArray[np.float16]:
    """Loss weights of a document's tokens, from its spans.

    Args:
        document: the document.
        lengths_T: bytes each of its T tokens stands for.

    Returns:
        float16 [T + 1]: the weight of the document's end, then of each token. A token gets the weight of the last span
        that holds one of its bytes.
    """
    if document.weights is None:
        return np.ones(lengths_T.size + 1, dtype=np.float16)
    text = document.text
    found = np.zeros(lengths_T.size + 1, dtype=np.float16)
    end_T = np.cumsum(lengths_T, dtype=np.int64)
    for begin, end, weight in document.weights:
        if end > len(text):
            found[0] = weight
        if not text.isascii():
            begin, end = len(text[:begin].encode()), len(text[:end].encode())
        first, last = np.searchsorted(end_T, begin, side="right"), np.searchsorted(end_T - lengths_T, end)
        found[1 + first : 1 + last] = weight
    return found


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
        weights: float16, the loss weight of each token as a target, mapped; None when every token weighs 1.
        tokenizer: the vocabulary the tokens belong to.
        source_of: int64 [D], number of each document's source.
        byte_lengths: int64 [vocab_size], bytes each token stands for.
    """

    def __init__(
        self,
        folder: Path,
        manifest: dict[str, Any],
        tokens: NDArray[Any],
        offsets: NDArray[np.int64],
        weights: NDArray[np.float16] | None = None,
    ) -> None:
        """Use ``Shards.open``."""
        self.folder = folder
        self.manifest = manifest
        self.hash = manifest_hash(manifest)
        self.documents: tuple[DocumentEntry, ...] = tuple(DocumentEntry(**entry) for entry in manifest["documents"])
        self.sources: tuple[str, ...] = tuple(source["name"] for source in manifest["sources"])
        self.tokens = tokens
        self.offsets = offsets
        self.weights = weights
        self.tokenizer = Tokenizer.load(folder / "tokenizer.json")
        number = {name: i for i, name in enumerate(self.sources)}
        self.source_of = np.array([number[entry.source] for entry in self.documents], dtype=np.int64)
        self.byte_lengths: NDArray[np.int64] = self.tokenizer.byte_lengths.astype(np.int64)

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
        blocks = manifest.get("blocks", {}).get("sha256", {})
        weighted = "weights.npy" in manifest["files"]
        for name in (*_FILES, "weights.npy") if weighted else _FILES:
            _check_file(root / name, manifest["files"][name], verify, blocks.get(name, []))
        weights = None
        try:
            tokens = np.load(root / "tokens.npy", mmap_mode="r", allow_pickle=False)
            offsets = np.load(root / "offsets.npy", allow_pickle=False)
            if weighted:
                weights = np.load(root / "weights.npy", mmap_mode="r", allow_pickle=False)
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
        if weights is not None and (weights.shape != tokens.shape or weights.dtype != np.float16):
            found = f"shape {weights.shape}, {weights.dtype}"
            raise DataError(f"shards {root / 'weights.npy'}: found {found}, need float16 for {tokens.size} tokens")
        if verify and weights is not None and not (np.isfinite(weights) & (weights >= 0)).all():
            where = int(np.argmin(np.isfinite(weights) & (weights >= 0)))
            raise DataError(f"shards {root / 'weights.npy'}: weight {where} is {weights[where]}, need 0 or more")
        shards = cls(root, manifest, tokens, offsets, weights)
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

    def target_weights(self, document: int, start: int, length: int) -> NDArray[np.float32] | float:
        """Weights in the loss of targets ``start .. start + length - 1`` of a document; 1.0 when all weigh the same.

        The weight of a document's last target, its end, stands at the place of its first token, the start symbol.
        """
        if self.weights is None:
            return 1.0
        weights_T = self.weights[self.offsets[document] : self.offsets[document + 1]]
        if start + 1 + length <= weights_T.size:
            return weights_T[start + 1 : start + 1 + length].astype(np.float32)
        return np.append(weights_T[start + 1 :], weights_T[0]).astype(np.float32)

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
    if not 1 <= version <= FORMAT_VERSION:
        raise DataError(f"shards {path}: format_version {version}, this release reads 1 to {FORMAT_VERSION}")
    missing = [key for key in ("sources", "documents", "files", "vocab_size") if key not in manifest]
    missing += [f"files.{name}" for name in _FILES if name not in manifest.get("files", {})]
    if missing:
        raise DataError(f"shards {path}: lacks {', '.join(missing)}")
    return manifest


def _check_file(path: Path, expected: dict[str, Any], verify: bool, blocks: Sequence[str]) -> None:
    """Compare a file with what the manifest says of it. Raises DataError."""
    if not path.is_file():
        raise DataError(f"shards {path}: missing")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise DataError(f"shards {path}: {size} bytes, the manifest says {expected['bytes']} (truncated or changed)")
    if verify and file_hash(path) != expected["sha256"]:
        with open(path, "rb") as file:
            pairs = enumerate(zip(_block_hashes(file), blocks, strict=False))
            wrong = next((i for i, (here, there) in pairs if here != there), None)
        where = "" if wrong is None else f"; the first block that differs begins at byte {wrong * _BLOCK}"
        raise DataError(f"shards {path}: checksum differs from the manifest (corrupt){where}")
