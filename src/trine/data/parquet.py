"""Parquet files, read with ``pyarrow`` (extra ``data``); nothing else in the package imports it."""

from __future__ import annotations

from pathlib import Path

from trine.data._errors import DataError
from trine.data.records import Named, record_text
from trine.data.sources import Dropped

_ROWS_AT_ONCE = 1024


def read_parquet(name: str, path: Path, column: str = "text") -> Named:
    """One document a row: the text in ``column``.

    Returns:
        (name, content) pairs, named ``FILE:ROW`` from 1, and the rows that hold none.

    Raises:
        DataError: ``pyarrow`` is missing, the file is damaged, or has no such column.
    """
    try:
        import pyarrow  # type: ignore
        import pyarrow.parquet  # type: ignore
    except ImportError as error:
        raise DataError(
            f"Parquet file {path}: needs pyarrow; in the clone: .venv/bin/pip install -e '.[data]'"
        ) from error
    kept: list[tuple[str, bytes]] = []
    dropped: list[Dropped] = []
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if column not in columns:
                raise DataError(f"Parquet file {path}: no column {column!r}, it has {', '.join(columns)}")
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[column]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    wrong = record_text({column: value}, column, f"{name}:{number}", kept)
                    dropped += [wrong] if wrong else []
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"Parquet file {path}: cannot be read ({str(error).splitlines()[0]})") from error
    return kept, dropped
