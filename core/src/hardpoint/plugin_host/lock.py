"""The lock file: which plugins may be used, to the byte.

``hardpoint-plugins.lock`` is TOML. Each ``[[plugin]]`` has its ``distribution``, ``version``, ``entry`` (the entry
point's value), whether it is installed ``editable``, its content hash ``sha256`` and, for naming a difference, the
hash of each file (``content_hash.py`` says which count). Core is among them: it is a plugin like the others. Its table
``wrapped`` has the distributions that its contributions require, with versions and digests (``wrapped.py``).

With ``--plugins-locked`` a plugin that is not in the file, or not as the file says, is refused before any of it is
imported. Changes that this does not see:

* libraries that plugins import without naming them in ``requires``, and what libraries depend on: pin them with
  ``pip install --require-hashes``;
* in a required library of more than 32 MiB, a change that leaves sizes and RECORD alone: ``plugins verify`` finds it;
* bytecode caches, which Python trusts: where others may write to the installation, let it be read-only.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hardpoint.plugin_host.content_hash import hash_of
from hardpoint.plugin_host.record import PluginRecord
from hardpoint.plugin_host.wrapped import Installed, Wrapped, required_by, wrapped_by
from hardpoint_plugin_api import ConfigError, PluginError, Reason

SCHEMA = 2
LOCK_FILE_NAME = "hardpoint-plugins.lock"
"""The file that commands write and read where they are told no other."""

Kind = Literal["added", "missing", "version", "editable", "content", "library", "unreadable"]
_KEYS: dict[str, type] = {
    "name": str,
    "distribution": str,
    "version": str,
    "entry": str,
    "editable": bool,
    "sha256": str,
    "files": dict,
    "wrapped": dict,
}
_WRAPPED_KEYS: dict[str, type] = {"version": str, "editable": bool, "outline": str, "sha256": str}
_MOST_NAMES = 5
_HEADER = "# Written by 'hardpoint plugins lock'; 'hardpoint plugins verify' compares it with what is installed.\n"


@dataclass(frozen=True)
class LockedPlugin:
    """One plugin as it was when it was locked. ``files`` has the SHA-256 of each by its name, ``wrapped`` the
    distributions that it requires by theirs."""

    name: str
    distribution: str
    version: str
    entry: str
    editable: bool
    files: Mapping[str, str]
    wrapped: Mapping[str, Wrapped] = field(default_factory=dict)

    @classmethod
    def of(cls, record: PluginRecord, installed: Installed) -> LockedPlugin:
        """The plugin as it is installed, and its libraries.

        Raises PluginLoadError where its files, or a library's, cannot be read.
        """
        return cls(
            name=record.name,
            distribution=record.distribution,
            version=record.version,
            entry=record.entry_value,
            editable=record.editable,
            files=record.file_hashes(),
            wrapped=wrapped_by(required_by(record.contributions), installed),
        )

    @property
    def key(self) -> tuple[str, str]:
        """Its identity: distribution and entry value, whatever it calls itself."""
        return self.distribution, self.entry

    @property
    def title(self) -> str:
        """Name, distribution and version, for messages."""
        return f"{self.name} ({self.distribution} {self.version})"


@dataclass(frozen=True)
class Difference:
    """One way in which an installed plugin is not as the lock file says. ``files`` are named by what became of them."""

    kind: Kind
    plugin: str
    detail: str
    fix: str
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class LockFile:
    """A lock file's plugins, by distribution and entry value."""

    path: Path
    plugins: Mapping[tuple[str, str], LockedPlugin]

    @classmethod
    def read(cls, path: Path) -> LockFile:
        """Read the file. Raises ConfigError, naming it and what is wrong, if it is missing, damaged or newer."""
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            hint = f"; write it with: {_relock(path)}" if isinstance(error, FileNotFoundError) else ""
            raise ConfigError(f"lock file {path} cannot be read: {error}{hint}") from error
        except (ValueError, RecursionError) as error:  # also of numbers that are too long, and of deep nesting
            raise ConfigError(f"lock file {path} is not valid TOML: {error}; write it anew: {_relock(path)}") from error
        if data.get("schema") != SCHEMA:
            raise ConfigError(
                f"lock file {path} has schema {data.get('schema')!r}, this Hardpoint reads {SCHEMA}; write it anew: "
                f"{_relock(path)}"
            )
        entries = data.get("plugin", [])
        if not isinstance(entries, list) or set(data) - {"schema", "plugin"}:
            raise ConfigError(f"lock file {path} may hold [[plugin]] tables only; write it anew: {_relock(path)}")
        locked = [_parse(path, entry) for entry in entries]
        if len({plugin.key for plugin in locked}) < len(locked):
            raise ConfigError(f"lock file {path} holds a plugin twice; write it anew: {_relock(path)}")
        return cls(path, {plugin.key: plugin for plugin in locked})

    @classmethod
    def of(cls, path: Path, records: Iterable[PluginRecord]) -> LockFile:
        """The installed plugins, broken ones included as far as they have files; raises PluginLoadError for unreadable
        ones."""
        installed = Installed()
        plugins = [LockedPlugin.of(record, installed) for record in records if record.folder is not None]
        return cls(path, {plugin.key: plugin for plugin in sorted(plugins, key=lambda p: (p.name, p.key))})

    def write(self) -> None:
        """Write the file. Raises ConfigError where that cannot be done."""
        import tomli_w

        plugins = [
            {
                "name": plugin.name,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "entry": plugin.entry,
                "editable": plugin.editable,
                "sha256": hash_of(plugin.files),
                "files": dict(plugin.files),
                "wrapped": {name: wrapped.to_json() for name, wrapped in plugin.wrapped.items()},
            }
            for plugin in self.plugins.values()
        ]
        try:
            self.path.write_bytes((_HEADER + tomli_w.dumps({"schema": SCHEMA, "plugin": plugins})).encode())
        except (OSError, UnicodeEncodeError) as error:
            raise ConfigError(f"lock file {self.path} cannot be written: {error}") from error

    def objection(self, record: PluginRecord, libraries: Installed) -> Reason | None:
        """Why ``record``, or a library that it requires, may not be used.

        None where it is as the file says, or has nothing that could be used.
        """
        if (record.distribution, record.entry_value) not in self.plugins:
            return Reason("not-locked", f"it is not in {self.path}", fix=f"if you trust it: {_relock(self.path)}")
        found = self.compare(record, libraries) if record.folder is not None else []
        if not found:
            return None
        return Reason("lock-mismatch", f"{self.path}: {'; '.join(d.detail for d in found)}", fix=found[0].fix)

    def differences(self, records: Iterable[PluginRecord]) -> list[Difference]:
        """Return all differences between the lock file and the installed plugins ``records``.

        Reads every byte of the locked plugins and of their required libraries.
        """
        installed = {(r.distribution, r.entry_value): r for r in records}
        found, libraries = [], Installed()
        for key, record in installed.items():
            if key in self.plugins:
                found += self.compare(record, libraries, thorough=True)
            elif record.folder is not None:
                fix = f"pip uninstall {record.distribution}, or if you trust it: {_relock(self.path)}"
                found.append(Difference("added", record.title, "it is installed, and not in the lock file", fix))
        for key, locked in self.plugins.items():
            if key not in installed:
                fix = f"pip install {locked.distribution}=={locked.version}"
                found.append(Difference("missing", locked.title, "it is in the lock file, and not installed", fix))
        return found

    def compare(self, record: PluginRecord, libraries: Installed, *, thorough: bool = False) -> list[Difference]:
        """How ``record`` and its libraries differ from what the file says of them, which must be something.

        ``thorough`` reads every byte of large libraries, too.
        """
        locked = self.plugins[record.distribution, record.entry_value]
        restore = (
            "restore its source tree"
            if record.editable
            else f"pip install --force-reinstall --no-deps {locked.distribution}=={locked.version}"
        )
        fix = f"{restore}, or if you trust what is there: {_relock(self.path)}"
        found = []
        if record.version != locked.version:
            detail = f"its version is {record.version}, the locked one is {locked.version}"
            found.append(Difference("version", record.title, detail, fix))
        if record.editable != locked.editable:
            is_, was = ("", "not ") if record.editable else ("not ", "")
            found.append(Difference("editable", record.title, f"it is {is_}editable, the locked one {was}so", fix))
        try:
            files = record.file_hashes()
        except PluginError as error:
            return [*found, Difference("unreadable", record.title, str(error), fix)]
        changes = {
            "changed": tuple(name for name in files if locked.files.get(name, files[name]) != files[name]),
            "added": tuple(name for name in files if name not in locked.files),
            "removed": tuple(name for name in locked.files if name not in files),
        }
        changes = {what: names for what, names in changes.items() if names}
        if changes:
            detail = "its files are not the locked ones: " + "; ".join(
                f"{what} {_listed(names)}" for what, names in changes.items()
            )
            found.append(Difference("content", record.title, detail, fix, changes))
        return found + self._libraries(record, locked, libraries, thorough)

    def _libraries(
        self, record: PluginRecord, locked: LockedPlugin, libraries: Installed, thorough: bool
    ) -> list[Difference]:
        """How the distributions that ``record`` requires differ from the locked ones."""
        names = required_by(record.contributions)
        try:
            found = list(libraries.differences(names, locked.wrapped, thorough=thorough))
        except PluginError as error:
            note, _, fix = str(error).partition("; fix: ")
            return [Difference("unreadable", record.title, note, fix)]
        fix = f"install the locked libraries again, or if you trust what is there: {_relock(self.path)}"
        return [Difference("library", record.title, f"it requires a library, and {what}", fix) for what in found]


