"""Ranks that serve one model together, wherever each runs: fed, watched, and ended together.

A rank that is gone leaves the others waiting in a collective. So the first that dies, fails or hangs ends all, and
every step and call that is under way gets an EngineDeadError that says which it was.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from queue import Empty, SimpleQueue
from typing import cast

from hardpoint.config import EngineConfig
from hardpoint.engine.control import R, Verb
from hardpoint.engine.execution.executor import Pending
from hardpoint.engine.execution.ranks.expert_balancing import ExpertBalancing
from hardpoint.engine.execution.ranks.hang import describe
from hardpoint.engine.execution.ranks.rank_process import RankFailed, RankReady, RankReport, Stacks, TellStacks
from hardpoint.engine.execution.worker import WorkerFacts
from hardpoint.engine.processes import child_process
from hardpoint.engine.processes.calls import Answer, Answers, Call, Failure, Logged, Stop
from hardpoint.engine.scheduling.step import StepInput, StepOutput
from hardpoint.parallel.control import RankLostError
from hardpoint_plugin_api import EngineDeadError, HardpointError

logger = logging.getLogger(__name__)

_GRACE = 0.5
"""Seconds for the other ranks to say why, when one has ended; the first that ends need not be the one at fault."""


_OTHERS_GRACE = 2.0
"""The same where the rank at fault may be another replica's, which ends all when it has said why."""

PATIENCE = 1.0
"""Seconds for a process that hangs to tell, or to leave, its stacks."""


class RankLink(ABC):
    """One rank, and the thread that writes to it: a rank that does not read must keep nobody waiting."""

    def __init__(self, number: int, connection: Connection) -> None:
        self.number, self.connection = number, connection
        self.answers = Answers()
        self.stacks: SimpleQueue[str] = SimpleQueue()  # as it has told them
        self._commands: SimpleQueue[bytes | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=f"hardpoint-rank-{number}-writer", daemon=True)
        self._writer.start()

    @property
    def called(self) -> str:
        """Its name in messages."""
        return f"rank {self.number}"

    @property
    def sentinel(self) -> int | None:
        """A handle that becomes ready when the rank is gone, since its end of the connection may outlive it."""
        return None

    @abstractmethod
    def join(self, seconds: float) -> None:
        """Wait until the rank has ended."""

    @abstractmethod
    def end(self) -> None:
        """Kill the rank's process, even where it hangs."""

    @abstractmethod
    def obituary(self) -> str:
        """How it ended, when it ended by itself and said nothing."""

    def stack(self) -> str:
        """Return the stack that the rank's process left when it crashed, or an empty text; after it has ended."""
        return ""

    def ask_stacks(self) -> None:
        """Have the rank's process tell what its threads do, or leave it and end."""
        self.send(pickle.dumps(TellStacks()))

    def doing(self) -> str:
        """The work of a rank that may hang, for a sentence about it, after ``ask_stacks``."""
        try:
            return describe(self.stacks.get(timeout=PATIENCE))
        except Empty:
            return describe("")

    def send(self, data: bytes) -> None:
        """Queue a pickled command."""
        self._commands.put(data)

    def close(self) -> None:
        """Close the connection, once the writer has ended: it must not be closed while a thread writes to it."""
        self._commands.put(None)
        self._writer.join(_GRACE)
        self.connection.close()

    def _write(self) -> None:
        while (data := self._commands.get()) is not None:
            try:
                self.connection.send_bytes(data)
            except OSError:  # the rank is gone: the reader says why
                return


