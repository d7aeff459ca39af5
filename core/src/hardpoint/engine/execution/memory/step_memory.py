"""The size of a cache that leaves room for steps: the largest ones run before it is allocated, and are measured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from hardpoint.context import Context
from hardpoint.engine.execution.compile_ahead import AheadCompiler
from hardpoint.engine.execution.forward import Forward, Model
from hardpoint.engine.execution.graphs.shapes import StepShape, bucketed, graph_bytes, most_captured_tokens
from hardpoint.engine.execution.graphs.step_buffers import first_lengths, trial_step
from hardpoint.engine.execution.memory.cache_memory import CacheMemory, page_bytes
from hardpoint.engine.execution.memory.holdings import is_want_of_memory
from hardpoint.engine.execution.stage import Stage
from hardpoint.engine.scheduling.paged_cache import CacheGeometry
from hardpoint_plugin_api import CapacityError, ForwardStep, GraphEngine, Memory, Platform, StepLimits

logger = logging.getLogger(__name__)

_SLACK = 1.1
"""An allocator's blocks are larger than what they hold, and lie apart."""


@dataclass(frozen=True)
class StepMemory:
    """Runs trial steps over a cache of a few pages, before the real cache is allocated.

    ``sampling``: bytes that are kept for sampling.
    """

    ctx: Context
    platform: Platform
    compiler: AheadCompiler
    model: Model
    stage: Stage
    limits: StepLimits
    geometry: CacheGeometry
    vocab_size: int
    sampling: int

    def cache_budget(self, engine: GraphEngine) -> int:
        """Bytes for the cache where the user asks for no size; sampling's are not among them.

        On an accelerator that is the platform's own budget, or less where the largest steps need more. A host has
        memory enough beside its budget, and there the largest step may take long. With --gpu-memory-utilization the
        cache and the largest steps keep within that share of the device. All ranks of a pipeline stage must
        call this together. Raises CapacityError as ``measure`` does, and where the share is in use already.
        """
        config, platform = self.ctx.config, self.platform
        platform.memory.trim()  # memory that loading left to the allocator is free
        budget, taken = platform.kv_cache_budget(), 0
        if self.ctx.device.accelerator:
            captured = 0 if config.enforce_eager else most_captured_tokens(engine, self.limits, config.num_drafts)
            taken = self.measure(captured)
            logger.info("the largest steps take %d MiB", taken >> 20)
            budget = min(budget, platform.memory.snapshot().free - taken)
        if (share := config.gpu_memory_utilization) is not None:
            budget = min(budget, self._left_of(share) - taken)
        return budget - self.sampling - graph_bytes(engine, self.limits, config.num_drafts, adapters=config.enable_lora)

    def _left_of(self, share: float) -> int:
        """Bytes that may be taken until ``share`` of the device is in use. Raises CapacityError where none may."""
        now = self.platform.memory.snapshot()
        used, most = now.total - now.free, int(share * now.total)
        if used >= most:
            raise CapacityError(
                f"--gpu-memory-utilization {share:g} is {most:,} bytes of {self.ctx.device.name}, where {used:,} are "
                "in use beside the cache; raise it, or free memory"
            )
        return most - used

    @torch.inference_mode()
    def measure(self, captured_tokens: int) -> int:
        """Return the bytes that the largest eager step and the largest captured step take.

        Captured steps keep their memory, so that both are held at once. ``captured_tokens`` is the size of the largest
        captured step, 0 where none is captured. All ranks of a pipeline stage must call this together.

        Raises CapacityError where the largest step does not fit the device even without a cache, at the end of the
        longest sequence too.
        """
        assert self.limits.max_tokens is not None
        largest = max(bucketed(self.limits.max_tokens, self.limits), captured_tokens)
        try:
            short, long = self._largest(largest)
            captured = self._measured(captured_tokens).highest if captured_tokens else 0
        except Exception as error:
            if not is_want_of_memory(error):
                raise
            raise CapacityError(
                f"a step of {largest} tokens does not fit {self.ctx.device.name} beside the weights, even without a "
                f"cache: {error}; lower --max-num-batched-tokens"
            ) from error
        finally:
            self.platform.memory.trim()
        taken = int((long + captured) * _SLACK)
        free = self.platform.memory.snapshot().free - self.sampling
        if long > short and taken > free:
            raise CapacityError(
                f"a step of {largest} tokens at the end of a sequence of {self._longest} does not fit "
                f"{self.ctx.device.name} beside the weights, even without a cache: steps take {taken:,} bytes, "
                f"{long - short:,} of them for the length of the sequence, and {free:,} are free; lower "
                "--max-model-len or --max-num-batched-tokens"
            )
        return taken

    @property
    def _longest(self) -> int:
        """Tokens of the longest sequence."""
        return min(self.ctx.max_model_len, self.limits.max_context or self.ctx.max_model_len)

    def _largest(self, tokens: int) -> tuple[int, int]:
        """Bytes that a step of ``tokens`` takes at the beginning of a sequence and at the end of the longest.

        Some attention kernels have scratch memory in proportion to queries times keys. The longest sequence would take
        long, so that the growth is measured over a cached context as long as the step.
        """
        short = self._measured(tokens)
        room = self._longest - tokens
        context = min(tokens, room)
        if context <= 0:  # several sequences, already as long as they may be
            return short.highest, short.highest
        further = self._run(tokens, context)
        growth = max((further.scratch[user] - short.scratch[user] for user in further.scratch), default=0)
        attending = short.held + max(short.scratch.values(), default=0) + max(0, growth) * room // context
        return short.highest, max(short.highest, attending)

    def _measured(self, tokens: int) -> _WatchedStep:
        """Run a step of ``tokens`` whose kernels are compiled."""
        return self.compiler.run_step(partial(self._run, tokens))

    def _run(self, tokens: int, context: int = 0) -> _WatchedStep:
        """Run a step of prompts, whose tokens are all stored to page 1, since those in the null page would be taken for
        padding, which replicas that share experts send to none; tokens before them lie in the null page.

        With cached tokens before them (``context``), it runs until each kind of attention was seen.
        """
        ctx, limits, users = self.ctx, self.limits, self.ctx.cache_users
        assert limits.max_requests is not None
        tokens = min(tokens, limits.max_requests * self._longest)
        tried = first_lengths(StepShape("eager", tokens, None, None, "hidden"), self._longest)
        tried = replace(tried, lengths=tuple(length + context for length in tried.lengths))
        least = (self.geometry.pages_for(1) + 1) * page_bytes(users, ctx.block_size)
        forward = Forward(self.model, users, CacheMemory(users, self.geometry, least, ctx.torch_device).views)
        memory = self.platform.memory
        memory.reset_peak()
        before = memory.snapshot().peak
        _, positions, batches = trial_step(tried, len(users.cache_groups()), ctx.block_size, 0, ctx.torch_device)
        batches = [replace(batch, slot_mapping=batch.slot_mapping + ctx.block_size) for batch in batches]
        inputs = self.stage.buffers(tokens).get(self.stage.inputs)
        if inputs is None:
            inputs = torch.arange(tokens, device=ctx.torch_device) % self.vocab_size
        adapters = None
        if ctx.config.num_adapters:
            adapters = torch.zeros(tokens, dtype=torch.int32, device=ctx.torch_device)
        wanted = {group.users[0] for group in users.plan_groups()} if context else None
        metadata = forward.plan(batches)
        step = _WatchedStep(
            positions, positions, forward.caches, metadata, adapters, memory=memory, before=before, wanted=wanted
        )
        with suppress(_EnoughError):
            self.model.hidden(inputs, step)
        step.note_highest()
        return step


