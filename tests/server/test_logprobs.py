"""Log-probabilities, where tokens split characters: through OpenAI's own client, and offsets by themselves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence, Set
from functools import cache
from typing import Any, cast

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.checkpoint.source import demo_model
from hardpoint.engine.outputs import CompletionOutput, Logprob, RequestOutput
from hardpoint.server.openai.completions import CompletionRequest, _Answer
from hardpoint.server.openai.logprobs import TextOffsets
from hardpoint.tokenizer import Detokenizer, Tokenizer
from tests.support.serving import RunningServer
from tests.tokenizer.builders import llama_style

SPLIT = "漢字😀 é"
"""No character of it but the space is one token of the demo model."""
FORCED: dict[str, Any] = {"response_format": {"type": "choice", "choices": [SPLIT]}}
HELLO: Any = [{"role": "user", "content": "Tell me about the sea."}]


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@cache
def demo() -> Tokenizer:
    return Tokenizer.load(demo_model())


def beginnings(tokens: Sequence[bytes], text: str) -> list[int]:
    """The offsets of tokens that make up ``text`` exactly: the character that each one's first byte is of."""
    owner = [place for place, letter in enumerate(text) for _ in letter.encode()]
    starts = [len(b"".join(tokens[:number])) for number in range(len(tokens))]
    return [owner[start] if start < len(owner) else len(text) for start in starts]


@pytest.mark.parametrize("stream", [False, True])
def test_the_bytes_of_a_chat_join_to_its_text(client: openai.OpenAI, stream: bool) -> None:
    answer: Any = client.chat.completions.create(
        model="demo", messages=HELLO, logprobs=True, top_logprobs=4, max_tokens=40, stream=stream, extra_body=FORCED
    )
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert any("\ufffd" in entry.token for entry in entries), "some token splits a character"
    texts = [entry for entry in entries if not entry.token.startswith("<|")]
    assert b"".join(bytes(entry.bytes) for entry in texts).decode() == SPLIT
    by_bytes = {demo().token_bytes(token) for token in range(demo().vocab_size)}
    assert {bytes(each.bytes) for entry in entries for each in entry.top_logprobs} <= by_bytes
    for entry in entries:
        named = [each for each in entry.top_logprobs if each.logprob == entry.logprob]
        assert not named or any(each.bytes == entry.bytes for each in named)


def test_the_bytes_of_a_response_join_to_its_text(client: openai.OpenAI) -> None:
    answer: Any = client.responses.create(
        model="demo",
        input="Tell me about the sea.",
        include=["message.output_text.logprobs"],
        max_output_tokens=40,
        extra_body={"text": {"format": FORCED["response_format"]}},
    )
    entries = [e for e in answer.output[0].content[0].logprobs if not e.token.startswith("<|")]
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == SPLIT


