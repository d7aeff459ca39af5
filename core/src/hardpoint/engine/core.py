"""The engine core: requests of token ids in, tokens out, one step at a time. Knows no text."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Unpack, cast

from hardpoint.engine.blueprint import Blueprint, draw, suspects
from hardpoint.engine.client import CoreFacts, EngineStats, RequestOptions
from hardpoint.engine.control import LoadAdapter, R, ReportMemory, Verb
from hardpoint.engine.core_verbs import on_core
from hardpoint.engine.engine_metrics import StatsCollector, StepMetrics
from hardpoint.engine.execution.executor import Executor, InProcessExecutor, Pending
from hardpoint.engine.execution.forward import Model
from hardpoint.engine.execution.graphs.replay_check import ReplayError
from hardpoint.engine.execution.kernel_switch import PrepareKernels, SwitchKernels
from hardpoint.engine.execution.memory.holdings import Holdings
from hardpoint.engine.execution.rank_verbs import Synchronize
from hardpoint.engine.execution.worker import Worker, planners_of_exact_lengths
from hardpoint.engine.kernel_builds import KernelBuilds
from hardpoint.engine.late_captures import LateCaptures
from hardpoint.engine.locations import tokenizer_of
from hardpoint.engine.lora import AdapterSlots
from hardpoint.engine.requests import RequestProgress
from hardpoint.engine.routed_experts import take_routed_experts
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.engine.scheduling.admission import Admission
from hardpoint.engine.scheduling.block_pool import BlockPool
from hardpoint.engine.scheduling.paged_cache import PagedCache
from hardpoint.engine.scheduling.prefill_policy import PrefillPolicy
from hardpoint.engine.scheduling.request import Request
from hardpoint.engine.scheduling.scheduler import Scheduler, SchedulerArgs
from hardpoint.engine.scheduling.step import StepInput
from hardpoint.plugin_host.blame import name_culprit
from hardpoint.plugin_host.culprits import Culprit
from hardpoint.selection import SelectionTable
from hardpoint.structured import Grammars
from hardpoint.tokenizer import Tokenizer
from hardpoint_plugin_api import EngineError, RequestError

logger = logging.getLogger(__name__)


@dataclass
class EngineCore:
    """One model on one device, a CoreClient. Built by ``start``; ``close`` frees what it holds.

    ``_ahead`` steps are submitted beyond the one that is waited for: 1 lets host and device overlap, and one
    fewer than there are pipeline stages lets all of these work at once.
    """

    blueprint: Blueprint
    table: SelectionTable
    executor: Executor
    scheduler: Scheduler
    admission: Admission
    adapters: AdapterSlots
    stats: EngineStats
    _metrics: StepMetrics
    _ahead: int
    _submitted: deque[tuple[StepInput, Pending]] = field(default_factory=deque)
    _denied: tuple[Culprit, ...] = ()
    _structures: Grammars | None = None
    _builds: KernelBuilds = field(default_factory=lambda: KernelBuilds(()))
    _is_unsettled: bool = False
    """Whether a step that was given up may still run on the device, and read what the next one overwrites."""

    def __post_init__(self) -> None:
        self.captures = LateCaptures(self.executor)
        self._take_stock()

    @classmethod
    def start(cls, blueprint: Blueprint, model: Model | None = None) -> EngineCore:
        """Load the weights, size the cache, construct scheduler and runner as selected.

        A plugin's kernel whose replays differ from its calls is put on the deny list, and the engine is drawn and
        loaded again, with another in its place. ``model`` runs in place of the blueprint's own: for measuring the host.

        Raises CheckpointError and CapacityError, and SelectionError where no other kernel can serve. Errors from a
        plugin's code bear a note that names the plugin.
        """
        denied: tuple[Culprit, ...] = ()
        while True:
            try:
                return cls._start(blueprint, model, denied)
            except ReplayError as error:
                traceback.clear_frames(error.__traceback__)  # they hold what was loaded
                found = error.culprits
            except Exception as error:
                name_culprit(error, blueprint.plugins, suspects(blueprint))
                raise
            denied += found
            config = blueprint.config
            for culprit in found:
                config = config.denying(culprit.choice)
                logger.error(
                    "%s gives other results in replayed steps than when it is called: it is not used, and the engine "
                    "is built with another; to keep it so, start with --deny %s, and report it to its author",
                    culprit,
                    ",".join(config.deny),
                )
            blueprint = draw(config)

    @classmethod
    def _start(cls, blueprint: Blueprint, model: Model | None, denied: tuple[Culprit, ...]) -> EngineCore:
        began = time.perf_counter()
        ctx, config, table = blueprint.ctx, blueprint.config, blueprint.table
        logger.info("selection digest %s on %s", table.digest, ctx.device.name)
        executor = start_executor(blueprint, model)
        facts = executor.facts
        num_stages = config.topology.pipeline
        has_stages = num_stages > 1
        ahead = (ctx.device.accelerator or has_stages) if config.async_scheduling is None else config.async_scheduling
        exact = planners_of_exact_lengths(blueprint)
        if has_stages:  # drafts and lengths on the device are the last stage's
            exact = (*exact, "each pipeline stage but the last")
        if ahead and exact and config.num_drafts:
            logger.info(
                "steps with drafts are waited for: %s needs exact sequence lengths on the host", ", ".join(exact)
            )
        paged_cache = PagedCache(BlockPool(facts.num_pages), facts.geometry, config.enable_prefix_caching)
        scheduler = Scheduler(
            SchedulerArgs(
                paged_cache,
                facts.limits,
                facts.max_model_len,
                config.enable_prefix_caching,
                config.num_drafts,
                drafts_ahead=ahead and not exact,
                prefill=PrefillPolicy.within(
                    facts.limits, config.long_prefill_token_threshold, config.max_num_partial_prefills
                ),
            )
        )
        stats = EngineStats(load_seconds=time.perf_counter() - began)
        admission = Admission(facts.max_model_len, blueprint.facts.vocab_size, config.seed)
        metrics = StepMetrics(ctx.engine_metrics)
        adapters = AdapterSlots(config.num_adapters)
        core = cls(
            blueprint,
            table,
            executor,
            scheduler,
            admission,
            adapters,
            stats,
            metrics,
            max(1, num_stages - 1) * ahead,
            _denied=denied,
        )
        try:
            for name, path in config.lora_paths.items():
                core.control(LoadAdapter(name, path).prepared())
        except BaseException:
            core.close()
            raise
        core._builds = KernelBuilds(ctx.selector.builds)
        ctx.engine_metrics.add(StatsCollector(stats, lambda: core.control(ReportMemory()).by_tag))
        return core

    @property
    def max_model_len(self) -> int:
        """The longest sequence, in tokens."""
        return self.admission.max_model_len

    @property
    def holdings(self) -> Holdings:
        """The memory held by the one rank of this process; for measurements and tests."""
        assert isinstance(self.executor, InProcessExecutor), "the ranks have processes of their own"
        return self.executor.worker.holdings

    @property
    def facts(self) -> CoreFacts:
        """Facts that do not change while this core lives."""
        config, admission = self.blueprint.config, self.admission
        return CoreFacts(
            config,
            self.table,
            self.max_model_len,
            admission.vocab_size,
            os.getpid(),
            self._denied,
            tuple(self.adapters),
        )

    def add_request(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        *,
        bad_words: Sequence[Sequence[int]] = (),
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Queue a request for one completion; see CoreClient."""
        request = Request(self.admission.admit(prompt_token_ids, params, eos_token_ids, bad_words=bad_words, **options))
        self.queue(request)
        return request

    def queue(self, request: Request) -> None:
        """Queue a request that was admitted, here or elsewhere. It may have an output already, which it goes on with.

        Raises CapacityError if it can never fit, EngineError while the engine sleeps, RequestError for a structure
        that cannot be compiled and an adapter that is not loaded.
        """
        self.executor.check()
        self.admission.check_awake()
        request.adapter = self.adapters.find(request.asked.adapter_name)
        self.make_ready(request)
        self.scheduler.add(request)
        self._take_stock()

    def needs_preparation(self, request: Request) -> bool:
        """Whether ``queue`` would take its time over ``request``, unless ``make_ready`` was called before."""
        structured = request.asked.params.structured
        return structured is not None and request.structure is None and not self._grammars().is_compiled(structured)

    def make_ready(self, request: Request) -> None:
        """Compile what the output of ``request`` is held to, if anything. Any thread may call it, beside steps.

        Raises RequestError for a structure that cannot be compiled.
        """
        structured = request.asked.params.structured
        if structured is None or request.structure is not None:
            return
        request.structure = self._grammars().start(structured, request.asked.stop_token_ids)
        for token in request.output_token_ids:
            request.structure.accept(token)

    def _grammars(self) -> Grammars:
        """Compiled structures of outputs: the one part here that needs the tokenizer, read when first asked for."""
        if self._structures is None:
            config = self.blueprint.config
            if config.skip_tokenizer_init:
                raise RequestError("structured output needs a tokenizer, and --skip-tokenizer-init loads none")
            folder = tokenizer_of(config, self.blueprint.folder)
            self._structures = Grammars.of(Tokenizer.load(folder), self.admission.vocab_size)
        return self._structures

    def draw_seed(self) -> int:
        """A seed for a request that gives none; the engine's own seed makes the sequence of them repeatable."""
        return self.admission.draw_seed()

    @property
    def has_unfinished(self) -> bool:
        """True while any request waits or runs."""
        return self.scheduler.has_unfinished

    @property
    def is_idle(self) -> bool:
        """True where a step would do nothing: none is submitted, and no request or other replica needs one."""
        return not (self.scheduler.has_unfinished or self._submitted or self.executor.is_awaited)

    def step(self) -> list[Request]:
        """Submit what fits ahead, wait for the oldest step, and return the requests that got a token or ended.

        An error, or an interrupt, ends every request and leaves an engine that takes new ones.
        """
        try:
            with self.blueprint.ctx.range("step"):
                return self._step()
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            self._take_stock()

    def _step(self) -> list[Request]:
        self._settle()
        self._switch_kernels()
        self.captures.between_steps()
        began = time.perf_counter()
        expired = self.scheduler.expire(time.monotonic())
        while len(self._submitted) <= self._ahead and not self.scheduler.needs_values:
            if (step := self.scheduler.schedule()) is None:
                break
            self._submitted.append((step, self.executor.submit(step)))
        if self.executor.is_awaited and not self._submitted:
            self.executor.keep_up()
        self.scheduler.hash_prompts()
        advanced = expired + (self._collect(began) if self._submitted else [])
        ended = [request for request in advanced if request.finish_reason is not None]
        for request in ended:
            self._note_end(request)
        take_routed_experts(self.executor, self.blueprint.config.topology.first_ranks, ended)
        if not self.scheduler.has_unfinished:
            self._drain()
        return advanced

    def _switch_kernels(self) -> None:
        """Go over to kernels that were built in the meantime: on all ranks, or at the next start."""
        if self.admission.asleep or not self._builds.take_ready():
            return
        ctx = self.blueprint.ctx
        switchable = ctx.switches.workloads
        for offer in ctx.selector.built_apart_from(switchable):
            logger.info("%s of plugin %s serves from the next start on", offer.contribution, offer.plugin)
        if not ctx.selector.postponed_among(switchable):
            return
        told = [why for why in self.executor.control(PrepareKernels()) if why is not None]
        self.executor.control(SwitchKernels(not told))
        if told:
            logger.warning("kernels were built that serve from the next start on: %s", told[0])
            return
        ctx.selector.adopt(ctx.selector.decided_again(switchable))  # of ranks that have processes of their own
        self.table = self.blueprint.table
        self.captures.again()
        logger.info("the kernels that were built serve from now on: selection digest %s", self.table.digest)

    @property
    def wants_idle_time(self) -> bool:
        """True where ``use_idle_time`` has something to do."""
        return self.is_idle and self.captures.are_left and not self._is_unsettled

    def use_idle_time(self) -> None:
        """Do a little of what the start left for later: about as much as two steps run without graphs take.

        Raises EngineDeadError where the ranks are gone.
        """
        self.captures.while_idle()

    def _drain(self) -> None:
        """Commit the steps on their way, whose tokens nobody wants any more."""
        while self._submitted:
            self._collect(time.perf_counter())

    def _abandon(self, error: BaseException) -> None:
        """End every request and forget every step, as one has failed with ``error``."""
        name_culprit(error, self.blueprint.plugins, suspects(self.blueprint))
        self._is_unsettled = True
        try:
            self._abandon_submitted()
        finally:  # a second interrupt ends the waiting; scheduler and core must agree all the same
            self._submitted.clear()
            self.scheduler.abandon()

    def _settle(self) -> None:
        """Wait for what was given up."""
        if self._is_unsettled:
            self.executor.control(Synchronize())
            self._is_unsettled = False

    def _abandon_submitted(self) -> None:
        """Wait for steps that nobody wants any more, as far as they can be waited for."""
        while self._submitted:
            _, pending = self._submitted.popleft()
            with suppress(Exception):  # the error that brought us here is the one to report
                pending.result()

    def _collect(self, began: float) -> list[Request]:
        """Wait for the oldest submitted step and commit it."""
        step, pending = self._submitted.popleft()
        with self.blueprint.ctx.range("collect"):
            output = pending.result()
        before = self.scheduler.num_drawn
        advanced = self.scheduler.commit(output)
        seconds, num_drawn = time.perf_counter() - began, self.scheduler.num_drawn - before
        self._metrics.collected(seconds, num_drawn)
        self.stats.num_steps += 1
        if all(s.count == 1 or s.count == 1 + len(s.drafts) for s in step.scheduled):
            self.stats.decode_tokens += num_drawn
            self.stats.decode_seconds += seconds
        else:
            self.stats.prefill_tokens += step.num_tokens
            self.stats.prefill_seconds += seconds
        return advanced

    def abort(self, request: RequestProgress) -> None:
        """End ``request`` now."""
        assert isinstance(request, Request), "the request is another core's"
        if request.finish_reason is None:
            self.scheduler.abort(request)
            self._note_end(request)
            self._take_stock()

    def _note_end(self, request: Request) -> None:
        self.stats.num_preemptions += request.num_preemptions
        self._metrics.ended(request)

    def control(self, verb: Verb[R]) -> R:
        """Do ``verb`` now; see CoreControl."""
        return cast(R, on_core(verb, self))

    def check_idle(self, what: str) -> None:
        """Raise EngineError while there are requests; wait for steps that those which ended have left behind."""
        if self.scheduler.has_unfinished:
            raise EngineError(f"requests are under way; an engine is {what} when they have ended or been aborted")
        try:
            self._settle()
            self._drain()
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            self._take_stock()

    def _take_stock(self) -> None:
        """Note in ``stats`` what the engine holds now."""
        stats, scheduler, pool = self.stats, self.scheduler, self.scheduler.cache.pool
        stats.num_running, stats.num_waiting = scheduler.num_running, scheduler.num_waiting
        stats.cached_tokens = scheduler.num_cached_tokens
        stats.drafted_tokens, stats.accepted_tokens = scheduler.num_drafted, scheduler.num_accepted
        stats.num_pages, stats.num_free_pages = pool.num_usable, pool.num_free

    def check(self) -> None:
        """Switch kernels that were built. Raises EngineDeadError if ranks with processes of their own are gone."""
        self.executor.check()
        self._switch_kernels()

    def when_lost(self, notify: Callable[[], None]) -> None:
        """Have ``notify`` called, from another thread, when ``check`` has something to do."""
        self.executor.when_lost(notify)
        self._builds.when_ready(notify)

    def close(self) -> None:
        """Tell the plugins, end a profile that is still taken, then drop runner, caches and weights."""
        self._builds.close()
        self.executor.shutdown(deadline=5.0)


def start_executor(blueprint: Blueprint, model: Model | None = None) -> Executor:
    """Run the ranks where the config says, and wait until they are loaded."""
    if blueprint.config.topology.shares_experts:
        from hardpoint.engine.execution.ranks.lock_step import LockStepExecutor

        return LockStepExecutor(blueprint.config, lambda: _start_own(blueprint))
    return _start_own(blueprint, model)


def _start_own(blueprint: Blueprint, model: Model | None = None) -> Executor:
    """Run the ranks of this replica."""
    kind = blueprint.config.executor_kind
    if kind == "mp":  # one rank needs none of these modules
        from hardpoint.engine.execution.ranks.multiprocess_executor import MultiprocessExecutor

        return MultiprocessExecutor(blueprint)
    if kind == "ray":
        from hardpoint.engine.execution.ranks.ray_executor import RayExecutor

        return RayExecutor(blueprint)
    if kind == "torchrun":
        from hardpoint.engine.execution.ranks.torchrun_executor import TorchrunExecutor

        return TorchrunExecutor(blueprint)
    return InProcessExecutor(Worker.start(blueprint, model))
