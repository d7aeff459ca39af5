"""``/v1/messages`` through Anthropic's own client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.support.serving import RunningServer

GREEDY = {"temperature": 0}
HELLO: Any = [{"role": "user", "content": "Tell me about the sea."}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"City": {"enum": ["Paris", "Oslo"]}},
    },
}


@pytest.fixture
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def create(client: anthropic.Anthropic, **options: Any) -> Any:
    body = {"temperature": 0} | options.pop("extra_body", {})  # this client has no parameter of that name
    return client.messages.create(
        **{"model": "demo", "messages": HELLO, "max_tokens": 12, "extra_body": body} | options
    )


def test_a_message_and_its_stream(client: anthropic.Anthropic, server: RunningServer) -> None:
    message = create(client, system="Hm.")
    body = {"messages": [{"role": "system", "content": "Hm."}, *HELLO], "temperature": 0, "max_tokens": 12}
    chat = server.post("/v1/chat/completions", body).json()
    assert message.content[0].text == chat["choices"][0]["message"]["content"]
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "max_tokens")
    assert message.usage.output_tokens == 12
    counted = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert counted == chat["usage"]["prompt_tokens"]
    assert client.messages.count_tokens(model="demo", messages=HELLO, system="Hm.").input_tokens == counted
    blocks: Any = [{"type": "text", "text": "Hm.", "cache_control": {"type": "ephemeral"}}]
    with client.messages.stream(
        model="demo", messages=HELLO, system=blocks, max_tokens=12, extra_body=GREEDY
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == message.content[0].text == final.content[0].text  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)


def test_events_come_in_order(client: anthropic.Anthropic) -> None:
    kinds = [event.type for event in create(client, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    whole = create(client).content[0].text
    stop = whole.split()[3]
    message = create(client, stop_sequences=["zzz", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == whole[: whole.index(stop)]


def test_the_last_message_is_continued(client: anthropic.Anthropic) -> None:
    begun = create(client, messages=[*HELLO, {"role": "assistant", "content": "The sea was"}])
    assert begun.content[0].text != create(client).content[0].text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "tool", "name": "get_weather"}, {"type": "any"}], ids=str)
def test_tools(client: anthropic.Anthropic, stream: bool, choice: Any) -> None:
    options: Any = {"tools": [WEATHER], "tool_choice": choice | {"disable_parallel_tool_use": True}, "max_tokens": 250}
    if stream:
        with client.messages.stream(model="demo", messages=HELLO, extra_body=GREEDY, **options) as events:
            message: Any = events.get_final_message()
    else:
        message = create(client, **options)
    (block,) = message.content
    assert (block.type, block.name, message.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert block.input["city"] in ("Paris", "Oslo")
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "rain"}]}
    with pytest.raises(anthropic.BadRequestError, match="chat template"):  # the demo model's knows no calls
        create(
            client, messages=[*HELLO, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
        )


def test_async(server: RunningServer) -> None:
    async def talk() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:

            async def one() -> str:
                async with client.messages.stream(
                    model="demo", messages=HELLO, max_tokens=12, extra_body=GREEDY
                ) as stream:
                    return "".join([text async for text in stream.text_stream])

            whole: Any = await client.messages.create(model="demo", messages=HELLO, max_tokens=12, extra_body=GREEDY)
            return [whole.content[0].text, *await asyncio.gather(*(one() for _ in range(8)))]

    assert len(set(asyncio.run(talk()))) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a/b"}}]}
                ]
            },
            "text alone",
        ),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"temperature": -1.0}}, "temperature must be"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(list(value)),
)
def test_bad_requests(client: anthropic.Anthropic, options: Any, message: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        create(client, **options)
    assert caught.value.body["type"] == "error"  # type: ignore[index]
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


def test_an_unknown_model(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="model 'other' is not served here; there is 'demo'"):
        create(client, model="other")
