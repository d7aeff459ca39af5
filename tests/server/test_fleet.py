"""A server of two processes that share one engine, as its clients see it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from hardpoint.metrics import MetricsSnapshot
from hardpoint.server.metrics import ServerMetrics
from tests.server.test_lifecycle import Stream, failing
from tests.support.engines import until
from tests.support.processes import is_gone, processes
from tests.support.serving import RunningServer, open_stream, running_server

SHORT: dict[str, Any] = {"prompt": "The whale", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
KEY: dict[str, Any] = {"headers": {"authorization": "Bearer secret"}}


def sockets(pid: int) -> set[str]:
    """The names of a process's sockets, each with a number of its own."""
    found = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since the folder was listed
            found.add(os.readlink(each))
    return {name for name in found if name.startswith("socket:")}


@pytest.fixture(scope="module")
def fleet() -> Iterator[RunningServer]:
    flags = ["--api-server-count", "2", "--max-concurrent-requests", "8", "--api-key", "secret"]
    flags += ["--api-server-timeout", "5"]
    with running_server(*flags, "--allow-engine-control", "--shutdown-deadline", "60", **KEY) as server:
        yield server


class Breaking(Stream):
    """Reads a stream that may break."""

    def run(self) -> None:
        with suppress(httpx.RemoteProtocolError):
            super().run()


def streams(server: RunningServer, count: int, max_tokens: int = 600, **body: Any) -> list[Breaking]:
    """Streams that have begun."""
    opened = [Breaking(server, max_tokens=max_tokens, **body) for _ in range(count)]
    for stream in opened:
        stream.begun.wait()
    return opened


def shared_streams(server: RunningServer, count: int) -> tuple[list[Breaking], dict[int, int]]:
    """Streams that have begun, and how many of them each process has: on a busy machine one may have all.

    Sockets of earlier requests may be closed meanwhile: only new ones count.
    """
    idle = {pid: sockets(pid) for pid in server.api_pids}
    opened = streams(server, count)
    taken = {pid: len(sockets(pid) - before) for pid, before in idle.items()}
    assert sum(taken.values()) == count
    return opened, taken


def test_each_process_answers_and_their_counts_are_one(fleet: RunningServer) -> None:
    alone = fleet.post("/v1/completions", SHORT).json()["choices"][0]["text"]
    for _ in range(10):
        before = fleet.sample("hardpoint_http_requests_total", path="/v1/completions")
        opened, taken = shared_streams(fleet, 8)
        if all(taken.values()):
            break
        for stream in opened:
            stream.join(60)
    assert all(taken.values()), "connections are shared"
    refused = fleet.post("/v1/completions", SHORT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
    assert fleet.get("/load").json() == {"server_load": 8}
    for stream in opened:
        stream.join(60)
        assert stream.events[-1] == "[DONE]"
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: fleet.post("/v1/completions", SHORT), range(8)))
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [alone] * 8
    assert fleet.sample("hardpoint_http_requests_total", path="/v1/completions") == before + 16
    assert fleet.sample("hardpoint_http_requests_total", status="429") == 1
    assert fleet.sample("hardpoint_http_open_requests") == 1, "of all processes: that which is asked here"
    fleet.wait_until_idle()


def test_what_one_process_is_told_all_know(fleet: RunningServer) -> None:
    def everywhere(path: str) -> set[str]:
        with ThreadPoolExecutor(8) as threads:
            return {answer.text for answer in threads.map(lambda _: fleet.get(path), range(16))}

    fleet.wait_until_idle()
    for _ in range(3):
        assert fleet.post("/sleep", None).status_code == 200
        assert everywhere("/is_sleeping") == {'{"is_sleeping":true}'}
        assert fleet.post("/wake_up", None).status_code == 200
        assert everywhere("/is_sleeping") == {'{"is_sleeping":false}'}


