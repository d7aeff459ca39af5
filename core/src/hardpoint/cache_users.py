"""The caches that a model's layers use, and the groups that they form.

A cache group is a set of users that share a block table: of one retention, since that decides how long a page is kept.
All groups take pages from one pool, so a page has the same bytes whichever group holds it: it has as many places as
the largest group has users, and a user's place is its number within its group. In a model of 24 windowed and 8 full
layers, four groups of eight layers use eight buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hardpoint_plugin_api import CacheUser, Retention

MAX_GROUPS = 8
"""About this many cache groups at most: each costs a block table per step."""
MOST_TOKENS = 1024
"""Blocks are not made larger for states: prefixes are found by whole blocks."""


@dataclass(frozen=True)
class CacheGroup:
    """The numbers of the users that share a block table, by place, and their retention."""

    retention: Retention
    users: tuple[int, ...]


@dataclass(frozen=True)
class PlanGroup:
    """The numbers of the users that share one plan per step, and the number of their cache group."""

    cache_group: int
    users: tuple[int, ...]


@dataclass
class ModelCaches:
    """The cache users of a model, in the order of construction; see CacheUsers of the plugin API."""

    users: list[CacheUser] = field(default_factory=list)
    _shared: tuple[Retention, ...] = ()

    def add(self, user: CacheUser) -> int:
        """Declare ``user`` and return its number."""
        self.users.append(user)
        return len(self.users) - 1

    def share_groups(self, retentions: tuple[Retention, ...]) -> None:
        """From now on form a group for each of ``retentions`` (see united_retentions), those of these users among them.

        A group may be without users: those of another pipeline stage, with which this one shares block tables.
        """
        own = tuple(group.retention for group in self.cache_groups())
        self._shared = retentions if retentions != own else ()

    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The users by retention, cut into groups of the size that leaves the fewest places of a page empty."""
        by_retention: dict[Retention, list[int]] = {}
        for number, user in enumerate(self.users):
            by_retention.setdefault(user.spec.retention, []).append(number)
        if self._shared:
            return tuple(_divided(by_retention, self._shared))
        size = group_size([len(numbers) for numbers in by_retention.values()])
        return tuple(
            CacheGroup(retention, tuple(numbers[i : i + size]))
            for retention, numbers in by_retention.items()
            for i in range(0, len(numbers), size)
        )

    def fitting_block_size(self, wish: int, longest: int) -> int:
        """Tokens per block with which pages of tokens are as large as the states that have their places.

        All groups take pages of one size, so smaller ones would be padded. It is ``wish`` doubled as often as that
        takes, up to MOST_TOKENS, and to what sequences of ``longest`` tokens fill.
        """
        size = wish
        while 2 * size <= min(MOST_TOKENS, longest) and self._pads_tokens(size):
            size *= 2
        return size

    def _pads_tokens(self, block_size: int) -> bool:
        """Whether a state is larger than the pages of tokens that share its place."""
        groups = self.cache_groups()
        for place in range(max((len(group.users) for group in groups), default=0)):
            nbytes: dict[bool, int] = {}
            for group in groups:
                if place < len(group.users):
                    user = self.users[group.users[place]]
                    size = user.layout.page_bytes(user.spec, block_size)
                    nbytes[group.retention.per_sequence] = max(size, nbytes.get(group.retention.per_sequence, 0))
            if len(nbytes) == 2 and nbytes[True] > nbytes[False]:
                return True
        return False

    def plan_groups(self) -> tuple[PlanGroup, ...]:
        """Return the users of one cache group, grouped by plan key: each group shares one plan."""
        groups: dict[tuple[int, Hashable], list[int]] = {}
        for number, group in enumerate(self.cache_groups()):
            for user in group.users:
                groups.setdefault((number, self.users[user].plan_key), []).append(user)
        return tuple(PlanGroup(number, tuple(users)) for (number, _), users in groups.items())


def united_retentions(stages: Iterable[tuple[Retention, ...]]) -> tuple[Retention, ...]:
    """The retentions of the groups of all pipeline stages: each as often as in the stage that has it most often."""
    most: Counter[Retention] = Counter()
    for retentions in stages:
        most |= Counter(retentions)
    return tuple(most.elements())


def _divided(by_retention: Mapping[Retention, list[int]], retentions: tuple[Retention, ...]) -> Iterator[CacheGroup]:
    """Groups of ``retentions``; the users of one are divided evenly among its groups."""
    seen: Counter[Retention] = Counter()
    for retention in retentions:
        numbers, number = by_retention.get(retention, []), seen[retention]
        size = -(-len(numbers) // retentions.count(retention))
        yield CacheGroup(retention, tuple(numbers[number * size : (number + 1) * size]))
        seen[retention] += 1


def group_size(counts: list[int]) -> int:
    """How many users a cache group has at most, where ``counts`` is the number of users of each retention.

    The size for which the groups have the fewest places in all, the largest of such; not so small that there are many
    more than MAX_GROUPS groups.
    """
    smallest = max(1, -(-sum(counts) // MAX_GROUPS))
    return min(range(smallest, max(counts, default=1) + 1), key=lambda size: (places(counts, size), -size))


def places(counts: list[int], size: int) -> int:
    """Places, empty ones included, that users take in groups of ``size``."""
    return sum(-(-count // size) * size for count in counts)
