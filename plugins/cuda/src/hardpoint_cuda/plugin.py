"""The plugin's hook module."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint_plugin_api import ConfigChange, DeviceInfo, hookimpl


@hookimpl
def hardpoint_configure(config: Mapping[str, object], device: DeviceInfo) -> list[ConfigChange]:
    """Wish for larger steps than the default, where this plugin's devices run them.

    Not with pipeline stages: they wait for each other at the first and the last step of a prompt, so that many small
    steps are faster than few large ones.
    """
    if device.platform != "cuda" or config["pipeline_parallel_size"] != 1:
        return []
    reason = "an H200 read prompts as fast in steps of 8,192 tokens as of 16,384; the default suits a CPU"
    return [ConfigChange("max_num_batched_tokens", 8192, reason)]
