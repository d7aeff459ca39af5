"""The engine's settings: one typed tree behind the config file, the command line's flags and Python's keywords.

A TOML file holds ``block_size = 16`` and a plugin's own keys as ``[acme] workspace_mib = 256``; the flags are
``--block-size 16`` and ``--acme.workspace_mib 256``; Python's keywords are ``block_size=16`` and
``plugin_config={"acme": {"workspace_mib": 256}}``.
"""

from hardpoint.config.engine_args import EngineArgs
from hardpoint.config.engine_config import SETTINGS, EngineConfig, PluginKeys
from hardpoint.config.load import load_config
from hardpoint.config.settings import Group, group_of

__all__ = ["SETTINGS", "EngineArgs", "EngineConfig", "Group", "PluginKeys", "group_of", "load_config"]
