"""Mistral's tekken.json: tokens as its BPE is defined, and as mistral-common gives them where that is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.tokenizer import Tokenizer
from hardpoint.tokenizer.mistral_chat import MistralChat, load_chat_template
from hardpoint_plugin_api import CheckpointError, RequestError
from tests.support.tekken import PATTERN, TEXT, TOKENS, defined, write_tekken

TEXTS = [
    "",
    "the that",
    "  two  spaces",
    "naïve Ünïcödé",
    "日本語\n\n\t",
    "aaaaaaaa thatthat",
    "\U0001f600 emoji",
    "1000000",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tekken(tmp_path_factory.mktemp("tekken")))


@pytest.mark.parametrize("text", [*TEXTS, TEXT])
def test_tokens_are_those_of_the_definition(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text, add_special_tokens=False) == defined(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text(alphabet="the at\n日é1!", max_size=30))
def test_tokens_of_any_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text, add_special_tokens=False) == defined(text)


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("the")[0] == tokenizer.bos_token_id == 1
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (2, len(TOKENS) + 8)
    assert tokenizer.encode("[INST]<SPECIAL_6>", add_special_tokens=False) == [3, 6]
    assert tokenizer.decode([1, 3, 5, 2]) == "[THINK]", "text for a reader, unlike tokens that control"
    assert tokenizer.token_bytes(8 + 0xE6) == b"\xe6"


def test_files_without_a_list_have_the_first_special_tokens(tmp_path: Path) -> None:
    config = {"pattern": PATTERN, "default_vocab_size": 256 + 24, "default_num_special_tokens": 24}
    tokenizer = Tokenizer.load(write_tekken(tmp_path, special_tokens=None, config=config))
    assert tokenizer.encode("[TOOL_CALLS]", add_special_tokens=False) == [9]
    assert tokenizer.encode("[TOOL_CONTENT]A", add_special_tokens=False) == [19, 24 + 65]


def test_bad_files_are_named(tmp_path: Path) -> None:
    file = write_tekken(tmp_path, vocab=[])
    with pytest.raises(CheckpointError, match=r"tekken.json is no Tekken tokenizer: KeyError: 0"):
        Tokenizer.load(file)
    file.write_text("{}")
    with pytest.raises(CheckpointError, match=r"tekken.json is no Tekken tokenizer: KeyError: 'config'"):
        Tokenizer.load(file)


def test_without_mistral_common_a_chat_needs_a_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    file, messages = write_tekken(tmp_path), [{"role": "user", "content": "Hi"}]
    with pytest.raises(RequestError, match=r"pip install 'hardpoint-core\[mistral\]', .*, or name a template by"):
        load_chat_template(file, {}).render(messages)
    (tmp_path / "chat_template.jinja").write_text("[INST]{{ messages[0].content }}[/INST]")
    assert load_chat_template(file, {}).render(messages) == "[INST]Hi[/INST]"


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "a list of at least one message"),
        ("Hi", "a list of at least one message"),
        (["Hi"], r"messages\[0\] must be an object"),
        ([{"content": "Hi"}], r"messages\[0\] needs a 'role'"),
        ([{"role": "user"}], r"messages\[0\] \(role 'user'\) has no 'content'"),
        ([{"role": "user", "content": 3}], r"messages\[0\] 'content' must be a text or a list"),
        ([{"role": "user", "content": "Hi", "more": {1}}], "plain JSON values, got a set"),
        (
            [
                {"role": "user", "content": "See:"},
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost/secret"}}]},
            ],
            r"messages\[1\] holds a part of type 'image_url'; text alone is read, in parts of type 'text' or",
        ),
        ([{"role": "user", "content": [{"type": ["text"]}]}], r"messages\[0\] holds a part of type \['text'\]"),
    ],
    ids=str,
)
def test_messages_are_checked_before_mistral_common_sees_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Any, error: str
) -> None:
    """It would open the addresses of images. With or without it, the error is of the request."""
    monkeypatch.setitem(sys.modules, "mistral_common", None)  # an import fails
    with pytest.raises(RequestError, match=error):
        MistralChat(write_tekken(tmp_path), {}).render(messages)


MESSAGES = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the weather in Zürich, and 12345 + 1?"},
    {"role": "assistant", "content": "Sunny."},
    {"role": "user", "content": [{"type": "text", "text": "  Thanks!\n\n日本語? "}]},
)
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Zürich"}'},
}
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
)


@pytest.fixture(scope="module", params=["tekken_240718.json", "tekken_240911.json"])
def shipped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that the library ships."""
    library = pytest.importorskip("mistral_common")
    folder = tmp_path_factory.mktemp("shipped")
    data = Path(library.__file__).parent / "data" / request.param
    (folder / "tekken.json").write_bytes(data.read_bytes())
    return folder / "tekken.json"


@pytest.fixture(scope="module")
def ours(shipped: Path) -> Tokenizer:
    return Tokenizer.load(shipped)


@pytest.fixture(scope="module")
def theirs(shipped: Path) -> Any:
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    return MistralTokenizer.from_file(str(shipped))


@pytest.mark.parametrize(
    "text",
    [*TEXTS, TEXT, "def f(x):\n\treturn x ** 2  # done\r\n\r\n" * 3, "\u0430\u0430\u0430 \u04d3\u04d3 \u047f" * 9],
)
def test_tokens_of_mistral_common(ours: Tokenizer, theirs: Any, text: str) -> None:
    tekkenizer = theirs.instruct_tokenizer.tokenizer
    assert ours.encode(text) == tekkenizer.encode(text, bos=True, eos=False)
    assert ours.vocab_size == tekkenizer.n_words
    assert ours.decode(ours.encode(text)) == text


def test_chats_of_mistral_common(shipped: Path, ours: Tokenizer, theirs: Any) -> None:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    template = load_chat_template(shipped, ours.special_tokens)
    called: list[dict[str, Any]] = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "rain"},
    ]
    for messages, tools in ((MESSAGES, None), (called, TOOLS)):
        request = ChatCompletionRequest.from_openai(list(messages), list(tools) if tools else None)
        text = template.render(messages, tools=tools)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode_chat_completion(request).tokens


def test_messages_that_are_refused(shipped: Path) -> None:
    template = load_chat_template(shipped, {})
    with pytest.raises(RequestError, match="mistral-common refuses the messages"):
        template.render([{"role": "assistant", "content": "I begin."}])
    call = {"id": "abcdefghi", "type": "function", "function": ["weather"]}
    with pytest.raises(RequestError, match="mistral-common refuses the messages"):
        template.render([*MESSAGES, {"role": "assistant", "tool_calls": [call]}])
    with pytest.raises(RequestError, match="exclude each other"):
        template.render(MESSAGES, continue_final_message=True)
