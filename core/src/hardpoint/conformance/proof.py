"""Whether a run proves a contribution: which comparisons count, and which claims they leave open.

A contribution is **proved** where a check that compares values passed, with at least one value in it, and no check
failed. For most families that check is ``values``; for a platform it is ``dtype``, which computes on the device. A
contribution without such a check is **not proved**, however many of its other checks passed: they ask what else could
be wrong with a kernel whose values are right.

A passing comparison also proves the claims of the manifest that its case falls under. A claimed spec (number format)
that no case falls under leaves the contribution not proved: one format's values say nothing of another's. Other claims
without a comparison (a dtype that the device lacks, a feature that no case asks for) are listed, and do not count
against it.

Contributions for other hardware than this run's are **not here**: neither proved nor a reason to fail. Needs no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hardpoint.conformance.kit import home_platforms
from hardpoint_plugin_api import ApiVersion, CheckContext, Contribution, DeviceInfo, Feature, Reason, Request, Workload
from hardpoint_plugin_api.requirements import (
    ArchRequirement,
    DeviceFeatureRequirement,
    FeatureRequirement,
    OneOfRequirement,
    Requirement,
    SpecRequirement,
)

if TYPE_CHECKING:
    from hardpoint.conformance.trials import Result

Verdict = Literal["proved", "failed", "not proved", "not here"]

VALUES = "values"
"""The check that proves a contribution of most families."""
_PROVING = {"platform": "dtype"}
"""The check that does for the other families."""
ELSEWHERE = "hardware"
"""The check of a contribution that is for other hardware than the run's; it is skipped."""
_MOST_REASONS = 3
_KEPT_REASONS = 5
"""The number of reasons that a compact certificate keeps for one check."""

Key = tuple[str, str | None, str]
"""Whose: (family, of, name)."""


def proving_check(family: str) -> str:
    """The name of the check whose passing comparisons prove a contribution to ``family``."""
    return _PROVING.get(family, VALUES)


@dataclass(frozen=True)
class Asked:
    """A contribution that a run was asked to prove, and its manifest's claims, each as text ("dtype float16").

    ``formats`` are the claimed specs that the device can be asked for: each needs a case of its own.
    """

    key: Key
    claims: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**_named(self.key), "claims": list(self.claims), "formats": list(self.formats)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Asked:
        """Read what ``to_json`` wrote."""
        return cls((data["family"], data["of"], data["name"]), tuple(data["claims"]), tuple(data["formats"]))


