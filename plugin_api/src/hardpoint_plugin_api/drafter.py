"""Drafters: they propose tokens that may follow, which the model's next step verifies all at once.

A draft is taken where it is just the token that the model's own draw gives at its place, so a drafter decides how many
steps an output takes, and never what it says: see the op ``verify_drafts``.

Shapes use N requests, R slots, W tokens of the longest sequence, k drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardpoint_plugin_api.context import BuildContext
from hardpoint_plugin_api.device import DeviceInfo
from hardpoint_plugin_api.reasons import Reason
from hardpoint_plugin_api.requests import DrafterWorkload

if TYPE_CHECKING:
    import torch

NO_DRAFT = -1
"""In place of a draft: there is none."""


@dataclass(frozen=True, kw_only=True)
class DrafterArgs:
    """The arguments of a drafter's constructor.

    ``num_drafts`` is k, the most tokens that it proposes for a request and step. ``prompt_lookup_min`` and
    ``prompt_lookup_max`` are the shortest and the longest match, in tokens, of drafters that look for the end of a
    sequence in the sequence itself. Later versions add fields with defaults.
    """

    num_drafts: int
    vocab_size: int
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4


@dataclass(frozen=True, slots=True)
class DraftCall:
    """The arguments of ``Drafter.propose``.

    ``tokens`` int32 [R, W] holds the sequence of each slot: prompt and drawn tokens. ``slots`` int64 [N], without
    repetition, are those to draft for, and ``lengths`` int64 [N] count their tokens, at least 1 each; elements behind
    them mean nothing. ``longest`` is a host bound of ``lengths``: no length is above it. Later versions add fields with
    defaults.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    longest: int


class Drafter(ABC):
    """Proposes the tokens that follow sequences. One instance serves an engine's rank; it is called after each step.

    Equal calls give equal drafts, whichever requests were drafted for before: the ranks of an engine draft each for
    itself.
    """

    def __init__(self, ctx: BuildContext, args: DrafterArgs) -> None:
        self.ctx, self.args = ctx, args

    @classmethod
    def supports(cls, workload: DrafterWorkload, device: DeviceInfo) -> list[Reason]:
        """Say what data cannot; called once, after import. Default: nothing to add."""
        return []

    @abstractmethod
    def propose(self, call: DraftCall) -> torch.Tensor:
        """Return drafts int64 [N, k]: tokens of the vocabulary, and NO_DRAFT behind the last one of a request.

        A request may get none. The tensor is on the device of the call's, and mutates nothing of them. It should not
        wait for the device.
        """
