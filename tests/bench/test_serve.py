"""The benchmarks of serving, on real servers and engines with the demo model."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hardpoint.bench.processes import sample_processes
from hardpoint.cli.main import run
from hardpoint_plugin_api import ConfigError
from tests.support.engines import until
from tests.support.serving import SMALL, RunningServer, running_server

SHORT = ("--input-len", "uniform:3:20", "--output-len", "6")
LATENCIES = ("time to first token", "inter-token latency", "time per output token", "end to end")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--api-key", "secret", program=True) as running:
        yield running


def measured(file: Path, *command: str) -> dict[str, Any]:
    """The rows of a benchmark by name."""
    assert run(["bench", *command, "--json", str(file)]) == 0
    return {row["name"]: row for row in json.loads(file.read_text())["rows"]}


def at(server: RunningServer) -> list[str]:
    return ["--url", server.url + "/", "--api-key", "secret"]


def test_a_running_server(server: RunningServer, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    flags = [*at(server), *SHORT, "--pid", str(server.process.pid), "--requests", "12", "--concurrency", "4"]
    rows = measured(tmp_path / "result.json", "serve", *flags, "--plot", str(plot))
    assert rows["output throughput"]["note"] == "72 in all"
    assert rows["failed requests"]["value"] == 0
    for name in LATENCIES:
        assert 0 < rows[f"{name} p50"]["value"] <= rows[f"{name} p90"]["value"] <= rows[f"{name} p99"]["value"]
    assert rows["time to first token p50"]["value"] < rows["end to end p50"]["value"]
    assert rows["server: processor time per token"]["value"] > 0
    assert "engine: processor time per token" in rows
    assert plot.read_bytes().startswith(b"\x89PNG")
    width, height = struct.unpack(">II", plot.read_bytes()[16:24])
    assert width > 500 < height + 200


def test_requests_at_a_rate_for_a_while(server: RunningServer, tmp_path: Path) -> None:
    flags = [*at(server), *SHORT, "--request-rate", "40", "--duration", "0.5", "--requests", "3", "--warmup", "0"]
    rows = measured(tmp_path / "result.json", "serve", *flags)
    assert int(rows["requests"]["note"].split()[0]) > 3, "three requests, over and over"
    assert rows["failed requests"]["value"] == 0
    assert rows["output throughput"]["peer"] is None


def test_some_fail(server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*at(server), "--requests", "4", "--concurrency", "2", "--warmup", "0"]
    rows = measured(tmp_path / "r.json", "serve", *flags, "--input-len", "uniform:1:4000", "--output-len", "2")
    assert 0 < rows["failed requests"]["value"] < 4
    assert "the prompt has" in rows["failed requests"]["note"]
    assert run(["bench", "serve", *flags, "--input-len", "5000"]) != 0
    assert "every one of 4 requests failed" in capsys.readouterr().err


def test_a_server_of_its_own_beside_the_engine_in_process(tmp_path: Path) -> None:
    flags, before = [*SMALL, *SHORT, "--requests", "8", "--concurrency", "4", "--warmup", "2"], children()
    rows = measured(tmp_path / "result.json", "serve", *flags)
    assert rows["output throughput"]["peer"] > 0
    assert rows["server: processor time per token"]["note"] == "goal at most 60 us"
    assert children() <= before, "it has ended, and so has its engine"


def children() -> set[int]:
    """The processes below this one."""
    return set(sample_processes(os.getpid())) - {os.getpid()}


@contextmanager
def process_of(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is killed in the end."""
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("sig", [pytest.param(signal.SIGTERM, marks=pytest.mark.nightly), signal.SIGKILL])
def test_a_server_of_its_own_ends_with_the_benchmark(sig: signal.Signals) -> None:
    """However the bench ends, no process is left that holds a device's memory."""
    with process_of(sys.executable, "-m", "hardpoint.cli", "bench", "serve", *SMALL, "--duration", "600") as process:
        until(lambda: len(sample_processes(process.pid)) == 3, 60)
        started = set(sample_processes(process.pid)) - {process.pid}
        process.send_signal(sig)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))


def test_processes_and_threads_that_end_while_they_are_counted() -> None:
    with process_of("bash", "-c", "while true; do sleep 0.001; done") as process:
        names = {sample.name for _ in range(1000) for sample in sample_processes(process.pid).values()}
    assert names == {"server", "engine"}


def test_the_engine_in_process(tmp_path: Path) -> None:
    flags = [*SMALL, "--repeat", "1"]
    rows = measured(tmp_path / "t.json", "throughput", *flags, *SHORT, "--requests", "8")
    assert rows["output throughput"]["value"] > 0
    assert rows["output throughput"]["roofline"] > 0
    rows = measured(
        tmp_path / "l.json", "latency", *flags, "--input-len", "9", "--output-len", "4", "--batch-size", "2"
    )
    assert rows["time to first token p50"]["value"] > 0
    assert 0 < rows["time per token p50"]["value"] < rows["end to end p50"]["value"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["serve", "--concurrency", "2", "--request-rate", "3"], "exclude each other"),
        (["serve", "--url", "http://127.0.0.1:1", "--dtype", "float32"], "leave out dtype"),
        (["serve", "--url", "127.0.0.1:1"], "is no address of a server"),
        (["serve", "--url", "http://127.0.0.1:1"], "the server at http://127.0.0.1:1 cannot be reached"),
        (["serve", "no/such/model"], "no/such/model"),
        (["serve", "--pid", "1"], "give its --url too"),
        (["serve", "--input-len", "many"], "--input-len many is no distribution"),
        (["throughput", "--core-process"], "leave out --core-process"),
        (["latency", "--plot", "plot.pdf"], "a plot is a PNG"),
        (["latency", "--plot", "no/such/folder/plot.png"], "its folder is not there"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *flags]) == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(["bench", "latency", "--plot", "plot.png"]) == 2
    assert "pip install 'hardpoint-core[plot]'" in capsys.readouterr().err


def test_a_process_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="process 999999999 cannot be measured"):
        sample_processes(999999999)
