"""Collectives between ranks of this host, and the exchange of a mixture of experts, beside what the link allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import click
import torch

from hardpoint.bench.rank_group import BenchRank, RankSettings, check_ranks, on_ranks
from hardpoint.bench.registry import BenchResult, BenchRow, benchmark
from hardpoint.context import Context
from hardpoint.dtypes import dtype_of
from hardpoint.parallel.groups import Group
from hardpoint.plugin_host import Offer
from hardpoint.plugin_host.blame import construct
from hardpoint.reference.all2all import AllToAll
from hardpoint_plugin_api import All2All, All2AllWorkload, ConfigError, GroupMember

_ROOFLINE = "bytes that a rank must get, over the link's measured peak"
_MOST_BYTES_AT_ONCE = 64 * 2**20
"""A measured row of calls moves so many at most."""

_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class _Collective:
    """``share``: what a rank must get at least, as a part of the tensor of all ranks, for so many ranks."""

    share: Callable[[int], float]
    run: Callable[[Group, torch.Tensor], object]


def _send(group: Group, x: torch.Tensor) -> None:
    if group.rank == 0:
        group.send(x, 1)
    elif group.rank == 1:
        group.recv(x, 0)


def _all_to_all(group: Group, x: torch.Tensor) -> torch.Tensor:
    rows = [x.shape[0] // group.size] * group.size
    return group.all_to_all(x, rows, rows)


_COLLECTIVES = {
    "all_reduce": _Collective(lambda n: 2 * (n - 1) / n, lambda group, x: group.all_reduce(x)),
    "all_gather": _Collective(lambda n: (n - 1) / n, lambda group, x: group.all_gather(x[: x.shape[0] // group.size])),
    "reduce_scatter": _Collective(lambda n: (n - 1) / n, lambda group, x: group.reduce_scatter(x)),
    "all_to_all": _Collective(lambda n: (n - 1) / n, _all_to_all),
    "broadcast": _Collective(lambda n: 1.0, lambda group, x: group.broadcast(x, 0)),
    "send": _Collective(lambda n: 1.0, _send),
}
"""Each over a tensor of so many bytes that all ranks have in the end, or begin with."""


@dataclass(frozen=True)
class _Measured:
    """Seconds of one call, of the chosen contribution and of the peer."""

    name: str
    nbytes: int
    moved: float
    seconds: float
    peer: float


@dataclass(frozen=True)
class _Answer:
    """The report of rank 0: the contribution that was measured, the peer's backend, bytes per second of the link."""

    chosen: str
    backend: str
    link: float
    rows: list[_Measured]

    def result(self, name: str, ranks: int) -> BenchResult:
        return BenchResult(
            f"{name}: {self.chosen}, {ranks} ranks",
            tuple(
                BenchRow(
                    row.name,
                    round(row.seconds * 1e6, 2),
                    "us",
                    roofline=round(row.moved / self.link * 1e6, 2),
                    peer=round(row.peer * 1e6, 2),
                    note=f"{row.nbytes:,} bytes, {row.moved / row.seconds / 1e9:.2f} GB/s",
                )
                for row in self.rows
            ),
            roofline=f"{_ROOFLINE}, {self.link / 1e9:.1f} GB/s",
            peer=f"torch.distributed by {self.backend}",
        )


def _sizes(text: str) -> list[int]:
    factors = {"k": 2**10, "m": 2**20, "g": 2**30}
    try:
        found = [int(part.rstrip("kmg")) * factors.get(part[-1], 1) for part in text.lower().split(",")]
    except (ValueError, IndexError):
        raise ConfigError(f"--sizes {text}: must be bytes such as 1k,64k,1m") from None
    if not all(size > 0 for size in found):
        raise ConfigError(f"--sizes {text}: every size must be above 0")
    return found


