"""Hook specifications (pluggy). A plugin's module may implement any of them; all are optional.

Signatures are verified when the plugin is registered. An implementation may take fewer arguments than the hook offers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pluggy

from hardpoint_plugin_api.device import DeviceInfo

PROJECT = "hardpoint"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class ConfigChange:
    """A change to one config key that a plugin asks for, with its reason; logged and applied by the engine.

    A key that the user set is never changed; the wish is logged.
    """

    key: str
    value: object
    reason: str


@dataclass(frozen=True)
class EngineInfo:
    """What the lifecycle hooks are told of an engine."""

    model: str
    device: DeviceInfo
    table_digest: str


class HookSpecs:
    """Every hook there is."""

    @hookspec
    def hardpoint_configure(self, config: Mapping[str, object], device: DeviceInfo) -> list[ConfigChange]:  # type: ignore[empty-body]  # a specification
        """Return wished changes to the config, once the platform is known and before anything is selected."""

    @hookspec
    def hardpoint_conformance(self) -> list[object]:  # type: ignore[empty-body]  # a specification
        """Return generators of conformance trials (``hardpoint.conformance.generators.Generator``).

        Called by the conformance kit alone, for families, ops and layers that this plugin brought into being.
        """

    @hookspec
    def hardpoint_engine_started(self, engine: EngineInfo) -> None:
        """An engine has loaded its model and is about to take its first request."""

    @hookspec
    def hardpoint_engine_stopping(self, engine: EngineInfo) -> None:
        """An engine takes no more requests; its memory is freed after this returns."""
