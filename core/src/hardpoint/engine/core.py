"""The engine core: requests of token ids in, tokens out, one step at a time. Knows no text."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, Unpack, cast

from hardpoint.bench.stages import mark
from hardpoint.checkpoint.loader import load_weights
from hardpoint.checkpoint.safetensors_files import SafetensorsFiles
from hardpoint.engine.block_pool import BlockPool
from hardpoint.engine.blueprint import Blueprint
from hardpoint.engine.executor import Executor, InProcessExecutor, Pending
from hardpoint.engine.memory import CacheMemory
from hardpoint.engine.request import Request
from hardpoint.engine.runner import Model, Runner, RunnerArgs
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.engine.scheduler import Scheduler, SchedulerArgs
from hardpoint.engine.step import StepInput
from hardpoint.selection import SelectionTable
from hardpoint_plugin_api import ConfigError, EngineInfo, RequestError, RunnerWorkload, SchedulerWorkload, StepLimits

logger = logging.getLogger(__name__)


@dataclass
class EngineStats:
    """What the engine did so far; seconds of wall time."""

    load_seconds: float = 0.0
    num_steps: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0


class RequestOptions(TypedDict, total=False):
    """How a request is treated beside others.

    ``priority``: lower runs first. ``timeout``: seconds after which it ends, finished or not. ``cache_salt``: it shares
    cached prefixes with requests of the same salt only.
    """

    priority: int
    timeout: float | None
    cache_salt: str


@dataclass
class EngineCore:
    """One model on one device. Built by ``start``; ``close`` frees what it holds.

    ``_ahead`` steps are submitted beyond the one that is waited for: 1 lets host and device overlap.
    """

    blueprint: Blueprint
    table: SelectionTable
    executor: Executor
    scheduler: Scheduler
    max_model_len: int
    stats: EngineStats
    _info: EngineInfo
    _ahead: int
    _seeds: random.Random
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _submitted: deque[tuple[StepInput, Pending]] = field(default_factory=deque)

    @classmethod
    def start(cls, blueprint: Blueprint, model: Model | None = None) -> EngineCore:
        """Load the weights, size the cache, construct scheduler and runner as selected.

        ``model`` runs in place of the blueprint's own: for measuring the host.

        Raises CheckpointError and CapacityError.
        """
        began = time.perf_counter()
        ctx, platform, config = blueprint.ctx, blueprint.platform, blueprint.config
        table = blueprint.table
        logger.info("selection table %s on %s", table.digest, ctx.device.name)
        limits = _step_limits(blueprint)
        with platform.memory.pool("weights"):
            load_weights(
                blueprint.model, blueprint.model.weight_names, SafetensorsFiles(blueprint.folder), ctx.torch_device
            )
        mark("weights")
        with platform.memory.pool("resources"):
            ctx.resources.allocate(ctx.torch_device)
        with platform.memory.pool("kv"):
            budget = config.kv_cache_memory or platform.kv_cache_budget()
            longest = min(ctx.max_model_len, limits.max_context or ctx.max_model_len)
            enough = _bytes_for_all(blueprint, config.max_num_seqs * longest)
            cache = CacheMemory(ctx.attention_layers, ctx.block_size, min(budget, enough), ctx.torch_device)
        max_model_len = cache.longest_sequence(longest, config.max_model_len is not None)
        assert limits.max_tokens is not None
        assert limits.max_requests is not None
        runner_class = cast(type[Runner], ctx.load(ctx.select(RunnerWorkload()).offer))
        scheduler_class = cast(type[Scheduler], ctx.load(ctx.select(SchedulerWorkload()).offer))
        runner = runner_class(
            RunnerArgs(
                ctx=ctx,
                platform=platform,
                model=model or blueprint.model,
                sampling_ops=blueprint.sampling_ops,
                caches=cache.views,
                num_slots=limits.max_requests,
                max_step_tokens=limits.max_tokens,
                token_buckets=limits.token_buckets,
                vocab_size=blueprint.hf_config.integer("vocab_size"),
            )
        )
        pool = BlockPool(cache.num_pages, ctx.block_size)
        scheduler = scheduler_class(SchedulerArgs(pool, limits, max_model_len, config.enable_prefix_caching))
        info = EngineInfo(config.model, ctx.device, table.digest)
        blueprint.plugins.engine_started(info)
        stats = EngineStats(load_seconds=time.perf_counter() - began)
        ahead = ctx.device.accelerator if config.async_scheduling is None else config.async_scheduling
        seeds = random.Random(config.seed)
        executor = InProcessExecutor(runner)
        return cls(blueprint, table, executor, scheduler, max_model_len, stats, info, int(ahead), seeds)

    def add_request(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        *,
        bad_words: Sequence[Sequence[int]] = (),
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Queue a request for one completion.

        ``bad_words`` are the token sequences of the parameter of that name: the core knows no text.
        Raises RequestError for an empty or too long prompt or an id outside the vocabulary.
        """
        assert params.n == 1, "several completions are several requests: see Conversation"
        prompt = tuple(prompt_token_ids)
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        vocabulary = self.blueprint.hf_config.integer("vocab_size")
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            wrong = min(prompt) if min(prompt) < 0 else max(prompt)
            raise RequestError(f"token id {wrong} is outside the model's vocabulary of {vocabulary}")
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; with one token to draw, at most {self.max_model_len - 1} fit "
                "(--max-model-len, or the cache's size)"
            )
        stops = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else eos_token_ids)
        most = self.max_model_len
        if params.max_tokens is not None:
            most = min(most, len(prompt) + params.max_tokens)
        number = next(self._numbers)
        words = tuple(tuple(word) for word in bad_words)
        params.check_vocabulary(vocabulary, words)
        seed = self.draw_seed() if params.seed is None else params.seed
        timeout = options.get("timeout")
        request = Request(
            str(number),
            prompt,
            params,
            seed,
            stops,
            most,
            number,
            priority=options.get("priority", 0),
            deadline=None if timeout is None else time.monotonic() + timeout,
            cache_salt=options.get("cache_salt", ""),
            bad_words=words,
        )
        self.scheduler.add(request)
        return request

    def draw_seed(self) -> int:
        """A seed for a request that gives none; the engine's own seed makes the sequence of them repeatable."""
        return self._seeds.getrandbits(62)

    @property
    def has_unfinished(self) -> bool:
        """True while any request waits or runs."""
        return self.scheduler.has_unfinished

    def step(self) -> list[Request]:
        """Submit what fits ahead, wait for the oldest step, and return the requests that got a token or ended.

        An error, or an interrupt, ends every request and leaves an engine that takes new ones.
        """
        try:
            return self._step()
        except BaseException:
            self._submitted.clear()
            self.scheduler.abandon()
            raise

    def _step(self) -> list[Request]:
        began = time.perf_counter()
        expired = self.scheduler.expire(time.monotonic())
        while len(self._submitted) <= self._ahead and (step := self.scheduler.schedule()) is not None:
            self._submitted.append((step, self.executor.submit(step)))
        if not self._submitted:
            return expired
        advanced = expired + self._collect(began)
        while self._submitted and not self.scheduler.has_unfinished:
            self._collect(time.perf_counter())  # steps whose tokens nobody wants any more
        return advanced

    def _collect(self, began: float) -> list[Request]:
        """Wait for the oldest submitted step and commit it."""
        step, pending = self._submitted.popleft()
        advanced = self.scheduler.commit(pending.result())
        seconds, decodes = time.perf_counter() - began, sum(s.count == 1 for s in step.scheduled)
        self.stats.num_steps += 1
        if decodes == len(step.scheduled):
            self.stats.decode_tokens += decodes
            self.stats.decode_seconds += seconds
        else:
            self.stats.prefill_tokens += step.num_tokens
            self.stats.prefill_seconds += seconds
        return advanced

    def abort(self, request: Request) -> None:
        """End ``request`` now."""
        self.scheduler.abort(request)

    def close(self) -> None:
        """Tell the plugins, then drop runner, caches and weights."""
        self.blueprint.plugins.engine_stopping(self._info)
        self.executor.shutdown(deadline=5.0)
        for module in self.blueprint.model.modules():
            release = getattr(module, "release", None)
            if release:
                release()