@click.option("--platform", default=None, help="Kind of device. Default: an accelerator if one is found, else cpu.")
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(2, 64), help="Ranks on this host.")
@click.option(
    "--communicator",
    default=None,
    metavar="NAME",
    help="Communicator to measure. Default: the one that an engine would use.",
)
@click.option("--sizes", default="1k,64k,1m,16m", show_default=True, help="Sizes of the tensors to measure, in bytes.")
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(_DTYPES))
@click.option("--only", default="", metavar="TEXT", help="Measure only collectives with TEXT in their name.")
@click.option(
    "--rounds", default=15, show_default=True, type=click.IntRange(min=3), help="The median of so many counts."
)
@benchmark("communicator", "Collectives between ranks of this host: latency and bandwidth.")
def communicator(
    platform: str | None, ranks: int, communicator: str | None, sizes: str, dtype: str, only: str, rounds: int
) -> BenchResult:
    """Measure every collective of a communicator, in turns with torch.distributed, each rank a process.

    A row is the median time of a call; the note has the bytes of the whole tensor, and the bandwidth: bytes that a rank
    must get at least (twice the tensor's for a sum, less its own part), over that time.
    """
    check_ranks(ranks, platform)
    names = [name for name in _COLLECTIVES if only in name]
    if not names:
        raise ConfigError(f"--only {only}: in the name of no collective; they are {', '.join(_COLLECTIVES)}")
    settings = RankSettings(ranks, dtype, platform, communicator=communicator)
    answer = on_ranks(settings, partial(_measure_collectives, names=names, sizes=_sizes(sizes), rounds=rounds))
    return answer.result("communicator", ranks)


