"""Two minutes of 64 streams at a time: nothing fails, and nothing grows once it is warm."""

from __future__ import annotations

import asyncio

import pytest

from hardpoint.bench.http_stream import StreamClient
from hardpoint.bench.lengths import Lengths, synthetic_requests
from hardpoint.bench.load import Load, Timing
from hardpoint.bench.processes import sample_processes
from tests.support.engines import until
from tests.support.serving import RunningServer, running_server

STREAMS = 64
WARM_UPS = 3
"""Each fills the cache's pages (48 MiB, some 6 s of load) and ends with fewer and fewer streams, so that steps of every
size are recorded. The engine keeps the 32 recordings that were used last; which ones, and the gaps that the others left
in the heap, change with the load. By then the heap has room for any of them, and what is allocated in it stays the same
to a few kilobytes: counted by mallinfo2 over 11,000 requests."""
GROWTH = {"server": 2, "engine": 4}
"""Most MiB that a process may grow by afterwards: gaps in its heap."""
MIB = 2**20


def apply(server: RunningServer, seconds: float) -> list[Timing]:
    """64 streams for so long, of lengths from a few tokens to some hundred."""
    lengths = Lengths.parse("lognormal:48:0.8", "input"), Lengths.parse("lognormal:64:0.8", "output")
    requests = synthetic_requests(500, *lengths, range(300, 1300), seed=int(seconds))
    client = StreamClient(server.url, "demo")
    return asyncio.run(Load(STREAMS, None, seconds, 0).apply(client.stream, requests, lambda timing: None))


@pytest.mark.nightly
def test_two_minutes_of_64_streams() -> None:
    flags = ("--max-num-seqs", str(STREAMS), "--cpu.threads", "1", "--max-concurrent-requests", str(STREAMS))
    with running_server(*flags, program=True) as server:
        for _ in range(WARM_UPS):
            assert not [timing.error for timing in apply(server, 10) if timing.error]
        server.wait_until_idle()
        tasks = server.sample("hardpoint_server_tasks")
        before = sample_processes(server.process.pid)
        timings = apply(server, 120)
        assert not [timing.error for timing in timings if timing.error]
        assert len(timings) > STREAMS
        server.wait_until_idle()
        until(lambda: server.sample("hardpoint_server_tasks") <= tasks + 1)
        assert server.sample("hardpoint_http_open_requests") == 1, "the one that asks"
        until(lambda: server.num_descriptors <= next(iter(before.values())).num_descriptors + 2)
        after = sample_processes(server.process.pid)
        assert before.keys() == after.keys()
        for pid, old in before.items():
            grown = (after[pid].resident_bytes - old.resident_bytes) / MIB
            assert grown < GROWTH[old.name], f"{old.name} grew by {grown:.1f} MiB"
            assert after[pid].num_threads <= old.num_threads + 2, old.name
            assert after[pid].num_descriptors <= old.num_descriptors + 2, old.name
        assert "Traceback" not in "".join(server.log)
        assert server.stop() == 0
