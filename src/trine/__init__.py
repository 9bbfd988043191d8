"""Trine: the design of Kimi K3 as a library and training system.

Importing the package loads neither torch nor any optional dependency; the public names below load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trine.cache import HybridCache as HybridCache
    from trine.config import ModelConfig as ModelConfig
    from trine.model import Model as Model
    from trine.ops._errors import check_errors as check_errors

__version__ = "0.1.0"
__all__ = ["HybridCache", "Model", "ModelConfig", "__version__", "check_errors"]

_HOME = {
    "Model": "trine.model",
    "ModelConfig": "trine.config",
    "HybridCache": "trine.cache",
    "check_errors": "trine.ops._errors",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'trine' has no attribute {name!r}")
