"""The step that runs, as a model's layers get it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardpoint_plugin_api.attention import AttentionMetadata

if TYPE_CHECKING:
    import torch


@dataclass
class ForwardStep:
    """One step of a model, as its layers see it. ``caches`` and ``metadata`` are indexed by cache user.

    ``positions`` int64 [T] count each token within its sequence, as the cache does. ``rotary_positions`` int64 [T] are
    those that rotary embedding rotates by: the same, unless a model numbers its tokens in another way ([3, T] where it
    has three such numbers for each). ``caches`` holds the views of each user's cache, ``metadata`` the plan of each
    user's group; users of one group share the object. ``adapters`` int32 [T] has the slot of each token's LoRA adapter,
    -1 for a token without one; it is None where no token of the step has one.
    """

    positions: torch.Tensor
    rotary_positions: torch.Tensor
    caches: Sequence[dict[str, torch.Tensor]]
    metadata: Sequence[AttentionMetadata]
    adapters: torch.Tensor | None = None

    @classmethod
    def empty(cls, device: torch.device) -> ForwardStep:
        """The step for rows that are not the tokens of a model's step, such as those that the output head scores."""
        import torch

        none = torch.empty(0, dtype=torch.int64, device=device)
        return cls(none, none, (), ())

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.positions.shape[0]

    def interrupt(self, user: int, call: Callable[[dict[str, torch.Tensor], AttentionMetadata], None]) -> None:
        """Run ``call(cache, metadata)`` with the cache and the metadata of cache user number ``user``.

        Whatever depends on a step's metadata in more than its token must run in here. A step that is prepared in
        pieces is cut at this place: ``call`` runs later, once in each run of what was prepared, with the metadata of
        that run and on the tensors that it holds itself. So it returns nothing and writes to tensors that are given.
        """
        call(self.caches[user], self.metadata[user])
