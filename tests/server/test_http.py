"""Rules of every endpoint: errors, keys, limits, clients that leave, and paths for operators."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from hardpoint import __version__
from hardpoint.engine.async_engine import MAX_CHARACTERS
from hardpoint.server.openai.messages import ChatMessage, template_messages
from tests.support.engines import until
from tests.support.serving import RunningServer, open_stream, running_server, send

ENDLESS = {"prompt": "The whale", "max_tokens": 1900, "ignore_eos": True}
LONG = {"type": "json_schema", "schema": {"type": "array", "items": {"const": 1}, "minItems": 5000}}
"""For a protocol that cannot say ignore_eos."""
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {}, "prompt is missing"),
        ("/v1/completions", {"prompt": "a", "priority": -1}, "priority -1 is below 0"),
        ("/v1/completions", {"prompt": "a", "temperature": "0.5"}, "temperature: input should be a valid number"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature must be 0 or more"),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "n": 129}, "n: input should be less than or equal to 128"),
        ("/v1/completions", {"prompt": ["a"] * 20, "n": 100}, "are over 1024"),
        ("/v1/completions", {"prompt": ""}, "the prompt is empty"),
        ("/v1/completions", {"prompt": []}, "the prompt is empty"),
        ("/v1/completions", {"prompt": [1.5]}, "prompt"),
        ("/v1/completions", {"prompt": [9999]}, "token id 9999 is outside"),
        ("/v1/completions", {"prompt": [1] * 3000}, "the prompt has 3000 tokens"),
        ("/v1/completions", {"prompt": "a", "best_of": 3}, "best_of 3 is not supported"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix is not supported"),
        ("/v1/completions", {"prompt": "a", "logprobs": 30}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias: 'x' is no token id"),
        ("/v1/completions", {"prompt": "a", "stream_options": {}}, "stream_options needs stream"),
        ("/v1/completions", {"prompt": "a", "seed": -1}, "seed must be"),
        ("/v1/completions", {"prompt": "a", "min_tokens": 10**30}, "min_tokens must be"),
        ("/v1/completions", {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(301)), 1)}, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["x"] * 65}, "bad_words"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["x" * 65]}, "bad_words[0]"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 65}, "stop_token_ids"),
        ("/v1/completions", {"prompt": "a", "response_format": {"type": "regex", "pattern": "("}}, "structured output"),
        ("/v1/completions", {"prompt": "a", "response_format": {"type": "structural_tag"}}, "takes a format, or"),
        (
            "/v1/completions",
            {"prompt": "a", "response_format": {"type": "structural_tag", "format": {"type": "poem"}}},
            "must be an object whose type is one of",
        ),
        ("/v1/chat/completions", {"messages": []}, "messages must be a list of at least one"),
        ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}]},
            "nothing is fetched for a client",
        ),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 9}, "max_tokens and max_completion_tokens differ"),
        ("/v1/chat/completions", CHAT | {"tool_choice": "required"}, "tool_choice needs tools"),
        ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs holds"),
        ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs holds 'self'"),
        ("/tokenize", {}, "give one of prompt and messages"),
        ("/detokenize", {"tokens": [-1]}, "-1 is no token id"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_bad_input_is_a_400_that_names_it(server: RunningServer, path: str, body: Any, message: str) -> None:
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


TOOLS = [{"type": "web_search", "filters": {}}]


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "top_q": 1, "x\r\ny": 1}, "top_q, x%0D%0Ay"),
        ("/v1/chat/completions", CHAT | {"functions": [], "tools": TOOLS}, "functions, tools[0].web_search"),
        (
            "/v1/chat/completions",
            CHAT | {"messages": [{"role": "user", "content": "x", "mood": 1}]},
            "messages[0].mood",
        ),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1, "client_metadata": {}, "tools": TOOLS}, None),
        (
            "/v1/messages",
            {"model": "demo", "messages": CHAT["messages"], "max_tokens": 1, "container": "x"},
            "container",
        ),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/detokenize", {"tokens": [5], "x": 1}, "x"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_fields_are_ignored_and_listed(
    server: RunningServer, path: str, body: Any, ignored: str | None
) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    listed = answer.headers["x-hardpoint-ignored-fields"]
    assert listed == (ignored or "client_metadata, tools[0].web_search")
    first = listed.split(", ")[0].replace("[0]", "[]")
    assert sum(f"{first!r} is ignored" in line for line in server.log) <= 1
    assert (
        server.post(path, body | {"stream": True} if "messages" in body else body).headers["x-hardpoint-ignored-fields"]
        == listed
    )


def test_the_log_says_what_to_use_in_place_of_a_field_of_vllm(server: RunningServer) -> None:
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "use_beam_search": True})
    assert answer.headers["x-hardpoint-ignored-fields"] == "use_beam_search"
    line = "/v1/completions: the field 'use_beam_search' is ignored: LLM.beam_search searches by beams"
    until(lambda: any(line in each for each in server.log))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_null_is_as_good_as_nothing(server: RunningServer, path: str) -> None:
    schemas = server.get("/openapi.json").json()
    name = schemas["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = schemas["components"]["schemas"][name.rpartition("/")[2]]
    own = {"prompt": "a", "messages": CHAT["messages"], "input": "a", "max_tokens": 1, "model": "demo"}
    body = {key: own[key] if key in schema.get("required", ()) else None for key in schema["properties"]}
    answer = server.post(path, body | ({"max_tokens": 1} if "max_tokens" in body else {"max_output_tokens": 1}))
    assert answer.status_code == 200, answer.text


def test_a_prompt_that_is_too_long_is_told_in_the_words_of_the_protocol(server: RunningServer) -> None:
    long = {"role": "user", "content": "sea " * 3000}
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with client, pytest.raises(openai.BadRequestError, match="This model's maximum context length is") as caught:
        client.chat.completions.create(model="demo", messages=[long])  # type: ignore[list-item]
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    completion = server.post("/v1/completions", {"model": "demo", "prompt": long["content"]}).json()
    assert completion["error"]["param"] == "prompt"
    message = server.post("/v1/messages", {"model": "demo", "messages": [long], "max_tokens": 1}).json()
    assert message["error"]["message"].startswith("prompt is too long: ")


def test_texts_that_are_far_too_long_take_no_memory(server: RunningServer) -> None:
    """Tokenized whole, each would take a gigabyte."""
    text = "The whale swam in the sea, and my dear Watson said so. " * 140_000
    bodies = [
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/responses", {"input": text}),
        ("/v1/messages", {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}),
    ]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda each: server.post(*each), bodies))
    assert [answer.status_code for answer in answers] == [400] * 4
    assert all("the prompt has 2048 or more tokens" in answer.text for answer in answers)
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (peak,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak < 600 * 1024, "in KiB"


def test_calls_that_are_no_json_are_no_dead_end() -> None:
    function = {"name": "f", "arguments": '{"a": '}
    message = ChatMessage.model_validate({"role": "assistant", "tool_calls": [{"id": "1", "function": function}]})
    (plain,) = template_messages([message])
    assert plain["tool_calls"][0]["function"]["arguments"] == {"arguments": '{"a": '}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:80", 200),
        ("[::1]:9", 200),
        ("127.0.0.1", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
    ],
)
def test_names_that_others_let_point_here_are_refused(server: RunningServer, host: str, status: int) -> None:
    answer = send("GET", server.url + "/version", headers={"host": host})
    assert answer.status_code == status
    assert status == 200 or "--allowed-host" in answer.json()["error"]["message"]


def test_probes_of_other_servers(server: RunningServer) -> None:
    assert server.get("/ping").status_code == server.post("/ping", {}).status_code == 200
    assert server.get("/load").json() == {"server_load": 0}


def test_requests_have_ids(server: RunningServer) -> None:
    answer = send("GET", server.url + "/version", headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    own = {send("GET", server.url + "/version", headers={"x-request-id": "a b"}).headers["x-request-id"] for _ in "12"}
    assert len(own) == 2, "one that is no id is replaced"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1", b"null", b"7", b'"x"', b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"\xff\xfe", b"[" * 10000],
    ids=lambda value: str(value[:12]),
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_what_is_no_json_object_is_a_400(server: RunningServer, path: str, body: bytes) -> None:
    answer = send("POST", server.url + path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_json_that_does_not_say_so(server: RunningServer) -> None:
    answer = send("POST", server.url + "/v1/completions", content=json.dumps({"prompt": "a"}))
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/x", 404),
    ],
)
def test_other_errors_are_json_too(server: RunningServer, method: str, path: str, status: int) -> None:
    answer = send(method, server.url + path)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_models(server: RunningServer) -> None:
    (model,) = server.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("demo", 2048)
    assert server.get("/v1/models/demo").json() == model
    answer = server.post("/v1/completions", {"model": "gpt-9", "prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_tokens(server: RunningServer) -> None:
    text = "Call me Ishmael. \N{WHALE}"
    found = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    chat = server.post("/tokenize", {"messages": CHAT["messages"]}).json()
    rendered = server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"]
    assert rendered == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    usage = server.post("/v1/chat/completions", CHAT).json()["usage"]
    assert usage["prompt_tokens"] == chat["count"]


def test_texts_that_no_context_limits_have_a_limit_of_characters(server: RunningServer) -> None:
    """Also where just the end of a prompt is wanted: all of it would be tokenized."""
    text = "sea " * (MAX_CHARACTERS // 4 + 1)
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/completions", {"model": "demo", "prompt": text, "truncate_prompt_tokens": 5}),
    ]
    for path, body in asked:
        answer = server.post(path, body)
        assert answer.status_code == 400
        assert f"{MAX_CHARACTERS} at most are tokenized" in answer.json()["error"]["message"]


def test_what_operators_ask(server: RunningServer) -> None:
    assert server.get("/health").json() == {"status": "ready"}
    assert server.get("/ready").status_code == 200
    assert server.get("/version").json() == {"version": __version__}
    explained = server.get("/v1/hardpoint/explain").json()
    assert {row["family"] for row in explained["rows"]} >= {"op", "attention", "linear"}
    assert "/v1/chat/completions" in server.get("/openapi.json").json()["paths"]


def test_metrics(server: RunningServer) -> None:
    names = ["hardpoint_generated_tokens_total", "hardpoint_served_completion_tokens_total"]
    before = [server.sample(name) for name in names]
    first = server.sample("hardpoint_time_to_first_token_seconds_count")
    between = server.sample("hardpoint_inter_token_latency_seconds_count")
    body = {"prompt": "The whale", "max_tokens": 9, "ignore_eos": True, "stream": True}
    assert server.post("/v1/completions", body).text.endswith("data: [DONE]\n\n")
    until(lambda: server.sample(names[1]) == before[1] + 9)
    assert server.sample(names[0]) >= before[0] + 9
    assert server.sample("hardpoint_time_to_first_token_seconds_count") == first + 1
    assert server.sample("hardpoint_inter_token_latency_seconds_count") > between
    assert server.sample("hardpoint_selection_info", family="attention") >= 1
    assert server.sample("hardpoint_engine_up") == 1
    assert server.sample("hardpoint_http_requests_total", path="/v1/completions", status="200") >= 1


@contextmanager
def opened(server: RunningServer, body: dict[str, Any], path: str = "/v1/completions") -> Iterator[socket.socket]:
    """A connection that has sent a request."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head.encode() + data)
        yield connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_who_leaves_ends_the_request(server: RunningServer, path: str, stream: bool) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": ENDLESS,
        "/v1/chat/completions": CHAT | {"max_tokens": 1900, "ignore_eos": True},
        "/v1/messages": CHAT | {"max_tokens": 1900, "model": "demo", "output_config": {"format": LONG}},
        "/v1/responses": {"input": "hello", "ignore_eos": True},
    }
    aborted = server.sample("hardpoint_finished_requests_total", reason="abort")
    with opened(server, bodies[path] | {"stream": stream}, path) as connection:
        until(lambda: server.sample("hardpoint_running_requests") == 1)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    server.wait_until_idle()
    assert server.sample("hardpoint_finished_requests_total", reason="abort") == aborted + 1


