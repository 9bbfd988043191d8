"""Data: sources -> documents -> shards -> packing plan -> batches.

``prepare`` builds or opens the shards of a source, ``PackingPlan`` says what each step of a stage holds.
"""

from __future__ import annotations

from trine.data._errors import DataError
from trine.data.batch import IGNORE_INDEX, Batch
from trine.data.dataset import prepare
from trine.data.packing import PackingPlan, PackingReport, Piece
from trine.data.shards import DocumentEntry, Shards, manifest_hash, write_shards
from trine.data.sources import Corpus, Document, Dropped, folder_source, load_source, stdlib_source
from trine.data.tokenizer import END_OF_DOCUMENT, Tokenizer

__all__ = [
    "END_OF_DOCUMENT",
    "IGNORE_INDEX",
    "Batch",
    "Corpus",
    "DataError",
    "Document",
    "DocumentEntry",
    "Dropped",
    "PackingPlan",
    "PackingReport",
    "Piece",
    "Shards",
    "Tokenizer",
    "folder_source",
    "load_source",
    "manifest_hash",
    "prepare",
    "stdlib_source",
    "write_shards",
]
