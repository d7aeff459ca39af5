"""Chat templates: rendered as Transformers renders them, refused where they should be."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hardpoint.tokenizer import ChatTemplate
from hardpoint_plugin_api import CheckpointError, RequestError
from tests.tokenizer.builders import LLAMA_CONFIG, llama_style, write
from tests.tokenizer.chat_templates import CHATML, LLAMA_3, MISTRAL, PLAIN_BLOCKS

TEMPLATES = {"chatml": CHATML, "llama_3": LLAMA_3, "mistral": MISTRAL, "plain_blocks": PLAIN_BLOCKS}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
USER: dict[str, Any] = {"role": "user", "content": "  What is <b>2 + 2</b> & why? 東京\n"}
SYSTEM = {"role": "system", "content": "Be brief. "}
ANSWER = {"role": "assistant", "content": "It is four, because  "}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": "Sure?"}],
    "unset": [{**USER, "name": None, "tool_calls": None}],
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        write(tmp_path_factory.mktemp("chat"), llama_style(), LLAMA_CONFIG)
    )
    return tokenizer


def ours(template: str) -> ChatTemplate:
    return ChatTemplate({"default": template}, SPECIAL)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers(reference: PreTrainedTokenizerBase, template: str, chat: str, prompt: bool) -> None:
    expected = reference.apply_chat_template(
        CHATS[chat], chat_template=TEMPLATES[template], add_generation_prompt=prompt, tokenize=False
    )
    assert ours(TEMPLATES[template]).render(CHATS[chat], add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("template", ["chatml", "llama_3", "plain_blocks"])
@pytest.mark.parametrize("text", ["It is four, because", "trailing blanks  ", "  leading", "x"])
def test_continues_the_final_message_as_transformers(
    reference: PreTrainedTokenizerBase, template: str, text: str
) -> None:
    chat: list[dict[str, Any]] = [USER, {"role": "assistant", "content": text}]
    expected = reference.apply_chat_template(
        chat, chat_template=TEMPLATES[template], continue_final_message=True, tokenize=False
    )
    rendered = ours(TEMPLATES[template]).render(chat, add_generation_prompt=False, continue_final_message=True)
    assert rendered == expected
    assert chat[1]["content"] == text  # the caller's messages are left alone


def test_tools_parts_reasoning_and_variables_render_as_transformers(reference: PreTrainedTokenizerBase) -> None:
    chat: list[dict[str, Any]] = [
        SYSTEM,
        {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image", "image": "x.png"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "reasoning_content": "hm", "content": "Three."},
        {"role": "user", "content": "Thanks"},
    ]
    options: dict[str, Any] = {"tools": [TOOL], "add_generation_prompt": True, "enable_thinking": False}
    expected = reference.apply_chat_template(chat, chat_template=CHATML, tokenize=False, **options)
    assert ours(CHATML).render(chat, **options) == expected


CALLS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% if m['content'] is none %}<none>{% else %}"
    "{{ m['content'] }}{% endif %}{% for tool in m['tool_calls'] %}{{ '<call>' + tool['function']['arguments'] }}"
    "{% endfor %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
"""As DeepSeek's templates ask for the content of a call, and add its arguments to a text."""


@pytest.mark.parametrize("content", [None, "", "I look."])
def test_a_template_that_wants_arguments_as_text(reference: PreTrainedTokenizerBase, content: str | None) -> None:
    call: dict[str, Any] = {"name": "weather", "arguments": {"city": "Z\u00fcrich"}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": content, "tool_calls": [{"function": call}]},
        {"role": "tool", "content": "sunny"},
    ]
    got = ours(CALLS).render(chat)
    call["arguments"] = json.dumps(call["arguments"], ensure_ascii=False)
    if content:  # Transformers makes null an empty text
        assert got == reference.apply_chat_template(chat, chat_template=CALLS, tokenize=False)
    assert got == f"Weather?{content or '<none>'}<call>{call['arguments']}sunny"


