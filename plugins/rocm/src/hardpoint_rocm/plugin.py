"""The plugin's hook module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint_plugin_api import ConfigChange, DeviceInfo, hookimpl
from hardpoint_rocm.platform import SHUFFLE


@hookimpl
def hardpoint_configure(config: Mapping[str, Any], device: DeviceInfo) -> list[ConfigChange]:
    """Choose the attention backend that has the cache layout of ``--rocm.kv-layout``."""
    if device.platform != "rocm" or config["plugin_config"]["rocm"]["kv_layout"] != SHUFFLE:
        return []
    return [ConfigChange("attention_backend", "aiter_shuffled", f"the one for --rocm.kv-layout {SHUFFLE}")]
