"""Running trials so that a crash or a hang of one kernel loses nothing of the report.

Each contribution is tried in a process of its own. Where that dies or runs out of time, the case in hand has failed, a
new process goes on with the next, and after a few of these the rest is failed unrun.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from hardpoint.conformance.kit import Order, platform_for
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.trials import Result
from hardpoint.ops.error_model import Fault
from hardpoint.plugins import Offer, PluginSet

START_SECONDS = 300.0
CASE_SECONDS = 120.0
_MOST_DEATHS = 5
_TAIL = 12
"""Lines of what a process wrote that a report shows once it died."""
_FATAL = ("Fatal Python error", "Timeout (")


@dataclass
class Listing:
    """What a contribution's trials are. ``unfit`` is the one result where there are none."""

    cases: Sequence[str]
    device: Mapping[str, Any]
    unfit: Result | None = None


class Runner(Protocol):
    """Runs the trials of one contribution."""

    offer: Offer

    def list(self) -> Listing:
        """Its cases."""
        ...

    def run(self, case: str) -> Iterator[Result]:
        """Run one case."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


def runner_for(plugins: PluginSet, order: Order, offer: Offer, *, isolated: bool, seconds: float) -> Runner:
    """The runner of one of the order's contributions."""
    platform = platform_for(plugins, order.offers(plugins), order.platform)
    return (Isolated if isolated else InProcess)(plugins, order, offer, platform, seconds)


class InProcess:
    """Runs trials in this process: for debuggers. A crash takes the run down."""

    def __init__(self, plugins: PluginSet, order: Order, offer: Offer, platform: str | None, seconds: float) -> None:
        from hardpoint.conformance.worker import Bench

        self.offer = offer
        self._bench = Bench(plugins, offer, platform, Plan(order.level, order.seed), order.settings)

    def list(self) -> Listing:
        """See Runner."""
        return Listing(self._bench.cases, self._bench.described, self._bench.unfit)

    def run(self, case: str) -> Iterator[Result]:
        """See Runner."""
        yield from self._bench.run(case)

    def close(self) -> None:
        """Nothing to end."""


class _DeathError(Exception):
    """The process died or was killed; the message says how."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Isolated:
    """Runs trials in a process of its own, which is started when it is first needed, and again after each death."""

    plugins: PluginSet
    order: Order
    offer: Offer
    platform: str | None
    seconds: float = CASE_SECONDS
    _process: _Process | None = None
    _listing: Listing | None = None
    _deaths: int = 0

    def list(self) -> Listing:
        """See Runner. A contribution that cannot even be loaded has one case, which has failed."""
        if self._listing is None:
            try:
                self._start()
            except _DeathError as death:
                self._listing = Listing([], {}, self._failed("all", "load", death))
        assert self._listing is not None
        return self._listing

    def run(self, case: str) -> Iterator[Result]:
        """See Runner."""
        if self._deaths >= _MOST_DEATHS:
            fault = _DeathError("not-run", f"the process died {_MOST_DEATHS} times before; the rest is not tried")
            yield self._failed(case, "process", fault)
            return
        try:
            process = self._process or self._start()
            for answer in process.ask(case, self.seconds):
                yield Result.from_json(answer)
        except _DeathError as death:
            self._deaths += 1
            self.close()
            yield self._failed(case, "process", death)

    def close(self) -> None:
        """End the process."""
        if self._process:
            self._process.close()
            self._process = None

    def _start(self) -> _Process:
        c = self.offer.contribution
        self._process = _Process(
            {
                "plugin": self.offer.plugin,
                "family": c.family,
                "of": c.of,
                "name": c.name,
                "platform": self.platform,
                "level": self.order.level,
                "seed": self.order.seed,
                "settings": self.order.settings,
            }
        )
        first = self._process.read(START_SECONDS)
        if "error" in first:
            self.close()
            raise _DeathError("load", first["error"])
        unfit = Result.from_json(first["unfit"]) if first["unfit"] else None
        self._listing = Listing(first["cases"], first["device"], unfit)
        return self._process

    def _failed(self, case: str, check: str, death: _DeathError) -> Result:
        c = self.offer.contribution
        return Result(c.family, c.of, c.name, case, check, "failed", (Fault(death.code, "the process", str(death)),))


class _Process:
    """The other end of ``worker.serve``."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        questions, self._ask = os.pipe()
        self._answers, answers = os.pipe()
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # as long as the process
        code = f"import sys; sys.path[:] = {sys.path!r}; from hardpoint.conformance.worker import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps({**order, "questions": questions, "answers": answers})],
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=(questions, answers),
            start_new_session=True,  # so that what a kernel starts is ended with it
        )
        os.close(questions)
        os.close(answers)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._answers, selectors.EVENT_READ)
        self._buffer = b""

    def ask(self, case: str, seconds: float) -> Iterator[Mapping[str, Any]]:
        """Have one case run; yields its results as plain data. Raises _DeathError."""
        with suppress(BrokenPipeError):  # it died since; reading says how
            os.write(self._ask, (json.dumps({"case": case, "seconds": seconds}) + "\n").encode())
        deadline = time.monotonic() + seconds
        while True:
            answer = self.read(deadline - time.monotonic())
            if "done" in answer:
                return
            yield answer["result"]

    def read(self, seconds: float) -> dict[str, Any]:
        """The next answer. Raises _DeathError where none comes in time, or none will come."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                self._kill()
                raise _DeathError("hang", f"no result within the time limit; it was here:\n{self._tail()}")
            chunk = os.read(self._answers, 1 << 16)
            if not chunk:
                raise _DeathError("crash", f"the process ended ({self._end()}):\n{self._tail()}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process and everything that it started."""
        with suppress(OSError):
            os.close(self._ask)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._kill()
        with suppress(OSError):
            os.close(self._answers)
        self._selector.close()
        self._errors.close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _end(self) -> str:
        code = self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _tail(self) -> str:
        self._errors.seek(0)
        lines = [line for line in self._errors.read().splitlines() if line.strip()]
        # What faulthandler writes begins with the frame that matters and ends with a list of every loaded module.
        fatal = next((i for i, line in enumerate(lines) if line.startswith(_FATAL)), None)
        shown = lines[-_TAIL:] if fatal is None else lines[max(0, fatal - _TAIL // 4) :][:_TAIL]
        return "\n".join(shown)


def run(
    plugins: PluginSet, order: Order, *, isolated: bool = True, seconds: float = CASE_SECONDS
) -> Iterator[tuple[Runner, Listing, Iterator[Result]]]:
    """Yield each contribution of the order with its listing and its results, which are made as they are read.

    Raises UnknownNameError and the plugin's own error before anything is run.
    """
    number = 0
    for offer in order.offers(plugins):
        runner = runner_for(plugins, order, offer, isolated=isolated, seconds=seconds)
        try:
            listing = runner.list()
            yield runner, listing, _results(runner, listing, order, number)
        finally:
            runner.close()
        number += len(listing.cases)


def _results(runner: Runner, listing: Listing, order: Order, number: int) -> Iterator[Result]:
    if listing.unfit:
        yield listing.unfit
    for case in order.cases(listing.cases, number):
        yield from runner.run(case)
