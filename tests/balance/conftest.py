"""The policy under test, closed at the test's end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trine.balance import QuantileBalancing
from trine.balance.service import AsyncBalancing

sys.path.insert(0, str(Path(__file__).parent))  # for service_runs.py

from service_runs import K


@pytest.fixture
def balancing() -> Iterator[Callable[..., AsyncBalancing]]:
    made: list[AsyncBalancing] = []

    def make(mode: str = "thread", **options: Any) -> AsyncBalancing:
        made.append(AsyncBalancing(QuantileBalancing(K), mode, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
