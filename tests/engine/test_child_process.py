"""A child's listener: what it passes on, and when it ends."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

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
