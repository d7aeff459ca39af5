"""A core that serves a front end elsewhere: commands in, reports out, one step after the other.

Importing this imports no torch, so that a process can say what went wrong when it cannot be imported.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from hardpoint.config import EngineConfig
from hardpoint.engine.processes.calls import Answer, Call, Failure, Stop
from hardpoint.engine.remote.messages import (
    Abort,
    Add,
    Advanced,
    Command,
    Ended,
    Failed,
    Prepared,
    Ready,
    Report,
    StartFailed,
    Wake,
)
from hardpoint.engine.remote.news import Reported, collect_news
from hardpoint.engine.remote.preparations import Preparations
from hardpoint.engine.requests import AdmittedRequest, RequestProgress
from hardpoint.engine.scheduling.request import Request
from hardpoint_plugin_api import EngineDeadError

if TYPE_CHECKING:
    from hardpoint.engine.core import EngineCore

logger = logging.getLogger(__name__)

_REST_SECONDS = 0.05
"""So long after its last step an idle core does what its start left for later. A client that sends its next request
upon an answer is sooner."""
_SILENT_SECONDS = 0.5
"""After so long a report without news says that steps are taken."""


def run_core(config: EngineConfig, commands: SimpleQueue[Command], send: Callable[[Report | Answer], None]) -> None:
    """Build a core, say that it is ready or why not, and serve ``commands`` until they say stop."""
    try:
        from hardpoint.engine.blueprint import draw, suspects
        from hardpoint.engine.core import EngineCore

        if config.rendezvous is not None:
            from hardpoint.engine.remote.server_starts import join_start

            config = join_start(config, partial(_leave, send))
        core = EngineCore.start(draw(config))
        serving = suspects(core.blueprint) if config.restarts_engine else ()
    except Exception as error:
        send(StartFailed(Failure.of(error)))
        return
    try:
        send(Ready(core.facts, replace(core.stats), serving))
        core.when_lost(lambda: commands.put(Wake()))
        CoreLoop(core, commands, send).run()
    except EngineDeadError as error:
        logger.error("the engine ends: %s", error)
        send(Ended(error, "\n".join(getattr(error, "__notes__", ()))))
    finally:
        core.close()


def _leave(send: Callable[[Report | Answer], None], error: EngineDeadError) -> None:
    """End this process, whatever its other threads wait for."""
    logger.error("the engine ends: %s", error)
    send(Ended(error))
    os._exit(1)


class CoreLoop:
    """Takes what commands there are, waits for one only while the core is idle, steps, and reports what came of it.

    ``commands`` are put there by another thread.
    """

    def __init__(
        self, core: EngineCore, commands: SimpleQueue[Command], send: Callable[[Report | Answer], None]
    ) -> None:
        self._core, self._commands, self._send = core, commands, send
        self._open: dict[int, Reported] = {}
        self._preparations = Preparations(core.make_ready, commands.put)
        self._reported = self._stepped = time.monotonic()

    def run(self) -> None:
        """Serve until Stop comes. Raises EngineDeadError where what runs the steps is gone."""
        try:
            self._run()
        finally:
            self._preparations.close()

    def _run(self) -> None:
        while True:
            for command in self._taken():
                if isinstance(command, Stop):
                    return
                if isinstance(command, Wake):
                    self._core.check()
                    continue
                if isinstance(command, Call):
                    self._call(command)
                elif isinstance(command, Add):
                    self._add(command)
                elif isinstance(command, Prepared):
                    self._queue_prepared(command)
                else:
                    self._abort(command)
            if not self._core.is_idle:
                self._step()

    def _taken(self) -> Iterator[Command]:
        """Every command that is there; at least one where there is nothing else to do."""
        if self._core.is_idle:
            yield self._awaited()
        while True:
            try:
                yield self._commands.get_nowait()
            except Empty:
                return

    def _awaited(self) -> Command:
        """The next command. Until it comes, the core does what its start left for later, a little at a time."""
        while self._core.wants_idle_time:
            with suppress(Empty):
                return self._commands.get(timeout=max(0.0, self._stepped + _REST_SECONDS - time.monotonic()))
            self._core.use_idle_time()
        return self._commands.get()

    def _add(self, command: Add) -> None:
        try:
            asked: AdmittedRequest = pickle.loads(command.asked)
            request = Request(asked)
            if command.so_far is not None:
                request.take(command.so_far)
            if self._core.needs_preparation(request):
                self._preparations.start(request)
                return
        except Exception as error:
            self._fail((command.number,), error)
        else:
            self._queue(request)

    def _queue_prepared(self, command: Prepared) -> None:
        request = self._preparations.take(command.number)
        if request is None:  # aborted meanwhile
            return
        if command.error is not None:
            self._fail((command.number,), command.error)
        else:
            self._queue(request)

    def _queue(self, request: Request) -> None:
        num_known = len(request.token_ids)
        try:
            self._core.queue(request)
        except Exception as error:
            self._fail((request.number,), error)
        else:
            self._open[request.number] = Reported(request, request.number, num_known)

    def _call(self, command: Call) -> None:
        try:
            answer = Answer(command.number, self._core.control(command.verb))
        except Exception as error:
            answer = Answer(command.number, failure=Failure.of(error))
        self._send(answer)

    def _abort(self, command: Abort) -> None:
        if (preparing := self._preparations.take(command.number)) is not None:
            preparing.finish_reason = "abort"
            self._open[command.number] = Reported(preparing, command.number, len(preparing.token_ids))
            self._report([preparing])
        elif command.number in self._open:  # else it has ended, and that was reported
            request = self._open[command.number].request
            self._core.abort(request)
            self._report([request])

    def _step(self) -> None:
        try:
            advanced = self._core.step()
            self._stepped = time.monotonic()
        except EngineDeadError:
            raise
        except Exception as error:
            logger.exception("a step failed; the %d requests that were open are ended", len(self._open))
            numbers = tuple(self._open)
            self._open.clear()
            self._fail(numbers, error, in_step=True)
        else:
            if advanced or time.monotonic() > self._reported + _SILENT_SECONDS:  # a long prompt takes many steps
                self._report([request for request in advanced if request.error is None])
            for request in advanced:
                if request.error is not None:
                    del self._open[request.number]
                    self._fail((request.number,), request.error)

    def _report(self, advanced: Sequence[RequestProgress]) -> None:
        """Report the news of these requests, and forget those that have ended."""
        self._reported = time.monotonic()
        open_ones = self._open
        news = collect_news([open_ones[request.number] for request in advanced])
        self._send(Advanced(news, replace(self._core.stats)))
        for delta in news.deltas:
            if delta.finish_reason is not None:
                del open_ones[delta.number]

    def _fail(self, numbers: tuple[int, ...], error: Exception, in_step: bool = False) -> None:
        self._send(Failed(numbers, Failure.of(error), replace(self._core.stats), in_step))
