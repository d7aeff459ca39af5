"""A tekken.json of Mistral AI as the tokenizer files of a Hugging Face checkpoint.

Format: ``mistral_common/tokens/tokenizers/tekken.py`` of mistral-common 1.13. Ids of special tokens come first, then
the tokens of a byte-level BPE (tiktoken's) in the order in which they were learned: two neighbours are merged where
they make a token, those that make the earliest one first.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hardpoint.checkpoint.files import Folder
from hardpoint.checkpoint.json_object import read_json
from hardpoint_plugin_api import CheckpointError

TEKKEN = "tekken.json"

_OLDEST = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of files that list none, in order of their ids."""
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class TekkenFiles(Folder):
    """tokenizer.json and tokenizer_config.json are made of tekken.json; other files are the folder's own."""

    def path(self, name: str) -> Path:
        return super().path(TEKKEN if name in _MADE else name)

    def read_text(self, name: str) -> str | None:
        if name not in _MADE:
            return super().read_text(name)
        file = self.location / TEKKEN
        try:
            facts = file.stat()
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
        return _made(file, facts.st_mtime_ns, facts.st_size)[name]


_MADE = ("tokenizer.json", "tokenizer_config.json")


@lru_cache(maxsize=2)
def _made(file: Path, changed: int, size: int) -> Mapping[str, str]:
    """The files that ``file`` makes; ``changed`` and ``size`` tell one version from another."""
    tekken = Tekken.read(file)
    return {"tokenizer.json": json.dumps(tekken.tokenizer()), "tokenizer_config.json": json.dumps(tekken.config())}


@dataclass(frozen=True)
class Tekken:
    """The contents of a file. ``specials``: for each special token its text, and whether it controls (has no text for
    a reader); ``tokens``: the bytes of each other one."""

    pattern: str
    specials: Sequence[tuple[str, bool]]
    tokens: Sequence[bytes]

    @classmethod
    def read(cls, file: Path) -> Tekken:
        """Read ``file``. Raises CheckpointError for what is missing or malformed."""
        data = read_json(file)
        try:
            config, listed = data["config"], data.get("special_tokens")
            count = int(config["default_num_special_tokens"])
            specials = {i: (f"<SPECIAL_{i}>", True) for i in range(count)}
            if listed is None:
                specials |= {i: (text, True) for i, text in enumerate(_OLDEST)}
            for token in listed or ():
                specials[int(token["rank"])] = str(token["token_str"]), bool(token["is_control"])
            size = int(config["default_vocab_size"]) - count
            learned = {int(token["rank"]): token["token_bytes"] for token in data["vocab"]}
            tokens = [base64.b64decode(learned[rank], validate=True) for rank in range(size)]
            pattern = str(config["pattern"])
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise CheckpointError(f"{file} is no Tekken tokenizer: {type(error).__name__}: {error}") from error
        if sorted(specials) != list(range(count)) or len(set(tokens)) != size:
            raise CheckpointError(f"{file} is no Tekken tokenizer: it has more special tokens than it says, or doubles")
        return cls(pattern, [specials[i] for i in range(count)], tokens)

    def tokenizer(self) -> dict[str, Any]:
        """The tokenizer.json."""
        letters = _letters()
        texts = ["".join(map(letters.__getitem__, token)) for token in self.tokens]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        split = {"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": False}
        begin = _NAMED["bos_token"]
        begins = {"id": begin, "ids": [[text for text, _ in self.specials].index(begin)], "tokens": [begin]}
        special, first, second = (
            {"SpecialToken": {"id": begin, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        )
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return {
            "version": "1.0",
            "added_tokens": [
                {"id": i, "content": text, "special": controls} | plain
                for i, (text, controls) in enumerate(self.specials)
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [special, first],
                "pair": [special, first, second],
                "special_tokens": {begin: begins},
            },
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "vocab": {text: i for i, (text, _) in enumerate(self.specials)}
                | {text: len(self.specials) + rank for rank, text in enumerate(texts)},
                "merges": [[texts[left], texts[right]] for left, right in self._merges()],
                "ignore_merges": True,
                "byte_fallback": False,
                "fuse_unk": False,
            },
        }

    def config(self) -> dict[str, Any]:
        """The tokenizer_config.json."""
        texts = {text for text, _ in self.specials}
        return {name: token for name, token in _NAMED.items() if token in texts}

    def _merges(self) -> list[tuple[int, int]]:
        """The pairs of ranks that make each token, in order of the tokens."""
        ranks = {token: rank for rank, token in enumerate(self.tokens)}
        merges = []
        for token in self.tokens:
            halves = ((ranks.get(token[:i]), ranks.get(token[i:])) for i in range(1, len(token)))
            merges += sorted((left, right) for left, right in halves if left is not None and right is not None)
        return merges


def _letters() -> list[str]:
    """For each byte the letter that byte-level BPE writes for it: GPT-2's, printable bytes as themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
