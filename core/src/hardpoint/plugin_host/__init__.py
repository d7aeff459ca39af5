"""Plugins: what is installed, what of it can be used, and loading what was chosen. Discovering imports no plugin."""

from hardpoint.plugin_host.discovery import discover
from hardpoint.plugin_host.lock import LOCK_FILE_NAME, LockFile
from hardpoint.plugin_host.record import Offer, PluginRecord, Status
from hardpoint.plugin_host.registry import PluginSet

__all__ = ["LOCK_FILE_NAME", "LockFile", "Offer", "PluginRecord", "PluginSet", "Status", "discover"]
