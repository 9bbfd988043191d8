"""The one exception of this room."""

from __future__ import annotations


class DataError(ValueError):
    """Data that is absent, unreadable, damaged or out of range. The message is one line that names what and where."""
