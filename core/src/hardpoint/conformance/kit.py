"""The plan of a run of the kit: contributions, their trials, and shards."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hardpoint.conformance.plan import LEVELS, Level
from hardpoint.plugin_host import Offer, PluginSet
from hardpoint.plugin_host.record import PluginRecord
from hardpoint_plugin_api import FAMILIES, ConfigError, Contribution, UnknownNameError

if TYPE_CHECKING:
    from hardpoint.conformance.trials import Result

SEEDS = range(2**63)
"""Valid seeds: torch's generators take no others."""
TIMEOUTS = range(1, 24 * 3600 + 1)
"""Seconds that a case can be given: a day at most, far below what clocks and timers can count."""
WHOLE = "all"
"""The case of a result that is about a contribution as a whole."""
_MOST_NAMES = 6


@dataclass(frozen=True)
class Shard:
    """Part ``index`` (from 1) of ``count``: every ``count``-th trial. Shards of one run never overlap."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read ``"2/8"``; raises ValueError for anything else."""
        index, _, count = text.partition("/")
        shard = cls(int(index), int(count))
        if not 1 <= shard.index <= shard.count:
            raise ValueError(f"shard {text!r} does not exist")
        return shard

    def holds(self, number: int) -> bool:
        """Whether trial number ``number`` (from 0) belongs to it."""
        return number % self.count == self.index - 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


@dataclass(frozen=True)
class Order:
    """An order to the kit: a plugin's contributions (all, one family's, or those of one name), the level, and the seed.

    ``platform`` is where; by default where an engine would run that can use the plugin. ``settings`` are plugins' own,
    by plugin and key. ``case`` is a glob of case names, for one who looks into a failure: such a run certifies nothing.
    """

    plugin: str
    family: str | None = None
    name: str | None = None
    level: Level = "quick"
    seed: int = 0
    shard: Shard = Shard()
    platform: str | None = None
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    case: str = "*"

    def __post_init__(self) -> None:
        if self.family is not None and self.family not in FAMILIES:
            raise UnknownNameError("family", self.family, FAMILIES)
        if self.level not in LEVELS:
            raise UnknownNameError("level", self.level, LEVELS)
        check_number("the seed", self.seed, SEEDS)

    def record(self, plugins: PluginSet) -> PluginRecord:
        """The plugin; raises UnknownNameError for none, and its own error where it cannot be used."""
        plugins.require([self.plugin])
        return plugins.record(self.plugin)

    def offers(self, plugins: PluginSet) -> list[Offer]:
        """The contributions to try, in the manifest's order. Raises UnknownNameError where none has the name."""
        record = self.record(plugins)
        offers = [
            offer
            for contribution in record.contributions
            for offer in plugins.offers(contribution.family, contribution.of)
            if offer.plugin == record.name and offer.contribution == contribution
        ]
        of_family = [o for o in offers if self.family in (None, o.contribution.family)]
        if self.family and not of_family:
            raise UnknownNameError(
                f"family with contributions of {self.plugin}:", self.family, {o.contribution.family for o in offers}
            )
        named = [o for o in of_family if self.name in (None, o.contribution.name)]
        if self.name and not named:
            raise UnknownNameError("contribution", self.name, {o.contribution.name for o in of_family})
        return named

    def cases(self, names: Sequence[str], already: int = 0) -> Iterator[str]:
        """The cases of a contribution that belong to this run's shard. ``already``: cases listed before."""
        for number, name in enumerate(names, already):
            if self.shard.holds(number) and fnmatch.fnmatchcase(name, self.case):
                yield name


def check_number(what: str, number: float, allowed: range) -> None:
    """Raise ConfigError for a number that is none of ``allowed``."""
    if number not in allowed:
        raise ConfigError(f"{what} is a whole number from {allowed[0]} to {allowed[-1]}, not {number}")


def platforms_for(plugins: PluginSet, offers: Sequence[Offer], wanted: str | None) -> tuple[str | None, ...]:
    """The platforms to run on, best first, of which the first that is present here is meant; None: the engine's choice.

    They are the one asked for; else those that the contributions are or name, as far as they are installed, and the
    engine's choice where a contribution names none, or none of the named is installed.
    """
    if wanted:
        return (wanted,)
    named = [p for of_platform in (True, False) for o in offers for p in _named(o, of_platform)]
    installed = {o.contribution.name for o in plugins.offers("platform")}
    found = list(dict.fromkeys(p for p in named if p in installed))
    serves_any = any(not home_platforms(o.contribution) for o in offers)
    return (*found, None) if serves_any or not found else tuple(found)


def home_platforms(contribution: Contribution) -> tuple[str, ...]:
    """The platforms that a contribution is for; none where it is for any. A platform is for itself."""
    return contribution.platforms or (contribution.name,) * (contribution.family == "platform")


def _named(offer: Offer, of_platform: bool) -> tuple[str, ...]:
    return home_platforms(offer.contribution) if (offer.contribution.family == "platform") == of_platform else ()


def not_tried_here(results: Iterable[Result]) -> Iterator[str]:
    """Lines that name the contributions of which nothing was tried, since they are for hardware that is not in use."""
    by_reason: dict[str, list[str]] = {}
    for result in results:
        if result.case == WHOLE and result.outcome == "skipped":
            title = f"{result.family} {result.of}" if result.of else result.family
            by_reason.setdefault(result.reason, []).append(f"{result.name} ({title})")
    for reason, names in by_reason.items():
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        yield f"not tried: {', '.join(names[:_MOST_NAMES])}{more}: {reason}"


def case_list_digest(listed: Sequence[tuple[Contribution, Sequence[str]]]) -> str:
    """A digest of everything that all shards together try: shards of unlike lists must not be merged."""
    digest = hashlib.sha256()
    for contribution, cases in listed:
        digest.update(f"{contribution}\0".encode())
        for case in cases:
            digest.update(f"{case}\0".encode())
    return digest.hexdigest()[:16]
