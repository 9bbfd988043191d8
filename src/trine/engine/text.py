"""Turning a growing list of tokens into text that can be shown at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are not yet a whole character
LONGEST_CHARACTER = 4  # bytes of a character in UTF-8, hence tokens of a byte-level vocabulary


class TextStream:
    """Decodes tokens as they come; holds back unfinished characters and whatever may be the start of a stop text.

    Args:
        decode: token ids to text; unfinished UTF-8 at the end shows as U+FFFD.
        stop: texts that end the stream; they and all that follows are left out.

    Attributes:
        text: everything released so far.
        stopped: whether a stop text was met.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._pending: list[int] = []
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take one token; return the text that is now certain (often "")."""
        if self.stopped:
            return ""
        self._pending.append(token)
        piece = self._decode(self._pending)
        if piece.endswith(REPLACEMENT) and len(self._pending) < LONGEST_CHARACTER:
            return ""
        self._pending.clear()
        return self._take(piece)

    def finish(self) -> str:
        """No more tokens will come: return what was held back."""
        if self.stopped:
            return ""
        released = self._take(self._decode(self._pending)) if self._pending else ""
        self._pending.clear()
        if not self.stopped:
            released, self.text, self._held = released + self._held, self.text + self._held, ""
        return released

    def _take(self, piece: str) -> str:
        known = self._held + piece
        hits = [known.find(stop) for stop in self._stop if stop in known]
        if hits:
            self.stopped = True
            released, self._held = known[: min(hits)], ""
        else:
            cut = len(known) - max((_overlap(known, stop) for stop in self._stop), default=0)
            released, self._held = known[:cut], known[cut:]
        self.text += released
        return released


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
