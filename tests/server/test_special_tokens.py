"""``skip_special_tokens`` at every endpoint that makes or reads text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.serving import RunningServer

SPECIAL = {"allowed_token_ids": [0, 1, 2], "ignore_eos": True, "temperature": 0}
"""Of the demo model's tokens, the special ones, of which nothing but the draw is left."""
NAMES = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
_CHAT = [{"role": "user", "content": "a"}]
ENDPOINTS: dict[str, tuple[str, dict[str, Any], Callable[[Any], str]]] = {
    "completions": ("/v1/completions", {"prompt": "a", "max_tokens": 3}, lambda a: a["choices"][0]["text"]),
    "chat": (
        "/v1/chat/completions",
        {"messages": _CHAT, "max_tokens": 3},
        lambda a: a["choices"][0]["message"]["content"],
    ),
    "responses": (
        "/v1/responses",
        {"input": "a", "max_output_tokens": 3},
        lambda a: "".join(part["text"] for item in a["output"] for part in item["content"]),
    ),
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("skip", [True, False, None])
def test_special_tokens_are_text_where_that_is_asked_for(
    server: RunningServer, endpoint: str, skip: bool | None
) -> None:
    path, body, text_of = ENDPOINTS[endpoint]
    more = {} if skip is None else {"skip_special_tokens": skip}
    text = text_of(server.post(path, {"model": "demo", **body, **SPECIAL, **more}).json())
    if skip is False:
        assert text.count("<|") == 3
        assert {f"<|{name}" for name in text.split("<|")[1:]} <= NAMES
    else:
        assert text == "", "the default, and where it is asked for"


@pytest.mark.parametrize("skip", [True, False])
def test_detokenize(server: RunningServer, skip: bool) -> None:
    (letter,) = server.post("/tokenize", {"model": "demo", "prompt": "a", "add_special_tokens": False}).json()["tokens"]
    body = {"model": "demo", "tokens": [0, letter, 2], "skip_special_tokens": skip}
    text = server.post("/detokenize", body).json()["prompt"]
    assert text == ("a" if skip else "<|endoftext|>a<|im_end|>")


def test_messages_have_no_such_field(server: RunningServer) -> None:
    body = {"model": "demo", "messages": _CHAT, "max_tokens": 3, "skip_special_tokens": False}
    answer = server.post("/v1/messages", body)
    assert answer.status_code == 200
    assert answer.headers["x-hardpoint-ignored-fields"] == "skip_special_tokens"