def test_a_half_closed_connection(server: RunningServer) -> None:
    with opened(server, ENDLESS) as connection:
        until(lambda: server.sample("hardpoint_running_requests") == 1)
        connection.shutdown(socket.SHUT_WR)
        server.wait_until_idle()


@pytest.mark.parametrize("num_clients", [30, pytest.param(200, marks=pytest.mark.nightly)])
def test_abrupt_ends_leave_nothing_behind(server: RunningServer, num_clients: int) -> None:
    server.get("/health")
    before = server.num_descriptors

    def come_and_go(number: int) -> None:
        with opened(server, ENDLESS | {"stream": number % 2 == 0, "prompt": f"{number}"}) as connection:
            time.sleep(number % 7 * 0.01)
            reset = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(come_and_go, range(num_clients)))
    server.wait_until_idle()
    until(lambda: server.num_descriptors <= before + 2)
    assert server.sample("hardpoint_http_open_requests") == 1, "the one that asks"
    assert server.get("/health").status_code == 200


@pytest.fixture(scope="module")
def strict() -> Iterator[RunningServer]:
    flags = ["--api-key", "one", "--api-key", "two", "--max-body-bytes", "2000", "--max-concurrent-requests", "2"]
    flags += [
        "--head-timeout",
        "0.5",
        "--body-timeout",
        "0.5",
        "--write-timeout",
        "1",
        "--served-model-name",
        "mine",
        "--served-model-name",
        "alias",
    ]
    flags += ["--cors-origin", "https://page.example", "--strict-fields", "--allow-engine-control"]
    with running_server(*flags) as server:
        yield server


