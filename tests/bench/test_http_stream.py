"""The client of streamed completions, and ``bench serve``, on servers that answer in ways of their own."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

from hardpoint.bench import http_stream, serve
from hardpoint.bench.http_stream import StreamClient
from hardpoint.bench.lengths import SyntheticRequest
from hardpoint.bench.load import Timing
from hardpoint.bench.processes import OwnServer
from hardpoint.cli.main import run
from hardpoint_plugin_api import CapacityError

Answer = Callable[[str], bytes | None]
"""The answer of a server for a path; None: no answer, ever."""

TOKENS = 4
DELIVERY = json.dumps({"choices": [{"text": "a"}]})
USAGE = json.dumps({"choices": [], "usage": {"completion_tokens": TOKENS}})


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """The address of a server that closes each connection behind its answer."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with ExitStack() as unanswered, suppress(OSError):  # accept fails once it is closed
            while True:
                connection, head = listening.accept()[0], b""
                while b"\r\n\r\n" not in head:
                    head += connection.recv(2**16)
                sent = answer(head.split()[1].decode())
                if sent is None:
                    unanswered.enter_context(connection)
                    continue
                connection.sendall(sent)
                connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


def http(body: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def completions(events: list[str], end: str = "\n\n") -> Answer:
    """A server of the model "m" that streams ``events``."""
    answers = {
        "/v1/models": json.dumps({"data": [{"id": "m"}]}),
        "/ready": "{}",
        "/tokenize": json.dumps({"tokens": [1, 2, 3]}),
        "/v1/completions": "".join(f"data: {event}{end}" for event in [*events, "[DONE]"]),
    }
    return lambda path: http(answers[path])


def streamed(answer: Answer, timeout: float = 600) -> Timing:
    with answering(answer) as url:
        return asyncio.run(StreamClient(url, "m", timeout=timeout).stream(SyntheticRequest([1], TOKENS)))


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"], ids=["lf", "crlf"])
def test_events(end: str) -> None:
    timing = streamed(completions([DELIVERY, USAGE], end))
    assert (timing.error, timing.num_output_tokens, len(timing.deliveries)) == (None, TOKENS, 1)


def test_usage_may_be_null_before_it_is_known() -> None:
    null = json.dumps({"choices": [], "usage": None})
    assert streamed(completions([null, DELIVERY, USAGE, null])).num_output_tokens == TOKENS
    assert "did not say how many tokens came" in str(streamed(completions([DELIVERY, null])).error)


def test_a_request_that_is_never_answered_has_failed() -> None:
    timing = streamed(lambda path: None, timeout=0.2)
    assert "/v1/completions did not answer within 0.2 seconds" in str(timing.error)


def test_a_server_that_never_answers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(http_stream, "_QUESTION_SECONDS", 0.2)
    began = time.monotonic()
    with answering(lambda path: None) as url:
        assert run(["bench", "serve", "--url", url]) == 2
    assert f"{url}/v1/models did not answer within 0.2 seconds" in capsys.readouterr().err
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda path: b"SSH-2.0-OpenSSH\r\n", "/v1/models answered what cannot be read (Expected HTTP/"),
        (lambda path: http("<html>hi</html>"), "/v1/models answered what is no JSON: <html>hi</html>"),
        (lambda path: http("{}"), "/v1/models does not answer as servers of completions do: {}"),
        (lambda path: http('{"data": []}'), "/v1/models does not answer as servers of completions do: {'data': []}"),
        (lambda path: b"", "cannot be reached: the server closed the connection"),
    ],
    ids=["no HTTP", "no JSON", "no list", "no model", "nothing"],
)
def test_what_is_no_server_of_completions(answer: Answer, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(answer) as url:
        assert run(["bench", "serve", "--url", url]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://127.0.0.1:x", "http://127.0.0.1:0", "http://[::1"])
def test_what_is_no_address(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", "--url", url]) == 2
    assert f"--url {url} is no address of a server" in capsys.readouterr().err


def test_a_name_that_no_host_can_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", "--url", "http://a..b"]) == 2
    assert "the server at http://a..b cannot be reached" in capsys.readouterr().err


def test_the_model_is_the_one_that_was_named(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--requests", "2", "--warmup", "0", "--output-len", str(TOKENS)]
    with answering(completions([DELIVERY, USAGE])) as url:
        assert run(["bench", "serve", "m", "--url", url, *flags]) == 0
        assert run(["bench", "serve", "llama", "--url", url, *flags]) == 2
    assert f"unknown model 'llama'; known: m. It is asked for at {url}." in capsys.readouterr().err


def test_the_same_command_again_has_new_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's prefix cache holds those of the first time; lengths are the same."""
    sent, stream = list[SyntheticRequest](), StreamClient.stream

    def noted(client: StreamClient, request: SyntheticRequest) -> Awaitable[Timing]:
        sent.append(request)
        return stream(client, request)

    monkeypatch.setattr(StreamClient, "stream", noted)
    flags = ["--requests", "4", "--warmup", "2", "--input-len", "uniform:30:60", "--output-len", str(TOKENS)]
    with answering(completions([DELIVERY, USAGE])) as url:
        for _ in range(2):
            assert run(["bench", "serve", "--url", url, *flags, "--concurrency", "1"]) == 0
    assert len({tuple(request.prompt[:16]) for request in sent}) == len(sent) == 12
    lengths = [len(request.prompt) for request in sent]
    assert lengths[:6] == lengths[6:]


@pytest.mark.parametrize(
    ("error", "why"), [(KeyboardInterrupt(), "KeyboardInterrupt"), (CapacityError("no memory"), "no memory")]
)
def test_a_peer_that_cannot_be_measured(
    error: BaseException, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier measurements of the server are printed all the same."""

    def fail(*_: object) -> float:
        raise error

    monkeypatch.setattr(serve, "_in_process", fail)
    file = tmp_path / "result.json"
    with answering(completions([DELIVERY, USAGE])) as url:
        monkeypatch.setattr(serve, "own_server", lambda *_: nullcontext(OwnServer(url, 0)))
        assert run(["bench", "serve", "--requests", "3", "--output-len", str(TOKENS), "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["rows"][0]["note"] == "12 in all"
    assert result["rows"][0]["peer"] is None
    assert result["peer"].endswith(f"; not measured: {why}")
