r"""How byte-level vocabularies split a text before merging, by the name that GGUF files have (``tokenizer.ggml.pre``).

The expressions are those of the models' own ``tokenizer.json``; llama.cpp keeps them as comments beside forms of its
own (``src/llama-vocab.cpp``).
"""

# ruff: noqa: RUF001  # letters that look like Latin ones are meant

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{end}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{end}"
    r"|\p{N}{digits}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_LLAMA3, _QWEN2 = _WORDS + r"{1,3}" + _TAIL, _WORDS + _TAIL
_GPT4O = _CASED.replace("{end}", _ENDINGS + "?").replace("{digits}", "{1,3}")
_TEKKEN = _CASED.replace("{end}", "").replace("{digits}", "")
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ"
    "-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-"
    "ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ"
    "-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲"
    "𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class Pretokenizer:
    """``regexes`` split one after the other. ``ignore_merges``: a word that is a token stays whole whatever the merges.

    ``bos``: a text begins with the beginning token where the file does not say.
    """

    regexes: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    bos: bool = False


_MARKED = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}" + _TAIL.replace(r"\p{L}", r"\p{L}\p{M}")
_LLAMA_BPE = Pretokenizer((_LLAMA3,), ignore_merges=True, bos=True)
_QWEN = Pretokenizer((_QWEN2,), nfc=True)
_PLAIN = Pretokenizer((_GPT2,))
_DIGITS = Pretokenizer((r"\p{N}", _GPT2))

PRETOKENIZERS: Mapping[str, Pretokenizer] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _LLAMA_BPE),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN),
    "qwen35": Pretokenizer((_MARKED,), nfc=True),
    "stablelm2": Pretokenizer((_QWEN2,)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("gpt-4o", "llama4"), Pretokenizer((_GPT4O,))),
    "tekken": Pretokenizer((_TEKKEN,), ignore_merges=True, bos=True),
    "deepseek-llm": Pretokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": Pretokenizer(_DEEPSEEK_CODER),
    "deepseek-v3": Pretokenizer(_DEEPSEEK_V3),
    "chatglm-bpe": Pretokenizer((_LLAMA3,)),
    "glm4": Pretokenizer((_LLAMA3,), ignore_merges=True),
}
