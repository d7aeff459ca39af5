"""From a config to a model that is chosen and constructed, but holds no weights: what ``explain`` prints.

Order: plugins, platform, changes that plugins wish, the model's family and facts, the model. Constructing it asks the
selector everything that will ever be asked, and allocates nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from hardpoint.adapters.candidates import AdaptedOffer
from hardpoint.bytecode import missing_bytecode
from hardpoint.checkpoint.checkpoint import Checkpoint
from hardpoint.checkpoint.formats import open_files
from hardpoint.config import EngineConfig
from hardpoint.config.removed import check_environment
from hardpoint.conformance.certificate import Certificates
from hardpoint.context import Context, asked, load_target
from hardpoint.dtypes import dtype_of
from hardpoint.engine.absent_device import AbsentDeviceContext, AbsentDeviceSelector
from hardpoint.engine.execution.graphs.shapes import shape_rows
from hardpoint.engine.execution.runner import StepOps
from hardpoint.engine.locations import model_location
from hardpoint.engine.quantization_choice import choose_quantization, method_name
from hardpoint.kernel_calls import KernelCalls
from hardpoint.layers import CausalLM, ModelFacts
from hardpoint.metrics import EngineMetrics
from hardpoint.models.family import choose_model
from hardpoint.ops.call_names import CallNames
from hardpoint.ops.shadow_check import ShadowCheck
from hardpoint.ops.tracing import OpTracing
from hardpoint.parallel.groups import Groups
from hardpoint.parallel.topology import Coordinates
from hardpoint.plugin_host import LockFile, Offer, PluginSet, discover
from hardpoint.plugin_host.blame import blame, name_culprit
from hardpoint.plugin_host.culprits import KERNELS, Suspect, code_spans
from hardpoint.plugin_host.record import CORE
from hardpoint.profiling import Profiler
from hardpoint.selection import Plan, PlatformChoice, SelectionTable, Selector, Settings, TuningFile, preset_choice
from hardpoint.selection import choose_platform as choose
from hardpoint_plugin_api import (
    FAMILIES,
    CheckpointError,
    CheckpointTensors,
    ConfigError,
    DeviceInfo,
    DrafterWorkload,
    EngineLimits,
    Platform,
    Reason,
    SelectionError,
    StepLimits,
    UnknownNameError,
)
from hardpoint_plugin_api.elements import DEVICE_FP8

logger = logging.getLogger(__name__)

_PARSERS = ("reasoning_parser", "tool_parser")
"""Families of which a front end chooses, by template where the user says nothing; ``none`` is a choice, too."""


@dataclass(frozen=True)
class Blueprint:
    """Everything decided, nothing loaded."""

    config: EngineConfig
    checkpoint: Checkpoint
    plugins: PluginSet
    choice: PlatformChoice
    platform: Platform
    ctx: Context
    facts: ModelFacts
    model: CausalLM
    ops: StepOps
    groups: Groups
    place: Coordinates

    @property
    def folder(self) -> Path:
        """The checkpoint's folder."""
        return self.checkpoint.folder

    @property
    def table(self) -> SelectionTable:
        """The chosen implementations, platform first."""
        return SelectionTable([self.choice.plan, *self.ctx.selector.plans])


def draw(config: EngineConfig, preset: str | None = None, place: Coordinates | None = None, rank: int = 0) -> Blueprint:
    """Decide everything for ``config``, on this machine's device or on the one that ``preset`` describes.

    ``place`` says which of several ranks this is, on the device that many further. Without one, and where there are
    several, nothing will run here: the device is left alone, and all is as ``rank`` sees it.

    Where nobody asks for a block size and states are larger than pages of the platform's default size, blocks are made
    larger. Raises the errors of each part: plugins, platform, checkpoint, selection.
    """
    blueprint = _draw(config, preset, place, rank)
    ctx, config = blueprint.ctx, blueprint.config
    size = ctx.cache_users.fitting_block_size(ctx.block_size, ctx.max_model_len)
    if config.block_size is not None or size == ctx.block_size:
        return blueprint
    try:
        larger = _draw(config.with_block_size(size), preset, place, rank)
    except SelectionError as error:
        logger.warning("pages of %d tokens are padded to the size of states: with %d, %s", ctx.block_size, size, error)
        return blueprint
    logger.info("blocks have %d tokens instead of %d: so pages are as large as states", size, ctx.block_size)
    return larger


