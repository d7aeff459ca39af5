"""The plugin's hook module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint_plugin_api import ConfigChange, DeviceInfo, EngineInfo, hookimpl
from hardpoint_rocm.mx_products import warn_of_emulated
from hardpoint_rocm.platform import SHUFFLE


@hookimpl
def hardpoint_configure(config: Mapping[str, Any], device: DeviceInfo) -> list[ConfigChange]:
    """Choose the attention backend that has the cache layout of ``--rocm.kv-layout``."""
    if device.platform != "rocm" or config["plugin_config"]["rocm"]["kv_layout"] != SHUFFLE:
        return []
    return [ConfigChange("attention_backend", "aiter_shuffled", f"the one for --rocm.kv-layout {SHUFFLE}")]


@hookimpl
def hardpoint_engine_started(engine: EngineInfo) -> None:
    """Say once that products of 4-bit floats are emulated."""
    if engine.device.platform == "rocm" and engine.rank == 0:
        warn_of_emulated(engine)
