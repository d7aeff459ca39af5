"""No request gets a 5xx, and none leaves the server in another state than before."""

from __future__ import annotations

import json
import random
import socket
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import httpx2 as httpx
import pytest

from tests.support.engines import until
from tests.support.serving import RunningServer, running_server

PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"]


@pytest.fixture(scope="module")
def short_server() -> Iterator[RunningServer]:
    """A server that answers each request with few tokens."""
    with running_server("--max-model-len", "64", "--body-timeout", "5") as server:
        yield server


def is_well(server: RunningServer, descriptors: int) -> None:
    server.wait_until_idle()
    until(lambda: server.num_descriptors <= descriptors + 2)
    assert server.get("/health").status_code == 200
    assert server.sample("hardpoint_http_open_requests") == 1, "the one that asks"
    assert server.sample("hardpoint_http_requests_total", status="500") == 0
    assert "Traceback" not in "".join(server.log)


@pytest.mark.parametrize("num_examples", [4, pytest.param(100, marks=pytest.mark.nightly)])
def test_the_openapi_document(short_server: RunningServer, num_examples: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of schemathesis and of what it imports
        import schemathesis
        from hypothesis import HealthCheck, given, settings

        descriptors = short_server.num_descriptors
        document = short_server.get("/openapi.json").json()
        for operation in schemathesis.openapi.from_dict(document).get_all_operations():
            case_of = cast(Any, operation).ok().as_strategy()

            @settings(max_examples=num_examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(case=case_of)
            def ask(case: Any) -> None:
                answer = case.call(base_url=short_server.url)
                assert answer.status_code < 500, (case.path, answer.status_code, answer.text[:300])

            ask()
    is_well(short_server, descriptors)


def garbled(generator: random.Random) -> bytes:
    """A body that begins as a good one."""
    message = {"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": "x",
        "input": "x",
        "messages": [message],
        "max_tokens": 2,
        "tokens": [1],
    }
    odd: list[Any] = [
        None,
        True,
        -1,
        2**70,
        1e308,
        "",
        "\0",
        [],
        {},
        [[]],
        {"type": "x"},
        [None],
        "x" * 1000,
        {"a": {"a": {}}},
    ]
    for _ in range(generator.randint(1, 4)):
        body[generator.choice([*body, "stop", "seed", "tools", "logit_bias", "stream", "n"])] = generator.choice(odd)
    data = json.dumps(body).encode()
    for _ in range(generator.randint(0, 3)):
        at = generator.randrange(len(data))
        data = data[:at] + bytes(generator.choices(range(256), k=generator.randint(0, 4))) + data[at + 2 :]
    return data


@pytest.mark.parametrize("num_bodies", [200, pytest.param(1000, marks=pytest.mark.nightly)])
def test_garbled_bodies(short_server: RunningServer, num_bodies: int) -> None:
    generator, descriptors = random.Random(4), short_server.num_descriptors
    bodies = [(generator.choice(PATHS), garbled(generator)) for _ in range(num_bodies)]
    with httpx.Client(timeout=60, verify=False) as client:
        for path, body in bodies:
            answer = client.post(short_server.url + path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code < 500, (path, body, answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]
    is_well(short_server, descriptors)


@pytest.mark.parametrize("num_clients", [20, pytest.param(200, marks=pytest.mark.nightly)])
def test_connections_that_are_no_good(short_server: RunningServer, num_clients: int) -> None:
    """Slow ones, half-closed ones, and such as speak no HTTP, with a good one among them."""
    descriptors = short_server.num_descriptors
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: 50\r\n\r\n"

    def connect(number: int) -> None:
        with socket.create_connection(("127.0.0.1", short_server.port), timeout=60) as connection:
            if number % 4 == 0:
                connection.sendall(b"\x16\x03\x01\x00 what is this\r\n\r\n")
            elif number % 4 == 1:
                connection.sendall(head[: number % len(head)])
            elif number % 4 == 2:
                connection.sendall(head + b'{"prompt"')
                connection.shutdown(socket.SHUT_WR)
            else:
                connection.sendall(head)
                for byte in b'{"prompt": "a", "max_tokens": 3, "n": 1}          ':
                    connection.sendall(bytes([byte]))
                assert b"200 OK" in connection.recv(1000)

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(connect, range(num_clients)))
    is_well(short_server, descriptors)