def authorized(key: str = "one") -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_keys(strict: RunningServer) -> None:
    for headers in ({}, {"authorization": "Bearer three"}, {"x-api-key": "\xe9"}, {"authorization": "one, two"}):
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        answer = send("GET", strict.url + "/v1/models", headers=raw)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    for key in ("one", "two"):
        assert send("GET", strict.url + "/v1/models", headers=authorized(key)).status_code == 200
        assert send("GET", strict.url + "/v1/models", headers={"authorization": f"bearer {key}"}).status_code == 200
        assert send("GET", strict.url + "/v1/models", headers={"x-api-key": key}).status_code == 200
    assert send("POST", strict.url + "/v1/messages", json={}).json()["error"]["type"] == "authentication_error"
    assert strict.get("/metrics").status_code == 401
    assert strict.get("/health").status_code == strict.get("/ready").status_code == 200


def test_unknown_fields_are_refused_where_that_is_wanted(strict: RunningServer) -> None:
    answer = strict.post("/v1/completions", {"prompt": "a", "top_q": 1}, headers=authorized())
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "top_q"
    assert "top_q is not a field that this endpoint knows" in answer.json()["error"]["message"]


def test_operators_control_the_engine(strict: RunningServer, server: RunningServer) -> None:
    def ask(method: str, path: str) -> httpx.Response:
        return send(method, strict.url + path, headers=authorized())

    assert ask("GET", "/is_sleeping").json() == {"is_sleeping": False}
    assert ask("POST", "/sleep?tags=kv").status_code == 200
    assert ask("GET", "/is_sleeping").json() == {"is_sleeping": True}
    asleep = strict.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=authorized())
    assert "sleeps" in asleep.json()["error"]["message"]
    assert ask("POST", "/wake_up").status_code == ask("POST", "/reset_prefix_cache").status_code == 200
    awake = strict.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=authorized())
    assert awake.status_code == 200
    assert strict.post("/sleep", {}).status_code == 401
    assert server.post("/sleep", {}).status_code == 403


