"""Streaming text: no half characters, no half stop texts, nothing lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
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


BROKEN = [
    b"\xff\xff\xe2\x82\xac",
    b"\xff" * 50 + "\u20ac".encode(),
    b"a\xf0\x9f\x99\xe2\x82\xacb\xc3",
    b"\xe0\x80\x80\xf4\x90\xed\xa0\x80x\xe2\x82",
    "\ufffd\ufffd\ufffd\ufffd\u20ac\ufffd".encode(),
    bytes(range(256)) * 2,
]


@pytest.mark.parametrize("data", [*BROKEN, *(np.random.default_rng(i).bytes(300) for i in range(20))])
def test_broken_bytes_are_shown_as_the_decoder_shows_them(data: bytes) -> None:
    stream, longest = TextStream(decode), 0
    out = ""
    for byte in data:
        out += stream.push(byte)
        longest = max(longest, len(stream._pending))
        assert decode(data).startswith(out)
    out += stream.finish()
    assert out == stream.text == decode(data)
    assert longest <= 16


def test_tokens_of_several_bytes_and_of_none() -> None:
    table = [b"", b"\xff\xff\xe2", b"\x82", b"\xac!", b"\xf0\x9f", b"\x99\x82"]

    def spell(ids: Sequence[int]) -> str:
        return b"".join(table[i] for i in ids).decode("utf-8", errors="replace")

    for seed in range(30):
        ids = np.random.default_rng(seed).integers(0, len(table), 60).tolist()
        stream = TextStream(spell)
        assert "".join(stream.push(i) for i in ids) + stream.finish() == spell(ids)


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
