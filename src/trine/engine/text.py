"""Turning a growing list of tokens into text that can be shown at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are not yet a whole character
KEPT_TOKENS = 8  # what is kept of them at most, as a rule; more than the 3 that an unfinished character can have


class TextStream:
    """Decodes tokens as they come; holds back an unfinished character and whatever may be the start of a stop text.

    An unfinished character shows as one U+FFFD at the end (what Python's decoder gives), so all before that is certain.
    The pieces together are what `decode` gives for all tokens at once.

    Args:
        decode: token ids to text; unfinished UTF-8 at the end shows as U+FFFD.
        stop: texts that end the stream; they and all that follows are left out.

    Attributes:
        text: everything released so far.
        stopped: whether a stop text was met.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._pending: list[int] = []  # tokens whose text may still change ...
        self._certain = 0  # ... and how many characters of it do not, and were released
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take one token; return the text that is now certain (often "")."""
        if self.stopped:
            return ""
        self._pending.append(token)
        piece = self._decode(self._pending)
        fresh = piece[self._certain :]
        if not piece.endswith(REPLACEMENT):
            self._pending.clear()
            self._certain = 0
            return self._take(fresh)
        self._certain = len(piece) - 1
        if len(self._pending) > KEPT_TOKENS:
            self._forget(piece)
        return self._take(fresh[:-1])

    def finish(self) -> str:
        """No more tokens will come: return what was held back."""
        if self.stopped:
            return ""
        released = self._take(self._decode(self._pending)[self._certain :]) if self._pending else ""
        self._pending.clear()
        self._certain = 0
        if not self.stopped:
            released, self.text, self._held = released + self._held, self.text + self._held, ""
        return released

    def _forget(self, piece: str) -> None:
        """Drop tokens that no later one can change: `piece` is the text before and after such a place, put together."""
        for cut in range(len(self._pending) - 1, 0, -1):
            rest = self._decode(self._pending[cut:])
            if rest and self._decode(self._pending[:cut]) + rest == piece:
                self._pending = self._pending[cut:]
                self._certain = len(rest) - 1
                return

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
