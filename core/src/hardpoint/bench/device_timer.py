"""How long the device takes for something, as its own clock has it: what the host does meanwhile is not counted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from hardpoint_plugin_api import Platform

Run = Callable[[], object]


class DeviceTimer:
    """Times calls on the device in use.

    On accelerators by its events, behind work that keeps it busy while the host submits: neither the host's time per
    call is measured, nor a gap between calls. On the host by its clock.
    """

    def __init__(self, platform: Platform, device: torch.device, working_set: int, *, by_host: bool = False) -> None:
        """``working_set``: bytes to go through before anything is read again, more than caches hold.

        ``by_host`` takes the host's clock on accelerators, too: its time per call counts then.
        """
        self._platform, self._device = platform, device
        self.working_set = working_set
        self._memory = torch.zeros(working_set // 4, device=device)
        self._factor = torch.randn(_SIZE, _SIZE, device=device).bfloat16()
        self._events = platform.info.accelerator and device.type != "cpu" and not by_host

    def seconds(self, runs: Sequence[Run], rounds: int) -> float:
        """The median of ``rounds`` of one of ``runs``, which do the same on different memory."""
        self._host_seconds(runs)  # kernels may be compiled
        host = self._host_seconds(runs)
        measured = [self._seconds(runs, host) for _ in range(rounds)]
        return statistics.median(measured) / len(runs)

    def in_turns(self, runs: Sequence[Run], most_rounds: int, *, hopeless: float = 3.0) -> list[float]:
        """Seconds of each of ``runs``: medians over rounds in which all have their turns, so that drift favours none.

        Each was called before, so that nothing is compiled any more, and is called for some milliseconds in a turn.
        There are at least three rounds, and more as long as all take little time. What took more than ``hopeless``
        times as long as the best in each of two turns has no further ones: in one of them the host may have been late.
        """
        once = [self._host_seconds([run]) for run in runs]
        turns = [[run] * max(1, min(_MOST_CALLS, int(_TURN / own))) for run, own in zip(runs, once, strict=True)]
        measured: list[list[float]] = [[] for _ in runs]
        began, best = time.perf_counter(), min(once, default=0.0)
        for number in range(most_rounds):
            if number >= _LEAST_ROUNDS and time.perf_counter() - began > _ENOUGH * len(runs):
                break
            for turn, own, found in zip(turns, once, measured, strict=True):
                if len(found) < 2 or min(found) <= hopeless * best:
                    found.append(self._seconds(turn, own * len(turn)) / len(turn))
            best = min(map(min, measured), default=0.0)
        return [statistics.median(found) for found in measured]

    def read_speed(self, rounds: int) -> float:
        """Bytes per second of ``read``."""
        return self.working_set / self.seconds([self.read], rounds)

    def product_speed(self, rounds: int) -> float:
        """Operations per second of ``multiply``."""
        return OPERATIONS / self.seconds([self.multiply], rounds)

    def _seconds(self, runs: Sequence[Run], host_seconds: float) -> float:
        return self._device_seconds(runs, host_seconds) if self._events else self._host_seconds(runs)

    def _host_seconds(self, runs: Sequence[Run]) -> float:
        self._platform.synchronize()
        began = time.perf_counter()
        for run in runs:
            run()
        self._platform.synchronize()
        return time.perf_counter() - began

    def _device_seconds(self, runs: Sequence[Run], host_seconds: float) -> float:
        first, last = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        for _ in range(1 + int(2 * host_seconds / _DELAY)):
            self.multiply()
        first.record()
        for run in runs:
            run()
        last.record()
        self._platform.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def read(self) -> torch.Tensor:
        """Torch's sum over as many bytes as the working set."""
        return self._memory.sum()

    def multiply(self) -> torch.Tensor:
        """Torch's product of two bfloat16 matrices, of ``OPERATIONS``."""
        return self._factor @ self._factor


_SIZE = 2048
OPERATIONS = 2 * _SIZE**3
"""Of one ``multiply``."""
_TURN, _MOST_CALLS = 0.01, 50
"""Seconds of a turn, and the most calls in it."""
_LEAST_ROUNDS, _ENOUGH = 3, 0.5
"""From so many rounds on, so many seconds for each that takes turns are enough."""
_DELAY = 20e-6
"""Seconds that the fastest device needs for a product of matrices of this size, or less."""
