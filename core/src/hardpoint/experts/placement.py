"""Where the experts of a layer are: some on several ranks, so that all ranks have about the same work.

Few experts move where few suffice: single copies are exchanged until the busiest rank has ``GOOD`` times the mean.
Where that cannot be had so, all are placed anew, by the method of DeepSeek's expert parallelism load balancer (EPLB,
github.com/deepseek-ai/EPLB; DeepSeek-V3, arXiv:2412.19437, section 3.4): copies for the experts with the highest load,
then packing by load. Ranks are then matched to what they hold already.

A *load* is a number of tokens that an expert was routed; an expert's *copies* share it evenly. Each rank has equally
many *slots*; slot s of rank r has the physical number ``r * slots + s``, by which an all2all finds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from hardpoint_plugin_api import ConfigError

GOOD = 1.05
"""The load of the busiest rank over the mean with which a placement stays as it is."""
POOR = 1.15
"""The same, above which all experts are placed anew where that helps."""
_PARTNERS = 4
"""The least busy ranks, as many, are tried as partners of the busiest one."""


@dataclass(frozen=True)
class Placement:
    """``ranks``: the expert in each slot, by rank. No rank has two copies of one expert."""

    num_experts: int
    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def even(cls, num_experts: int, num_ranks: int, num_redundant: int = 0) -> Placement:
        """Neighbouring experts on each rank; redundant copies are of those that follow a rank's own, or come before.

        Raises ConfigError for experts or copies that do not divide among the ranks, and for more copies than a rank may
        have beside its own experts.
        """
        if num_experts % num_ranks:
            raise ConfigError(
                f"--expert-parallel-size {num_ranks}: the model's {num_experts} experts do not divide among as many "
                "groups of ranks; take a divisor of their number"
            )
        own, more = num_experts // num_ranks, num_redundant // num_ranks
        if num_redundant % num_ranks or own + more > num_experts:
            raise ConfigError(
                f"--num-redundant-experts {num_redundant}: take a multiple of the {num_ranks} groups of ranks with "
                f"experts of their own, and at most {(num_experts - own) * num_ranks}"
            )
        starts = (min(rank * own, num_experts - own - more) for rank in range(num_ranks))
        return cls(num_experts, tuple(tuple(range(start, start + own + more)) for start in starts))

    @property
    def num_slots(self) -> int:
        """Slots of one rank."""
        return len(self.ranks[0])

    @property
    def copies(self) -> Counter[int]:
        """The number of copies of each expert."""
        return Counter(chain.from_iterable(self.ranks))

    @property
    def physical(self) -> list[list[int]]:
        """The physical numbers of each expert's copies, ascending."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for number, expert in enumerate(chain.from_iterable(self.ranks)):
            found[expert].append(number)
        return found

    def work(self, loads: Sequence[float]) -> list[float]:
        """The load of each rank, where ``loads`` are the experts'."""
        copies = self.copies
        return [sum(loads[expert] / copies[expert] for expert in held) for held in self.ranks]

    def imbalance(self, loads: Sequence[float]) -> float:
        """The load of the busiest rank over the mean of all; 1 where there is none."""
        work = self.work(loads)
        return max(work) * len(work) / sum(work) if sum(work) else 1.0

    def balanced(self, loads: Sequence[float]) -> Placement:
        """The placement for ``loads``, with as many slots. An expert that stays on a rank stays in its slot."""
        better = self._aligned([set(held) for held in _Exchange(self, loads).run().ranks])
        if better.imbalance(loads) <= POOR:
            return better
        copies = _copies(loads, len(self.ranks), len(self.ranks) * self.num_slots)
        anew = self._matched(_packed(loads, copies, len(self.ranks), self.num_slots))
        return anew if anew.imbalance(loads) * GOOD < better.imbalance(loads) else better

    def _matched(self, packs: list[set[int]]) -> Placement:
        """``packs`` given to the ranks that have the most of them, greatest agreement first."""
        held = [set(rank) for rank in self.ranks]
        pairs = [(-len(held[r] & pack), r, p) for r in range(len(held)) for p, pack in enumerate(packs)]
        pack_of: dict[int, int] = {}
        taken: set[int] = set()
        for _, rank, pack in sorted(pairs):
            if rank not in pack_of and pack not in taken:
                pack_of[rank] = pack
                taken.add(pack)
        return self._aligned([packs[pack_of[rank]] for rank in range(len(held))])

    def _aligned(self, packs: Sequence[set[int]]) -> Placement:
        """``packs`` by rank; an expert that its rank has already stays in its slot."""
        ranks = []
        for before, pack in zip(self.ranks, packs, strict=True):
            fresh = iter(sorted(pack - set(before)))
            ranks.append(tuple(expert if expert in pack else next(fresh) for expert in before))
        return Placement(self.num_experts, tuple(ranks))

    def moves_to(self, target: Placement) -> list[Move]:
        """The experts that must travel for ``target``, in an order that all ranks share.

        Of the ranks that hold an expert, the one that has sent the least sends it.
        """
        holders: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, held in enumerate(self.ranks):
            for expert in held:
                holders[expert].append(rank)
        sent = Counter[int]()
        moves = []
        for rank, (before, after) in enumerate(zip(self.ranks, target.ranks, strict=True)):
            for slot, (old, new) in enumerate(zip(before, after, strict=True)):
                if old != new:
                    source = min(holders[new], key=lambda holder: (sent[holder], holder))
                    sent[source] += 1
                    moves.append(Move(source, self.ranks[source].index(new), rank, slot))
        return moves


