"""Reading an output, however much of it comes at once."""

from __future__ import annotations

import copy

import pytest

from hardpoint.checkpoint.source import resolve_model
from hardpoint.engine.outputs import CompletionOutput
from hardpoint.parsers import OutputParser
from hardpoint.server.turn import Reader
from hardpoint.tokenizer import Detokenizer, Tokenizer
from hardpoint_plugin_api import ContentDelta, ParserEvent, ReasoningDelta, ToolCallStart
from tests.parsers.reading import joined, opened


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model("demo"))


def outputs(tokenizer: Tokenizer, text: str) -> list[CompletionOutput]:
    """``text`` as an engine puts it out: a part for each token, and one for the end."""
    detokenizer, parts = Detokenizer(tokenizer, skip_special_tokens=False), list[CompletionOutput]()
    for token in tokenizer.encode(text, add_special_tokens=False):
        start = detokenizer.num_chars
        piece = detokenizer.add([token])
        parts.append(CompletionOutput(0, piece, [token], text_ends=[detokenizer.num_chars], start=start))
    start = detokenizer.num_chars
    return [*parts, CompletionOutput(0, detokenizer.flush(), [], "stop", start=start)]


def read(
    parser: OutputParser, grown: list[CompletionOutput], stride: int, **options: bool
) -> tuple[Reader, list[ParserEvent]]:
    """A reader that was given so many parts at once."""
    reader, events = Reader(parser, **{"parallel": True} | options), list[ParserEvent]()
    for begin in range(0, len(grown), stride):
        joined, *rest = copy.deepcopy(grown[begin : begin + stride])
        for part in rest:
            joined.extend(part)
        delta = reader.cursor.take(joined)
        if delta is not None:
            events += reader.read(delta)
    return reader, events


@pytest.mark.parametrize(
    ("parser", "prompt", "text", "answer"),
    [
        ("think", "", "<think>\nThe sea \N{WHALE} is wide, and so on.</think>\n\nIt is wide.", "It is wide."),
        ("think", "<think>\n", "The sea is wide.</think>It is \N{WHALE} wide.", "It is \N{WHALE} wide."),
        ("think", "<think>\n", "The sea is wide.", ""),
        ("think", "", "The sea is wide.", "The sea is wide."),
        (
            "harmony",
            "",
            "<|channel|>analysis<|message|>The sea.<|end|><|start|>assistant<|channel|>final<|message|>Wide.",
            "Wide.",
        ),
    ],
)
def test_reasoning_is_counted_by_tokens(tokenizer: Tokenizer, parser: str, prompt: str, text: str, answer: str) -> None:
    grown = outputs(tokenizer, text)
    bodies = [text[: part.text_ends[-1]] for part in grown[:-1]]
    before = text.removesuffix(answer)
    expected = sum(len(body) <= len(before) for body in bodies)
    for stride in (1, 3, 1000):
        reader, events = read(opened(reasoning=parser, prompt=prompt), grown, stride)
        assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == answer
        assert any(isinstance(event, ReasoningDelta) for event in events) == bool(before)
        assert reader.num_reasoning_tokens == expected, stride


CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n'


@pytest.mark.parametrize("stride", [1, 7, 1000])
def test_an_output_ends_before_a_second_call(tokenizer: Tokenizer, stride: int) -> None:
    grown = outputs(tokenizer, f"Well.{CALL}And{CALL}more{CALL}")
    reader, events = read(opened("hermes"), grown, stride, parallel=False)
    assert joined(events) == [("content", "Well."), ("call", "clock", "{}"), ("content", "\nAnd")]
    assert reader.has_enough
    reader, events = read(opened("hermes"), grown, stride)
    assert sum(isinstance(event, ToolCallStart) for event in events) == 3
    assert not reader.has_enough
