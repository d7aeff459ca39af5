"""A checkpoint's tokenizer over the ``tokenizers`` library and the JSON files alone.

Transformers takes seconds to import, so it is asked only for checkpoints without a ``tokenizer.json``. Tokens are the
same as its own: the post-processor of ``tokenizer.json`` decides which special tokens are put around a text, and
``add_bos_token`` and ``add_eos_token`` of ``tokenizer_config.json`` count only where there is no ``tokenizer.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from hardpoint_plugin_api import CheckpointError, RequestError

_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class Tokenizer:
    """Encodes and decodes. ``special_tokens`` are the named ones, such as ``{"eos_token": "</s>"}``."""

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        """Ids of all special tokens, the unnamed ones too: ``decode`` leaves them out unless told otherwise."""
        self.byte_ids = _byte_ids(backend)
        """Ids of tokens that stand for one byte each (``<0xE2>``), where the decoder joins them to characters."""

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load the tokenizer of the checkpoint in ``folder``. Raises CheckpointError, naming the file at fault."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            return _through_transformers(folder)
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file} is not a tokenizer that this tokenizers library reads: {error}") from error
        config = _tokenizer_config(folder)
        return cls(backend, _add_special_tokens(backend, config))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``, with the checkpoint's beginning and end tokens unless told otherwise.

        Raises RequestError for text that is no valid Unicode (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text holds a lone surrogate at position {error.start}: {text!r:.80}") from None
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; what is no valid UTF-8 becomes U+FFFD."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included; a model's logits may be padded beyond."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The id of the beginning of a text, where the checkpoint names one."""
        return self._named("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end of a text, where the checkpoint names one."""
        return self._named("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """The id of padding, where the checkpoint names one."""
        return self._named("pad_token")

    def _named(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def _byte_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    ids = [i for byte in range(256) if (i := backend.token_to_id(f"<0x{byte:02X}>")) is not None]
    letter = backend.token_to_id("<0x41>")
    joined = letter is not None and backend.decode([letter]) == "A"  # else they are ordinary text to this decoder
    return frozenset(ids if joined else ())


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json``, completed by the older ``special_tokens_map.json`` as Transformers does."""
    config = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_json(folder / "special_tokens_map.json")
    return config


def read_json(file: Path) -> dict[str, Any]:
    """The object in ``file``, empty if there is no such file. Raises CheckpointError for anything else in it."""
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(data).__name__}")
    return data


def _add_special_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> dict[str, str]:
    """Make sure that the tokens which ``config`` declares are in ``backend``; return the named special ones."""
    declared = {int(i): _added_token(token) for i, token in config.get("added_tokens_decoder", {}).items()}
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for _, token in sorted(declared.items()) if token.content not in present])
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    known |= {token.content: token for token in declared.values()}
    named: dict[str, str] = {}
    special: list[tokenizers.AddedToken] = []
    for name, value in _special_values(config):
        token = _added_token(value)
        special.append(known.get(token.content, token))
        if name is not None:
            named[name] = token.content
    backend.add_special_tokens(special)
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return named


def _special_values(config: Mapping[str, Any]) -> Iterator[tuple[str | None, Any]]:
    """Every special token of ``config`` with its name, None for those that have none."""
    for name, value in config.items():
        if name.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value)):
            yield name, value
    extra = next((config[key] for key in _EXTRA if config.get(key)), ())
    if isinstance(extra, dict):
        yield from extra.items()
    else:
        yield from ((None, value) for value in extra)


def _added_token(value: str | Mapping[str, Any]) -> tokenizers.AddedToken:
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=True, normalized=False)
    return tokenizers.AddedToken(value["content"], **{key: value[key] for key in _FLAGS if key in value})


def _through_transformers(folder: Path) -> Tokenizer:
    """Let Transformers convert older tokenizer files (sentencepiece, vocabulary and merges)."""
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # one of many, from one of many libraries
        raise CheckpointError(
            f"{folder} holds no tokenizer.json, and Transformers cannot make one of its other files: {error}"
        ) from error
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError(
            f"{folder} holds no tokenizer.json, and its {type(converted).__name__} cannot be turned into one"
        )
    return Tokenizer(backend, {name: str(token) for name, token in converted.special_tokens_map.items()})
