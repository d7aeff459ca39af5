"""A GGUF file's vocabulary as the ``tokenizer.json`` and ``tokenizer_config.json`` of Hugging Face's format.

Two kinds: byte-level BPE with merges (``gpt2``), and sentencepiece's BPE, whose merges follow from scores (``llama``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardpoint.checkpoint.gguf.pretokenizers import PRETOKENIZERS
from hardpoint.logs import log_once
from hardpoint_plugin_api import CheckpointError, UnknownNameError

logger = logging.getLogger(__name__)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Types of tokens (``llama_token_type``)."""
_PREFIX = "tokenizer.ggml."
_NAMED = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep", "mask": "mask"}
"""Names of special tokens in metadata (one is misspelt there) -> in tokenizer_config.json."""
_SPACE = "\u2581"
"""Stands for a space in sentencepiece's tokens."""


def make_tokenizer(metadata: Mapping[str, Any], file: Path) -> dict[str, Any] | None:
    """The ``tokenizer.json``; None where the file has no vocabulary.

    Raises UnknownNameError for a kind of vocabulary or pre-tokenizer that is not read, CheckpointError for a vocabulary
    whose lists do not fit together.
    """
    kind = metadata.get(f"{_PREFIX}model")
    if kind in (None, "none", "no_vocab"):
        return None
    if kind not in _KINDS:
        hint = f"It stands in {file} as tokenizer.ggml.model; name a folder with the tokenizer with --tokenizer."
        raise UnknownNameError("GGUF tokenizer", str(kind), _KINDS, hint)
    return _KINDS[kind](_Vocabulary(metadata, file))


def make_tokenizer_config(metadata: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The ``tokenizer_config.json``: names of special tokens, chat templates.

    Raises CheckpointError for names of chat templates that are no list.
    """
    vocabulary, config = _Vocabulary(metadata, file), dict[str, Any]()
    for theirs, ours in _NAMED.items():
        if vocabulary.texts and (text := vocabulary.token(theirs)) is not None:
            config[f"{ours}_token"] = text
    template, names = "tokenizer.chat_template", metadata.get("tokenizer.chat_templates", [])
    if not isinstance(names, list):
        raise CheckpointError(f"{file}: tokenizer.chat_templates must be a list of names, got {names!r:.80}")
    named = {str(name): metadata.get(f"{template}.{name}") for name in names}
    templates = {"default": metadata.get(template)} | named
    found = [{"name": name, "template": text} for name, text in templates.items() if isinstance(text, str)]
    if found:
        config["chat_template"] = found[0]["template"] if len(found) == 1 else found
    return config


class _Vocabulary:
    """The lists of a vocabulary, checked against each other."""

    def __init__(self, metadata: Mapping[str, Any], file: Path) -> None:
        self._metadata, self.file = metadata, file
        self.texts: list[str] = self._list("tokens", str)
        self.kinds: list[int] = self._list("token_type", int) or [_NORMAL] * len(self.texts)
        self.scores: list[float] = self._list("scores", float)
        self.merges: list[str] = self._list("merges", str)
        for name, values in (("token_type", self.kinds), ("scores", self.scores)):
            if values and len(values) != len(self.texts):
                raise CheckpointError(f"{file}: {_PREFIX}{name} has {len(values)} entries for {len(self.texts)} tokens")

    def _list(self, name: str, kind: type) -> list[Any]:
        values = self._metadata.get(f"{_PREFIX}{name}", [])
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise CheckpointError(f"{self.file}: {_PREFIX}{name} must be a list of {kind.__name__}, got {values!r:.80}")
        return values

    def text(self, name: str) -> str:
        """A setting that is a text, empty where there is none."""
        return str(self._metadata.get(f"{_PREFIX}{name}", ""))

    def flag(self, name: str, default: bool) -> bool:
        """A setting that is true or false. Raises CheckpointError for anything else."""
        value = self._metadata.get(f"{_PREFIX}{name}", default)
        if type(value) is not bool:
            raise CheckpointError(f"{self.file}: {_PREFIX}{name} must be true or false, got {value!r:.80}")
        return value

    def token(self, name: str) -> str | None:
        """The text of the special token ``name``; None where there is none, or, with a warning, no such token."""
        number = self._metadata.get(f"{_PREFIX}{name}_token_id")
        if number is None:
            return None
        if type(number) is not int or not 0 <= number < len(self.texts):
            text = (
                f"{self.file}: {_PREFIX}{name}_token_id is {number!r:.80}, of {len(self.texts)} tokens; it is left out"
            )
            log_once(logger, logging.WARNING, text, text, make_tokenizer_config)
            return None
        return self.texts[number]

    def ids(self) -> dict[str, int]:
        """Text -> id; of two with one text the first. Tokens that fill a vocabulary up are left out."""
        found: dict[str, int] = {}
        for number, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True)):
            if kind != _UNUSED:
                found.setdefault(text, number)
        return found

    def added(self, *, normalized: bool) -> list[dict[str, Any]]:
        """Tokens that text is split at before anything else; ``normalized``: the user's own are looked for later."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False}
        kinds = (_UNKNOWN, _CONTROL, _USER_DEFINED)
        return [
            {"id": number, "content": text, **flags}
            | {"special": kind != _USER_DEFINED, "normalized": normalized and kind == _USER_DEFINED}
            for number, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True))
            if kind in kinds and text
        ]

    def post_processor(self, *, bos: bool) -> dict[str, Any] | None:
        """Beginning and end tokens around each text, where the file asks for them; ``bos`` where it says nothing."""
        names = [name for name, default in (("bos", bos), ("eos", False)) if self.flag(f"add_{name}_token", default)]
        tokens = {name: token for name in names if (token := self.token(name)) is not None}
        if not tokens:
            return None
        special = {text: {"id": text, "ids": [self.texts.index(text)], "tokens": [text]} for text in tokens.values()}

        def around(*sequences: str) -> list[dict[str, Any]]:
            pieces: list[dict[str, Any]] = []
            for number, sequence in enumerate(sequences):
                if "bos" in tokens:
                    pieces.append({"SpecialToken": {"id": tokens["bos"], "type_id": number}})
                pieces.append({"Sequence": {"id": sequence, "type_id": number}})
                if "eos" in tokens:
                    pieces.append({"SpecialToken": {"id": tokens["eos"], "type_id": number}})
            return pieces

        single, pair = around("A"), around("A", "B")
        return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _byte_level(words: _Vocabulary) -> dict[str, Any]:
    name = words.text("pre") or "default"
    if name not in PRETOKENIZERS:
        hint = f"It stands in {words.file} as tokenizer.ggml.pre; name a folder with the tokenizer with --tokenizer."
        raise UnknownNameError("GGUF pre-tokenizer", name, PRETOKENIZERS, hint)
    pre = PRETOKENIZERS[name]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in pre.regexes
    ]
    return {
        "version": "1.0",
        "added_tokens": words.added(normalized=False),
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": words.post_processor(bos=pre.bos),
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": words.ids(),
            "merges": [_merge(words, merge) for merge in words.merges],
            "ignore_merges": pre.ignore_merges,
            "byte_fallback": False,
            "fuse_unk": False,
        },
    }


