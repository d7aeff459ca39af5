"""Synthetic requests, and when they are sent."""

from __future__ import annotations

import asyncio
import random
import statistics
import time

import pytest

from hardpoint.bench.lengths import Lengths, SyntheticRequest, synthetic_requests
from hardpoint.bench.load import Load, Summary, Timing, percentiles
from hardpoint_plugin_api import ConfigError


@pytest.mark.parametrize(
    ("text", "low", "high", "median"),
    [
        ("7", 7, 7, 7),
        ("uniform:10:30", 10, 30, 20),
        ("lognormal:100:0.5", 1, 800, 100),
        ("lognormal:100:2:150", 1, 150, 100),
        ("mixed:9:40:20", 9, 40, 20),
    ],
)
def test_lengths_have_their_distribution(text: str, low: int, high: int, median: int) -> None:
    lengths, generator = Lengths.parse(text, "--input-len"), random.Random(3)
    drawn = lengths.draw(2000, generator)
    assert low <= min(drawn) <= max(drawn) <= high
    assert statistics.median(drawn) == pytest.approx(median, rel=0.1)
    if text.startswith("uniform"):
        assert set(drawn) == set(range(low, high + 1))
    if text == "lognormal:100:2:150":
        assert drawn.count(150) > 500, "what is longer is cut off"
    if text.startswith("mixed"):
        assert drawn[:7] == [9, 40, 20, 9, 40, 20, 9]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "0",
        "-3",
        "1.5",
        "4:5",
        "uniform:5",
        "uniform:9:3",
        "mixed:",
        "mixed:0:4",
        "normal:3:4",
        "lognormal:9",
        "lognormal:9:-1",
    ],
)
def test_what_is_no_distribution(text: str) -> None:
    with pytest.raises(ConfigError, match="--output-len"):
        Lengths.parse(text, "--output-len")


def test_requests_are_those_of_the_seed() -> None:
    lengths = Lengths.parse("uniform:1:50", "--input-len"), Lengths.parse("uniform:1:9", "--output-len")
    first = synthetic_requests(30, *lengths, [5, 6, 7], seed=1)
    assert first == synthetic_requests(30, *lengths, [5, 6, 7], seed=1)
    assert first != synthetic_requests(30, *lengths, [5, 6, 7], seed=2)
    assert {token for request in first for token in request.prompt} == {5, 6, 7}


class Server:
    """Takes a moment for each request, and notes them, when each came and how many were open."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._open, self.most, self.came = seconds, 0, 0, list[float]()
        self.requests: list[SyntheticRequest] = []

    async def send(self, request: SyntheticRequest) -> Timing:
        """Answer ``request`` with its own number of tokens."""
        self.came.append(time.perf_counter())
        self.requests.append(request)
        self._open += 1
        self.most = max(self.most, self._open)
        await asyncio.sleep(self._seconds)
        self._open -= 1
        return Timing(self.came[-1], [time.perf_counter()], time.perf_counter(), 1, request.num_output_tokens)


REQUESTS = [SyntheticRequest([1], number + 1) for number in range(12)]


def test_so_many_are_open_at_a_time() -> None:
    server, ended = Server(0.01), list[Timing]()
    timings = asyncio.run(Load(4, None, None, 0).apply(server.send, REQUESTS, ended.append))
    assert server.most == 4
    assert sorted(timing.num_output_tokens for timing in timings) == list(range(1, 13))
    assert ended == timings


def test_requests_arrive_whether_others_have_ended_or_not() -> None:
    server = Server(0.3)
    asyncio.run(Load(None, 400.0, None, 1).apply(server.send, REQUESTS, lambda timing: None))
    assert server.most > 4, "at 400 a second, 12 are sent before many have ended"
    generator = random.Random(1)
    due = sum(generator.expovariate(400.0) for _ in REQUESTS[1:])
    assert server.came[-1] - server.came[0] >= due * 0.99, "none is sent before it is due"


def test_requests_repeat_for_so_long() -> None:
    server, began = Server(0.005), time.perf_counter()
    timings = asyncio.run(Load(3, None, 0.2, 0).apply(server.send, REQUESTS[:2], lambda timing: None))
    assert len(timings) > 3
    assert time.perf_counter() - began >= 0.2


def test_requests_that_repeat_have_new_prompts() -> None:
    """No prompt comes twice, for a prefix cache would find it; lengths do."""
    requests = [SyntheticRequest(list(range(40)), 3), SyntheticRequest(list(range(50, 70)), 5)]
    server = Server(0.005)
    asyncio.run(Load(2, None, 0.1, 0).apply(server.send, requests, lambda timing: None))
    assert server.requests[:2] == requests
    assert len(server.requests) > 6
    assert len({tuple(request.prompt[:16]) for request in server.requests}) == len(server.requests)
    shapes = [(len(request.prompt), request.num_output_tokens) for request in server.requests]
    assert shapes == [shapes[number % 2] for number in range(len(shapes))]
    again = Server(0.005)
    asyncio.run(Load(2, None, 0.1, 0).apply(again.send, requests, lambda timing: None))
    assert all(one == other for one, other in zip(server.requests, again.requests, strict=False)), "those of the seed"


def test_no_request_begins_after_the_time() -> None:
    """At one in 50 seconds, the second is due long after a tenth of a second; nobody waits for it."""
    server, began = Server(0.0), time.perf_counter()
    asyncio.run(Load(None, 0.02, 0.1, 0).apply(server.send, REQUESTS, lambda timing: None))
    assert len(server.came) == 1
    assert time.perf_counter() - began < 5


def test_percentiles_are_values_by_nearest_rank() -> None:
    values = [float(value) for value in range(1, 201)]
    assert percentiles(reversed(values), (0, 50, 90, 99, 100)) == [1, 100, 180, 198, 200]
    assert percentiles([3.0], (50, 99)) == [3, 3]
    assert percentiles([], (50,)) == []


def test_a_summary() -> None:
    good = Timing(10.0, [10.5, 10.6, 10.8], 11.0, num_prompt_tokens=7, num_output_tokens=20)
    bad = Timing(11.0, [], 12.0, error="500: no")
    rows = {row.name: row for row in Summary([good, bad]).rows(peer=20.0)}
    assert (rows["output throughput"].value, rows["output throughput"].of_peer) == (10.0, 0.5)
    assert (rows["all throughput"].value, rows["requests"].value) == (13.5, 0.5)
    assert (rows["failed requests"].value, rows["failed requests"].note) == (1, "500: no")
    assert rows["time to first token p50"].value == pytest.approx(500)
    assert rows["inter-token latency p50"].value == pytest.approx(100)
    assert rows["inter-token latency p99"].value == pytest.approx(200)
    assert rows["end to end p90"].value == pytest.approx(1000)
