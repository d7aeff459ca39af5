"""Running trials so that a crash or a hang of one kernel loses nothing of the report.

Each contribution is tried in a process of its own, several at once where that is asked for or they run on the host;
processes that have nothing left to begin help with the contribution that has most left. Where a process dies or runs
out of time, the case in hand has failed, a new process goes on with the next, and after a few of these the rest of the
contribution's cases is failed unrun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from queue import SimpleQueue
from threading import Condition, Lock
from typing import TYPE_CHECKING, Any, Protocol

from hardpoint.conformance.content import Loaded
from hardpoint.conformance.kit import WHOLE, Order, platforms_for
from hardpoint.conformance.plan import CASE_SECONDS, CoveringArrays, Plan
from hardpoint.conformance.processes import DeathError, Nursery, TrialProcess
from hardpoint.conformance.proof import Asked, Key, asked_of
from hardpoint.conformance.trials import Result
from hardpoint.ops.comparison import Fault
from hardpoint.platforms.host import available_cores
from hardpoint.plugin_host import Offer, PluginSet

if TYPE_CHECKING:
    from hardpoint.conformance.finished_cases import FinishedCases
    from hardpoint.conformance.worker import Bench

START_SECONDS = 300.0
_MOST_DEATHS = 5


@dataclass
class Listing:
    """A contribution's trials, and the claims that they are to prove. ``unfit`` is the one result where there are none.

    ``on_host`` says that they run on the host itself, where several processes may run trials at once. ``arrays`` are
    the covering arrays that the list was made from, which other processes need not make again.
    """

    cases: Sequence[str]
    device: Mapping[str, Any]
    asked: Asked
    unfit: Result | None = None
    on_host: bool = False
    arrays: CoveringArrays = field(default_factory=dict, repr=False)


class Runner(Protocol):
    """Runs the trials of one contribution."""

    offer: Offer

    def list(self) -> Listing:
        """List the contribution's cases."""
        ...

    def run(self, case: str) -> Iterator[Result]:
        """Run one case."""
        ...

    def loaded(self) -> Loaded | None:
        """The part of the plugin's content that the trials so far loaded; None where that is not known."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...

    def stop(self) -> None:
        """End at once what another thread waits for."""
        ...


class InProcess:
    """Runs trials in this process: for debuggers. A crash takes the run down."""

    def __init__(self, plugins: PluginSet, order: Order, offer: Offer, platforms: Sequence[str | None]) -> None:
        self.offer = offer
        self._plugins, self._order, self._platforms = plugins, order, platforms

    @cached_property
    def _bench(self) -> Bench:
        from hardpoint.conformance.worker import Bench

        order = self._order
        return Bench(self._plugins, self.offer, self._platforms, Plan(order.level, order.seed), order.settings)

    def list(self) -> Listing:
        """See Runner."""
        return Listing(self._bench.cases, self._bench.described, self._bench.asked, self._bench.unfit)

    def run(self, case: str) -> Iterator[Result]:
        """See Runner."""
        yield from self._bench.run(case)

    def loaded(self) -> Loaded | None:
        """See Runner. This process may have loaded modules before."""
        return None

    def close(self) -> None:
        """Do nothing: no process runs."""

    def stop(self) -> None:
        """Do nothing: no process runs."""


@dataclass
class _Known:
    """The state that the runners of one contribution share."""

    listing: Listing | None = None
    deaths: int = 0
    lock: Lock = field(default_factory=Lock)
    loaded: Loaded = field(default_factory=Loaded)


@dataclass
class Isolated:
    """Runs trials in a process of its own, which is started when it is first needed, and again after each death.

    Trials run on the first of ``platforms`` that is present; None means the engine's choice.
    ``threads`` are those that the host's part of trials on a device may use in it; None: torch's default. ``finished``
    keeps cases as they finish, and has those of earlier runs, which are not run again.
    """

    nursery: Nursery
    order: Order
    offer: Offer
    platforms: Sequence[str | None]
    seconds: float = CASE_SECONDS
    threads: int | None = None
    finished: FinishedCases | None = None
    _process: TrialProcess | None = None
    _known: _Known = field(default_factory=_Known)

    def another(self) -> Isolated:
        """One more runner of the same contribution: what is known of that, they share."""
        return replace(self, _process=None)

    def list(self) -> Listing:
        """See Runner. A contribution that cannot even be loaded has one case, which has failed."""
        if self._known.listing is None:
            try:
                self._start()
            except DeathError as death:
                asked = asked_of(self.offer.contribution, None)
                self._known.listing = Listing([], {}, asked, self._failed(WHOLE, "load", death))
        assert self._known.listing is not None
        return self._known.listing

    def run(self, case: str) -> Iterator[Result]:
        """See Runner."""
        if self.finished is not None:
            found = self.finished.results_of(self._key, case, self.list().device)
            if found is not None:
                yield from found
                return
        if self._known.deaths >= _MOST_DEATHS:
            fault = DeathError("not-run", f"the process died {_MOST_DEATHS} times before; the rest is not tried")
            yield self._failed(case, "process", fault)
            return
        try:
            process = self._process or self._start()
            results = list[Result]()
            for answer in process.ask(case, self.seconds):
                if "done" in answer:
                    loaded = self._know(answer)
                    if self.finished is not None:
                        self.finished.add(self._key, case, self.list().device, results, loaded)
                    return
                results.append(Result.from_json(answer["result"]))
                yield results[-1]
        except DeathError as death:
            self._known.deaths += 1
            self.close()
            yield self._failed(case, "process", death)

    def loaded(self) -> Loaded | None:
        """See Runner."""
        earlier = self.finished.loaded_by(self._key) if self.finished is not None else Loaded()
        return self._known.loaded | earlier

    def _know(self, answer: Mapping[str, Any]) -> Loaded:
        """Take in what a process says that it has loaded."""
        loaded = Loaded.from_json(answer["loaded"])
        with self._known.lock:  # of several runners' threads
            self._known.loaded |= loaded
        return loaded

    @property
    def _key(self) -> Key:
        c = self.offer.contribution
        return c.family, c.of, c.name

    def close(self) -> None:
        """End the process."""
        if self._process:
            self._process.close()
            self._process = None

    def stop(self) -> None:
        """See Runner."""
        if process := self._process:
            process.kill()

    def _start(self) -> TrialProcess:
        c = self.offer.contribution
        self._process = self.nursery.start(
            {
                "plugin": self.offer.plugin,
                "family": c.family,
                "of": c.of,
                "name": c.name,
                "platforms": self.platforms,
                "level": self.order.level,
                "seed": self.order.seed,
                "settings": self.order.settings,
                "threads": self.threads,
                "arrays": self._known.listing.arrays if self._known.listing else {},
            }
        )
        first = self._process.read(START_SECONDS)
        if "error" in first:
            self.close()
            raise DeathError("load", first["error"])
        self._know(first)
        unfit = Result.from_json(first["unfit"]) if first["unfit"] else None
        if self._known.listing is None:
            asked = Asked.from_json(first["asked"])
            listed = (first["cases"], first["device"], asked, unfit, first["on_host"], first["arrays"])
            self._known.listing = Listing(*listed)
        return self._process

    def _failed(self, case: str, check: str, death: DeathError) -> Result:
        c = self.offer.contribution
        return Result(c.family, c.of, c.name, case, check, "failed", (Fault(death.code, "the process", str(death)),))


def run(
    plugins: PluginSet,
    order: Order,
    *,
    isolated: bool = True,
    seconds: float = CASE_SECONDS,
    jobs: int | None = None,
    finished: FinishedCases | None = None,
) -> Generator[tuple[Runner, Listing, Iterator[Result]]]:
    """Yield each contribution of the order with its listing and its results; closed early, it ends what runs.

    Each result has to be read before the next contribution is asked for. ``jobs`` processes try cases at once: by
    default as many as there are cores where trials run on the host, and one where they run on a device, whose memory is
    measured. Cases that are ``finished`` are not run again; that is for isolated runs. Raises UnknownNameError and the
    plugin's own error before anything is run.
    """
    offers = order.offers(plugins)
    platforms = platforms_for(plugins, offers, order.platform)
    if not isolated:
        yield from _one_by_one([InProcess(plugins, order, offer, platforms) for offer in offers], order)
        return
    with closing(Nursery()) as nursery:
        threads = max(1, available_cores() // jobs) if jobs else None
        runners = [Isolated(nursery, order, offer, platforms, seconds, threads, finished) for offer in offers]
        try:
            if (jobs or _jobs(runners)) == 1:
                yield from _one_by_one(runners, order)
            else:
                yield from _at_once(runners, order, jobs or available_cores())
        finally:
            for runner in runners:  # those that are done are closed
                runner.stop()
                runner.close()


def _jobs(runners: Sequence[Runner]) -> int:
    """How many processes try cases at once, as the first contribution says that can be opened."""
    listings = (runner.list() for runner in runners)
    first = next((listing for listing in listings if listing.device), None)
    return available_cores() if first and first.on_host else 1


def _one_by_one(runners: Sequence[Runner], order: Order) -> Iterator[tuple[Runner, Listing, Iterator[Result]]]:
    number = 0
    for runner in runners:
        listing = runner.list()
        yield runner, listing, _results(runner, listing, order, number)
        runner.close()
        number += len(listing.cases)


def _at_once(
    runners: Sequence[Isolated], order: Order, jobs: int
) -> Iterator[tuple[Runner, Listing, Iterator[Result]]]:
    """Contributions begin in order, by ``jobs`` processes, and what they find is yielded in order."""
    crew = _Crew(runners, order)
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for _ in range(jobs):
                pool.submit(crew.work)
            for task in crew.tasks:
                listing, _ = task.listed.result()
                yield task.first, listing, task.results()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            crew.stop()


class _Task:
    """One contribution: the first runner lists its cases for all that help."""

    def __init__(self, first: Isolated, order: Order, before: _Task | None) -> None:
        self.first, self._order, self._before = first, order, before
        self.listed = Future[tuple[Listing, int]]()
        """Its listing, and how many cases were listed up to its last."""
        self.left: deque[int] = deque()
        """Numbers of the cases that nobody has begun."""
        self.helpers: list[Isolated] = []
        self._cases: Sequence[str] = ()
        self._found: Sequence[SimpleQueue[Result | BaseException | None]] = ()
        """The findings of each case: results and then None, or an error."""

    def list(self) -> None:
        """List it; the contribution before it is listed, or somebody is about to."""
        try:
            listing = self.first.list()
            number = self._before.listed.result()[1] if self._before else 0
            self._cases = list(self._order.cases(listing.cases, number))
            self._found = [SimpleQueue() for _ in self._cases]
            self.left.extend(range(len(self._cases)))
            self.listed.set_result((listing, number + len(listing.cases)))
        except BaseException as error:  # for the threads that wait
            if not self.listed.done():
                self.listed.set_exception(error)

    def run(self, runner: Isolated, number: int) -> None:
        """Run one case."""
        found = self._found[number]
        try:
            for result in runner.run(self._cases[number]):
                found.put(result)
            found.put(None)
        except BaseException as error:  # for the thread that waits
            found.put(error)

    def results(self) -> Iterator[Result]:
        """Its findings, in the order of its cases, as they come."""
        listing, _ = self.listed.result()
        if listing.unfit:
            yield listing.unfit
        for found in self._found:
            while (result := found.get()) is not None:
                if isinstance(result, BaseException):
                    raise result
                yield result


class _Crew:
    """Threads that take contributions in order, each with a process, and then help with what others have begun."""

    def __init__(self, runners: Sequence[Isolated], order: Order) -> None:
        self.tasks: list[_Task] = []
        for runner in runners:
            self.tasks.append(_Task(runner, order, self.tasks[-1] if self.tasks else None))
        self._not_begun = deque(self.tasks)
        self._changed = Condition()
        self._stopped = False

    def work(self) -> None:
        """Do what one thread does, until nothing is left to begin."""
        while took := self._take():
            task, runner = took
            if runner is task.first:
                task.list()
                with self._changed:
                    self._changed.notify_all()
            while (number := self._case_of(task)) is not None:
                task.run(runner, number)
            runner.close()

    def _take(self) -> tuple[_Task, Isolated] | None:
        """A contribution that nobody has begun, or else the one with the most cases left for each process."""
        with self._changed:
            while not self._stopped:
                if self._not_begun:
                    task = self._not_begun.popleft()
                    return task, task.first
                task = max(self.tasks, key=lambda task: len(task.left) / (1 + len(task.helpers)))
                if task.left:
                    task.helpers.append(task.first.another())
                    return task, task.helpers[-1]
                if all(task.listed.done() for task in self.tasks):
                    break
                self._changed.wait()
        return None

    def _case_of(self, task: _Task) -> int | None:
        with self._changed:
            return None if self._stopped or not task.left else task.left.popleft()

    def stop(self) -> None:
        """Kill the process, unless it has ended."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for task in self.tasks:
            task.listed.cancel()
            for runner in (task.first, *task.helpers):
                runner.stop()


def _results(runner: Runner, listing: Listing, order: Order, number: int) -> Iterator[Result]:
    if listing.unfit:
        yield listing.unfit
    for case in order.cases(listing.cases, number):
        yield from runner.run(case)
