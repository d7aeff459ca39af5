"""Hook specifications (pluggy). A plugin's module may implement any of them; all are optional.

Signatures are checked when the plugin is registered. An implementation may take fewer arguments than the hook offers.
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
    """A change of one setting that a plugin asks for, with its reason. The engine logs and applies it.

    A setting that the user gave keeps its value; the request is logged.
    """

    key: str
    value: object
    reason: str


@dataclass(frozen=True)
class EngineInfo:
    """The arguments of the lifecycle hooks: facts about an engine."""

    model: str
    device: DeviceInfo
    table_digest: str


class HookSpecs:
    """All hooks."""

    @hookspec
    def hardpoint_configure(self, config: Mapping[str, object], device: DeviceInfo) -> list[ConfigChange]:  # type: ignore[empty-body]  # a specification
        """Return changes of settings. Called when the platform is known, before anything is selected."""

    @hookspec
    def hardpoint_conformance(self) -> list[object]:  # type: ignore[empty-body]  # a specification
        """Return generators of conformance trials (``hardpoint.conformance.generators.Generator``).

        Called only by the conformance kit, for families, ops and layers that this plugin defines.
        """

    @hookspec
    def hardpoint_engine_started(self, engine: EngineInfo) -> None:
        """Called when an engine has loaded its model, before its first request."""

    @hookspec
    def hardpoint_engine_stopping(self, engine: EngineInfo) -> None:
        """Called when an engine takes no more requests, before its memory is freed."""
