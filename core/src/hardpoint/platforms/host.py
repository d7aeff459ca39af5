"""Facts about a Linux host, read from ``/proc`` and ``/sys``.

Every function takes ``root``, the directory that stands for ``/``, so that tests describe a machine by writing files.
A file that is missing or unreadable (another kernel, a sandbox) means that its fact is unknown: nothing here raises.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hardpoint_plugin_api import NO_DEVICE, NumaNode, Reason

ROOT = Path("/")


@dataclass(frozen=True)
class HostMemory:
    """Main memory in bytes: what this process may have in all, and what it could still allocate without swapping."""

    total: int
    available: int


def read_text(path: Path) -> str:
    """Return the file's text without surrounding blanks; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_fields(path: Path, separator: str | None = None) -> dict[str, str]:
    """Return a file of ``name value`` lines as a dict; of a repeated name the first line counts."""
    fields: dict[str, str] = {}
    for line in filter(str.strip, read_text(path).splitlines()):
        name, *value = line.split(separator, 1)
        fields.setdefault(name.strip(), value[0].strip() if value else "")
    return fields


def entries(directory: Path) -> list[str]:
    """Return the names in ``directory``, numbers in them compared as numbers (``card10`` after ``card9``)."""
    try:
        names = [path.name for path in directory.iterdir()]
    except OSError:
        return []
    return sorted(names, key=lambda name: (name.rstrip("0123456789"), _number(_trailing_digits(name)) or 0))


def _trailing_digits(name: str) -> str:
    return name[len(name.rstrip("0123456789")) :]


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parse the kernel's list format: ``"0-2,8"`` is (0, 1, 2, 8)."""
    cpus: list[int] = []
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        first, last = _number(low), _number(high or low)
        if first is not None and last is not None:
            cpus.extend(range(first, last + 1))
    return tuple(cpus)


def numa_nodes(root: Path = ROOT, device_nodes: Sequence[int | None] = ()) -> tuple[NumaNode, ...]:
    """Return the NUMA map. ``device_nodes[i]`` is the node that device ``i`` is attached to, None where unknown."""
    base = root / "sys/devices/system/node"
    nodes = []
    for name in entries(base):
        index = _number(name.removeprefix("node"))
        if index is None or not name.startswith("node"):
            continue
        nodes.append(
            NumaNode(
                index=index,
                cpus=parse_cpu_list(read_text(base / name / "cpulist")),
                memory_bytes=_node_memory(base / name / "meminfo"),
                devices=tuple(i for i, node in enumerate(device_nodes) if node == index),
            )
        )
    return tuple(nodes)


def _node_memory(meminfo: Path) -> int:
    """Node files read ``Node 0 MemTotal: 123 kB``."""
    for line in read_text(meminfo).splitlines():
        words = line.split()
        if len(words) >= 4 and words[2] == "MemTotal:":
            return (_number(words[3]) or 0) * 1024
    return 0


def pci_numa_node(address: str, root: Path = ROOT) -> int | None:
    """Return the NUMA node of the PCI device at ``address`` (``0000:3b:00.0``), None where the kernel knows none."""
    return _number(read_text(root / "sys/bus/pci/devices" / address / "numa_node"))  # -1 means: unknown


def memory(root: Path = ROOT) -> HostMemory:
    """Return main memory, bounded by the control group of this process (versions 1 and 2) and its ancestors."""
    fields = read_fields(root / "proc/meminfo", ":")
    total = _kib(fields.get("MemTotal", ""))
    result = HostMemory(total, _kib(fields.get("MemAvailable", "")) or total)
    for limit, used in _memory_limits(root):
        result = replace(result, total=min(result.total, limit), available=min(result.available, max(0, limit - used)))
    return result


def _kib(text: str) -> int:
    return (_number(text.removesuffix("kB").strip()) or 0) * 1024


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, use that cannot be reclaimed) in bytes of every control group above this process."""
    for group in _control_groups(root, "memory"):
        for limit_file, usage_file, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _number(read_text(group / limit_file))  # "max" in version 2: no limit
            if limit is not None and limit < 2**62:  # version 1 writes a huge number for: no limit
                cache = _number(read_fields(group / "memory.stat").get(cache_key, "")) or 0
                yield limit, max(0, (_number(read_text(group / usage_file)) or 0) - cache)


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the control group directories that bound this process for ``controller``, up to the mount's root.

    A container often sees the host's path in ``/proc/self/cgroup`` but only its own group mounted, at the root:
    directories that do not exist hold no files, and the walk ends at the mount in any case.
    """
    mount = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if hierarchy != "0" and controller not in controllers.split(","):
            continue
        base = mount if hierarchy == "0" else mount / controllers
        base = base if hierarchy == "0" or base.is_dir() else mount / controller
        group = base / path.strip("/")
        yield group
        while group != base:
            group = group.parent
            yield group


def available_cores(root: Path = ROOT, cpus: Sequence[int] | None = None) -> int:
    """Return how many physical cores this process may keep busy: at least one.

    ``cpus`` are the logical CPUs it may run on (default: its affinity). Threads of one core count once, and the
    control group's quota of CPU time, rounded up, bounds the sum.
    """
    usable = os.sched_getaffinity(0) if cpus is None else cpus
    topology = root / "sys/devices/system/cpu"
    cores = {read_text(topology / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in usable}
    return max(1, min([len(cores), *_cpu_quotas(root)]))


def _cpu_quotas(root: Path) -> Iterator[int]:
    for group in _control_groups(root, "cpu"):
        quota, period = [*read_text(group / "cpu.max").split(), "", ""][:2]
        quota = quota or read_text(group / "cpu.cfs_quota_us")
        period = period or read_text(group / "cpu.cfs_period_us")
        if (_number(quota) or 0) > 0 and (_number(period) or 0) > 0:
            yield math.ceil(int(quota) / int(period))


def visible_indices(value: str | None, ids: Sequence[str]) -> tuple[int, ...]:
    """Return which of the devices ``ids`` a visibility variable of the drivers' usual form leaves, in its order.

    ``None`` (unset) leaves all. Otherwise it is a list of indices or of unambiguous beginnings of ids; it ends at the
    first entry that names no device, and a repeated entry hides everything, as the drivers read it.
    """
    if value is None:
        return tuple(range(len(ids)))
    chosen: list[int] = []
    for entry in (part.strip().casefold() for part in value.split(",")):
        number = _number(entry)
        hits = [i for i, name in enumerate(ids) if i == number or (entry and name.casefold().startswith(entry))]
        if len(hits) != 1:
            break
        if hits[0] in chosen:
            return ()
        chosen.append(hits[0])
    return tuple(chosen)


def hidden_reason(variable: str, value: str, name: str, count: int) -> Reason:
    """Say that ``variable`` leaves none of ``count`` devices, the first of which is called ``name``.

    An empty or negative value is meant so: then there is no device. Any other is a mistake, and the devices unusable.
    """
    meant = not value.strip() or value.strip().startswith("-")
    return Reason(
        NO_DEVICE if meant else "devices-hidden",
        f"{variable}={value!r} hides every device ({count} x {name})",
        fix=f"unset {variable}, or list some of 0 to {count - 1}",
    )
