"""Candidates made by hand, and a set of plugins that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hardpoint.context import load_target
from hardpoint.plugin_host import Offer, PluginSet
from hardpoint.selection import Plan, Selector, Settings, TuningFile, Verdict
from hardpoint_plugin_api import (
    FAMILIES,
    ApiVersion,
    Contribution,
    DeviceInfo,
    LinearWorkload,
    PluginLoadError,
    Preference,
    Reason,
    Requirement,
    TokensRequirement,
    Workload,
)

TOY = DeviceInfo("toy", "Toy 1", "cpu", "toy1")
MATMUL = LinearWorkload(dtype="float32", in_features=8, out_features=4)


def offer(
    name: str,
    *,
    family: str = "linear",
    of: str | None = None,
    priority: int = 0,
    layout: str = "plain",
    tokens: TokensRequirement | None = None,
    platforms: tuple[str, ...] = (),
    requires: tuple[Requirement, ...] = (),
    replaces: str | None = None,
    preferred: tuple[Preference, ...] = (),
    plugin: str = "acme",
    version: str = "1.0",
) -> Offer:
    """One candidate; its target is known to FakePlugins by ``name``."""
    contribution = Contribution(
        family=family,
        name=name,
        target=f"{plugin}_hp:{name}",
        of=of or FAMILIES[family].default_of,
        platforms=platforms,
        priority=priority,
        requires=(*requires, tokens) if tokens else requires,
        replaces=replaces,
        layout=layout,
        preferred=preferred,
    )
    return Offer(contribution, plugin, ApiVersion(0, 2), f"hardpoint-{plugin}", version)


class FakePlugins(PluginSet):
    """Holds offers instead of records. A target is what ``targets`` has under the offer's name, by default one without
    ``supports``; an exception there is what loading raises, as the PluginLoadError that a PluginSet promises.

    ``loaded`` are the names in the order in which they were first loaded.
    """

    def __init__(
        self, offers: Iterable[Offer], targets: Mapping[str, object] | None = None, presets: Iterable[DeviceInfo] = ()
    ) -> None:
        super().__init__(())
        self.loaded: list[str] = []
        self._offers, self._objects = list(offers), dict(targets or {})
        self._presets = {d.name: d for d in presets}
        assert self._objects.keys() <= {o.contribution.name for o in self._offers}

    def offers(self, family: str, of: str | None = None) -> list[Offer]:
        return [o for o in self._offers if o.contribution.family == family and of in (None, o.contribution.of)]

    def devices(self) -> dict[str, DeviceInfo]:
        return dict(self._presets)

    def load(self, offer: Offer) -> object:
        assert offer in self._offers, f"{offer} is none of this set's"
        name = offer.contribution.name
        if name not in self.loaded:
            self.loaded.append(name)
        found = self._objects.get(name, object())
        if isinstance(found, Exception):
            raise PluginLoadError(f"plugin {offer.plugin}: {found}") from found
        return found


class Answers:
    """A target whose ``supports`` gives one answer (an exception: raises it) and notes what it was asked."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.asked: list[tuple[Workload, DeviceInfo]] = []

    def supports(self, workload: Workload, device: DeviceInfo) -> object:
        self.asked.append((workload, device))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


VETO = Reason("toy-veto", "not on a Tuesday")


def selector(
    plugins: FakePlugins,
    choices: Mapping[str, str] | None = None,
    custom_ops: tuple[str, ...] = ("all",),
    tuning: TuningFile | None = None,
    device: DeviceInfo = TOY,
    asked: Sequence[str] = (),
) -> Selector:
    """A selector that loads as an engine's does."""
    settings = Settings(dict(choices or {}), custom_ops)
    return Selector(plugins, device, settings, tuning, load=lambda offer: load_target(plugins, offer), asked=asked)


def select(
    *offers: Offer, workload: Workload = MATMUL, choice: str | None = None, tuned: str | Sequence[Verdict] | None = None
) -> Plan:
    """The plan for ``workload``, with one name asked for by flag and one measured."""
    verdicts = (Verdict(tuned),) if isinstance(tuned, str) else tuple(tuned or ())
    tuning = TuningFile({(TOY.name, workload.family, workload.of, workload.key()): verdicts})
    slot = f"{workload.family}.{workload.of}" if workload.of else workload.family
    return selector(FakePlugins(offers), {slot: choice} if choice else {}, tuning=tuning).select(workload)


def served(plan: Plan) -> list[tuple[str, str]]:
    """(range, winner) of each row."""
    return [(str(e.range), e.offer.contribution.name) for e in plan.entries]


def reasons(plan: Plan) -> dict[str, list[str]]:
    """The codes against each loser."""
    return {r.offer.contribution.name: [reason.code for reason in r.reasons] for r in plan.rejected}
