"""Running trials so that a crash or a hang of one kernel loses nothing of the report.

Each contribution is tried in a process of its own, several at once where they run on the host, or in parts where there
may be more processes than contributions. Where a process dies or runs out of time, the case in hand has failed, a new
process goes on with the next, and after a few of these the rest of its cases is failed unrun.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from hardpoint.conformance.kit import Order, platform_for
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.processes import DeathError, Nursery, TrialProcess
from hardpoint.conformance.trials import Result
from hardpoint.ops.error_model import Fault
from hardpoint.platforms.host import available_cores
from hardpoint.plugins import Offer, PluginSet

if TYPE_CHECKING:
    from hardpoint.conformance.worker import Bench

START_SECONDS = 300.0
CASE_SECONDS = 120.0
_MOST_DEATHS = 5
_PARTS_PER_JOB = 2


@dataclass
class Listing:
    """What a contribution's trials are. ``unfit`` is the one result where there are none.

    ``on_host`` says that they run on the host itself, where several processes may run trials at once.
    """

    cases: Sequence[str]
    device: Mapping[str, Any]
    unfit: Result | None = None
    on_host: bool = False


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

    def stop(self) -> None:
        """End at once what another thread waits for."""
        ...


def runner_for(
    plugins: PluginSet,
    order: Order,
    offer: Offer,
    *,
    seconds: float,
    nursery: Nursery | None = None,
    threads: int | None = None,
) -> Runner:
    """The runner of one of the order's contributions: in a process from ``nursery``, without one in this process.

    ``threads`` are those that the host's part of trials on a device may use in such a process; None: torch's default.
    """
    platform = platform_for(plugins, order.offers(plugins), order.platform)
    if nursery is None:
        return InProcess(plugins, order, offer, platform)
    return Isolated(nursery, order, offer, platform, seconds, threads)


class InProcess:
    """Runs trials in this process: for debuggers. A crash takes the run down."""

    def __init__(self, plugins: PluginSet, order: Order, offer: Offer, platform: str | None) -> None:
        self.offer = offer
        self._plugins, self._order, self._platform = plugins, order, platform

    @cached_property
    def _bench(self) -> Bench:
        from hardpoint.conformance.worker import Bench

        order = self._order
        return Bench(self._plugins, self.offer, self._platform, Plan(order.level, order.seed), order.settings)

    def list(self) -> Listing:
        """See Runner."""
        return Listing(self._bench.cases, self._bench.described, self._bench.unfit)

    def run(self, case: str) -> Iterator[Result]:
        """See Runner."""
        yield from self._bench.run(case)

    def close(self) -> None:
        """Nothing to end."""

    def stop(self) -> None:
        """Nothing to end."""


@dataclass
class Isolated:
    """Runs trials in a process of its own, which is started when it is first needed, and again after each death."""

    nursery: Nursery
    order: Order
    offer: Offer
    platform: str | None
    seconds: float = CASE_SECONDS
    threads: int | None = None
    _process: TrialProcess | None = None
    _listing: Listing | None = None
    _deaths: int = 0

    def list(self) -> Listing:
        """See Runner. A contribution that cannot even be loaded has one case, which has failed."""
        if self._listing is None:
            try:
                self._start()
            except DeathError as death:
                self._listing = Listing([], {}, self._failed("all", "load", death))
        assert self._listing is not None
        return self._listing

    def run(self, case: str) -> Iterator[Result]:
        """See Runner."""
        if self._deaths >= _MOST_DEATHS:
            fault = DeathError("not-run", f"the process died {_MOST_DEATHS} times before; the rest is not tried")
            yield self._failed(case, "process", fault)
            return
        try:
            process = self._process or self._start()
            for answer in process.ask(case, self.seconds):
                yield Result.from_json(answer)
        except DeathError as death:
            self._deaths += 1
            self.close()
            yield self._failed(case, "process", death)

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
                "platform": self.platform,
                "level": self.order.level,
                "seed": self.order.seed,
                "settings": self.order.settings,
                "threads": self.threads,
            }
        )
        first = self._process.read(START_SECONDS)
        if "error" in first:
            self.close()
            raise DeathError("load", first["error"])
        unfit = Result.from_json(first["unfit"]) if first["unfit"] else None
        self._listing = Listing(first["cases"], first["device"], unfit, first["on_host"])
        return self._process

    def _failed(self, case: str, check: str, death: DeathError) -> Result:
        c = self.offer.contribution
        return Result(c.family, c.of, c.name, case, check, "failed", (Fault(death.code, "the process", str(death)),))


def run(
    plugins: PluginSet, order: Order, *, isolated: bool = True, seconds: float = CASE_SECONDS, jobs: int | None = None
) -> Generator[tuple[Runner, Listing, Iterator[Result]]]:
    """Yield each contribution of the order with its listing and its results; closed early, it ends what runs.

    Each result has to be read before the next contribution is asked for. ``jobs`` processes try cases at once: by
    default as many as there are cores where trials run on the host, and one where they run on a device, whose memory is
    measured. Raises UnknownNameError and the plugin's own error before anything is run.
    """
    offers = order.offers(plugins)
    if not isolated:
        yield from _one_by_one([runner_for(plugins, order, offer, seconds=seconds) for offer in offers], order)
        return
    with closing(Nursery()) as nursery:
        threads = max(1, available_cores() // jobs) if jobs else None
        start = partial(runner_for, plugins, order, seconds=seconds, nursery=nursery, threads=threads)
        runners: list[Sequence[Runner]] = [
            [start(offer) for _ in range(lanes)] for offer, lanes in zip(offers, _lanes(len(offers), jobs), strict=True)
        ]
        firsts = [first for first, *_ in runners]
        try:
            if (jobs or _jobs(firsts)) == 1:
                yield from _one_by_one(firsts, order)
            else:
                yield from _at_once(runners, order, jobs or available_cores())
        finally:
            for runner in chain.from_iterable(runners):  # those that are done are closed
                runner.stop()
                runner.close()


def _lanes(contributions: int, jobs: int | None) -> list[int]:
    """In how many parts each contribution is tried: more than it takes, since contributions are not alike.

    In all they are a multiple of ``jobs``, so that none is left with nothing to do while others work on the last.
    """
    if not jobs or not 0 < contributions < jobs:
        return [1] * contributions
    each, more = divmod(_PARTS_PER_JOB * jobs, contributions)
    return [each + (number < more) for number in range(contributions)]


def _jobs(runners: Sequence[Runner]) -> int:
    """How many contributions to try at once, as the first says that can be opened."""
    listings = (runner.list() for runner in runners)
    first = next((listing for listing in listings if listing.device), None)
    return available_cores() if first and first.on_host and len(runners) > 1 else 1


def _one_by_one(runners: Sequence[Runner], order: Order) -> Iterator[tuple[Runner, Listing, Iterator[Result]]]:
    number = 0
    for runner in runners:
        listing = runner.list()
        yield runner, listing, _results(runner, listing, order, number)
        runner.close()
        number += len(listing.cases)


def _at_once(
    runners: Sequence[Sequence[Runner]], order: Order, jobs: int
) -> Iterator[tuple[Runner, Listing, Iterator[Result]]]:
    """Contributions begin in order, each by several runners, and what they find is yielded in order."""
    tasks = [_Task(each, order) for each in runners]
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for before, task in zip([None, *tasks], tasks, strict=False):
                pool.submit(task.begin, before)
                for lane in range(len(task.runners)):
                    pool.submit(task.work, lane)
            for task in tasks:
                listing, _ = task.listed.result()
                yield task.runners[0], listing, task.results()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for task in tasks:
                task.stop()


class _Task:
    """One contribution, tried by several runners, each in a thread of its own: the first lists its cases for all."""

    def __init__(self, runners: Sequence[Runner], order: Order) -> None:
        self.runners, self._order = runners, order
        self.listed = Future[tuple[Listing, int]]()
        """Its listing, and how many cases were listed up to its last."""
        self._cases: Sequence[str] = ()
        self._found = [SimpleQueue[Result | None | BaseException]() for _ in runners]
        """What each runner finds: results, None behind each case, or what went wrong."""
        self._stopped = False

    def begin(self, before: _Task | None) -> None:
        """List it; ``before``, the contribution before it, has begun earlier."""
        try:
            listing = self.runners[0].list()
            number = before.listed.result()[1] if before else 0
            self._cases = list(self._order.cases(listing.cases, number))
            self.listed.set_result((listing, number + len(listing.cases)))
        except BaseException as error:  # for the threads that wait
            self.runners[0].close()
            if not self.listed.done():
                self.listed.set_exception(error)

    def work(self, lane: int) -> None:
        """Run the cases of one runner, after ``begin``."""
        runner, found = self.runners[lane], self._found[lane]
        try:
            self.listed.result()
            for case in self._cases[lane :: len(self.runners)]:
                for result in runner.run(case):
                    found.put(result)
                found.put(None)
                if self._stopped:
                    break
        except BaseException as error:  # for the thread that waits
            found.put(error)
        finally:
            runner.close()

    def results(self) -> Iterator[Result]:
        """What it finds, in the order of its cases, as it comes."""
        listing, _ = self.listed.result()
        if listing.unfit:
            yield listing.unfit
        for number in range(len(self._cases)):
            while (result := self._found[number % len(self.runners)].get()) is not None:
                if isinstance(result, BaseException):
                    raise result
                yield result

    def stop(self) -> None:
        """End it where it stands, if it has not ended."""
        self._stopped = True
        self.listed.cancel()
        for runner in self.runners:
            runner.stop()


def _results(runner: Runner, listing: Listing, order: Order, number: int) -> Iterator[Result]:
    if listing.unfit:
        yield listing.unfit
    for case in order.cases(listing.cases, number):
        yield from runner.run(case)
