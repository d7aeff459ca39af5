"""``/v1/chat/completions`` through OpenAI's own client."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.support.serving import RunningServer

HELLO: Any = [{"role": "user", "content": "Tell me about the sea."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}

OPEN: Any = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "demo", "messages": HELLO, "temperature": 0, "max_tokens": 12} | options
    )


def joined(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    return "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index)


def test_an_answer_and_its_stream(client: openai.OpenAI) -> None:
    answer = chat(client)
    message = answer.choices[0].message
    assert message.role == "assistant"
    assert len(message.content) > 10
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert joined(chunks) == message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert answer.usage.completion_tokens == chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_second_time_the_prompt_is_cached(client: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "The sea is wide. " * 20}]
    for _ in range(2):
        answer = chat(client, messages=long, max_tokens=1)
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    salted = chat(client, messages=long, max_tokens=1, extra_body={"cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: openai.OpenAI, stream: bool) -> None:
    options = {"logprobs": True, "top_logprobs": 3, "max_tokens": 5}
    if stream:
        choices = [c for chunk in chat(client, stream=True, **options) for c in chunk.choices]
        text = "".join(choice.delta.content or "" for choice in choices)
    else:
        choices = chat(client, **options).choices
        text = choices[0].message.content
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
    assert "".join(entry.token for entry in entries) == text
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob), "greedy takes the likeliest"
        assert bytes(entry.bytes).decode() == entry.token


def test_fields_of_vllm(client: openai.OpenAI) -> None:
    extra = {"guided_choice": ["whale", "boat"], "return_tokens_as_token_ids": True, "request_id": "mine"}
    answer = chat(client, extra_body=extra, logprobs=True)
    assert answer.choices[0].message.content in ("whale", "boat")
    assert answer.id == "chatcmpl-mine"
    assert all(entry.token.startswith("token_id:") for entry in answer.choices[0].logprobs.content)
    kept = {"truncate_prompt_tokens": 3, "truncation_side": "right", "return_token_ids": True}
    whole, cut = (chat(client, extra_body=each | {"return_prompt_text": True}) for each in ({}, kept))
    assert HELLO[-1]["content"] in whole.prompt_text
    assert (cut.prompt_text, len(cut.prompt_token_ids)) == (whole.prompt_text, 3)
    told = [chunk.model_dump() for chunk in chat(client, stream=True, extra_body={"return_prompt_text": True})]
    assert [chunk.get("prompt_text") for chunk in told] == [whole.prompt_text] + [None] * (len(told) - 1)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(client, stream=True, extra_body={"stream_options": options}))
    assert [chunk.usage.completion_tokens for chunk in chunks][-1] == 12
    assert all(chunk.usage.prompt_tokens > 0 for chunk in chunks)
    headers = client.chat.completions.with_raw_response.create(
        model="demo", messages=HELLO, max_tokens=1, extra_headers={"x-request-id": "theirs"}
    )
    assert headers.headers["x-request-id"] == headers.request_id == "theirs"
    assert headers.parse().id == "chatcmpl-theirs"


@pytest.mark.parametrize(
    ("rank", "message"),
    [("1", "this server has replica 0 of 1"), ("-1", "must be a replica's number, got '-1'"), ("0", None)],
)
def test_a_request_names_its_replica(client: openai.OpenAI, rank: str, message: str | None) -> None:
    create = functools.partial(client.chat.completions.create, model="demo", messages=HELLO, max_tokens=1)
    if message is None:
        assert create(extra_headers={"x-data-parallel-rank": rank}).choices
        return
    with pytest.raises(openai.BadRequestError, match=message):
        create(extra_headers={"x-data-parallel-rank": rank})


def test_completions_and_seeds(client: openai.OpenAI) -> None:
    options = {"n": 3, "temperature": 1.0, "seed": 11}
    texts = [choice.message.content for choice in chat(client, **options).choices]
    assert len(set(texts)) == 3
    assert [choice.message.content for choice in chat(client, **options).choices] == texts
    chunks = list(chat(client, stream=True, **options))
    assert [joined(chunks, index) for index in range(3)] == texts


def test_parts_names_and_roles(client: openai.OpenAI) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Tell me about the sea."}]}]
    assert chat(client, messages=parts).choices[0].message.content == chat(client).choices[0].message.content
    for role in ("system", "developer"):
        whole: Any = [{"role": role, "content": "Be brief."}, *HELLO]
        answers = {role: chat(client, messages=whole).choices[0].message.content}
    assert len(set(answers.values())) == 1


def test_the_last_message_is_continued(client: openai.OpenAI, server: RunningServer) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "The sea was"}]
    options = {"extra_body": {"continue_final_message": True}}
    answer = chat(client, messages=begun, **options)
    text = "<|im_start|>user\nTell me about the sea.<|im_end|>\n<|im_start|>assistant\nThe sea was"
    ids = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    plain = client.completions.create(model="demo", prompt=ids, temperature=0, max_tokens=12)
    assert answer.choices[0].message.content == plain.choices[0].text
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        chat(client, messages=begun, extra_body={"continue_final_message": True, "add_generation_prompt": True})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
@pytest.mark.parametrize("tools", [[WEATHER], [TIME, WEATHER]], ids=len)
def test_a_call_is_forced(client: openai.OpenAI, stream: bool, choice: Any, tools: Any) -> None:
    options = {"tools": tools, "tool_choice": choice, "max_tokens": 250, "parallel_tool_calls": False}
    if stream:
        chunks = list(chat(client, stream=True, **options))
        pieces = [call for c in chunks for choice in c.choices for call in choice.delta.tool_calls or ()]
        assert pieces[0].id
        name, arguments = pieces[0].function.name, "".join(piece.function.arguments or "" for piece in pieces)
        assert all(piece.function.name is None for piece in pieces[1:])
        reason = chunks[-1].choices[0].finish_reason
        assert not joined(chunks)
    else:
        answer = chat(client, **options).choices[0]
        (call,) = answer.message.tool_calls[:1]
        name, arguments, reason = call.function.name, call.function.arguments, answer.finish_reason
        assert call.id
    assert reason == "tool_calls"
    if name == "get_weather":
        assert json.loads(arguments)["city"] in ("Paris", "Oslo")
    else:
        assert (choice, name) == ("required", "get_time")


def test_the_model_calls_by_itself(client: openai.OpenAI) -> None:
    """The demo model knows no calls: a pattern makes it write one, in the syntax that the parser reads."""
    pattern = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "(Paris|Oslo)"\}\}\n</tool_call>'
    options: dict[str, Any] = {
        "tools": [WEATHER],
        "extra_body": {"response_format": {"type": "regex", "pattern": pattern}},
        "max_tokens": 100,
    }
    answer = chat(client, **options).choices[0]
    (call,) = answer.message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")
    assert (call.function.name, answer.finish_reason, answer.message.content) == ("get_weather", "tool_calls", None)

    with client.chat.completions.stream(model="demo", messages=HELLO, temperature=0, **options) as events:
        pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
        (streamed,) = list(events.get_final_completion().choices[0].message.tool_calls or ())
    assert len(pieces) > 2, "they come as they are written"
    assert "".join(piece.arguments_delta for piece in pieces) == call.function.arguments
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    history: Any = [
        *HELLO,
        answer.message.model_dump() | {"content": ""},
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    assert chat(client, messages=history, tools=[WEATHER]).choices[0].message.content


class City(pydantic.BaseModel):
    name: Literal["Paris", "Oslo"]


class Trip(pydantic.BaseModel):
    """Nested, so that its schema has a reference."""

    to: City


class Wait(pydantic.BaseModel):
    how: Literal["here", "there"]


@pytest.mark.parametrize("models", [(Trip,), (Wait, Trip)], ids=len)
def test_a_named_function_of_a_nested_model_is_called_once(client: openai.OpenAI, models: Any) -> None:
    tools: Any = [openai.pydantic_function_tool(model) for model in models]
    choice: Any = {"type": "function", "function": {"name": "Trip"}}
    (only,) = chat(client, tools=tools, tool_choice=choice, max_tokens=400).choices
    (call,) = only.message.tool_calls
    assert Trip.model_validate_json(call.function.arguments).to.name in ("Paris", "Oslo")


class Person(pydantic.BaseModel):
    name: Literal["Ann", "Bob"]
    is_old: bool


def test_parsed_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="demo", messages=HELLO, temperature=0, max_tokens=200, response_format=Person
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


THREE: dict[str, Any] = {"type": "regex", "pattern": "[abc]{3}"}


@pytest.mark.parametrize(
    ("form", "is_valid"),
    [
        (
            {"type": "structural_tag", "format": {"type": "tag", "begin": "<t>", "content": THREE, "end": "</t>"}},
            lambda text: re.fullmatch("<t>[abc]{3}</t>", text),
        ),
        ({"type": "regex", "pattern": "[a-c]{4}"}, lambda text: len(text) == 4 and set(text) <= set("abc")),
        ({"type": "choice", "choices": ["whale", "boat"]}, lambda text: text in ("whale", "boat")),
        ({"type": "grammar", "grammar": 'start: "x" "y"+ "z"'}, lambda text: text.strip("xz") == "y" * (len(text) - 2)),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["one", "two"]}, "strict": True}},
            lambda text: json.loads(text) in ("one", "two"),
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": OPEN, "strict": True}},
            lambda text: json.loads(text).keys() == {"a"},
        ),
        ({"type": "text"}, lambda text: bool(text)),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_response_formats(client: openai.OpenAI, form: Any, is_valid: Any) -> None:
    for stream in (False, True):
        answer = chat(client, extra_body={"response_format": form}, max_tokens=40, stream=stream)
        text = joined(list(answer)) if stream else answer.choices[0].message.content
        assert is_valid(text), text
