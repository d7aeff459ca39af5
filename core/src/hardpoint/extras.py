"""Core's optional dependencies: which packages an extra brings, and the error where one is missing."""

from __future__ import annotations

import importlib.util

from hardpoint_plugin_api import ConfigError

EXTRAS = {
    "serve": {"fastapi": "fastapi", "httptools": "httptools", "uvicorn": "uvicorn"},
    "structured": {"llguidance": "llguidance"},
    "conform": {"covertable": "covertable"},
    "plot": {"matplotlib": "matplotlib"},
    "mcp": {"mcp": "mcp"},
    "mistral": {"mistral-common": "mistral_common"},
    "ray": {"ray": "ray"},
    "otlp": {
        "opentelemetry-sdk": "opentelemetry.sdk",
        "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
    },
}
"""The distributions that each extra of hardpoint-core brings itself, each with a module of it."""


def require_extra(extra: str, purpose: str) -> None:
    """Raise ConfigError, with the command that installs them, where modules of ``extra`` are missing.

    ``purpose`` names the feature that needs them, as the subject of the message.
    """
    missing = [name for name, module in EXTRAS[extra].items() if not _is_there(module)]
    if missing:
        raise ConfigError(
            f"{purpose} needs {', '.join(missing)}, not installed here: pip install 'hardpoint-core[{extra}]'"
        )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package that holds it
        return False
