"""From the first signal of life to the last: loading, stopping, and an engine that is killed."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import socket
import threading
from typing import Any

import httpx2 as httpx
import pytest

from hardpoint.server.stop_signals import StopSignals
from tests.support.engines import until
from tests.support.forked import ForkedProgram
from tests.support.processes import is_gone
from tests.support.serving import SMALL, RunningServer, open_stream, running_server

HANGUP = signal.SIGHUP if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else signal.SIGTERM
"""A test run that was started by nohup hands on to its children that hang-ups are ignored."""
ENDLESS = {"prompt": "The whale", "max_tokens": 1900, "ignore_eos": True}


class Stream(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, server: RunningServer, **body: Any) -> None:
        super().__init__(daemon=True)
        self._url, self._body = server.url + "/v1/completions", ENDLESS | {"stream": True} | body
        self._options = server.options
        self.begun = threading.Event()
        self.events: list[str] = []
        self.start()

    def run(self) -> None:
        with open_stream("POST", self._url, json=self._body, **self._options) as answer:
            for line in answer.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))
                self.begun.set()

    def error(self) -> dict[str, Any]:
        """The error that its last event is."""
        self.join(60)
        error: dict[str, Any] = json.loads(self.events[-1])["error"]
        return error


class Post(threading.Thread):
    """Waits for an answer."""

    def __init__(self, server: RunningServer) -> None:
        super().__init__(daemon=True)
        self._server = server
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.answer = self._server.post("/v1/completions", ENDLESS)

    def error(self) -> tuple[int, dict[str, Any]]:
        """Status and error of its answer."""
        self.join(60)
        assert self.answer is not None
        return self.answer.status_code, self.answer.json()["error"]


def test_it_answers_while_it_loads_and_ends_well() -> None:
    with running_server("--shutdown-deadline", "60", wait=False, program=True) as server:
        assert server.get("/health").json() in ({"status": "loading"}, {"status": "ready"})
        if server.get("/ready").status_code == 503:
            answer = server.post("/v1/completions", {"prompt": "a"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        until(lambda: server.get("/ready").status_code == 200, 120)
        engines = server.engine_pids
        assert len(engines) == 1
        stream = Stream(server, max_tokens=400)
        stream.begun.wait()
        server.process.send_signal(HANGUP)
        until(lambda: server.get("/ready").status_code == 503)
        refused = server.post("/v1/completions", {"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        stream.join(60)
        assert stream.events[-1] == "[DONE]", "what ran could end"
        assert server.process.wait(60) == 0
        until(lambda: all(map(is_gone, engines)), 10)
        assert "Traceback" not in "".join(server.log)


def test_a_log_that_nobody_reads_stops_nothing() -> None:
    """Its pipe is as small as they come, and full after some forty lines."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = ForkedProgram("serve", "--port", str(port), "--access-log", *SMALL)
    fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
    server = RunningServer(process, f"http://127.0.0.1:{port}")
    try:
        assert os.read(process.stderr.fileno(), 1)
        until(lambda: is_ready(server), 120)
        for _ in range(100):
            assert server.get("/health").status_code == 200
        assert server.stop() == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_signals_end_a_server_that_was_started_in_the_background() -> None:
    """Shells have SIGINT ignored there; a second signal ends it at once. SIGHUP is nohup's to ignore."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGHUP)}
    deadlines: list[float] = []

    async def run() -> None:
        with StopSignals(30.0, deadlines.append).handled():
            for each in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), each)
                await asyncio.sleep(0.05)

    try:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        asyncio.run(run())
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert deadlines == [30.0, 0.0]


def is_ready(server: RunningServer) -> bool:
    try:
        return server.get("/ready").status_code == 200
    except httpx.ConnectError:
        return False


@pytest.mark.parametrize("second", [pytest.param(signal.SIGTERM, marks=pytest.mark.nightly), None])
def test_what_is_cut_off_is_told_so(second: signal.Signals | None) -> None:
    with running_server("--shutdown-deadline", "0.2" if second is None else "600") as server:
        stream, post = Stream(server), Post(server)
        stream.begun.wait()
        until(lambda: server.sample("hardpoint_running_requests") == 2)
        server.process.send_signal(signal.SIGTERM)
        if second is not None:
            until(lambda: server.get("/ready").status_code == 503)
            server.process.send_signal(second)
        assert server.process.wait(30) == 0
        assert stream.error()["code"] == "shutting_down"
        assert post.error()[0] == 503
        assert "Traceback" not in "".join(server.log)


def test_an_engine_that_is_killed() -> None:
    with running_server("--on-engine-failure", "fail") as server:
        stream, post = Stream(server), Post(server)
        stream.begun.wait()
        until(lambda: server.sample("hardpoint_running_requests") == 2)
        (engine,) = server.engine_pids
        os.kill(engine, signal.SIGKILL)
        until(lambda: server.get("/health").status_code == 503, 5)
        assert stream.error()["code"] == "engine_dead"
        status, error = post.error()
        assert (status, error["code"]) == (503, "engine_dead")
        answer = server.post("/v1/completions", {"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        assert server.sample("hardpoint_engine_up") == 0
        assert any("the engine is gone" in line for line in server.log)
        assert server.stop() == 0


def failing(*flags: str) -> str:
    program = ForkedProgram("serve", "--platform", "cpu", *flags)
    with program.stderr:
        said = program.stderr.read()
    assert program.wait(120) == 2, said
    assert "Traceback" not in said
    return said


def test_a_server_that_cannot_listen_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = failing("--port", str(taken.getsockname()[1]))
    assert "stop the other server there, or choose another: --port" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "192.0.2.1", "--port", "0"], "--host 192.0.2.1: cannot listen on"),
        (["--host", "x" * 64, "--port", "0"], f"--host {'x' * 64}: "),
        (["--allow-engine-control"], "--allow-engine-control needs --api-key"),
        (["--port", "70000"], "--port 70000 is invalid: must be from 0 to 65535"),
        (["--cors-origin", "https://page.example/"], "--cors-origin 'https://page.example/' is no origin"),
        (["--api-key", " "], "--api-key: a key is made of"),
        (["--api-key-file", "/nowhere"], "--api-key-file /nowhere cannot be read: No such file or directory; give"),
        (["--port", "0", "no/such/model"], "no/such/model"),
        (["--port", "0", "--tool-parser", "hermis"], "hermis"),
    ],
    ids=["elsewhere", "nowhere", "control", "port", "origin", "key", "file", "model", "parser"],
)
def test_bad_flags(flags: list[str], message: str) -> None:
    assert message in failing(*flags)