class _EnoughError(Exception):
    """Everything that was wanted of a step is known."""


@dataclass(kw_only=True)
class _WatchedStep(ForwardStep):
    """A step that notes the memory it takes, in bytes beyond ``before``.

    ``highest``: the most that was held at once. ``held``: the most that was held when a layer began its work on its
    cache; ``scratch``: how much more that work held at once, by cache user. The step ends when all users that are
    ``wanted`` were seen, at its own end where that is None.
    """

    memory: Memory
    before: int
    wanted: set[int] | None
    highest: int = 0
    held: int = 0
    scratch: dict[int, int] = field(default_factory=dict)

    def interrupt(self, user: int, call: Callable[..., None], *tensors: torch.Tensor) -> None:
        """See ForwardStep."""
        self.note_highest()
        held = self.memory.snapshot().peak - self.before
        self.held = max(self.held, held)
        super().interrupt(user, call, *tensors)
        self.scratch[user] = max(self.scratch.get(user, 0), self.note_highest() - held)
        if self.wanted is not None and self.wanted <= self.scratch.keys():
            raise _EnoughError

    def note_highest(self) -> int:
        """Return the most bytes since the last call."""
        peak = self.memory.snapshot().peak - self.before
        self.memory.reset_peak()
        self.highest = max(self.highest, peak)
        return peak
