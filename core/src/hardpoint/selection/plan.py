"""The selector's answer: a plan, and the reasons against every other candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

from hardpoint.plugin_host import Offer
from hardpoint.selection.tuning import Verdict
from hardpoint_plugin_api import Choice, Phase, Reason, Workload

Rule = Literal["flag", "tuning file", "priority", "only candidate"]


@dataclass(frozen=True)
class StepRange:
    """Steps of ``min`` to ``max`` scheduled tokens (None: no upper end), of one phase or of both (None)."""

    min: int = 1
    max: int | None = None
    phase: Phase | None = None

    def __str__(self) -> str:
        if self.max is None:
            tokens = "any" if self.min == 1 else f"{self.min}+"
        else:
            tokens = f"{self.min}-{self.max}"
        return f"{tokens} {self.phase}" if self.phase else tokens


@dataclass(frozen=True)
class PlanEntry:
    """The winner of one range, and the rule by which it won; with ``verdict``, what was measured."""

    range: StepRange
    offer: Offer
    rule: Rule
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Rejection:
    """A candidate that is not in the plan. ``find`` returns every reason: it is called when they are read.

    A start asks whether there is a reason against each of several hundred candidates, and reads none.
    """

    offer: Offer
    find: Callable[[], Sequence[Reason]] = field(compare=False, repr=False)

    @classmethod
    def because(cls, offer: Offer, reason: Reason) -> Rejection:
        """A rejection for one reason."""
        return cls(offer, partial(tuple, (reason,)))

    @cached_property
    def reasons(self) -> tuple[Reason, ...]:
        """Every reason."""
        return tuple(self.find())

    def __reduce__(self) -> tuple[Any, ...]:
        return Rejection, (self.offer, partial(tuple, self.reasons))


@dataclass(frozen=True)
class Plan:
    """The answer to one request: winners by range, which all share one weight and one cache layout."""

    workload: Workload
    entries: tuple[PlanEntry, ...]
    rejected: tuple[Rejection, ...] = ()

    @property
    def layout(self) -> str:
        """The layout that every winner works on."""
        return self.entries[0].offer.contribution.layout

    @property
    def candidates(self) -> tuple[Offer, ...]:
        """Winners and losers."""
        return (*(entry.offer for entry in self.entries), *(rejection.offer for rejection in self.rejected))

    @property
    def offer(self) -> Offer:
        """The winner, of a plan that has one for all ranges (what cannot change from step to step)."""
        assert len(self.entries) == 1, f"{self.workload} has several winners"
        return self.entries[0].offer

    @property
    def as_choice(self) -> Choice:
        """The plan as hooks see it."""
        return Choice(
            self.workload,
            tuple(_named(entry.offer) for entry in self.entries),
            _Refused(self.rejected),
        )


class _Refused(Mapping[tuple[str, str], tuple[Reason, ...]]):
    """Reasons by plugin and name, found when they are read."""

    def __init__(self, rejected: Sequence[Rejection]) -> None:
        self._rejected = {_named(rejection.offer): rejection for rejection in rejected}

    def __getitem__(self, named: tuple[str, str]) -> tuple[Reason, ...]:
        return self._rejected[named].reasons

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._rejected)

    def __len__(self) -> int:
        return len(self._rejected)


def _named(offer: Offer) -> tuple[str, str]:
    return offer.plugin, offer.contribution.name
