"""Records of one plugin, and of one candidate of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from importlib_metadata import Distribution

from hardpoint.plugin_host.content_hash import content_files, file_hashes, hash_of
from hardpoint_plugin_api import (
    FAMILIES,
    ApiVersion,
    Contribution,
    Manifest,
    ManifestError,
    PluginConflictError,
    PluginError,
    PluginLoadError,
    Reason,
)

Status = Literal["ready", "active", "not-selected", "refused", "failed"]
"""``ready``: may be used; ``active``: imported; ``not-selected``: left out by ``--plugins``; ``refused``: cannot be
registered; ``failed``: registered, but its import or its hooks are broken."""

CORE = "core"
"""The name of core itself as a plugin."""
CORE_DISTRIBUTION = "hardpoint-core"
_ERRORS: dict[str, type[PluginError]] = {
    "manifest": ManifestError,
    "unknown-of": ManifestError,
    "unknown-replaces": ManifestError,
    "duplicate-plugin": PluginConflictError,
    "duplicate-claim": PluginConflictError,
    "wrong-family": PluginConflictError,
    "after-cycle": PluginConflictError,
}


@dataclass(frozen=True)
class Offer:
    """A contribution, and the plugin that makes it: a candidate for the selector."""

    contribution: Contribution
    plugin: str
    api: ApiVersion
    distribution: str
    version: str

    def __hash__(self) -> int:
        """By name alone: selection looks offers up ten thousand times for an engine, and requirements are deep."""
        contribution = self.contribution
        return hash((self.plugin, contribution.family, contribution.of, contribution.name))

    @property
    def choice(self) -> str:
        """As --deny writes it: ``op.rms_norm=NAME``, ``linear=NAME``."""
        contribution = self.contribution
        of = f".{contribution.of}" if FAMILIES[contribution.family].has_of else ""
        return f"{contribution.family}{of}={contribution.name}"

    def is_among(self, choices: Collection[str]) -> bool:
        """Whether ``choices``, written as for --deny, name it: exactly, or by its family (``attention=NAME``)."""
        return not {self.choice, f"{self.contribution.family}={self.contribution.name}"}.isdisjoint(choices)


@dataclass(eq=False)
class PluginRecord:
    """One entry point of the group ``hardpoint.plugins`` and what became of it.

    ``name`` is the manifest's, or the entry point's where the manifest could not be read; ``entry_value`` the module
    with the plugin's hooks; ``folder`` its top-level package. ``reason`` says why it is not usable and how to mend
    that; ``cause`` is the exception behind a failed import. ``import_seconds`` is None until it was imported.
    ``installation`` is the distribution's metadata on disk.
    """

    name: str
    distribution: str
    version: str
    entry_value: str
    editable: bool = False
    folder: Path | None = None
    manifest: Manifest | None = None
    status: Status = "ready"
    reason: Reason | None = None
    import_seconds: float | None = None
    cause: BaseException | None = field(default=None, repr=False)
    installation: Distribution | None = field(default=None, repr=False)

    @property
    def title(self) -> str:
        """Name, distribution and version, for messages."""
        return f"{self.name} ({self.distribution} {self.version})"

    @property
    def is_core(self) -> bool:
        """True for core itself, whoever else may call itself so."""
        return self.distribution == CORE_DISTRIBUTION

    @property
    def is_usable(self) -> bool:
        """True while its contributions may be offered."""
        return self.status in ("ready", "active")

    @property
    def contributions(self) -> tuple[Contribution, ...]:
        """The contributions of its manifest; none where there is no manifest."""
        return self.manifest.contributions if self.manifest else ()

    def refuse(self, reason: Reason) -> None:
        """Register nothing of the plugin. Of several reasons the first stays."""
        if self.status != "refused":
            self.status, self.reason = "refused", reason

    def fail(self, reason: Reason, cause: BaseException | None = None) -> None:
        """Withdraw the plugin after an attempt to import it."""
        self.status, self.reason, self.cause = "failed", reason, cause

    def error(self) -> PluginError:
        """Return the error to raise for whoever asked for this plugin, which must not be usable."""
        assert self.reason is not None
        error = _ERRORS.get(self.reason.code, PluginLoadError)(f"plugin {self.title}: {self.reason}")
        error.__cause__ = self.cause
        return error

    def content_hash(self) -> str:
        """Return the hash of the plugin's files, see ``hardpoint.plugin_host.content_hash``.

        Raises PluginLoadError if the plugin's package was not found, or a file of it cannot be read.
        """
        return hash_of(self.file_hashes())

    def file_hashes(self) -> dict[str, str]:
        """Return the SHA-256 of each of the plugin's files by its name; raises as ``content_hash`` does."""
        return file_hashes(self._installed())

    def files(self) -> dict[str, Path]:
        """Return the path of each of the plugin's files by its name; raises as ``content_hash`` does."""
        return content_files(self._installed())

    def _installed(self) -> Distribution:
        if self.folder is None or self.installation is None:
            raise PluginLoadError(f"plugin {self.title} has no package folder to hash")
        return self.installation
