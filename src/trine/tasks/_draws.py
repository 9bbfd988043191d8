"""Random choices that are the same on every machine and with every version of every library."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
_MASK = (1 << 64) - 1


class Draws:
    """A stream of choices begun at a text; SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) underneath.

    Args:
        key: what the stream belongs to; two streams with different keys have nothing to do with each other.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._state = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")

    def fork(self, purpose: str) -> Draws:
        """Another stream that depends on the key and ``purpose`` alone, not on what was drawn before."""
        return Draws(f"{self.key}/{purpose}")

    def below(self, count: int) -> int:
        """A whole number from 0 to ``count - 1``."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((z ^ (z >> 31)) * count) >> 64

    def uniform(self) -> float:
        """A number from 0 to below 1."""
        return self.below(1 << 53) / (1 << 53)

    def between(self, low: int, high: int) -> int:
        """A whole number from ``low`` to ``high``, both included."""
        return low + self.below(high - low + 1)

    def choice(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """``count`` of the items, each at most once, in random order.

        Raises:
            ValueError: more than there are.
        """
        if count > len(items):
            raise ValueError(f"sample: asked for {count}, need at most {len(items)}")
        left = list(items)
        for i in range(count):
            j = i + self.below(len(left) - i)
            left[i], left[j] = left[j], left[i]
        return left[:count]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in random order."""
        return self.sample(items, len(items))