def _draw(config: EngineConfig, preset: str | None, place: Coordinates | None, rank: int) -> Blueprint:
    checkpoint = Checkpoint.read(model_location(config))
    lock = LockFile.read(Path(config.plugins_lock_file)) if config.plugins_locked else None
    plugins = discover(config.plugins, lock)
    for warning in check_environment(os.environ, plugins.config_keys()):
        logger.warning("%s", warning)
    config = config.with_plugin_keys(plugins.config_keys())
    _check_slots(config, plugins)
    method = method_name(config, checkpoint, plugins)
    settings = _settings(config, method)
    choice = choose(plugins, settings) if preset is None else preset_choice(plugins, settings, preset)
    for name in config.plugins or ():
        plugins.activate(name)
    plugins.activate(choice.plan.offer.plugin)
    config, notes = config.with_changes(plugins.configure(config.selection_view(), choice.device))
    for note in notes:
        logger.info(note)
    with blame(choice.plan.offer):
        platform = choice.platform(choice.device, config.plugin_config.get(choice.plan.offer.plugin))
    if preset is None:  # as the settings have it: other kernels serve at another level of instruction sets
        choice = replace(choice, device=platform.info)
    tuning = None
    if config.tuning_file:
        context = None
        if preset is None:  # all ranks choose as the first of a host does
            platform.share_host(0, place.local_ranks if place else config.topology.local_size)
            context = platform.tuning_context()
        tuning = TuningFile.read(Path(config.tuning_file)).for_engine(choice.device, config.tuning_file, context)
    selector = (Selector if preset is None else AbsentDeviceSelector)(
        plugins,
        choice.device,
        _settings(config, method),
        tuning,
        load=lambda offer: load_target(plugins, offer),
        refuses=_refusals(config, plugins, choice),
        asked=config.plugins or (),
        postpones=preset is None and not (config.wait_for_kernels or config.topology.shares_experts),
    )
    chosen = choose_model(
        checkpoint,
        plugins,
        lambda workload: selector.select(asked(config, workload)),
        lambda offer: load_target(plugins, offer),
        config.topology,
    )
    facts = chosen.args.facts
    dtype = _dtype(config, checkpoint, platform)
    metrics = EngineMetrics()
    runs_here = preset is None and (place is not None or config.topology.world == 1)
    if preset is None:
        _check_devices(config, platform)
    here = place or config.topology.on_this_host(rank)
    groups = Groups.at(here)
    device = _activate(platform, choice, config, here) if runs_here else torch.device("meta")
    ctx = (Context if preset is None else AbsentDeviceContext)(
        device=choice.device,
        torch_device=device,
        dtype=dtype_of(dtype),
        config=config,
        plugins=plugins,
        selector=selector,
        kv_dtype=_cache_dtype(config, dtype, choice.device),
        block_size=config.block_size or platform.default_block_size(),
        limits=_limits(config, facts, platform, runs_here),
        engine_metrics=metrics,
        profiler=Profiler(platform),
        shadow=ShadowCheck(config.shadow_check, config.seed, metrics) if config.shadow_check else None,
        kernel_calls=KernelCalls(choice.plan.offer.plugin, is_on=runs_here and not config.enforce_eager),
        call_names=CallNames(platform.synchronize) if config.blame_ops and runs_here else None,
        op_tracing=OpTracing() if config.compiles and runs_here else None,
        parallel=groups.parallel(platform.collectives, here, config.step_timeout),
        headers=partial(_headers, config, checkpoint),
    )
    if config.num_drafts:
        ctx.select(DrafterWorkload(num_drafts=config.num_drafts))
    ctx = replace(ctx, quantization=choose_quantization(ctx, checkpoint, method))
    groups.select(ctx)
    try:
        model = chosen.build(ctx)
        ops = StepOps.bind(ctx)
    except Exception as error:
        name_culprit(error, plugins, _serving(plugins, selector.plans) if preset is None else ())
        raise
    if here.rank == 0:
        _warn_of_unasked(config, selector)
        if runs_here and (problem := missing_bytecode()):
            logger.warning("%s", problem)
    return Blueprint(config, checkpoint, plugins, choice, platform, ctx, facts, model, ops, groups, here)


