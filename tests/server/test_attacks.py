"""Attacks on a server, each beside streams of other clients: the streams stay whole, and no event of theirs is late.

The longest gap of any stream during each attack is printed.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.server.test_robustness import PATHS, garbled
from tests.support.engines import until
from tests.support.processes import is_core, is_gone
from tests.support.serving import RunningServer, open_stream, running_server

pytestmark = pytest.mark.nightly

KEY = {"authorization": "Bearer secret"}
NUM_STREAMS = 4
PROMPT: dict[str, Any] = {"prompt": "The whale", "max_tokens": 400, "ignore_eos": True, "stream": True, "seed": 1}
STALL = 1.0
"""Most seconds that a stream may wait for its next event, on two busy cores."""
RESTART = 60.0
"""The same where the engine is built again."""


class Victim(threading.Thread):
    """Asks for one stream after the other until it is told to stop, and notes the longest gap between events."""

    def __init__(self, server: RunningServer) -> None:
        super().__init__(daemon=True)
        self._url = server.url + "/v1/completions"
        self.stopping, self.begun = threading.Event(), threading.Event()
        self.gap, self.num_streams = 0.0, 0
        self.faults: list[str] = []
        self.start()

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self._read()
                self.num_streams += 1
        except Exception as error:
            self.faults.append(repr(error))
        self.begun.set()

    def _read(self) -> None:
        body, last = PROMPT | {"stream_options": {"include_usage": True}}, time.monotonic()
        events: list[str] = []
        with open_stream("POST", self._url, json=body, headers=KEY) as answer:
            for line in answer.iter_lines():
                if line:
                    now = time.monotonic()
                    self.gap, last = max(self.gap, now - last), now
                    events.append(line.removeprefix("data: "))
                    self.begun.set()
        if events[-1:] != ["[DONE]"]:
            self.faults.append(f"a stream ended with {events[-1:]}")
        elif json.loads(events[-2])["usage"]["completion_tokens"] != PROMPT["max_tokens"]:
            self.faults.append(f"a stream had {events[-2]}")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    flags = ["--api-key", "secret", "--head-timeout", "2", "--body-timeout", "2", "--step-timeout", "5"]
    flags += ["--max-engine-restarts", "10", "--tool-parser", "hermes"]
    with running_server(*flags, program=True, headers=KEY) as running:
        yield running


@contextmanager
def victims(server: RunningServer, name: str, bound: float, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Streams of other clients, which must be whole and without a gap of more than ``bound`` seconds."""
    streams = [Victim(server) for _ in range(NUM_STREAMS)]
    for stream in streams:
        assert stream.begun.wait(60)
        stream.gap = 0.0
    try:
        yield
    finally:
        for stream in streams:
            stream.stopping.set()
    for stream in streams:
        stream.join(120)
    gap = max(stream.gap for stream in streams)
    with capsys.disabled():
        print(f"\n{name}: longest gap of {sum(s.num_streams for s in streams)} streams {1000 * gap:.0f} ms", flush=True)
    assert [fault for stream in streams for fault in stream.faults] == []
    assert gap < bound


def raw(
    server: RunningServer, method: str, path: str, headers: dict[str, str], body: bytes | None = None
) -> tuple[int, str, str]:
    """Status, headers and body of an answer to a path that no client library has made tidy."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, str(answer.headers).lower(), answer.read().decode(errors="replace")
    finally:
        connection.close()


def disconnects(server: RunningServer) -> None:
    """200 clients that leave at once or in the middle of their streams, by RST."""

    def come_and_go(number: int) -> None:
        body = json.dumps(PROMPT | {"stream": number % 2 == 0, "prompt": f"{number}", "max_tokens": 1900}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: {len(body)}"
        )
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + body)
            time.sleep(number % 7 * 0.01)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(come_and_go, range(200)))


def slow_connections(server: RunningServer) -> None:
    """200 connections that say nothing, a part of a head, or a part of a body."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: 50\r\n"
    parts = [b"", b"POST /v1", head, head + b"\r\n{", b"\x16\x03\x01\0\xff\r\n\r\n"]
    opened = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(200)]
    for number, connection in enumerate(opened):
        connection.sendall(parts[number % len(parts)])
    for connection in opened:
        while connection.recv(4096):  # the server ends each
            pass
        connection.close()


def hostile_json(server: RunningServer) -> None:
    """Garbled bodies, deep ones, and numbers and strings beyond all bounds."""
    generator = random.Random(5)
    bodies = [garbled(generator) for _ in range(200)]
    bodies += [b'{"prompt": ' + b"[" * 100_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b"[" * 10**6]
    bodies += [b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", b'{"prompt": "\\ud800"}', b'{"seed": 1e999999}']
    bodies += [b'{"prompt": "a", "stop": [' + b'"x",' * 10**5 + b'"x"]}', b"\xff\xfe{", b'{"prompt": "' + b"x" * 10**6]
    for number, body in enumerate(bodies):
        status, _, said = raw(server, "POST", PATHS[number % len(PATHS)], KEY, body)
        assert status < 500, (body[:100], said[:300])


def bombs(server: RunningServer) -> None:
    """Patterns, references and grammars that grow without end, alone and all at once."""
    wide = {f"a{i}": {"$ref": "#/$defs/X"} for i in range(200)}
    nested: dict[str, Any] = {"type": "object", "properties": wide, "$defs": {"X": {"$ref": "#/$defs/Y"}}}
    nested["$defs"]["Y"] = {"anyOf": [{"$ref": "#/$defs/X"}, {"type": "object", "properties": wide}]}
    forms: list[dict[str, Any]] = [
        {"type": "regex", "pattern": "(a{1,1000}){1,1000}b"},
        {"type": "regex", "pattern": "(" * 500 + "a" + ")*" * 500},
        {"type": "regex", "pattern": "(.*a){100}[^z]{1000}"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": nested}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "minItems": 10**9}}},
        {"type": "grammar", "grammar": "start: " + " ".join(["A"] * 1000) + '\nA: "a" | "b"'},
        {
            "type": "grammar",
            "grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(5000)) + 'r5000: "a"',
        },
    ]

    def ask(form: dict[str, Any]) -> None:
        message = {"role": "user", "content": "x"}
        body = {"messages": [message], "max_tokens": 4, "response_format": form}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code < 500, (str(form)[:200], answer.text[:300])

    for form in forms:
        ask(form)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, forms * 4))


