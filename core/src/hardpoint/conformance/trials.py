"""Trials of the kit, their checks, and findings."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hardpoint.ops.comparison import Comparison, Fault
from hardpoint_plugin_api import Reason, Workload

Outcome = Literal["passed", "failed", "unsupported", "skipped"]
"""``unsupported``: the contribution does not claim this, or says that it cannot; recorded with the reason. ``skipped``:
memory or hardware to try it with is not here. A failure is never either."""


@dataclass(frozen=True)
class Finding:
    """The finding of one check. ``measured`` and ``compared`` are as in ``Comparison``."""

    faults: tuple[Fault, ...] = ()
    measured: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    unsupported: Reason | None = None
    skipped: str | None = None
    compared: int = 0

    @classmethod
    def of(cls, comparison: Comparison) -> Finding:
        """The finding of a judged call."""
        return cls(tuple(comparison.faults), comparison.measured, compared=comparison.compared)

    @classmethod
    def failed(cls, code: str, where: str, message: str) -> Finding:
        """A finding of one fault."""
        return cls((Fault(code, where, message),))

    @classmethod
    def not_claimed(cls, code: str, message: str) -> Finding:
        """A finding that says why the check does not apply."""
        return cls(unsupported=Reason(code, message))

    @property
    def outcome(self) -> Outcome:
        """Failed, unsupported, skipped or passed."""
        if self.faults:
            return "failed"
        if self.unsupported:
            return "unsupported"
        return "skipped" if self.skipped else "passed"


@dataclass(frozen=True)
class Check:
    """A named question. Where a ``decisive`` one fails, the trial's other checks would say nothing and are left out."""

    name: str
    run: Callable[[], Finding]
    decisive: bool = False


@dataclass(frozen=True)
class Trial:
    """One case of a contribution. ``case`` is unique within it, and the same for every run with the same seed.

    Nothing is drawn or built before a check runs: thousands of trials can be listed at no cost.

    ``workload`` is the request that the case stands for: a passing comparison of values proves the claims that it
    falls under (see ``proof.py``). ``claims`` are further ones, as ``proof.py`` writes them, of a case that has no
    workload: a pattern of specs that the contribution refuses as a whole. ``of_a_part`` says that the case computes
    less than the contribution is for, such as a backend's store without its attention: its values prove nothing of the
    whole.
    """

    case: str
    checks: Sequence[Check] = ()
    unsupported: Reason | None = None
    workload: Workload | None = None
    claims: tuple[str, ...] = ()
    of_a_part: bool = False

    def run(self) -> Iterator[tuple[str, Finding]]:
        """Make the checks, in order; what one raises is its fault."""
        if self.unsupported:
            yield "claim", Finding(unsupported=self.unsupported)
        for check in self.checks:
            try:
                finding = check.run()
            except Exception as error:  # a kernel may raise anything, and the report must go on
                finding = Finding.failed("exception", _place(error), f"{type(error).__name__}: {error}")
            yield check.name, finding
            if check.decisive and finding.faults:
                return


def _place(error: Exception) -> str:
    """The innermost line of the traceback that is not torch's: most often the plugin's own."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/torch/" not in f.filename]
    frame = (own or frames)[-1]
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno} in {frame.name}"


@dataclass(frozen=True)
class Result:
    """One line of a report and of a certificate: what one check of one trial of one contribution found.

    ``compared`` counts the elements whose values were held against the truth as proof of the contribution; ``claims``
    are the contribution's claims that the case falls under.
    """

    family: str
    of: str | None
    name: str
    case: str
    check: str
    outcome: Outcome
    faults: tuple[Fault, ...] = ()
    reason: str = ""
    measured: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    compared: int = 0
    claims: tuple[str, ...] = ()

    @property
    def contribution(self) -> tuple[str, str | None, str]:
        """The contribution that was tried: (family, of, name)."""
        return self.family, self.of, self.name

    @property
    def codes(self) -> frozenset[str]:
        """The code of each fault that was found, such as ``alias``."""
        return frozenset(fault.code for fault in self.faults)

    def to_json(self) -> dict[str, Any]:
        """This result as plain data."""
        data: dict[str, Any] = {
            "family": self.family,
            "of": self.of,
            "name": self.name,
            "case": self.case,
            "check": self.check,
            "outcome": self.outcome,
        }
        if self.faults:
            data["faults"] = [{"code": f.code, "where": f.where, "message": f.message} for f in self.faults]
        if self.reason:
            data["reason"] = self.reason
        if self.measured:
            data["measured"] = {bound: {"error": e, "limit": limit} for bound, (e, limit) in self.measured.items()}
        if self.compared:
            data["compared"] = self.compared
        if self.claims:
            data["claims"] = list(self.claims)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        """Read what ``to_json`` wrote."""
        return cls(
            family=data["family"],
            of=data["of"],
            name=data["name"],
            case=data["case"],
            check=data["check"],
            outcome=data["outcome"],
            faults=tuple(Fault(f["code"], f["where"], f["message"]) for f in data.get("faults", ())),
            reason=data.get("reason", ""),
            measured={bound: (m["error"], m["limit"]) for bound, m in data.get("measured", {}).items()},
            compared=data.get("compared", 0),
            claims=tuple(data.get("claims", ())),
        )
