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

    ``positions`` int64 [T]: the position of each token in its sequence. ``rotary_positions`` int64 [T]: the positions
    for rotary embedding, equal to ``positions`` unless the model counts otherwise ([3, T] where each token has three).
    ``caches``: the cache views of each cache user. ``metadata``: the attention metadata of each user's group; users of
    one group share the object. ``adapters`` int32 [T]: the slot of each token's LoRA adapter, -1 for none; None where
    no token of the step has one. ``replica_tokens``: how many tokens, padding included, each replica has in this step,
    where replicas share experts; empty where all have as many.
    """

    positions: torch.Tensor
    rotary_positions: torch.Tensor
    caches: Sequence[dict[str, torch.Tensor]]
    metadata: Sequence[AttentionMetadata]
    adapters: torch.Tensor | None = None
    replica_tokens: Sequence[int] = ()

    @classmethod
    def empty(cls, device: torch.device) -> ForwardStep:
        """Return a step for rows that are not tokens of a model's step, such as those that the output head scores."""
        import torch

        none = torch.empty(0, dtype=torch.int64, device=device)
        return cls(none, none, (), ())

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.positions.shape[0]

    def interrupt(self, user: int, call: Callable[..., None], *tensors: torch.Tensor) -> None:
        """Run ``call(cache, metadata, *tensors)`` with the cache and the metadata of cache user number ``user``.

        All work must run in here that depends on how tokens belong to requests. ``tensors`` are the step's tensors that
        ``call`` reads and writes; it holds no others of the step, and returns nothing. A step that is captured as
        piecewise graphs is split at this place: ``call`` runs uncaptured in each replay, with that replay's metadata
        and on tensors in the same places. Later layers use their memory again.
        """
        call(self.caches[user], self.metadata[user], *tensors)