@dataclass
class Tally:
    """The findings of one check in all cases of a contribution: the compact form of results.

    ``compared`` counts elements in passing comparisons, and ``claims`` are what they prove; ``met`` are the claims that
    any case falls under, tried or refused. ``reasons`` say why a case was unsupported or skipped, ``faults`` count the
    codes of what failed, ``nearest`` has the largest share of each limit that was used up, as (error, limit).
    """

    key: Key
    check: str
    outcomes: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    claims: frozenset[str] = frozenset()
    met: frozenset[str] = frozenset()
    reasons: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    nearest: dict[str, tuple[float, float]] = field(default_factory=dict)

    def count(self, result: Result) -> None:
        """Take in one more case."""
        passed = result.outcome == "passed"
        self.outcomes[result.outcome] += 1
        self.compared += result.compared if passed else 0
        self.met |= frozenset(result.claims)
        if passed and result.compared:
            self.claims |= frozenset(result.claims)
        if result.reason:
            self.reasons[result.reason] += 1
        self.faults.update(fault.code for fault in result.faults)
        self._measure(result.measured)

    def add(self, other: Tally) -> None:
        """Take in the same check of another shard."""
        self.outcomes += other.outcomes
        self.compared += other.compared
        self.claims |= other.claims
        self.met |= other.met
        self.reasons += other.reasons
        self.faults += other.faults
        self._measure(other.nearest)

    def _measure(self, measured: Mapping[str, tuple[float, float]]) -> None:
        for bound, (error, limit) in measured.items():
            known = self.nearest.get(bound, (0.0, 1.0))
            if error * known[1] >= known[0] * limit:
                self.nearest[bound] = (error, limit)

    def to_json(self) -> dict[str, Any]:
        """Plain data; of the reasons, the most frequent."""
        data: dict[str, Any] = {
            **_named(self.key),
            "check": self.check,
            "outcomes": dict(sorted(self.outcomes.items())),
        }
        if self.compared:
            data["compared"] = self.compared
        for name in ("claims", "met"):
            if getattr(self, name):
                data[name] = sorted(getattr(self, name))
        if self.reasons:
            data["reasons"] = dict(self.reasons.most_common(_KEPT_REASONS))
        if self.faults:
            data["faults"] = dict(sorted(self.faults.items()))
        if self.nearest:
            data["nearest"] = {bound: {"error": e, "limit": limit} for bound, (e, limit) in self.nearest.items()}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tally:
        """Read what ``to_json`` wrote."""
        return cls(
            key=(data["family"], data["of"], data["name"]),
            check=data["check"],
            outcomes=Counter(data["outcomes"]),
            compared=data.get("compared", 0),
            claims=frozenset(data.get("claims", ())),
            met=frozenset(data.get("met", ())),
            reasons=Counter(data.get("reasons", {})),
            faults=Counter(data.get("faults", {})),
            nearest={bound: (m["error"], m["limit"]) for bound, m in data.get("nearest", {}).items()},
        )


def tally(results: Iterable[Result]) -> tuple[Tally, ...]:
    """The tallies of each check of each contribution, in the order of the first results."""
    found: dict[tuple[Key, str], Tally] = {}
    for result in results:
        key = result.contribution, result.check
        found.setdefault(key, Tally(*key)).count(result)
    return tuple(found.values())


def join(parts: Iterable[Sequence[Tally]]) -> tuple[Tally, ...]:
    """The tallies of several shards as those of the whole. The parts stay as they are."""
    found: dict[tuple[Key, str], Tally] = {}
    for part in parts:
        for one in part:
            found.setdefault((one.key, one.check), Tally(one.key, one.check)).add(one)
    return tuple(found.values())


