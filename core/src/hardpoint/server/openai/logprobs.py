"""Log-probabilities as OpenAI's endpoints write them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from hardpoint.engine.outputs import Logprob, PositionLogprobs
from hardpoint.server.service import Service
from hardpoint.tokenizer import Tokenizer

_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""
_NUM_BEFORE = 8
"""So many of a prompt's last tokens are looked at for the beginning of a character."""


def tokenizer_of(service: Service) -> Tokenizer:
    """The tokenizer of the engine that made an output."""
    engine = service.host.loaded
    assert engine is not None, "it made the output"
    return engine.tokenizer


def chat_logprobs(
    positions: Sequence[PositionLogprobs], num_top: int, tokenizer: Tokenizer, *, by_id: bool = False
) -> dict[str, Any]:
    """The log-probabilities of a chat's tokens, each with the ``num_top`` likeliest.

    ``by_id``: tokens are called ``token_id:N``.
    """
    return {
        "content": [
            _entry(*_drawn(position), tokenizer, by_id)
            | {"top_logprobs": [_entry(*each, tokenizer, by_id) for each in _likeliest(position, num_top)]}
            for position in positions
        ],
        "refusal": None,
    }


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs | None],
    num_top: int,
    offsets: Sequence[int],
    tokenizer: Tokenizer,
    *,
    by_id: bool = False,
) -> dict[str, Any]:
    """Log-probabilities of a completion's tokens; None stands for a prompt's first token, which nothing precedes.

    ``top_logprobs`` has each token itself, and the ``num_top`` likeliest.
    """
    return {
        "tokens": [_text(token, tokenizer, by_id) for token in token_ids],
        "token_logprobs": [None if p is None else _finite(_drawn(p)[1].logprob) for p in positions],
        "top_logprobs": [
            None
            if p is None
            else {
                _text(token, tokenizer, by_id): _finite(each.logprob)
                for token, each in (_drawn(p), *_likeliest(p, num_top))
            }
            for p in positions
        ],
        "text_offset": list(offsets),
    }


def prompt_logprobs(positions: Sequence[PositionLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """The log-probabilities of a prompt, by token id: an extension, in the form that users of vLLM know."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token): {"logprob": _finite(each.logprob), "rank": each.rank, "decoded_token": each.decoded_token}
            for token, each in position.items()
        }
        for position in positions
    ]


class TextOffsets:
    """Where tokens begin in the text that they make, in characters; they may come in pieces.

    A token that begins inside a character has the offset of that character. ``prompt_ids`` are what the text
    continues: they may end inside a character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(map(tokenizer.token_bytes, prompt_ids[-_NUM_BEFORE:])))
        self._num_chars = 0

    def take(self, token_ids: Sequence[int], text: str, start: int = 0) -> list[int]:
        """Offsets of the next tokens. ``text`` is the text that came with them; it stands at ``start``."""
        return [self._add(self._bytes_in(text, start, token)) for token in token_ids]

    def _bytes_in(self, text: str, start: int, token_id: int) -> bytes:
        """A token's bytes as far as they are text: special tokens may be left out, and the very first space."""
        token, here = self._tokenizer.token_bytes(token_id), max(0, self._num_chars - start)
        if token_id in self._tokenizer.special_ids:
            return token if text.startswith(token.decode(), here) else b""
        if self._num_chars == 0 and token.startswith(b" "):
            head = text[: len(token)].encode()
            return token[1:] if head.startswith(token[1:]) and not head.startswith(token) else token
        return token

    def _add(self, token: bytes) -> int:
        """Of the characters that the first byte completes or begins, the last is its own: others had broken off."""
        num_complete = len(self._decoder.decode(token[:1]))
        is_open = bool(self._decoder.getstate()[0])
        offset = self._num_chars + max(0, num_complete + is_open - 1)
        self._num_chars += num_complete + len(self._decoder.decode(token[1:]))
        return offset


def _drawn(position: PositionLogprobs) -> tuple[int, Logprob]:
    """The token that stands at a position."""
    return next(iter(position.items()))


def _likeliest(position: PositionLogprobs, count: int) -> list[tuple[int, Logprob]]:
    return sorted(position.items(), key=lambda each: each[1].rank)[:count]


def _entry(token_id: int, each: Logprob, tokenizer: Tokenizer, by_id: bool) -> dict[str, Any]:
    own = tokenizer.token_bytes(token_id)
    return {"token": _text(token_id, tokenizer, by_id), "logprob": _finite(each.logprob), "bytes": list(own)}


def _text(token_id: int, tokenizer: Tokenizer, by_id: bool) -> str:
    if by_id:
        return f"token_id:{token_id}"
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