def _measure_collectives(at: BenchRank, names: list[str], sizes: list[int], rounds: int) -> _Answer:
    group = at.group("tp")
    at.open(group, "chosen")
    rows, ranks, dtype = [], at.settings.ranks, dtype_of(at.settings.dtype)
    for name in names:
        one = _COLLECTIVES[name]
        for size in sizes:
            per_rank = max(1, size // dtype.itemsize // ranks)
            x = torch.zeros(ranks, per_rank, dtype=dtype, device=at.ctx.torch_device)
            times = max(2, min(100, _MOST_BYTES_AT_ONCE // x.nbytes))
            ours, peers = at.in_turns([partial(one.run, group, x), partial(one.run, at.peer, x)], rounds, times)
            rows.append(_Measured(f"{name} {_short(size)}", x.nbytes, one.share(ranks) * x.nbytes, ours, peers))
    return _Answer(", ".join(group.served_by), at.platform.collectives, at.link(), rows)


@click.option("--platform", default=None, help="Kind of device. Default: an accelerator if one is found, else cpu.")
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(2, 64), help="Ranks on this host.")
@click.option(
    "--all2all-backend",
    default=None,
    metavar="NAME",
    help="All-to-all to measure. Default: the first that moves tokens.",
)
@click.option("--tokens", default="1,64,1024", show_default=True, help="Tokens of each rank.")
@click.option("--experts", default=128, show_default=True, type=click.IntRange(min=2), help="Experts of all ranks.")
@click.option("--top-k", default=8, show_default=True, type=click.IntRange(min=1), help="Experts of a token.")
@click.option("--hidden-size", default=2048, show_default=True, type=click.IntRange(min=8))
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(_DTYPES))
@click.option(
    "--rounds", default=15, show_default=True, type=click.IntRange(min=3), help="The median of so many counts."
)
@benchmark("all2all", "Dispatch and combine of tokens among experts' ranks: latency and bandwidth.")
def all2all(
    platform: str | None,
    ranks: int,
    all2all_backend: str | None,
    tokens: str,
    experts: int,
    top_k: int,
    hidden_size: int,
    dtype: str,
    rounds: int,
) -> BenchResult:
    """Measure an all2all, in turns with core's ``all_to_all`` over torch.distributed, each rank a process.

    A row is the median time of a dispatch and its combine, with experts drawn evenly; results are not computed between.
    The note has the bytes of the rank's tokens, and the bandwidth: bytes of tokens that a rank must get in both, over
    that time. The shape is that of Qwen3-30B-A3B.
    """
    check_ranks(ranks, platform)
    if experts % ranks or top_k > experts:
        raise ConfigError(f"--experts {experts}: must be a multiple of --ranks {ranks}, and at least --top-k {top_k}")
    counts = [int(part) for part in tokens.split(",") if part.isdigit()]
    if len(counts) != len(tokens.split(",")) or not all(counts):
        raise ConfigError(f"--tokens {tokens}: must be numbers above 0, such as 1,64,1024")
    settings = RankSettings(ranks, dtype, platform, all2all=all2all_backend, tokens=max(counts))
    workload = All2AllWorkload(
        dtype=dtype, parallel="ep", ranks=ranks, num_experts=experts, top_k=top_k, hidden_size=hidden_size
    )
    answer = on_ranks(settings, partial(_measure_all2all, workload=workload, tokens=counts, rounds=rounds))
    return answer.result("all2all", ranks)


def _measure_all2all(at: BenchRank, workload: All2AllWorkload, tokens: list[int], rounds: int) -> _Answer:
    group = at.group("ep")
    ctx = at.context(group)
    offer = _moving(ctx, workload, named=at.settings.all2all is not None)
    made = construct(offer, ctx.load(offer), All2All, ctx, workload)
    if isinstance(made, GroupMember):
        ctx.adopt(offer, made, group)
    at.open(group, "chosen")
    peer = AllToAll(at.context(at.peer), workload)
    rows = []
    for count in tokens:
        drawn = [_draw(workload, count, rank) for rank in range(group.size)]
        x, ids, weights = (part.to(at.ctx.torch_device) for part in drawn[at.rank])
        runs = [partial(_there_and_back, one, x, ids, weights, group.size) for one in (made, peer)]
        ours, peers = at.in_turns(runs, rounds, max(2, min(100, 4096 // count)))
        got = sum(_wanted(workload, others, at.rank) for rank, (_, others, _) in enumerate(drawn) if rank != at.rank)
        rows.append(_Measured(f"{count:,} tokens", x.nbytes, 2 * got * x[0].nbytes, ours, peers))
    return _Answer(offer.contribution.name, at.platform.collectives, at.link(), rows)


def _moving(ctx: Context, workload: All2AllWorkload, *, named: bool) -> Offer:
    """The all2all that the settings name, else the first that moves tokens: ranks of a benchmark have their own."""
    if named:
        return ctx.select(workload).offer
    found = [offer for offer in ctx.selector.candidates(workload) if not getattr(ctx.load(offer), "replicated", False)]
    return max(found, key=lambda offer: offer.contribution.priority)  # core has some that always serve


def _draw(workload: All2AllWorkload, count: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [count, H], ids int32 and weights float32 [count, K] of one rank; the experts of a token are distinct."""
    assert workload.num_experts is not None
    assert workload.hidden_size is not None
    assert workload.dtype is not None
    generator = torch.Generator().manual_seed(1000 * count + rank)
    ids = torch.rand(count, workload.num_experts, generator=generator).argsort(-1)[:, : workload.top_k].int()
    x = torch.randn(count, workload.hidden_size, generator=generator).to(dtype_of(workload.dtype))
    return x, ids.contiguous(), torch.rand(ids.shape, generator=generator)


def _wanted(workload: All2AllWorkload, ids: torch.Tensor, rank: int) -> int:
    """How many of the tokens with these experts have some on ``rank``."""
    assert workload.num_experts is not None
    assert workload.ranks is not None
    return int((ids // (workload.num_experts // workload.ranks) == rank).any(-1).sum())


def _there_and_back(made: All2All, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, ranks: int) -> None:
    made.expect([x.shape[0]] * ranks)
    sent = made.dispatch(x, None, ids, weights)
    made.combine(sent.x, sent.handle, torch.empty_like(x))


def _short(size: int) -> str:
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"
