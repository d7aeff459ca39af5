"""Parts of parsers of calls: steps that each take a stretch of text as it comes, in pieces cut anywhere.

``feed(text, pos)`` looks at ``text`` from ``pos`` on and returns where it stopped and whether it is done: True, the
step has its ``value`` and stopped behind it; False, the text is not what the step takes, and it stopped before the part
that something else may take; None, it took all there is and needs more. A step may stop before the text that it is
given, at a negative position, where it gives back what it took earlier; never more than the length of a mark.

Whether and where a step is done depends on the text alone, not on its pieces. Each character costs constant time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import ClassVar, Protocol

from hardpoint.parsers.calls import json_string, name_before_arguments

Fed = tuple[int, bool | None]

_NO_BLANK = re.compile(r"\S")
_MAX_DEPTH = 200
"""Deepest nesting of brackets that is taken for a call's."""


class TextMatcher(Protocol):
    """See the top of this file."""

    value: str

    def feed(self, text: str, pos: int) -> Fed:
        """Take ``text`` from ``pos`` on."""
        ...


def any_of(marks: Sequence[str]) -> re.Pattern[str]:
    """Matches each of ``marks``."""
    return re.compile("|".join(map(re.escape, marks)))


def begun_mark(text: str, marks: Sequence[str]) -> int:
    """The length of the end of ``text`` that may be the beginning of a mark, and not all of it."""
    longest = min(len(text), max(map(len, marks)) - 1)
    return next((k for k in range(longest, 0, -1) if any(m.startswith(text[-k:]) for m in marks)), 0)


class Look:
    """Skips blanks; ``value`` is the character behind them, which stays where it is."""

    value = ""

    def feed(self, text: str, pos: int) -> Fed:
        """Take blanks."""
        found = _NO_BLANK.search(text, pos)
        if found is None:
            return len(text), None
        self.value = found[0]
        return found.start(), True


class Literal:
    """Skips blanks, then takes one of ``marks``, the ``value``. None of them begins another."""

    def __init__(self, *marks: str) -> None:
        self._marks, self._got, self.value = marks, "", ""

    def feed(self, text: str, pos: int) -> Fed:
        """Take a mark."""
        if not self._got:
            pos, found = Look().feed(text, pos)
            if not found:
                return pos, None
        while pos < len(text):
            got = self._got + text[pos]
            if not any(mark.startswith(got) for mark in self._marks):
                return pos - len(self._got), False
            self._got, pos = got, pos + 1
            if got in self._marks:
                self.value = got
                return pos, True
        return pos, None


class Short:
    """Takes text up to one of ``marks``, which must begin within ``limit`` characters, and before a ``forbidden`` one.

    ``value`` is the text before the mark, ``mark`` which it is; where ``keep``, the mark stays where it is.
    """

    def __init__(self, *marks: str, forbidden: Sequence[str] = (), limit: int = 256, keep: bool = False) -> None:
        self._marks, self._limit, self._keep = marks, limit, keep
        self._pattern = any_of([*marks, *forbidden])
        self._most = limit + max(map(len, [*marks, *forbidden]))
        self._taken, self.value, self.mark = "", "", ""

    def feed(self, text: str, pos: int) -> Fed:
        """Take text and a mark."""
        before = len(self._taken)
        self._taken += text[pos : pos + self._most - before]
        origin = pos - before
        found = self._pattern.search(self._taken)
        if found is not None and found.start() <= self._limit:
            if found[0] not in self._marks:
                return origin + found.start(), False
            self.value, self.mark = self._taken[: found.start()], found[0]
            return origin + (found.start() if self._keep else found.end()), True
        if len(self._taken) == self._most:
            return origin + self._limit, False
        return len(text), None


class Until:
    """Takes text up to ``mark``, however long; ``value`` is the text before it."""

    def __init__(self, mark: str) -> None:
        self._mark, self._pieces, self._tail, self.value = mark, list[str](), "", ""

    def feed(self, text: str, pos: int) -> Fed:
        """Take text and the mark."""
        tail, reach = self._tail, len(self._mark) - 1
        across = (tail + text[pos : pos + reach]).find(self._mark)
        if across >= 0:
            self.value = "".join(self._pieces) + tail[:across]
            return pos + across + len(self._mark) - len(tail), True
        at = text.find(self._mark, pos)
        if at >= 0:
            self.value = "".join(self._pieces) + tail + text[pos:at]
            return at + len(self._mark), True
        if len(text) - pos > reach:
            self._pieces += [tail, text[pos : len(text) - reach]]
            self._tail = text[len(text) - reach :]
        else:
            both = tail + text[pos:]
            self._pieces.append(both[: max(0, len(both) - reach)])
            self._tail = both[-reach:]
        return len(text), None


