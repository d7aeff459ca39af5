"""The division of a model's blocks among pipeline stages: as the user says, or by the bytes of their weights.

The stage that takes longest decides how long all take, and the stage with the least memory left how large all caches
are. So the most that a token is multiplied with on any stage is made as small as can be, and then the most bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from hardpoint_plugin_api import ConfigError, RankGroup


@dataclass(frozen=True)
class BlockWeights:
    """Bytes of a model's weights. ``blocks``: of each block; ``used``: those of them that a token is multiplied with,
    which are fewer where a token goes to some of a block's experts. ``first`` and ``last`` are those beside blocks, on
    the first and the last stage; a step reads few of the embedding, and the head is for the tokens that draw."""

    blocks: tuple[int, ...]
    used: tuple[int, ...]
    first: int = 0
    last: int = 0

    @classmethod
    def alike(cls, number: int) -> BlockWeights:
        """Of ``number`` blocks of which nothing is known."""
        return cls((1,) * number, (1,) * number)

    def of_stages(self, numbers: Sequence[int]) -> list[int]:
        """The bytes of each stage, where stages have so many blocks."""
        bounds = list(accumulate(numbers, initial=0))
        return [self._bytes(first, end) for first, end in pairwise(bounds)]

    def divided(self, stages: int) -> tuple[int, ...]:
        """How many blocks each of ``stages`` has, one at least: earlier ones have more where nothing else decides."""
        work = _best(len(self.blocks), stages, self._work, max)[0]

        def within(first: int, end: int) -> float:
            return self._bytes(first, end) if self._work(first, end) <= work else inf

        most = _best(len(self.blocks), stages, within, max)[0]

        def squared(first: int, end: int) -> float:
            return size**2 if (size := within(first, end)) <= most else inf

        return _best(len(self.blocks), stages, squared, lambda a, b: a + b)[1]

    def _work(self, first: int, end: int) -> int:
        return sum(self.used[first:end])

    def _bytes(self, first: int, end: int) -> int:
        ends = self.first * (first == 0) + self.last * (end == len(self.blocks))
        return sum(self.blocks[first:end]) + ends


@dataclass(frozen=True)
class StageDivision:
    """How blocks are divided. ``numbers``: how many the user gives each stage; else it goes by ``weights``."""

    numbers: tuple[int, ...] = ()
    weights: BlockWeights | None = None

    def of(self, full: int, stages: int) -> tuple[int, ...]:
        """How many of a model's ``full`` blocks each of ``stages`` has. Raises ConfigError where that cannot be."""
        if full < stages:
            raise ConfigError(
                f"--pipeline-parallel-size {stages}: the model has {full} blocks, and each stage needs one; take at "
                f"most {full}"
            )
        if self.numbers and sum(self.numbers) != full:
            given = ",".join(map(str, self.numbers))
            raise ConfigError(
                f"--pipeline-parallel-layers {given}: these are {sum(self.numbers)} blocks, and the model has {full}"
            )
        return self.numbers or (self.weights or BlockWeights.alike(full)).divided(stages)

    def blocks(self, full: int, stages: RankGroup) -> range:
        """The numbers of the blocks that this rank's stage has. Raises ConfigError as ``of`` does."""
        numbers = self.of(full, stages.size)
        first = sum(numbers[: stages.rank])
        return range(first, first + numbers[stages.rank])

    def words(self, full: int, stages: int) -> str:
        """A line about it."""
        numbers = self.of(full, stages)
        line = f"pipeline stages have {_listed(numbers)} blocks"
        if self.weights is None:
            return line
        return f"{line}, and {_listed(round(size / 1e6) for size in self.weights.of_stages(numbers))} MB of weights"


def _best(
    number: int, stages: int, cost: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The least cost of dividing ``number`` blocks, and how many each stage has then.

    ``cost(first, end)`` is a stage's, and ``join`` adds one to the others'.
    """
    found: list[tuple[float, tuple[int, ...]]] = [(cost(first, number), (number - first,)) for first in range(number)]
    for left in range(2, stages + 1):  # ``found`` has the best for the last ``left`` - 1 stages, by their first block
        found = [
            min(
                (
                    (join(cost(first, end), found[end][0]), (end - first, *found[end][1]))
                    for end in range(number - left + 1, first, -1)
                ),
                key=lambda each: each[0],
            )
            for first in range(number - left + 1)
        ]
    return found[0]


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))
