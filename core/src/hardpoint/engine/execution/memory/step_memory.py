"""The size of a cache that leaves room for steps: the largest ones run before it is allocated, and are measured."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import torch

from hardpoint.context import Context
from hardpoint.engine.execution.compile_ahead import compile_ahead
from hardpoint.engine.execution.forward import Forward, Model
from hardpoint.engine.execution.graphs.shapes import StepShape, bucketed, graph_bytes, most_captured_tokens
from hardpoint.engine.execution.graphs.step_buffers import first_lengths, trial_step
from hardpoint.engine.execution.memory.cache_memory import CacheMemory, page_bytes
from hardpoint.engine.execution.memory.holdings import is_want_of_memory
from hardpoint.engine.execution.stage import Stage
from hardpoint.engine.scheduling.paged_cache import CacheGeometry
from hardpoint_plugin_api import CapacityError, GraphEngine, Platform, StepLimits

logger = logging.getLogger(__name__)

_SLACK = 1.1
"""An allocator's blocks are larger than what they hold, and lie apart."""


@dataclass(frozen=True)
class StepMemory:
    """Runs trial steps over a cache of a few pages, before the real cache is allocated."""

    ctx: Context
    platform: Platform
    model: Model
    stage: Stage
    limits: StepLimits
    geometry: CacheGeometry
    vocab_size: int

    def cache_budget(self, engine: GraphEngine) -> int:
        """Bytes for the cache where the user asks for no size.

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
        return budget - graph_bytes(engine, self.limits, config.num_drafts, adapters=config.enable_lora)

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

        Raises CapacityError where the largest step does not fit the device even without a cache.
        """
        assert self.limits.max_tokens is not None
        largest = max(bucketed(self.limits.max_tokens, self.limits), captured_tokens)
        try:
            taken = self._peak(largest)
            if captured_tokens:
                taken += self._peak(captured_tokens)
        except Exception as error:
            if not is_want_of_memory(error):
                raise
            raise CapacityError(
                f"a step of {largest} tokens does not fit {self.ctx.device.name} beside the weights, even without a "
                f"cache: {error}; lower --max-num-batched-tokens"
            ) from error
        finally:
            self.platform.memory.trim()
        return int(taken * _SLACK)

    def _peak(self, tokens: int) -> int:
        """The most bytes that were held at once, in a step of ``tokens`` tokens, beyond what was held before it."""
        users, device = self.ctx.cache_users, self.ctx.torch_device
        least = (self.geometry.pages_for(1) + 1) * page_bytes(users, self.ctx.block_size)
        cache = CacheMemory(users, self.geometry, least, device)
        forward = Forward(self.model, users, cache.views)
        compile_ahead(self.ctx, self.platform, partial(self._run, forward, tokens))
        self.platform.memory.reset_peak()
        before = self.platform.memory.snapshot().peak
        self._run(forward, tokens)
        return max(0, self.platform.memory.snapshot().peak - before)

    def _run(self, forward: Forward, tokens: int) -> None:
        """A step of prompts, whose tokens all lie in the null page."""
        ctx, limits = self.ctx, self.limits
        assert limits.max_requests is not None
        longest = min(ctx.max_model_len, limits.max_context or ctx.max_model_len)
        tokens = min(tokens, limits.max_requests * longest)
        shape = StepShape("eager", tokens, None, None, "hidden")
        num_groups = len(ctx.cache_users.cache_groups())
        _, positions, batches = trial_step(
            first_lengths(shape, longest), num_groups, ctx.block_size, 0, ctx.torch_device
        )
        inputs = self.stage.buffers(tokens).get(self.stage.inputs)
        if inputs is None:
            inputs = torch.arange(tokens, device=ctx.torch_device) % self.vocab_size
        adapters = None
        if ctx.config.num_adapters:
            adapters = torch.zeros(tokens, dtype=torch.int32, device=ctx.torch_device)
        forward.hidden(inputs, positions, forward.plan(batches), adapters)
