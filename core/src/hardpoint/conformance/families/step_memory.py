"""Caches for a layer or model under trial, and consecutive steps of requests that begin, pause and share a beginning.

Axes: T tokens, N requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from hardpoint.conformance.families.steps import Piece, Tables, draw_tables
from hardpoint.conformance.memory import POISON
from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint_plugin_api import NULL_PAGE, AttentionBatch, AttentionMetadata, AttentionSpec, ForwardStep

Pieces = Sequence[Sequence[Piece]]
"""The piece of each request in each step, requests in the same order in all. A piece without queries: the request
takes no part in the step. One whose first piece does not begin its sequence has found the tokens before it in the
cache: they are those of the first request, of which a step ended there."""
_PADDING = 2


def num_found(pieces: Pieces, request: int) -> int:
    """How many tokens of a request lie in the cache before its first step."""
    first = next(step[request] for step in pieces if step[request].query)
    return first.total - first.query


def rows_of(pieces: Pieces) -> list[list[int]]:
    """The rows of the inputs that each request's tokens have, those found in the cache first.

    The rows of a step follow those of the step before; within it they are in the order of requests.
    """
    found: list[list[int]] = [[] for _ in pieces[0]]
    first = 0
    for step in pieces:
        for rows, piece in zip(found, step, strict=True):
            rows += range(first, first + piece.query)
            first += piece.query
    return [found[0][: num_found(pieces, i)] + rows for i, rows in enumerate(found)]


@dataclass
class StepMemory:
    """Caches for the cache users of a context, and the steps of ``pieces``, which write and read them.

    ``padded`` steps have rows behind their last token, as captured ones do, but for the last step: a step of decodes
    has requests of one token in the null page, others have tokens of no request. Inputs of these rows are the next
    step's.
    """

    ctx: Context
    device: torch.device
    pieces: Pieces
    padded: bool = False
    buffers: list[torch.Tensor] = field(default_factory=list)

    def spoil(self) -> None:
        """Fill the caches with garbage."""
        for buffer in self.buffers:
            buffer.fill_(POISON)

    @property
    def kept(self) -> list[int]:
        """The rows of all steps' results, one step after the other, that are not padding."""
        kept: list[int] = []
        first = 0
        for number, pieces in enumerate(self.pieces):
            tokens = sum(piece.query for piece in pieces)
            kept += range(first, first + tokens)
            first += tokens + self._num_padding(number)
        return kept

    def steps(self) -> Iterator[tuple[slice, ForwardStep]]:
        """Yield each step with its rows of the inputs."""
        users, tables = self.ctx.cache_users, self._tables()
        caches = self._caches(tables)
        first = 0
        for number, pieces in enumerate(self.pieces):
            batch, positions = self._batch(tables, pieces, self._num_padding(number))
            metadata: dict[int, AttentionMetadata] = {}
            for plan_group in users.plan_groups():
                planned = users.users[plan_group.users[0]].planner.plan(batch)
                metadata |= dict.fromkeys(plan_group.users, planned)
            self._move_states(tables.blocks, pieces)
            yield (
                slice(first, first + len(positions)),
                ForwardStep(positions, positions, caches, [metadata[i] for i in range(len(users.users))]),
            )
            first += sum(piece.query for piece in pieces)

    def _num_padding(self, number: int) -> int:
        following = sum(piece.query for pieces in self.pieces[number + 1 :] for piece in pieces)
        return min(_PADDING, following) if self.padded else 0

    def _tables(self) -> Tables:
        """Pages of full attention, so that every block of a request is its own from the first step to the last."""
        block, dtype, generator = self.ctx.block_size, dtype_name(self.ctx.dtype), torch.Generator().manual_seed(3)
        spec = AttentionSpec(1, 1, 1, 1.0, dtype, dtype, block)
        ends = [Piece(1, max(step[i].total for step in self.pieces)) for i in range(len(self.pieces[0]))]
        tables = draw_tables(spec, ends, generator)
        for row in range(len(ends)):
            shared = num_found(self.pieces, row) // block
            tables.blocks[row, :shared] = tables.blocks[0, :shared]
        return tables

    def _caches(self, tables: Tables) -> list[dict[str, torch.Tensor]]:
        """The views of each user of a cache full of garbage."""
        caches: list[dict[str, torch.Tensor]] = []
        self.buffers.clear()
        for user in self.ctx.cache_users.users:
            size = user.layout.page_bytes(user.spec, self.ctx.block_size)
            self.buffers.append(torch.full((tables.num_pages * size,), POISON, dtype=torch.uint8, device=self.device))
            caches.append(user.layout.views(self.buffers[-1], tables.num_pages, user.spec, self.ctx.block_size))
        return caches

    def _batch(self, tables: Tables, pieces: Sequence[Piece], padding: int) -> tuple[AttentionBatch, torch.Tensor]:
        """The batch of a step, and its positions, int64 [T], ``padding`` included."""
        block, own = self.ctx.block_size, [(i, piece) for i, piece in enumerate(pieces) if piece.query]
        decodes = all(piece.query == 1 for _, piece in own)
        requests = padding if decodes else 0
        queries = [piece.query for _, piece in own] + [1] * requests
        lengths = [piece.total for _, piece in own] + [1] * requests
        starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
        blocks = tables.blocks[[i for i, _ in own]]
        blocks = torch.cat([blocks, blocks.new_full((requests, blocks.shape[1]), NULL_PAGE)])
        num_decodes = sum(count == 1 for count in queries)
        assert queries[:num_decodes] == [1] * num_decodes, "decodes come first: see AttentionBatch"
        slots = [tables.slots(i, p.total - p.query, p.total, block) for i, p in own]
        slots.append(torch.full((padding,), NULL_PAGE * block, dtype=torch.int32))
        positions = [torch.arange(p.total - p.query, p.total) for _, p in own]
        batch = AttentionBatch(
            query_start=starts.to(self.device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32).to(self.device),
            block_table=blocks.to(self.device),
            slot_mapping=torch.cat(slots).to(self.device),
            query_start_host=tuple(starts.tolist()),
            seq_lens_host=tuple(lengths),
            num_decodes=num_decodes,
        )
        return batch, torch.cat([*positions, torch.zeros(padding, dtype=torch.int64)]).to(self.device)

    def _move_states(self, blocks: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Copy each state to the page of its request's newest block, as an engine does before a step of ``pieces``.

        The page before stays as it was where another request may find it, at the edge of a block; else it becomes
        garbage.
        """
        block = self.ctx.block_size
        for user, buffer in zip(self.ctx.cache_users.users, self.buffers, strict=True):
            if not user.spec.retention.per_sequence:
                continue
            pages = buffer.view(-1, user.layout.page_bytes(user.spec, block))
            for row, piece in zip(blocks.tolist(), pieces, strict=True):
                old = piece.total - piece.query
                source, target = row[max(0, old - 1) // block], row[max(0, piece.total - 1) // block]
                if piece.query and old and source != target:
                    pages[target] = pages[source]
                    if old % block:
                        pages[source] = POISON