def long_texts(server: RunningServer) -> None:
    """Four prompts of just 8 MiB at once, while the server's state is asked for.

    They are encoded once and before: encoding one keeps the threads of this process that read streams waiting.
    """
    slowest, body = 0.0, json.dumps({"prompt": "The whale swam. " * (2**19 - 64)}).encode()
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(raw, server, "POST", "/v1/completions", KEY, body) for _ in range(4)]
        while not all(each.done() for each in asked):
            began = time.monotonic()
            assert raw(server, "GET", "/health", {})[0] == 200
            slowest = max(slowest, time.monotonic() - began)
        assert {each.result()[0] for each in asked} == {400}
    print(f"\nthe slowest answer of /health took {1000 * slowest:.0f} ms", flush=True)
    assert slowest < STALL


def ways_around_keys(server: RunningServer) -> None:
    """No spelling of a path, and no header, stands for a key."""
    keys = [
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic secret",
        "secret",
        "Bearer secret2",
        "Bearer secre",
        "\tBearer x",
    ]
    paths = ["/v1/models", "//v1/models", "/health/../v1/models", "/%76%31/models", "/v1/models/", "/V1/models"]
    paths += ["/health/%2e%2e/v1/models", "/v1/models?/health", "/v1/models#/health", "/v1/models;/health"]
    for path in [*paths, "/metrics", "/openapi.json", "/v1/hardpoint/explain", "/server_info", "/tokenizer_info"]:
        for key in keys:
            headers = {"x-original-url": "/health", "x-forwarded-for": "127.0.0.1", "authorization": key}
            status, _, said = raw(server, "GET", path, headers)
            assert status in (400, 401, 404), (path, key, status, said[:100])


def files_and_origins(server: RunningServer) -> None:
    """No path leads out of the page's folder, and no page of another origin may read an answer."""
    ups = ["..", "%2e%2e", "..%2f..", "%252e%252e", "..%5c", "....//"]
    for folder in ("", "/static", "/page"):
        for up in ups:
            status, _, said = raw(server, "GET", f"{folder}/{'/'.join([up] * 8)}/etc/passwd", KEY)
            assert status in (400, 404), (folder, up, status)
            assert "root:" not in said
    for origin in ("https://evil.example", "null", "http://127.0.0.1.evil.example"):
        asking = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": "x"}
        for method in ("GET", "OPTIONS"):
            _, headers, _ = raw(server, method, "/v1/models", asking | KEY)
            assert "access-control-allow-origin" not in headers


def full_disk(server: RunningServer) -> None:
    """No byte can be written to a file: responses are answered or refused in JSON, and kept again afterwards."""
    pid, body = server.process.pid, {"input": "Sing.", "max_output_tokens": 16}
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        for _ in range(8):
            answer = server.post("/v1/responses", body)
            assert answer.status_code == 200 or answer.json()["error"]["message"]
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    kept = server.post("/v1/responses", body).json()["id"]
    assert server.get(f"/v1/responses/{kept}").status_code == 200


ATTACKS: list[Callable[[RunningServer], None]] = [
    disconnects,
    slow_connections,
    hostile_json,
    bombs,
    long_texts,
    ways_around_keys,
    files_and_origins,
    full_disk,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_others_do_not_notice(
    server: RunningServer, attack: Callable[[RunningServer], None], capsys: pytest.CaptureFixture[str]
) -> None:
    server.wait_until_idle()
    descriptors = server.num_descriptors
    with victims(server, attack.__name__, STALL, capsys):
        attack(server)
    server.wait_until_idle()
    until(lambda: server.num_descriptors <= descriptors + 4)
    assert server.get("/health").status_code == 200
    assert "Traceback" not in "".join(server.log)


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP], ids=lambda sig: sig.name)
def test_the_engine_is_replaced(server: RunningServer, sig: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    """Streams pause, and no token of theirs is lost."""
    (core,) = (pid for pid in server.engine_pids if is_core(pid) and not is_gone(pid))
    with victims(server, sig.name, RESTART, capsys):
        os.kill(core, sig)
        until(lambda: server.get("/health").status_code == 503, 30)
        until(lambda: server.get("/health").status_code == 200, RESTART)
    assert is_gone(core)


def test_it_drains(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    """The last test: what has begun ends, what comes is refused."""
    server.wait_until_idle()
    streams = [Victim(server) for _ in range(NUM_STREAMS)]
    for stream in streams:
        stream.stopping.set()
        assert stream.begun.wait(60)
        stream.gap = 0.0
    assert server.stop() == 0
    for stream in streams:
        stream.join(60)
    gap = max(stream.gap for stream in streams)
    with capsys.disabled():
        print(f"\ndrain: longest gap of {NUM_STREAMS} streams {1000 * gap:.0f} ms", flush=True)
    assert [fault for stream in streams for fault in stream.faults] == []
    assert gap < STALL