def _headers(config: EngineConfig, checkpoint: Checkpoint) -> CheckpointTensors | None:
    """The checkpoint's tensors; None where no files say what they weigh."""
    if config.load_format == "random":
        return None
    try:
        return open_files(checkpoint.folder).tensors()
    except CheckpointError:  # loading says what is wrong with them, and `explain` needs none
        return None


def _refusals(config: EngineConfig, plugins: PluginSet, choice: PlatformChoice) -> Callable[[Offer], Reason | None]:
    """Why ``--deny`` or ``--require-certified`` refuses an offer.

    Raises SelectionError where the latter refuses the platform itself.
    """

    def denied(offer: Offer) -> Reason | None:
        if not offer.is_among(config.deny):
            return None
        return Reason("denied", f"it is on the deny list (--deny {offer.choice})")

    if not config.require_certified:
        return denied
    certificates = Certificates(plugins, config)
    if refused := certificates.refusal(choice.plan.offer, choice.device):
        name = choice.plan.offer.contribution.name
        raise SelectionError(f"--require-certified: platform {name} cannot be used", {name: [refused]})
    return lambda offer: denied(offer) or certificates.refusal(offer, choice.device)


def suspects(blueprint: Blueprint) -> tuple[Suspect, ...]:
    """The kernels of plugins that serve this engine, and where their code is."""
    return _serving(blueprint.plugins, blueprint.ctx.selector.plans)


def _serving(plugins: PluginSet, plans: Iterable[Plan]) -> tuple[Suspect, ...]:
    uses: dict[Offer, dict[str, None]] = {}
    for plan in plans:
        for entry in plan.entries:
            plain = entry.offer.inner if isinstance(entry.offer, AdaptedOffer) else entry.offer
            if plain.contribution.family in KERNELS and plain.plugin != CORE:
                uses.setdefault(plain, {})[plan.workload.key()] = None
    folders = {record.name: record.folder for record in plugins.records}
    found = []
    for offer, workloads in uses.items():
        slot, _, name = offer.choice.partition("=")
        spans, folder = code_spans(plugins.load(offer)), folders[offer.plugin]
        own = tuple(span for span in spans if folder is None or Path(span[0]).is_relative_to(folder))
        found.append(Suspect(offer.plugin, slot, name, own, tuple(workloads)))
    return tuple(found)


def _activate(platform: Platform, choice: PlatformChoice, config: EngineConfig, place: Coordinates) -> torch.device:
    """The device of a rank. Ranks of a platform whose device is the host itself share it."""
    with blame(choice.plan.offer):
        platform.share_host(place.local_rank, place.local_ranks)
        return platform.activate(config.device_index + (place.local_rank if platform.info.accelerator else 0))


def _settings(config: EngineConfig, quantization_method: str | None) -> Settings:
    return Settings(config.choices, config.custom_ops, frozenset(config.use), quantization_method is not None)


def _check_devices(config: EngineConfig, platform: Platform) -> None:
    """Raise ConfigError for more ranks than this host has devices for."""
    info, first = platform.info, config.device_index
    several = config.executor_kind == "mp" or (config.topology.data > 1 and config.executor_kind != "torchrun")
    if info.accelerator and several and first + config.topology.local_size > info.count:
        beyond = f" from device {first} on" if first else ""
        raise ConfigError(
            f"{config.topology}: every rank needs a device of its own, and platform "
            f"{platform.name} has {info.count - first} here{beyond} ({info.name})"
        )


