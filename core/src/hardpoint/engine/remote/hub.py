"""One core for several front ends in other processes: each has a connection, over which it is as if it were alone."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import cast

from hardpoint.engine.client import OwnedCore
from hardpoint.engine.processes.calls import Answer, Call, Failure
from hardpoint.engine.processes.child import Outbox, hang_up
from hardpoint.engine.remote.messages import (
    Abort,
    Add,
    Advanced,
    Ended,
    Failed,
    FrontEndCommand,
    Joined,
    Noted,
    Standing,
)
from hardpoint.engine.remote.news import Reported, collect_news
from hardpoint.engine.requests import AdmittedRequest, RequestProgress
from hardpoint_plugin_api import EngineDeadError

logger = logging.getLogger(__name__)

_NUM_CALLERS = 16
"""Control verbs under way at once; each waits for the core in a thread of its own."""
_NOTED_SECONDS = 5.0
"""How long the answer to a control verb waits until every front end knows what it has changed."""
_CLOSE_SECONDS = 2.0
"""How long closing waits for a front end that reads nothing."""


@dataclass(eq=False)
class _FrontEnd:
    """One of several. ``requests`` are its open ones, by its own numbers; ``noted``: the Standing that it knows."""

    connection: Connection
    outbox: Outbox
    noted: int
    requests: dict[int, RequestProgress] = field(default_factory=dict)


@dataclass
class _Owned:
    """The front end of a request, and the part of its progress that was reported there."""

    front_end: _FrontEnd
    reported: Reported


class Hub:
    """Passes requests and control verbs of several front ends to ``core``, and what comes of them back.

    The core's numbers and order are those of requests' arrival here. Failures of the core are recovered from behind
    the hub, and front ends learn of them by Standing; the requests of a front end that goes are aborted. Each front end
    has a thread that always reads and one that writes; one more thread steps the core.
    """

    def __init__(self, core: OwnedCore, when_ended: Callable[[EngineDeadError], None]) -> None:
        """Serve ``core``, which is ready; ``when_ended`` is called in the hub's thread once it is gone for good."""
        self._core, self._when_ended = core, when_ended
        self._changed = threading.Condition()  # of all that follows; held for moments
        self._front_ends: set[_FrontEnd] = set()
        self._owned: dict[RequestProgress, _Owned] = {}
        self._standing = Standing(0, core.facts, core.adapters, core.asleep, core.recovery)
        self._ended: EngineDeadError | None = None
        self._callers = ThreadPoolExecutor(_NUM_CALLERS, thread_name_prefix="hardpoint-hub-calls")
        self._stepping = threading.Thread(target=self._step, name="hardpoint-hub", daemon=True)
        self._stepping.start()

    def join(self, connection: Connection) -> None:
        """Serve one more front end, a SharedCore at the other end of ``connection``, until that is closed."""
        with self._changed:
            outbox = Outbox(connection, "hardpoint-hub-writer")
            front_end = _FrontEnd(connection, outbox, self._standing.number)
            outbox.put(Joined(self._standing, self._core.stats, self._core.draw_seed()))
            if self._ended is not None:
                outbox.put(Ended(self._ended))
            self._front_ends.add(front_end)
        threading.Thread(target=self._listen, args=(front_end,), name="hardpoint-hub-reader", daemon=True).start()

    def close(self) -> None:
        """End the core; front ends that are still there see it gone."""
        self._core.close()
        self._stepping.join()
        self._callers.shutdown(wait=False)
        with self._changed:
            left = tuple(self._front_ends)
        for front_end in left:
            front_end.outbox.close(_CLOSE_SECONDS)
            hang_up(front_end.connection)

    def _step(self) -> None:
        try:
            while True:
                self._report(self._core.step())
                self._publish()
        except EngineDeadError as error:
            ended = error
        except Exception as error:
            logger.exception("requests can no longer be passed on")
            ended = EngineDeadError(f"requests can no longer be passed on: {type(error).__name__}: {error}")
        self._publish()
        with self._changed:
            self._ended = ended
            for front_end in self._front_ends:
                front_end.outbox.put(Ended(ended))
        self._when_ended(ended)

    def _report(self, advanced: Sequence[RequestProgress]) -> None:
        """Tell each front end what is new of its requests."""
        grown: dict[_FrontEnd, list[Reported]] = {}
        stats = self._core.stats
        with self._changed:
            for request in advanced:
                owned = self._owned.get(request)
                if owned is None:  # its front end is gone
                    continue
                if request.finish_reason is not None:
                    del self._owned[request], owned.front_end.requests[owned.reported.number]
                if request.error is not None:
                    owned.front_end.outbox.put(Failed((owned.reported.number,), Failure.of(request.error), stats))
                else:
                    grown.setdefault(owned.front_end, []).append(owned.reported)
        for front_end, own in grown.items():
            front_end.outbox.put(Advanced(collect_news(own), stats))

    def _publish(self) -> int:
        """Tell every front end how the core is, if that has changed; returns the number of the newest Standing."""
        core = self._core
        with self._changed:
            known = self._standing
            now = (core.facts, core.adapters, core.asleep, core.recovery)
            if now[0] is not known.facts or now[1:] != (known.adapters, known.asleep, known.recovery):
                self._standing = Standing(known.number + 1, *now)
                for front_end in self._front_ends:
                    front_end.outbox.put(self._standing)
            return self._standing.number

    def _listen(self, front_end: _FrontEnd) -> None:
        """Do what a front end says, until it is gone; then end its requests."""
        try:
            while True:
                self._take(front_end, pickle.loads(front_end.connection.recv_bytes()))
        except (EOFError, OSError):
            pass
        with self._changed:
            self._front_ends.discard(front_end)
            self._changed.notify_all()
            left = tuple(front_end.requests.values())
            for request in left:
                del self._owned[request]
        if left:
            logger.info("a front end is gone: %d requests are aborted", len(left))
        for request in left:
            self._core.abort(request)
        front_end.outbox.close(_CLOSE_SECONDS)
        front_end.connection.close()

    def _take(self, front_end: _FrontEnd, command: FrontEndCommand) -> None:
        if isinstance(command, Add):
            self._add(front_end, command)
        elif isinstance(command, Abort):
            request = front_end.requests.get(command.number)
            if request is not None:  # else it has ended, and that was reported
                self._core.abort(request)
        elif isinstance(command, Noted):
            with self._changed:
                front_end.noted = command.number
                self._changed.notify_all()
        else:
            self._callers.submit(self._call, front_end, command)

    def _add(self, front_end: _FrontEnd, command: Add) -> None:
        try:
            asked: AdmittedRequest = pickle.loads(command.asked)
            with self._changed:  # before the core can report it
                request = self._core.adopt(asked)
                self._owned[request] = _Owned(front_end, Reported(request, command.number, request.num_prompt_tokens))
                front_end.requests[command.number] = request
        except Exception as error:
            front_end.outbox.put(Failed((command.number,), Failure.of(error), self._core.stats))

    def _call(self, front_end: _FrontEnd, call: Call) -> None:
        try:
            answer = Answer(call.number, cast(object, self._core.control(call.verb)))
        except Exception as error:
            answer = Answer(call.number, failure=Failure.of(error))
        self._wait_until_noted(self._publish())
        front_end.outbox.put(answer)

    def _wait_until_noted(self, number: int) -> None:
        """Wait until every front end knows the Standing of that number: a client's next request may reach any."""
        with self._changed:
            self._changed.wait_for(lambda: all(each.noted >= number for each in self._front_ends), _NOTED_SECONDS)
