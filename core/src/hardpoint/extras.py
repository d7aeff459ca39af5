"""Core's optional dependencies: which packages an extra brings, and the error where one is missing."""

from __future__ import annotations

import importlib.util

from hardpoint_plugin_api import ConfigError

EXTRAS = {
    "serve": ("fastapi", "httptools", "uvicorn"),
    "structured": ("llguidance",),
    "conform": ("covertable",),
    "plot": ("matplotlib",),
}
"""The top-level modules that each extra of hardpoint-core brings itself."""


def require_extra(extra: str, purpose: str) -> None:
    """Raise ConfigError, with the command that installs them, where modules of ``extra`` are missing.

    ``purpose`` names the feature that needs them, as the subject of the message.
    """
    missing = [module for module in EXTRAS[extra] if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"{purpose} needs {', '.join(missing)}, not installed here: pip install 'hardpoint-core[{extra}]'"
        )