def _merge(words: _Vocabulary, merge: str) -> list[str]:
    """``"a b"`` -> a, b; a space that belongs to a token cannot occur in byte-level text."""
    left, space, right = merge.partition(" ")
    if not space or not right:
        raise CheckpointError(f"{words.file}: {_PREFIX}merges has {merge!r:.80}, which is no pair of tokens")
    return [left, right]


def _sentencepiece(words: _Vocabulary) -> dict[str, Any]:
    if not words.scores:
        raise CheckpointError(f"{words.file}: {_PREFIX}scores is missing, by which sentencepiece's tokens are merged")
    prefixed = words.flag("add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizers = [{"type": "Prepend", "prepend": _SPACE}, spaces] if prefixed else [spaces]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "added_tokens": words.added(normalized=True),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": words.post_processor(bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "vocab": words.ids(),
            "merges": _merges_by_score(words),
            "unk_token": words.token("unknown"),
            "byte_fallback": True,
            "fuse_unk": True,
        },
    }


def _merges_by_score(words: _Vocabulary) -> list[list[str]]:
    """Every pair of tokens whose text together is a token, best score first.

    Sentencepiece merges whichever neighbours make the token of the highest score (``bpe_model.cc``), so pairs of one
    token have one rank; among them the order is of no effect but for ties, which go to the leftmost.
    """
    score = {
        text: score
        for text, kind, score in zip(words.texts, words.kinds, words.scores, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    found = [
        (-of_token, len(text), cut, text)
        for text, of_token in score.items()
        for cut in range(1, len(text))
        if text[:cut] in score and text[cut:] in score
    ]
    found.sort(key=lambda entry: entry[:3])
    return [[text[:cut], text[cut:]] for _, _, cut, text in found]


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}
