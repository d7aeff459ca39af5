"""A child's listener: what it passes on, and when it ends."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hardpoint import fork_server
from hardpoint.engine.execution.ranks.rank_process import file_store
from hardpoint.engine.processes import child_process
from hardpoint.engine.processes.child_process import listen


def test_it_ends_with_the_parent_though_another_process_sends() -> None:
    """The parent need not be the sender: torchrun starts a rank, and rank 0 commands it, again and again."""
    ours, theirs = multiprocessing.Pipe()
    taken: list[object] = []
    ended = threading.Event()

    def send() -> None:
        while not ended.wait(0.005):
            ours.send("step")

    with subprocess.Popen(["sleep", "infinity"]) as parent, ThreadPoolExecutor(2) as pool:
        listening = pool.submit(listen, theirs, parent.pid, taken.append)
        pool.submit(send)
        try:
            time.sleep(0.1)
            assert not listening.done()
            parent.kill()
            assert listening.result(5) is True
        finally:
            ended.set()
    assert "step" in taken


def test_it_ends_with_the_connection() -> None:
    ours, theirs = multiprocessing.Pipe()
    taken: list[object] = []
    ours.send("stop")
    ours.close()
    assert listen(theirs, os.getppid(), taken.append) is False
    assert taken == ["stop"]


def test_it_listens_in_a_process_with_many_files_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ours, theirs = multiprocessing.Pipe()
    taken: list[object] = []
    ours.send("stop")
    ours.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held = [os.dup(theirs.fileno()) for _ in range(1100)]
    try:
        assert listen(theirs, os.getppid(), taken.append) is False
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert taken == ["stop"]


def test_an_interrupt_while_a_process_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is held back until the process has started, whose caller then never learns of it."""
    started: list[Any] = []
    start = fork_server.start

    def interrupted(*args: Any) -> Any:
        started.append(start(*args))
        signal.raise_signal(signal.SIGINT)  # of this thread, as a terminal's is of a process without others
        return started[0]

    monkeypatch.setattr(fork_server, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        child_process.start(time.sleep, (60,), "sleeps")
    assert started[0].exitcode == -signal.SIGKILL


def test_a_rank_finds_at_once_that_the_folder_of_its_store_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):  # torch raises another error, after 300 seconds
        file_store(str(tmp_path / "gone" / "store"))
