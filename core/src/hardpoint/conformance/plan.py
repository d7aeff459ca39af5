"""How much to try: levels, seeds and covering arrays.

Claims multiply: dtypes, head sizes, block sizes, features, batches. Most faults show in one value or in a pair of them,
so ``quick`` covers every pair of values, ``full`` every triple, and ``exhaustive`` tries all combinations.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hardpoint.conformance.kept_arrays import kept

Level = Literal["quick", "full", "exhaustive"]
LEVELS: tuple[Level, ...] = get_args(Level)
CASE_SECONDS = 300.0
"""Default time limit of a case: many kernels may be compiled for it, with every processor as busy."""

Row = dict[str, Any]
Exclusions = Mapping[tuple[str, ...], Callable[..., bool]]
"""Names of factors, and a predicate that takes their values and says which do not go together."""

_ROTATION = 4
"""At level quick, a check other than the values' is made on each fourth trial."""


CoveringArrays = dict[str, list[list[int]]]
"""By what they cover: rows of indices, one for each factor."""


@dataclass(frozen=True)
class Plan:
    """A level and a seed: the same plan makes the same trials.

    ``arrays`` are the covering arrays that were made so far. Each takes seconds; a process that is handed those of
    another makes none of them again.
    """

    level: Level = "quick"
    seed: int = 0
    arrays: CoveringArrays = field(default_factory=dict, compare=False, repr=False)

    def seed_of(self, case: str) -> int:
        """A seed of its own for each case, whatever else is run."""
        return int.from_bytes(hashlib.sha256(f"{self.seed}:{case}".encode()).digest()[:6], "big")

    def includes(self, check: int, trial: int) -> bool:
        """Whether check number ``check`` is made on trial number ``trial``."""
        return self.level != "quick" or (check + trial) % _ROTATION == 0

    def combinations(self, factors: Mapping[str, Sequence[Any]], excludes: Exclusions | None = None) -> Iterator[Row]:
        """Yield combinations of the factors' values that cover as much as the level asks for."""
        strength = {"quick": 2, "full": 3, "exhaustive": len(factors)}[self.level]
        yield from covering_array(factors, strength, self.seed, excludes, self.arrays)


def covering_array(
    factors: Mapping[str, Sequence[Any]],
    strength: int,
    seed: int = 0,
    excludes: Exclusions | None = None,
    made: CoveringArrays | None = None,
) -> Iterator[Row]:
    """Yield few rows in which each combination of values of ``strength`` factors stands, unless it is excluded.

    The construction is covertable's, salted with ``seed``. It is handed indices, so that values need neither order nor
    hash. ``made`` is where arrays are looked up and kept; behind it, files of the user's cache (``kept_arrays.py``).
    """
    sizes = {name: len(values) for name, values in factors.items()}
    excluded = [
        (names, {choice for choice in _choices(sizes, names) if clash(*_values(factors, names, choice))})
        for names, clash in (excludes or {}).items()
    ]
    rows: Iterable[Sequence[int]]
    if len(factors) <= strength:
        where = [([list(sizes).index(name) for name in names], clashing) for names, clashing in excluded]
        rows = (
            row
            for row in _choices(sizes, list(sizes))
            if not any(tuple(row[i] for i in columns) in clashing for columns, clashing in where)
        )
    else:
        made = {} if made is None else made
        key = json.dumps([sizes, strength, seed, [(names, sorted(clashing)) for names, clashing in excluded]])
        rows = made[key] = made.get(key) or kept(key, lambda: _cover(sizes, strength, seed, excluded))
    for row in rows:
        yield dict(zip(factors, _values(factors, list(factors), row), strict=True))


def _cover(
    sizes: Mapping[str, int], strength: int, seed: int, excluded: Iterable[tuple[tuple[str, ...], set[tuple[int, ...]]]]
) -> list[list[int]]:
    """Rows of indices, each below its factor's size."""
    from covertable import make  # type: ignore[import-untyped]  # it ships no types

    def constraint(names: tuple[str, ...], clashing: set[tuple[int, ...]]) -> dict[str, object]:
        def fits(row: Mapping[str, int]) -> bool:
            return tuple(row[name] for name in names) not in clashing

        return {"operator": "fn", "requires": list(names), "evaluate": fits}

    indices = {name: list(range(size)) for name, size in sizes.items()}
    constraints = [constraint(names, clashing) for names, clashing in excluded]
    made = make(indices, strength=strength, salt=str(seed), constraints=constraints)
    return [[row[name] for name in sizes] for row in made]


def _choices(sizes: Mapping[str, int], names: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """All choices of an index for each name."""
    return itertools.product(*(range(sizes[name]) for name in names))


def _values(factors: Mapping[str, Sequence[Any]], names: Sequence[str], indices: Sequence[int]) -> list[Any]:
    return [factors[name][index] for name, index in zip(names, indices, strict=True)]