@dataclass(frozen=True)
class Proof:
    """The verdict of a run on one contribution. ``why`` is why it is not proved; ``untried`` are claims, as text,
    without a passing comparison."""

    key: Key
    verdict: Verdict
    why: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The contribution, for messages."""
        family, of, name = self.key
        return f"{family} {of}: {name}" if of else f"{family}: {name}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**_named(self.key), "verdict": self.verdict, "why": list(self.why), "untried": list(self.untried)}


def prove(asked: Asked, tallies: Collection[Tally]) -> Proof:
    """The verdict on a contribution by its ``tallies``."""
    proving = proving_check(asked.key[0])
    if any(t.outcomes["failed"] for t in tallies):
        return Proof(asked.key, "failed")
    if tallies and all(t.check == ELSEWHERE for t in tallies):
        return Proof(asked.key, "not here", _reasons(tallies))
    proved = frozenset[str]().union(*(t.claims for t in tallies if t.check == proving))
    proved |= {f"feature {f}" for f in Feature for t in tallies if t.check == _check_of(f) and t.outcomes["passed"]}
    met = frozenset[str]().union(*(t.met for t in tallies))
    untried = tuple(claim for claim in asked.claims if claim not in proved)
    if not any(t.check == proving and t.compared for t in tallies):
        why = _reasons(tallies) or (f"no case has the check {proving!r}, which compares values",)
        return Proof(asked.key, "not proved", why, untried)
    never = [claim for claim in asked.formats if claim not in met]
    if never:
        why = tuple(
            f"no case is for the claimed {claim}; leave the claim out, or see that it is tried" for claim in never
        )
        return Proof(asked.key, "not proved", why, untried)
    return Proof(asked.key, "proved", (), untried)


def _check_of(feature: Feature) -> str:
    """The check that proves a feature which is a property of results, and not asked for by a workload alone."""
    return str(feature).replace("_", "-")


def _reasons(tallies: Collection[Tally]) -> tuple[str, ...]:
    """The most frequent reasons why cases were not tried."""
    reasons: Counter[str] = Counter()
    for one in tallies:
        reasons += one.reasons
    return tuple(reason for reason, _ in reasons.most_common(_MOST_REASONS))


# A manifest's claims.


def asked_of(contribution: Contribution, device: DeviceInfo | None) -> Asked:
    """The claims of a contribution; without a device, no format can be asked for."""
    key = contribution.family, contribution.of, contribution.name
    claims = [claim for requirement in contribution.requires for claim in _claims(requirement)]
    formats = [c for c in claims if c.startswith("spec ") and device is not None and not _is_beyond(c, device)]
    return Asked(key, tuple(claims), tuple(formats))


def met_by(
    contribution: Contribution, workload: Workload | None, device: DeviceInfo, api: ApiVersion
) -> tuple[str, ...]:
    """The claims of a contribution that ``workload`` falls under."""
    if workload is None:
        return ()
    context = CheckContext(Request(device, workload), api)
    return tuple(
        claim
        for requirement in contribution.requires
        for claim, part in _parts(requirement)
        if _is_asked(part, workload) and part.check(context) is None
    )


def elsewhere(contribution: Contribution, device: DeviceInfo, api: ApiVersion, workload: Workload) -> Reason | None:
    """Why a contribution is for other hardware than ``device``; None where it is for this one."""
    platforms = home_platforms(contribution)
    if platforms and device.platform not in platforms:
        return Reason("platform", f"it is for {', '.join(platforms)}; this run is on {device.platform}")
    context = CheckContext(Request(device, workload), api)
    needs = (r for r in contribution.requires if isinstance(r, ArchRequirement | DeviceFeatureRequirement))
    return next((reason for need in needs if (reason := need.check(context))), None)


def _claims(requirement: Requirement) -> list[str]:
    return [claim for claim, _ in _parts(requirement)]


def _parts(requirement: Requirement) -> list[tuple[str, Requirement]]:
    """Each value that a requirement claims, and the requirement that claims this one alone."""
    if isinstance(requirement, OneOfRequirement):
        return [(f"{requirement.key} {v}", OneOfRequirement(requirement.key, (v,))) for v in requirement.values]
    if isinstance(requirement, SpecRequirement):
        return [(f"spec {pair}", SpecRequirement((pair,))) for pair in requirement.pairs]
    if isinstance(requirement, FeatureRequirement):
        return [(f"feature {name}", _HasFeature((name,))) for name in requirement.names]
    return []


@dataclass(frozen=True)
class _HasFeature(Requirement):
    """The workload asks for each of these features."""

    names: tuple[str, ...]

    def check(self, context: CheckContext) -> Reason | None:
        absent = set(self.names) - context.request.workload.features
        return Reason("feature", f"{', '.join(sorted(absent))} is not asked for") if absent else None


def _is_asked(part: Requirement, workload: Workload) -> bool:
    """Whether the workload says something of what the claim is about: an empty field meets any requirement."""
    if isinstance(part, OneOfRequirement):
        return getattr(workload, part.key, None) is not None
    return not isinstance(part, SpecRequirement) or getattr(workload, "spec", None) is not None


def _is_beyond(claim: str, device: DeviceInfo) -> bool:
    """Whether a claimed spec is of plain numbers of which the device has none."""
    sides = claim.removeprefix("spec ").split("/")
    return any(side in _PLAIN and side not in device.dtypes for side in sides)


_PLAIN = frozenset({"float64", "float32", "float16", "bfloat16"})


def _named(key: Key) -> dict[str, str | None]:
    family, of, name = key
    return {"family": family, "of": of, "name": name}
