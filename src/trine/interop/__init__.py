"""Level 4. Other libraries' names and layouts for what Trine has."""

from __future__ import annotations

from trine.interop.released import check_exportable

__all__ = ["check_exportable"]
