"""Reading the record of routed experts (layers/routed_experts.py) from a rank's cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hardpoint.cache_users import ModelCaches
from hardpoint.layers.routed_experts import PLANE, recorders

Routed: TypeAlias = npt.NDArray[np.int16]
"""Ids of experts, [tokens, layers with experts, experts per token]."""


@dataclass(frozen=True)
class HeldTokens:
    """The first ``num_tokens`` tokens of a sequence, and the pages of each cache group that hold them, by block."""

    pages: tuple[tuple[int, ...], ...]
    num_tokens: int


class RoutedExpertsReader:
    """``caches`` holds the views of each cache user, in order."""

    def __init__(self, users: ModelCaches, caches: list[dict[str, torch.Tensor]]) -> None:
        group_of = {number: group for group, each in enumerate(users.cache_groups()) for number in each.users}
        self._records = [(group_of[number], caches[number][PLANE]) for number in recorders(users.users)]

    def read(self, held: HeldTokens) -> Routed | None:
        """The experts of a sequence's tokens; None where no layer of this rank has experts."""
        if not self._records:
            return None
        layers = []
        for group, record in self._records:
            pages = torch.tensor(held.pages[group], dtype=torch.int64, device=record.device)
            layers.append(record[pages].flatten(0, 1)[: held.num_tokens])
        read: Routed = torch.stack(layers, 1).cpu().numpy()
        return read
