"""The front end's side of a core that runs elsewhere: its requests, mirrored, and the link they travel by."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol, Unpack

from hardpoint.config import EngineConfig
from hardpoint.engine.client import CoreFacts, EngineStats, RequestOptions
from hardpoint.engine.lora import Adapter
from hardpoint.engine.processes.calls import Answer, Answers, Failure, Stop
from hardpoint.engine.remote.core_loop import run_core
from hardpoint.engine.remote.messages import (
    Abort,
    Add,
    Advanced,
    Command,
    Ended,
    Failed,
    Ready,
    Report,
    StartFailed,
)
from hardpoint.engine.remote.news import News
from hardpoint.engine.remote.quarantine import Quarantine
from hardpoint.engine.remote.recovery import Recovery, RecoveryState, is_final
from hardpoint.engine.remote.remote_control import RemoteControl
from hardpoint.engine.requests import AdmittedRequest, RequestProgress
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.engine.scheduling.admission import Admission
from hardpoint.plugin_host.culprits import Suspect
from hardpoint_plugin_api import EngineDeadError, EngineError, HardpointError, MemoryTag, RequestError

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""How long a core may take to close before it is left, or killed, as it is."""
_FAILED_CLOSE_SECONDS = 2.0
"""The same for one that has failed: requests wait for the next."""
_RANKS_FIRST_SECONDS = 5.0
"""By how much longer a core with ranks may be silent: it watches them itself, and says more."""


class Link(Protocol):
    """A way to a core. ``reports`` ends with Ended, whatever became of the core."""

    reports: SimpleQueue[Report]
    answers: Answers

    def send(self, command: Command) -> None:
        """Pass ``command`` on, in order; never waits. A command after the core's end is dropped."""
        ...

    @property
    def lost(self) -> EngineDeadError | None:
        """The reason why the core is gone; None while it runs."""
        ...

    def give_up(self, reason: str) -> None:
        """The core does not answer: end it, where that can be done, and end ``reports`` with ``reason``."""
        ...

    def close(self, deadline: float = CLOSE_SECONDS) -> None:
        """End the core, by force where it does not end within ``deadline`` seconds. Closing twice is once."""
        ...


