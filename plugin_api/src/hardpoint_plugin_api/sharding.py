"""Shard plans: which elements of one axis each rank of a group holds, with padding and replication explicit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self


@dataclass(frozen=True)
class ShardSlice:
    """``count`` elements, from index ``source`` of the whole axis, which a rank holds from its index ``target`` on."""

    source: int
    target: int
    count: int


@dataclass(frozen=True, repr=False)
class ShardPlan:
    """The division of an axis of ``full`` elements among ranks: ``size`` elements on each rank, seen from ``rank``.

    Plans that differ in ``rank`` only are equal and have one repr, so that ranks can compare their plans. ``ranks``:
    the slices of each rank, in order of ``target``. Elements that no slice fills are padding (zeros). Every element is
    on exactly ``replicas`` ranks; ``check`` verifies that.
    """

    full: int
    size: int
    ranks: tuple[tuple[ShardSlice, ...], ...]
    rank: int = field(default=0, compare=False)
    replicas: int = 1

    @classmethod
    def even(cls, full: int, ranks: int, rank: int, replicas: int = 1) -> Self:
        """Return equal pieces; each piece is on ``replicas`` neighbouring ranks. Raises ValueError for an indivisible
        axis.
        """
        pieces = ranks // replicas
        if ranks % replicas or full % pieces:
            raise ValueError(f"{full} elements do not divide among {ranks} ranks with {replicas} replicas of each")
        size = full // pieces
        owned = tuple((ShardSlice(r // replicas * size, 0, size),) for r in range(ranks))
        return cls(full, size, owned, rank, replicas)

    @classmethod
    def padded(cls, full: int, ranks: int, rank: int) -> Self:
        """Return pieces of equal size; the last ones may hold padding."""
        size = -(-full // ranks)
        counts = [max(0, min(size, full - r * size)) for r in range(ranks)]
        owned = tuple((ShardSlice(r * size, 0, n),) if n else () for r, n in enumerate(counts))
        return cls(full, size, owned, rank)

    def __repr__(self) -> str:
        each = f" {self.replicas} ranks hold each" if self.replicas > 1 else ""
        return f"ShardPlan({self.full} in {len(self.ranks)} x {self.size}{each})"

    @property
    def own(self) -> tuple[ShardSlice, ...]:
        """The slices of this rank."""
        return self.ranks[self.rank]

    @property
    def has_padding(self) -> bool:
        """True where this rank holds padding."""
        return sum(piece.count for piece in self.own) < self.size

    def blocks(self, per: int) -> Self:
        """Return the plan of an axis with one element for every ``per`` elements of this. Raises ValueError for a cut
        block.
        """

        def scaled(piece: ShardSlice) -> ShardSlice:
            ends_inside = piece.count % per and piece.source + piece.count != self.full
            if piece.source % per or piece.target % per or ends_inside:
                raise ValueError(f"a slice of {piece.count} elements from {piece.source} cuts a block of {per}")
            return ShardSlice(piece.source // per, piece.target // per, -(-piece.count // per))

        ranks = tuple(tuple(map(scaled, pieces)) for pieces in self.ranks)
        return replace(self, full=-(-self.full // per), size=-(-self.size // per), ranks=ranks)

    def check(self) -> None:
        """Raise ValueError unless every element is on ``replicas`` ranks, and no two are in one place."""
        for rank, pieces in enumerate(self.ranks):
            end = 0
            for piece in pieces:
                if piece.count < 1 or piece.target < end or piece.target + piece.count > self.size:
                    raise ValueError(f"rank {rank}: {piece} overlaps another, or leaves the {self.size} elements held")
                end = piece.target + piece.count
        steps: dict[int, int] = {0: 0, self.full: 0}
        for piece in (piece for pieces in self.ranks for piece in pieces):
            steps[piece.source] = steps.get(piece.source, 0) + 1
            steps[piece.source + piece.count] = steps.get(piece.source + piece.count, 0) - 1
        held = 0
        for place in sorted(steps):
            if place == self.full:
                break
            held += steps[place]
            if place < 0 or held != self.replicas:
                raise ValueError(f"element {place} of {self.full} is on {held} ranks, not on {self.replicas}")
        if max(steps) > self.full:
            raise ValueError(f"a slice reaches element {max(steps)} of {self.full}")


def joined(plans: tuple[ShardPlan, ...]) -> ShardPlan:
    """Return the plan of several axes that are concatenated, in the whole and on every rank."""
    full = size = 0
    ranks: list[list[ShardSlice]] = [[] for _ in plans[0].ranks]
    for plan in plans:
        for pieces, more in zip(ranks, plan.ranks, strict=True):
            pieces += [ShardSlice(full + piece.source, size + piece.target, piece.count) for piece in more]
        full, size = full + plan.full, size + plan.size
    return replace(plans[0], full=full, size=size, ranks=tuple(map(tuple, ranks)))
