"""Requests that were read wrongly, or that kept a server from others."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from hardpoint.server.app import create_app
from hardpoint.server.openai.messages import check_names
from hardpoint.server.response_store import ResponseStore, StoredResponse
from hardpoint.structured.schemas import closed, guided
from tests.server.test_batch import batch, line
from tests.support.engines import until
from tests.support.serving import RunningServer, running_server

CHAT = "/v1/chat/completions"
MESSAGE = {"role": "user", "content": "The whale"}


def connected(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def head(path: str, length: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def request(path: str, body: object) -> bytes:
    text = json.dumps(body).encode()
    return head(path, len(text)) + text


def test_responses_of_one_request_id_are_apart(server: RunningServer) -> None:
    """Gateways send an id with every call of an agent's turn."""
    body: dict[str, Any] = {"model": "demo", "input": "a", "max_output_tokens": 2}
    headers, found = {"x-request-id": "trace-1"}, list[str]()
    for _ in range(3):
        previous = {"previous_response_id": found[-1]} if found else {}
        found.append(server.post("/v1/responses", body | previous, headers=headers).json()["id"])
    assert len(set(found)) == 3


def test_a_circle_of_kept_responses_ends() -> None:
    """Files of earlier versions may hold one."""
    store = ResponseStore(None, 2**20, 3600)
    store.put("", StoredResponse({"id": "a"}, [], "b"))
    store.put("", StoredResponse({"id": "b"}, [], "a"))
    assert [each.response_id for each in store.conversation("", "a")] == ["b", "a"]
    store.close()


def test_large_requests_take_time_in_proportion() -> None:
    """In proportion to the square, these sizes would take hours."""
    assert json.loads(guided({"pattern": "[" * 2_000_000}))["pattern"]
    assert "pattern" not in json.loads(guided({"pattern": r"[a(?=]\1"}))
    assert "pattern" in json.loads(guided({"pattern": r"[(?=\1]"}))
    check_names([str(number) for number in range(200_000)])
    parts: list[Any] = [{"properties": {}, "allOf": [{}]} for _ in range(30_000)]
    assert closed({"anyOf": parts})["anyOf"][0] == parts[0]


@pytest.mark.parametrize("prompt", [[None] * 100_000, ["a", 1], [[1], 2], [[1], ["a"]], [1.5]])
def test_prompts_of_no_form(server: RunningServer, prompt: list[Any]) -> None:
    answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("prompt: must be a text, a list of texts, a list of token ids")


@pytest.mark.parametrize("name", ["is_limited", "add_special_tokens"])
def test_variables_of_templates_that_have_other_meanings(server: RunningServer, name: str) -> None:
    answer = server.post(CHAT, {"messages": [MESSAGE], "max_tokens": 1, "chat_template_kwargs": {name: True}})
    assert answer.status_code == 400
    assert f"chat_template_kwargs holds '{name}'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("depth", [50, 600, 3000])
def test_nested_arguments_of_an_earlier_call(server: RunningServer, depth: int) -> None:
    call = {"name": "f", "arguments": '{"a":' * depth + "{}" + "}" * depth}
    calls = [{"id": "1", "type": "function", "function": call}]
    asked = {"role": "assistant", "content": "", "tool_calls": calls}
    said: list[dict[str, Any]] = [MESSAGE, asked, {"role": "tool", "content": "x", "tool_call_id": "1"}]
    assert server.post(CHAT, {"messages": said, "max_tokens": 1}).status_code == 200


def test_tokens_of_a_message_that_goes_on(server: RunningServer) -> None:
    body = {"messages": [MESSAGE, {"role": "assistant", "content": "It"}], "continue_final_message": True}
    assert server.post("/tokenize", body).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_heads_of_probes(server: RunningServer, path: str) -> None:
    answer = server.ask("HEAD", path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_a_pipelined_request_leaves_with_its_client(server: RunningServer) -> None:
    """And so does the one before it, which runs."""
    endless = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "n": 4, "stream": True}
    with connected(server) as client:
        client.sendall(request("/v1/completions", endless))
        assert client.recv(1)
        client.sendall(request("/v1/completions", {"prompt": "a", "max_tokens": 1}))
        until(lambda: server.sample("hardpoint_running_requests") > 0)
    until(server.is_idle)
    assert server.sample("hardpoint_generated_tokens_total") < 4 * 2000


def test_a_body_behind_an_early_answer_is_no_head(server: RunningServer) -> None:
    """The next answer on the connection is that of the next request."""
    with connected(server) as client:
        client.sendall(head("/nowhere", 300_000) + b"x" * 100_000)
        assert client.recv(12) == b"HTTP/1.1 404"
        client.sendall(b"x" * 200_000 + b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        text = b""
        while part := client.recv(65536):
            text += part
    assert b"HTTP/1.1 200" in text
    assert b"HTTP/1.1 431" not in text


def test_choices_that_overtake_the_one_that_scores_the_prompt() -> None:
    """A cached prompt longer than a step is computed again for its scores, by the first choice alone."""
    messages = [{"role": "user", "content": "It was a dark and stormy night upon the sea. " * 60}]
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "prompt_logprobs": 0, "n": 3}
    with running_server("--max-num-batched-tokens", "64", "--max-num-seqs", "4") as server:
        whole = [choice["message"]["content"] for choice in server.post(CHAT, body).json()["choices"]]
        streamed = [""] * 3
        for event in server.post(CHAT, body | {"stream": True}).text.split("\n\n"):
            if event.startswith("data: {"):
                for choice in json.loads(event.removeprefix("data: "))["choices"]:
                    streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert streamed == whole
    assert all(whole)


def test_a_line_of_a_batch_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose id is no text that UTF-8 can hold."""

    def failing(*args: Any) -> Any:
        app = create_app(*args)

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] == "/v1/chat/completions":
                await send({"type": "http.response.start", "status": 500, "headers": []})
                await send({"type": "http.response.body", "body": b"{}"})
                raise ValueError("as starlette does behind an answer with status 500")
            await app(scope, receive, send)

        return call

    monkeypatch.setattr("hardpoint.server.batch.create_app", failing)
    lines = [line("bad", CHAT, messages=[MESSAGE]), line("b\ud800", prompt="a", max_tokens=1)]
    code, answers = batch(tmp_path, *lines)
    assert code == 1
    found = {name: answer["response"]["status_code"] for name, answer in answers.items()}
    assert found == {"bad": 500, "b\ud800": 200}
