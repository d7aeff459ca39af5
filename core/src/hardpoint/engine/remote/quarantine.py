"""Requests that engines fail with again and again: which one it is shows when a new engine gets them one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_DOUBTED = 2
"""After so many failures without a token in between, a request is given to the next engine apart from its like."""


class Quarantine:
    """Requests, by number, that were open when an engine failed and got no token since.

    Where two engines in a row have failed with them, the third gets them one at a time, the newest first (before it
    came, steps went well), each until it gets a token or ends; whom it fails with then is to blame. All other requests
    go on at once.
    """

    def __init__(self) -> None:
        self._failures = Counter[int]()
        self._held: list[int] = []
        self._tried: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no request is in doubt: then there is nothing to clear."""
        return not self._failures

    def holds(self, number: int) -> bool:
        """Whether no engine has the request now."""
        return number in self._held

    def learn(self, numbers: Iterable[int]) -> int | None:
        """An engine failed while ``numbers`` were open. Returns the one that is to blame, where that is known."""
        tried, held = self._tried, self._held
        self._tried, self._held = None, []
        if tried is None:
            self._failures.update(number for number in numbers if number not in held)
        return tried

    def admit(self, numbers: Iterable[int]) -> list[int]:
        """The open requests that a new engine gets at once, in order; the others are held."""
        numbers = list(numbers)
        self._held = sorted(number for number in numbers if self._failures[number] >= _DOUBTED)
        self._tried = self._held.pop() if self._held else None
        return [number for number in numbers if number not in self._held]

    def clear(self, number: int) -> int | None:
        """The request got a token, or ended. Returns the held one that the engine gets next."""
        del self._failures[number]
        if number in self._held:
            self._held.remove(number)
        if number != self._tried:
            return None
        self._tried = self._held.pop() if self._held else None
        return self._tried
