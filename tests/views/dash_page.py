"""A small synthesised run and the questions that a page asks of it, for the tests of the dashboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trine.views import dash_app
from trine.views.demo import DemoSize

HOSTILE = "<img src=x onerror=alert(1)>"
SIZE = DemoSize(layers=3, experts=16, top_k=2, steps=60, keep=20, tokens=1024, ranks=4)


def shown(*folders: Path, page: str = "balance", **words: Any) -> str:
    """What the page is told when it first asks, JSON."""
    return get(dash_app.build(folders).server.test_client(), page=page, **words).text


def get(client: Any, **words: Any) -> Any:
    """An answer to a question of the page."""
    found = client.get("/figures", query_string=words, base_url="http://127.0.0.1")
    assert found.status_code in (200, 204), found.text
    return found


def parts(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures of an answer by their ids."""
    return {part["id"]: part for figure in found["figures"] for part in figure}


def having(found: dict[str, Any]) -> dict[str, str]:
    """How a page that has taken an answer in asks on."""
    have = ",".join(f"{name}:{part['mark']}" for name, part in parts(found).items())
    return {"seen": found["version"], "have": have, "known": found["known"]}
