"""Every hook."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint_plugin_api import ConfigChange, DeviceInfo, EngineInfo, hookimpl

HEARD: list[str] = []


@hookimpl
def hardpoint_configure(config: Mapping[str, object], device: DeviceInfo) -> list[ConfigChange]:
    """Wish for a setting that changes no result."""
    HEARD.append(f"configure {device.platform}")
    return [ConfigChange("max_num_seqs", 7, "a wish of API 0.2")]


@hookimpl
def hardpoint_conformance() -> list[object]:
    """Add nothing to the conformance kit."""
    return []


@hookimpl
def hardpoint_engine_started(engine: EngineInfo) -> None:
    """Listen."""
    HEARD.append(f"started {engine.device.platform} {bool(engine.model and engine.table_digest)}")


@hookimpl
def hardpoint_engine_stopping() -> None:
    """Listen, taking fewer arguments than the hook offers."""
    HEARD.append("stopping")
