"""The one selector of every family: candidates in, a plan out, with the reasons against each loser.

Order: the user's flag (invalid: an error with all reasons); a measured result from the tuning file; priority; ties by
name. All winners of one plan share a layout, which is chosen first. Something asked for by name fails closed; only an
automatic choice may pass over a candidate, and keeps the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hardpoint.plugins import Offer, PluginSet
from hardpoint.selection.adapters import adapted_offers
from hardpoint.selection.plan import Plan, PlanEntry, Rejection, Rule, StepRange
from hardpoint.selection.settings import Choice, Settings
from hardpoint.selection.tuning import TuningFile
from hardpoint_plugin_api import (
    CheckContext,
    DeviceInfo,
    Phase,
    PluginError,
    Reason,
    Request,
    SelectionError,
    TokensRequirement,
    UnknownNameError,
    Workload,
)

_REFERENCE = "reference"
_PHASES: tuple[Phase, ...] = ("prefill", "decode")


class Selector:
    """Answers requests for one engine: one device, one set of plugins, one user's settings.

    ``load`` imports an offer's target (used for winners only, to ask their own ``supports``).
    """

    def __init__(
        self,
        plugins: PluginSet,
        device: DeviceInfo,
        settings: Settings,
        tuning: TuningFile | None = None,
        load: Callable[[Offer], object] | None = None,
    ) -> None:
        self.device, self.settings = device, settings
        self._plugins, self._tuning = plugins, tuning or TuningFile()
        self._load = load or plugins.load
        self._plans: dict[Workload, Plan] = {}

    @property
    def plans(self) -> Sequence[Plan]:
        """Every plan made so far, in the order of the requests."""
        return tuple(self._plans.values())

    def select(self, workload: Workload) -> Plan:
        """Return the plan for ``workload``; equal workloads get the same plan.

        Raises UnknownNameError for a name that no candidate has, SelectionError (with every candidate's reasons) when
        nothing can serve, or not what was asked for by name.
        """
        if workload not in self._plans:
            self._plans[workload] = _Contest(self, workload).decide()
        return self._plans[workload]

    def _static_reasons(self, offer: Offer, workload: Workload) -> list[Reason]:
        """Everything that data can say against ``offer``."""
        contribution, reasons = offer.contribution, []
        if contribution.platforms and self.device.platform not in contribution.platforms:
            reasons.append(
                Reason(
                    "platform",
                    "it is for another platform",
                    wanted=self.device.platform,
                    supported=", ".join(contribution.platforms),
                )
            )
        if contribution.family == "op" and contribution.name != _REFERENCE:
            switched_off = self.settings.op_switched_off(str(contribution.of))
            reasons += [switched_off] if switched_off else []
        context = CheckContext(Request(self.device, workload), offer.api)
        return reasons + [r for requirement in contribution.requirements if (r := requirement.check(context))]

    def _dynamic_reasons(self, offer: Offer, workload: Workload) -> list[Reason]:
        """What the target itself says after import: it cannot be loaded, or does not support the workload."""
        try:
            supports = getattr(self._load(offer), "supports", None)
            found = supports(workload, self.device) if supports else []
        except PluginError as error:
            return [Reason("load-failed", str(error), fix="hardpoint plugins list")]
        except Exception as error:  # a plugin's own bug must not stop the others
            return [Reason("supports-failed", f"its supports() raised {type(error).__name__}: {error}")]
        if not isinstance(found, list) or not all(isinstance(r, Reason) for r in found):
            return [Reason("supports-failed", f"its supports() must return a list of Reason, got {found!r}")]
        return found


@dataclass
class _Contest:
    """One request being decided."""

    selector: Selector
    workload: Workload
    rejected: dict[Offer, list[Reason]] = field(default_factory=dict)
    proven: set[Offer] = field(default_factory=set)

    def decide(self) -> Plan:
        family, of = self.workload.family, self.workload.of
        offers = self.selector._plugins.offers(family, of)
        offers = [*offers, *adapted_offers(offers, self.workload)]
        replaced = {o.contribution.replaces: o for o in offers if o.contribution.replaces}
        for offer in offers:
            reasons = self.selector._static_reasons(offer, self.workload)
            if (by := replaced.get(offer.contribution.name)) is not None and by is not offer:
                reasons.append(Reason("replaced", f"plugin {by.plugin} replaces it by {by.contribution.name}"))
            if reasons:
                self.rejected[offer] = reasons
        choice = self.selector.settings.choice(family, of)
        if choice:
            self._hold_to(choice, offers)
        tuned = self.selector._tuning.winner(self.selector.device, self.workload)
        while True:
            eligible = [o for o in offers if o not in self.rejected]
            entries = self._winners(eligible, choice, tuned)
            unproven = [e.offer for e in entries if e.offer not in self.proven]
            if not unproven:
                return self._plan(entries, eligible, choice)
            for offer in dict.fromkeys(unproven):
                self._prove(offer, choice)

    def _hold_to(self, choice: Choice, offers: Sequence[Offer]) -> None:
        """Fail closed where the candidate asked for by name does not exist or cannot serve."""
        named = [o for o in offers if o.contribution.name == choice.name]
        if not named:
            title = self._title()
            raise UnknownNameError(
                f"{title} implementation",
                choice.name,
                {o.contribution.name for o in offers},
                f"Asked for by {choice.flag}.",
            )
        if named[0] in self.rejected:
            self._refuse(choice, named[0])

    def _prove(self, offer: Offer, choice: Choice | None) -> None:
        reasons = self.selector._dynamic_reasons(offer, self.workload)
        if not reasons:
            self.proven.add(offer)
            return
        self.rejected[offer] = reasons
        if choice and offer.contribution.name == choice.name:
            self._refuse(choice, offer)

    def _refuse(self, choice: Choice, offer: Offer) -> None:
        alternatives = sorted(o.contribution.name for o in self._usable())
        raise SelectionError(
            f"{choice.flag} {choice.name}: it cannot serve {self._title()} ({self.workload.key()}). "
            f"Can serve: {', '.join(alternatives) or 'nothing'}.",
            {offer.contribution.name: self.rejected[offer]},
        )

    def _usable(self) -> list[Offer]:
        offers = self.selector._plugins.offers(self.workload.family, self.workload.of)
        return [o for o in offers if o not in self.rejected]

    def _title(self) -> str:
        return f"{self.workload.family} {self.workload.of}" if self.workload.of else self.workload.family

    def _winners(self, eligible: Sequence[Offer], choice: Choice | None, tuned: str | None) -> list[PlanEntry]:
        """The winner of each range within the layout whose winners are best; SelectionError if no layout covers all."""

        def rule(offer: Offer) -> Rule:
            if choice and offer.contribution.name == choice.name:
                return "flag"
            if offer.contribution.name == tuned:
                return "tuning file"
            return "only candidate" if len(eligible) == 1 else "priority"

        def rank(offer: Offer) -> tuple[bool, bool, int, str]:
            c = offer.contribution
            return (rule(offer) != "flag", rule(offer) != "tuning file", -c.priority, c.name)

        best: list[PlanEntry] = []
        for layout in dict.fromkeys(o.contribution.layout for o in sorted(eligible, key=rank)):
            group = sorted((o for o in eligible if o.contribution.layout == layout), key=rank)
            entries = [
                PlanEntry(where, winner, rule(winner))
                for where in _ranges(group)
                if (winner := next((o for o in group if _covers(o, where)), None))
            ]
            if len(entries) == len(_ranges(group)):
                best = _merge(entries)
                break
        if not best:
            raise SelectionError(
                f"nothing can serve {self._title()} ({self.workload.key()}) on {self.selector.device.name}",
                {o.contribution.name: reasons for o, reasons in self.rejected.items()},
            )
        return best

    def _plan(self, entries: Sequence[PlanEntry], eligible: Sequence[Offer], choice: Choice | None) -> Plan:
        winners = {e.offer for e in entries}
        first = entries[0].offer.contribution
        for offer in eligible:
            c = offer.contribution
            if offer in winners:
                continue
            if c.layout != first.layout:
                reason = Reason("layout", "another layout was chosen", wanted=first.layout, supported=c.layout)
            elif choice:
                reason = Reason("not-asked-for", f"{choice.flag} asks for {choice.name}")
            else:
                reason = Reason(
                    "lower-rank",
                    f"{first.name} comes before it",
                    wanted=f"priority above {first.priority}",
                    supported=f"priority {c.priority}",
                )
            self.rejected[offer] = [reason]
        rejected = tuple(Rejection(o, tuple(reasons)) for o, reasons in self.rejected.items())
        return Plan(self.workload, tuple(entries), rejected)


def _tokens(offer: Offer) -> TokensRequirement:
    return next((r for r in offer.contribution.requires if isinstance(r, TokensRequirement)), TokensRequirement())


def _covers(offer: Offer, where: StepRange) -> bool:
    need = _tokens(offer)
    below_max = need.max is None or (where.max is not None and where.max <= need.max)
    return need.min <= where.min and below_max and (need.phase is None or need.phase == where.phase)


def _ranges(offers: Sequence[Offer]) -> list[StepRange]:
    """Cut all steps where any offer's range begins or ends, per phase where any offer is for one phase only."""
    needs = [_tokens(o) for o in offers]
    cuts = sorted({1} | {n.min for n in needs} | {n.max + 1 for n in needs if n.max is not None})
    phases: tuple[Phase | None, ...] = _PHASES if any(n.phase for n in needs) else (None,)
    uppers = [*(c - 1 for c in cuts[1:]), None]
    return [StepRange(low, high, phase) for phase in phases for low, high in zip(cuts, uppers, strict=True)]


def _merge(entries: Sequence[PlanEntry]) -> list[PlanEntry]:
    """Join adjacent ranges of one winner."""
    merged: list[PlanEntry] = []
    for entry in entries:
        last = merged[-1] if merged else None
        if last and last.offer == entry.offer and last.range.phase == entry.range.phase:
            merged[-1] = PlanEntry(StepRange(last.range.min, entry.range.max, last.range.phase), last.offer, last.rule)
        else:
            merged.append(entry)
    same = {e.offer for e in merged}
    if len(same) == 1:
        return [PlanEntry(StepRange(), merged[0].offer, merged[0].rule)]
    return merged
