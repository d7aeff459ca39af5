"""The counts of several cores as one, whatever becomes of the cores."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from hardpoint.metrics import MetricsSnapshot


class ReplicaCounts:
    """The metrics of replicas together. A core that is built again counts from 0, but the sum of a counter never falls:
    Prometheus would take that for a new beginning of all replicas."""

    def __init__(self, num_replicas: int) -> None:
        self._last = [MetricsSnapshot(())] * num_replicas
        self._restarts = [0] * num_replicas
        self._of_ended = MetricsSnapshot(())
        self._lock = threading.Lock()

    def total(self, answers: Mapping[int, MetricsSnapshot], restarts: Sequence[int]) -> MetricsSnapshot:
        """The sum of ``answers``, by the replica's place, and of what others and cores that have ended counted last.

        ``restarts`` says of each replica how often it was built again.
        """
        with self._lock:
            for index, number in enumerate(restarts):
                if number != self._restarts[index]:
                    self._of_ended = MetricsSnapshot.total_of([self._of_ended, self._last[index].counters])
                    self._last[index], self._restarts[index] = MetricsSnapshot(()), number
                if index in answers:
                    self._last[index] = answers[index]
            parts = [last if index in answers else last.counters for index, last in enumerate(self._last)]
            return MetricsSnapshot.total_of([*parts, self._of_ended])
