"""The build context: handed to everything that an engine constructs. Nothing is found in a global.

It implements hardpoint_plugin_api.BuildContext and adds what core's own layers need: selection, loading, and the list
of attention layers, which the engine turns into caches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch

from hardpoint.attention.groups import AttentionLayers
from hardpoint.config import EngineConfig
from hardpoint.plugins import Offer, PluginSet
from hardpoint.resources import EngineMetrics, EngineResources
from hardpoint.selection import Plan, Selector
from hardpoint.selection.adapters import AdaptedOffer
from hardpoint_plugin_api import ConfigValue, DeviceInfo, Workload

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """One engine's device, settings and choices, at one place (``path``) of the model under construction."""

    device: DeviceInfo
    torch_device: torch.device
    dtype: torch.dtype
    config: EngineConfig
    plugins: PluginSet
    selector: Selector
    kv_dtype: str
    block_size: int
    max_model_len: int
    path: str = ""
    resources: EngineResources = field(default_factory=EngineResources)
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    attention_layers: AttentionLayers = field(default_factory=AttentionLayers)
    _shared: dict[Hashable, Any] = field(default_factory=dict)

    def child(self, name: str) -> Context:
        """The same context, one path element deeper."""
        return replace(self, path=f"{self.path}.{name}" if self.path else name)

    def select(self, workload: Workload) -> Plan:
        """Ask the selector; see Selector.select."""
        return self.selector.select(workload)

    def load(self, offer: Offer) -> object:
        """Import an offer's target, wrapped where the offer is a generated adapter. Raises PluginLoadError."""
        return load_target(self.plugins, offer)

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the object that this engine's layers share under ``key``, made by the first that asks."""
        if key not in self._shared:
            self._shared[key] = make()
        return cast(T, self._shared[key])

    def plugin_config(self, plugin: str) -> Mapping[str, ConfigValue]:
        """The settings of one plugin's section, defaults filled in."""
        return self.config.plugin_config.get(plugin, {})


def load_target(plugins: PluginSet, offer: Offer) -> object:
    """Import an offer's target; a generated adapter wraps what it adapts."""
    if isinstance(offer, AdaptedOffer):
        return offer.adapt(plugins.load(offer.inner))
    return plugins.load(offer)
