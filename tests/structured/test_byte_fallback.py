"""Structured output over a tokenizer of pieces with byte fallback: whatever is no piece is written byte by byte.

A model with random weights draws among all tokens that a constraint leaves, single bytes of characters included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint_plugin_api import StructuredOutput
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import small_llm
from tests.tokenizer.builders import LLAMA_CONFIG, llama_style, write

LETTERS = "[äß東京жa]"
WORD = re.compile(f"{LETTERS}{{3,6}}")
PLACE = {
    "type": "object",
    "properties": {
        "größe": {"type": "integer", "minimum": 3, "maximum": 20},
        "name": {"type": "string", "pattern": f"^{LETTERS}{{2,5}}$"},
        "art": {"enum": ["Fluß", "東京", "🚀 go"]},
    },
    "required": ["größe", "name", "art"],
    "additionalProperties": False,
}
CHOICES = ["größer", "groß", " 東京", "🚀"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("fallback")
    tokenizer = llama_style()
    assert not [piece for piece in tokenizer.get_vocab() if set(piece) & set("äß東京ж🚀ö")], "no piece has these"
    write_checkpoint(folder, "llama", vocab_size=tokenizer.get_vocab_size(), eos_token_id=2, bos_token_id=1)
    write(folder, tokenizer, LLAMA_CONFIG)
    with small_llm(folder, dtype="float32") as llm:
        yield llm


def outputs(llm: LLM, structured: StructuredOutput, prompt: str = "Hello") -> list[str]:
    params = [SamplingParams(temperature=1.5, seed=seed, max_tokens=200, structured=structured) for seed in range(24)]
    found = [output.outputs[0] for output in llm.generate([prompt] * len(params), params, use_tqdm=False)]
    assert {each.finish_reason for each in found} == {"stop"}
    return [each.text for each in found]


def test_a_pattern_of_characters_that_are_no_pieces(llm: LLM) -> None:
    texts = outputs(llm, StructuredOutput.regex(WORD.pattern))
    for text in texts:
        assert WORD.fullmatch(text), text
    assert set("".join(texts)) == set("äß東京жa")


def test_json_with_keys_and_values_that_are_no_pieces(llm: LLM) -> None:
    for text in outputs(llm, StructuredOutput.json_schema(PLACE)):
        place = json.loads(text)
        assert list(place) == ["größe", "name", "art"]
        assert 3 <= place["größe"] <= 20
        assert re.fullmatch(f"{LETTERS}{{2,5}}", place["name"])
        assert place["art"] in ("Fluß", "東京", "🚀 go")


@pytest.mark.parametrize("prompt", ["Hello", "東京"])
def test_choices_with_a_blank_in_front_and_a_common_start(llm: LLM, prompt: str) -> None:
    """A first token whose piece begins with ``▁`` is a blank: no decoder may strip it from an output."""
    texts = outputs(llm, StructuredOutput.choice(CHOICES), prompt)
    assert set(texts) <= set(CHOICES)
    assert len(set(texts)) >= 3


def test_a_grammar_of_bytes(llm: LLM) -> None:
    for text in outputs(llm, StructuredOutput.grammar('start: pair ("—" pair)*\npair: /[äж]/ "→" /[京a]/')):
        assert re.fullmatch("[äж]→[京a](—[äж]→[京a])*", text), text
