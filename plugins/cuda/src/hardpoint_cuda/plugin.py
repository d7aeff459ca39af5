"""The plugin's hook module."""

from __future__ import annotations

from hardpoint_plugin_api import ConfigChange, DeviceInfo, hookimpl


@hookimpl
def hardpoint_configure(device: DeviceInfo) -> list[ConfigChange]:
    """Wish for larger steps than the default, where this plugin's devices run them."""
    if device.platform != "cuda":
        return []
    reason = "a GPU reads that many tokens of prompts at once before it is kept busy"
    return [ConfigChange("max_num_batched_tokens", 8192, reason)]
