"""The kit as pytest hooks: ``pytest --hardpoint-plugin acme`` collects one test for each case.

``hardpoint.conformance.pytest_plugin`` registers them where that option is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from hardpoint.conformance.plan import CASE_SECONDS

if TYPE_CHECKING:
    from hardpoint.conformance.isolation import Runner
    from hardpoint.conformance.processes import Nursery
    from hardpoint.conformance.proof import Asked
    from hardpoint.conformance.trials import Result

_RUNNERS = pytest.StashKey[list["Runner"]]()
_NURSERY: pytest.StashKey[Nursery] = pytest.StashKey()
_COLLECTED = pytest.StashKey[list["_Contribution"]]()
_WHOLES: pytest.StashKey[list[Result]] = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose among the items
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the cases, unless single tests were named (``path::name``)."""
    if not any("::" in arg for arg in config.args):
        items.extend(_collect(session, config))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a contribution is not proved, or cases ran and nothing at all could be tried."""
    if session.exitstatus == pytest.ExitCode.OK and _unproved(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say so, and name the contributions that are for hardware that is not here."""
    if wholes := config.stash.get(_WHOLES, []):
        from hardpoint.conformance.kit import not_tried_here

        for line in not_tried_here(wholes):
            terminalreporter.write_line(f"hardpoint: {line}")
    for line in _unproved(config):
        terminalreporter.write_line(f"hardpoint: {line}", red=True)


def _unproved(config: pytest.Config) -> list[str]:
    """Lines on contributions that are not proved although every case ran, with the reasons."""
    from hardpoint.conformance.proof import prove, tally

    collected = config.stash.get(_COLLECTED, [])
    proofs = [prove(c.asked, tally(c.results)) for c in collected if c.results and c.ran == c.cases]
    lines = [f"{p.title}: not proved: {'; '.join(p.why)}" for p in proofs if p.verdict == "not proved"]
    outcomes = {result.outcome for c in collected for result in c.results}
    if outcomes and outcomes.isdisjoint(("passed", "failed")):
        lines.append("nothing was proved: no case could be tried here")
    return lines


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the processes in which contributions were tried."""
    for runner in config.stash.get(_RUNNERS, []):
        runner.close()
    if nursery := config.stash.get(_NURSERY, None):
        nursery.close()


def _collect(session: pytest.Session, config: pytest.Config) -> Iterator[pytest.Item]:
    from hardpoint.conformance.certify import check
    from hardpoint.conformance.isolation import Isolated
    from hardpoint.conformance.kit import TIMEOUTS, Order, check_number, platforms_for
    from hardpoint.conformance.processes import Nursery
    from hardpoint.extras import require_extra
    from hardpoint.plugin_host import discover
    from hardpoint_plugin_api import HardpointError

    runners = config.stash.setdefault(_RUNNERS, [])
    plugins = discover()
    try:
        require_extra("conform", "--hardpoint-plugin")
        order = Order(
            plugin=config.getoption("hardpoint_plugin"),
            family=config.getoption("hardpoint_family"),
            name=config.getoption("hardpoint_name"),
            level=config.getoption("hardpoint_level"),
            seed=config.getoption("hardpoint_seed"),
            platform=config.getoption("hardpoint_platform"),
        )
        seconds = config.getoption("hardpoint_timeout") or CASE_SECONDS
        check_number("--hardpoint-timeout", seconds, TIMEOUTS)
        check(plugins, order)
    except HardpointError as error:
        raise pytest.UsageError(str(error)) from error
    nursery = config.stash.setdefault(_NURSERY, Nursery())
    offers = order.offers(plugins)
    platforms = platforms_for(plugins, offers, order.platform)
    for offer in offers:
        runner = Isolated(nursery, order, offer, platforms, seconds)
        runners.append(runner)
        c, listing = offer.contribution, runner.list()
        runner.close()  # its process is started again when its first case runs
        of = _Contribution(listing.asked, len(listing.cases) or 1)
        config.stash.setdefault(_COLLECTED, []).append(of)
        title = "/".join(part for part in (c.family, c.of, c.name) if part)
        if listing.unfit:
            config.stash.setdefault(_WHOLES, []).append(listing.unfit)
            yield ConformanceItem.from_parent(session, name=f"{title}[all]", runner=runner, of=of, done=listing.unfit)
        for case in listing.cases:
            yield ConformanceItem.from_parent(session, name=f"{title}[{case}]", runner=runner, of=of, case=case)


@dataclass
class _Contribution:
    """A contribution that is to be proved by ``cases`` cases, of which ``ran`` have run with ``results``."""

    asked: Asked
    cases: int
    ran: int = 0
    results: list[Result] = field(default_factory=list)


class NonConformanceError(Exception):
    """A case failed; the message is the report."""


class ConformanceItem(pytest.Item):
    """One case of one contribution. It fails where a check fails, and is skipped where nothing could be tried."""

    def __init__(
        self,
        *,
        name: str,
        parent: pytest.Session,
        runner: Runner,
        of: _Contribution,
        case: str = "all",
        done: Result | None = None,
    ) -> None:
        super().__init__(name, parent, nodeid=f"hardpoint::{name}")
        self._runner, self._of, self._case, self._done = runner, of, case, done

    def runtest(self) -> None:
        """Run the case in the contribution's process."""
        results = [self._done] if self._done else list(self._runner.run(self._case))
        self._of.ran += 1
        self._of.results += results
        failures = [f"{r.check}: {fault}" for r in results for fault in r.faults]
        if failures:
            raise NonConformanceError("\n".join(failures))
        if not any(r.outcome == "passed" for r in results):
            pytest.skip("; ".join(dict.fromkeys(f"{r.outcome}: {r.reason}" for r in results)))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        """The findings of the checks, without a traceback through the kit."""
        if isinstance(excinfo.value, NonConformanceError):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[str, None, str]:
        """The case's place in reports; it has no file."""
        return "hardpoint", None, self.name
