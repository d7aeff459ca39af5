"""Decode steps from prepared executables.

A step in which every request has one token and samples has the same shape whenever it has as many requests, so the
model, its logits and the drawing of tokens can be recorded or captured once over fixed buffers, and replayed. What
comes before (the op decode_inputs, attention's plan) writes those buffers. Where tokens take more than temperature and
truncation (penalties, structures, log-probabilities) the executable ends with logits, which the sampler reads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, get_args

import torch

from hardpoint.context import Context
from hardpoint.engine.execution.executables import Executables
from hardpoint.engine.execution.forward import Forward
from hardpoint.engine.execution.sampler import PlainDraw
from hardpoint.engine.scheduling.step import StepInput
from hardpoint.ops.decode_inputs import allocate_step
from hardpoint_plugin_api import (
    NULL_PAGE,
    AttentionBatch,
    AttentionMetadata,
    Executable,
    GraphEngine,
    PlatformError,
    StepLimits,
)

logger = logging.getLogger(__name__)

NUM_DRAWS = len(get_args(PlainDraw))
"""How many are prepared ahead for each size."""


class Draw(Protocol):
    """Draws a token for each row: see Sampler.draw."""

    def __call__(
        self, how: PlainDraw, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class DecodeBuffers:
    """The fixed buffers of all steps of ``size`` requests: what the op decode_inputs fills, as it names them.

    ``batches`` are the same as attention sees them, one for each cache group. Buffers of a smaller size are the first
    rows of those of a larger one.
    """

    size: int
    step: dict[str, torch.Tensor]
    batches: tuple[AttentionBatch, ...]

    @classmethod
    def allocate(
        cls, size: int, num_groups: int, max_pages: int, block_size: int, device: torch.device
    ) -> DecodeBuffers:
        """Buffers of the largest size, full of padding."""
        step = allocate_step(num_groups, size, max_pages, device)
        buffers = cls._over(step, torch.arange(size + 1, dtype=torch.int32, device=device))
        buffers.clear(block_size, 0)
        return buffers

    @classmethod
    def _over(cls, step: dict[str, torch.Tensor], query_start: torch.Tensor) -> DecodeBuffers:
        size = step["ids"].shape[0]
        batches = tuple(
            AttentionBatch(
                query_start=query_start,
                seq_lens=step["seq_lens"],
                block_table=block_table,
                slot_mapping=slot_mapping,
                query_start_host=tuple(range(size + 1)),
                seq_lens_host=(1,) * size,
                num_decodes=size,
                graph_key=size,
            )
            for block_table, slot_mapping in zip(step["block_table"], step["slot_mapping"], strict=True)
        )
        return cls(size, step, batches)

    def first(self, size: int) -> DecodeBuffers:
        """The buffers of the first ``size`` rows."""
        rows = {name: x[:, :size] if name in _BY_GROUP else x[:size] for name, x in self.step.items()}
        return self._over(rows, self.batches[0].query_start[: size + 1])

    def clear(self, block_size: int, slot: int) -> None:
        """Make every row padding: the first token of a sequence in the null page, of the request in ``slot``."""
        values = {"slots": slot, "seq_lens": 1, "block_table": NULL_PAGE, "slot_mapping": NULL_PAGE * block_size}
        for name, x in self.step.items():
            x.fill_(values.get(name, 0))

    def take_pages(self, first_pages: Sequence[int], block_size: int) -> None:
        """Put the one token of each row into a page of its own, in each cache group from this page on."""
        for group, first in enumerate(first_pages):
            pages = torch.arange(first, first + self.size, dtype=torch.int32, device=self.step["ids"].device)
            self.step["block_table"][group, :, 0] = pages
            self.step["slot_mapping"][group] = pages * block_size

    def lasting(self, seq_lens_host: tuple[int, ...]) -> list[AttentionBatch]:
        """The batches of a step whose requests have these lengths."""
        return [replace(batch, seq_lens_host=seq_lens_host) for batch in self.batches]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """By name."""
        return self.step | {"query_start": self.batches[0].query_start}


_BY_GROUP = ("block_table", "slot_mapping")
"""Arrays whose first axis is the cache group."""


class DecodeGraphs:
    """The executables of decode steps, by number of rows, how they draw and compatibility tokens.

    ``sizes`` are the numbers of rows that are prepared ahead and padded to; None: any number as it is, prepared when
    it is first met. Without graphs, ``size`` answers None for every step.
    """

    def __init__(
        self, ctx: Context, executables: Executables, forward: Forward, draw: Draw, limits: StepLimits
    ) -> None:
        """``limits`` are those of the engine's steps.

        Raises PlatformError for a graph engine whose data contradict each other.
        """
        assert limits.max_requests is not None
        self._executables, self._forward, self._draw = executables, forward, draw
        self._block_size, self._profiler = ctx.block_size, ctx.profiler
        self._buckets, self.sizes = sorted(limits.token_buckets), decode_sizes(executables.engine, limits)
        self._padding_slot = limits.max_requests
        self.most_rows = 0 if executables.off_whole else max(self.sizes or (self._padded(limits.max_requests),))
        self._buffers: dict[int, DecodeBuffers] = {}
        if self.most_rows:
            executables.at_once += NUM_DRAWS * len(self.sizes or ())
            num_groups, max_pages = len(ctx.attention_layers.cache_groups()), -(-ctx.max_model_len // ctx.block_size)
            self._buffers[self.most_rows] = DecodeBuffers.allocate(
                self.most_rows, num_groups, max_pages, ctx.block_size, ctx.torch_device
            )
        self._trials = () if self.sizes or not self.most_rows else self._trial_sizes(ctx, limits.max_requests)
        self._unrecordable: set[int] = set()
        self._undrawable: set[PlainDraw] = set()

    def size(self, step: StepInput) -> int | None:
        """How many rows ``step`` has, padding included, if it is to be replayed as a decode step."""
        if not is_decode(step) or self._executables.off_whole:
            return None
        size, reason = self._row_count(len(step.scheduled)), None
        if self._profiler.marks_layers:
            reason = "layer_profile"
        elif size is None:
            reason = "too_large"
        elif size in self._unrecordable:
            reason = "unrecordable"
        if reason:
            self._executables.count_eager(reason)
            return None
        return size

    def buffers(self, size: int) -> DecodeBuffers:
        """The fixed buffers of steps of ``size`` rows."""
        if size not in self._buffers:
            self._buffers[size] = self._buffers[self.most_rows].first(size)
        return self._buffers[size]

    def run(
        self, size: int, metadata: Sequence[AttentionMetadata], draw: PlainDraw | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run the step that stands in the buffers, as it was planned.

        Returns tokens int64 [size], or logits [size, vocab] where ``draw`` is None or cannot be part of an executable;
        valid until the next step.
        """
        executable = self._drawing(size, metadata, draw) if draw else None
        executable = executable or self._executable(size, metadata, None)
        if executable is None:
            self._executables.count_eager("unrecordable")
            return self._step(metadata, None)(**self.buffers(size).tensors)
        self._executables.count_replay()
        result: tuple[torch.Tensor | None, torch.Tensor | None] = executable.run()
        return result

    @torch.inference_mode()
    def prepare_ahead(self) -> None:
        """Prepare what is listed, largest first so that memory which is shared is taken once.

        Without a list: one step for each kernel of a plugin, so that one which must not be replayed is known before
        any request is.
        """
        sizes = self.sizes or self._trials
        if self._executables.off_whole or not sizes:
            return
        began = time.perf_counter()
        for number, size in enumerate(sorted(sizes, reverse=True), 1):
            logger.info("preparing decode steps of %d requests (%d of %d)", size, number, len(sizes))
            buffers = self.buffers(size)
            buffers.clear(self._block_size, self._padding_slot)  # what a step left names pages that are others' now
            first_pages = self._executables.trial_pages(size, len(buffers.batches))
            if first_pages is not None:
                buffers.take_pages(first_pages, self._block_size)
            self._executables.trial_ids(buffers.step["ids"], alike=first_pages is None)
            metadata = self._forward.plan(buffers.batches)
            draws: tuple[PlainDraw, ...] = get_args(PlainDraw) if self.sizes else ("greedy",)
            drawing = [self._drawing(size, metadata, draw) for draw in draws]
            if None in drawing:
                self._executable(size, metadata, None)
        logger.info("%d decode steps prepared in %.1f s", len(self._executables.kept), time.perf_counter() - began)

    def _trial_sizes(self, ctx: Context, most: int) -> tuple[int, ...]:
        """Numbers of rows, ascending, of which each is the first that some kernel serves; none without plugins' own."""
        if not ctx.kernel_calls.offers:
            return ()
        entries = [entry for plan in ctx.selector.plans for entry in plan.entries if entry.range.phase != "prefill"]
        firsts = {max(1, entry.range.min) for entry in entries}
        return tuple(sorted({self._padded(rows) for rows in firsts if rows <= most}))

    def _row_count(self, num_requests: int) -> int | None:
        if self.sizes is None:
            return self._padded(num_requests)
        return next((size for size in self.sizes if size >= num_requests), None)

    def _padded(self, rows: int) -> int:
        return next((bucket for bucket in self._buckets if bucket >= rows), rows)

    def _step(
        self, metadata: Sequence[AttentionMetadata], draw: PlainDraw | None
    ) -> Callable[..., tuple[torch.Tensor | None, torch.Tensor | None]]:
        def decode(
            ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, **_: torch.Tensor
        ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            logits = self._forward.model.logits(self._forward.hidden(ids, positions, metadata))
            if draw is None:
                return logits, None
            tokens = self._draw(draw, logits, slots, positions + 1 if draw == "random" else positions)
            # Logits are there to be compared alone: memory for all sizes' would be held at once.
            return self._executables.engine.transient(logits), tokens

        return decode

    def _drawing(self, size: int, metadata: Sequence[AttentionMetadata], draw: PlainDraw) -> Executable | None:
        """The one that draws, too; None where that cannot be part of any."""
        if draw in self._undrawable:
            return None
        executable = self._executable(size, metadata, draw)
        if executable is None:
            self._undrawable.add(draw)
        return executable

    def _executable(
        self, size: int, metadata: Sequence[AttentionMetadata], draw: PlainDraw | None
    ) -> Executable | None:
        """The one for ``size`` rows and the tokens of ``metadata``, prepared where it is new; None where that fails."""
        key = (size, draw, self._forward.tokens(metadata))
        try:
            buffers = self.buffers(size)
            slots = [batch.slot_mapping for batch in buffers.batches]
            return self._executables.get(key, self._step(metadata, draw), buffers.tensors, slots)
        except PlatformError as error:
            if draw is not None:
                logger.info("tokens are drawn behind the prepared steps, not within: %s", str(error))
                return None
            if not self._unrecordable:
                logger.warning("decode steps of %d requests run eagerly: %s", size, str(error))
            self._unrecordable.add(size)
            return None


def is_decode(step: StepInput) -> bool:
    """Whether every request of ``step`` has one token, and draws the next."""
    return bool(step.scheduled) and all(share.count == 1 and share.samples for share in step.scheduled)


def decode_sizes(engine: GraphEngine, limits: StepLimits) -> tuple[int, ...] | None:
    """Numbers of rows to prepare ahead, ascending, none larger than it takes to hold all requests; None: any."""
    if engine.batch_sizes is None:
        return None
    assert limits.max_requests is not None
    if not engine.batch_sizes or min(engine.batch_sizes) < 1:
        raise PlatformError(f"a graph engine's batch_sizes must be positive numbers, got {engine.batch_sizes}")
    buckets = sorted(limits.token_buckets)
    padded = sorted({next((b for b in buckets if b >= size), size) for size in engine.batch_sizes})
    enough = next((size for size in padded if size >= limits.max_requests), padded[-1])
    sizes = tuple(size for size in padded if size <= min(enough, limits.max_tokens or enough))
    if engine.max_executables is not None and NUM_DRAWS * len(sizes) > engine.max_executables:
        raise PlatformError(
            f"a graph engine that keeps {engine.max_executables} executables asks for {len(sizes)} sizes, with "
            f"{NUM_DRAWS} for each: {sizes}"
        )
    return sizes
