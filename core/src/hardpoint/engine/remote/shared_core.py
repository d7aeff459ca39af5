"""A core that serves several front ends, as one of them sees it: the other side of a Hub."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Unpack, cast

from hardpoint.engine.client import CoreFacts, EngineStats, RequestOptions
from hardpoint.engine.control import R, Verb
from hardpoint.engine.lora import Adapter
from hardpoint.engine.processes.calls import Answer, Answers, Call
from hardpoint.engine.processes.child import Outbox, hang_up
from hardpoint.engine.remote.core_process import CLOSED
from hardpoint.engine.remote.messages import (
    Abort,
    Add,
    Advanced,
    Ended,
    Failed,
    HubReport,
    Joined,
    Noted,
    Standing,
)
from hardpoint.engine.remote.recovery import RecoveryState
from hardpoint.engine.remote.remote_control import check_travels
from hardpoint.engine.requests import RequestProgress
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.engine.scheduling.admission import Admission
from hardpoint_plugin_api import EngineDeadError, EngineError, HardpointError

_GONE = "the process that shares the engine is gone"


class SharedCore:
    """A ServedCore over ``connection``, at whose other end a Hub is.

    A request is admitted here and grows here, in ``step``. One thread at a time calls ``step``; everything else may be
    called from any thread, and waits for nothing but a call's answer.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outbox = Outbox(connection, "hardpoint-hub-writer")
        self._answers = Answers()
        self._reports: SimpleQueue[Advanced | Failed | Ended] = SimpleQueue()
        self._open: dict[int, RequestProgress] = {}
        self._opening = threading.Lock()
        self._stats = EngineStats()
        self._lost: EngineDeadError | None = None
        self._ended: EngineDeadError | None = None
        self._admission: Admission | None = None
        self._standing: Standing | None = None
        self._told = threading.Event()
        self._reader = threading.Thread(target=self._read, name="hardpoint-hub-reader", daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> None:
        """Wait until the core is loaded. Raises EngineDeadError. Must be called before everything but ``close``."""
        self._told.wait()
        if self._standing is None:
            assert self._lost is not None
            raise EngineDeadError(str(self._lost))

    @property
    def facts(self) -> CoreFacts:
        """The facts that hold as long as the core lives."""
        return self._now.facts

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The LoRA adapters that are loaded."""
        return self._now.adapters

    @property
    def is_sleeping(self) -> bool:
        """True while memory that requests need is given back."""
        return bool(self._now.asleep)

    @property
    def recovery(self) -> RecoveryState:
        """The core's failures so far, how they ended, and whether one is being recovered from."""
        return self._now.recovery

    @property
    def stats(self) -> EngineStats:
        """The core's counters at its last report."""
        return self._stats

    @property
    def _now(self) -> Standing:
        assert self._standing is not None, "the core is not ready"
        return self._standing

    @property
    def _lets_in(self) -> Admission:
        assert self._admission is not None, "the core is not ready"
        return self._admission

    def add_request(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        *,
        bad_words: Sequence[Sequence[int]] = (),
        **options: Unpack[RequestOptions],
    ) -> RequestProgress:
        """Queue a request for one completion; see RemoteCore.add_request."""
        asked = self._lets_in.admit(prompt_token_ids, params, eos_token_ids, bad_words=bad_words, **options)
        request = RequestProgress(asked)
        add = Add.of(asked)
        with self._opening:
            self.check()
            self._open[request.number] = request
            self._outbox.put(add)
        return request

    def draw_seed(self) -> int:
        """A seed for a request that gives none."""
        return self._lets_in.draw_seed()

    def abort(self, request: RequestProgress) -> None:
        """Have ``request`` ended; ``step`` reports it when it is."""
        with self._opening:
            if request.number in self._open:
                self._outbox.put(Abort(request.number))

    def step(self) -> list[RequestProgress]:
        """Wait for reports and return the requests that got a token or ended; see CoreClient."""
        advanced: dict[RequestProgress, None] = {}
        if self._ended is not None:
            raise EngineDeadError(str(self._ended))
        report = self._reports.get()
        while True:
            advanced |= dict.fromkeys(self._take(report))
            try:
                report = self._reports.get_nowait()
            except Empty:
                break
        if not advanced and self._ended is not None:
            raise EngineDeadError(str(self._ended))
        return list(advanced)

    def check(self) -> None:
        """Raise EngineDeadError if the core is gone for good."""
        if self._lost is not None:
            raise EngineDeadError(str(self._lost))

    def control(self, verb: Verb[R]) -> R:
        """Have the core do ``verb``; see CoreControl. All front ends know of it before it returns."""
        check_travels(verb)
        number, future = self._answers.expect()
        self._outbox.put(Call(number, verb))
        return cast(R, future.result())

    def close(self) -> None:
        """Leave the core, which aborts what is open. Closing twice is once."""
        self._outbox.close(0)
        self._lose(EngineDeadError(CLOSED))
        if self._reader.is_alive():
            hang_up(self._connection)
            self._reader.join()

    def _read(self) -> None:
        try:
            while True:
                self._receive(pickle.loads(self._connection.recv_bytes()))
        except (EOFError, OSError):
            self._lose(EngineDeadError(_GONE))
        self._connection.close()

    def _receive(self, report: HubReport) -> None:
        if isinstance(report, Answer):
            self._answers.take(report)
        elif isinstance(report, Standing):
            self._stand(report)
            self._outbox.put(Noted(report.number))
        elif isinstance(report, Joined):
            facts = report.standing.facts
            self._admission = Admission(facts.max_model_len, facts.vocab_size, report.seed)
            self._stats = report.stats
            self._stand(report.standing)
            self._told.set()
        elif isinstance(report, Ended):
            self._lose(report.error)
        else:
            self._reports.put(report)

    def _stand(self, standing: Standing) -> None:
        admission = self._lets_in
        admission.max_model_len = standing.facts.max_model_len
        admission.adapters, admission.asleep = standing.adapters, standing.asleep
        self._standing = standing

    def _lose(self, error: EngineDeadError) -> None:
        """Nothing more will come of the core. The first reason stands."""
        with self._opening:
            if self._lost is not None:
                return
            self._lost = error
        self._answers.lose(error)
        self._reports.put(Ended(error))
        self._told.set()

    def _take(self, report: Advanced | Failed | Ended) -> list[RequestProgress]:
        """Bring the requests up to ``report`` and return those that changed."""
        if isinstance(report, Ended):
            self._ended = report.error
            return [self._failed(number, report.error) for number in tuple(self._open)]
        self._stats = report.stats
        if isinstance(report, Failed):
            error = report.failure.original()
            known = error if isinstance(error, HardpointError) else EngineError(report.failure.text)
            return [self._failed(number, known) for number in report.numbers]
        return report.news.apply(self._open)

    def _failed(self, number: int, error: HardpointError) -> RequestProgress:
        request = self._open.pop(number)
        request.finish_reason, request.error = "abort", error
        return request