def _step_limits(blueprint: Blueprint) -> StepLimits:
    """What the user, the platform and every attention backend allow of a step; no step is larger than all buckets."""
    config = blueprint.config
    limits = StepLimits(max_tokens=config.max_num_batched_tokens, max_requests=config.max_num_seqs)
    limits = limits.intersect(blueprint.platform.step_limits())
    for layer in blueprint.ctx.attention_layers.layers:
        limits = limits.intersect(layer.backend.step_limits())
    longest, wanted = limits.max_context, config.max_model_len
    if longest is not None and wanted is not None and wanted > longest:
        raise ConfigError(
            f"--max-model-len {wanted}: {blueprint.ctx.device.name}, or an attention backend chosen for it, serves "
            f"sequences of at most {longest} tokens"
        )
    if limits.token_buckets:
        limits = limits.intersect(StepLimits(max_tokens=max(limits.token_buckets)))
    return limits


def _bytes_for_all(blueprint: Blueprint, num_tokens: int) -> int:
    """Bytes of a cache that holds ``num_tokens``: more would never be used."""
    ctx = blueprint.ctx
    pages = -(-num_tokens // ctx.block_size) + 1 + blueprint.config.max_num_seqs
    layers = ctx.attention_layers.layers
    return pages * sum(x.backend.layout.page_bytes(x.backend.cache_spec, ctx.block_size) for x in layers)
