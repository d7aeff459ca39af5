"""What is read of an output, however much of it comes at once."""

from __future__ import annotations

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
    """``text`` as an engine puts it out: one more token each time."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    grown = [CompletionOutput(0, "", [])]
    for token in tokenizer.encode(text, add_special_tokens=False):
        detokenizer.add([token])
        last = grown[-1]
        ends = [*last.text_ends, len(detokenizer.text)]
        grown.append(CompletionOutput(0, detokenizer.text, [*last.token_ids, token], text_ends=ends))
    detokenizer.flush()
    last = grown[-1]
    return [*grown[1:], CompletionOutput(0, detokenizer.text, last.token_ids, "stop", text_ends=last.text_ends)]


def read(
    parser: OutputParser, grown: list[CompletionOutput], stride: int, **options: bool
) -> tuple[Reader, list[ParserEvent]]:
    """A reader that was given every so many of the outputs, and the last."""
    reader, events = Reader(parser, **{"parallel": True} | options), list[ParserEvent]()
    for output in [*grown[:-1:stride], grown[-1]]:
        delta = reader.cursor.take(output)
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
    bodies = [output.text for output in grown[:-1]]
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
