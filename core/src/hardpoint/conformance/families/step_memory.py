"""Caches for a layer or model under trial, and consecutive steps of requests that begin, pause and share a beginning.

Axes: T tokens, N requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from hardpoint.conformance.families.steps import Piece, Tables, draw_tables
from hardpoint.conformance.memory import POISON
from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint_plugin_api import NULL_PAGE, AttentionBatch, AttentionMetadata, AttentionSpec, ForwardStep

Pieces = Sequence[Sequence[Piece]]
"""The piece of each request in each step, requests in the same order in all. A piece without queries: the request
takes no part in the step. One whose first piece does not begin its sequence has found the tokens before it in the
cache: they are those of the first request, of which a step ended there. A piece that begins before the end of the
request's piece before: the tokens from there on were drafts and are refused, others take their positions."""
_PADDING = 2


def num_found(pieces: Pieces, request: int) -> int:
    """How many tokens of a request lie in the cache before its first step."""
    first = next(step[request] for step in pieces if step[request].query)
    return first.total - first.query


def num_refused(pieces: Pieces, number: int, request: int) -> int:
    """How many tokens at the end of a request's piece of step ``number`` are refused."""
    piece = pieces[number][request]
    if not piece.query:
        return 0
    later = (step[request] for step in pieces[number + 1 :])
    return next((piece.total - (other.total - other.query) for other in later if other.query), 0)


def rows_of(pieces: Pieces) -> list[list[int]]:
    """The rows of the inputs that each request's tokens have, those found in the cache first, without refused ones.

    The rows of a step follow those of the step before; within it they are in the order of requests.
    """
    found: list[list[int]] = [[] for _ in pieces[0]]
    first = 0
    for number, step in enumerate(pieces):
        for request, (rows, piece) in enumerate(zip(found, step, strict=True)):
            rows += range(first, first + piece.query - num_refused(pieces, number, request))
            first += piece.query
    return [found[0][: num_found(pieces, i)] + rows for i, rows in enumerate(found)]


def kept_rows(pieces: Pieces) -> list[int]:
    """The rows of the inputs whose tokens are not refused, in order."""
    return sorted({row for rows in rows_of(pieces) for row in rows})


