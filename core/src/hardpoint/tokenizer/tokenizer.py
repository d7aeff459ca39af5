"""A checkpoint's tokenizer over the ``tokenizers`` library and the JSON files alone.

Transformers takes seconds to import, so it is asked only for checkpoints without a ``tokenizer.json``. Tokens are the
same as its own: the post-processor of ``tokenizer.json`` decides which special tokens are put around a text, and
``add_bos_token`` and ``add_eos_token`` of ``tokenizer_config.json`` count only where there is no ``tokenizer.json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.models import BPE

from hardpoint.checkpoint.files import CheckpointFiles
from hardpoint.checkpoint.formats import open_files
from hardpoint.tokenizer.token_bytes import TokenBytes
from hardpoint_plugin_api import CheckpointError, RequestError

_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_OLDER = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Files that Transformers can make a tokenizer of; without one it makes an empty one."""
_PIECE = 2**16
"""Characters of a piece of text that is counted."""
_USUAL_CHARACTERS = 4
"""Texts with at most so many characters for each token of a limit are encoded without being counted before."""
_CUT_TOKENS = 32
"""Tokens of a piece that the whole text may not have, because the piece was cut out of it."""
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
        self._token_bytes = TokenBytes(backend, self.byte_ids)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load the tokenizer of the checkpoint in ``folder``. Raises CheckpointError, naming the file at fault."""
        files = open_files(folder)
        file, text = files.path("tokenizer.json"), files.read_text("tokenizer.json")
        if text is None:
            return _through_transformers(folder)
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file} is not a tokenizer that this tokenizers library reads: {error}") from error
        config = read_tokenizer_config(folder)
        return cls(backend, _add_special_tokens(backend, config))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``, with the checkpoint's beginning and end tokens unless told otherwise.

        Raises RequestError for text that is no valid Unicode (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text holds a lone surrogate at position {error.start}: {text!r:.80}") from None
        return self._encoding(text, add_special_tokens).ids

    def exceeds(self, text: str, limit: int) -> bool:
        """True where ``text`` certainly has more than ``limit`` tokens, which a text of few characters never has.

        Pieces of the text are counted until there are enough. So the time and memory depend on ``limit`` and not on the
        text; ``encode`` takes half a kilobyte for each token. A cut may change some tokens around it, which is allowed
        for: a text with few tokens more than ``limit`` may be False.
        """
        if len(text) <= _USUAL_CHARACTERS * limit:
            return False
        found = 0
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE].encode(errors="replace").decode()
            found += len(self._encoding(piece, add_special_tokens=False)) - _CUT_TOKENS
            if found > limit:
                return True
        return False

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        """The library's encoding of ``text``, without offsets. Unlike its ``encode``, it lets other threads run."""
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; what is no valid UTF-8 becomes U+FFFD."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for, with its leading space; those of several tokens make up the text.

        They may be a part of a character only. A special token has its text, an id without a token none.
        """
        return self._token_bytes.of(token_id)

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the tokens that no text is split into but their own, special ones among them, by that text."""
        return {token.content: i for i, token in self.backend.get_added_tokens_decoder().items()}

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included; a model's logits may be padded beyond."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def highest_id(self) -> int:
        """The highest id of a token, added ones included; -1 without tokens. Ids that are not added are taken to have
        no gaps: a look at each would take a tenth of a second.
        """
        own = self.backend.get_vocab_size(with_added_tokens=False) - 1
        return max([own, *self.backend.get_added_tokens_decoder()])

    @property
    def bos_token_id(self) -> int | None:
        """The id of the beginning-of-text token; None where the checkpoint names none."""
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


class NoTokenizer(Tokenizer):
    """Stands for a tokenizer that was not loaded: it decodes to no text, and refuses to encode."""

    def __init__(self) -> None:
        super().__init__(tokenizers.Tokenizer(BPE()), {})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises RequestError."""
        raise RequestError(f"no tokenizer was loaded (--skip-tokenizer-init): give token ids in place of {text!r:.80}")


def _byte_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    ids = [i for byte in range(256) if (i := backend.token_to_id(f"<0x{byte:02X}>")) is not None]
    letter = backend.token_to_id("<0x41>")
    joined = letter is not None and backend.decode([letter]) == "A"  # else they are ordinary text to this decoder
    return frozenset(ids if joined else ())


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json``, completed by the older ``special_tokens_map.json`` as Transformers does."""
    files = open_files(folder)
    config = _read_config(files, "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_config(files, "special_tokens_map.json")
    return config


def _read_config(files: CheckpointFiles, file_name: str) -> dict[str, Any]:
    """One of the two files; null counts as missing. Raises CheckpointError, naming file and key, for what is malformed.

    Other names that end in ``_token`` may be flags (``add_bos_token``), so that only tokens among them are looked at.
    """
    file = files.path(file_name)
    config = {name: value for name, value in files.read_json(file_name).items() if value is not None}

    def check(is_valid: bool, name: str, wanted: str) -> None:
        if not is_valid:
            raise CheckpointError(f"{file}: {name!r} must be {wanted}, got {config[name]!r:.80}")

    token = "a text or an object with the text 'content'"
    for name, value in config.items():
        if name in _NAMED or (name.endswith("_token") and isinstance(value, dict) and "content" in value):
            check(_is_token(value), name, token)
    for name in _EXTRA:
        value = config.get(name, [])
        tokens = value.values() if isinstance(value, dict) else value
        check(
            isinstance(value, list | dict) and all(map(_is_token, tokens)),
            name,
            f"a list or object of tokens, each {token}",
        )
    added = config.get("added_tokens_decoder", {})
    check(
        isinstance(added, dict)
        and all(i.isdecimal() and isinstance(t, dict) and _is_token(t) for i, t in added.items()),
        "added_tokens_decoder",
        "an object of token ids, each with an object with the text 'content'",
    )
    check(isinstance(config.get("split_special_tokens", False), bool), "split_special_tokens", "true or false")
    return config


def _is_token(value: object) -> bool:
    if isinstance(value, dict):
        return isinstance(value.get("content"), str) and all(
            isinstance(value.get(flag, False), bool) for flag in _FLAGS
        )
    return isinstance(value, str)


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


def check_tokenizer_files(folder: Path) -> list[str]:
    """The names of the tokenizer's files in ``folder``. Raises CheckpointError where there are none."""
    files = open_files(folder)
    found = [name for name in ("tokenizer.json", *_OLDER) if files.has(name)]
    if not found and folder.is_file():
        raise CheckpointError(
            f"{folder} holds no tokenizer; name a folder that has the model's: --tokenizer FOLDER; "
            "or send token ids: --skip-tokenizer-init"
        )
    if not found:
        raise CheckpointError(
            f"{folder}: tokenizer.json is missing, and so are tekken.json and older files ({', '.join(_OLDER)}); "
            "add the files of the model's tokenizer, or name another folder with --tokenizer"
        )
    return found


def _through_transformers(folder: Path) -> Tokenizer:
    """Let Transformers convert older tokenizer files (sentencepiece, vocabulary and merges)."""
    found = check_tokenizer_files(folder)
    from transformers import AutoTokenizer

    failed = f"{folder}: tokenizer.json is missing, and Transformers cannot make one of {', '.join(found)}"
    try:
        converted = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # one of many, from one of many libraries
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(f"{failed}: {reason}") from error
    wanted = set(converted.vocab_files_names.values())
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None or not wanted & set(found):
        raise CheckpointError(f"{failed}: its {type(converted).__name__} reads {', '.join(sorted(wanted))}")
    return Tokenizer(backend, {name: str(token) for name, token in converted.special_tokens_map.items()})
