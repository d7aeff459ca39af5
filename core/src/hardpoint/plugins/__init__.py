"""Plugins: what is installed, what of it can be used, and loading what was chosen. Discovering imports no plugin."""

from hardpoint.plugins.discovery import discover
from hardpoint.plugins.lock import LOCK_FILE_NAME, LockFile
from hardpoint.plugins.record import Offer, PluginRecord, Status
from hardpoint.plugins.registry import PluginSet

__all__ = ["LOCK_FILE_NAME", "LockFile", "Offer", "PluginRecord", "PluginSet", "Status", "discover"]
