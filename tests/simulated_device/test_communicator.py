"""The device's own collectives: three ranks, each a thread with a device of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from hardpoint_plugin_api import BuildContext, CommunicatorWorkload
from hardpoint_sim.communicator import StoreCommunicator

WORLD = 3
WORKLOAD = CommunicatorWorkload(dtype="float32", parallel="tp", ranks=WORLD)


@dataclass(frozen=True)
class Facts:
    """The build context as the communicator uses it."""

    timeout: float = 10.0

    @property
    def parallel(self) -> Facts:
        return self


def on_every_rank(act: Callable[[StoreCommunicator, int], Any]) -> list[Any]:
    store = HashStore()

    def run(rank: int) -> Any:
        communicator = StoreCommunicator(cast(BuildContext, Facts()), WORKLOAD)
        communicator.init(store, rank, WORLD, "tp")
        return act(communicator, rank)

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(run, range(WORLD)))


def of_rank(rank: int, rows: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(rows * 2.0).view(rows, 2) + 100 * rank).to(dtype).to(f"sim:{rank % 2}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums(dtype: torch.dtype) -> None:
    expected = (3 * torch.arange(12.0).view(6, 2) + 300).to(dtype)

    def act(communicator: StoreCommunicator, rank: int) -> tuple[torch.Tensor, ...]:
        x = of_rank(rank, dtype=dtype)
        number = torch.tensor(1.0, device=x.device)
        shares = (communicator.reduce_scatter(x), communicator.reduce_scatter(x, [0, 5, 1]))
        return communicator.all_reduce(x), communicator.all_reduce(number), *shares

    for rank, (whole, number, even, ragged) in enumerate(on_every_rank(act)):
        assert whole.device == even.device == torch.device("sim", rank % 2)
        assert number.item() == 3
        assert torch.equal(whole.cpu(), expected)
        assert torch.equal(even.cpu(), expected.split(2)[rank])
        assert torch.equal(ragged.cpu(), expected.split([0, 5, 1])[rank])


def test_gathers_and_exchanges() -> None:
    rows = [2, 0, 3]

    def act(communicator: StoreCommunicator, rank: int) -> tuple[torch.Tensor, ...]:
        gathered = communicator.all_gather(of_rank(rank, rows[rank]), rows)
        counts = [rank, 1, 2]  # what this rank sends to each
        exchanged = communicator.all_to_all(of_rank(rank, 3 + rank), counts, [[0, 1, 2], [1, 1, 1], [2, 2, 2]][rank])
        return gathered, exchanged

    for rank, (gathered, exchanged) in enumerate(on_every_rank(act)):
        assert torch.equal(gathered.cpu(), torch.cat([of_rank(i, n).cpu() for i, n in enumerate(rows)]))
        sent = [of_rank(i, 3 + i).cpu().split([i, 1, 2])[rank] for i in range(WORLD)]
        assert torch.equal(exchanged.cpu(), torch.cat(sent))


def test_messages_and_broadcasts_keep_their_order() -> None:
    def act(communicator: StoreCommunicator, rank: int) -> list[float]:
        x, got = of_rank(rank, 1), []
        for root in (2, 0):
            copy = x.clone()
            communicator.broadcast(copy, root)
            got.append(copy[0, 0].item())
        for _ in range(2):
            communicator.send(x + len(got), (rank + 1) % WORLD)
            communicator.recv(x, (rank - 1) % WORLD)
            got.append(x[0, 0].item())
        return got

    assert on_every_rank(act) == [[200, 0, 202, 105], [200, 0, 2, 205], [200, 0, 102, 5]]
