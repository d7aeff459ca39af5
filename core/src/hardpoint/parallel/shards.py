"""Core's default plans: how a group of ranks divides heads, feed-forwards and vocabularies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from hardpoint_plugin_api import ConfigError, RankGroup, ShardPlan, ShardSlice


def even_shard(full: int, group: RankGroup, what: str) -> ShardPlan | None:
    """Equal pieces, None where there is one rank. Raises ConfigError where ``full`` of ``what`` does not divide."""
    if group.size == 1:
        return None
    if full % group.size:
        raise ConfigError(
            f"--tensor-parallel-size: the model's {what} of {full} does not divide among {group.size} ranks; "
            f"take one of {_divisors(full, group.size)}"
        )
    return ShardPlan.even(full, group.size, group.rank)


def vocab_shard(full: int, group: RankGroup) -> ShardPlan | None:
    """Pieces of equal size, the last padded; None where there is one rank."""
    return None if group.size == 1 else ShardPlan.padded(full, group.size, group.rank)


@dataclass(frozen=True)
class HeadShards:
    """Attention heads on the ranks of a group: query heads evenly; of KV heads those that these read.

    Where there are fewer KV heads than ranks, each is on several ranks. ``query`` and ``kv`` are None for one rank.
    """

    num_heads: int
    num_kv_heads: int
    query: ShardPlan | None = None
    kv: ShardPlan | None = None

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, group: RankGroup) -> Self:
        """The plan for heads of the whole model. Raises ConfigError where heads do not divide."""
        query = even_shard(num_heads, group, "number of attention heads")
        if query is None:
            return cls(num_heads, num_kv_heads)
        replicas = max(1, group.size // num_kv_heads)
        try:
            kv = ShardPlan.even(num_kv_heads, group.size, group.rank, replicas)
        except ValueError:
            raise ConfigError(
                f"--tensor-parallel-size {group.size}: the model's {num_kv_heads} KV heads do not divide among as many "
                "ranks, nor do the ranks divide among them"
            ) from None
        return cls(query.size, kv.size, query, kv)

    @property
    def own(self) -> slice:
        """The query heads of this rank."""
        if self.query is None:
            return slice(0, self.num_heads)
        (piece,) = self.query.own
        return slice(piece.source, piece.source + piece.count)

    def rows(self, head_size: int) -> tuple[ShardPlan, ...]:
        """The rows of q, k and v; nothing for one rank."""
        if self.query is None or self.kv is None:
            return ()
        kv = widened(self.kv, head_size)
        return widened(self.query, head_size), kv, kv

    def columns(self, head_size: int) -> ShardPlan | None:
        """The columns of the projection that follows."""
        return None if self.query is None else widened(self.query, head_size)


def widened(plan: ShardPlan, by: int) -> ShardPlan:
    """The plan of what there is ``by`` of for each element."""
    ranks = tuple(
        tuple(ShardSlice(piece.source * by, piece.target * by, piece.count * by) for piece in pieces)
        for pieces in plan.ranks
    )
    return replace(plan, full=plan.full * by, size=plan.size * by, ranks=ranks)


def _divisors(full: int, most: int) -> str:
    return ", ".join(str(n) for n in range(1, most) if full % n == 0)