def _parse(path: Path, entry: Any) -> LockedPlugin:
    if not isinstance(entry, dict):
        raise ConfigError(f"lock file {path}: 'plugin' must be [[plugin]] tables; write it anew: {_relock(path)}")
    title = entry.get("name", "without a name")
    for key, kind in _KEYS.items():
        if type(entry.get(key)) is not kind:
            raise ConfigError(
                f"lock file {path}: plugin {title}: {key!r} must be a {kind.__name__}, got {entry.get(key)!r:.80}; "
                f"write it anew: {_relock(path)}"
            )
    if unknown := sorted(set(entry) - set(_KEYS)):
        raise ConfigError(f"lock file {path}: plugin {title}: unknown key {unknown[0]!r}; {_relock(path)}")
    files = entry["files"]
    try:
        total = hash_of(files)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lock file {path}: plugin {title}: a file's hash is no SHA-256; {_relock(path)}") from error
    if total != entry["sha256"]:
        raise ConfigError(
            f"lock file {path}: plugin {title}: its sha256 is not that of its files; the file was changed by hand or "
            f"damaged; write it anew: {_relock(path)}"
        )
    for name, wrapped in entry["wrapped"].items():
        kinds = {key: type(value) for key, value in wrapped.items()} if isinstance(wrapped, dict) else None
        if kinds != _WRAPPED_KEYS:
            raise ConfigError(
                f"lock file {path}: plugin {title}: library {name!r} must have {', '.join(_WRAPPED_KEYS)}; "
                f"write it anew: {_relock(path)}"
            )
    libraries = {name: Wrapped.from_json(name, wrapped) for name, wrapped in entry["wrapped"].items()}
    known = {key: entry[key] for key in _KEYS if key not in ("sha256", "wrapped")}
    return LockedPlugin(**known, wrapped=libraries)


def _relock(path: Path) -> str:
    return f"hardpoint plugins lock --lock-file {shlex.quote(str(path))}"


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"