@dataclass
class StepMemory:
    """Caches for the cache users of a context, and the steps of ``pieces``, which write and read them.

    ``padded`` steps have rows behind their last token, as captured ones do, but for the last step. Where each request
    has one token, or equally many drafts, the rows are requests in the null page; else they are tokens of no request.
    Inputs of these rows are the next step's.

    Planners that do without exact lengths get upper bounds behind refused drafts: as if these had stayed.
    """

    ctx: Context
    device: torch.device
    pieces: Pieces
    padded: bool = False
    buffers: list[torch.Tensor] = field(default_factory=list)
    _state_blocks: dict[int, int] = field(default_factory=dict)
    """The block in whose page the state of a request lies."""

    def spoil(self) -> None:
        """Fill the caches with garbage."""
        for buffer in self.buffers:
            buffer.fill_(POISON)

    @property
    def kept(self) -> list[int]:
        """The rows of all steps' results, one step after the other, that are neither padding nor refused."""
        own: list[int] = []
        first = 0
        for number, pieces in enumerate(self.pieces):
            tokens = sum(piece.query for piece in pieces)
            own += range(first, first + tokens)
            first += tokens + self._num_padding(number)
        return [own[row] for row in kept_rows(self.pieces)]

    def steps(self) -> Iterator[tuple[slice, ForwardStep]]:
        """Yield each step with its rows of the inputs."""
        users, tables = self.ctx.cache_users, self._tables()
        caches = self._caches(tables)
        self._state_blocks.clear()
        first = 0
        for number, pieces in enumerate(self.pieces):
            batch, positions = self._batch(tables, pieces, self._num_padding(number))
            metadata: dict[int, AttentionMetadata] = {}
            for plan_group in users.plan_groups():
                planner = users.users[plan_group.users[0]].planner
                planned = planner.plan(batch if planner.exact_lengths else self._bounded(batch, number))
                metadata |= dict.fromkeys(plan_group.users, planned)
            self._move_states(tables.blocks, pieces)
            yield (
                slice(first, first + len(positions)),
                ForwardStep(positions, positions, caches, [metadata[i] for i in range(len(users.users))]),
            )
            first += sum(piece.query for piece in pieces)

    def _num_padding(self, number: int) -> int:
        following = sum(piece.query for pieces in self.pieces[number + 1 :] for piece in pieces)
        width = self._alike(self.pieces[number])
        return min(max(1, _PADDING // width), following // width) * width if self.padded else 0

    def _alike(self, pieces: Sequence[Piece]) -> int:
        """How many queries each request of a step has, where a step of so many is captured; else 1."""
        counts = {piece.query for piece in pieces if piece.query}
        return max(counts) if len(counts) == 1 and max(counts) <= 1 + self.ctx.config.num_drafts else 1

    def _bounded(self, batch: AttentionBatch, number: int) -> AttentionBatch:
        """``batch``, whose host does not know yet which drafts of the step before were refused."""
        if not number:
            return batch
        own = [i for i, piece in enumerate(self.pieces[number]) if piece.query]
        refused = [num_refused(self.pieces, number - 1, i) for i in own] + [0] * (batch.num_requests - len(own))
        if not any(refused):
            return batch
        bounds = tuple(map(sum, zip(batch.seq_lens_host, refused, strict=True)))
        return replace(batch, seq_lens_host=bounds, exact_lengths=False)

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
        width = self._alike(pieces)
        requests = padding // width if all(piece.query == width for _, piece in own) else 0
        queries = [piece.query for _, piece in own] + [width] * requests
        lengths = [piece.total for _, piece in own] + [width] * requests
        starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
        blocks = tables.blocks[[i for i, _ in own]]
        blocks = torch.cat([blocks, blocks.new_full((requests, blocks.shape[1]), NULL_PAGE)])
        num_decodes = sum(count == 1 for count in queries)
        assert queries[:num_decodes] == [1] * num_decodes, "decodes come first: see AttentionBatch"
        slots = [tables.slots(i, p.total - p.query, p.total, block) for i, p in own]
        positions = [torch.arange(p.total - p.query, p.total) for _, p in own]
        positions.append(torch.arange(padding) % width)
        slots.append((NULL_PAGE * block + positions[-1]).to(torch.int32))
        batch = AttentionBatch(
            query_start=starts.to(self.device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32).to(self.device),
            block_table=blocks.to(self.device),
            slot_mapping=torch.cat(slots).to(self.device),
            query_start_host=tuple(starts.tolist()),
            seq_lens_host=tuple(lengths),
            num_decodes=num_decodes,
        )
        return batch, torch.cat(positions).to(self.device)

    def _move_states(self, blocks: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Copy each state to the page of its request's newest block, as an engine does before a step of ``pieces``.

        The page before stays as it was where another request may find it, at the edge of a block; else it becomes
        garbage. Behind drafts that are refused, the newest block may be one before.
        """
        block, moves = self.ctx.block_size, []
        for request, (row, piece) in enumerate(zip(blocks.tolist(), pieces, strict=True)):
            if not piece.query:
                continue
            old, target = piece.total - piece.query, (piece.total - 1) // block
            source = self._state_blocks.get(request, max(0, old - 1) // block)
            self._state_blocks[request] = target
            if old and source != target:
                moves.append((row[source], row[target], old % block == 0))
        for user, buffer in zip(self.ctx.cache_users.users, self.buffers, strict=True):
            if not user.spec.retention.per_sequence:
                continue
            pages = buffer.view(-1, user.layout.page_bytes(user.spec, block))
            for source, target, stays in moves:
                pages[target] = pages[source]
                if not stays:
                    pages[source] = POISON