class RanksExecutor:
    """An Executor over ``ranks``, which whoever constructs it has started. For one thread at a time."""

    is_awaited = False

    def __init__(self, config: EngineConfig, ranks: Sequence[RankLink]) -> None:
        """Listen to the ranks, and wait until they are loaded. Raises what the first of them raises."""
        self.config, self._ranks = config, ranks
        self._grace = _OTHERS_GRACE if config.topology.shares_experts else _GRACE
        self._steps: deque[Future[StepOutput]] = deque()
        self._ready: SimpleQueue[WorkerFacts | Exception] = SimpleQueue()
        self._loaded = set[int]()  # the ranks that are
        self._notify: Callable[[], None] = lambda: None
        self._lost: EngineDeadError | None = None
        self._stack = ""  # what the rank at fault was doing
        self._closing, self._state = False, threading.Lock()
        self._ending = threading.Lock()  # held while ranks that hang are asked what they do
        self._reader = threading.Thread(target=self._read, name="hardpoint-ranks-reader", daemon=True)
        self._reader.start()
        self._owner = os.getpid()
        atexit.register(self._at_exit)  # runs before multiprocessing's own, which waits for children
        self.facts = self._wait_until_ready()
        self._balancing = ExpertBalancing(self, config)

    def _wait_until_ready(self) -> WorkerFacts:
        patience = float(self.config.core_start_timeout)
        deadline = time.monotonic() + patience
        try:
            for _ in self._ranks:
                found = self._ready.get(timeout=max(0.0, deadline - time.monotonic()))
                if isinstance(found, Exception):
                    raise found
        except Empty:
            late = ", ".join(rank.called for rank in self._ranks if rank.number not in self._loaded)
            self.shutdown(0)
            raise EngineDeadError(
                f"not ready within {patience:g} seconds: {late}; every rank was ended. If they were still loading, "
                "raise --core-start-timeout"
            ) from None
        except BaseException:
            self.shutdown(0)
            raise
        assert isinstance(found, WorkerFacts)
        return found

    def submit(self, step: StepInput) -> Pending:
        """See Executor. Experts may be balanced before it."""
        self._balancing.between_steps()
        future: Future[StepOutput] = Future()
        with self._state:
            self._refuse_if_lost()
            self._steps.append(future)
        self._send_all(pickle.dumps(step))
        return _PendingStep(self, future)

    def keep_up(self) -> None:
        """These ranks share nothing with other replicas."""

    def control(self, verb: Verb[R]) -> list[R]:
        """See Executor. Waits for as long as the verb may take."""
        self.check()
        expected = [(rank, *rank.answers.expect()) for rank in self._ranks]
        for rank, number, _ in expected:
            rank.send(pickle.dumps(Call(number, verb)))
        option = "step_timeout" if verb.takes_a_step else "core_start_timeout"
        patience = float(getattr(self.config, option))
        try:
            return [cast(R, future.result(patience)) for _, _, future in expected]
        except FutureTimeoutError:
            flag = f"--{option.replace('_', '-')}"
            what = f"{type(verb).__name__} did not end within {patience:g} seconds ({flag})"
            raise self.give_up_hung(what) from None

    def check(self) -> None:
        """See Executor."""
        with self._state:
            self._refuse_if_lost()

    def when_lost(self, notify: Callable[[], None]) -> None:
        """See Executor."""
        with self._state:
            self._notify = notify
            lost = self._lost is not None
        if lost:
            notify()

    def give_up(self, reason: str) -> EngineDeadError:
        """End every rank at once, and whatever waits for them; returns the error that they get."""
        with self._state:
            if self._lost is None:
                self._lost = EngineDeadError(reason)
                if self._stack:
                    self._lost.add_note(self._stack)
            lost, steps = self._lost, list(self._steps)
            self._steps.clear()
        for rank in self._ranks:
            rank.end()
        for future in steps:
            future.set_exception(_again(lost))
        for rank in self._ranks:
            rank.answers.lose(lost)
        self._ready.put(lost)
        self._notify()
        return _again(lost)

    def give_up_hung(self, what: str) -> EngineDeadError:
        """As ``give_up``, after ``what`` took too long; the error says what each rank was doing."""
        with self._ending:
            for rank in self._ranks:  # before the first ends: a rank that waits for it fails then, too
                rank.ask_stacks()
            found = "; ".join(f"{rank.called} {rank.doing()}" for rank in self._ranks)
            return self.give_up(f"{what}, so that every rank was ended: {found}; build a new engine")

    def shutdown(self, deadline: float) -> None:
        """See Executor. Closing twice is once."""
        with self._state:
            if self._closing:
                return
            self._closing = True
        if self._lost is None and deadline:
            self._send_all(pickle.dumps(Stop()))
            until = time.monotonic() + deadline
            for rank in self._ranks:
                rank.join(max(0.0, until - time.monotonic()))
        atexit.unregister(self._at_exit)
        self.give_up("the engine is closed")
        self._reader.join()
        for rank in self._ranks:
            rank.close()

    def _at_exit(self) -> None:
        """End the ranks of a program that forgot to close its engine; a fork of the program has no say."""
        if os.getpid() == self._owner:
            self.shutdown(0)

    def _send_all(self, data: bytes) -> None:
        for rank in self._ranks:
            rank.send(data)

    def _refuse_if_lost(self) -> None:
        if self._lost is not None:
            raise _again(self._lost)

    def _read(self) -> None:
        """Pass on what ranks say until one ends; then end the others, and say which it was."""
        reason = self._watch()
        with self._ending:
            self.give_up("the engine is closed" if self._closing else reason)

    def _watch(self) -> str:
        """Pass on what ranks say until one fails or is gone. Returns what happened, as far as it is known then."""
        listening: dict[object, RankLink] = {rank.connection: rank for rank in self._ranks}
        sentinels: dict[object, RankLink] = {rank.sentinel: rank for rank in self._ranks if rank.sentinel is not None}
        told: dict[int, str] = {}  # ranks that could not go on without another
        gone: list[RankLink] = []
        until: float | None = None
        while listening or sentinels:
            seconds = None if until is None else max(0.0, until - time.monotonic())
            found = wait([*listening, *sentinels], seconds)  # type: ignore[list-item]  # connections and sentinels
            if not found:
                break
            for each in found:
                if each in sentinels:  # a child of the process may hold its end of the connection open
                    gone.append(sentinels.pop(each))
                elif (report := _received(listening[each])) is None:
                    gone.append(listening.pop(each))
                elif isinstance(report, RankFailed):
                    error = report.failure.original()
                    if not isinstance(error, RankLostError):
                        return self._failed(listening[each], report.failure, error)
                    told.setdefault(listening[each].number, report.failure.text)
                else:
                    self._take(listening[each], report)
            if until is None and (gone or told):
                until = time.monotonic() + (_GRACE if gone else self._grace)
        for rank in gone:
            if rank.number not in told:
                rank.join(_GRACE)
                if stack := rank.stack():
                    self._stack = stack
                    logger.error("rank %d crashed:\n%s", rank.number, stack)
                return f"{rank.obituary()}; every rank was ended: build a new engine"
        return "; ".join(f"rank {number} cannot go on: {text}" for number, text in told.items())

    def _failed(self, rank: RankLink, failure: Failure, error: Exception) -> str:
        if isinstance(error, HardpointError):
            self._ready.put(error)
        self._stack = failure.trace
        if failure.trace:
            logger.error("rank %d failed:\n%s", rank.number, failure.trace)
        return f"rank {rank.number} failed, and every rank was ended: {failure.text}"

    def _take(self, rank: RankLink, report: RankReport) -> None:
        if isinstance(report, Logged):
            child_process.log_here(report.record)
        elif isinstance(report, RankReady):
            self._loaded.add(rank.number)
            self._ready.put(report.facts)
        elif isinstance(report, Answer):
            rank.answers.take(report)
        elif isinstance(report, Stacks):
            rank.stacks.put(report.text)
        elif isinstance(report, StepOutput):
            with self._state:
                future = self._steps.popleft() if self._steps else None
            if future is not None:
                future.set_result(report)


def _again(lost: EngineDeadError) -> EngineDeadError:
    """A copy of an error, for another caller to raise."""
    error = EngineDeadError(str(lost))
    for note in getattr(lost, "__notes__", ()):
        error.add_note(note)
    return error


def _received(rank: RankLink) -> RankReport | None:
    """The message of a rank, None where it is gone."""
    try:
        report: RankReport = pickle.loads(rank.connection.recv_bytes())
    except (EOFError, OSError):
        return None
    return report


@dataclass(frozen=True)
class _PendingStep:
    """A submitted step."""

    executor: RanksExecutor
    future: Future[StepOutput]

    def result(self) -> StepOutput:
        """Wait for the step's output, as long as a step may take."""
        seconds = float(self.executor.config.step_timeout)
        try:
            return self.future.result(seconds)
        except FutureTimeoutError:
            what = f"a step did not end within {seconds:g} seconds (--step-timeout)"
            raise self.executor.give_up_hung(what) from None
