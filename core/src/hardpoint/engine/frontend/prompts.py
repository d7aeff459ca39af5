"""Prompts of users, in all their forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NotRequired, TypedDict

from hardpoint.tokenizer import Tokenizer
from hardpoint_plugin_api import RequestError

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a mapping with ``prompt`` or ``prompt_token_ids``, and perhaps a ``cache_salt``."""


class TextPrompt(TypedDict):
    """A text as a prompt."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids as a prompt, and the text that they are of."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_FORMS = "a prompt is a text, a list of token ids, or a mapping with 'prompt' or 'prompt_token_ids'"


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt as an engine takes it. ``text`` is None where only token ids were given."""

    text: str | None
    token_ids: tuple[int, ...]
    cache_salt: str = ""

    @classmethod
    def read(cls, prompt: object, tokenizer: Tokenizer) -> TokenizedPrompt:
        """A prompt in any of its forms; raises RequestError for anything else."""
        if isinstance(prompt, str):
            return cls(prompt, tuple(tokenizer.encode(prompt)))
        if isinstance(prompt, Mapping):
            text, ids, salt = (prompt.get(key) for key in _KEYS)
            if unknown := set(prompt) - set(_KEYS):
                raise RequestError(f"a prompt has no {sorted(map(str, unknown))}; known: {', '.join(_KEYS)}")
            if not (text is None or isinstance(text, str)) or not (salt is None or isinstance(salt, str)):
                raise RequestError(f"'prompt' and 'cache_salt' are texts, got {text!r} and {salt!r}")
            if ids is None and text is None:
                raise RequestError(f"a prompt mapping needs 'prompt' or 'prompt_token_ids', got {sorted(prompt)}")
            return cls(text, tuple(tokenizer.encode(str(text))) if ids is None else _token_ids(ids), salt or "")
        return cls(None, _token_ids(prompt))

    def truncated(self, count: int, side: str, longest: int) -> TokenizedPrompt:
        """``count`` tokens of the prompt; -1: as many as leave room for one more within ``longest``.

        ``side`` is that of the tokens which are left out: "left" keeps the last ones, "right" the first ones.
        """
        count = longest - 1 if count == -1 else count
        if len(self.token_ids) <= count:
            return self
        kept = self.token_ids[-count:] if side == "left" else self.token_ids[:count]
        return TokenizedPrompt(None, kept, self.cache_salt)


def prompt_list(prompts: object) -> list[Prompt]:
    """One prompt, or a sequence of them, as a list; raises RequestError for anything else."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(f"{_FORMS}, or a list of such, got {prompts!r:.80}")
    return [prompts] if prompts and _is_token_id(prompts[0]) else list(prompts)


def _token_ids(ids: object) -> tuple[int, ...]:
    if isinstance(ids, list | tuple) and set(map(type, ids)) == {int}:
        return tuple(ids)  # the common case: thousands of ids, each of which would take a microsecond below
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes) or not all(_is_token_id(i) for i in ids):
        raise RequestError(f"{_FORMS}, got {ids!r:.80}")
    return tuple(int(i) for i in ids)


def _is_token_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
