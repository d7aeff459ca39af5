"""A server whose ranks torchrun started: on one host all processes are given the same port, and rank 0's answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.support.engines import until
from tests.support.expert_servers import free_port
from tests.support.processes import is_gone, processes


def status(address: str) -> int:
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return int(answer.status)
    except OSError as error:  # an HTTPError has a code
        return int(getattr(error, "code", 0))


@pytest.mark.nightly
def test_it_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    """The client gets an error, and no process is left."""
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command += [sys.executable, "-m", "hardpoint.cli", "serve", "demo", "--platform", "cpu", "--executor", "torchrun"]
    command += ["--tensor-parallel-size", "2", "--port", str(port), "--kv-cache-memory", "16MiB", "--cpu.threads", "1"]
    asked = {"model": "demo", "prompt": "Hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with (tmp_path / "log").open("wb") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
    started: list[int] = []
    try:
        until(lambda: status(f"http://127.0.0.1:{port}/ready") == 200, 60)
        started = processes(launcher.pid)
        with urllib.request.urlopen(request, timeout=60) as stream:
            stream.readline()
            launcher.kill()
            lines = [line.decode() for line in stream]
    finally:
        launcher.kill()
        launcher.wait()
    (error,) = [json.loads(line.removeprefix("data: "))["error"] for line in lines if '"error"' in line]
    assert error["code"] == "engine_dead"
    assert f"process {launcher.pid}, is gone; start torchrun again on all nodes" in error["message"]
    assert len(started) >= 2
    until(lambda: all(map(is_gone, started)), 20)
    assert f"this process ends: torchrun's launcher on {os.uname().nodename}" in (tmp_path / "log").read_text()
