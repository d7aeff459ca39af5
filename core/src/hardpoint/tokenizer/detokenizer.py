"""Tokens to text as they come: whole characters only, and nothing that may still turn out to be a stop text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hardpoint.tokenizer.tokenizer import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4
"""Bytes of UTF-8."""
_CONTEXT = 8
"""Tokens that are decoded again where they may end within a character."""


class Detokenizer:
    """The text of one request's output.

    The deltas of ``add`` and ``flush`` together are what ``Tokenizer.decode`` makes of all ids at once, cut
    at the first stop text (or behind it with ``include_stop``); ``num_chars`` is how long they are so far.
    ``prompt_ids`` are what the output continues: some
    tokenizers write a word's leading space only behind another word. ``stop_text`` is the stop text found, or None;
    which one it is does not depend on how tokens split the text: the one that is complete first, the longest of those.
    None is looked for in the text of the first ``min_tokens`` tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.num_chars = 0
        self._num_unscanned = min_tokens
        self.stop_text: str | None = None
        self._stop = _StopScanner(stop, include_stop)
        self._decoder = _Decoder(tokenizer, prompt_ids, skip_special_tokens)

    def add(self, ids: Iterable[int]) -> str:
        """Take the next tokens and return the text that is now certain; always empty once a stop text was found."""
        if self.stop_text is not None:
            return ""
        pieces = [self._decoder.add(token_id) for token_id in ids]
        unscanned = "".join(pieces[: self._num_unscanned])
        scanned = "".join(pieces[self._num_unscanned :])
        self._num_unscanned = max(0, self._num_unscanned - len(pieces))
        self.num_chars += len(unscanned)
        return unscanned + self._emit(scanned)

    def flush(self) -> str:
        """Return what was held back: no more tokens will come."""
        if self.stop_text is not None:
            return ""
        delta = self._emit(self._decoder.flush())
        if self.stop_text is None:
            rest = self._stop.flush()
            self.num_chars += len(rest)
            delta += rest
        return delta

    def _emit(self, decoded: str) -> str:
        delta, self.stop_text = self._stop.add(decoded)
        self.num_chars += len(delta)
        return delta


class _Decoder:
    """Decodes token by token.

    The tokens of the last text given out are decoded again before the new ones, because decoders look at their left
    neighbours. Byte tokens (``<0xE2>``) wait for the end of their run: one that is not valid UTF-8 as a whole is
    decoded to one U+FFFD for each byte, so nothing of it is certain before.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._silent = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._context: list[int] = list(prompt_ids[-_CONTEXT:])
        self._context_text: str | None = None
        """Decoded when the next token comes, if one comes; a prompt may end within a character."""
        self._pending: list[int] = []

    def add(self, token_id: int) -> str:
        """Take one token and return the text that it completes."""
        if token_id in self._silent or self._tokenizer.backend.id_to_token(token_id) is None:
            return ""
        self._pending.append(token_id)
        if token_id in self._tokenizer.byte_ids:
            return ""
        text = self._decode(self._context + self._pending)
        if text.endswith(_BROKEN * _LONGEST_CHARACTER):
            return self._give_up(text)
        if text.endswith(_BROKEN) or len(text) <= len(self._text_before()):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """Return the text of the tokens that wait."""
        return self._advance(self._decode(self._context + self._pending)) if self._pending else ""

    def _give_up(self, text: str) -> str:
        """Of bytes that are no UTF-8, the text that none to come can change: all but the last three tokens'."""
        certain, open_ = self._pending[: 1 - _LONGEST_CHARACTER], self._pending[1 - _LONGEST_CHARACTER :]
        head = self._decode(self._context + certain)
        if not certain or not text.startswith(head):
            return ""
        delta = head[len(self._text_before()) :]
        self._context, self._pending = (self._context + certain)[-_CONTEXT:], open_
        self._context_text = self._decode(self._context)
        return delta

    def _advance(self, text: str) -> str:
        delta = text[len(self._text_before()) :]
        self._context, self._pending, self._context_text = self._pending, [], None
        return delta

    def _text_before(self) -> str:
        if self._context_text is None:
            self._context_text = self._decode(self._context).rstrip(_BROKEN)
        return self._context_text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)


class _StopScanner:
    """Finds stop texts in a text that comes in pieces."""

    def __init__(self, stop: Sequence[str], include: bool) -> None:
        self._stop, self._include = tuple(stop), include
        self._held = ""

    def add(self, piece: str) -> tuple[str, str | None]:
        """Return the text that is certain, and the stop text found in it, if one was."""
        if not self._stop:
            return piece, None
        text = self._held + piece
        hits = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if hits:
            end, start, stop = min(hits)
            self._held = ""
            return text[: end if self._include else start], stop
        keep = self._start_of_a_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """Return what was held back as the possible start of a stop text."""
        held, self._held = self._held, ""
        return held

    def _start_of_a_stop(self, text: str) -> int:
        """The length of the longest end of ``text`` that a stop text starts with."""
        longest = max(map(len, self._stop), default=1) - 1
        return next(
            (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0
        )