def _check_slots(config: EngineConfig, plugins: PluginSet) -> None:
    """Refuse choices of, and for, what does not exist: nothing may ever ask for it."""
    for choice in config.deny:
        slot, _, name = choice.partition("=")
        family_name, _, of_name = slot.partition(".")
        names = {offer.contribution.name for offer in plugins.offers(family_name, of_name or None)}
        if name not in names:
            unused = plugins.told_unused(family_name, of_name or None, name)
            raise UnknownNameError(f"{slot} implementation", name, names, _sentences("It stands in --deny.", unused))
    for family in FAMILIES.values():
        known = {str(offer.contribution.of) for offer in plugins.offers(family.name)} if family.has_of else set()
        chosen = {slot.partition(".")[2] for slot in config.use if slot.startswith(f"{family.name}.")}
        if family.name == "op":
            chosen |= {name[1:] for name in config.custom_ops if name[0] in "+-"}
        for of in sorted(chosen - known):
            unused = plugins.told_unused(family.name, of)
            raise UnknownNameError(family.name, of, known, _sentences("It stands in --use or --custom-ops.", unused))
    settings = _settings(config, None)
    for slot in config.choices:
        family_name, _, of_name = slot.partition(".")
        wanted = settings.choice(family_name, of_name or None)
        names = {offer.contribution.name for offer in plugins.offers(family_name, of_name or None)}
        names |= {"none"} if family_name in _PARSERS else set()
        # A platform is looked for elsewhere; "NAME+padN" adapts NAME, and is the selector's to know.
        if wanted and family_name != "platform" and (name := wanted.name.partition("+")[0]) not in names:
            title = slot.replace(".", " ", 1)
            hint = _sentences(f"Asked for by {wanted.flag}.", plugins.told_unused(family_name, of_name or None, name))
            raise UnknownNameError(f"{title} implementation", wanted.name, names, hint)


def _sentences(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _warn_of_unasked(config: EngineConfig, selector: Selector) -> None:
    """Name the choices that decide nothing, because nothing of this engine asked for them."""
    asked = {
        (plan.workload.family, of, offer.contribution.name)
        for plan in selector.plans
        for of in (None, plan.workload.of)
        for offer in plan.candidates
    }
    settings = _settings(config, None)
    for slot in config.choices:
        family, _, of = slot.partition(".")
        choice = settings.choice(family, of or None)
        if choice and family not in ("platform", *_PARSERS) and (family, of or None, choice.name) not in asked:
            what = " ".join(filter(None, (family, of)))
            logger.warning("%s %s has no effect: nothing in this model asks for %s", choice.flag, choice.name, what)


def _dtype(config: EngineConfig, checkpoint: Checkpoint, platform: Platform) -> str:
    if config.dtype == "auto":
        return platform.default_dtype(checkpoint.dtype)
    if config.dtype not in platform.info.dtypes:
        supported = ", ".join(sorted(platform.info.dtypes))
        raise SelectionError(f"--dtype {config.dtype}: {platform.info.name} supports {supported}")
    return config.dtype


def _cache_dtype(config: EngineConfig, dtype: str, device: DeviceInfo) -> str:
    if config.kv_cache_dtype == "auto":
        return dtype
    if config.kv_cache_dtype == DEVICE_FP8:
        return device.fp8.dtype if device.fp8 else "float8_e4m3fn"
    return config.kv_cache_dtype


def _limits(config: EngineConfig, facts: ModelFacts, platform: Platform, runs_here: bool) -> EngineLimits:
    """The largest steps, as padding makes them: to the platform's buckets, and to the batches that it prepares."""
    wanted = StepLimits(max_tokens=config.max_num_batched_tokens, max_requests=config.max_num_seqs)
    limits = wanted.intersect(platform.step_limits())
    assert limits.max_tokens is not None
    assert limits.max_requests is not None
    tokens, requests = limits.max_tokens, limits.max_requests
    if limits.token_buckets:
        tokens = next((size for size in limits.token_buckets if size >= tokens), max(limits.token_buckets))
    if runs_here and not config.enforce_eager:  # a graph engine may need the device
        rows = shape_rows(platform.graph_engine(), limits, config.num_drafts)
        requests = max([requests, *(row.sizes[-1] for row in rows if row.queries and row.listed and row.sizes)])
    return EngineLimits(tokens, requests, _max_model_len(config, facts))


def _max_model_len(config: EngineConfig, facts: ModelFacts) -> int:
    if config.max_model_len is None:
        return facts.max_positions
    if config.max_model_len > facts.most_positions:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is beyond the {facts.most_positions} positions that the model was "
            f"made for ({facts.limit}); give at most {facts.most_positions}"
        )
    return config.max_model_len
