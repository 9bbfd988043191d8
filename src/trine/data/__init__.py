"""Data: sources -> documents -> shards -> mixture -> packing plan -> batches.

``prepare`` builds or opens the shards of sources, ``MixturePlan`` says what each step of a stage holds; ``add`` gives a
source a name. Text can also be made: a generator hands ``Document.make`` objects over in a ``Corpus`` or ``Recipe``.
"""

from __future__ import annotations

from trine.data._errors import DataError
from trine.data.batch import IGNORE_INDEX, Batch
from trine.data.dataset import Recipe, prepare
from trine.data.mixture import MixturePlan, MixtureReport, PartReport
from trine.data.packing import PackingPlan, PackingReport
from trine.data.records import dataset_source
from trine.data.rows import Piece, RowPlan
from trine.data.shards import DocumentEntry, Shards, manifest_hash, write_shards
from trine.data.sources import Corpus, Document, Dropped, folder_source, stdlib_source
from trine.data.store import StoredSource, add, load_source, stored, stored_names
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
    "MixturePlan",
    "MixtureReport",
    "PackingPlan",
    "PackingReport",
    "PartReport",
    "Piece",
    "Recipe",
    "RowPlan",
    "Shards",
    "StoredSource",
    "Tokenizer",
    "add",
    "dataset_source",
    "folder_source",
    "load_source",
    "manifest_hash",
    "prepare",
    "stdlib_source",
    "stored",
    "stored_names",
    "write_shards",
]
