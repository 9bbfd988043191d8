"""Level 0: operators. Tensors in, tensors out; no modules, no configuration, no global state."""

from __future__ import annotations

from trine.ops._backend import BackendUnavailable

__all__ = ["BackendUnavailable"]
