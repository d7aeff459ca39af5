"""Steps with prompts from prepared executables: those small enough that the host would be slower than the device.

Such a step is padded to a listed number of tokens, and to one number of requests. Tokens behind the last request are
stored to the null page; requests behind the last one have no token. Which request a token is of, attention finds in the
arrays on the device: only backends that can (CaptureGrade.ANY) take part.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hardpoint.context import Context
from hardpoint.engine.execution.executables import Executables, listed_sizes
from hardpoint.engine.execution.forward import Forward
from hardpoint.engine.scheduling.step import StepInput
from hardpoint_plugin_api import (
    NULL_PAGE,
    AttentionBatch,
    AttentionMetadata,
    CaptureGrade,
    Executable,
    GraphEngine,
    PlatformError,
    StepLimits,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptBuffers:
    """The fixed buffers of all steps of ``size`` tokens: ids and positions int64 [size], a batch per cache group."""

    size: int
    ids: torch.Tensor
    positions: torch.Tensor
    batches: tuple[AttentionBatch, ...]

    @classmethod
    def allocate(
        cls, size: int, num_requests: int, num_groups: int, max_pages: int, device: torch.device
    ) -> PromptBuffers:
        """Buffers of the largest size: one request with all tokens, in the null page."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        query_start, seq_lens = zeros(num_requests + 1), zeros(num_requests)
        block_tables = [torch.full((num_requests, max_pages), NULL_PAGE, dtype=torch.int32, device=device)]
        block_tables += [block_tables[0].clone() for _ in range(num_groups - 1)]
        slots = [zeros(size) for _ in range(num_groups)]
        ids, positions = zeros(size, dtype=torch.int64), zeros(size, dtype=torch.int64)
        return cls._over(ids, positions, query_start, seq_lens, block_tables, slots)

    @classmethod
    def _over(
        cls,
        ids: torch.Tensor,
        positions: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: Sequence[torch.Tensor],
        slots: Sequence[torch.Tensor],
    ) -> PromptBuffers:
        size, num_requests = ids.shape[0], seq_lens.shape[0]
        batches = tuple(
            AttentionBatch(
                query_start=query_start,
                seq_lens=seq_lens,
                block_table=block_table,
                slot_mapping=slot_mapping,
                query_start_host=(0, *[size] * num_requests),
                seq_lens_host=(size, *[1] * (num_requests - 1)),
                num_decodes=0,
                graph_key=("tokens", size),
                any_shape=True,
            )
            for block_table, slot_mapping in zip(block_tables, slots, strict=True)
        )
        return cls(size, ids, positions, batches)

    def first(self, size: int) -> PromptBuffers:
        """The buffers of the first ``size`` tokens."""
        first = self.batches[0]
        tables, slots = zip(*((batch.block_table, batch.slot_mapping[:size]) for batch in self.batches), strict=True)
        return self._over(self.ids[:size], self.positions[:size], first.query_start, first.seq_lens, tables, slots)

    def clear(self, block_size: int) -> None:
        """Make the step one request that has all tokens, in the null page."""
        self.ids.zero_()
        self.positions.zero_()
        first = self.batches[0]
        first.query_start.fill_(self.size)
        first.query_start[0].zero_()
        first.seq_lens.fill_(1)
        first.seq_lens[0].fill_(self.size)
        for batch in self.batches:
            batch.block_table.fill_(NULL_PAGE)
            batch.slot_mapping.fill_(NULL_PAGE * block_size)

    def take_pages(self, first_pages: Sequence[int], block_size: int) -> None:
        """Have the one request lie in pages of its own, in each cache group from this page on."""
        tokens = torch.arange(self.size, dtype=torch.int32, device=self.ids.device)
        self.positions.copy_(tokens)
        for first, batch in zip(first_pages, self.batches, strict=True):
            batch.slot_mapping.copy_(first * block_size + tokens)
            pages = -(-self.size // block_size)
            batch.block_table[0, :pages] = torch.arange(first, first + pages, dtype=torch.int32, device=tokens.device)

    def load(self, ids: torch.Tensor, positions: torch.Tensor, batches: Sequence[AttentionBatch]) -> None:
        """Copy a step's arrays into the buffers; they have as many tokens and requests as these."""
        self.ids.copy_(ids)
        self.positions.copy_(positions)
        self.batches[0].query_start.copy_(batches[0].query_start)  # one array for all groups
        self.batches[0].seq_lens.copy_(batches[0].seq_lens)
        for fixed, batch in zip(self.batches, batches, strict=True):
            fixed.block_table[:, : batch.block_table.shape[1]].copy_(batch.block_table)
            fixed.slot_mapping.copy_(batch.slot_mapping)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """By name."""
        first = self.batches[0]
        named = {"ids": self.ids, "positions": self.positions, "query_start": first.query_start}
        named["seq_lens"] = first.seq_lens
        for number, batch in enumerate(self.batches):
            named |= {f"block_table_{number}": batch.block_table, f"slot_mapping_{number}": batch.slot_mapping}
        return named


class PromptGraphs:
    """The executables of such steps, by number of tokens. ``sizes`` is empty where there are none."""

    def __init__(self, ctx: Context, executables: Executables, forward: Forward, limits: StepLimits) -> None:
        """``limits`` are those of the engine's steps."""
        self._executables, self._forward = executables, forward
        self._block_size, self._max_model_len, self._profiler = ctx.block_size, ctx.max_model_len, ctx.profiler
        engine = executables.engine
        self.sizes = () if executables.off_whole else prompt_sizes(engine, limits)
        backends = [layer.backend for layer in ctx.attention_layers.layers]
        self.sizes = tuple(
            size for size in self.sizes if all(b.grade("prefill", size) >= CaptureGrade.ANY for b in backends)
        )
        assert limits.max_requests is not None
        self.num_requests = min(engine.requests_per_token_size, limits.max_requests)
        self._buffers: dict[int, PromptBuffers] = {}
        if self.sizes:
            executables.at_once += len(self.sizes)
            num_groups, max_pages = len(ctx.attention_layers.cache_groups()), -(-ctx.max_model_len // ctx.block_size)
            self._buffers[self.most_rows] = PromptBuffers.allocate(
                self.most_rows, self.num_requests, num_groups, max_pages, ctx.torch_device
            )

    @property
    def most_rows(self) -> int:
        """The most tokens of such a step."""
        return max(self.sizes, default=0)

    def size(self, step: StepInput) -> int | None:
        """How many tokens ``step`` has, padding included, if it is to be replayed."""
        if not self.sizes or len(step.scheduled) > self.num_requests or self._profiler.marks_layers:
            return None
        return next((size for size in self.sizes if size >= step.num_tokens), None)

    def run(
        self, size: int, ids: torch.Tensor, positions: torch.Tensor, batches: Sequence[AttentionBatch]
    ) -> torch.Tensor:
        """Run a step of ``size`` tokens and ``num_requests`` requests, padding included.

        Returns logits [num_requests, vocab] behind the last token of each request, valid until the next step.
        """
        buffers = self._of(size)
        buffers.load(ids, positions, batches)
        metadata = self._forward.plan(buffers.batches)
        executable = self._executable(size, metadata)
        if executable is None:
            self._executables.count_eager("unrecordable")
            return self._step(metadata)(**buffers.tensors)
        self._executables.count_replay()
        logits: torch.Tensor = executable.run()
        return logits

    @torch.inference_mode()
    def prepare_ahead(self) -> None:
        """Prepare all sizes, largest first so that memory which is shared is taken once."""
        began = time.perf_counter()
        for size in sorted(self.sizes, reverse=True):
            buffers = self._of(size)
            buffers.clear(self._block_size)
            pages = -(-size // self._block_size)
            first_pages = self._executables.trial_pages(pages, len(buffers.batches))
            if size > self._max_model_len:
                first_pages = None
            if first_pages is not None:
                buffers.take_pages(first_pages, self._block_size)
            self._executables.trial_ids(buffers.ids, alike=first_pages is None)
            self._executable(size, self._forward.plan(buffers.batches))
        if self.sizes:
            listed = ", ".join(map(str, self.sizes))
            logger.info("steps of %s tokens prepared in %.1f s", listed, time.perf_counter() - began)

    def _of(self, size: int) -> PromptBuffers:
        if size not in self._buffers:
            self._buffers[size] = self._buffers[max(self._buffers)].first(size)
        return self._buffers[size]

    def _step(self, metadata: Sequence[AttentionMetadata]) -> Callable[..., torch.Tensor]:
        def read(
            ids: torch.Tensor, positions: torch.Tensor, query_start: torch.Tensor, **_: torch.Tensor
        ) -> torch.Tensor:
            hidden = self._forward.hidden(ids, positions, metadata)
            last = (query_start[1:].long() - 1).clamp(min=0)
            return self._forward.model.logits(hidden[last])

        return read

    def _executable(self, size: int, metadata: Sequence[AttentionMetadata]) -> Executable | None:
        """None where that cannot be prepared; the size is given up then."""
        key = ("tokens", size, self._forward.tokens(metadata))
        try:
            buffers = self._of(size)
            slots = [batch.slot_mapping for batch in buffers.batches]
            return self._executables.get(key, self._step(metadata), buffers.tensors, slots)
        except PlatformError as error:
            logger.warning("steps of %d tokens run eagerly: %s", size, str(error))
            self.sizes = tuple(other for other in self.sizes if other != size)
            return None


def prompt_sizes(engine: GraphEngine, limits: StepLimits) -> tuple[int, ...]:
    """Numbers of tokens to prepare steps for, ascending. Raises PlatformError for sizes that are none."""
    return listed_sizes(engine.token_sizes, "token_sizes", limits)