@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("prompt", ["The whale", SPLIT, "<|im_start|>user\nHi " + SPLIT])
def test_tokens_and_offsets_of_an_echo(client: openai.OpenAI, prompt: str, stream: bool, as_ids: bool) -> None:
    ids = demo().encode(prompt)
    answer: Any = client.completions.create(
        model="demo",
        prompt=ids if as_ids else prompt,
        temperature=0,
        max_tokens=40,
        logprobs=2,
        echo=True,
        stream=stream,
        extra_body=FORCED | {"return_token_ids": True},
    )
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    text = "".join(choice.text for choice in choices)
    assert text == prompt + SPLIT
    scored = [choice.logprobs for choice in choices]
    tokens, scores, tops, offsets = (
        [each for part in scored for each in getattr(part, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    drawn = [token for choice in choices for token in choice.token_ids]
    own = list(map(demo().token_bytes, [*ids, *drawn]))
    if drawn[-1] in demo().special_ids:
        own[-1] = b""
    assert tokens == [demo().token_bytes(token).decode(errors="replace") for token in (*ids, *drawn)]
    assert (scores[0], tops[0]) == (None, None)
    assert None not in scores[1:]
    assert offsets == beginnings(own, text)
    if prompt == "The whale":
        assert "".join(tokens[: len(ids)]) == prompt


def test_offsets_index_a_text_that_a_stop_text_cut(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "logprobs": 0, "echo": True}
    whole = client.completions.create(model="demo", prompt="The whale", **options).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.text_offset is not None
    stop = whole.text[len("The whale") + 3 :][:9]
    cut = client.completions.create(model="demo", prompt="The whale", stop=stop, **options).choices[0]
    assert cut.logprobs is not None
    assert cut.logprobs.text_offset is not None
    assert cut.finish_reason == "stop"
    wanted = whole.logprobs.text_offset[: len(cut.logprobs.text_offset)]
    assert cut.logprobs.text_offset == [min(len(cut.text), offset) for offset in wanted]


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_has_the_logprobs_of_its_prompt(client: openai.OpenAI, n: int) -> None:
    options: Any = {"temperature": 0, "max_tokens": 3, "n": n, "extra_body": {"prompt_logprobs": 1}}
    whole: Any = client.completions.create(model="demo", prompt="The whale", **options)
    wanted = whole.choices[0].prompt_logprobs
    assert wanted[0] is None
    assert len(wanted) == whole.usage.prompt_tokens
    chunks: Any = list(client.completions.create(model="demo", prompt="The whale", stream=True, **options))
    for index in range(n):
        first, *rest = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert first.prompt_logprobs == wanted
        assert not any("prompt_logprobs" in choice.model_extra for choice in rest)


@pytest.mark.parametrize("n", [1, 2])
def test_a_chat_stream_has_them_too(client: openai.OpenAI, n: int) -> None:
    body: Any = {"prompt_logprobs": 1, "return_token_ids": True}
    options: Any = {"temperature": 0, "max_tokens": 3, "n": n, "extra_body": body, "messages": HELLO}
    whole: Any = client.chat.completions.create(model="demo", **options)
    assert len(whole.prompt_logprobs) == whole.usage.prompt_tokens
    first, *rest = list[Any](client.chat.completions.create(model="demo", stream=True, **options))
    assert first.choices[0].delta.role == "assistant"
    assert first.prompt_logprobs == whole.prompt_logprobs
    assert first.prompt_token_ids == whole.prompt_token_ids
    assert not any({"prompt_logprobs", "prompt_token_ids"} & set(chunk.model_extra) for chunk in rest)
    plain, *_ = list[Any](client.chat.completions.create(model="demo", stream=True, messages=HELLO, max_tokens=3))
    assert not {"prompt_logprobs", "prompt_token_ids"} & set(plain.model_extra)


def test_a_choice_that_is_faster_than_the_first_waits_for_the_scores() -> None:
    scores: Any = [None, {34: Logprob(-1.0, 1, "b")}]

    def output(
        texts: dict[int, str], scores: Any, *, ended: Set[int] = frozenset(), finished: bool = False
    ) -> RequestOutput:
        outputs = [
            CompletionOutput(i, text, [33] * len(text), "length" if i in ended else None) for i, text in texts.items()
        ]
        return RequestOutput("r", "ab", [33, 34], outputs, finished, prompt_logprobs=scores)

    class Grown:
        usage, num_choices = None, 2

        async def __aenter__(self) -> None: ...

        async def __aexit__(self, *_: object) -> None: ...

        async def grown(self) -> AsyncIterator[tuple[int, RequestOutput]]:
            for each in (
                output({1: "x"}, None),
                output({1: "yz"}, None, ended={1}),
                output({0: "a"}, scores),
                output({0: "b"}, scores, ended={0}, finished=True),
            ):
                yield 0, each

    async def events() -> list[Any]:
        body = CompletionRequest(prompt="ab", n=2, stream=True, prompt_logprobs=1)
        answer, grown = _Answer(body, "demo", cast(Any, None), "1"), cast(Any, Grown())
        lines = b"".join([event async for event in answer.events(grown)]).decode().split("\n\n")
        return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line and "DONE" not in line]

    choices = asyncio.run(events())
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "a"), (1, "xyz"), (0, "b")]
    assert [choice["finish_reason"] for choice in choices] == [None, "length", "length"]
    assert all(len(choice["prompt_logprobs"]) == 2 for choice in choices[:2])
    assert not any("prompt_logprobs" in choice for choice in choices[2:])


@given(st.text(), st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_offsets_of_pieces(text: str, at: int) -> None:
    ids = demo().encode(text)
    wanted = beginnings(list(map(demo().token_bytes, ids)), text)
    offsets = TextOffsets(demo())
    assert offsets.take(ids[:at], text) + offsets.take(ids[at:], text) == wanted


@given(st.lists(st.integers(0, 4095), max_size=12), st.integers(0, 12))
@settings(max_examples=100, deadline=None)
def test_offsets_of_any_tokens_lie_in_their_text(ids: list[int], at: int) -> None:
    prompt, drawn = ids[:at], ids[at:]
    detokenizer = Detokenizer(demo(), prompt_ids=prompt)
    text = detokenizer.add(drawn) + detokenizer.flush()
    offsets = TextOffsets(demo(), prompt).take(drawn, text)
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)


def test_special_tokens_and_first_spaces_that_the_text_lacks() -> None:
    tokenizer = Tokenizer(llama_style(), {})
    ids = tokenizer.encode("the 漢 fox")
    own = [tokenizer.token_bytes(token) for token in ids]
    assert own[0] == b"<s>"
    assert own[1].startswith(b" ")
    wanted = beginnings([b"", own[1][1:], *own[2:]], "the 漢 fox")
    assert TextOffsets(tokenizer).take(ids, "the 漢 fox") == wanted
    assert wanted[-1] <= len("the 漢 fox") - 1
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    assert shown.startswith("<s>")
    assert TextOffsets(tokenizer).take(ids, shown) == beginnings(own, shown)


def test_a_character_that_breaks_off() -> None:
    first, second, _ = demo().encode("漢")
    (a,) = demo().encode("a")
    text = demo().decode([first, a, first, second, a])
    assert text == "\ufffda\ufffda"
    assert TextOffsets(demo()).take([first, a, first, second, a], text) == [0, 1, 2, 2, 3]
    assert TextOffsets(demo(), [first]).take([a, a], "\ufffdaa") == [1, 2]
