"""The plugin's hook module."""

from __future__ import annotations

from hardpoint_plugin_api import ConfigChange, DeviceInfo, hookimpl


@hookimpl
def hardpoint_configure(device: DeviceInfo) -> list[ConfigChange]:
    """Wish for larger steps than the default, where this plugin's devices run them."""
    if device.platform != "cuda":
        return []
    reason = "an H200 read prompts as fast in steps of 8,192 tokens as of 16,384; the default suits a CPU"
    return [ConfigChange("max_num_batched_tokens", 8192, reason)]
