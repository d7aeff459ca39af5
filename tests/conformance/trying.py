"""Putting one function or class in a contribution's place, and finding the first check that objects to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

import pytest

from hardpoint.conformance.generators import Generator
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site, Subject
from hardpoint.conformance.trials import Finding
from hardpoint.plugin_host import Offer
from hardpoint_plugin_api import FAMILIES
from hardpoint_plugin_api.requirements import parse_requirement


@dataclass(frozen=True)
class EveryCheck(Plan):
    """The few cases of level quick, with every check on each."""

    def includes(self, check: int, trial: int) -> bool:
        """Always."""
        return True


QUICK = Plan()
"""Level quick as users run it: checks rotate, and some are made on some cases alone."""
HEALTHY = pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.nightly)], ids=["part", "whole"])
"""Of a healthy target's trials, the default suite runs each 23rd and ``make nightly`` all.

Checks rotate by fours."""
FEWER = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.nightly)], ids=["part", "whole"])
"""The same of a target that has few trials: each fifth by day."""


@dataclass(frozen=True)
class Caught:
    """The first failure: in which case, by which check, and what it found."""

    case: str
    check: str
    finding: Finding

    @property
    def codes(self) -> set[str]:
        """The codes of the faults."""
        return {fault.code for fault in self.finding.faults}

    def __str__(self) -> str:
        return f"{self.case}, {self.check}: {'; '.join(map(str, self.finding.faults))}"


def subject(
    site: Site, target: object, family: str, of: str | None = None, name: str = "reference", **changes: Any
) -> Subject:
    """``target`` in place of a contribution of core's (or of whoever has one of this name), with other claims."""
    of = of or FAMILIES[family].default_of
    offers = [o for o in site.plugins.offers(family, of) if o.contribution.name == name]
    claims: Sequence[Any] = changes.pop("requires", ())
    requires = tuple(parse_requirement(claim, FAMILIES[family], "tests", of) for claim in claims)
    contribution = replace(offers[0].contribution, requires=requires, **changes)
    offer: Offer = replace(offers[0], contribution=contribution)
    return Subject(offer, target, site)


def first_failure(
    tried: Subject, generator: Generator, cases: str = "*", plan: Plan | None = None, *, every: int = 1
) -> Caught | None:
    """Run trials in their order, each ``every``-th of cases that match, until a check fails; None if none does."""
    trials = (trial for trial in generator.trials(tried, plan or EveryCheck()) if fnmatchcase(trial.case, cases))
    for trial in islice(trials, 0, None, every):
        for check, finding in trial.run():
            if finding.faults:
                return Caught(trial.case, check, finding)
    return None
