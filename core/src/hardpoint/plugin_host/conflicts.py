"""Which plugins cannot be registered beside the others. A plugin is registered as a whole or not at all.

Errors of one plugin by itself, or against core, count before conflicts between two plugins, so that a refused plugin
takes no other with it. Another plugin may build on a refused one: the checks that look for a contribution run until
nothing changes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hardpoint.plugin_host.order import find_cycles
from hardpoint.plugin_host.record import PluginRecord
from hardpoint_plugin_api import MANIFEST_NAME, Contribution, Reason, nearest

_DECLARING_NAME = {"op": "reference", "layer": "default"}
"""The contribution by which an op or a layer comes into being."""


def refuse_conflicts(records: Sequence[PluginRecord]) -> None:
    """Refuse each plugin among the ready ones that conflicts with another or builds on something that is not there."""
    _refuse_shared_names(_ready(records))
    _refuse_repetitions(_ready(records))
    claims = {record: dict(sorted(_claims(record).items())) for record in _ready(records)}
    _refuse_rivals(_ready(records), claims, of_core=True)
    _refuse_unfounded(records)
    _refuse_rivals(_ready(records), claims, of_core=False)
    _refuse_cycles(_ready(records))
    _refuse_unfounded(records)


def _ready(records: Sequence[PluginRecord]) -> list[PluginRecord]:
    return sorted((r for r in records if r.status == "ready"), key=lambda r: (r.name, r.distribution, r.entry_value))


def _refuse_shared_names(ready: Sequence[PluginRecord]) -> None:
    groups = defaultdict(list)
    for record in ready:
        groups[record.name].append(record)
    for name, group in groups.items():
        losers = [r for r in group if not r.is_core]
        if len(group) < 2:
            continue
        who = _join(f"{r.distribution} {r.version} ({r.entry_value})" for r in group)
        fix = "uninstall all but one: " + " or ".join(
            f"pip uninstall {d}" for d in sorted({r.distribution for r in losers})
        )
        for record in losers:
            record.refuse(Reason("duplicate-plugin", f"several plugins are named {name!r}: {who}", fix=fix))


def _refuse_repetitions(ready: Sequence[PluginRecord]) -> None:
    for record in ready:
        repeated = [claim for claim, count in Counter(_names(record)).items() if count > 1]
        if repeated:
            message = f"its manifest says more than once that it would {repeated[0]}"
            record.refuse(Reason("duplicate-claim", message, fix=f"correct {record.folder}/{MANIFEST_NAME}"))


def _names(record: PluginRecord) -> Iterator[str]:
    """Claims that only one plugin may make, as in "it would ..."."""
    yield from (f"contribute {c}" for c in record.contributions)
    yield from (f"describe the device preset {d.name}" for d in (record.manifest.devices if record.manifest else ()))


def _claims(record: PluginRecord) -> dict[str, frozenset[str]]:
    """All that only one plugin may do on a platform, with the platforms that it does it on; none means any."""
    claims = dict.fromkeys(_names(record), frozenset[str]())
    for c in record.contributions:
        claims[f"contribute {c}"] = frozenset(c.platforms)
        if c.replaces:
            claims[f"replace {replace(c, name=c.replaces)}"] = frozenset(c.platforms)
    return claims


def _meet(some: frozenset[str], others: frozenset[str]) -> bool:
    """Whether two sets of platforms have one in common."""
    return not some or not others or bool(some & others)


def _refuse_rivals(
    ready: Sequence[PluginRecord], claims: Mapping[PluginRecord, Mapping[str, frozenset[str]]], *, of_core: bool
) -> None:
    """Refuse plugins that claim the same: against core the other one, between third parties both."""
    holders: dict[str, dict[PluginRecord, frozenset[str]]] = defaultdict(dict)
    for record in ready:
        for claim, platforms in claims[record].items():
            holders[claim][record] = platforms
    for claim, places in holders.items():
        if len(places) < 2:
            continue
        rivals = [r for r in places if any(r is not s and _meet(places[r], places[s]) for s in places)]
        if not rivals or of_core != any(r.is_core for r in rivals):
            continue
        message = f"{_join(r.title for r in rivals)} would each {claim}"
        for record in rivals:
            if of_core and not record.is_core:
                fix = f"give it a name of its own in {MANIFEST_NAME}, with replaces = NAME to take the other's place"
                record.refuse(Reason("duplicate-claim", message, fix=fix))
            elif not of_core:
                others = [r.name for r in ready if r not in rivals and not r.is_core]
                lists = " or ".join(f"--plugins {','.join([r.name, *others])}" for r in rivals)
                record.refuse(Reason("duplicate-claim", message, fix=f"choose with --plugins: {lists}"))


def _refuse_cycles(ready: Sequence[PluginRecord]) -> None:
    for record, members in find_cycles(ready).items():
        message = (
            f"the plugins {', '.join(members)} would each load after the other"
            if members[1:]
            else "it would load after itself"
        )
        record.refuse(Reason("after-cycle", message, fix=f"take the names out of 'after' in one's {MANIFEST_NAME}"))


@dataclass(frozen=True)
class _Catalog:
    """Contributions of the ready plugins: names by slot, and the plugin that declared each op and layer."""

    names: dict[tuple[str, str | None], set[str]]
    declared: dict[str, dict[str, list[PluginRecord]]]

    @classmethod
    def of(cls, ready: Iterable[PluginRecord]) -> _Catalog:
        catalog = cls(defaultdict(set), {family: defaultdict(list) for family in _DECLARING_NAME})
        for record in ready:
            for c in record.contributions:
                catalog.names[c.slot].add(c.name)
                if c.name == _DECLARING_NAME.get(c.family):
                    catalog.declared[c.family][str(c.of)].append(record)
        return catalog


def _refuse_unfounded(records: Sequence[PluginRecord]) -> None:
    """Refuse, until nothing changes, each plugin that implements or replaces what is not there."""
    while True:
        ready = _ready(records)
        catalog = _Catalog.of(ready)
        found = [(r, reason) for r in ready for c in r.contributions if (reason := _unfounded(r, c, catalog))]
        for record, reason in found:
            record.refuse(reason)
        if not found:
            return


def _unfounded(record: PluginRecord, c: Contribution, catalog: _Catalog) -> Reason | None:
    """Say what ``c`` of ``record`` builds on that is not there."""
    if c.family in _DECLARING_NAME:
        declared, of = catalog.declared[c.family], str(c.of)
        (other,) = _DECLARING_NAME.keys() - {c.family}
        elsewhere = [r for r in catalog.declared[other].get(of, ()) if r is not record]
        if elsewhere and not record.is_core and not any(r is not record for r in declared.get(of, ())):
            return Reason(
                "wrong-family",
                f"{record.title} registers {of!r} as {_a(c.family)}, {elsewhere[0].title} as {_a(other)}",
                fix=f"write family = {other!r} in {record.folder}/{MANIFEST_NAME}",
            )
        if of not in declared:
            return _not_there(
                "unknown-of", f"{c}: no plugin declares {_a(c.family)} named {of!r}", of, declared, record
            )
    others = catalog.names[c.slot] - {c.name}
    if c.replaces and c.replaces not in others:
        return _not_there(
            "unknown-replaces", f"{c} replaces {c.replaces!r}, which nobody offers", c.replaces, others, record
        )
    return None


def _not_there(code: str, message: str, name: str, known: Iterable[str], record: PluginRecord) -> Reason:
    guess = nearest(name, known)
    return Reason(
        code,
        f"{message}; did you mean {guess!r}?" if guess else f"{message}; known: {', '.join(sorted(known)) or 'none'}",
        fix=f"correct {record.folder}/{MANIFEST_NAME}, or install the plugin that has it, or a newer hardpoint-core",
    )


def _a(family: str) -> str:
    return f"an {family}" if family[0] in "aeiou" else f"a {family}"


def _join(items: Iterable[str]) -> str:
    *most, last = items
    return f"{', '.join(most)} and {last}" if most else last
