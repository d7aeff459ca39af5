"""Which CPUs this process's threads may run on: ``cpu.bind``.

Threads are bound to the set, not each to one of its CPUs: a thread that is woken then finds a CPU of the set that
is idle, where there is one, whatever else runs on the machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from hardpoint.platforms import host
from hardpoint_plugin_api import ConfigError

_LIST = re.compile(r"[0-9]{1,6}(-[0-9]{1,6})?(,[0-9]{1,6}(-[0-9]{1,6})?)*")

_MOST_LISTED = 64


def usable_cpus() -> tuple[int, ...]:
    """The logical CPUs that this process may run on now."""
    return tuple(sorted(os.sched_getaffinity(0)))


def chosen_cpus(
    setting: str, usable: Collection[int], root: Path = host.ROOT, rank: int = 0, ranks: int = 1
) -> tuple[int, ...]:
    """The CPUs that ``cpu.bind`` means; none for ``""``, which binds nothing. Raises ConfigError.

    ``auto`` is one CPU of each physical core of one NUMA node: of the node with the most cores among ``usable``, and
    of several such of the one that this process runs on at the moment. For number ``rank`` of several ``ranks`` of this
    host nodes are handed out in turn, those with the most cores first, and ranks of one node share its cores.
    """
    if setting == "auto":
        return _one_node(usable, root) if ranks == 1 else _part_of_a_node(usable, root, rank, ranks)
    if not setting:
        return ()
    parts = [host.parse_cpu_list(part) for part in setting.split(",")] if _LIST.fullmatch(setting) else [()]
    if not all(parts):
        raise ConfigError(f'cpu.bind must be "", "auto" or a list of CPUs such as "0-3,8", got {setting!r}')
    cpus = {cpu for part in parts for cpu in part}
    if foreign := sorted(cpus - set(usable)):
        raise ConfigError(
            f"cpu.bind names CPUs that this process may not use: {_listed(foreign)}; it may use {_listed(usable)}"
        )
    return tuple(sorted(cpus))


def bind(cpus: Collection[int]) -> None:
    """Have all threads of this process, and those that they start, run on ``cpus`` alone."""
    for task in host.entries(host.ROOT / "proc/self/task"):
        try:
            os.sched_setaffinity(int(task), cpus)
        except ProcessLookupError:
            continue  # it ended a moment ago


def _one_node(usable: Collection[int], root: Path) -> tuple[int, ...]:
    nodes, here = _nodes(usable, root), _running_on(root)
    cores = [_one_of_each_core(cpus, root) for cpus in nodes]
    return max(cores, key=lambda cpus: (len(cpus), here in nodes[cores.index(cpus)]))


def _part_of_a_node(usable: Collection[int], root: Path, rank: int, ranks: int) -> tuple[int, ...]:
    nodes = sorted((_one_of_each_core(cpus, root) for cpus in _nodes(usable, root)), key=len, reverse=True)
    cores = nodes[rank % len(nodes)]
    place, sharing = rank // len(nodes), len(range(rank % len(nodes), ranks, len(nodes)))
    if sharing >= len(cores):
        return (cores[place % len(cores)],)
    return cores[len(cores) * place // sharing : len(cores) * (place + 1) // sharing]


def _nodes(usable: Collection[int], root: Path) -> list[set[int]]:
    """The ``usable`` CPUs of each node that has some."""
    return [cpus for node in host.numa_nodes(root) if (cpus := set(node.cpus) & set(usable))] or [set(usable)]


def _one_of_each_core(cpus: Collection[int], root: Path) -> tuple[int, ...]:
    first: dict[str, int] = {}
    for cpu in sorted(cpus):
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        first.setdefault(host.read_text(siblings) or str(cpu), cpu)
    return tuple(first.values())


def _running_on(root: Path) -> int | None:
    """The CPU that this process's first thread last ran on: field 39 of its state, whose second is in brackets."""
    fields = host.read_text(root / "proc/self/stat").rpartition(")")[2].split()
    return int(fields[36]) if len(fields) > 36 and fields[36].isdigit() else None


def _listed(cpus: Collection[int]) -> str:
    first = ", ".join(str(cpu) for cpu in sorted(cpus)[:_MOST_LISTED])
    return first if len(cpus) <= _MOST_LISTED else f"{first} and {len(cpus) - _MOST_LISTED} more"
