"""Writing files so that a reader finds the old content or the new, never half of it."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from trine.data._errors import DataError


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` under a temporary name, flush to disk, rename.

    Raises:
        DataError: the folder is missing or not writable, or the disk is full; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        with suppress(OSError):  # gone when all went well
            temporary.unlink()


def file_hash(path: Path) -> str:
    """SHA-256 of a file's content, hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
