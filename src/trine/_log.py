"""The one logger. Its level comes from the environment variable ``TRINE_LOG`` (default ``WARNING``)."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("trine")
logger.addHandler(logging.NullHandler())
logger.setLevel(os.environ.get("TRINE_LOG", "WARNING").upper())
