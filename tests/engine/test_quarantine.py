"""Which requests a new engine gets after others have failed with them, seen from the wire."""

from __future__ import annotations

import pickle
from queue import SimpleQueue
from typing import Any, cast

import pytest

from hardpoint import SamplingParams
from hardpoint.config import EngineConfig
from hardpoint.engine.client import CoreFacts, EngineStats
from hardpoint.engine.processes.calls import Answers
from hardpoint.engine.remote.messages import Abort, Add, Advanced, Command, Ended, Ready, Report
from hardpoint.engine.remote.news import News
from hardpoint.engine.remote.remote_core import RemoteCore
from hardpoint.engine.requests import Delta, RequestProgress
from hardpoint_plugin_api import EngineDeadError, EngineError

CONFIG = EngineConfig.create(model="demo", on_engine_failure="restart")
FACTS = CoreFacts(CONFIG, cast(Any, None), max_model_len=100, vocab_size=50, pid=1)


class ScriptedLink:
    """A core that is as the test says. ``sent`` is what it was told of requests: their numbers, negative for aborts."""

    lost: EngineDeadError | None = None

    def __init__(self) -> None:
        self.reports: SimpleQueue[Report] = SimpleQueue()
        self.answers = Answers()
        self.sent: list[int] = []

    def send(self, command: Command) -> None:
        if isinstance(command, Add):
            assert pickle.loads(command.asked).number == command.number
            self.sent.append(command.number)
        elif isinstance(command, Abort):
            self.sent.append(-command.number)

    def give_up(self, reason: str) -> None:
        raise AssertionError(reason)

    def close(self, deadline: float = 0) -> None:
        """Nothing runs."""


class Engines:
    """A front end, and the cores it had."""

    def __init__(self, num_requests: int) -> None:
        self.links: list[ScriptedLink] = []
        self.builds: list[EngineDeadError] = []
        """Failures of the next cores to start, the last one first."""
        self.core = RemoteCore(self._start, CONFIG)
        self.core.wait_until_ready()
        self.requests = [self.add() for _ in range(num_requests)]

    def _start(self, config: EngineConfig) -> ScriptedLink:
        self.links.append(ScriptedLink())
        first = Ended(self.builds.pop()) if self.builds else Ready(FACTS, EngineStats())
        self.links[-1].reports.put(first)
        return self.links[-1]

    def add(self) -> RequestProgress:
        return self.core.add_request([1, 2], SamplingParams(max_tokens=9), frozenset())

    @property
    def sent(self) -> list[int]:
        """The commands to the last core since this was last read."""
        sent, self.links[-1].sent = self.links[-1].sent, []
        return sent

    def fail(self, times: int = 1) -> list[RequestProgress]:
        """The core dies of something, and the next is there. Returns what ended with it."""
        ended = []
        for _ in range(times):
            self.links[-1].reports.put(Ended(EngineDeadError("killed")))
            ended += self.core.step()
        return ended

    def report(self, *requests: RequestProgress, end: bool = False) -> None:
        """The core says that each has a token more, or has ended as it was told to."""
        deltas = (Delta(r.number, () if end else (5,), "abort" if end else None, None, 0, 0) for r in requests)
        self.links[-1].reports.put(Advanced(News(tuple(deltas)), EngineStats()))

    def advance(self, *requests: RequestProgress) -> None:
        self.report(*requests)
        assert self.core.step() == list(requests)


@pytest.fixture
def engines() -> Engines:
    return Engines(4)


def numbers(requests: list[RequestProgress]) -> list[int]:
    return [request.number for request in requests]


def test_what_got_tokens_is_in_no_doubt(engines: Engines) -> None:
    first, *others = engines.requests
    for _ in range(4):
        engines.advance(first)
        engines.fail()
        assert first.number in engines.sent
        engines.advance(*others)
        assert engines.sent == []
    assert len(engines.links) == 5


def test_the_newest_is_tried_first_and_the_next_once_it_has_a_token(engines: Engines) -> None:
    a, b, c, d = engines.requests
    assert engines.fail() == []
    assert engines.sent == numbers([a, b, c, d])
    engines.advance(a)
    assert engines.fail() == []
    assert engines.sent == numbers([a, d]), "a is in no doubt; of the others one"
    engines.advance(a)
    assert engines.sent == []
    engines.advance(d)
    assert engines.sent == numbers([c])
    late = engines.add()
    assert engines.sent == numbers([late]), "what comes now does not wait"
    (blamed,) = engines.fail()
    assert blamed is c
    assert type(blamed.error) is EngineError
    assert "killed" in str(blamed.error)
    assert engines.sent == numbers([a, b, d, late])
    engines.advance(b)
    assert engines.core.recovery.num_restarts == 3


def test_one_that_is_held_back_can_be_aborted(engines: Engines) -> None:
    a, b, c, d = engines.requests
    engines.fail(2)
    assert engines.sent == numbers([d])
    for request in (b, d):
        engines.core.abort(request)
    assert engines.sent == [-d.number], "the core has d alone"
    assert engines.core.step() == [b]
    assert b.finish_reason == "abort"
    engines.report(d)  # on its way already when c, which waits for it, is aborted
    engines.core.abort(c)
    assert engines.core.step() == [d]
    assert engines.sent == [c.number, -c.number], "the core got it meanwhile"
    engines.report(c, d, end=True)
    assert engines.core.step() == [c, d]
    assert engines.sent == numbers([a])


def test_an_end_lets_the_next_one_in(engines: Engines) -> None:
    _, _, c, d = engines.requests
    engines.fail(2)
    assert engines.sent == numbers([d])
    engines.report(d, end=True)
    assert engines.core.step() == [d]
    assert engines.sent == numbers([c])


def test_what_could_not_be_built_blames_no_request(engines: Engines) -> None:
    engines.builds = [EngineDeadError("killed while it loaded")]
    engines.fail()
    assert len(engines.links) == 3
    assert engines.sent == numbers(engines.requests), "one failure so far"
    engines.fail()
    _, _, c, d = engines.requests
    assert engines.sent == numbers([d])
    engines.advance(d)
    assert engines.sent == numbers([c])