def test_names(strict: RunningServer) -> None:
    for name in ("mine", "alias"):
        answer = strict.post("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1}, headers=authorized())
        assert answer.json()["model"] == name
    assert strict.post("/v1/completions", {"model": "demo", "prompt": "a"}, headers=authorized()).status_code == 404


def test_large_bodies(strict: RunningServer) -> None:
    answer = strict.post("/v1/completions", {"prompt": "a" * 3000}, headers=authorized())
    assert answer.status_code == 413
    chunked = send(
        "POST",
        strict.url + "/v1/completions",
        content=iter([b"x" * 1000] * 5),
        headers=authorized() | {"content-type": "application/json"},
        timeout=60,
    )
    assert chunked.status_code == 413
    assert "--max-body-bytes" in chunked.json()["error"]["message"]


def test_slow_bodies(strict: RunningServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", strict.port), timeout=60) as connection:
        connection.sendall(head)
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 408 "), answer
    assert b"within 0.5 seconds" in answer


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection, whatever is still on the way to it."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(10_000):
            answer += more
    return answer


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("first", [b"", HEALTH])
@pytest.mark.parametrize("piece", [b"GET /health HTTP/1.1\r\n", b"\r\n", b""])
def test_slow_heads(strict: RunningServer, first: bytes, piece: bytes) -> None:
    """Each byte comes long before the limit, and the last never; behind an answer as in front of the first one."""
    with socket.create_connection(("127.0.0.1", strict.port), timeout=60) as connection:
        connection.sendall(first)
        sending = threading.Thread(target=trickle, args=(connection, piece))
        sending.start()
        answer = received(connection)
        sending.join()
    assert answer.count(b"HTTP/1.1 200 ") == bool(first)
    assert answer.count(b"HTTP/1.1 408 ") == bool(piece)


def trickle(connection: socket.socket, piece: bytes) -> None:
    """Send a piece byte by byte, and then bytes of a header, until the server closes the connection."""
    with contextlib.suppress(OSError):
        for byte in chain(piece, cycle(b"x") if piece.startswith(b"GET") else cycle(piece)):
            connection.sendall(bytes([byte]))
            time.sleep(0.02)


def test_large_heads(strict: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", strict.port), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx: ")
        with contextlib.suppress(OSError):  # it does not wait for the rest
            for _ in range(100):
                connection.sendall(b"y" * 10_000)
        assert received(connection).startswith(b"HTTP/1.1 431 ")
    with socket.create_connection(("127.0.0.1", strict.port), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 120 * 1024 + b"\r\n\r\n")
        assert received(connection).startswith(b"HTTP/1.1 431 "), "in one piece"
    assert strict.get("/health").status_code == 200


def test_who_reads_nothing_is_left(strict: RunningServer) -> None:
    """The answer is larger than what the system's buffers hold."""
    before = strict.sockets  # an earlier test's may be among them still
    body = {"model": "mine", "prompt": ["sea " * 200] * 2, "n": 64, "max_tokens": 0, "echo": True, "logprobs": 20}
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", strict.port))
        connection.sendall(head + data)
        until(lambda: bool(strict.sockets - before))
        until(lambda: not strict.sockets - before, seconds=60)


def test_too_many_requests(strict: RunningServer) -> None:
    body = ENDLESS | {"stream": True}
    with (
        open_stream("POST", strict.url + "/v1/completions", json=body, headers=authorized()) as first,
        open_stream("POST", strict.url + "/v1/completions", json=body, headers=authorized()) as second,
    ):
        lines = [first.iter_lines(), second.iter_lines()]
        assert all(next(each).startswith("data: ") for each in lines)
        answer = strict.post("/v1/completions", {"prompt": "a"}, headers=authorized())
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert send("GET", strict.url + "/v1/models", headers=authorized()).status_code == 200
    until(
        lambda: (
            strict.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=authorized()).status_code == 200
        )
    )


def test_web_pages_of_other_origins(strict: RunningServer, server: RunningServer) -> None:
    asks = {"origin": "https://page.example", "access-control-request-method": "POST"}
    answer = send("OPTIONS", strict.url + "/v1/completions", headers=asks)
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    answer = send("GET", server.url + "/v1/models", headers=asks)
    assert "access-control-allow-origin" not in answer.headers
