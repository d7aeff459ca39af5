"""Captured graphs of steps: how they are found, captured and replayed. ``shapes.py`` lists the shapes.

Every rank of a pipeline stage decides by the step alone, so that all of them replay, capture or run eagerly together. A
step that one of them cannot capture is captured by none: they exchange verdicts (ReplayCheck). Other stages may do
otherwise: states travel between graphs, into fixed buffers.

Replicas that share experts capture all graphs when they start, together. A step then has the same number of tokens on
all of them (StepInput.captured_tokens), and each rank replays its graph of that size. Where a rank has none, it runs
eagerly at that size, and the others need not do the same.
"""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from hardpoint.conformance.certificate import Certificates
from hardpoint.context import Context
from hardpoint.engine.execution.forward import Forward, PiecewiseStep
from hardpoint.engine.execution.graphs.capturable import why_eager, why_not_full
from hardpoint.engine.execution.graphs.kept_graphs import Captured, GraphKey, KeptGraphs, shares_of, within
from hardpoint.engine.execution.graphs.late_graphs import (
    Buffers,
    LateGraphs,
    PlannedGraph,
    buffers_of,
    first_sizes,
)
from hardpoint.engine.execution.graphs.replay_check import Put, ReplayCheck, StepFunction, Wanted
from hardpoint.engine.execution.graphs.shapes import (
    DRAWS,
    MOST_GRAPHS,
    End,
    Mode,
    ShapeRow,
    StepShape,
    bucketed,
    shape_rows,
    with_adapters,
)
from hardpoint.engine.execution.graphs.step_buffers import (
    BufferPool,
    StepBuffers,
    TrialLengths,
    first_lengths,
    further_lengths,
    trial_step,
)
from hardpoint.engine.execution.sampling.sampler import Sampler
from hardpoint.engine.execution.stage import Stage
from hardpoint.engine.scheduling.step import StepInput
from hardpoint_plugin_api import AttentionMetadata, CapturedGraph, GraphEngine, Phase, PlatformError, StepLimits

logger = logging.getLogger(__name__)


_EVERY_LENGTH = 3
"""Of sequences, on which a graph is compared with an eager run: the first, and ``further_lengths``."""

Trial = Callable[[], tuple[bool, list[AttentionMetadata]]]
"""Puts a step into the buffers: see Graphs._try."""