class RemoteCore(RemoteControl):
    """A CoreClient for a core behind a link, which ``start_link`` makes, and makes again where the config says so.

    A request is admitted here and grows here, in ``step``, as reports come; the core has its own copy. One thread at a
    time calls ``step``; everything else may be called from any thread, and waits for nothing but a call's answer.

    With ``on_engine_failure = "restart"`` nothing is lost with a core: each open request is given to the next one as it
    is here, and goes on from its tokens as after a preemption; one that engines fail with is found out, see Quarantine.
    ``step`` sees to all of it.
    """

    _link: Link

    def __init__(self, start_link: Callable[[EngineConfig], Link], config: EngineConfig) -> None:
        self._start_link, self._recovery = start_link, Recovery(config)
        self._link = start_link(config)
        self._open: dict[int, RequestProgress] = {}
        self._quarantine = Quarantine()
        self._aborted: list[RequestProgress] = []  # while no core could be told
        self._opening = threading.Lock()
        self._lost_adapters: dict[str, str] = {}
        self._ended: EngineDeadError | None = None
        self._restarting: str | None = None
        self._closed = False
        self._facts: CoreFacts | None = None
        self._suspects: tuple[Suspect, ...] = ()
        self._stats = EngineStats()
        self._heard = time.monotonic()
        self._finalizer = self._end_with_this()

    def _end_with_this(self) -> weakref.finalize[..., RemoteCore]:
        finalizer = weakref.finalize(self, self._link.close)
        finalizer.atexit = False  # the link itself sees to that
        return finalizer

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until the core is loaded. Raises what its start raised; EngineDeadError, after ``timeout`` seconds too.

        Must be called once, before everything but ``close``.
        """
        try:
            more = _RANKS_FIRST_SECONDS if self._recovery.config.topology.world > 1 else 0.0
            report = self._link.reports.get(timeout=None if timeout is None else timeout + more)
        except Empty:
            self._link.give_up(
                f"the engine was not ready within {timeout:g} seconds (if it was still loading, raise "
                "--core-start-timeout)"
            )
            while not isinstance(report := self._link.reports.get(), Ended):
                pass
            self._link.close(0)
        if isinstance(report, StartFailed):
            self._link.close()
            raise report.failure.original()
        if isinstance(report, Ended):
            raise report.error
        assert isinstance(report, Ready), "a core's first report says how its start went"
        self._facts, self._stats, self._suspects = report.facts, report.stats, report.suspects
        self._recovery.adopt(report.facts.denied)
        self._admission = Admission(report.facts.max_model_len, report.facts.vocab_size, report.facts.config.seed)
        self._admission.adapters = report.facts.adapters
        self._recovery.note_adapters_loaded()

    @property
    def facts(self) -> CoreFacts:
        """The facts that hold as long as the core lives."""
        assert self._facts is not None, "the core is not ready"
        return self._facts

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The LoRA adapters that are loaded."""
        return self._admission.adapters

    @property
    def asleep(self) -> frozenset[MemoryTag]:
        """The memory that is given back."""
        return self._admission.asleep

    @property
    def is_sleeping(self) -> bool:
        """True while memory that requests need is given back."""
        return bool(self.asleep)

    @property
    def stats(self) -> EngineStats:
        """The core's counters at its last report."""
        return self._stats

    def add_request(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        *,
        bad_words: Sequence[Sequence[int]] = (),
        **options: Unpack[RequestOptions],
    ) -> RequestProgress:
        """Queue a request for one completion; see CoreClient.

        A CapacityError is the request's ``error`` later; the facts rule it out for cores that size their cache.
        """
        return self._queue(
            self._admission.admit(prompt_token_ids, params, eos_token_ids, bad_words=bad_words, **options)
        )

    def adopt(self, asked: AdmittedRequest) -> RequestProgress:
        """Queue a request that another front end admitted, under a number of this one. Raises EngineDeadError."""
        return self._queue(self._admission.renumbered(asked))

    def _queue(self, asked: AdmittedRequest) -> RequestProgress:
        request = RequestProgress(asked)
        add = Add.of(asked)
        with self._opening:
            self._refuse_if_ended()
            if not self._open:
                self._heard = time.monotonic()
            self._open[request.number] = request
            if self._restarting is None:
                self._link.send(add)
        return request

    def draw_seed(self) -> int:
        """A seed for a request that gives none; the engine's own seed makes the sequence of them repeatable."""
        return self._admission.draw_seed()

    def abort(self, request: RequestProgress) -> None:
        """Have ``request`` ended; ``step`` reports it when it is."""
        with self._opening:
            if request.number not in self._open:
                return
            if self._restarting is None and not self._quarantine.holds(request.number):
                self._link.send(Abort(request.number))
            else:  # there is no core that could report it: wake the thread that steps
                self._aborted.append(request)
                self._link.reports.put(Advanced(News(), self._stats))

    def step(self) -> list[RequestProgress]:
        """Wait for reports and return the requests that got a token or ended; see CoreClient."""
        self._refuse_if_ended()
        advanced: dict[RequestProgress, None] = {}
        report = self._next_report()
        while True:
            self._heard = time.monotonic()
            advanced |= dict.fromkeys(self._take(report))
            if self._aborted:
                advanced |= dict.fromkeys(self._take_aborted())
            try:
                report = self._link.reports.get_nowait()
            except Empty:
                break
        if not advanced:
            self._refuse_if_ended()
        return list(advanced)

    def check(self) -> None:
        """Raise EngineDeadError if the core is gone."""
        self._refuse_if_ended()
        if (lost := self._link.lost) is not None and not self._goes_on():
            raise EngineDeadError(str(lost))

    @property
    def recovery(self) -> RecoveryState:
        """The failures so far, how they ended, and whether one is being recovered from."""
        known, restarting = self._recovery, self._restarting
        if restarting is None and self._ended is None and (lost := self._link.lost) is not None and self._goes_on():
            restarting = str(lost)
        return RecoveryState(known.num_restarts, restarting, known.last_cause, known.denied, known.config.blame_ops)

    def _goes_on(self) -> bool:
        """Whether a core that is lost now is followed by another."""
        return self._restarting is not None or (not self._closed and self._recovery.may_restart())

    def close(self, deadline: float = CLOSE_SECONDS) -> None:
        """End the core; open requests end with it."""
        with self._opening:
            self._closed = True
            link = self._link
        link.close(deadline)

    def _refuse_if_ended(self) -> None:
        if self._ended is not None:
            raise EngineDeadError(str(self._ended))

    def _next_report(self) -> Report:
        """Wait for it; a core that owes one for too long is given up."""
        while True:
            silent = time.monotonic() - self._heard
            limit, flag = self._patience()
            owes = bool(self._open) or self._restarting is not None
            try:
                return self._link.reports.get(timeout=max(0.01, limit - silent) if owes else limit)
            except Empty:
                overdue = time.monotonic() - self._heard >= limit
                if overdue and (self._restarting is not None or (self._open and owes)):
                    self._heard = time.monotonic()
                    what = "a step of the engine did not end" if self._restarting is None else "it was not ready"
                    self._link.give_up(f"{what} within {limit:g} seconds ({flag})")

    def _patience(self) -> tuple[float, str]:
        """For how many seconds a core that has something to do may be silent, and the flag that says so."""
        if self._restarting is not None or self._link.answers.are_due:
            return self._answer_seconds, "--core-start-timeout"
        return self._recovery.config.step_timeout + self._extra_seconds, "--step-timeout"

    @property
    def _answer_seconds(self) -> float:
        """See RemoteControl."""
        return self._recovery.config.core_start_timeout + self._extra_seconds

    @property
    def _extra_seconds(self) -> float:
        """How much longer ranks have, which find their own failures first."""
        return _RANKS_FIRST_SECONDS if self._recovery.config.topology.world > 1 else 0.0

    def _take(self, report: Report) -> list[RequestProgress]:
        """Bring the mirrors up to ``report`` and return those that changed."""
        if isinstance(report, Advanced):
            self._stats = report.stats
            changed = report.news.apply(self._open)
            self._clear(request.number for request in changed)
            return changed
        if isinstance(report, Failed):
            self._stats = report.stats
            if report.in_step and self._goes_on():
                return self._restart(report.failure.text, report.failure.trace)
            return [self._failed(number, self._told(number, report.failure)) for number in report.numbers]
        if isinstance(report, Ready):
            return self._readmit(report)
        if isinstance(report, StartFailed):
            error = report.failure.original()
            if is_final(error):
                return self._end(f"the engine failed, and cannot be built again: {error}")
            return self._restart_or_end(f"the engine could not be built again: {report.failure.text}", "")
        return self._restart_or_end(str(report.error), report.stack)

    def _restart_or_end(self, cause: str, stack: str) -> list[RequestProgress]:
        if self._closed or not self._recovery.may_restart():
            return self._end(cause if self._closed else self._recovery.verdict(cause))
        return self._restart(cause, stack)

    def _end(self, why: str) -> list[RequestProgress]:
        """Nothing follows: every open request gets ``why``."""
        with self._opening:
            self._ended, self._restarting = EngineDeadError(why), None
        return [self._failed(number, EngineDeadError(why)) for number in tuple(self._open)]

    def _restart(self, cause: str, stack: str) -> list[RequestProgress]:
        """Start another core in place of one that has failed; its first report says how that went.

        Returns the request that is to blame, where one is, and all where nothing can follow.
        """
        with self._opening:
            served, self._restarting = self._restarting is None, cause
        began_here = self._began_here(cause)
        is_kernels_fault = self._recovery.learn(cause, stack if began_here else "", self._suspects)
        blamed = self._blame(cause) if served and began_here and not is_kernels_fault else []
        logger.error("the engine is built again, and %d requests go on then: %s", len(self._open), cause)
        try:
            self._link.close(_FAILED_CLOSE_SECONDS)
            link = self._start_link(self._recovery.config)
        except (HardpointError, OSError) as error:
            return blamed + self._end(f"the engine failed, and no other can be started: {error}")
        except BaseException:  # an interrupt
            self._end(f"building it again was interrupted, after {cause}")
            raise
        self._repeat_calls(link)
        with self._opening:
            self._link, closed = link, self._closed
            self._finalizer.detach()
            self._finalizer = self._end_with_this()
        if closed:
            link.close(0)
            return blamed + self._end("the engine is closed")
        return blamed

    def _began_here(self, cause: str) -> bool:
        """Whether the core failed by itself, so that one of its kernels or requests may be at fault."""
        return True

    def _blame(self, cause: str) -> list[RequestProgress]:
        """End the request that a core failed with while no other was in doubt, if there was one."""
        with self._opening:
            number = self._quarantine.learn(self._open)
        if number is None:
            return []
        said = f"engines failed with this request again and again, the last time while no other was in doubt: {cause}"
        logger.error("request %d is ended: %s", number, said)
        return [self._failed(number, EngineError(said))]

    def _readmit(self, ready: Ready) -> list[RequestProgress]:
        """Give the new core every request from its tokens so far, behind the calls that were repeated."""
        self._facts, self._stats, self._suspects = ready.facts, ready.stats, ready.suspects
        self._recovery.adopt(ready.facts.denied)
        self._admission.max_model_len = ready.facts.max_model_len
        aborted = self._take_aborted()
        with self._opening:
            for number in self._quarantine.admit(self._open):
                self._send_again(number)
            self._restarting = None
        logger.warning(
            "the engine is there again (restart %d), and %d requests go on",
            self._recovery.num_restarts,
            len(self._open),
        )
        return aborted

    def _take_aborted(self) -> list[RequestProgress]:
        """End the requests that were aborted while no core ran."""
        ended = []
        with self._opening:
            for request in self._aborted:
                if self._restarting is None and not self._quarantine.holds(request.number):
                    self._link.send(Abort(request.number))  # a core has it since
                elif self._open.pop(request.number, None):
                    request.finish_reason = "abort"
                    ended.append(request)
            self._aborted.clear()
        self._clear(request.number for request in ended)
        return ended

    def _clear(self, numbers: Iterable[int]) -> None:
        """These got a token, or ended: give the core what waited for that."""
        if self._quarantine.is_empty:  # as it is at each token, unless a core has failed
            return
        with self._opening:
            for following in [self._quarantine.clear(number) for number in numbers]:
                if following in self._open and self._restarting is None:
                    self._send_again(following)

    def _send_again(self, number: int) -> None:
        request = self._open[number]
        self._link.send(Add.of(request.asked, request.since(request.num_prompt_tokens)))

    def _failed(self, number: int, error: HardpointError) -> RequestProgress:
        request = self._open.pop(number)
        request.finish_reason, request.error = "abort", error
        self._clear([number])
        return request

    def _told(self, number: int, failure: Failure) -> HardpointError:
        """The error of a request: its own fault as it is, any other as the engine's failure."""
        error = failure.original()
        if (lost := self._lost_adapters.get(self._open[number].asked.adapter_name)) is not None:
            return EngineError(lost)
        if isinstance(error, RequestError):
            return error
        return failure.as_engine_error("the engine failed while it served this request")


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
        """The reason why the core is gone; None while it runs."""
        return self._lost

    def give_up(self, reason: str) -> None:
        """Leave the thread behind: none can be ended by force."""
        self._lost = EngineDeadError(f"{reason}; its thread goes on until this process ends")
        self.answers.lose(self._lost)
        self.reports.put(Ended(self._lost))

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
