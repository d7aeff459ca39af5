"""One rank at work: its weights, resources, cache and runner, wherever it runs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Self, cast

from hardpoint.cache_users import united_retentions
from hardpoint.context import Context
from hardpoint.engine.blueprint import Blueprint
from hardpoint.engine.execution.adapter_weights import AdapterWeights
from hardpoint.engine.execution.compile_ahead import AheadCompiler
from hardpoint.engine.execution.forward import Forward, Model
from hardpoint.engine.execution.graphs.graphs import Graphs
from hardpoint.engine.execution.graphs.replay_check import ReplayError
from hardpoint.engine.execution.graphs.shapes import ShapeRow
from hardpoint.engine.execution.memory.cache_memory import CacheMemory, page_bytes, require_free
from hardpoint.engine.execution.memory.holdings import Holder, Holdings, is_want_of_memory
from hardpoint.engine.execution.memory.step_memory import StepMemory
from hardpoint.engine.execution.memory.tagged_memory import TaggedMemory
from hardpoint.engine.execution.routed_experts import RoutedExpertsReader
from hardpoint.engine.execution.runner import Runner, RunnerArgs
from hardpoint.engine.execution.sampling.logits_state import LogitsState
from hardpoint.engine.execution.sampling.sampler import Sampler
from hardpoint.engine.execution.sampling.trial import sampling_bytes
from hardpoint.engine.execution.speculation import Speculation
from hardpoint.engine.execution.stage import stage_of
from hardpoint.engine.execution.weights import ModelWeights
from hardpoint.engine.scheduling.paged_cache import CacheGeometry
from hardpoint.experts.balance import balanced_experts
from hardpoint.layers.routed_experts import recorders
from hardpoint.parallel.control import ControlGroup
from hardpoint.startup_times import mark
from hardpoint_plugin_api import (
    All2AllWorkload,
    CapacityError,
    ConfigError,
    Drafter,
    DrafterArgs,
    DrafterWorkload,
    EagerGraphEngine,
    EngineInfo,
    MemoryTag,
    StepLimits,
)

if TYPE_CHECKING:
    from hardpoint.engine.execution.kernel_switch import PreparedSwitch
    from hardpoint.parallel.process_group import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerFacts:
    """Facts of the ranks that the scheduler needs: pages of their caches and how sequences lie in them, the limits of
    steps, and the longest sequence, in tokens. ``captured`` are the shapes of captured steps, on the last stage."""

    num_pages: int
    geometry: CacheGeometry
    limits: StepLimits
    max_model_len: int
    captured: tuple[ShapeRow, ...] = ()


@dataclass
class Worker:
    """Built by ``start``; ``close`` frees what it holds. ``facts`` are the same on every rank."""

    blueprint: Blueprint
    runner: Runner
    graphs: Graphs
    holdings: Holdings
    facts: WorkerFacts
    weights: ModelWeights
    adapters: AdapterWeights
    routed_experts: RoutedExpertsReader
    _info: EngineInfo
    _controls: tuple[ControlGroup, ControlGroup]
    prepared_switch: PreparedSwitch | None = None

    @classmethod
    def start(
        cls,
        blueprint: Blueprint,
        model: Model | None = None,
        control: ControlGroup | None = None,
        store: Store | None = None,
    ) -> Self:
        """Join the groups of ranks, load the weights, size the cache, construct the runner.

        ``control`` and ``store`` are given where there are other ranks. ``model`` runs in place of the blueprint's own:
        for measuring the host. Raises CheckpointError and CapacityError, EngineError where another rank does, and
        ReplayError for kernels that others should take the place of.
        """
        ctx, platform, config = blueprint.ctx, blueprint.platform, blueprint.config
        control = control or ControlGroup()
        with control.together():
            ctx.resources.allocate_collective(ctx.torch_device)
        of_stage = control
        if store is not None:
            blueprint.groups.open(store, control)
            of_stage = control.of_stage(blueprint.place, store, float(config.core_start_timeout))
        with control.together():
            retentions = tuple(group.retention for group in ctx.cache_users.cache_groups())
            own = step_limits(blueprint), retentions, ctx.block_size, flags_without_experts(ctx)
        everyone = control.exchange(own)  # stages have layers of their own
        limits = reduce(StepLimits.intersect, (limits for limits, _, _, _ in everyone))
        ctx.cache_users.share_groups(united_retentions(retentions for _, retentions, _, _ in everyone))
        idle = frozenset.intersection(*(flags for _, _, _, flags in everyone))
        if idle == {_EXPERT_PARALLEL} and not config.topology.shares_experts:
            logger.warning("%s has no effect: %s has no mixture of experts", _EXPERT_PARALLEL, config.model)
        elif idle:
            raise ConfigError(f"{', '.join(sorted(idle))}: {config.model} has no mixture of experts; leave it out")
        if len(sizes := {size for _, _, size, _ in everyone}) > 1:
            raise ConfigError(f"ranks chose blocks of {sorted(sizes)} tokens; set --block-size {max(sizes)}")
        assert limits.max_tokens is not None
        assert limits.max_requests is not None
        memory = TaggedMemory(platform.memory, ctx.torch_device)
        weights = ModelWeights(blueprint.model, blueprint.checkpoint, ctx)
        with control.together():
            with memory.pool("weights"):
                weights.load()
            mark("weights")
            if config.compiles and not blueprint.model.compile_pass():
                logger.warning("--compile has no effect: this model runs by Hardpoint's own code, in fused kernels")
            adapters = AdapterWeights(blueprint.model, ctx)
            with memory.pool("adapters"):
                adapters.allocate()
            vocab_size = blueprint.facts.vocab_size
            logits_state = LogitsState(ctx.resources, limits.max_requests, vocab_size, ctx.max_model_len)
            speculation = start_speculation(blueprint, limits.max_requests)
        with control.together(), memory.pool("resources"):
            ctx.resources.allocate(ctx.torch_device)
        stage = stage_of(ctx.parallel.pp, blueprint.facts.hidden_size, ctx.dtype, ctx.torch_device)
        sampler = Sampler(blueprint.ops.sampling, logits_state, ctx.torch_device)
        compiler = AheadCompiler(ctx, platform)
        with control.together():
            reserved = bytes_to_sample(blueprint, compiler, sampler, limits) if stage.draws else 0
            graph_engine = EagerGraphEngine if config.enforce_eager else platform.graph_engine
            longest = min(ctx.max_model_len, limits.max_context or ctx.max_model_len)
            groups = ctx.cache_users.cache_groups()
            geometry = CacheGeometry(ctx.block_size, tuple(group.retention for group in groups), limits.max_tokens)
            page = page_bytes(ctx.cache_users, ctx.block_size)
            if config.kv_cache_memory is not None:  # all of it, which prefixes can fill whatever runs
                require_free(config.kv_cache_memory, reserved, platform.memory, ctx.device.name)
        if config.kv_cache_memory is not None:
            budget = config.kv_cache_memory
        else:
            # Not ``together``: its steps are collective. A rank that fails there says so at once, and the others, which
            # wait for it within a collective, are ended.
            steps = StepMemory(ctx, platform, compiler, blueprint.model, stage, limits, geometry, vocab_size, reserved)
            budget = steps.cache_budget(graph_engine())
            # All sequences at their longest, one block each still being freed.
            enough = limits.max_requests * (geometry.pages_for(longest) + len(groups)) + 1
            budget = min(budget, enough * page)
        budget = min(budget, (control.least(budget // page) + 1) * page - 1)
        with control.together(), memory.pool("kv"):
            cache = CacheMemory(ctx.cache_users, geometry, budget, ctx.torch_device)
        mark("cache")
        max_model_len = cache.longest_sequence(longest, config.max_model_len is not None)
        forward = Forward(model or blueprint.model, ctx.cache_users, cache.views)
        graphs = Graphs(
            ctx,
            graph_engine,
            forward,
            sampler,
            limits,
            lambda: memory.pool("graphs"),
            of_stage.exchange,
            vocab_size,
            stage,
        )
        if graphs.tell_nbytes:
            memory.know("graphs", lambda: graphs.nbytes)
        runner = Runner(
            RunnerArgs(
                ctx=ctx,
                platform=platform,
                forward=forward,
                graphs=graphs,
                stage=stage,
                sampler=sampler,
                ops=blueprint.ops,
                vocab_size=vocab_size,
                num_slots=limits.max_requests,
                max_step_tokens=limits.max_tokens,
                token_buckets=limits.token_buckets,
                speculation=speculation,
            )
        )
        read: dict[MemoryTag, Holder] = {"weights": weights}
        if config.enable_lora:
            read["adapters"] = adapters
        holdings = Holdings(memory, read, {"resources": ctx.resources, "kv": cache})
        if not all(of_stage.exchange(compiler.has_met_all)):
            graphs.compile_ahead(compiler.compile)
        graphs.prepare_ahead(cache.num_pages - 1)
        mark("graphs")
        found = control.exchange(graphs.check.culprits)  # the same on every rank of a stage
        culprits = list({culprit.choice: culprit for each in found for culprit in each}.values())
        if culprits and config.executor_kind != "torchrun":  # whose processes can be started once
            graphs.drop()
            blueprint.groups.close()
            holdings.drop_all()
            raise ReplayError(culprits)
        platform.memory.trim()
        choices = tuple(plan.as_choice for plan in ctx.selector.plans)
        info = EngineInfo(config.model, ctx.device, blueprint.table.digest, blueprint.place.rank, choices)
        blueprint.plugins.engine_started(info)
        logger.info("memory: %s", memory.report())
        *_, captured = control.exchange(graphs.rows)
        facts = WorkerFacts(cache.num_pages, geometry, limits, max_model_len, captured)
        routed = RoutedExpertsReader(ctx.cache_users, cache.views)
        return cls(blueprint, runner, graphs, holdings, facts, weights, adapters, routed, info, (control, of_stage))

    def close(self) -> None:
        """Tell the plugins, end a profile that is still taken, leave the groups, drop caches and weights."""
        self.blueprint.plugins.engine_stopping(self._info)
        self.blueprint.ctx.profiler.close()
        self.graphs.drop()  # some collective libraries wait for recordings of their calls to go
        self.blueprint.groups.close()
        for control in self._controls:
            control.close()
        self.holdings.drop_all()


_EXPERT_PARALLEL = "--enable-expert-parallel"


def flags_without_experts(ctx: Context) -> frozenset[str]:
    """The flags for mixtures of experts that are set, where no layer of this rank is one."""
    config = ctx.config
    has_experts = any(isinstance(plan.workload, All2AllWorkload) for plan in ctx.selector.plans)
    asked = {
        _EXPERT_PARALLEL: config.topology.expert > 1 and not has_experts,
        "--enable-return-routed-experts": config.enable_return_routed_experts and not recorders(ctx.cache_users.users),
        "--enable-eplb": config.enable_eplb and not balanced_experts(ctx),
    }
    return frozenset(flag for flag, is_idle in asked.items() if is_idle)


def start_speculation(blueprint: Blueprint, num_slots: int) -> Speculation | None:
    """Construct the drafter that was selected; None where the engine does not speculate."""
    ctx, config = blueprint.ctx, blueprint.config
    if not config.num_drafts:
        return None
    offer = ctx.select(DrafterWorkload(num_drafts=config.num_drafts)).offer
    drafter_class = cast(type[Drafter], ctx.load(offer))
    args = DrafterArgs(
        num_drafts=config.num_drafts,
        vocab_size=blueprint.facts.vocab_size,
        prompt_lookup_min=config.prompt_lookup_min,
        prompt_lookup_max=config.prompt_lookup_max,
    )
    drafter = drafter_class(ctx.for_plugin(offer.plugin), args)
    return Speculation(drafter, ctx.resources, num_slots, ctx.max_model_len, ctx.torch_device)


def bytes_to_sample(blueprint: Blueprint, compiler: AheadCompiler, sampler: Sampler, limits: StepLimits) -> int:
    """Bytes of an accelerator that a step's sampling takes at most. 0 on a host, whose memory is never all the cache's.

    Raises CapacityError where they are not free.
    """
    ctx, num_drafts = blueprint.ctx, blueprint.config.num_drafts
    assert limits.max_requests is not None
    assert limits.max_tokens is not None
    if not ctx.device.accelerator:
        return 0
    num_requests = max(1, min(limits.max_requests, limits.max_tokens // (1 + num_drafts)))
    vocab_size, platform = blueprint.facts.vocab_size, blueprint.platform
    trial = partial(sampling_bytes, sampler, platform.memory, num_requests, num_drafts, vocab_size, ctx.dtype)
    try:
        return compiler.run(trial)
    except Exception as error:
        if not is_want_of_memory(error):
            raise
        raise CapacityError(
            f"sampling for {num_requests} requests does not fit {ctx.device.name} beside the weights: {error}; "
            "lower --max-num-seqs"
        ) from error


def planners_of_exact_lengths(blueprint: Blueprint) -> tuple[str, ...]:
    """The parts of the model that plan a step by the exact lengths of its requests, by name."""
    planners = (user.planner for user in blueprint.ctx.cache_users.users)
    return tuple(sorted({type(planner).__name__ for planner in planners if planner.exact_lengths}))


def step_limits(blueprint: Blueprint) -> StepLimits:
    """Limits of a step by the user, the platform and every attention backend; no step is larger than all buckets."""
    config = blueprint.config
    limits = StepLimits(max_tokens=config.max_num_batched_tokens, max_requests=config.max_num_seqs)
    limits = limits.intersect(blueprint.platform.step_limits())
    for user in blueprint.ctx.cache_users.users:
        limits = limits.intersect(user.planner.step_limits())
    longest, wanted = limits.max_context, config.max_model_len
    if longest is not None and wanted is not None and wanted > longest:
        raise ConfigError(
            f"--max-model-len {wanted}: {blueprint.ctx.device.name}, or an attention backend chosen for it, serves "
            f"sequences of at most {longest} tokens"
        )
    if limits.token_buckets:
        limits = limits.intersect(StepLimits(max_tokens=max(limits.token_buckets)))
    states = (user for user in blueprint.ctx.cache_users.users if user.spec.retention.per_sequence)
    state = next((user for user in states if not user.planner.keeps_drafts), None)
    if config.num_drafts and state is not None:
        raise ConfigError(
            f"--speculative-method: layer {state.path} keeps a state, which cannot go back to what it was before a "
            f"wrong draft ({type(state.planner).__name__}.keeps_drafts is False); leave it out"
        )
    if config.num_drafts >= blueprint.ctx.max_model_len:
        raise ConfigError(
            f"--num-speculative-tokens {config.num_drafts}: sequences have at most {blueprint.ctx.max_model_len} "
            "tokens (--max-model-len); set it lower"
        )
    if config.num_drafts and not limits.mixed_phases:
        raise ConfigError(
            "--speculative-method: drafts are verified as prompts are read, beside decodes, and "
            f"{blueprint.ctx.device.name}, or an attention backend chosen for it, takes prompts and decodes in steps "
            "of their own; leave it out"
        )
    assert limits.max_tokens is not None
    if limits.max_tokens < limits.chunk_multiple:
        raise ConfigError(
            f"steps hold at most {limits.max_tokens} tokens (--max-num-batched-tokens {config.max_num_batched_tokens}) "
            f"and {blueprint.ctx.device.name}, or an attention backend chosen for it, reads long prompts in multiples "
            f"of {limits.chunk_multiple}; set --max-num-batched-tokens to {limits.chunk_multiple} or more"
        )
    return limits
