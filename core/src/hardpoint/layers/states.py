"""Steps of layers that keep a state of each sequence in the cache.

Axes: T tokens, N requests, H heads, D key size, V value size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, cast

import torch

from hardpoint.context import Context
from hardpoint.ops.causal_conv import causal_conv
from hardpoint.ops.linear_recurrence import linear_recurrence_chunks, linear_recurrence_step
from hardpoint_plugin_api import (
    AttentionBatch,
    AttentionMetadata,
    CacheSpec,
    CacheUser,
    CaptureGrade,
    Latest,
    PlainLayout,
    Plane,
    StepPlanner,
)


@dataclass(frozen=True)
class Part:
    """Tokens of a step that one call of an op advances states by, in the order of their requests.

    ``rows``: which of the step's tokens. ``states`` int64 [n]: the states' rows in what ``begin`` returns.
    ``query_start`` int32 [n + 1] and ``seq_lens`` int32 [n]: as in AttentionBatch, of these tokens alone. ``starts``: a
    copy of ``query_start`` on the host, None where each request has one token. ``places`` int64 [n]: where the states
    behind these tokens are kept, None where they are not, or are in place.
    """

    rows: slice | torch.Tensor
    states: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    starts: tuple[int, ...] | None = None
    places: torch.Tensor | None = None


@dataclass
class StateMetadata(AttentionMetadata):
    """A step's ``parts``, which are to be advanced in this order. ``whole``: the same, where one call may have requests
    of any number of tokens. ``pages`` int64 [N]: the page of each request, see AttentionBatch.state_pages.

    ``first`` int64 [N]: the place of the state that each request goes on from, where drafts may follow; see
    StatePlanner.
    """

    pages: torch.Tensor | None = None
    first: torch.Tensor | None = None
    parts: tuple[Part, ...] = ()
    whole: tuple[Part, ...] = ()

    @classmethod
    def in_place(cls, batch: AttentionBatch, pages: torch.Tensor) -> StateMetadata:
        """A step whose states are advanced where they lie: one for each of ``pages``."""
        return cls(batch, pages=pages, parts=_decodes_and_prompts(batch, pages), whole=(_all(batch, pages),))

    def begin(self, plane: torch.Tensor) -> torch.Tensor:
        """The states to advance, [n, *shape]: of ``plane`` itself, or copies that ``keep`` writes back."""
        return plane if self.first is None else plane[cast(torch.Tensor, self.pages), self.first]

    def keep(self, plane: torch.Tensor, states: torch.Tensor, part: Part) -> None:
        """Write to ``plane`` what is to be kept of ``states``, which were advanced by ``part``."""
        if part.places is not None:
            plane[cast(torch.Tensor, self.pages)[part.states], part.places] = states[part.states]


class StatePlanner(StepPlanner):
    """Finds the states of a step, once for all layers of a cache group.

    With drafts of up to k tokens, a page holds a sequence's states behind each of its last k + 1 tokens: that behind
    position p at place p mod (k + 1). The next step goes on from the place that belongs to its own first position. So
    wrong drafts are undone by the next step's lengths, which the device knows before the host does.

    A step of equally many tokens for each request, at most k + 1, reads nothing from the host, so it can be captured.
    """

    capture = CaptureGrade.UNIFORM
    exact_lengths = False
    keeps_drafts = True

    def __init__(self, ctx: Context) -> None:
        self._block_size, self._num_places = ctx.block_size, num_places(ctx)
        self._fixed = _Arrays.allocate(ctx.limits.max_sequences, self._num_places, ctx.torch_device)

    def plan(self, batch: AttentionBatch) -> StateMetadata:
        """See StepPlanner. Captured steps read buffers that each call rewrites."""
        number, arrays = batch.num_requests, self._fixed
        if number > len(arrays.pages):  # trials of large steps, which have more requests than run at once
            arrays = _Arrays.allocate(number, self._num_places, arrays.pages.device)
        pages = arrays.pages[:number]
        pages.copy_(batch.state_pages(self._block_size))
        if self._num_places == 1:
            return StateMetadata.in_place(batch, pages)
        first = arrays.first[:number]
        first.copy_(self._place(batch.seq_lens - batch.query_start.diff()))
        parts = self._parts(batch, arrays)
        return StateMetadata(batch, pages=pages, first=first, parts=parts, whole=parts)

    def _place(self, lengths: torch.Tensor) -> torch.Tensor:
        """The places of the states behind sequences of ``lengths`` tokens."""
        return (lengths - 1).long() % self._num_places

    def _parts(self, batch: AttentionBatch, arrays: _Arrays) -> tuple[Part, ...]:
        """All but the last k + 1 tokens of each request together, then the last ones one by one."""
        host = batch.query_start_host
        counts = [end - start for start, end in pairwise(host)]
        if len(set(counts)) == 1 and counts[0] <= self._num_places:
            return tuple(self._nth(batch, arrays, number, counts[0]) for number in range(counts[0]))
        parts = []
        tails = [min(count, self._num_places) for count in counts]
        heads = [count - tail for count, tail in zip(counts, tails, strict=True)]
        if long := [i for i, count in enumerate(heads) if count]:
            rows = [row for i in long for row in range(host[i], host[i] + heads[i])]
            bounds = tuple(accumulate((heads[i] for i in long), initial=0))
            states = arrays.device(long)
            lengths = batch.seq_lens[states] - self._num_places
            parts.append(Part(arrays.device(rows), states, arrays.device(bounds).int(), lengths, bounds))
        for number in range(max(tails)):
            which = [i for i, tail in enumerate(tails) if tail > number]
            left = [tails[i] - 1 - number for i in which]
            rows = [host[i + 1] - 1 - behind for i, behind in zip(which, left, strict=True)]
            states = arrays.device(which)
            lengths = batch.seq_lens[states] - arrays.device(left).int()
            query_start = arrays.starts[: len(which) + 1]
            places = self._place(lengths)
            parts.append(Part(arrays.device(rows), states, query_start, lengths, places=places))
        return tuple(parts)

    def _nth(self, batch: AttentionBatch, arrays: _Arrays, number: int, count: int) -> Part:
        """One token of each request, which has ``count`` of them."""
        requests = batch.num_requests
        lengths, places = arrays.lengths[number, :requests], arrays.places[number, :requests]
        lengths.copy_(batch.seq_lens - (count - 1 - number))
        places.copy_(self._place(lengths))
        rows = slice(number, requests * count, count)
        return Part(rows, arrays.order[:requests], arrays.starts[: requests + 1], lengths, places=places)


@dataclass(frozen=True)
class _Arrays:
    """Buffers that ``StatePlanner.plan`` fills for steps of up to N requests.

    ``pages`` and ``first`` int64 [N]. For each of the last k + 1 tokens: ``places`` int64 and ``lengths`` int32
    [k + 1, N]. ``order`` int64 and ``starts`` int32 [N + 1] count from 0.
    """

    pages: torch.Tensor
    first: torch.Tensor
    places: torch.Tensor
    lengths: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def allocate(cls, number: int, num_places: int, device: torch.device) -> _Arrays:
        """Arrays for ``number`` requests and ``num_places`` tokens of each."""
        pages, first = torch.zeros(2, number, dtype=torch.int64, device=device)
        places = torch.zeros(num_places, number, dtype=torch.int64, device=device)
        order = torch.arange(number + 1, device=device)
        return cls(pages, first, places, places.int(), order, order.int())

    def device(self, numbers: Sequence[int]) -> torch.Tensor:
        """``numbers``, int64, on the device."""
        return torch.tensor(numbers, dtype=torch.int64).to(self.pages.device, non_blocking=True)


def _all(batch: AttentionBatch, pages: torch.Tensor) -> Part:
    return Part(slice(None), pages, batch.query_start, batch.seq_lens, batch.query_start_host)


def _decodes_and_prompts(batch: AttentionBatch, pages: torch.Tensor) -> tuple[Part, ...]:
    """The requests with one token, which come first, and the others."""
    count, number, parts = batch.num_decodes, batch.num_requests, []
    if count:
        parts.append(Part(slice(0, count), pages[:count], batch.query_start[: count + 1], batch.seq_lens[:count]))
    if count < number:
        starts = tuple(start - count for start in batch.query_start_host[count:])
        rows = slice(count, batch.query_start_host[-1])
        parts.append(Part(rows, pages[count:], batch.query_start[count:] - count, batch.seq_lens[count:], starts))
    return tuple(parts)


def num_places(ctx: Context) -> int:
    """The states of a sequence that its page holds: one, or with drafts of up to k tokens k + 1."""
    return 1 + ctx.config.num_drafts


def add_states(ctx: Context, *planes: Plane) -> int:
    """Declare a cache of one state for each sequence, of these planes. Returns the user's number.

    With drafts, the planes have an axis of ``num_places`` more, behind that of pages.
    """
    if (number := num_places(ctx)) > 1:
        planes = tuple(replace(plane, shape=(number, *plane.shape)) for plane in planes)
    spec = CacheSpec(planes, Latest())
    return ctx.cache_users.add(CacheUser(ctx.path, spec, PlainLayout(), StatePlanner(ctx), StatePlanner))


class ShortConvolution:
    """A causal convolution of each channel, whose last inputs are kept from step to step."""

    def __init__(self, ctx: Context, activation: str) -> None:
        self._activation = activation
        self._conv = causal_conv.bind(ctx, activation=activation)

    def advance(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        plan: StateMetadata,
    ) -> torch.Tensor:
        """The results of x [T, C] by a weight stored as [C, 1, W]. Mutates ``states``."""
        current, kernel, results = plan.begin(states), weight.squeeze(1), []
        for part in plan.whole:
            arrays = part.states, part.query_start, part.seq_lens
            results.append(self._conv(x[part.rows], kernel, bias, current, *arrays, activation=self._activation))
            plan.keep(states, current, part)
        if len(results) == 1 and len(results[0]) == len(x):
            return results[0]
        out = torch.empty_like(x)  # rows of padding are never read
        for part, result in zip(plan.whole, results, strict=True):
            out[part.rows] = result
        return out


class Recurrence:
    """A linear recurrence over the tokens of a step: decodes by one op, prompts by another."""

    def __init__(
        self,
        ctx: Context,
        key_size: int,
        *,
        scale: float,
        delta_rule: bool,
        normalize: bool,
        channel_decay: bool = False,
    ) -> None:
        """The scalars are those of the op linear_recurrence_step."""
        self._scalars: dict[str, Any] = {
            "scale": scale,
            "delta_rule": delta_rule,
            "normalize": normalize,
            "channel_decay": channel_decay,
        }
        self._step = linear_recurrence_step.bind(ctx, head_size=key_size, scalars=self._scalars)
        self._chunks = linear_recurrence_chunks.bind(ctx, head_size=key_size, scalars=self._scalars)

    def advance(
        self, inputs: Sequence[torch.Tensor], states: torch.Tensor, plan: StateMetadata, out: torch.Tensor
    ) -> None:
        """Write results to ``out`` [T, H, V], and mutate ``states``. ``inputs``: q, k, v, decay and beta of the ops."""
        current = plan.begin(states)
        for part in plan.parts:
            q, k, v, decay, beta = (x[part.rows] for x in inputs)
            given = q, k, v, decay, beta, current, part.states
            if part.starts is None:
                out[part.rows] = self._step(*given, part.seq_lens, **self._scalars)
            else:
                arrays = part.query_start, part.seq_lens
                out[part.rows] = self._chunks(*given, *arrays, starts=part.starts, **self._scalars)
            plan.keep(states, current, part)
