"""Constraints tried on text: a tokenizer with one token for each byte, so that any text has one way to be written."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from hardpoint.structured.grammars import Grammars
from hardpoint_plugin_api import StructuredOutput

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUM_BYTES = 256
BEGIN, END = "<s>", "</s>"
VOCABULARY = NUM_BYTES + 2
"""256 bytes and two special tokens."""


def byte_tokenizer() -> Tokenizer:
    """A tokenizer of single bytes, and of ``<s>`` (256) and ``</s>`` (257)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)} | {BEGIN: NUM_BYTES, END: NUM_BYTES + 1}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BEGIN, END])
    return tokenizer


@cache
def _tokenizer() -> tuple[Tokenizer, Grammars]:
    made = byte_tokenizer()
    return made, Grammars(made.to_str(), NUM_BYTES + 1, VOCABULARY)


def accepts(structure: StructuredOutput, text: str) -> bool:
    """Whether an output may be ``text``, from the first token to the end. Raises RequestError as ``Grammars`` does."""
    tokenizer, grammars = _tokenizer()
    end = NUM_BYTES + 1
    state = grammars.start(structure, frozenset({end}))
    for token in tokenizer.encode(text).ids:
        if state.is_complete or not state.allowed[token // 8] >> token % 8 & 1:
            return False
        state.accept(token)
        if state.error is not None:
            return False
    return state.is_complete or bool(state.allowed[end // 8] >> end % 8 & 1)
