"""Level 3: generation. `generate` is one call of `Engine`."""

from __future__ import annotations

from trine.engine.engine import Completion, Engine, Request, generate
from trine.engine.sampling import Sampling

__all__ = ["Completion", "Engine", "Request", "Sampling", "generate"]
