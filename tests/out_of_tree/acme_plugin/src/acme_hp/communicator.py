"""Acme's collectives, of a library that is no backend of torch.distributed: ranks leave letters in the store.

The collectives of tensor parallelism are here; all others raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from hardpoint_plugin_api import Communicator

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # it is there, though not for mypy

_MOMENT = timedelta(seconds=0.2)


class Mailbox(Communicator):
    """Every rank leaves a letter for all, and reads everyone's."""

    def init(self, store: Store, rank: int, world: int, group: str) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._number, self._has_left = 0, False

    def close(self) -> None:
        """Letters that were read by all are gone already."""
        self._has_left = True

    def abort(self) -> None:
        """A rank that waits for a letter looks again in a moment, and sees it."""
        self._has_left = True

    def all_gather(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        if self._has_left:
            raise RuntimeError("this rank has left its group")
        rows = [x.shape[0]] * self._world if rows is None else rows
        self._number += 1
        letter = x.contiguous().view(torch.uint8).numpy().tobytes()
        self._store.set(f"{self._number}/{self._rank}", letter.hex())
        parts = []
        for rank, count in enumerate(rows):
            found = bytearray.fromhex(self._wait_for(f"{self._number}/{rank}").decode())
            part = torch.frombuffer(found, dtype=x.dtype) if found else x.new_empty(0)
            parts.append(part.view(count, *x.shape[1:]))
        # A rank that writes the letter after the next has read this one, as has each rank whose next letter it read.
        self._store.delete_key(f"{self._number - 1}/{self._rank}")
        return torch.cat(parts)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_gather(x[None]).sum(dim=0)

    def _wait_for(self, letter: str) -> bytes:
        while not self._has_left:
            try:
                self._store.wait([letter], _MOMENT)
            except RuntimeError:  # not yet
                continue
            found: bytes = self._store.get(letter)
            return found
        raise RuntimeError("the group was left while a letter was under way")
