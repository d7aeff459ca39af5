"""A server whose ranks torchrun started: on one host all processes are given the same port, and rank 0's answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.engines import until
from tests.support.expert_servers import free_port
from tests.support.processes import is_gone, processes

SERVE = [sys.executable, "-m", "hardpoint.cli", "serve", "demo", "--platform", "cpu", "--executor", "torchrun"]
SERVE += ["--tensor-parallel-size", "2", "--kv-cache-memory", "16MiB", "--cpu.threads", "1", "--port"]


def status(address: str) -> int:
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return int(answer.status)
    except OSError as error:  # an HTTPError has a code
        return int(getattr(error, "code", 0))


def completion(port: int, max_tokens: int) -> urllib.request.Request:
    """A streamed one."""
    asked = {"model": "demo", "prompt": "Hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    address = f"http://127.0.0.1:{port}/v1/completions"
    return urllib.request.Request(address, json.dumps(asked).encode(), {"Content-Type": "application/json"})


def has_socket(pid: int) -> bool:
    """Whether a process holds a connection."""
    return any(
        os.readlink(link).startswith("socket:") for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()
    )


@contextmanager
def launched(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun with two processes of ``command``."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    with log.open("wb") as file:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        launcher = subprocess.Popen([*torchrun, *command], stdout=file, stderr=file, env=environment)
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.wait()


@pytest.mark.nightly
def test_it_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    """The client gets an error, and no process is left."""
    port, log = free_port(), tmp_path / "log"
    with launched([*SERVE, str(port)], log) as launcher:
        until(lambda: status(f"http://127.0.0.1:{port}/ready") == 200, 60)
        started = processes(launcher.pid)
        with urllib.request.urlopen(completion(port, 2000), timeout=60) as stream:
            stream.readline()
            launcher.kill()
            lines = [line.decode() for line in stream]
    (error,) = [json.loads(line.removeprefix("data: "))["error"] for line in lines if '"error"' in line]
    assert error["code"] == "engine_dead"
    assert f"process {launcher.pid}, is gone; start torchrun again on all nodes" in error["message"]
    assert len(started) >= 2
    until(lambda: all(map(is_gone, started)), 20)
    assert f"this process ends: torchrun's launcher on {os.uname().nodename}" in log.read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_to_the_launcher_leaves_open_requests_their_time(number: int, tmp_path: Path) -> None:
    """torchrun sends it to all processes; ranks other than 0 go on until rank 0 needs them no longer."""
    port = free_port()
    with launched([*SERVE, str(port)], tmp_path / "log") as launcher:
        until(lambda: status(f"http://127.0.0.1:{port}/ready") == 200, 60)
        started = processes(launcher.pid)
        with urllib.request.urlopen(completion(port, 600), timeout=60) as stream:
            stream.readline()
            launcher.send_signal(number)
            lines = [line.decode().strip() for line in stream]
        until(lambda: all(map(is_gone, started)), 20)
    assert not [line for line in lines if '"error"' in line]
    assert lines[-2:] == ["data: [DONE]", ""]


@pytest.mark.nightly
def test_a_signal_ends_a_server_whose_ranks_still_meet(tmp_path: Path) -> None:
    port, number = free_port(), tmp_path / "rank 0"
    script = f'[ "$RANK" = 1 ] && exec sleep 120; echo $$$$ > "$0"; exec "$@" {port}'  # torchrun makes $$ of it
    with launched(["sh", "-c", script, str(number), *SERVE], tmp_path / "log"):
        until(number.exists, 60)
        rank_0 = int(number.read_text())
        until(lambda: has_socket(rank_0), 60)  # to the store
        time.sleep(0.5)
        os.kill(rank_0, signal.SIGTERM)
        until(lambda: is_gone(rank_0), 20)
