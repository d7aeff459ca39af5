"""How long the device takes for something, as its own clock has it: what the host does meanwhile is not counted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from hardpoint.dtypes import dtype_name
from hardpoint_plugin_api import Platform

Run = Callable[[], object]


@dataclass(frozen=True)
class Product:
    """Torch's product of two square matrices [size, size], which stands for the best that a device multiplies."""

    dtype: torch.dtype
    size: int

    @property
    def flops(self) -> int:
        """Floating-point operations of one product."""
        return 2 * self.size**3

    def __str__(self) -> str:
        return f"torch's {dtype_name(self.dtype)} matmul of {self.size:,} x {self.size:,}"


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
        self._probed: dict[torch.dtype, float] = {}
        self._events = platform.info.accelerator and device.type != "cpu" and not by_host

    def seconds(self, runs: Sequence[Run], rounds: int) -> float:
        """The median of ``rounds`` of one of ``runs``, which do the same on different memory.

        There are fewer rounds, but one at least, where they take longer than some seconds.
        """
        self._host_seconds(runs)  # kernels may be compiled
        host = self._host_seconds(runs)
        began, measured = time.perf_counter(), [self._seconds(runs, host)]
        while len(measured) < rounds and time.perf_counter() - began < _LONG:
            measured.append(self._seconds(runs, host))
        return statistics.median(measured) / len(runs)

    def in_turns(self, runs: Sequence[Run], most_rounds: int, *, hopeless: float = 3.0) -> list[float]:
        """Seconds of each of ``runs``: medians over rounds in which all have their turns, so that drift favours none.

        Each was called before, so that nothing is compiled any more, and is called for some milliseconds in a turn.
        There are at least three rounds, and more as long as all take little time. A run that took more than
        ``hopeless`` times as long as the best in two turns gets no further turn; two are needed, since the host may
        have been late in one. The first call, which finds how many make a turn, counts as a turn where it took as long
        as all of them may.
        """
        once = [self._host_seconds([run]) for run in runs]
        turns = [[run] * max(1, min(_MOST_CALLS, int(_TURN / own))) for run, own in zip(runs, once, strict=True)]
        measured = [[own] if own > _ENOUGH else [] for own in once]
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
        return self.product.flops / self.seconds([self.multiply], rounds)

    @cached_property
    def product(self) -> Product:
        """The matmul that ``multiply`` computes: in bfloat16 where the device is quick at that, else in float32.

        It is as large as it may be to take some hundredths of a second.
        """
        dtype = self.dtype_at_speed(torch.bfloat16)
        longest = _LONGEST_PRODUCT / self._probe_seconds(dtype)  # in times the probe's
        return Product(dtype, next((size for size in _SIZES if (size / _PROBE) ** 3 <= longest), _SIZES[-1]))

    def dtype_at_speed(self, dtype: torch.dtype) -> torch.dtype:
        """``dtype`` of 16 bits, or float32 where torch's matmul in ``dtype`` crawls beside that in float32.

        On a CPU without instructions for bfloat16 it is up to 60 times slower. Measured with small matrices, in some
        tenths of a second.
        """
        crawls = self._probe_seconds(dtype) > _CRAWL * self._probe_seconds(torch.float32)
        return torch.float32 if crawls else dtype

    def _probe_seconds(self, dtype: torch.dtype) -> float:
        if dtype not in self._probed:
            factor = torch.randn(_PROBE, _PROBE, device=self._device).to(dtype)
            times = [self.once(lambda: factor @ factor)]  # which loads libraries
            began = time.perf_counter()
            while len(times) < _PROBES or time.perf_counter() - began < _PROBING:
                times.append(self.once(lambda: factor @ factor))
            self._probed[dtype] = min(times)
        return self._probed[dtype]

    def once(self, run: Run) -> float:
        """Seconds of one call, by the host's clock."""
        return self._host_seconds([run])

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
        """Compute ``product``."""
        return self._factor @ self._factor

    @cached_property
    def _factor(self) -> torch.Tensor:
        size = self.product.size
        return torch.randn(size, size, device=self._device).to(self.product.dtype)


_PROBE, _PROBES, _PROBING, _CRAWL = 256, 3, 0.05, 4.0
"""Rows of the matrices that find the dtype of products; least calls, seconds; so many times float32's crawls."""
_SIZES, _LONGEST_PRODUCT = (2048, 1024, 512), 0.05
"""Rows of the roofline's matrices, the most that take no longer than so many seconds."""
_LONG = 5.0
"""Seconds of the rounds of one run."""
_TURN, _MOST_CALLS = 0.01, 50
"""Seconds of a turn, and the most calls in it."""
_LEAST_ROUNDS, _ENOUGH = 3, 0.5
"""From so many rounds on, so many seconds for each that takes turns are enough."""
_DELAY = 20e-6
"""Seconds that the fastest device needs for the largest product, or less."""
