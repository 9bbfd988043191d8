"""Streaming text: no half characters, no half stop texts, nothing lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trine.engine.text import TextStream


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def feed(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(decode, stop)
    pieces = [stream.push(b) for b in text.encode()]
    return [*pieces, stream.finish()], stream


@pytest.mark.parametrize("text", ["plain", "naïve – Δ 𝛼🙂", ""])
def test_characters_come_whole(text: str) -> None:
    pieces, stream = feed(text)
    assert "".join(pieces) == stream.text == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_broken_bytes_come_out_in_the_end() -> None:
    stream = TextStream(decode)
    out = "".join(stream.push(b) for b in b"a\xf0\x9f") + stream.finish()
    assert out == stream.text
    assert out.startswith("a")
    assert "\ufffd" in out


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("one END two", ("END",), "one "),
        ("one EN two", ("END",), "one EN two"),
        ("EEND", ("END",), "E"),
        ("a stop b halt", ("halt", "stop"), "a "),
        ("ends with EN", ("END",), "ends with EN"),
        ("aab", ("ab",), "a"),
    ],
)
def test_stop_texts(text: str, stop: tuple[str, ...], kept: str) -> None:
    pieces, stream = feed(text, stop)
    assert "".join(pieces) == stream.text == kept
    assert stream.stopped == (kept != text)
