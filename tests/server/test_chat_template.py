"""A chat template of the user's, and what follows of it for reasoning and calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from hardpoint.checkpoint.source import resolve_model
from hardpoint.config import EngineConfig
from hardpoint.engine.frontend.frontend import Frontend
from hardpoint_plugin_api import ConfigError, RequestError
from tests.support.serving import RunningServer, running_server

TEMPLATE = """
{%- for document in documents or () %}{{ document.title }}
{% endfor -%}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor -%}
assistant:
{%- if add_generation_prompt %}<think>{{ "</think>" if enable_thinking is false }}{% endif -%}
"""
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    file = tmp_path_factory.mktemp("template") / "mine.jinja"
    file.write_text(TEMPLATE)
    with running_server("--chat-template", str(file), "--tool-parser", "hermes") as server:
        yield server


def test_it_takes_the_place_of_the_checkpoints(thinking: RunningServer) -> None:
    found = thinking.post("/tokenize", {"messages": CHAT["messages"]}).json()
    text = thinking.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"]
    assert text == "user: hello\nassistant:<think>"


def test_reasoning_tokens_are_counted(thinking: RunningServer) -> None:
    """The template shows the tags, so that the parser is chosen; the demo model never ends what the prompt began."""
    body = CHAT | {"max_tokens": 9, "ignore_eos": True}
    usage = thinking.post("/v1/chat/completions", body).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 9}
    usage = thinking.post("/v1/chat/completions", body | {"chat_template_kwargs": {"enable_thinking": False}}).json()
    assert usage["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    body = {"input": "hello", "max_output_tokens": 5, "ignore_eos": True}
    usage = thinking.post("/v1/responses", body).json()["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 5}
    client = openai.OpenAI(base_url=thinking.url + "/v1", api_key="none")
    options: Any = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 2,
        "extra_body": {"ignore_eos": True},
    }
    *_, last = client.chat.completions.create(**CHAT, max_tokens=7, **options)
    assert last.usage.completion_tokens_details.reasoning_tokens == last.usage.completion_tokens == 14


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_may_be_left_out(thinking: RunningServer, stream: bool) -> None:
    """It is written and counted all the same."""
    client = openai.OpenAI(base_url=thinking.url + "/v1", api_key="none")
    texts = []
    for wanted in (True, False):
        extra = {"ignore_eos": True, "include_reasoning": wanted}
        answer: Any = client.chat.completions.create(**CHAT, max_tokens=9, stream=stream, extra_body=extra)
        said = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
        texts.append("".join(getattr(each, "reasoning", None) or "" for each in said))
        assert not any(each.content for each in said)
        assert stream or answer.usage.completion_tokens_details.reasoning_tokens == 9
    assert texts[0]
    assert not texts[1]


def test_a_template_is_given_documents(thinking: RunningServer) -> None:
    body = CHAT | {"max_tokens": 1, "documents": [{"title": "Moby Dick", "text": "Call me Ishmael."}]}
    answer = thinking.post("/v1/chat/completions", body | {"return_token_ids": True}).json()
    text = thinking.post("/detokenize", {"tokens": answer["prompt_token_ids"]}).json()["prompt"]
    assert text == "Moby Dick\nuser: hello\nassistant:<think>"


CALL = r'<tool_call>\n\{"name": "clock", "arguments": \{\}\}\n</tool_call>\n'
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_output_ends_before_the_second(thinking: RunningServer, stream: bool) -> None:
    """The demo model knows no calls: a pattern makes it write two, and then much more."""
    form = {"type": "regex", "pattern": rf"Well\.{CALL}{CALL}x{{1500}}"}
    body = CHAT | {
        "tools": TOOLS,
        "response_format": form,
        "chat_template_kwargs": {"enable_thinking": False},
        "parallel_tool_calls": False,
        "max_tokens": 1900,
        "n": 2,
    }
    client = openai.OpenAI(base_url=thinking.url + "/v1", api_key="none")
    extra = {name: body.pop(name) for name in ("response_format", "chat_template_kwargs")}
    if stream:
        with client.chat.completions.stream(**body, extra_body=extra, stream_options={"include_usage": True}) as events:
            answer: Any = events.get_final_completion()
    else:
        answer = client.chat.completions.create(**body, extra_body=extra)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments, choice.message.content) == ("clock", "{}", "Well.")
    assert answer.usage.completion_tokens < 2 * 1000
    assert thinking.get("/health").status_code == 200


def frontend(template: Path) -> Frontend:
    """The text side of an engine with ``template``, without the engine."""
    return Frontend.load(EngineConfig.create(model="demo", chat_template=str(template)), resolve_model("demo"))


@pytest.mark.parametrize(
    ("text", "message"), [(None, "cannot be read"), ("{% for %}", "line 1: it is no Jinja template")]
)
def test_a_template_that_is_none(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "mine.jinja"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        frontend(file)


def test_it_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(RequestError, match="sandbox"):
        frontend(file).render_chat(CHAT["messages"])
