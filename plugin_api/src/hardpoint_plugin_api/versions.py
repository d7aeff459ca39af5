"""API versions: what this host offers and whether a plugin's lowest needed version fits.

0.x until the CUDA plugin is complete. From ``0.2`` on, everything within a major version is additive, so a plugin that
needs ``0.2`` runs on ``0.7``; a host of major N also loads plugins of major N-1, through core's shims.

The names of each version are frozen as data in ``api/MAJOR.MINOR.json``: ``hardpoint plugins api-diff`` prints later
additions, and a test refuses a change that would break a plugin of a frozen version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from hardpoint_plugin_api.reasons import Reason


@dataclass(frozen=True, order=True)
class ApiVersion:
    """``major.minor``; ordered."""

    major: int
    minor: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``"0.3"``; raises ValueError on anything else."""
        major, dot, minor = text.partition(".")
        if not (dot and major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit()):
            raise ValueError(f"API version {text!r} is not of the form MAJOR.MINOR, such as '0.1'")
        return cls(int(major), int(minor))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


API_VERSION = ApiVersion(0, 2)
"""The version this package provides."""

OLDEST_API = ApiVersion(0, 2)
"""The lowest version whose plugins run here. docs/changes_in_api_0_2.md says what changed from 0.1, never released."""

MANIFEST_SCHEMA = 1
"""The newest manifest schema this package reads."""


def check_api(needed: ApiVersion, host: ApiVersion | None = None) -> Reason | None:
    """Say why a plugin that needs ``needed`` cannot run on ``host`` (this one by default), or None where it can."""
    host = API_VERSION if host is None else host
    if needed > host:
        return Reason(
            "api-too-new",
            "the plugin needs a newer plugin API than this Hardpoint provides",
            wanted=str(needed),
            supported=str(host),
            fix="pip install --upgrade hardpoint-plugin-api hardpoint-core",
        )
    if needed < OLDEST_API:
        return Reason(
            "api-too-old",
            f"the plugin was built for a plugin API before {OLDEST_API}, which no Hardpoint carries any more",
            wanted=str(needed),
            supported=f"{OLDEST_API} to {host}",
            fix="port the plugin as docs/changes_in_api_0_2.md says, or upgrade it",
        )
    if needed.major < host.major - 1:
        return Reason(
            "api-too-old",
            "the plugin was built for a plugin API that this Hardpoint no longer carries",
            wanted=str(needed),
            supported=f"{max(0, host.major - 1)}.0 to {host}",
            fix="upgrade the plugin",
        )
    return None
