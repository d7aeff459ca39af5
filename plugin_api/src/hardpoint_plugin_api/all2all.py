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
    """State that ``dispatch`` leaves for its ``combine``, such as the row counts it exchanged. Valid for one
    ``combine``.
    """

    def __init__(self, value: V) -> None:
        self._value: list[V] = [value]

    def take(self) -> V:
        """Return the state and invalidate the handle. Raises RuntimeError on a second call."""
        if not self._value:
            raise RuntimeError("a dispatch is combined once, and this handle has been combined already")
        return self._value.pop()


@dataclass(frozen=True)
class Dispatched:
    """The tokens that a dispatch delivers to the experts of this rank.

    Format ``standard``: ``x`` [R, H] has one row per received token; ``ids`` int32 [R, K] are the experts of each row,
    counted from 0 within this rank, -1 for experts of other ranks; ``weights`` float32 [R, K] are the router's;
    ``counts`` is None. Format ``batched``: ``x`` [E, M, H] has the rows of each expert, of which the first
    ``counts[e]`` (int32 [E]) are tokens; ``ids`` and ``weights`` are None. ``scales`` are those of a quantized ``x``,
    else None. ``handle`` is passed to one ``combine``.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor | None
    weights: torch.Tensor | None
    counts: torch.Tensor | None
    handle: object


class All2All(ABC):
    """Token exchange in a group of ranks: ``dispatch`` sends tokens to their experts, ``combine`` returns the results.

    Layers share an instance, and one dispatch is open at a time. One that is also a GroupMember joins the group
    ``ctx.parallel.ep``. ``format`` is the format of what ``dispatch``
    delivers. ``capturable``: both calls may be captured in a graph, once ``expect`` was called. ``replicated``: all
    ranks hold the same tokens, and ``combine`` yields the partial sum of this rank's experts, which the layer
    all-reduces; otherwise each rank holds tokens of its own. A method that cannot do what is asked must raise:
    unchanged data would be a wrong result that nobody notices.
    """

    format: ClassVar[ActivationFormat] = "standard"
    capturable: ClassVar[bool] = True
    replicated: ClassVar[bool] = False

    def __init__(self, ctx: BuildContext, workload: All2AllWorkload) -> None:
        self.ctx, self.workload = ctx, workload

    @classmethod
    def supports(cls, workload: All2AllWorkload, device: DeviceInfo) -> list[Reason]:
        """Return reasons against serving ``workload`` that the manifest cannot express. Default: no reason."""
        return []

    def most_rows(self, tokens: int) -> int:
        """Return the most rows of x (R, or E * M) that a dispatch of up to ``tokens`` tokens can deliver to this rank.

        Called at construction, to size workspaces. Default: a row for each token of every rank.
        """
        return tokens * (self.workload.ranks or 1)

    def expect(self, rows: Sequence[int]) -> None:
        """Take the number of tokens of each rank in the next ``dispatch``. Called on every rank of the group, or on
        none.

        The ranks of an engine always know these numbers. With them ``dispatch`` need not exchange counts, for which the
        host would wait. Default: they are ignored.
        """
        return

    @abstractmethod
    def dispatch(
        self, x: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor
    ) -> Dispatched:
        """Send each token of ``x`` [T, H] to the ranks of its experts. Every rank of the group must call this, also
        with T = 0.

        ``ids`` int32 [T, K] number the experts of all ranks; ``weights`` float32 [T, K] are the router's; ``scales``
        are those of a quantized ``x``, or None. The arguments are not changed; the result may share memory with them.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot dispatch")

    @abstractmethod
    def combine(self, y: torch.Tensor, handle: object, out: torch.Tensor) -> None:
        """Return results to the ranks of their tokens: writes all of ``out`` [T, H], the sum over experts for each
        token.

        With ``replicated``, ``out`` is the partial sum of this rank's experts. Format ``standard``: ``y`` [R, H] is
        already weighted and summed over this rank's experts. Format ``batched``: ``y`` [E, M, H] are unweighted
        results; they are multiplied by the router's weights here. ``y`` may be overwritten, and may be ``out`` where
        ``dispatch`` returned its argument ``x`` itself. Raises RuntimeError for a ``handle`` that was combined before.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot combine")
