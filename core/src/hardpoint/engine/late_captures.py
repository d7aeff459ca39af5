"""Captures of the graphs that the start left out, one at a time, where no request waits for them."""

from __future__ import annotations

from hardpoint.engine.execution.executor import Executor
from hardpoint.engine.execution.rank_verbs import CaptureNext

_STEPS = 64
"""Between two steps, one graph is captured after so many of them..."""
_LEAST_MISSED = 32
"""...if at least so many steps have missed it. So the time of a capture, which is about that of two eager steps, is a
small share of the time of all steps, and is not spent on a size that passes by."""


class LateCaptures:
    """Has the ranks capture what is left. Steps count, and no clock, so that the same requests run the same steps."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._num_steps, self._are_left = 0, True

    @property
    def are_left(self) -> bool:
        """Whether graphs may be left to capture."""
        return self._are_left

    def again(self) -> None:
        """Graphs were dropped: there may be some to capture again."""
        self._are_left = True

    def while_idle(self) -> None:
        """Capture one graph."""
        self._capture(CaptureNext())

    def between_steps(self) -> None:
        """Capture the graph that steps miss most, every so many steps."""
        self._num_steps += 1
        if self._are_left and self._num_steps % _STEPS == 0:
            self._capture(CaptureNext(_LEAST_MISSED))

    def _capture(self, verb: CaptureNext) -> None:
        self._are_left = any(self._executor.control(verb))
