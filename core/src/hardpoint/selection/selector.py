"""The one selector of every family: candidates in, a plan out, with the reasons against each loser.

Order: the user's flag (invalid: an error with all reasons); a measured result from the tuning file; priority; ties by
name. All winners of one plan share a layout, which is chosen first. Something asked for by name fails closed; only an
automatic choice may pass over a candidate, and keeps the trace.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from hardpoint.adapters.candidates import AdaptedOffer, adapted_offers
from hardpoint.logs import log_once
from hardpoint.plugin_host import Offer, PluginSet
from hardpoint.plugin_host.blame import blame, misbehaved
from hardpoint.plugin_host.record import CORE
from hardpoint.selection.plan import Plan, PlanEntry, Rejection, Rule, StepRange
from hardpoint.selection.ranges import covers, cut, merge, overlap, tokens_in, tokens_of
from hardpoint.selection.settings import Choice, Settings
from hardpoint.selection.tuning import TuningFile, Verdict
from hardpoint_plugin_api import (
    CheckContext,
    DeviceInfo,
    HardpointError,
    KernelBuild,
    PluginError,
    Preference,
    Reason,
    Request,
    Requirement,
    SelectionError,
    UnknownNameError,
    Workload,
)
from hardpoint_plugin_api.requirements import OF_PACKAGES

logger = logging.getLogger(__name__)


class Selector:
    """Answers requests for one engine: one device, one set of plugins, one user's settings.

    ``load`` imports an offer's target (used for winners only, to ask their own ``supports``). ``refuses`` says why the
    user wants an offer in no case, whatever the workload; a generated adapter is as good as what it adapts. ``asked``
    are the plugins that the user named: a winner of theirs that is broken is an error, another plugin's is passed over
    with a warning. With ``postpones``, a winner that must be built first is passed over; see KernelBuild.
    """

    def __init__(
        self,
        plugins: PluginSet,
        device: DeviceInfo,
        settings: Settings,
        tuning: TuningFile | None = None,
        *,
        load: Callable[[Offer], object],
        refuses: Callable[[Offer], Reason | None] = lambda offer: None,
        asked: Collection[str] = (),
        postpones: bool = False,
    ) -> None:
        self._refuses, self._asked = refuses, frozenset(asked)
        self.device, self.settings = device, settings
        self._plugins, self._tuning = plugins, tuning or TuningFile()
        self._load = load
        self._plans: dict[Workload, Plan] = {}
        self._free: set[Workload] = set()
        self._of_packages: dict[Requirement, Reason | None] = {}
        self._postpones, self._postponed = postpones, dict[Workload, dict[Offer, KernelBuild]]()

    @property
    def plans(self) -> Sequence[Plan]:
        """Every plan made so far, in the order of the requests."""
        return tuple(self._plans.values())

    def select(self, workload: Workload, *, binding: bool = True) -> Plan:
        """Return the plan for ``workload``; equal workloads get the same plan.

        A candidate that the user asked for by name must serve. With ``binding`` False it comes first where it can
        serve, and the plan is the automatic one elsewhere; once asked for as binding, a workload remains so.

        Raises UnknownNameError for a name that no candidate has, SelectionError (with every candidate's reasons) when
        nothing can serve, or not what was asked for by name.
        """
        if binding and workload in self._free:
            self._free.discard(workload)
            del self._plans[workload]
        if workload not in self._plans:
            if not binding:
                self._free.add(workload)
            self._plans[workload] = self._decided(workload)
        return self._plans[workload]

    def postponed(self, workload: Workload) -> Mapping[Offer, KernelBuild]:
        """The candidates that the plan for ``workload`` passes over until they are built."""
        return self._postponed.get(workload, {})

    def postponed_among(self, workloads: Collection[Workload]) -> bool:
        """Whether the plan for any of ``workloads`` passes over a candidate until it is built."""
        return any(workload in workloads for workload in self._postponed)

    def built_apart_from(self, workloads: Collection[Workload]) -> list[Offer]:
        """The candidates of other workloads than these that were passed over and are built now, each once.

        Raises SelectionError.
        """
        before = {workload: set(found) for workload, found in self._postponed.items() if workload not in workloads}
        self.decided_again(before)
        return list(
            dict.fromkeys(o for workload, found in before.items() for o in found - self.postponed(workload).keys())
        )

    @property
    def builds(self) -> Sequence[tuple[Offer, KernelBuild]]:
        """All that is to be built for the plans made so far."""
        return tuple(item for found in self._postponed.values() for item in found.items())

    def decided_again(self, workloads: Collection[Workload]) -> dict[Workload, Plan]:
        """Plans, by the builds that are left now, for those of ``workloads`` whose plans pass over one.

        ``adopt`` keeps them. Raises SelectionError.
        """
        return {workload: self._decided(workload) for workload in list(self._postponed) if workload in workloads}

    def adopt(self, plans: Mapping[Workload, Plan]) -> None:
        """Answer with these plans from now on."""
        self._plans.update(plans)

    def _decided(self, workload: Workload) -> Plan:
        """A new plan, without the user's choice where that does not bind and cannot serve."""
        choice = self.settings.choice_for(workload)
        if choice is None or workload not in self._free:
            return self._decided_by(workload, choice)
        try:
            return self._decided_by(workload, choice)
        except SelectionError:
            return self._decided_by(workload, None)

    def _decided_by(self, workload: Workload, choice: Choice | None) -> Plan:
        """A new plan by a choice. Where nothing but what must be built can serve, it is waited for."""
        self._postponed.pop(workload, None)
        try:
            return _Contest(self, workload, self._postpones).decide(choice)
        except SelectionError:
            if not self._postponed.pop(workload, None):
                raise
            return _Contest(self, workload).decide(choice)

    def _pending(self, offer: Offer, workload: Workload) -> list[Reason]:
        """The reason to pass over ``offer`` until it is built, if it must be, noted as postponed.

        Raises PluginError where the target of a plugin that was asked for is broken.
        """
        target = None if isinstance(offer, AdaptedOffer) else self._load(offer)
        pending = getattr(target, "pending_build", None)
        if pending is None:
            return []
        try:
            with blame(offer):
                build = pending(workload, self.device)
            if build is not None and not isinstance(build, KernelBuild):
                raise misbehaved(offer, f"must return a KernelBuild or None from pending_build(), got {build!r}")
        except HardpointError as error:
            return [self._broken(offer, "pending-build-failed", error)]
        if build is None:
            return []
        self._postponed.setdefault(workload, {})[offer] = build
        message = f"{build.title} must be built first; another kernel serves meanwhile"
        return [Reason("building", message, fix="--wait-for-kernels")]

    def candidates(self, workload: Workload) -> tuple[Offer, ...]:
        """All that could serve steps of ``workload``, whoever comes first; they are imported, to ask them themselves.

        Raises PluginError where one of a plugin that was asked for is broken.
        """
        return _Contest(self, workload).candidates()

    def priority(self, workload: Workload, offer: Offer, where: StepRange) -> int:
        """The priority of ``offer`` in all steps of a range, which a preference of its contribution may set."""
        return _priority_in(where, offer, self._preferences(offer, workload))

    def _objections(self, offer: Offer, workload: Workload) -> Iterator[Reason]:
        """Everything that data can say against ``offer``."""
        contribution = offer.contribution
        if contribution.platforms and self.device.platform not in contribution.platforms:
            yield Reason(
                "platform",
                "it is for another platform",
                wanted=self.device.platform,
                supported=", ".join(contribution.platforms),
            )
        if contribution.family == "op" and offer.plugin != CORE:
            switched_off = self.settings.op_switched_off(str(contribution.of))
            if switched_off:
                yield switched_off
        refused = self._refuses(offer.inner if isinstance(offer, AdaptedOffer) else offer)
        if refused:
            yield refused
        context = CheckContext(Request(self.device, workload), offer.api)
        yield from (r for requirement in contribution.requirements if (r := self._unmet(requirement, context)))

    def _preferences(self, offer: Offer, workload: Workload) -> tuple[Preference, ...]:
        """The preferences of ``offer`` that hold for ``workload`` in some steps."""
        if not offer.contribution.preferred:
            return ()
        context = CheckContext(Request(self.device, workload), offer.api)
        return tuple(p for p in offer.contribution.preferred if not any(self._unmet(r, context) for r in p.requires))

    def _unmet(self, requirement: Requirement, context: CheckContext) -> Reason | None:
        """Why ``context`` does not meet ``requirement``, None where it does.

        Packages are looked up once: an engine lives with those that it started with, and asks hundreds of times.
        """
        if not isinstance(requirement, OF_PACKAGES):
            return requirement.check(context)
        if requirement not in self._of_packages:
            self._of_packages[requirement] = requirement.check(context)
        return self._of_packages[requirement]

    def _dynamic_reasons(self, offer: Offer, workload: Workload) -> list[Reason]:
        """Reasons of the target itself, after import: it cannot be loaded, or does not support the workload.

        Raises PluginError where the target of a plugin that was asked for is broken.
        """
        try:
            target = self._load(offer)
        except PluginError as error:
            return [self._broken(offer, "load-failed", error)]
        try:
            return self._asked_of(target, offer, workload)
        except HardpointError as error:
            return [self._broken(offer, "supports-failed", error)]

    def _asked_of(self, target: object, offer: Offer, workload: Workload) -> list[Reason]:
        """The reasons of the target's ``supports``; raises HardpointError, naming the plugin, where it fails."""
        with blame(offer):
            supports = getattr(target, "supports", None)
            found = supports(workload, self.device) if supports else []
        if not isinstance(found, list) or not all(isinstance(r, Reason) for r in found):
            raise misbehaved(offer, f"must return a list of Reason from supports(), got {found!r}")
        return found

    def _broken(self, offer: Offer, code: str, error: HardpointError) -> Reason:
        if offer.plugin in self._asked:
            raise error
        log_once(logger, logging.WARNING, str(error), f"passed over: {error}", self)
        return Reason(code, str(error))


@dataclass
class _Contest:
    """One request being decided.

    ``postpones``: candidates that must be built first are passed over, unless they are asked for by name. ``rejected``
    finds what data and the target itself say against a candidate; one objection decides. Candidates that are replaced,
    leave a gap or come after another are not in there: these change with every candidate that drops out. ``gaps`` are
    the offers whose layout, in the last round, had no winner for some steps.
    """

    selector: Selector
    workload: Workload
    postpones: bool = False
    offers: list[Offer] = field(init=False)
    rejected: dict[Offer, Callable[[], Iterable[Reason]]] = field(default_factory=dict)
    gaps: set[Offer] = field(default_factory=set)
    proven: set[Offer] = field(default_factory=set)
    preferences: dict[Offer, tuple[Preference, ...]] = field(default_factory=dict)
    replacing: list[Offer] = field(init=False)

    def __post_init__(self) -> None:
        own = self._of_this_platform(self.selector._plugins.offers(self.workload.family, self.workload.of))
        self.offers = sorted([*own, *adapted_offers(own, self.workload)], key=lambda o: o.contribution.name)
        self.preferences = {o: self.selector._preferences(o, self.workload) for o in self.offers}
        self.replacing = [o for o in self.offers if o.contribution.replaces]

    def _of_this_platform(self, offers: Sequence[Offer]) -> list[Offer]:
        """``offers`` without those that bear the name of one for this platform, and are for others."""
        platform = self.selector.device.platform
        here, elsewhere = list[Offer](), list[Offer]()
        for offer in offers:
            platforms = offer.contribution.platforms
            (here if not platforms or platform in platforms else elsewhere).append(offer)
        names = {o.contribution.name for o in here}
        return [*here, *(o for o in elsewhere if o.contribution.name not in names)]

    def candidates(self) -> tuple[Offer, ...]:
        self._judge_by_data()
        while unproven := [o for o in self.offers if o not in self.proven and self._is_eligible(o)]:
            for offer in unproven:
                self._prove(offer, None)
        return tuple(filter(self._is_eligible, self.offers))

    def _judge_by_data(self) -> None:
        for offer in self.offers:
            objections = partial(self.selector._objections, offer, self.workload)
            if next(objections(), None):
                self.rejected[offer] = objections

    def decide(self, choice: Choice | None) -> Plan:
        self._judge_by_data()
        if choice and choice.where_offered and not self._is_offered(choice):
            choice = None
        if choice:
            self._hold_to(choice)
        verdicts = self.selector._tuning.verdicts(self.selector.device, self.workload)
        while True:
            eligible = list(filter(self._is_eligible, self.offers))
            entries = self._winners(eligible, choice, verdicts)
            unproven = [e.offer for e in entries if e.offer not in self.proven]
            if not unproven:
                return self._plan(entries, choice)
            for offer in dict.fromkeys(unproven):
                self._prove(offer, choice)

    def _is_eligible(self, offer: Offer) -> bool:
        return offer not in self.rejected and self._replacement(offer) is None

    def _replacement(self, offer: Offer) -> Offer | None:
        """The candidate that takes the place of ``offer``.

        Only a candidate that could itself serve takes another's place: a plugin for another device must not cost this
        one its reference.
        """
        if not self.replacing:
            return None
        name = (offer.inner if isinstance(offer, AdaptedOffer) else offer).contribution.name
        return next((o for o in self.replacing if o.contribution.replaces == name and o not in self.rejected), None)

    def _against(self, offer: Offer) -> list[Reason]:
        """Every reason that keeps ``offer`` from being considered at all."""
        by, found = self._replacement(offer), self.rejected.get(offer)
        replaced = [Reason("replaced", f"plugin {by.plugin} replaces it by {by.contribution.name}")] if by else []
        return [*(found() if found else ()), *replaced]

    def _hold_to(self, choice: Choice) -> None:
        """Fail closed where the candidate asked for by name does not exist or cannot serve."""
        named = self._named(choice)
        if not named:
            title = self._title()
            raise UnknownNameError(
                f"{title} implementation",
                choice.name,
                {o.contribution.name for o in self.offers},
                f"Asked for by {choice.flag}.",
            )
        if not self._is_eligible(named[0]):
            self._refuse(choice, named[0])

    def _is_offered(self, choice: Choice) -> bool:
        """Whether the candidate, or for a generated adapter what it adapts, is offered for what the request asks."""
        name = choice.name.partition("+")[0]
        return any(offer.contribution.name == name for offer in self.offers)

    def _named(self, choice: Choice) -> list[Offer]:
        return [o for o in self.offers if o.contribution.name == choice.name]

    def _prove(self, offer: Offer, choice: Choice | None) -> None:
        reasons = self.selector._dynamic_reasons(offer, self.workload)
        is_asked = choice is not None and offer.contribution.name == choice.name
        if not reasons and self.postpones and not is_asked:
            reasons = self.selector._pending(offer, self.workload)
        if not reasons:
            self.proven.add(offer)
            return
        self.rejected[offer] = partial(tuple, reasons)
        if choice and is_asked:
            self._refuse(choice, offer)

    def _refuse(self, choice: Choice, offer: Offer) -> NoReturn:
        reasons = self._against(offer) or [_leaves_a_gap(offer)]
        alternatives = [o.contribution.name for o in self.offers if o not in self.gaps and self._is_eligible(o)]
        raise SelectionError(
            f"{choice.flag} {choice.name}: it cannot serve {self._title()} ({self.workload.key()}). "
            f"Can serve: {', '.join(alternatives) or 'nothing'}.",
            {offer.contribution.name: reasons},
        )

    def _title(self) -> str:
        return f"{self.workload.family} {self.workload.of}" if self.workload.of else self.workload.family

    def _winners(
        self, eligible: Sequence[Offer], choice: Choice | None, verdicts: Sequence[Verdict]
    ) -> list[PlanEntry]:
        """The winner of each range within the layout whose winners are best; SelectionError if no layout covers all.

        A contribution that was asked for by name sets the layout, since another layout would drop it in silence; else
        the contribution that was measured as fastest in any steps sets it.
        """
        measured = {verdict.name for verdict in verdicts}

        def is_asked(offer: Offer) -> bool:
            return choice is not None and offer.contribution.name == choice.name

        def order(offer: Offer) -> tuple[bool, bool, int, str]:
            name = offer.contribution.name
            return (not is_asked(offer), name not in measured, -self._highest_priority(offer), name)

        def winner(group: Sequence[Offer], where: StepRange) -> PlanEntry | None:
            able = [o for o in group if covers(tokens_of(o), where)]
            named = {v.name: v for v in reversed(verdicts) if covers(v.tokens, where)}

            def order_here(offer: Offer) -> tuple[bool, bool, int, str]:
                name = offer.contribution.name
                return (not is_asked(offer), name not in named, -self._priority(offer, where), name)

            first = min(able, key=order_here, default=None)
            if first is None:
                return None
            verdict = named.get(first.contribution.name)
            rule: Rule = "only candidate" if len(eligible) == 1 else "priority"
            if is_asked(first):
                rule, verdict = "flag", None
            return PlanEntry(where, first, "tuning file" if verdict else rule, verdict)

        self.gaps.clear()
        ordered = sorted(eligible, key=order)
        for layout in dict.fromkeys(o.contribution.layout for o in ordered):
            group = [o for o in ordered if o.contribution.layout == layout]
            names = {o.contribution.name for o in group}
            preferred = [tokens_in(p.requires) for o in group for p in self.preferences[o]]
            ranges = cut([*map(tokens_of, group), *preferred, *(v.tokens for v in verdicts if v.name in names)])
            entries = [entry for where in ranges if (entry := winner(group, where))]
            if len(entries) == len(ranges):
                return merge(entries)
            self.gaps |= set(group)
            if choice:
                self._refuse(choice, ordered[0])
        raise SelectionError(
            f"nothing can serve {self._title()} ({self.workload.key()}) on {self.selector.device.name}",
            {o.contribution.name: self._against(o) or [_leaves_a_gap(o)] for o in self.offers},
        )

    def _priority(self, offer: Offer, where: StepRange) -> int:
        return _priority_in(where, offer, self.preferences[offer])

    def _highest_priority(self, offer: Offer) -> int:
        """The highest that ``offer`` has in any steps: the one that chooses the layout."""
        return max([offer.contribution.priority, *(p.priority for p in self.preferences[offer])])

    def _plan(self, entries: Sequence[PlanEntry], choice: Choice | None) -> Plan:
        winners = {e.offer for e in entries}

        def found_against(offer: Offer) -> list[Reason]:
            if against := self._against(offer):
                return against
            return [_leaves_a_gap(offer) if offer in self.gaps else self._outdone(offer, entries, choice)]

        rejected = (Rejection(offer, partial(found_against, offer)) for offer in self.offers if offer not in winners)
        return Plan(self.workload, tuple(entries), tuple(rejected))

    def _outdone(self, offer: Offer, entries: Sequence[PlanEntry], choice: Choice | None) -> Reason:
        """Why ``offer``, which could serve, wins no range."""
        c, layout = offer.contribution, entries[0].offer.contribution.layout
        measured = [e for e in entries if e.verdict]
        if c.layout != layout:
            best = max((e.offer for e in entries), key=self._highest_priority)
            above, own = self._highest_priority(best), self._highest_priority(offer)
            if choice:
                why = f"{choice.flag} asks for {choice.name}"
            else:
                why = _was_measured(offer, measured[0]) if measured else f"{best.contribution.name} comes before it"
            return Reason(
                "layout",
                f"{why}, and all winners of a plan must have one layout",
                wanted=f"layout {layout}" + ("" if choice or measured else f", or priority above {above}"),
                supported=f"layout {c.layout}" + ("" if measured else f", priority {own}"),
            )
        if choice:
            return Reason("not-asked-for", f"{choice.flag} asks for {choice.name}")
        ahead = [e for e in entries if overlap(tokens_of(offer), e.range)]
        by_priority = [e for e in ahead if not e.verdict]
        if not by_priority:
            return Reason("comes-after", _was_measured(offer, ahead[0]))
        nearest = min(by_priority, key=lambda e: self._priority(e.offer, e.range))
        theirs, own = self._priority(nearest.offer, nearest.range), self._priority(offer, nearest.range)
        return Reason(
            "comes-after",
            f"{nearest.offer.contribution.name} comes before it" + (", by its name" if theirs == own else ""),
            wanted=f"priority above {theirs}",
            supported=f"priority {own}",
        )


def _priority_in(where: StepRange, offer: Offer, preferences: Sequence[Preference]) -> int:
    preferred = (p.priority for p in preferences if covers(tokens_in(p.requires), where))
    return next(preferred, offer.contribution.priority)


def _was_measured(offer: Offer, ahead: PlanEntry) -> str:
    """The tuning file's reason against ``offer``."""
    times = ahead.verdict.against(offer.contribution.name) if ahead.verdict else None
    said = f"{ahead.offer.contribution.name} was measured: "
    return said + (f"{times}; the tuning file names it" if times else "the tuning file names it")


def _leaves_a_gap(offer: Offer) -> Reason:
    need = tokens_of(offer)
    return Reason(
        "tokens",
        "it serves some steps only, and no candidate with its layout serves the others",
        wanted=str(StepRange()),
        supported=str(StepRange(need.min, need.max, need.phase)),
    )
