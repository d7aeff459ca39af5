"""The bytes that each token stands for by itself, before they are joined to characters."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import tokenizers

_WHOLE = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
"""Decoders that write a token's text as it is, but for the mark of a space."""


class TokenBytes:
    """Reads ``backend``'s tokens; those of ``byte_ids`` stand for one byte each (``<0xE2>``)."""

    def __init__(self, backend: tokenizers.Tokenizer, byte_ids: Collection[int]) -> None:
        self._backend, self._byte_ids = backend, byte_ids
        self._added = {i: token.content.encode() for i, token in backend.get_added_tokens_decoder().items()}
        steps = [] if backend.decoder is None else _steps(json.loads(backend.decoder.__getstate__()))
        kinds = {step["type"] for step in steps}
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else None
        self._is_whole = bool(kinds) and kinds <= _WHOLE
        self._marks = [mark for step in steps if (mark := _mark(step))]

    def of(self, token_id: int) -> bytes:
        """The bytes of one token, with a space where its text has the mark of one; none for an id without a token."""
        if token_id in self._added:
            return self._added[token_id]
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._byte_ids:
            return bytes([int(token[3:5], 16)])
        if self._alphabet is not None:
            try:
                return bytes([self._alphabet[letter] for letter in token])
            except KeyError:  # the decoder takes such a token as it is
                return token.encode()
        if not self._is_whole:
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        for mark, text in self._marks:
            token = token.replace(mark, text)
        return token.encode()


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """A decoder's parts in order."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]


def _mark(step: dict[str, Any]) -> tuple[str, str] | None:
    """The mark that ``step`` replaces in a token's text, and its replacement."""
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"]
    return None


def _byte_alphabet() -> dict[str, int]:
    """Bytes by the letters that byte-level BPE writes for them: GPT-2's, printable bytes as themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
