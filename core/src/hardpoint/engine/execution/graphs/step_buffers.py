"""The fixed buffers that captured graphs read: one set for all shapes, of which each takes the first rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hardpoint.engine.execution.graphs.shapes import Layout, StepShape
from hardpoint_plugin_api import NULL_PAGE, AttentionBatch

_PER_TOKEN, _PER_REQUEST = ("ids", "positions", "slot_mapping"), ("slots", "seq_lens", "block_table")
LONGEST = 16_384
"""Tokens of the longest sequence on which graphs are compared with eager steps: more than any tile or part of a context
that one program reads. With 131,072, two runs for 256 requests took a fifth of a second of each start on an H100."""

_BY_SECOND = ("slot_mapping", "block_table", "states")
"""Arrays whose first axis is the cache group, or counts the parts of states."""


@dataclass(frozen=True)
class StepBuffers:
    """The buffers of one layout: T tokens of N requests, G cache groups, W blocks of the longest sequence.

    ``step`` has, as the op decode_inputs names them: ids and positions int64 [T], slot_mapping int32 [G, T]; and, where
    requests are counted, slots int64 [N], seq_lens int32 [N], block_table int32 [G, N, W]; behind another pipeline
    stage its states [2, T, hidden]; where the engine serves adapters, those of ForwardStep, int32 [T]. ``tensors`` are
    these and query_start int32 [N + 1]. ``batches`` make what attention sees of each cache group.
    """

    layout: Layout
    step: Mapping[str, torch.Tensor]
    tensors: Mapping[str, torch.Tensor]
    batches: tuple[partial[AttentionBatch], ...]

    def planned(self, seq_lens_host: tuple[int, ...], exact: bool = True) -> list[AttentionBatch]:
        """Return the batch that attention sees of a step whose requests have these lengths, or at most these."""
        return [batch(seq_lens_host=seq_lens_host, exact_lengths=exact) for batch in self.batches]

    def load(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        batches: Sequence[AttentionBatch],
        adapters: torch.Tensor | None = None,
    ) -> list[AttentionBatch]:
        """Copy a step's arrays here; it has as many tokens and requests as the layout.

        Returns the batches that attention is to plan. Where requests are not counted, those are the step's own but
        for the slots, to which captured pieces store.
        """
        self.step["ids"].copy_(ids)
        self.step["positions"].copy_(positions)
        if adapters is not None:
            self.step["adapters"].copy_(adapters)
        for slots, batch in zip(self.step["slot_mapping"], batches, strict=True):
            slots.copy_(batch.slot_mapping)
        _, requests, queries = self.layout
        if requests is None:
            slot_mapping = self.step["slot_mapping"]
            return [replace(batch, slot_mapping=slots) for slots, batch in zip(slot_mapping, batches, strict=True)]
        first = batches[0]  # of which all groups have query_start and seq_lens
        self.step["seq_lens"].copy_(first.seq_lens)
        for table, batch in zip(self.step["block_table"], batches, strict=True):
            table[:, : batch.block_table.shape[1]].copy_(batch.block_table)
        if queries is not None:
            return self.planned(first.seq_lens_host, first.exact_lengths)
        self.tensors["query_start"].copy_(first.query_start)
        return [batch() for batch in self.batches]


class BufferPool:
    """The buffers of all layouts that share the memory of the largest."""

    def __init__(
        self,
        tokens: int,
        requests: int,
        num_groups: int,
        max_pages: int,
        device: torch.device,
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        """Shapes have at most so many tokens and requests, and sequences ``max_pages`` blocks.

        ``inputs`` are more buffers of ``tokens`` tokens: see Stage.buffers.
        """

        def zeros(*axes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(axes, dtype=dtype, device=device)

        self._largest = {
            "ids": zeros(tokens, dtype=torch.int64),
            "positions": zeros(tokens, dtype=torch.int64),
            "slots": zeros(requests, dtype=torch.int64),
            "seq_lens": zeros(requests),
            "block_table": torch.full((num_groups, requests, max_pages), NULL_PAGE, dtype=torch.int32, device=device),
            "slot_mapping": zeros(num_groups, tokens),
            **inputs,
        }
        self._per_token = (*_PER_TOKEN, *inputs)
        self._query_start = zeros(requests + 1)
        self._of: dict[Layout, StepBuffers] = {}

    def of(self, shape: StepShape) -> StepBuffers:
        """The buffers of a shape; the same for shapes of one layout."""
        found = self._of.get(shape.layout)
        if found is None:
            found = self._of[shape.layout] = self._first(shape)
        return found

    def _first(self, shape: StepShape) -> StepBuffers:
        tokens, requests, queries = shape.layout
        counts = dict.fromkeys(self._per_token, tokens) | dict.fromkeys(_PER_REQUEST if requests else (), requests or 0)
        step = {
            name: self._largest[name][:, :count] if name in _BY_SECOND else self._largest[name][:count]
            for name, count in counts.items()
        }
        if requests is None:
            return StepBuffers(shape.layout, step, step, ())
        if queries is None:
            query_start, starts, lengths = self._query_start[: requests + 1], [0, *[tokens] * requests], [tokens]
            lengths += [1] * (requests - 1)
        else:
            starts, lengths = list(range(0, tokens + 1, queries)), [queries] * requests
            query_start = torch.tensor(starts, dtype=torch.int32, device=self._query_start.device)
        batches = tuple(
            partial(
                AttentionBatch,
                query_start=query_start,
                seq_lens=step["seq_lens"],
                block_table=block_table,
                slot_mapping=slot_mapping,
                query_start_host=tuple(starts),
                seq_lens_host=tuple(lengths),
                num_decodes=requests if queries == 1 else 0,
                graph_key=shape.layout,
                any_shape=queries is None,
            )
            for block_table, slot_mapping in zip(step["block_table"], step["slot_mapping"], strict=True)
        )
        return StepBuffers(shape.layout, step, step | {"query_start": query_start}, batches)


@dataclass(frozen=True)
class TrialLengths:
    """The requests of a step to try: so many tokens of each in this step, the last of so many. Padding has none."""

    counts: tuple[int, ...]
    lengths: tuple[int, ...]


def first_lengths(shape: StepShape, max_model_len: int) -> TrialLengths:
    """Requests for a step of ``shape``, as long as they may be, whose tokens are all in it."""
    tokens, requests, queries = shape.layout
    longest = queries or max_model_len
    counts = [min(longest, tokens - start) for start in range(0, tokens, longest)]
    padding = (requests or len(counts)) - len(counts)
    return TrialLengths((*counts, *[0] * padding), (*counts, *[1] * padding))


def further_lengths(shape: StepShape, block_size: int, max_model_len: int) -> tuple[TrialLengths, ...]:
    """Requests that have cached tokens, for steps of ``shape``.

    First each fills one page. Then one is as long as any may be, up to LONGEST, and each further one is half as long as
    the one before it, so that the time for all is bounded. Where requests have any number of tokens, all but the last
    have one.
    """
    tokens, requests, queries = shape.layout
    if requests is None:
        return ()
    number = min(requests, tokens)
    counts = [queries] * number if queries else [*[1] * (number - 1), tokens - number + 1]
    if max(counts) + block_size > max_model_len:
        return ()
    page = [max(count, block_size) for count in counts]
    longest = min(max_model_len, LONGEST)
    far = [max(longest >> i, count + block_size) for i, count in enumerate(counts)]
    if queries is None:
        far[-1] = counts[-1] + block_size  # many queries over a long context take long
    unused = [0] * (requests - number)
    return tuple(
        TrialLengths((*counts, *unused), (*lengths, *[1] * len(unused)))
        for lengths in (page, far)
        if lengths != counts  # pages of one token
    )


def trial_step(
    tried: TrialLengths, num_groups: int, block_size: int, free_pages: int, device: torch.device
) -> tuple[bool, torch.Tensor, list[AttentionBatch]]:
    """A step of these requests, to capture before any is met.

    The step's tokens lie in pages of each request's own, from page 1 on, where as many as ``free_pages`` suffice;
    otherwise all lie in the null page, as do the tokens before them. Returns whether requests have pages of their own,
    positions int64 [T], and what each cache group sees.
    """
    lengths, counts = np.array(tried.lengths, np.int32), np.array(tried.counts, np.int32)
    befores = (lengths - counts) // block_size * (counts > 0)
    pages = (-(-lengths // block_size) - befores) * (counts > 0)
    own = bool(pages.sum() * num_groups <= free_pages)
    query_start = np.append(0, np.cumsum(counts))
    request = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(query_start[-1]) - query_start[request] + (lengths - counts)[request]
    positions = positions * own

    def array(x: npt.NDArray[np.integer[Any]]) -> torch.Tensor:
        # From pageable memory, which is read before this returns; kernels under way are not waited for.
        return torch.from_numpy(x.astype(np.int32)).to(device, non_blocking=True)

    batches = []
    for group in range(num_groups):
        table = np.full((len(lengths), -(-lengths.max() // block_size)), NULL_PAGE)
        firsts = 1 + group * pages.sum() + np.cumsum(pages) - pages
        for row, (before, first, count) in enumerate(zip(befores, firsts, pages, strict=True) if own else ()):
            table[row, before : before + count] = first + np.arange(count)
        slots = table[request, positions // block_size] * block_size + positions % block_size
        batches.append(
            AttentionBatch(
                query_start=array(query_start),
                seq_lens=array(lengths),
                block_table=array(table),
                slot_mapping=array(slots),
                query_start_host=tuple(query_start.tolist()),
                seq_lens_host=tried.lengths,
                num_decodes=0,
            )
        )
    return own, array(positions).long(), batches
