"""A server whose engine fails: what clients, probes and operators see, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_lifecycle import Post, Stream
from tests.support.breaking import install_breaking
from tests.support.engines import until
from tests.support.processes import is_core, is_gone, is_rank
from tests.support.serving import RunningServer, open_stream, running_server

BODY: dict[str, Any] = {"prompt": "The whale", "max_tokens": 200, "ignore_eos": True}
EXACT = ("--batch-invariant",)
"""Recomputing rounds as computing did, so that answers can be compared."""


def core_of(server: RunningServer) -> int:
    (pid,) = (pid for pid in server.engine_pids if is_core(pid) and not is_gone(pid))
    return pid


def text_of(stream: Stream) -> str:
    stream.join(120)
    assert stream.events[-1] == "[DONE]", stream.events[-1]
    return "".join(json.loads(event)["choices"][0]["text"] for event in stream.events[:-1])


def test_requests_outlive_the_engine_until_it_is_given_up() -> None:
    with running_server("--max-engine-restarts", "1", "--max-concurrent-requests", "3", *EXACT) as server:
        greedy, drawn = BODY | {"temperature": 0}, BODY | {"temperature": 0.9, "seed": 7}
        expected = [server.post("/v1/completions", body).json()["choices"][0]["text"] for body in (greedy, drawn)]
        streams = [Stream(server, **body) for body in (greedy, drawn)]
        for stream in streams:
            stream.begun.wait()
        first = core_of(server)
        os.kill(first, signal.SIGKILL)
        until(lambda: server.get("/health").status_code == 503, 5)
        said = server.get("/health").json()
        assert said["status"] == "restarting"
        assert f"the engine's process ({first}) was ended by SIGKILL" in said["why"]
        assert server.get("/ready").status_code == 503
        waiting = Stream(server, **greedy)
        until(lambda: server.sample("hardpoint_http_open_requests") == 4)
        refused = server.post("/v1/completions", greedy)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "restarting"
        until(lambda: server.get("/health").status_code == 200, 60)
        assert [text_of(stream) for stream in [*streams, waiting]] == [*expected, expected[0]]
        assert core_of(server) != first
        assert server.samples("hardpoint_engine_restarts_total", "hardpoint_engine_up") == [1, 1]
        explained = server.get("/v1/hardpoint/explain").json()
        assert (explained["restarts"], explained["denied"]) == (1, [])

        stream, post = Stream(server), Post(server)
        stream.begun.wait()
        until(lambda: server.sample("hardpoint_running_requests") == 2)
        os.kill(core_of(server), signal.SIGKILL)
        assert stream.error()["code"] == "engine_dead"
        status, error = post.error()
        assert (status, error["code"]) == (503, "engine_dead")
        assert "(--max-engine-restarts 1) and is given up" in error["message"]
        assert server.process.wait(30) == 2, "whoever started it can do more"
        assert "is given up" in "".join(server.log)
        assert "Traceback" not in "".join(server.log)


def test_a_kernel_that_crashes_is_denied_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install_breaking(tmp_path, "crashes"))
    with running_server("--plugins", "cpu,breaking", "--enforce-eager") as server:
        answer = server.post("/v1/completions", BODY | {"temperature": 0})
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 200
        explained = server.get("/v1/hardpoint/explain").json()
        (denied,) = explained["denied"]
        assert (denied["plugin"], denied["slot"], denied["name"]) == ("breaking", "op.rms_norm", "breaking")
        assert "was ended by SIGSEGV" in explained["last_failure"]
        (row,) = (row for row in explained["rows"] if row["of"] == "rms_norm")
        assert row["chosen"] == "cpu_native"
        reasons = {each["name"]: each["reasons"] for each in row["rejected"]}["breaking"]
        assert reasons[0]["code"] == "denied"
        assert server.sample("hardpoint_denied_info", plugin="breaking", implementation="breaking") == 1
        assert "start with --deny op.rms_norm=breaking" in "".join(server.log)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_server_that_is_killed_leaves_nothing_behind(num_ranks: int) -> None:
    with running_server("--tensor-parallel-size", str(num_ranks), program=True) as server:
        core = core_of(server)
        ranks = [pid for pid in server.engine_pids if is_rank(pid)]
        assert len(ranks) == (0 if num_ranks == 1 else num_ranks)
        with open_stream("POST", server.url + "/v1/completions", json=BODY | {"stream": True}) as answer:
            next(answer.iter_lines())
            server.process.kill()
        until(lambda: all(map(is_gone, [core, *ranks])), 15)
