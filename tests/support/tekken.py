"""A small tokenizer in Mistral's format, and the tokens that it has by definition."""

from __future__ import annotations

import base64
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
PATTERN = rf"[^\r\n\p{{L}}\p{{N}}]?{LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXT = "The cat that sat on the mat ate that hat; naïve cafés, Ünïcödé and 日本語の文字 too. 1234 + 5678 = 6912!\n" * 3
SPECIALS = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[THINK]"]


def pieces(text: str) -> list[bytes]:
    return [piece.encode() for piece, _ in Split(Regex(PATTERN), "isolated").pre_tokenize_str(text)]


def learn(size: int) -> list[bytes]:
    """The tokens of a BPE with ``size`` merges of the pairs that are the most frequent in TEXT."""
    tokens = [bytes([byte]) for byte in range(256)]
    words = [[bytes([byte]) for byte in piece] for piece in pieces(TEXT)]
    for _ in range(size):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        tokens.append(left + right)
        words = [merged(word, left + right, tokens) for word in words]
    return tokens


def merged(word: list[bytes], token: bytes, tokens: list[bytes]) -> list[bytes]:
    """``word`` with neighbours that make ``token`` merged, from the left."""
    done: list[bytes] = []
    for part in word:
        if done and done[-1] + part == token:
            done[-1] = token
        else:
            done.append(part)
    return done


TOKENS = learn(60)


def defined(text: str, *, begins: bool = False) -> list[int]:
    """The tokens of ``text``, behind <s> where it ``begins``.

    Of each piece, neighbours that make the earliest token are merged, again and again.
    """
    ranks, found = {token: rank for rank, token in enumerate(TOKENS)}, []
    for piece in pieces(text):
        parts = [bytes([byte]) for byte in piece]
        while piece not in ranks and (made := [ranks[a + b] for a, b in pairwise(parts) if a + b in ranks]):
            parts = merged(parts, TOKENS[min(made)], TOKENS)
        found += [ranks[piece]] if piece in ranks else [ranks[part] for part in parts]
    return [1] * begins + [len(SPECIALS) + 2 + rank for rank in found]


def write_tekken(folder: Path, **changes: Any) -> Path:
    """``folder``/tekken.json with TOKENS, SPECIALS, and two special tokens that it does not name."""
    data: dict[str, Any] = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(TOKENS),
            "default_vocab_size": len(TOKENS) + len(SPECIALS) + 2,
            "default_num_special_tokens": len(SPECIALS) + 2,
            "version": "v13",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(TOKENS)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": text != "[THINK]"} for rank, text in enumerate(SPECIALS)
        ],
    }
    folder.mkdir(exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(data | changes))
    return folder / "tekken.json"
