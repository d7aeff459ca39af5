"""Collectives of every communicator in the tree against what they are to give, for even, uneven and absent rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import torch

from hardpoint.parallel.control import ControlGroup, RankLostError
from hardpoint.parallel.groups import Group, alone
from hardpoint.parallel.process_group import Store, process_group
from hardpoint.reference.torch_distributed import GatherAndSum, TorchDistributed
from hardpoint_cpu.shared_ranks import SharedMemory
from hardpoint_plugin_api import Communicator, CommunicatorWorkload, EngineError, PlatformError, RankGroup
from tests.parallel.ranks import on_each

WORLD = 3
ROWS = [2, 0, 3]
"""Of each rank, where they differ."""


def communicator(kind: type[Communicator], rank: int, store: Store) -> Communicator:
    ctx = cast(Any, SimpleNamespace(parallel=alone()))
    made = kind(ctx, CommunicatorWorkload(dtype="float32", parallel="tp", ranks=WORLD))
    made.init(store, rank, WORLD, "tp")
    return made


def values(rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, 2] of small whole numbers, unlike on every rank: their sums are exact in every dtype."""
    return (torch.arange(2 * rows).view(rows, 2) % 5 + rank).to(dtype)


def everyone(rows: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    return [values(rank, count, dtype) for rank, count in enumerate(rows)]


@pytest.mark.parametrize("kind", [TorchDistributed, GatherAndSum, SharedMemory])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_collectives(kind: type[Communicator], dtype: torch.dtype) -> None:
    def run(rank: int, store: Store) -> None:
        made = communicator(kind, rank, store)
        total = sum(everyone([6] * WORLD, dtype), torch.zeros(6, 2, dtype=dtype))
        assert torch.equal(made.all_reduce(values(rank, 6, dtype)), total)
        assert torch.equal(made.reduce_scatter(values(rank, 6, dtype)), total[2 * rank : 2 * rank + 2])
        uneven = sum(everyone([5] * WORLD, dtype), torch.zeros(5, 2, dtype=dtype))
        assert torch.equal(made.reduce_scatter(values(rank, 5, dtype), ROWS), uneven.split(ROWS)[rank])
        assert torch.equal(made.all_gather(values(rank, 2, dtype)), torch.cat(everyone([2] * WORLD, dtype)))
        assert torch.equal(made.all_gather(values(rank, ROWS[rank], dtype), ROWS), torch.cat(everyone(ROWS, dtype)))
        assert made.all_gather(values(rank, 0, dtype), [0] * WORLD).shape == (0, 2)
        made.close()

    on_each(WORLD, run)


@pytest.mark.parametrize("kind", [TorchDistributed, SharedMemory])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.float8_e4m3fn, torch.uint8])
def test_data_of_every_dtype_moves(kind: type[Communicator], dtype: torch.dtype) -> None:
    sent = [[1, 0, 2], [0, 0, 0], [3, 1, 0]]
    """How many rows each rank sends to each: one sends none, one gets one alone."""

    def run(rank: int, store: Store) -> None:
        made = communicator(kind, rank, store)
        x = values(rank, sum(sent[rank]), torch.float32).to(dtype)
        received = [row[rank] for row in sent]
        wanted = [values(r, sum(sent[r]), torch.float32).split(sent[r])[rank] for r in range(WORLD)]
        assert torch.equal(made.all_to_all(x, sent[rank], received).float(), torch.cat(wanted))
        everything = torch.cat(everyone(ROWS, torch.float32))
        assert torch.equal(made.all_gather(values(rank, ROWS[rank], dtype), ROWS).float(), everything)
        x = values(rank, 2, dtype)
        made.broadcast(x, 1)
        assert torch.equal(x.float(), values(1, 2, torch.float32))
        if rank == 0:
            made.send(values(7, 2, dtype), 2)
        elif rank == 2:
            made.recv(x, 0)
            assert torch.equal(x.float(), values(7, 2, torch.float32))
        made.close()

    on_each(WORLD, run)


@pytest.mark.parametrize("kind", [GatherAndSum, SharedMemory])
def test_sums_in_the_order_of_ranks(kind: type[Communicator]) -> None:
    """Of numbers whose sum depends on the order."""
    numbers = [1e8, 1.0, -1e8]

    def run(rank: int, store: Store) -> float:
        made = communicator(kind, rank, store)
        total = float(made.all_reduce(torch.tensor([[numbers[rank]]])))
        made.close()
        return total

    assert on_each(WORLD, run) == [float(torch.tensor(1e8) + 1.0 - 1e8)] * WORLD


CALLS: dict[str, Callable[[RankGroup, torch.Tensor], object]] = {
    "all_reduce": lambda group, x: group.all_reduce(x),
    "all_gather": lambda group, x: group.all_gather(x),
    "all_gather_columns": lambda group, x: group.all_gather_columns(x),
    "reduce_scatter": lambda group, x: group.reduce_scatter(x),
    "broadcast": lambda group, x: group.broadcast(x, 0),
    "send": lambda group, x: group.send(x, 1),
    "recv": lambda group, x: group.recv(x, 1),
    "all_to_all": lambda group, x: group.all_to_all(x, [1, 1], [1, 1]),
}


