"""How much to try: levels, seeds and covering arrays.

Claims multiply: dtypes, head sizes, block sizes, features, batches. Most faults show in one value or in a pair of them,
so ``quick`` covers every pair of values, ``full`` every triple, and ``exhaustive`` tries all combinations.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Level = Literal["quick", "full", "exhaustive"]
LEVELS: tuple[Level, ...] = get_args(Level)

Row = dict[str, Any]
Exclusions = Mapping[tuple[str, ...], Callable[..., bool]]
"""Names of factors, and a predicate that takes their values and says which do not go together."""

_ROTATION = 4
"""At level quick, a check other than the values' is made on each fourth trial."""


@dataclass(frozen=True)
class Plan:
    """A level and a seed: the same plan makes the same trials."""

    level: Level = "quick"
    seed: int = 0

    def seed_of(self, case: str) -> int:
        """A seed of its own for each case, whatever else is run."""
        return int.from_bytes(hashlib.sha256(f"{self.seed}:{case}".encode()).digest()[:6], "big")

    def includes(self, check: int, trial: int) -> bool:
        """Whether check number ``check`` is made on trial number ``trial``."""
        return self.level != "quick" or (check + trial) % _ROTATION == 0

    def combinations(self, factors: Mapping[str, Sequence[Any]], excludes: Exclusions | None = None) -> Iterator[Row]:
        """Yield combinations of the factors' values that cover as much as the level asks for."""
        if self.level != "exhaustive":
            yield from covering_array(factors, 2 if self.level == "quick" else 3, self.seed, excludes)
            return
        for values in itertools.product(*factors.values()):
            row = dict(zip(factors, values, strict=True))
            if not _is_excluded(row, excludes or {}):
                yield row


def covering_array(
    factors: Mapping[str, Sequence[Any]], strength: int, seed: int = 0, excludes: Exclusions | None = None
) -> list[Row]:
    """Return few rows in which each combination of values of ``strength`` factors stands, unless it is excluded.

    The construction is covertable's, salted with ``seed``. It is handed indices, so that values need neither order nor
    hash.
    """
    from covertable import make  # type: ignore[import-untyped]  # it ships no types

    excludes = excludes or {}

    def row_of(indices: Mapping[str, int]) -> Row:
        return {name: values[indices[name]] for name, values in factors.items()}

    def constraint(names: tuple[str, ...], clash: Callable[..., bool]) -> dict[str, object]:
        def fits(indices: Mapping[str, int]) -> bool:
            return not clash(*(factors[name][indices[name]] for name in names))

        return {"operator": "fn", "requires": list(names), "evaluate": fits}

    indices = {name: list(range(len(values))) for name, values in factors.items()}
    if len(factors) <= strength:
        made = [dict(zip(factors, choice, strict=True)) for choice in itertools.product(*indices.values())]
        return [row for row in map(row_of, made) if not _is_excluded(row, excludes)]
    constraints = [constraint(names, clash) for names, clash in excludes.items()]
    return [row_of(row) for row in make(indices, strength=strength, salt=str(seed), constraints=constraints)]


def _is_excluded(row: Row, excludes: Exclusions) -> bool:
    return any(clash(*(row[name] for name in names)) for names, clash in excludes.items())
