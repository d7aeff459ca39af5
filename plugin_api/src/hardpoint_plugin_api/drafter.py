"""Drafters propose next tokens; the model's next step verifies all of them at once (speculative decoding).

A draft is accepted where it equals the token that the model itself samples at its place. So a drafter decides how many
steps an output takes, and never its text: see the op ``verify_drafts``.

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

    ``num_drafts`` is k, the most tokens proposed per request and step. ``prompt_lookup_min`` and ``prompt_lookup_max``
    are the shortest and longest match, in tokens, for drafters that search the sequence for earlier text like its end.
    Later versions add fields with defaults.
    """

    num_drafts: int
    vocab_size: int
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4


@dataclass(frozen=True, slots=True)
class DraftCall:
    """The arguments of ``Drafter.propose``.

    ``tokens`` int32 [R, W]: the sequence of each slot, prompt and output. ``slots`` int64 [N]: the slots to draft for,
    without repetition. ``lengths`` int64 [N]: the length of their sequences, at least 1; later elements of ``tokens``
    are undefined. ``longest``: an upper bound of ``lengths``, on the host. Later versions add fields with defaults.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    longest: int


class Drafter(ABC):
    """Proposes the next tokens of sequences. Each rank of an engine has one instance, which is called after each step.

    Equal calls must give equal drafts, whatever was drafted before: each rank drafts by itself, and all must agree.
    """

    def __init__(self, ctx: BuildContext, args: DrafterArgs) -> None:
        self.ctx, self.args = ctx, args

    @classmethod
    def supports(cls, workload: DrafterWorkload, device: DeviceInfo) -> list[Reason]:
        """Return reasons against serving ``workload`` that the manifest cannot express. Default: no reason."""
        return []

    @abstractmethod
    def propose(self, call: DraftCall) -> torch.Tensor:
        """Return drafts int64 [N, k]: token ids, then NO_DRAFT after a request's last draft. A request may get no
        draft.

        The result is on the device of the call's tensors. Mutates none of them, and should not wait for the device.
        """
