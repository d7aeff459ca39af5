"""Hook specifications (pluggy). A plugin's module may implement any of them; all are optional.

Signatures are checked when the plugin is registered. An implementation may take fewer arguments than the hook offers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pluggy

from hardpoint_plugin_api.device import DeviceInfo
from hardpoint_plugin_api.reasons import Reason
from hardpoint_plugin_api.requests import Workload

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
class Choice:
    """One selection of an engine, for a rank's own part of the model.

    ``chosen``: the contributions that serve ``workload``, as ``(plugin, name)``, one for each range of tokens.
    ``refused``: the reasons against the others, by the same pairs.
    """

    workload: Workload
    chosen: tuple[tuple[str, str], ...]
    refused: Mapping[tuple[str, str], tuple[Reason, ...]]


@dataclass(frozen=True)
class EngineInfo:
    """The arguments of the lifecycle hooks: facts about an engine.

    ``rank`` is the number of this process's rank in its replica; each rank calls the hooks. ``choices`` are those of
    ``hardpoint explain``, in order. Later versions add fields.
    """

    model: str
    device: DeviceInfo
    table_digest: str
    rank: int = 0
    choices: tuple[Choice, ...] = ()


class HookSpecs:
    """The hooks that a plugin may implement, each marked with ``@hookimpl`` in its entry point's module."""

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