def test_kept_responses_are_everyones(fleet: RunningServer) -> None:
    """A response goes on, is cancelled and is deleted by whichever process is asked."""
    long = {"input": "Sing.", "max_output_tokens": 1900, "background": True, "ignore_eos": True}
    for _ in range(6):
        begun = fleet.post("/v1/responses", long).json()
        cancelled = fleet.post(f"/v1/responses/{begun['id']}/cancel", None).json()
        assert cancelled["status"] == "cancelled"
    until(lambda: fleet.get("/load").json() == {"server_load": 0})
    first = fleet.post("/v1/responses", {"input": "Sing.", "max_output_tokens": 4}).json()["id"]
    for _ in range(6):
        second = {"input": "Go on.", "max_output_tokens": 4, "previous_response_id": first}
        assert fleet.post("/v1/responses", second).json()["previous_response_id"] == first
    assert fleet.ask("DELETE", f"/v1/responses/{first}").status_code == 200
    assert {fleet.get(f"/v1/responses/{first}").status_code for _ in range(6)} == {404}


def test_a_stream_of_the_background_is_everyones(fleet: RunningServer) -> None:
    """Each process has the events that the client has not seen, as they are made."""
    body = {"input": "Sing.", "max_output_tokens": 600, "background": True, "stream": True, "ignore_eos": True}
    with open_stream("POST", f"{fleet.url}/v1/responses", json=body, **KEY) as stream:
        first = next(line for line in stream.iter_lines() if line.startswith("data: "))
    path = f"/v1/responses/{json.loads(first[6:])['response']['id']}?stream=true&starting_after=1"
    with ThreadPoolExecutor(6) as threads:
        (text,) = {answer.text for answer in threads.map(lambda _: fleet.get(path), range(6))}
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(2, len(events) + 2))
    assert events[-1]["type"] == "response.incomplete"
    assert fleet.get(path).text == text
    with open_stream("POST", f"{fleet.url}/v1/responses", json=body | {"max_output_tokens": 1900}, **KEY) as stream:
        first = next(line for line in stream.iter_lines() if line.startswith("data: "))
    path = f"/v1/responses/{json.loads(first[6:])['response']['id']}"
    with ThreadPoolExecutor(6) as threads:
        followed = [threads.submit(fleet.get, f"{path}?stream=true") for _ in range(6)]
        assert fleet.ask("DELETE", path).status_code == 200
        assert {answer.result().status_code for answer in followed} <= {200, 404}
    assert "Traceback" not in "".join(fleet.log)


def test_a_process_that_is_killed(fleet: RunningServer) -> None:
    """Its streams break, its requests are aborted, and its counts stay; other streams go on; another takes its place,
    and its open responses have failed."""
    fleet.wait_until_idle()
    opened, taken = shared_streams(fleet, 6)
    doomed, other = sorted(taken, key=taken.__getitem__, reverse=True)
    long = {"input": "Sing.", "max_output_tokens": 600, "background": True, "ignore_eos": True}
    kept = []
    for _ in range(2):
        answer = fleet.post("/v1/responses", long)
        assert answer.status_code == 200, answer.text
        kept.append(answer.json()["id"])
    before = fleet.sample("hardpoint_http_requests_total", path="/v1/responses")
    os.kill(doomed, signal.SIGKILL)
    until(lambda: len(fleet.api_pids) == 2 and doomed not in fleet.api_pids, 60)
    assert other in fleet.api_pids
    for stream in opened:
        stream.join(60)
    complete = [bool(stream.events) and stream.events[-1] == "[DONE]" for stream in opened]
    assert taken[other] <= sum(complete) < 6, "streams of the killed process may have ended before"
    until(lambda: all(fleet.get(f"/v1/responses/{each}").json()["status"] != "in_progress" for each in kept), 60)
    fleet.wait_until_idle()
    until(lambda: fleet.get("/load").json() == {"server_load": 0})
    assert fleet.sample("hardpoint_http_requests_total", path="/v1/responses") == before
    assert any("was ended by SIGKILL" in line and "another is started" in line for line in fleet.log)
    until(lambda: fleet.get("/ready").status_code == 200, 60)
    assert fleet.post("/v1/completions", SHORT).status_code == 200


def test_a_process_that_hangs(fleet: RunningServer) -> None:
    """It is replaced like one that dies: its streams break, and no others."""
    fleet.wait_until_idle()
    opened, taken = shared_streams(fleet, 6)
    doomed = max(taken, key=taken.__getitem__)
    os.kill(doomed, signal.SIGSTOP)
    until(lambda: len(fleet.api_pids) == 2 and doomed not in fleet.api_pids, 60)
    for stream in opened:
        stream.join(60)
    assert [stream.events[-1] for stream in opened].count("[DONE]") == 6 - taken[doomed]
    said = "did not react for 5 s and was killed"  # the log is read by a thread, which may be behind
    until(lambda: any(said in line and "another is started" in line for line in fleet.log))
    fleet.wait_until_idle()
    until(lambda: fleet.get("/load").json() == {"server_load": 0})
    until(lambda: fleet.get("/ready").status_code == 200, 60)


