"""`trine data VERB`: sources in the store, recipes that fetch them, and a look at packed rows."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from trine._options import dispatch, parse
from trine.config import SourceShare

HELP = """\
usage: trine data VERB [options]

  add NAME PATH...   give text a name: folders, code trees, JSON Lines, Parquet
  fetch RECIPE       debian-docs or linux-source, by this system's package tool, with a table of licences
  list               what the store holds
  preview SOURCE...  packed rows as the model sees them

trine data VERB --help tells the options of one.
"""


@dataclass(frozen=True)
class Add:
    """Give text a name. It is not copied: the store keeps which files it is, and their hashes."""

    name: Annotated[Positional[str], tyro.conf.arg(metavar="NAME")]
    paths: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="PATH")]  # folders and files
    licence: str = "unknown"  # SPDX identifier of the text
    kind: Literal["auto", "text", "code", "jsonl", "parquet", "bundle"] = "auto"  # bundle: a code tree, by subtrees
    column: str = "text"  # field or column that holds the text (jsonl, parquet)
    suffixes: tuple[str, ...] = ()  # endings of file names to take from folders; none takes all, or those of code
    largest: int = 4_194_304  # bytes of a document (bundle)
    questions: int = 0  # questions at the end of a document, at most (bundle)
    replace: bool = False  # take the place of a source of this name
    store: str = "data"  # folder of the store


@dataclass(frozen=True)
class Fetch:
    """Download packages with text, unpack them (nothing is installed) and add their text to the store."""

    recipe: Annotated[Positional[str], tyro.conf.arg(metavar="RECIPE")]  # debian-docs or linux-source
    replace: bool = False  # fetch again what is in the store
    store: str = "data"  # folder of the store


@dataclass(frozen=True)
class List:
    """What the store holds."""

    store: str = "data"  # folder of the store
    json: bool = False  # print JSON instead of a table


@dataclass(frozen=True)
class Preview:
    """Packed rows as the model sees them: boundaries, sources, weights. Nothing is kept."""

    sources: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="SOURCE")] = ("stdlib",)  # or run folders
    weights: tuple[float, ...] = ()  # share of each source; none takes all documents as they come
    length: int = 256  # tokens of a row
    rows: int = 4  # rows to show
    step: int = 0  # which step
    seed: int = 0  # of the order
    vocabulary: int = 4096  # size of the vocabulary that is learned
    shown: int = 400  # characters of each sequence
    store: str = "data"  # folder of the store


def main(args: list[str]) -> int:
    """Run one `trine data` command line."""
    return dispatch("data", VERBS, HELP, args)


def _add(args: list[str]) -> int:
    options = parse("data add", Add, args)
    from trine.data import add

    values = {key: value for key, value in asdict(options).items() if key not in ("name", "paths")}
    source = add(options.name, options.paths, **values)
    print(f"{source.name}: {source.documents} documents, {source.bytes / 1e6:.1f} MB, licence {source.licence}")
    for one in source.dropped[:10]:
        print(f"  left out: {one.name} ({one.reason})")
    if len(source.dropped) > 10:
        print(f"  left out: {len(source.dropped) - 10} more, in {Path(options.store) / source.name}.json")
    print(f"Next: trine data preview {source.name}")
    return 0


def _fetch(args: list[str]) -> int:
    options = parse("data fetch", Fetch, args)
    from rich.console import Console
    from rich.table import Table

    from trine.data.fetch import fetch

    source, packages = fetch(options.recipe, store=options.store, replace=options.replace)
    table = Table(title=f"{source.name}: {source.documents} documents, {source.bytes / 1e6:.1f} MB")
    for column in ("package", "version", "licence", "its copyright file states", "files", "MB"):
        table.add_column(column)
    for one in packages:
        stated = ", ".join(one.stated) or "no License field"
        table.add_row(one.package, one.version, one.licence, stated, str(one.files), f"{one.bytes / 1e6:.1f}")
    Console().print(table)
    return 0


def _list(args: list[str]) -> int:
    options = parse("data list", List, args)
    from rich.console import Console
    from rich.table import Table

    from trine.data import stored, stored_names

    found = [stored(name, options.store) for name in stored_names(options.store)]
    if options.json:
        keys = ("name", "licence", "documents", "bytes")
        rows = [{**{key: getattr(s, key) for key in keys}, "kind": s.reading.kind, "hash": s.hash} for s in found]
        print(json.dumps(rows))
        return 0
    table = Table(title=f"{options.store}/")
    for column in ("name", "kind", "licence", "documents", "MB", "hash"):
        table.add_column(column)
    for s in found:
        table.add_row(s.name, s.reading.kind, s.licence, str(s.documents), f"{s.bytes / 1e6:.1f}", s.hash[:12])
    Console().print(table)
    return 0


def _preview(args: list[str]) -> int:
    options = parse("data preview", Preview, args)
    from rich.console import Console

    from trine.data import DataError, MixturePlan, Shards, prepare
    from trine.views.rows import mixture_table, rows_view

    if options.weights and len(options.weights) != len(options.sources):
        raise DataError(f"weights: found {len(options.weights)} for {len(options.sources)} sources, need one each")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(options.sources[0]) / "data"
        if len(options.sources) == 1 and (run / "manifest.json").is_file():
            shards = Shards.open(run)
        else:
            shards = prepare(folder, options.sources, options.vocabulary, store=options.store)
        names = shards.sources if options.weights else ()
        plan = MixturePlan(
            shards,
            tuple(SourceShare(name, weight) for name, weight in zip(names, options.weights, strict=False)),
            row_length=options.length,
            tokens_per_step=options.rows * options.length,
            micro_batch_tokens=options.length,
            steps=options.step + 1,
            seed=options.seed,
            allow_repeats=True,
        )
        console = Console()
        console.print(mixture_table(plan.report()))
        for warning in plan.report().warnings:
            console.print(f"warning: {warning}", style="yellow", markup=False)
        console.print(rows_view(plan.micro_batches(options.step), shards, options.shown))
    return 0


VERBS: dict[str, Callable[[list[str]], int]] = {"add": _add, "fetch": _fetch, "list": _list, "preview": _preview}