class QuotedText(Until):
    """Text up to ``mark``, passed on as it comes, within a JSON string that the step neither opens nor closes."""

    def feed(self, text: str, pos: int) -> Fed:
        """Take text and the mark."""
        end, done = super().feed(text, pos)
        if done:
            self._pieces, self._tail = [self.value], ""
        return end, done

    def take(self) -> str:
        """The text since the last call, without an end that may begin the mark."""
        passed = len(self._tail) - len(self.held)
        text = "".join(self._pieces) + self._tail[:passed]
        self._pieces, self._tail = [], self._tail[passed:]
        return json_string(text)[1:-1]

    @property
    def held(self) -> str:
        """The end of the text that may begin the mark."""
        return self._tail[len(self._tail) - begun_mark(self._tail, [self._mark]) :]


class Brackets:
    """Skips blanks, then takes brackets with all between them, the ``value``: those that ``opened`` has, or new ones.

    ``starts`` are the brackets it may begin with, where none is open. Brackets within quotes do not count. With
    ``escapes`` line breaks and the like within quotes, which models write and JSON does not have, are escaped. It ends
    behind a ``separator``, too, that stands in the outermost brackets.
    """

    _CLOSERS: ClassVar[dict[str, str]] = {"{": "}", "[": "]", "(": ")"}

    def __init__(
        self, starts: str = "", *, opened: str = "", quotes: str = '"', escapes: bool = False, separator: str = ""
    ) -> None:
        self._starts, self._pieces, self.value, self._separator = starts, list[str](), "", separator
        self._stack = [self._CLOSERS[bracket] for bracket in opened]
        self._kinds = "{}[]()" if "(" in opened + starts else "{}[]"
        self._outside = re.compile(f"[{re.escape(self._kinds + quotes + separator)}]")
        controls = r"\x00-\x1f" if escapes else ""
        self._inside = {quote: re.compile(rf"[{quote}\\{controls}]") for quote in quotes}
        self._quote, self._is_escaped = "", False

    def feed(self, text: str, pos: int) -> Fed:
        """Take brackets."""
        if not self._stack:
            pos, found = Look().feed(text, pos)
            if not found:
                return pos, None
            if text[pos] not in self._starts:
                return pos, False
        start = pos
        while True:
            if self._is_escaped and pos < len(text):
                self._is_escaped, pos = False, pos + 1
            hit = (self._inside[self._quote] if self._quote else self._outside).search(text, pos)
            if hit is None:
                self._pieces.append(text[start:])
                return len(text), None
            pos, char = hit.end(), hit[0]
            if self._quote and char < " ":
                self._pieces += [text[start : pos - 1], json.dumps(char)[1:-1]]
                start = pos
            elif self._quote:
                self._is_escaped = char == "\\"
                self._quote = self._quote if self._is_escaped else ""
            elif char in self._inside:
                self._quote = char
            elif char == self._separator:
                if len(self._stack) == 1:
                    self._pieces.append(text[start:pos])
                    self.value = "".join(self._pieces)
                    return pos, True
            elif char in self._CLOSERS:
                is_done = self._is_done_before(text, start, pos - 1)
                if is_done or len(self._stack) == _MAX_DEPTH:
                    self._pieces.append(text[start : pos - 1])
                    return pos - 1, is_done
                self._stack.append(self._CLOSERS[char])
            elif self._stack.pop() != char:
                self._pieces.append(text[start : pos - 1])
                return pos - 1, False
            elif not self._stack:
                self._pieces.append(text[start:pos])
                self.value = "".join(self._pieces)
                return pos, True

    def _is_done_before(self, text: str, start: int, bracket: int) -> bool:
        """Whether the step ends before an opening bracket; of ``text`` it has taken what is from ``start`` on."""
        return False


class CallHead(Brackets):
    """Takes a call's JSON object up to where the object of its arguments begins; ``name`` is the function's.

    An object that does not begin so is taken whole, the ``value``, and ``name`` is None.
    """

    def __init__(self) -> None:
        super().__init__("{")
        self.name: str | None = None
        self._is_known = False

    def _is_done_before(self, text: str, start: int, bracket: int) -> bool:
        if self._is_known or not self._stack:
            return False
        self._is_known = True
        if text[bracket] == "{":
            self.name = name_before_arguments("".join([*self._pieces, text[start:bracket]]))
        return self.name is not None


class Arguments(Brackets):
    """The JSON object of the arguments of a call of ``name``, to be begun where it begins, and passed on as it comes.

    It ends with its last bracket, or before one that does not fit. Mistakes in it are the model's, and stay.
    """

    def __init__(self, name: str) -> None:
        super().__init__("{", escapes=True)
        self.name = name

    held = ""
    """Nothing is held back."""

    def take(self) -> str:
        """The text since the last call."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text
