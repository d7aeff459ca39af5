"""The front end's side of a core that runs elsewhere: its requests, mirrored, and the link they travel by."""

from __future__ import annotations

import atexit
import logging
import pickle
import threading
import weakref
from collections.abc import Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol, Unpack

from hardpoint.config import EngineConfig
from hardpoint.engine.client import CoreFacts, EngineStats, RequestOptions
from hardpoint.engine.processes.calls import Answer, Answers, Stop
from hardpoint.engine.remote.core_loop import run_core
from hardpoint.engine.remote.messages import (
    Abort,
    Add,
    Advanced,
    Command,
    Delta,
    Ended,
    Failed,
    Ready,
    Report,
    StartFailed,
)
from hardpoint.engine.remote.remote_control import RemoteControl
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.engine.scheduling.admission import Admission
from hardpoint.engine.scheduling.request import Request
from hardpoint_plugin_api import EngineDeadError, EngineError, RequestError

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""How long a core may take to close before it is left, or killed, as it is."""


class Link(Protocol):
    """A way to a core. ``reports`` ends with Ended, whatever became of the core."""

    reports: SimpleQueue[Report]
    answers: Answers

    def send(self, command: Command) -> None:
        """Pass ``command`` on, in order; never waits. What comes too late is dropped."""
        ...

    @property
    def lost(self) -> EngineDeadError | None:
        """Why the core is gone, where it is."""
        ...

    def close(self, deadline: float = CLOSE_SECONDS) -> None:
        """End the core, by force where it does not end within ``deadline`` seconds. Closing twice is once."""
        ...


class RemoteCore(RemoteControl):
    """A CoreClient for a core behind ``link``.

    A request is admitted here and grows here, in ``step``, as reports come; the core has its own copy. One thread at a
    time calls ``step``; everything else may be called from any thread, and waits for nothing but a call's answer.
    """

    _link: Link

    def __init__(self, link: Link) -> None:
        self._link = link
        self._open: dict[int, Request] = {}
        self._opening = threading.Lock()
        self._ended: EngineDeadError | None = None
        self._facts: CoreFacts | None = None
        self._stats = EngineStats()
        weakref.finalize(self, link.close).atexit = False  # the link itself sees to that

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until the core is loaded. Raises what its start raised; EngineDeadError, after ``timeout`` seconds too.

        Must be called once, before everything but ``close``.
        """
        try:
            report = self._link.reports.get(timeout=timeout)
        except Empty:
            self._link.close(0)
            raise EngineDeadError(
                f"the engine was not ready within {timeout:g} seconds and was ended; if it was still loading, "
                "raise --core-start-timeout"
            ) from None
        if isinstance(report, StartFailed):
            self._link.close()
            raise report.failure.original()
        if isinstance(report, Ended):
            raise report.error
        assert isinstance(report, Ready), "a core's first report says how its start went"
        self._facts, self._stats = report.facts, report.stats
        self._admission = Admission(report.facts.max_model_len, report.facts.vocab_size, report.facts.config.seed)

    @property
    def facts(self) -> CoreFacts:
        """What stays as it is while the core lives."""
        assert self._facts is not None, "the core is not ready"
        return self._facts

    @property
    def stats(self) -> EngineStats:
        """What the core did up to the last report."""
        return self._stats

    def add_request(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        *,
        bad_words: Sequence[Sequence[int]] = (),
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Queue a request for one completion; see CoreClient.

        A CapacityError is the request's ``error`` later; the facts rule it out for cores that size their cache.
        """
        request = self._admission.admit(prompt_token_ids, params, eos_token_ids, bad_words=bad_words, **options)
        try:
            pickled = pickle.dumps(request)
        except Exception as error:  # parameters may hold any mapping and any number
            raise RequestError(f"the request cannot be sent to the engine: {error}") from error
        with self._opening:
            self._refuse_if_ended()
            self._open[request.number] = request
        self._link.send(Add(request.number, pickled))
        return request

    def draw_seed(self) -> int:
        """A seed for a request that gives none; the engine's own seed makes the sequence of them repeatable."""
        return self._admission.draw_seed()

    def abort(self, request: Request) -> None:
        """Have ``request`` ended; ``step`` reports it when it is."""
        if request.number in self._open:
            self._link.send(Abort(request.number))

    def step(self) -> list[Request]:
        """Wait for reports and return the requests that got a token or ended; see CoreClient."""
        self._refuse_if_ended()
        advanced: dict[Request, None] = {}
        report = self._link.reports.get()
        while True:
            advanced |= dict.fromkeys(self._take(report))
            try:
                report = self._link.reports.get_nowait()
            except Empty:
                break
        if not advanced:
            self._refuse_if_ended()
        return list(advanced)

    def check(self) -> None:
        """Raise EngineDeadError if the core is gone."""
        if (lost := self._ended or self._link.lost) is not None:
            raise EngineDeadError(str(lost))

    def close(self, deadline: float = CLOSE_SECONDS) -> None:
        """End the core; what is open ends with it."""
        self._link.close(deadline)

    def _refuse_if_ended(self) -> None:
        if self._ended is not None:
            raise EngineDeadError(str(self._ended))

    def _take(self, report: Report) -> list[Request]:
        """Bring the mirrors up to ``report`` and return those that changed."""
        if isinstance(report, Advanced):
            self._stats = report.stats
            return [self._grown(delta) for delta in report.deltas]
        if isinstance(report, Failed):
            self._stats = report.stats
            before = "the engine failed while it served this request"
            return [self._failed(number, report.failure.as_engine_error(before)) for number in report.numbers]
        assert isinstance(report, Ended), "a core starts once"
        with self._opening:
            self._ended = report.error
        return [self._failed(number, EngineDeadError(str(report.error))) for number in tuple(self._open)]

    def _grown(self, delta: Delta) -> Request:
        request = self._open[delta.number]
        request.token_ids += delta.token_ids
        request.num_sampled += len(delta.token_ids)
        request.logprobs += delta.logprobs
        if delta.prompt_logprobs:
            request.prompt_logprobs = list(delta.prompt_logprobs)
        request.num_cached_tokens, request.num_preemptions = delta.num_cached_tokens, delta.num_preemptions
        request.finish_reason, request.stop_reason = delta.finish_reason, delta.stop_reason
        if request.finish_reason is not None:
            del self._open[delta.number]
        return request

    def _failed(self, number: int, error: EngineError) -> Request:
        request = self._open.pop(number)
        request.finish_reason, request.error = "abort", error
        return request


class ThreadLink:
    """A core in a thread of this process. Requests are copied all the same, so that no two threads share one."""

    def __init__(self, config: EngineConfig) -> None:
        self.reports: SimpleQueue[Report] = SimpleQueue()
        self.answers = Answers()
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._lost: EngineDeadError | None = None
        self._thread = threading.Thread(target=self._run, args=(config,), name="hardpoint-core", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def send(self, command: Command) -> None:
        """Queue ``command``."""
        self._commands.put(command)

    @property
    def lost(self) -> EngineDeadError | None:
        """Why the core is gone, where it is."""
        return self._lost

    def close(self, deadline: float = CLOSE_SECONDS) -> None:
        """Let the core close; a step that takes longer than ``deadline`` seconds is left behind, as no thread can be
        ended by force."""
        atexit.unregister(self.close)
        self._commands.put(Stop())
        self._thread.join(deadline)
        if self._thread.is_alive():
            logger.warning("the engine is still busy after %g seconds; its thread ends with this process", deadline)

    def _run(self, config: EngineConfig) -> None:
        reason = "the engine is closed"
        try:
            run_core(config, self._commands, self._take)
        except BaseException as error:
            reason = f"the engine's thread has ended: {type(error).__name__}: {error}; build a new engine"
            raise  # a bug: threading shows its traceback
        finally:
            self._lost = EngineDeadError(reason)
            self.answers.lose(self._lost)
            self.reports.put(Ended(self._lost))

    def _take(self, report: Report | Answer) -> None:
        if isinstance(report, Answer):
            self.answers.take(report)
        else:
            self.reports.put(report)