class Nothing(Communicator):
    """Joins and leaves."""

    def init(self, store: Store, rank: int, world: int, group: str) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


@pytest.mark.parametrize("call", CALLS)
def test_what_is_not_implemented_raises(call: str) -> None:
    ctx = cast(Any, SimpleNamespace(parallel=alone()))
    made = Nothing(ctx, CommunicatorWorkload(dtype="float32", parallel="tp", ranks=2))
    group = Group("tp", (0, 1), 0, [(None, made)])
    lacking = call.removesuffix("_columns")  # which all_gather_columns calls by default
    with pytest.raises(NotImplementedError, match=f"the communicator Nothing has no {lacking}$"):
        CALLS[call](group, torch.ones(2, 1))


def test_what_is_abstract_must_be_there() -> None:
    kind: Any = type("Half", (Nothing,), {"abort": Communicator.abort})
    with pytest.raises(TypeError, match=r"abstract method '?abort"):
        kind(None, None)


def test_a_collective_that_breaks_off_is_told_from_what_a_rank_does_wrong() -> None:
    class Broken(Nothing):
        def all_reduce(self, x: torch.Tensor) -> NoReturn:
            raise RuntimeError("connection closed by peer")

        def all_gather(self, x: torch.Tensor, rows: object = None) -> NoReturn:
            raise ValueError("bad rows")

    made = Broken(cast(Any, None), CommunicatorWorkload(parallel="tp", ranks=2))
    group = Group("tp", (0, 1), 0, [(None, made)])
    with pytest.raises(RankLostError, match=r"all_reduce among the ranks \[0, 1\] broke off: connection closed"):
        group.all_reduce(torch.ones(1))
    with pytest.raises(ValueError, match="bad rows"):
        group.all_gather(torch.ones(1))


def test_ranges_of_sizes() -> None:
    """Every rank takes the same communicator, also where each has other rows."""

    class Marked(Nothing):
        mark = 0.0

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return torch.full_like(x, self.mark)

        def all_gather(self, x: torch.Tensor, rows: object = None) -> torch.Tensor:
            return torch.full_like(x, self.mark)

    small, large = (Marked(cast(Any, None), CommunicatorWorkload(ranks=2)) for _ in range(2))
    small.mark, large.mark = 1.0, 2.0
    group = Group("tp", (0, 1), 0, [(4, small), (None, large)])
    assert [float(group.all_reduce(torch.zeros(rows, 1))[0]) for rows in (1, 4, 5)] == [1, 1, 2]
    assert float(group.all_gather(torch.zeros(1, 1), [1, 9])[0]) == 2


def test_one_rank_gives_back_what_it_is_given() -> None:
    group, x = alone().tp, torch.ones(2)
    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
    assert group.all_gather_columns(x) is x
    assert group.reduce_scatter(x) is x
    assert group.all_to_all(x, [2], [2]) is x
    group.broadcast(x, 0)


def test_leaving_is_in_order_and_ends_though_one_hangs(caplog: pytest.LogCaptureFixture) -> None:
    left: list[str] = []

    class Noted(Nothing):
        def __init__(self, name: str, fails: bool = False) -> None:
            self.name, self.fails = name, fails

        def close(self) -> None:
            left.append(self.name)
            if self.fails:
                raise OSError("no")

        def abort(self) -> None:
            left.append(f"abort {self.name}")

    group = Group("tp", (0, 1), 0, _joined=[Noted("first"), Noted("second", fails=True)])
    group.close(time.monotonic() + 60)
    assert left == ["second", "first"]
    assert "a communicator or kernel could not leave its group" in caplog.text
    group = Group("tp", (0, 1), 0, _joined=[Noted("first"), Noted("second")])
    group.abort()
    assert left[2:] == ["abort second", "abort first"]


def test_the_control_group() -> None:
    def run(rank: int, store: Store) -> tuple[list[str], int, str]:
        control = ControlGroup.join(store, rank, WORLD, 30, on_one_host=True)
        names = control.exchange("x" * rank)
        least = control.least(10 - rank)
        said = ""
        try:
            with control.together():
                if rank == 1:
                    raise EngineError("mine")
        except EngineError as error:
            said = str(error)
        control.close()
        return names, least, said

    found = on_each(WORLD, run)
    assert [(names, least) for names, least, _ in found] == [(["", "x", "xx"], 8)] * WORLD
    lost = "the engine cannot start, since another rank has failed: rank 1: EngineError: mine"
    assert [said for _, _, said in found] == [lost, "mine", lost]


def test_a_backend_that_torch_lacks() -> None:
    with pytest.raises(PlatformError, match="this build of torch has no backend 'acmeccl'"):
        process_group("acmeccl", cast(Any, None), 0, 1, 1, on_one_host=True)