@pytest.mark.nightly
def test_a_process_that_hangs_while_it_loads() -> None:
    """It is replaced, too: the server gets ready within the time that is allowed, and not never."""
    flags = ("--api-server-count", "2", "--core-start-timeout", "20")
    with running_server(*flags, wait=False, program=True) as server:
        until(lambda: len(server.api_pids) == 2, 30)
        doomed = server.api_pids[0]
        os.kill(doomed, signal.SIGSTOP)
        until(lambda: doomed not in server.api_pids and len(server.api_pids) == 2, 90)
        said = "was not ready 20 s after the engine (--core-start-timeout) and was killed: it may have been stopped"
        assert any(said in line and f"({doomed})" in line for line in server.log)
        until(lambda: server.get("/ready").status_code == 200, 60)
        assert server.post("/v1/completions", SHORT).status_code == 200


def test_an_engine_that_is_killed_is_built_again(fleet: RunningServer) -> None:
    """The streams of both processes go on, and both say so meanwhile."""
    opened = streams(fleet, 4, seed=1)
    (core,) = fleet.engine_pids
    os.kill(core, signal.SIGKILL)
    until(lambda: fleet.get("/health").status_code == 503, 20)
    for stream in opened:
        stream.join(120)
        assert stream.events[-1] == "[DONE]"
        assert len(stream.events) > 100
    assert fleet.sample("hardpoint_engine_restarts_total") == 1
    until(lambda: fleet.get("/ready").status_code == 200, 60)


def test_it_drains(fleet: RunningServer) -> None:
    """The last test: open streams of both processes end, new requests are refused, nothing stays."""
    opened, pids = streams(fleet, 4), [fleet.process.pid, *fleet.api_pids, *fleet.engine_pids]
    fleet.process.send_signal(signal.SIGTERM)
    until(lambda: fleet.post("/v1/completions", SHORT).status_code == 503)
    for stream in opened:
        stream.join(60)
        assert stream.events[-1] == "[DONE]"
    assert fleet.process.wait(60) == 0
    until(lambda: all(map(is_gone, pids)), 10)
    assert "Traceback" not in "".join(fleet.log)


def test_the_end_of_its_first_process_ends_all() -> None:
    with running_server("--api-server-count", "2", program=True) as server:
        pids = processes(server.process.pid)
        server.process.kill()
        until(lambda: all(map(is_gone, pids)), 20)


def test_what_keeps_it_from_starting_is_said_once() -> None:
    said = failing("--port", "0", "--api-server-count", "2", "no/such/model")
    assert said.count("no/such/model") < 3
    assert "--api-server-count 0 is invalid" in failing("--api-server-count", "0")
    failing("--port", "0", "--api-server-count", "2", "--kv-cache-memory", "1KiB")


def test_counts_of_processes_are_added() -> None:
    """Histograms by bucket, counters by label; what is left of an ended process is what only grows."""
    metrics = [ServerMetrics(["demo"]) for _ in range(2)]
    for one in metrics:
        one.open_requests.inc()
        one.requests.first_token("demo", 0.3)
    metrics[1].requests.first_token("demo", 30)
    parts = [MetricsSnapshot.of_registry(one.registry) for one in metrics]
    total = MetricsSnapshot.total_of(parts)
    name = "hardpoint_time_to_first_token_seconds"
    assert total.value("hardpoint_http_open_requests") == 2
    assert [total.value(f"{name}_bucket", model="demo", le=le) for le in ("0.25", "0.5", "+Inf")] == [0, 2, 3]
    assert total.value(f"{name}_sum", model="demo") == pytest.approx(30.6)
    left = MetricsSnapshot.total_of([parts[0], parts[1].counters])
    assert (left.value("hardpoint_http_open_requests"), left.value(f"{name}_count", model="demo")) == (1, 3)
