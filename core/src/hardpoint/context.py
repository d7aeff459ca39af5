"""The build context: handed to everything that an engine constructs. Nothing is found in a global.

It implements hardpoint_plugin_api.BuildContext and adds what core's own layers need: selection, loading, and the list
of attention layers, which the engine turns into caches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from hardpoint.adapters.candidates import AdaptedOffer
from hardpoint.cache_users import ModelCaches
from hardpoint.checkpoint.reading import Address
from hardpoint.config import EngineConfig
from hardpoint.kernel_calls import KernelCalls
from hardpoint.metrics import EngineMetrics, PluginMetrics
from hardpoint.ops.call_names import CallNames
from hardpoint.ops.shadow_check import ShadowCheck
from hardpoint.ops.tracing import OpTracing
from hardpoint.parallel.groups import Group, alone
from hardpoint.plugin_host import Offer, PluginSet
from hardpoint.plugin_host.record import CORE
from hardpoint.profiling import NO_RANGE, Profiler
from hardpoint.quantization.assignment import Quantization
from hardpoint.resources import EngineResources
from hardpoint.selection import Plan, Selector
from hardpoint.selection.switches import KernelSwitches
from hardpoint_plugin_api import (
    FAMILIES,
    CheckpointTensors,
    ConfigError,
    ConfigValue,
    DeviceInfo,
    EngineLimits,
    Feature,
    GroupMember,
    Parallel,
    RankGroup,
    Workload,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """One engine's device, settings and choices, at one place (``path``) of the model under construction.

    ``plugin`` is whose code gets it: metrics and ranges that it declares carry that name. ``headers`` returns the
    checkpoint's tensors, None where it has none.
    """

    device: DeviceInfo
    torch_device: torch.device
    dtype: torch.dtype
    config: EngineConfig
    plugins: PluginSet
    selector: Selector
    kv_dtype: str
    block_size: int
    limits: EngineLimits
    path: str = ""
    plugin: str = CORE
    resources: EngineResources = field(default_factory=EngineResources)
    engine_metrics: EngineMetrics = field(default_factory=EngineMetrics)
    profiler: Profiler = field(default_factory=Profiler)
    shadow: ShadowCheck | None = None
    call_names: CallNames | None = None
    op_tracing: OpTracing | None = None
    kernel_calls: KernelCalls = field(default_factory=lambda: KernelCalls(is_on=False))
    parallel: Parallel = field(default_factory=alone)
    headers: Callable[[], CheckpointTensors | None] = lambda: None
    cache_users: ModelCaches = field(default_factory=ModelCaches)
    switches: KernelSwitches = field(default_factory=KernelSwitches)
    quantization: Quantization = field(default_factory=Quantization)
    _shared: dict[Hashable, Any] = field(default_factory=dict)

    def child(self, name: str) -> Context:
        """The same context, one path element deeper."""
        return replace(self, path=f"{self.path}.{name}" if self.path else name)

    def for_model(self, names: Mapping[str, Address | None]) -> Context:
        """The same context for a model whose tensors have these names in checkpoints; see Quantization.for_model."""
        return replace(self, quantization=self.quantization.for_model(names))

    def for_plugin(self, plugin: str) -> Context:
        """The same context, as code of ``plugin`` gets it."""
        return replace(self, plugin=plugin)

    @property
    def max_model_len(self) -> int:
        """The most tokens of one request."""
        return self.limits.max_model_len

    @property
    def group_features(self) -> frozenset[Feature]:
        """Features that every workload of a group of ranks has."""
        return frozenset(() if self.parallel.on_one_host else {Feature.SEVERAL_HOSTS})

    @property
    def metrics(self) -> PluginMetrics:
        """Where metrics are declared."""
        return self.engine_metrics.for_plugin(self.plugin)

    @property
    def tuning_folders(self) -> Sequence[Path]:
        """Folders with tuning tables: that of --tuning-tables, then that of the plugin whose platform the device is of.

        A plugin's is the folder ``tuning`` beside its manifest. Raises ConfigError where the user's is none.
        """
        return (*_users_folder(self.config.tuning_tables), *self.plugins.tuning_folders(self.device.platform))

    def range(self, name: str) -> AbstractContextManager[None]:
        """Mark what runs inside, as ``hardpoint.name`` or ``plugin.name``, where a profile is taken."""
        if not self.profiler.is_on:
            return NO_RANGE
        return self.profiler.range(f"{'hardpoint' if self.plugin == CORE else self.plugin}.{name}")

    def select(self, workload: Workload, *, binding: bool = True) -> Plan:
        """Ask the selector, see Selector.select, for ``workload`` as ``asked``."""
        return self.selector.select(asked(self.config, workload), binding=binding)

    def load(self, offer: Offer) -> object:
        """Import an offer's target, wrapped where the offer is a generated adapter. Raises PluginLoadError."""
        return load_target(self.plugins, offer)

    def adopt(self, offer: Offer, member: GroupMember, group: RankGroup | None = None) -> None:
        """Have ``member``, which ``offer`` made, join ``group`` when that is joined; by default that of all ranks."""
        cast(Group, group or self.parallel.tp).adopt(offer, member)

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the object that this engine's layers share under ``key``, made by the first that asks."""
        if key not in self._shared:
            self._shared[key] = make()
        return cast(T, self._shared[key])

    def plugin_config(self, plugin: str) -> Mapping[str, ConfigValue]:
        """The settings of one plugin's section, defaults filled in."""
        return self.config.plugin_config.get(plugin, {})


def _users_folder(name: str | None) -> list[Path]:
    if name is not None and not Path(name).is_dir():
        raise ConfigError(f"--tuning-tables {name}: there is no such folder; give one that holds tuning tables")
    return [] if name is None else [Path(name)]


def asked(config: EngineConfig, workload: Workload) -> Workload:
    """``workload`` and what the config asks of all that computes."""
    if config.batch_invariant and FAMILIES[workload.family].numeric:
        return replace(workload, features=workload.features | {Feature.BATCH_INVARIANT})
    return workload


def load_target(plugins: PluginSet, offer: Offer) -> object:
    """Import an offer's target; a generated adapter wraps what it adapts."""
    if isinstance(offer, AdaptedOffer):
        return offer.adapt(plugins.load(offer.inner))
    return plugins.load(offer)
