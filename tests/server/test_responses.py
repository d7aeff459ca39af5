"""``/v1/responses`` through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.support.serving import RunningServer

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Person(pydantic.BaseModel):
    name: Literal["Ann", "Bob"]


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def respond(client: openai.OpenAI, **options: Any) -> Any:
    defaults: dict[str, Any] = {"model": "demo", "input": "Tell me about the sea."}
    defaults |= {"temperature": 0, "max_output_tokens": 16}
    return client.responses.create(**defaults | options)


def test_an_answer(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="demo",
        messages=[{"role": "system", "content": "Hm."}, {"role": "user", "content": "Tell me about the sea."}],
        temperature=0,
        max_tokens=16,
    )
    answer = respond(client, instructions="Hm.")
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 16
    assert answer.usage.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]
    assert answer.store is True


def test_a_conversation_is_sent_whole(client: openai.OpenAI) -> None:
    first = respond(client)
    conversation = [{"role": "user", "content": "Tell me about the sea."}, *first.output]
    second = respond(client, input=[*conversation, {"role": "user", "content": "More."}])
    assert second.output_text
    assert second.usage.input_tokens > first.usage.input_tokens + 16


def test_a_stream_tells_the_same(client: openai.OpenAI) -> None:
    wanted = respond(client)
    events = list(respond(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == wanted.output_text == events[-1].response.output_text == events[-4].text
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


def test_the_clients_own_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo", input="Who?", temperature=0, text_format=Person) as stream:
        kinds = [event.type for event in stream]
        assert isinstance(stream.get_final_response().output_parsed, Person)
    assert kinds[-1] == "response.completed"


@pytest.mark.parametrize("stream", [False, True])
def test_calls(client: openai.OpenAI, stream: bool) -> None:
    choice = {"type": "function", "name": "get_weather"}
    options = {"tools": [WEATHER], "tool_choice": choice, "max_output_tokens": 250, "parallel_tool_calls": False}
    if stream:
        events = list(respond(client, stream=True, **options))
        answer = events[-1].response
        deltas = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
        assert deltas == answer.output[0].arguments
    else:
        answer = respond(client, **options)
    (call,) = answer.output
    assert (call.type, call.name, answer.status) == ("function_call", "get_weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Paris", "Oslo")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    with pytest.raises(openai.BadRequestError, match="chat template"):  # the demo model's knows no calls
        respond(client, input=[{"role": "user", "content": "Weather?"}, call, result])


def test_parsed_answers(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model="demo", input="Who?", temperature=0, max_output_tokens=200, text_format=Person
    )
    assert isinstance(answer.output_parsed, Person)


def test_logprobs(client: openai.OpenAI) -> None:
    answer = respond(client, include=["message.output_text.logprobs"], top_logprobs=2)
    part = answer.output[0].content[0]
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra_body": {"conversation": "c"}}, "conversation is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a/b"}]}]}, "text alone"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"extra_body": {"n": 2}}, "n: a response is one completion"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_bad_requests(client: openai.OpenAI, options: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        respond(client, **options)
