"""All-to-all: sending tokens to the ranks that hold their experts, and results back.

Axes: T tokens of this rank, R rows received, K experts per token, E experts of this rank, M rows per expert, H hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from hardpoint_plugin_api.context import BuildContext
from hardpoint_plugin_api.device import DeviceInfo
from hardpoint_plugin_api.experts import ActivationFormat
from hardpoint_plugin_api.reasons import Reason
from hardpoint_plugin_api.requests import All2AllWorkload

if TYPE_CHECKING:
    import torch

V = TypeVar("V")


class DispatchHandle(Generic[V]):
    """What a combine must know of the dispatch before it. It is used once: after that it is dead."""

    def __init__(self, value: V) -> None:
        self._value: list[V] = [value]

    def take(self) -> V:
        """Give the value out and die. Raises RuntimeError when dead."""
        if not self._value:
            raise RuntimeError("a dispatch is combined once, and this handle has been combined already")
        return self._value.pop()


@dataclass(frozen=True)
class Dispatched:
    """What a dispatch brings to this rank's experts.

    In the format ``standard``: ``x`` [R, H], ``ids`` int32 [R, K] that count this rank's experts from 0, with -1 for
    the others, and ``weights`` float32 [R, K]. In ``batched``: ``x`` [E, M, H] and ``counts`` int32 [E], the rows of
    each expert that mean something. ``scales`` are those of ``x``, where there are any. ``handle`` belongs to
    ``combine``, and dies with it.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor | None
    weights: torch.Tensor | None
    counts: torch.Tensor | None
    handle: object


class All2All(ABC):
    """Dispatch and combine of one group of ranks. Layers share an instance; one dispatch is open at a time.

    ``format`` is that of what it dispatches; ``capturable`` says whether both may be recorded in a graph, once it knows
    what to ``expect``. With ``replicated``, ranks have the same tokens: each dispatches all of them, and gets back what
    its own experts made of them, which is summed over ranks later; without, each has tokens of its own. What cannot be
    done must raise: no method may hand data through unchanged.
    """

    format: ClassVar[ActivationFormat] = "standard"
    capturable: ClassVar[bool] = True
    replicated: ClassVar[bool] = False

    def __init__(self, ctx: BuildContext, workload: All2AllWorkload) -> None:
        self.ctx, self.workload = ctx, workload

    @classmethod
    def supports(cls, workload: All2AllWorkload, device: DeviceInfo) -> list[Reason]:
        """Say what data cannot; called once, after import. Default: nothing to add."""
        return []

    def most_rows(self, tokens: int) -> int:
        """The most rows of x (R, or E * M) that a dispatch of up to ``tokens`` tokens brings. Asked when it is built.

        Default: a row for each token of every rank.
        """
        return tokens * (self.workload.ranks or 1)

    def expect(self, rows: Sequence[int]) -> None:
        """Learn how many tokens each rank has in the next ``dispatch``; called on every rank that knows, or on none.

        An engine's ranks always know, so that nobody needs to ask, which the host would have to wait for. Default:
        nothing.
        """
        return

    @abstractmethod
    def dispatch(
        self, x: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor
    ) -> Dispatched:
        """Send each token of ``x`` [T, H] to the ranks of its experts. Every rank of the group calls this, T = 0 too.

        ``ids`` int32 [T, K] count the experts of all ranks; ``weights`` float32 [T, K]; ``scales`` those of x or None.
        Changes nothing that it is given; what it returns may share memory with it.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot dispatch")

    @abstractmethod
    def combine(self, y: torch.Tensor, handle: object, out: torch.Tensor) -> None:
        """Bring results home: ``out`` [T, H], all of which is written, gets the sum over ranks for each token.

        (Where ``replicated``, this rank's partial sum.)

        In the format ``standard``, ``y`` [R, H] is weighted and summed over this rank's experts already; in
        ``batched``, ``y`` [E, M, H] is what the experts made, to be weighted by the router's weights here. ``y`` may be
        overwritten; where ``x`` was dispatched as the very tensor that was given, it may be ``out``. Raises
        RuntimeError for a ``handle`` that was combined before.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot combine")
