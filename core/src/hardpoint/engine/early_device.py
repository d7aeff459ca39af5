"""The device of an engine in this process, begun with before torch is imported."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from hardpoint.config import EngineConfig
from hardpoint.plugin_host import discover
from hardpoint.plugin_host.loading import describe
from hardpoint.plugin_host.lock import LockFile
from hardpoint.selection.platform_choice import choose_platform
from hardpoint.selection.settings import Settings
from hardpoint_plugin_api import HardpointError

logger = logging.getLogger(__name__)


def begin_device(config: EngineConfig) -> None:
    """Have the platform that ``config`` leads to begin with its accelerator, see Platform.begin.

    Does nothing where the engine will run in other processes. Errors of plugins and
    platforms are left to the start itself, which chooses the platform again.
    """
    if config.topology.world > 1 or config.wants_core_process(default=False):
        return
    with suppress(HardpointError, OSError):
        lock = LockFile.read(Path(config.plugins_lock_file)) if config.plugins_locked else None
        choice = choose_platform(discover(config.plugins, lock, quiet=True), Settings(config.choices))
        if choice.device.accelerator:
            try:
                choice.platform.begin(choice.device, config.device_index)
            except Exception as error:  # a plugin's: the engine starts without it
                plugin = choice.plan.offer.plugin
                logger.warning(
                    "begin() of platform %s, plugin %s, raised %s", choice.platform.name, plugin, describe(error)
                )
