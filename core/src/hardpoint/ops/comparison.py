"""Findings of comparing a kernel's results with its reference's, as plain data: importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fault:
    """Something that is wrong. ``code`` is stable; ``where`` is an output ("output 0") or an input's name."""

    code: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message} [{self.code}]"


@dataclass
class Comparison:
    """The differences of one tensor from the truth.

    ``measured`` holds for each bound the error and its limit where it came nearest: in units, and for ``outliers`` in
    elements. ``compared`` counts the elements that were held against the truth: an empty tensor has none.
    """

    faults: list[Fault] = field(default_factory=list)
    measured: dict[str, tuple[float, float]] = field(default_factory=dict)
    compared: int = 0

    def add(self, other: Comparison) -> None:
        """Take in what was found in another tensor."""
        self.faults += other.faults
        self.compared += other.compared
        for bound, (error, limit) in other.measured.items():
            worst = self.measured.get(bound, (0.0, 1.0))
            if error * worst[1] >= worst[0] * limit:
                self.measured[bound] = (error, limit)
