"""Where one output stands in its grammar, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import llguidance

Bits = npt.NDArray[np.uint8]


class StructureState:
    """Follows an output token by token. One thread at a time uses it.

    ``allowed`` are the tokens that may come next: a bit for each, the lowest first, ceil(vocabulary / 8) bytes.
    ``is_complete`` says that the constraint is met and nothing but an end may follow; ``error`` why nothing can follow
    although it is not met. After either, no token is to be drawn.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        tokens: llguidance.LLTokenizer,
        vocab_size: int,
        eos: int,
        ends: frozenset[int],
        after: str = "",
        opening: int | None = None,
    ) -> None:
        """``eos`` is the end that the grammar knows, ``ends`` are those that the request has.

        The output is free until it holds the text ``after``, if there is one; where the token ``opening`` is given,
        that is so only if the output begins with it.
        """
        self._matcher, self._tokens, self._vocab_size, self._eos = matcher, tokens, vocab_size, eos
        self._ends = _bits(vocab_size, {end for end in ends if end < vocab_size})
        self._after, self._opening = after.encode(), opening
        self._is_free = bool(after) and opening is None
        self._is_first = True
        self._tail = b""
        self.error: str | None = None
        self.is_complete = False
        self.allowed = b""
        self._look_ahead()

    def accept(self, token: int) -> None:
        """Take the next token of the output: one of those allowed."""
        if self._is_first and token == self._opening:
            self._is_free = True
        if self._is_free:
            self._tail = (self._tail + self._tokens.decode_bytes([token]))[-(len(self._after) + 256) :]
            self._is_free = self._after not in self._tail
        elif not (self._matcher.consume_token(token) or self._ended_by(token)):
            self.error = _reason(self._matcher) or f"token {token} is not among those that may follow"
        self._is_first = False
        if self.error is None:
            self._look_ahead()

    def allowed_ahead(self, tokens: Sequence[int]) -> tuple[bytes, ...]:
        """``allowed`` now, and as it would be behind each of ``tokens`` up to the first that must not come, or behind
        which none is to be drawn. Changes nothing."""
        if not tokens:
            return (self.allowed,)
        found, ahead = [self.allowed], self._copy()
        for token in tokens:
            if not ahead.allowed[token // 8] >> token % 8 & 1:
                break
            ahead.accept(token)
            if ahead.error is not None or ahead.is_complete:
                break
            found.append(ahead.allowed)
        return tuple(found)

    def _copy(self) -> Self:
        copied = copy(self)
        copied._matcher = self._matcher.deep_copy()
        return copied

    def _ended_by(self, token: int) -> bool:
        return bool(self._ends[token // 8] >> token % 8 & 1)

    def _look_ahead(self) -> None:
        """Find what may come next."""
        allowed = self._free() if self._is_free else self._by_grammar()
        if self.error is None and not self.is_complete:
            self.allowed = allowed.tobytes()

    def _free(self) -> Bits:
        """Every token that is text; an output must not end before what it is about."""
        known = min(self._tokens.vocab_size, self._vocab_size)
        return _bits(self._vocab_size, range(known)) & ~self._ends & ~_bits(self._vocab_size, {self._eos})

    def _by_grammar(self) -> Bits:
        size = -(-self._vocab_size // 8)
        found = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[:size] & ~self._ends
        if self._eos < self._vocab_size:
            found[self._eos // 8] &= ~np.uint8(1 << self._eos % 8)
        if self._matcher.is_error():
            self.error = _reason(self._matcher)
        accepting = self._matcher.is_accepting()
        if self._is_first and self._opening is not None and self._opening < self._vocab_size:
            found[self._opening // 8] |= np.uint8(1 << self._opening % 8)
        elif self.error is None and not found.any():
            if accepting:
                self.is_complete = True
            else:
                self.error = "no token of the model can follow"
        return found | self._ends if accepting else found


def _reason(matcher: llguidance.LLMatcher) -> str | None:
    words = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    return words[:300] or None


def _bits(size: int, members: set[int] | range) -> Bits:
    mask = np.zeros(size, bool)
    mask[list(members)] = True
    return np.packbits(mask, bitorder="little")
