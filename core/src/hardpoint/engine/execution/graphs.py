"""Steps from prepared executables: what the engine does with a platform's graph engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hardpoint.context import Context
from hardpoint.engine.execution.decode_graphs import NUM_DRAWS, DecodeGraphs, Draw, decode_sizes, is_decode
from hardpoint.engine.execution.executables import MOST_EXECUTABLES, Executables
from hardpoint.engine.execution.forward import Forward
from hardpoint.engine.execution.piece_graphs import PieceGraphs, piece_sizes
from hardpoint.engine.execution.prompt_graphs import PromptGraphs, prompt_sizes
from hardpoint.engine.scheduling.step import StepInput
from hardpoint_plugin_api import GraphEngine, StepLimits


class Graphs:
    """One rank's prepared steps: ``decodes``, and ``prompts``, which are all others that are small enough.

    ``pieces`` are for what neither takes.
    """

    def __init__(
        self,
        ctx: Context,
        new_engine: Callable[[], GraphEngine],
        forward: Forward,
        draw: Draw,
        limits: StepLimits,
        pool: Callable[[], AbstractContextManager[None]],
        exchange: Callable[[Any], list[Any]],
        vocab_size: int,
    ) -> None:
        """``limits`` are those of the engine's steps; memory is allocated within ``pool()``. ``exchange`` returns what
        every rank calls it with.

        Raises PlatformError for a graph engine whose data contradict each other.
        """
        self.executables = Executables(ctx, new_engine, forward, pool, exchange, vocab_size)
        self.decodes = DecodeGraphs(ctx, self.executables, forward, draw, limits)
        self.prompts = PromptGraphs(ctx, self.executables, forward, limits)
        self.pieces = PieceGraphs(ctx, self.executables, forward, limits)

    @property
    def most_rows(self) -> int:
        """The most tokens, and the most requests, that a step is padded to."""
        return max(self.decodes.most_rows, self.prompts.most_rows, self.pieces.most_rows)

    def count_eager(self, step: StepInput) -> None:
        """Count a step that no kind takes; decodes that are not taken count themselves."""
        if self.executables.off_whole:
            self.executables.count_eager(self.executables.off_whole)
        elif not is_decode(step):
            self.executables.count_eager("prefill")

    def prepare_ahead(self, free_pages: int = 0) -> None:
        """Prepare what is listed. Steps may be tried on pages 1 to ``free_pages`` of the cache, which nobody uses."""
        self.executables.free_pages = free_pages
        self.decodes.prepare_ahead()
        self.prompts.prepare_ahead()
        self.pieces.prepare_ahead()
        self.executables.free_pages = 0

    def drop(self) -> None:
        """Forget every executable, since what they read is about to move, and the engine with the memory they share."""
        self.executables.drop()


def graph_bytes(engine: GraphEngine, limits: StepLimits) -> int:
    """Bytes that executables may take, by what the engine says of one."""
    sizes = decode_sizes(engine, limits)
    if sizes is not None:
        number = NUM_DRAWS * len(sizes) + len(prompt_sizes(engine, limits)) + len(piece_sizes(engine, limits))
    else:
        number = MOST_EXECUTABLES if engine.max_executables is None else engine.max_executables
    return engine.bytes_per_executable * number
