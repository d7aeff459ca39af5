"""The order in which plugins are loaded: core, then each after those that its manifest names, ties by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hardpoint.plugin_host.record import PluginRecord


def load_order(records: Iterable[PluginRecord]) -> list[PluginRecord]:
    """Return the usable plugins in load order, then all others by name. There must be no cycle among the usable."""
    others = sorted((r for r in records if not r.is_usable), key=lambda r: (r.name, r.distribution, r.entry_value))
    waiting = sorted((r for r in records if r.is_usable), key=lambda r: (not r.is_core, r.name))
    ordered: list[PluginRecord] = []
    while waiting:
        names = {r.name for r in waiting}
        following = next(r for r in waiting if r.is_core or not names.intersection(_after(r)))
        waiting.remove(following)
        ordered.append(following)
    return ordered + others


def find_cycles(records: Sequence[PluginRecord]) -> dict[PluginRecord, tuple[str, ...]]:
    """Return each plugin that would load after itself, with the names of its cycle's members."""
    graph = {r.name: _after(r) for r in records}
    reach = {name: _reachable(name, graph) for name in graph}
    return {
        r: tuple(sorted(name for name in reach[r.name] if r.name in reach[name]))
        for r in records
        if r.name in reach[r.name]
    }


def _after(record: PluginRecord) -> tuple[str, ...]:
    return record.manifest.after if record.manifest else ()


def _reachable(start: str, graph: Mapping[str, Sequence[str]]) -> set[str]:
    """The names found by following ``graph`` from ``start``, which is among them only if it lies on a cycle."""
    found: set[str] = set()
    ahead = [start]
    while ahead:
        new = {name for name in graph[ahead.pop()] if name in graph} - found
        found |= new
        ahead.extend(new)
    return found
