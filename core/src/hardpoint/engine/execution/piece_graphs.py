"""Steps prepared in pieces: what stands between attention layers is replayed, and attention itself is called.

For steps that are not prepared whole: those with more tokens or requests, and all steps of backends that cannot be
captured. Such a step is padded to a listed number of tokens, which attention knows to be padding. Logits and sampling
come behind, as in a step without executables.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from hardpoint.context import Context
from hardpoint.engine.execution.executables import Executables, listed_sizes
from hardpoint.engine.execution.forward import Forward
from hardpoint_plugin_api import (
    NULL_PAGE,
    AttentionBackend,
    AttentionBatch,
    AttentionMetadata,
    Executable,
    ForwardStep,
    GraphEngine,
    PlatformError,
    StepLimits,
)

logger = logging.getLogger(__name__)


@dataclass
class PiecesStep(ForwardStep):
    """A step whose attention layers interrupt what is prepared. Each run has ``metadata`` of its own."""

    interrupt: Callable[[Callable[[], None]], None]
    num_attended: int = 0
    most_attended: int = 0

    def attend(
        self,
        layer: int,
        backend: AttentionBackend,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See ForwardStep. It may be called long after the step was prepared, and once for each run."""
        self.num_attended += 1
        self.interrupt(lambda: backend.forward(q, k, v, self.caches[layer], self.metadata[layer], out))


@dataclass(frozen=True)
class PieceBuffers:
    """The fixed buffers of steps of one size: ids and positions int64 [T], slots int32 [T] for each cache group."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: tuple[torch.Tensor, ...]

    @classmethod
    def allocate(cls, size: int, num_groups: int, device: torch.device) -> PieceBuffers:
        """Buffers whose tokens go to the null page."""
        ids, positions = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2))
        slots = (torch.zeros(size, dtype=torch.int32, device=device) for _ in range(num_groups))
        return cls(ids, positions, tuple(slots))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """By name."""
        slots = {f"slots_{number}": slots for number, slots in enumerate(self.slots)}
        return {"ids": self.ids, "positions": self.positions, **slots}

    def first(self, size: int) -> PieceBuffers:
        """The buffers of the first ``size`` tokens."""
        return PieceBuffers(self.ids[:size], self.positions[:size], tuple(slots[:size] for slots in self.slots))


class PieceGraphs:
    """The executables of such steps, by number of tokens. ``sizes`` is empty where there are none."""

    def __init__(self, ctx: Context, executables: Executables, forward: Forward, limits: StepLimits) -> None:
        """``limits`` are those of the engine's steps."""
        self._executables, self._forward, self._profiler = executables, forward, ctx.profiler
        self._block_size, self._max_model_len = ctx.block_size, ctx.max_model_len
        self._first_layers = [group.layers[0] for group in ctx.attention_layers.cache_groups()]
        self.sizes = () if executables.off else piece_sizes(executables.engine, limits)
        self._steps: dict[int, PiecesStep] = {}
        if self.sizes:
            executables.at_once += len(self.sizes)
            self._largest = PieceBuffers.allocate(self.most_rows, len(self._first_layers), ctx.torch_device)

    @property
    def most_rows(self) -> int:
        """The most tokens of such a step."""
        return max(self.sizes, default=0)

    def size(self, num_tokens: int) -> int | None:
        """How many tokens a step of ``num_tokens`` has, padding included, if it is to be replayed.

        To be asked before the step is planned: what is not prepared is prepared now, which plans another one.
        """
        while not self._profiler.marks_layers:
            size = next((size for size in self.sizes if size >= num_tokens), None)
            if size is None or self._executable(size) is not None:
                return size
        return None

    def run(self, ids: torch.Tensor, positions: torch.Tensor, metadata: Sequence[AttentionMetadata]) -> torch.Tensor:
        """Run a planned step of one of ``sizes``: ids and positions int64 [T].

        Returns hidden states [T, hidden], valid until the next step.
        """
        size = ids.shape[0]
        executable, buffers = self._executable(size), self._largest.first(size)
        assert executable is not None, "size() has prepared it"
        buffers.ids.copy_(ids)
        buffers.positions.copy_(positions)
        for slots, layer in zip(buffers.slots, self._first_layers, strict=True):
            slots.copy_(metadata[layer].batch.slot_mapping)
        self._steps[size].metadata = metadata
        self._executables.count_replay()
        hidden: torch.Tensor = executable.run()
        return hidden

    @torch.inference_mode()
    def prepare_ahead(self) -> None:
        """Prepare all sizes, largest first so that memory which is shared is taken once."""
        began = time.perf_counter()
        for size in sorted(self.sizes, reverse=True):
            self._executable(size)
        if self.sizes:
            listed = ", ".join(map(str, self.sizes))
            logger.info("pieces of steps of %s tokens prepared in %.1f s", listed, time.perf_counter() - began)

    def _executable(self, size: int) -> Executable | None:
        """The one for ``size`` tokens, prepared where it is not; None where that fails: the size is given up then."""
        key, buffers = ("pieces", size), self._largest.first(size)
        if key not in self._executables:
            for buffer in buffers.tensors.values():
                buffer.zero_()  # what a step left names slots that are others' now
            self._executables.trial_ids(buffers.ids, alike=True)
            plan = self._forward.plan(self._padding(size, buffers))
            self._steps[size] = PiecesStep(
                buffers.positions, self._forward.caches, plan, self._executables.engine.interrupt
            )
        try:
            return self._executables.get(key, self._pieces(self._steps[size]), buffers.tensors, buffers.slots)
        except PlatformError as error:
            logger.warning("steps of %d tokens run eagerly: %s", size, str(error))
            self.sizes = tuple(other for other in self.sizes if other != size)
            return None

    def _pieces(self, step: PiecesStep) -> Callable[..., torch.Tensor]:
        def read(ids: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
            step.num_attended = 0
            hidden = self._forward.model(ids, step)
            step.most_attended = max(step.most_attended, step.num_attended)  # opaque layers attend in runs alone
            if step.most_attended != len(step.metadata):
                raise PlatformError("an attention layer calls its backend, and not ForwardStep.attend")
            return hidden

        return read

    def _padding(self, size: int, buffers: PieceBuffers) -> list[AttentionBatch]:
        """``size`` tokens of prompts that lie in the null page, as long as prompts may be."""
        ends = [*range(0, size, self._max_model_len), size]
        lengths = [end - start for start, end in pairwise(ends)]
        device = buffers.ids.device
        num_pages = -(-max(lengths) // self._block_size)
        table = torch.full((len(lengths), num_pages), NULL_PAGE, dtype=torch.int32, device=device)
        return [
            AttentionBatch(
                query_start=torch.tensor(ends, dtype=torch.int32, device=device),
                seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
                block_table=table,
                slot_mapping=slots,
                query_start_host=tuple(ends),
                seq_lens_host=tuple(lengths),
                num_decodes=0,
            )
            for slots in buffers.slots
        ]


def piece_sizes(engine: GraphEngine, limits: StepLimits) -> tuple[int, ...]:
    """Numbers of tokens to prepare pieces for, ascending. Raises PlatformError for sizes that are none."""
    return listed_sizes(engine.piece_sizes, "piece_sizes", limits)
