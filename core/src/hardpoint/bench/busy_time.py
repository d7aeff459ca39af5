"""Where a device's time goes in steps that were profiled: which kernels, and what it waited for between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Interval(NamedTuple):
    """One thing that the device did: microseconds on its own clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Share:
    """How often something happens in a step, and the microseconds that it takes in all."""

    name: str
    times: float
    microseconds: float


@dataclass(frozen=True)
class BusyTime:
    """An average step, in microseconds: from its first kernel to the next step's, and how long any kernel ran.

    ``kernels`` by name, and ``idle`` by the kernel that came late; both longest first. A kernel that begins while one
    before it runs, as those that are launched early do, counts from that one's end on: all of them add up to ``busy``.
    """

    step: float
    busy: float
    kernels: tuple[Share, ...]
    idle: tuple[Share, ...]

    @classmethod
    def of_repeated(cls, intervals: Iterable[Interval], num_steps: int) -> BusyTime | None:
        """Of ``num_steps`` or fewer steps alike, whatever of the first and the last was recorded.

        Steps are told apart by the kernel that runs once in each; None where there is none, or nothing was recorded.
        """
        ordered = sorted(intervals, key=lambda interval: interval.start)
        counts = Counter(interval.name for interval in ordered)
        name, count = max(
            ((name, count) for name, count in counts.items() if count <= num_steps + 1),
            key=lambda entry: entry[1],
            default=("", 0),
        )
        marks = [index for index, interval in enumerate(ordered) if interval.name == name]
        if count < 2:
            return None
        return cls._of(ordered[marks[0] : marks[-1]], ordered[marks[-1]].start, count - 1)

    @classmethod
    def of_all(cls, intervals: Iterable[Interval], num_steps: int) -> BusyTime | None:
        """Of ``num_steps`` steps that were recorded as a whole; None where nothing was."""
        ordered = sorted(intervals, key=lambda interval: interval.start)
        return cls._of(ordered, max(i.end for i in ordered), num_steps) if ordered else None

    @classmethod
    def _of(cls, ordered: Sequence[Interval], end: float, num_steps: int) -> BusyTime:
        kernels: dict[str, Share] = {}
        idle: dict[str, Share] = {}
        reached = ordered[0].start
        for name, start, stop in ordered:
            if start > reached:
                _add(idle, name, start - reached)
            _add(kernels, name, max(0.0, stop - max(start, reached)))
            reached = max(reached, stop)
        if end > reached:
            _add(idle, ordered[0].name, end - reached)
        waited = sum(share.microseconds for share in idle.values())
        step = end - ordered[0].start
        return cls(
            step / num_steps,
            (step - waited) / num_steps,
            _longest_first(kernels, num_steps),
            _longest_first(idle, num_steps),
        )


def device_intervals(events: Iterable[Any]) -> list[Interval]:
    """The device's work among torch.profiler's events."""
    return [
        Interval(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name != "CPU" and not event.is_user_annotation
    ]


def _add(found: dict[str, Share], name: str, microseconds: float) -> None:
    share = found.get(name, Share(name, 0, 0.0))
    found[name] = replace(share, times=share.times + 1, microseconds=share.microseconds + microseconds)


def _longest_first(found: dict[str, Share], num_steps: int) -> tuple[Share, ...]:
    each = (Share(s.name, s.times / num_steps, s.microseconds / num_steps) for s in found.values())
    return tuple(sorted(each, key=lambda share: -share.microseconds))