@dataclass(frozen=True)
class Move:
    """A copy of an expert from ``slot_from`` of rank ``source`` to ``slot`` of rank ``target``."""

    source: int
    slot_from: int
    target: int
    slot: int


class _Exchange:
    """Improves a placement, each time by the change that leaves the least to the busiest rank and its partner."""

    def __init__(self, placement: Placement, loads: Sequence[float]) -> None:
        self._loads, self._num_experts = loads, placement.num_experts
        self._ranks = [list(held) for held in placement.ranks]
        self._note()

    def run(self) -> Placement:
        """Make at most twice as many changes as a rank has slots."""
        for _ in range(2 * len(self._ranks[0])):
            mean = sum(self._work) / len(self._work)
            if max(self._work) <= GOOD * mean or not self._change():
                break
        return self._placement

    def _note(self) -> None:
        self._placement = Placement(self._num_experts, tuple(map(tuple, self._ranks)))
        self._copies, self._work = self._placement.copies, self._placement.work(self._loads)

    def _change(self) -> bool:
        """Make the best change between the busiest rank and one of the least busy; False where none helps."""
        order = sorted(range(len(self._work)), key=lambda rank: (self._work[rank], rank))
        busiest = order[-1]
        best, slots = self._work[busiest] * (1 - 1e-6), list[tuple[int, int, int]]()
        for partner in order[: min(_PARTNERS, len(order) - 1)]:
            for slot, mine in enumerate(self._ranks[busiest]):
                if mine in self._ranks[partner]:
                    continue
                for place, theirs in enumerate(self._ranks[partner]):
                    if (
                        theirs not in self._ranks[busiest]
                        and (after := self._swapped(busiest, mine, partner, theirs)) < best
                    ):
                        best, slots = after, [(busiest, slot, theirs), (partner, place, mine)]
                    if self._copies[theirs] > 1 and (after := self._copied(mine, partner, theirs)) < best:
                        best, slots = after, [(partner, place, mine)]
        for rank, slot, expert in slots:
            self._ranks[rank][slot] = expert
        if slots:
            self._note()
        return bool(slots)

    def _swapped(self, busiest: int, mine: int, partner: int, theirs: int) -> float:
        """The higher load of the two ranks once they have exchanged two experts."""
        more = self._share(mine) - self._share(theirs)
        return max(self._work[busiest] - more, self._work[partner] + more)

    def _copied(self, mine: int, partner: int, theirs: int) -> float:
        """The highest load of the ranks that are touched once ``partner`` has ``mine`` in place of its copy of
        ``theirs``."""
        less = self._share(mine) - self._loads[mine] / (self._copies[mine] + 1)
        more = self._loads[theirs] / (self._copies[theirs] - 1) - self._share(theirs)
        highest = self._work[partner] - self._share(theirs) + self._share(mine) - less
        for rank, held in enumerate(self._ranks):
            if rank != partner and (mine in held or theirs in held):
                highest = max(highest, self._work[rank] - less * (mine in held) + more * (theirs in held))
        return highest

    def _share(self, expert: int) -> float:
        return self._loads[expert] / self._copies[expert]


def _copies(loads: Sequence[float], most: int, total: int) -> list[int]:
    """How many copies each expert gets, ``total`` in all: each further one goes to the expert whose copies have the
    most to do, and that has fewer than ``most``."""
    copies = [1] * len(loads)
    for _ in range(total - len(loads)):
        open_ones = (expert for expert in range(len(loads)) if copies[expert] < most)
        copies[max(open_ones, key=lambda expert: (loads[expert] / copies[expert], -copies[expert], -expert))] += 1
    return copies


def _packed(loads: Sequence[float], copies: Sequence[int], num_ranks: int, num_slots: int) -> list[set[int]]:
    """``num_slots`` experts for each rank: the heaviest copies first, each to the rank with the least to do.

    Experts with the most copies come first among equals, since these find the fewest ranks. Where only ranks with a
    copy of the expert have room, one of them takes an expert of another rank, which takes the copy.
    """
    packs: list[set[int]] = [set() for _ in range(num_ranks)]
    work = [0.0] * num_ranks
    share = [load / count for load, count in zip(loads, copies, strict=True)]
    order = sorted(range(len(loads)), key=lambda expert: (-share[expert], -copies[expert], expert))
    for expert in order:
        for _ in range(copies[expert]):
            able = [rank for rank in range(num_ranks) if len(packs[rank]) < num_slots and expert not in packs[rank]]
            if able:
                rank = min(able, key=lambda each: (work[each], len(packs[each]), each))
            else:
                room = next(rank for rank in range(num_ranks) if len(packs[rank]) < num_slots)
                rank = next(
                    rank for rank in range(num_ranks) if expert not in packs[rank] and packs[rank] - packs[room]
                )
                given = min(packs[rank] - packs[room], key=lambda each: (share[each], each))
                packs[rank].remove(given)
                packs[room].add(given)
                work[rank], work[room] = work[rank] - share[given], work[room] + share[given]
            packs[rank].add(expert)
            work[rank] += share[expert]
    return packs