class Graphs:
    """One rank's captured graphs by shape and compatibility tokens, as many as the graph engine may keep.

    ``most_tokens`` and ``most_requests`` are those of the largest shapes.
    """

    def __init__(
        self,
        ctx: Context,
        new_engine: Callable[[], GraphEngine],
        forward: Forward,
        sampler: Sampler,
        limits: StepLimits,
        pool: Callable[[], AbstractContextManager[None]],
        exchange: Callable[[Any], list[Any]],
        vocab_size: int,
        stage: Stage,
    ) -> None:
        """``limits`` are those of the engine's steps; memory is allocated within ``pool()``. ``exchange`` returns what
        every rank of the stage calls it with.

        Raises PlatformError for a graph engine whose data contradict each other.
        """
        assert limits.max_requests is not None
        self._ctx, self._forward, self._sampler, self._limits = ctx, forward, sampler, limits
        self._padding_slot, self._vocab_size, self._exchange = limits.max_requests, vocab_size, exchange
        self._new_engine, self.engine = new_engine, new_engine()
        self.check = ReplayCheck(ctx.kernel_calls, forward, ctx.block_size, pool, exchange, stage.inputs)
        self._inputs: str = stage.inputs
        self._eager_end: End = "hidden" if stage.draws else "states"
        rows, off = shape_rows(self.engine, limits, ctx.config.num_drafts), why_eager(ctx, self.engine)
        rows = with_adapters(rows) if ctx.config.num_adapters else rows
        self._off = off or why_not_full(ctx, self.engine)
        on = () if off else [row for row in rows if not self._off or row.mode == "piecewise"]
        on = on if stage.draws else [replace(row, ends=("states",)) for row in on]
        served = [row for row in map(self._served, on) if row.sizes]
        ahead = sum(row.num_ahead for row in served)
        most = self.engine.max_graphs
        most = max(MOST_GRAPHS, ahead + ahead // 2) if most is None else most
        shares = shares_of(served, most)
        self._rows, self._kept = within(served, shares), KeptGraphs(most, shares)
        self._num_groups = len(ctx.cache_users.cache_groups())
        largest = [row.shape(row.sizes[-1], row.ends[-1]) for row in self._rows]
        self.most_tokens = max((shape.tokens for shape in largest), default=0)
        self.most_requests = max((shape.requests or 0 for shape in largest), default=0)
        max_pages = -(-ctx.max_model_len // ctx.block_size)
        inputs = stage.buffers(self.most_tokens)
        if ctx.config.num_adapters:
            inputs["adapters"] = torch.full((self.most_tokens,), -1, dtype=torch.int32, device=ctx.torch_device)
        self._buffers = BufferPool(
            self.most_tokens, self.most_requests, self._num_groups, max_pages, ctx.torch_device, inputs
        )
        self._late = LateGraphs()
        self._refused: set[Buffers] = set()
        self._refused_draws: set[End] = set()
        self._warned: set[tuple[Mode, int | None]] = set()
        metrics = ctx.metrics
        self._replays = metrics.counter("graph_replays", "Steps that replayed a captured graph.")
        self._eager = metrics.counter("eager_steps", "Steps that ran without a captured graph, by reason.", ["reason"])
        self._seconds = metrics.counter("graph_preparation_seconds", "Time that capturing graphs took.")
        self._number = metrics.gauge("graphs_kept", "Captured graphs that are kept.")
        self._left = metrics.gauge("graphs_left", "Graphs that are still to be captured, while the engine is idle.")

    @property
    def nbytes(self) -> int:
        """Bytes of the device that graphs take, as the graph engine has it."""
        return self.engine.nbytes

    @property
    def tell_nbytes(self) -> bool:
        """Whether the graph engine says how many they are; otherwise ``nbytes`` is 0."""
        return type(self.engine).nbytes is not GraphEngine.nbytes

    @property
    def rows(self) -> tuple[ShapeRow, ...]:
        """The shapes that are captured, row by row."""
        return tuple(self._rows)

    @property
    def kept(self) -> list[CapturedGraph]:
        """All graphs, the least recently used first."""
        return self._kept.graphs

    def find(self, step: StepInput, hidden: bool, adapted: bool = False) -> StepShape:
        """The shape that ``step`` takes.

        ``hidden``: where the hidden states of all its tokens are needed; ``adapted``: where tokens have adapters.
        """
        if not self._ctx.profiler.marks_layers:
            for row in self._rows:
                if row.adapted != adapted:
                    continue
                needed = row.needs(step)
                if not needed or (hidden and row.ends[-1] not in ("hidden", "states")):
                    continue
                sizes = row.sizes_for(needed, step.captured_tokens)
                if (shape := self._best(row, sizes, self._end(row, step))) is not None:
                    return shape
        return self.eager(step, adapted)

    def _best(self, row: ShapeRow, sizes: Sequence[int], end: End) -> StepShape | None:
        """The shape of ``row`` for a step that may have any of ``sizes``: the smallest whose graph is there.

        A draw that lacks its graph is drawn from the logits of another's. Where no graph is there, it is the smallest
        shape; its graph is captured when the step runs. None where no shape can be captured.
        """
        missed = None
        for size in sizes:
            shape = row.shape(size, end)
            if self._refused and buffers_of(shape) in self._refused:
                continue
            if not self._is_late(shape):
                return shape
            if missed is None and not self._late.is_given_up(shape):
                self._late.miss(shape)
                missed = shape
            if end in DRAWS and not self._is_late(behind := shape._replace(end=row.ends[-1])):
                return behind
        return missed

    def _is_late(self, shape: StepShape) -> bool:
        """Whether a graph that serves ``shape`` is to be captured later, or failed then, and none is there."""
        if not self._late.has(shape):
            return False
        return not any(map(self._kept.has, self._holders(shape)))

    def eager(self, step: StepInput, adapted: bool = False) -> StepShape:
        """The shape of ``step`` where it replays no graph."""
        tokens = step.captured_tokens or bucketed(step.num_tokens, self._limits)
        return StepShape("eager", tokens, None, None, self._eager_end, adapted)

    def buffers(self, shape: StepShape) -> StepBuffers:
        """The fixed buffers of a shape that is not eager."""
        return self._buffers.of(shape)

    def run(
        self,
        step: StepInput,
        shape: StepShape,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        metadata: Sequence[AttentionMetadata],
        adapters: torch.Tensor | None = None,
    ) -> tuple[End, torch.Tensor]:
        """Run ``step``, which stands in the buffers of its shape, as attention planned it.

        ``inputs`` are what the model starts from, see Model.hidden; positions int64 [T]; ``adapters`` as in
        ForwardStep, given where the shape is adapted. Returns what it ended with,
        valid until the next step: states or hidden states, logits [N, vocab] of requests or [T, vocab] of tokens, or
        tokens int64 [N]. A step whose draw cannot be captured ends with logits.
        """
        if shape.mode == "eager":
            self._eager.labels(self._why_eager(step)).inc()
            replicas = [bucketed(count, self._limits) for count in step.replica_tokens]
            return shape.end, self._forward.hidden(inputs, positions, metadata, adapters, replicas)
        shape, captured = (self._prepared if step.captured_tokens is None else self._found)(shape, metadata)
        if captured is None:
            self._eager.labels("unrecordable").inc()
            return shape.end, self._function(shape, metadata, None)(**self.buffers(shape).tensors)[-1]
        self._replays.inc()
        if captured.step is not None:
            captured.step.metadata = metadata
        results: tuple[torch.Tensor, ...] = captured.graph.run()
        return shape.end, results[-1] if shape.end in DRAWS else results[0]

    @torch.inference_mode()
    def compile_ahead(self, compiled: Callable[[Callable[[], object]], int]) -> None:
        """Compile the kernels of all shapes that are captured ahead, see Platform.compile_ahead.

        ``compiled`` does it for what a function would launch. The largest shapes come first: where they need no
        compilation on any rank, the others are taken to need none. Shapes of steps with prompts beside decodes are
        compiled too, though they run eagerly.
        """
        rows = [row for row in self._rows if row.listed]
        shapes = [row.shape(size, end) for row in rows for size in row.sizes for end in row.draws or row.ends]
        largest = {shape.kind: shape.tokens for shape in shapes}
        first = compiled(lambda: self._run_all(shape for shape in shapes if shape.tokens == largest[shape.kind]))
        if any(self._exchange(first)):
            compiled(lambda: self._run_all(shape for shape in shapes if shape.tokens != largest[shape.kind]))
            compiled(self._run_beside_prompts)

    def _run_all(self, shapes: Iterable[StepShape]) -> None:
        """Run a step of each shape."""
        for shape in shapes:
            _, metadata = self._try(shape, first_lengths(shape, self._ctx.max_model_len), 0)
            self._function(shape, metadata, None)(**self.buffers(shape).tensors)

    def _run_beside_prompts(self) -> None:
        """Run steps eagerly in which decodes come before a prompt: attention has variants for these."""
        ctx = self._ctx
        shape = max((row.shape(row.sizes[-1], row.ends[-1]) for row in self._rows), key=lambda shape: shape.tokens)
        self._try(shape, first_lengths(shape, ctx.max_model_len), 0)
        arrays = self.buffers(shape).tensors
        decodes = next((row.sizes for row in self._rows if row.queries == 1), ())
        for count in first_sizes(decodes):
            rest = shape.tokens - count
            if not 1 < rest <= ctx.max_model_len:
                continue
            lengths = TrialLengths((*[1] * count, rest), (*[2] * count, rest))
            _, positions, batches = trial_step(lengths, self._num_groups, ctx.block_size, 0, ctx.torch_device)
            metadata = self._forward.plan([replace(batch, num_decodes=count) for batch in batches])
            adapters = arrays["adapters"] if shape.adapted else None
            self._forward.hidden(arrays[self._inputs], positions, metadata, adapters)

    @torch.inference_mode()
    def prepare_ahead(self, free_pages: int = 0) -> None:
        """Capture what the start waits for, largest first so that memory which graphs share is taken once.

        ``capture_next`` captures the other listed graphs. With --wait-for-graphs, where replicas share experts, and
        where a third party's kernel is unproven, none is left to it: all verdicts on kernels are known before any
        request is. Of rows that list nothing it is one shape for each kernel of a plugin. Steps may be tried on pages 1
        to ``free_pages`` of the cache, which nobody uses.
        """
        unproven = self._has_unproven_kernels()
        config = self._ctx.config
        waits = unproven or config.wait_for_graphs or config.topology.shares_experts
        for row in self._rows:
            planned = self._planned(row, unproven)
            firsts = {row.shape(size, row.ends[0]) for size in first_sizes(row.sizes)}
            now = [graph for graph in planned if waits or not row.listed or graph.shape in firsts]
            sizes = [list(graphs) for _, graphs in groupby(reversed(now), lambda graph: graph.shape.layout)]
            began = time.perf_counter()
            for number, graphs in enumerate(sizes, 1):
                logger.info("preparing %s (%d of %d)", graphs[0].shape.words, number, len(sizes))
                for graph in reversed(graphs):
                    self._prepare(graph, free_pages)
            if sizes:
                logger.info("all prepared in %.1f s", time.perf_counter() - began)
            self._late.add(graph for graph in planned if graph not in now)
        self._left.set(len(self._late))

    @torch.inference_mode()
    def capture_next(self, least_missed: int = 0) -> int:
        """Capture one of the graphs that are left: the one that most steps missed, if ``least_missed`` or more did.

        Returns how many are left. A graph that cannot be captured is left out, with a warning.
        """
        if (graph := self._late.next(least_missed)) is not None:
            try:
                self._prepare(graph, free_pages=0)
            except Exception as error:  # steps go on with the graphs that are there
                self._late.give_up(graph.shape)
                self._tell_failure(graph.shape, error)
            self._left.set(len(self._late))
        return len(self._late)

    def capture_later(self) -> None:
        """Leave all listed graphs to ``capture_next``, and to the steps that need one before. Every rank calls it."""
        unproven = self._has_unproven_kernels()
        for row in self._rows:
            self._late.add(self._planned(row, unproven) if row.listed else ())
        self._left.set(len(self._late))

    def _planned(self, row: ShapeRow, unproven: bool) -> list[PlannedGraph]:
        """The graphs of ``row`` that are captured before a step needs them, in order of size.

        The first of a size is compared with eager runs where ``unproven`` kernels take part, where the size is the
        largest, and where it is the first that some kernel serves; the others of that size where ``unproven``.
        """
        firsts = self._firsts(row)
        sizes, ends = row.sizes, row.draws or row.ends
        if not row.listed:
            sizes, ends = firsts if self._ctx.kernel_calls.offers else (), ends[:1]
        graphs = []
        for size in sizes:
            lengths = _EVERY_LENGTH if unproven or size == sizes[-1] else int(size in firsts)
            graphs.append(PlannedGraph(row.shape(size, ends[0]), lengths))
            graphs += [PlannedGraph(row.shape(size, end), int(unproven)) for end in ends[1:]]
        return graphs

    def drop(self) -> None:
        """Forget every graph, since what they read is about to move, and the engine with the memory they share."""
        self._kept.clear()
        self._late.clear()
        self.engine = self._new_engine()
        if self._refused or self._refused_draws:
            gc.collect()  # a step that was refused may stand in a cycle with what it had allocated
        self._number.set(0)
        self._left.set(0)

    def narrow(self) -> None:
        """Leave out the sizes for which attention can no longer be captured; graphs were dropped before."""
        self._rows = [row for row in map(self._served, self._rows) if row.sizes]

    def _served(self, row: ShapeRow) -> ShapeRow:
        """``row`` with the sizes that attention can be captured for, and none beyond what its requests can have."""
        planners = [user.planner for user in self._ctx.cache_users.users]
        phase: Phase = "decode" if row.queries == 1 else "prefill"
        queries, most = row.queries or 1, row.requests * self._ctx.max_model_len if row.requests else None
        sizes = sorted({size if most is None else min(size, most) for size in row.sizes})
        return replace(
            row,
            sizes=tuple(size for size in sizes if all(p.grade(phase, size * queries) >= row.grade for p in planners)),
        )

    def _firsts(self, row: ShapeRow) -> tuple[int, ...]:
        """Sizes of which each is the first that some kernel serves."""
        entries = [entry for plan in self._ctx.selector.plans for entry in plan.entries]
        other, queries = "prefill" if row.queries == 1 else "decode", row.queries or 1
        firsts = {-(-max(1, entry.range.min) // queries) for entry in entries if entry.range.phase != other}
        return tuple(sorted({size for first in firsts for size in row.sizes_for(first)[:1]}))

    def _has_unproven_kernels(self) -> bool:
        """Whether, on any rank, a third party's kernel takes part that no certificate shows right in replays."""
        ctx = self._ctx
        offers = ctx.kernel_calls.third_party
        certificates = Certificates(ctx.plugins, ctx.config) if offers else None
        unproven = certificates is not None and any(
            certificates.standing(offer, ctx.device).level is None for offer in offers
        )
        return any(self._exchange(unproven))

    def _prepare(self, graph: PlannedGraph, free_pages: int) -> None:
        """Capture ``graph``; see ``prepare_ahead``."""
        ctx, shape = self._ctx, graph.shape
        first = partial(self._try, shape, first_lengths(shape, ctx.max_model_len), free_pages)
        further = further_lengths(shape, ctx.block_size, ctx.max_model_len)
        trials = [first, *(partial(self._try, shape, lengths, free_pages) for lengths in further)][: graph.num_lengths]
        own, metadata = first()
        is_one = shape.mode == "piecewise" or not own  # pieces hold no attention, whose requests trials vary
        self._prepared(shape, metadata, None if trials and is_one else trials, is_trial=True)

    def _try(self, shape: StepShape, lengths: TrialLengths, free_pages: int) -> tuple[bool, list[AttentionMetadata]]:
        """Put a step into the buffers on which graphs of ``shape`` are compared with eager runs, and plan it.

        It has other token ids in each row, where sequences lie in pages of their own: the first result. None is 0, and
        the first ones, which checkpoints put aside for padding and the like, come last.
        """
        ctx, buffers = self._ctx, self.buffers(shape)
        own, positions, batches = trial_step(lengths, self._num_groups, ctx.block_size, free_pages, ctx.torch_device)
        rows = torch.arange(shape.tokens, device=ctx.torch_device) * own
        ids = (rows + self._vocab_size // 3) % max(1, self._vocab_size - 1) + 1
        if "slots" in buffers.step:
            buffers.step["slots"].fill_(self._padding_slot)
        if "adapters" in buffers.step:
            slots = torch.arange(shape.tokens, device=ctx.torch_device) % (ctx.config.num_adapters + 1)
            buffers.step["adapters"].copy_(slots - 1)
        if "states" in buffers.step:
            states = buffers.step["states"]
            states.copy_(torch.arange(1, states.numel() + 1, device=states.device).sin().view(states.shape))
        return own, self._forward.plan(buffers.load(ids, positions, batches))

    def _end(self, row: ShapeRow, step: StepInput) -> End:
        """The draw of ``step`` where a graph may hold it."""
        if row.ends[0] in DRAWS and not step.is_empty:
            draw = self._sampler.plain_draw(step.scheduled)
            if draw is not None and draw not in self._refused_draws:
                return draw
        return row.ends[-1]

    def _why_eager(self, step: StepInput) -> str:
        if self._off:
            return self._off
        row = next((row for row in self._rows if row.queries and row.needs(step)), None)
        if row is None:
            verifies = any(s.drafts for s in step.scheduled)
            only_decodes = all(s.samples and s.count == 1 + len(s.drafts) for s in step.scheduled)
            return "uneven_drafts" if verifies and only_decodes else "prefill"
        if self._ctx.profiler.marks_layers:
            return "layer_profile"
        if step.captured_tokens == 0:
            return "unlike_replicas"
        return "unrecordable" if row.sizes_for(row.needs(step)) else "too_large"

    def _prepared(
        self,
        shape: StepShape,
        metadata: Sequence[AttentionMetadata],
        trials: Sequence[Trial] | None = None,
        *,
        is_trial: bool = False,
    ) -> tuple[StepShape, Captured | None]:
        """The graph of ``shape`` and the tokens of ``metadata``, captured where it is new, and its shape.

        A new graph is compared with eager runs of ``trials``, which put this very step into the buffers, and then
        others; of the step that stands there for None; it is not compared where there are none. It ends with logits
        where a draw cannot be part of any graph. ``is_trial``: the step that stands there is of no request.
        Returns None where the shape cannot be captured.
        """
        if self._late:
            self._late.discard(shape)
        shape, captured = self._found(shape, metadata)
        if captured is not None or buffers_of(shape) in self._refused:
            return shape, captured
        holder = self._holders(shape)[0]
        self._late.discard(holder)
        try:
            return shape, self._capture((holder, self._tokens(shape, metadata)), metadata, trials, is_trial)
        except PlatformError as error:
            if (end := holder.end) in DRAWS:
                logger.info("tokens are drawn behind the captured steps, not within: %s", str(error))
                self._refused_draws.add(end)
                return self._prepared(shape, metadata, trials, is_trial=is_trial)
            self._refused.add(buffers_of(shape))
            self._tell_failure(shape, error)
            return shape, None

    def _found(self, shape: StepShape, metadata: Sequence[AttentionMetadata]) -> tuple[StepShape, Captured | None]:
        """As ``_prepared``, and None where there is no graph yet."""
        if shape.end in self._refused_draws:
            shape = shape._replace(end="logits")
        tokens = self._tokens(shape, metadata)
        found = (self._kept.use((holder, tokens)) for holder in self._holders(shape))
        return shape, next((captured for captured in found if captured is not None), None)

    def _tokens(self, shape: StepShape, metadata: Sequence[AttentionMetadata]) -> Hashable:
        """The compatibility tokens of ``metadata`` that a graph of ``shape`` depends on."""
        return () if shape.mode == "piecewise" else self._forward.tokens(metadata)

    def _tell_failure(self, shape: StepShape, error: Exception) -> None:
        """Warn of the first shape of a kind that is not captured."""
        kind = shape.mode, shape.queries
        level = logging.INFO if kind in self._warned else logging.WARNING
        logger.log(level, "%s are not captured: %s", shape.words, str(error))
        self._warned.add(kind)

    def _holders(self, shape: StepShape) -> list[StepShape]:
        """The shapes whose graphs compute what ``shape`` ends with, the best first.

        The graph of a draw has logits, too. So a decode step that needs them, for penalties or log-probabilities, waits
        for no capture of its own.
        """
        if shape.end != "logits" or shape.queries != 1:
            return [shape]
        ends: list[End] = [*(draw for draw in DRAWS if draw not in self._refused_draws), "logits"]
        return [shape._replace(end=end) for end in ends]

    def _capture(
        self,
        key: GraphKey,
        metadata: Sequence[AttentionMetadata],
        trials: Sequence[Trial] | None,
        is_trial: bool,
    ) -> Captured:
        """Capture the step that stands in the buffers, and compare it with eager runs as ``_prepared`` says."""
        shape, step = key[0], None
        buffers = self.buffers(shape)
        if shape.mode == "piecewise":
            adapters = buffers.step["adapters"] if shape.adapted else None
            step = self._forward.piecewise(buffers.step["positions"], metadata, self.engine, adapters)
        self._kept.make_room(shape.kind)
        function, slots = self._function(shape, metadata, step), tuple(buffers.step["slot_mapping"])
        steps: list[Put] = [partial(self._step, key, trial) for trial in trials or ()] or [lambda: function]
        wanted = Wanted(self.engine, key, steps, buffers.tensors, slots, is_trial)
        began = time.perf_counter()
        try:
            graph = self.check.prepare(wanted) if trials or trials is None else self.check.prepare_unchecked(wanted)
            captured = Captured(graph, step)
            self._kept.put(key, captured)
        except PlatformError as error:
            traceback.clear_frames(error.__traceback__)  # they hold what the step had allocated
            raise
        finally:
            self._seconds.inc(time.perf_counter() - began)
            self._number.set(len(self._kept))
            self._left.set(len(self._late))
        logger.debug("step %s was captured", key)
        return captured

    def _step(self, key: GraphKey, trial: Trial) -> StepFunction | None:
        """The step that ``trial`` puts into the buffers; None where the graph of ``key`` does not serve it."""
        (shape, tokens), (own, metadata) = key, trial()
        return self._function(shape, metadata, None) if own and self._forward.tokens(metadata) == tokens else None

    def _function(
        self, shape: StepShape, metadata: Sequence[AttentionMetadata], piecewise: PiecewiseStep | None
    ) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Return the function that is captured: a step of ``shape`` over its buffers. Its last result is the end."""

        def run(
            positions: torch.Tensor,
            slots: torch.Tensor | None = None,
            query_start: torch.Tensor | None = None,
            **arrays: torch.Tensor,
        ) -> tuple[torch.Tensor, ...]:
            inputs = arrays[self._inputs]
            if piecewise is None:
                hidden = self._forward.hidden(
                    inputs, positions, metadata, arrays["adapters"] if shape.adapted else None
                )
            else:
                hidden = self._forward.hidden_piecewise(inputs, piecewise)
            if shape.end == "hidden" or shape.end == "states":
                return (hidden,)
            if shape.end == "token_logits":
                return (self.engine.transient(self._forward.model.logits(hidden)),)
            if shape.queries != 1:  # of each request the last token
                assert query_start is not None
                last = (query_start[1:].long() - 1).clamp(min=0)
                hidden = hidden[last]
            logits = self._forward.model.logits(hidden)
            if shape.end == "logits":
                return (logits,)
            assert slots is not None
            assert shape.queries == 1
            tokens = self._sampler.draw(shape.end, logits, slots, positions + 1 if shape.end == "random" else positions)
            # Logits are there to be compared alone: memory for all sizes' would be held at once.
            return self.engine.transient(logits), tokens

        return run
