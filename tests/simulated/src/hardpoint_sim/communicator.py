"""Collectives by way of the group's store: ranks leave their tensors there for each other, as bytes.

No library of collectives knows the device, which is what many a new device starts from.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hardpoint_plugin_api import Communicator

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class StoreCommunicator(Communicator):
    """Every message has a number, a sender and one receiver, who takes it out of the store. Sums are in rank order."""

    def init(self, store: Store, rank: int, world: int, group: str) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._timeout = datetime.timedelta(seconds=self.ctx.parallel.timeout)
        self._numbers: Counter[tuple[int, int]] = Counter()

    def close(self) -> None:
        """Nothing is held."""

    def abort(self) -> None:
        """Nothing is held; whoever waits for this rank does so until the timeout."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return _sum(self._exchange([x] * self._world))

    def all_gather(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        return torch.cat(self._exchange([x] * self._world))

    def reduce_scatter(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        rows = [x.shape[0] // self._world] * self._world if rows is None else rows
        return _sum(self._exchange(x.split(list(rows))))

    def broadcast(self, x: torch.Tensor, root: int) -> None:
        if self._rank != root:
            return self.recv(x, root)
        for to in range(self._world):
            if to != root:
                self.send(x, to)
        return None

    def send(self, x: torch.Tensor, to: int) -> None:
        data = x.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        self._store.set(self._key(self._rank, to), data)  # type: ignore[arg-type]  # torch's stub forgets bytes

    def recv(self, x: torch.Tensor, source: int) -> None:
        x.copy_(self._take(x.dtype, source).view(x.shape))

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        return torch.cat(self._exchange(x.split(list(send))))

    def _exchange(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send each rank its part; returns what came, by rank. Parts differ in their first axis alone."""
        for to, part in enumerate(parts):
            if to != self._rank:
                self.send(part, to)
        own = parts[self._rank]
        shape = (-1, *own.shape[1:]) if own.ndim else ()
        return [
            own if source == self._rank else self._take(own.dtype, source).view(shape).to(own.device)
            for source in range(self._world)
        ]

    def _take(self, dtype: torch.dtype, source: int) -> torch.Tensor:
        key = self._key(source, self._rank)
        self._store.wait([key], self._timeout)
        data = self._store.get(key)
        self._store.delete_key(key)
        return torch.tensor(bytearray(data), dtype=torch.uint8).view(dtype)

    def _key(self, source: int, to: int) -> str:
        """Of the next message from ``source`` to ``to``."""
        self._numbers[source, to] += 1
        return f"{source}/{to}/{self._numbers[source, to]}"


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    first, *rest = parts
    total = first.clone()
    for part in rest:
        total += part
    return total