@pytest.mark.parametrize("key", ["thinking", "reasoning"])
def test_other_names_of_reasoning(key: str) -> None:
    """Transformers 5.23 knows them too, 5.17 did not."""
    by_name = [USER, {**ANSWER, "reasoning_content": "hm"}]
    by_other_name = [USER, {**ANSWER, key: "hm"}]
    assert ours(CHATML).render(by_other_name) == ours(CHATML).render(by_name)


def test_members_of_enumerations_are_their_values() -> None:
    class Role(StrEnum):
        USER = "user"

    rendered = ours("{{ messages[0].role }}").render([{"role": Role.USER, "content": "x"}])
    assert rendered == "user"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hello", "must be a list of at least one message"),
        ([{"role": "user"}], r"messages\[0\] .* has no 'content'"),
        ([{"content": "x"}], r"messages\[0\] needs a 'role'"),
        ([USER, "x"], r"messages\[1\] must be an object"),
        ([{"role": "user", "content": 3}], "must be a text or a list of objects"),
        ([{"role": "user", "content": ["x"]}], "must be a text or a list of objects"),
        ([{"role": "user", "content": "x", "data": object()}], "hold plain JSON values, got a object"),
    ],
)
def test_invalid_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ours(CHATML).render(messages)


def test_the_templates_own_words_are_passed_on() -> None:
    with pytest.raises(RequestError, match="roles must alternate user/assistant!"):
        ours(MISTRAL).render([USER, USER])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "malformed, line 1"),
        ("{{ messages[9].content }}", "refuses these messages"),
        ("{{ 1 // 0 }}", "fails on these messages: ZeroDivisionError"),
        ("{{ messages.append(1) }}", "leave its sandbox"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "sandbox"),
        ("{{ namespace.__init__.__globals__ }}", "sandbox"),
        ("{{ raise_exception.__globals__['json'] }}", "sandbox"),
        ("{{ dict.__call__.__globals__ }}", "sandbox"),
        ("{% set n = namespace(__class__=1) %}", "sandbox"),
        ("{% set n = namespace() %}{% set n.__x = 1 %}", "sandbox"),
        ("{{ (messages[0].content | attr('__class__')).__mro__ }}", "sandbox|refuses"),
        ("{% include '/etc/passwd' %}", "fails on these messages|refuses"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "fails on these messages"),
    ],
)
def test_bad_templates_are_refused(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ours(template).render([USER])


def test_formatting_reveals_nothing() -> None:
    assert ours("{{ '{0.__class__}'.format(1) }}|").render([USER]) == "|"


def test_continuing_needs_a_message_to_continue() -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        ours(CHATML).render([USER, ANSWER], add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(RequestError, match="does not write out the last message"):
        ours("{{ messages[0].content }}").render(
            [USER, ANSWER], add_generation_prompt=False, continue_final_message=True
        )
    with pytest.raises(RequestError, match="holds text"):
        ours(CHATML).render(
            [{"role": "user", "content": [{"type": "image"}]}],
            add_generation_prompt=False,
            continue_final_message=True,
        )


def test_where_templates_are_found(tmp_path: Path) -> None:
    def rendered(**options: Any) -> str:
        return ChatTemplate.load(tmp_path, SPECIAL).render([USER], **options)

    with pytest.raises(RequestError, match="no chat template"):
        rendered()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert rendered() == "processor"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    assert rendered() == "config"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert (rendered(), rendered(tools=[TOOL]), rendered(template="tool_use")) == ("plain", "tools", "tools")
    with pytest.raises(RequestError, match="unknown chat template 'tool_us'; did you mean 'tool_use'"):
        rendered(template="tool_us")
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert rendered() == "file <s>"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert rendered(tools=[TOOL]) == "more"


def test_malformed_entries_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "x"}]}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: 'chat_template' must be a text, or a list"):
        ChatTemplate.load(tmp_path, SPECIAL)
