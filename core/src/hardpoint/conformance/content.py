"""The files that a certificate speaks of: a plugin's own, and those of core's packages that its contributions stand in.

**Of the whole plugin.** ``Content.hash`` is over the names and bytes of all these files.

**Of one contribution.** Its results depend on some of them. A certificate keeps of each contribution (``Sources``):

* the Python files that the processes of its trials loaded,
* its entry in the manifest and the plugin's config keys, as a digest; entries of other contributions do not count.

Files that are not Python, such as compiled libraries and tuning tables, count for every contribution: nothing tells
which code reads them.

Example: a plugin has ``gemm.py`` and ``norm.py``. After an edit of ``norm.py`` the certificate counts for the norm no
longer. It counts for the matrix product, unless that imports ``norm.py``.

Certificates that a plugin ships are no part of its content: they cannot name a hash of themselves.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import hardpoint
from hardpoint.conformance.proof import Key
from hardpoint.plugin_host.content_hash import file_hash, hash_of, walk
from hardpoint_plugin_api import MANIFEST_NAME, Contribution, ManifestError, PluginLoadError
from hardpoint_plugin_api.inclusion import included_files, parsed

if TYPE_CHECKING:
    from hardpoint.plugin_host.record import PluginRecord

SHIPPED_FOLDER = "certificates"
"""In a plugin's package: certificates that its author ships."""

_CORE = Path(hardpoint.__file__).parent
_PYTHON = ".py"
_DIGITS = 16


@dataclass(frozen=True)
class Content:
    """A plugin's content as it is installed.

    ``files`` has the SHA-256 of each file by its name. ``manifests`` are the names of the manifest and of the files
    that it includes. ``entries`` has the digest of each contribution's entry.
    """

    files: Mapping[str, str] = field(repr=False)
    manifests: frozenset[str] = field(repr=False)
    entries: Mapping[Key, str] = field(repr=False)

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of all files, in hexadecimal."""
        return hash_of(self.files)

    @cached_property
    def always(self) -> Mapping[str, str]:
        """The files that count for every contribution."""
        return {n: h for n, h in self.files.items() if not n.endswith(_PYTHON) and n not in self.manifests}

    def sources(self, key: Key, loaded: frozenset[str]) -> Sources:
        """The sources of a contribution whose trials loaded those files."""
        return Sources(key, self.entries[key], tuple(sorted(loaded & self.files.keys() - self.always.keys())))

    def of(self, sources: Iterable[Sources]) -> Mapping[str, str]:
        """The files that a certificate with ``sources`` keeps."""
        return {**self.always, **{name: self.files[name] for one in sources for name in one.loaded}}

    def has(self, sources: Sources, files: Mapping[str, str]) -> bool:
        """Whether a contribution's sources, with ``files`` of its certificate, are what is installed."""
        always = {name: digest for name, digest in files.items() if not name.endswith(_PYTHON)}
        return (
            self.entries.get(sources.key) == sources.entry
            and always == self.always
            and all(self.files.get(name, "") == files.get(name) for name in sources.loaded)
        )


@dataclass(frozen=True)
class Sources:
    """The sources of one contribution's results: the digest of its manifest's ``entry``, and the names of the Python
    files that its trials ``loaded``."""

    key: Key
    entry: str
    loaded: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        family, of, name = self.key
        return {"family": family, "of": of, "name": name, "entry": self.entry, "loaded": list(self.loaded)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sources:
        """Read what ``to_json`` wrote."""
        return cls((data["family"], data["of"], data["name"]), data["entry"], tuple(data["loaded"]))


def content_of(record: PluginRecord) -> Content:
    """The content of an installed plugin. Raises PluginLoadError where files cannot be read."""
    paths = _paths(record)
    try:
        files = {name: file_hash(path) for name, path in paths.items()}
        manifests = _manifests(record)
    except (OSError, ManifestError) as error:
        raise PluginLoadError(f"a file of {record.title} cannot be read: {error}") from error
    return Content(
        files,
        frozenset(name for name, path in paths.items() if os.path.realpath(path) in manifests),
        {(c.family, c.of, c.name): _digest(record, c) for c in record.contributions},
    )


def _paths(record: PluginRecord) -> dict[str, Path]:
    """The path of each file of the content by its name."""
    folder = PurePosixPath(record.folder.name if record.folder else "", SHIPPED_FOLDER)
    own = {name: path for name, path in record.files().items() if not _is_certificate(PurePosixPath(name), folder)}
    return own | dict(_of_core(record))


def _is_certificate(path: PurePosixPath, folder: PurePosixPath) -> bool:
    return path.parent == folder and path.suffix == ".json"


def _of_core(record: PluginRecord) -> Iterator[tuple[str, Path]]:
    """The files of core's packages that hold targets of another plugin's contributions."""
    if record.is_core:
        return
    modules = [PurePosixPath(*c.target.partition(":")[0].split(".")) for c in record.contributions]
    packages = {str(module.parent) for module in modules if module.parts[0] == _CORE.name}
    try:
        for package in sorted(packages):
            yield from walk(_CORE.parent / package, package)
    except OSError as error:
        raise PluginLoadError(f"a file of core that {record.title} contributes cannot be read: {error}") from error


def _manifests(record: PluginRecord) -> frozenset[str]:
    """The real paths of the manifest, and of the files that it includes."""
    if record.folder is None:
        return frozenset()
    manifest = record.folder / MANIFEST_NAME
    source = str(manifest)
    places = [file.place for file in included_files(parsed(manifest.read_text(encoding="utf-8"), source), source)]
    return frozenset(map(os.path.realpath, (source, *places)))


def _digest(record: PluginRecord, contribution: Contribution) -> str:
    """Of a contribution's entry, and of the keys that configure the plugin."""
    assert record.manifest is not None
    return hashlib.sha256(f"{contribution!r}\0{record.manifest.config!r}".encode()).hexdigest()[:_DIGITS]


class FileStamps:
    """Notices changes to the files of a plugin's content at the cost of a ``stat`` for each."""

    def __init__(self, record: PluginRecord) -> None:
        """Raises PluginLoadError where the content cannot be listed."""
        self._record, self._stamps = record, _stamps(record)

    def have_changed(self) -> bool:
        """Whether a file has been written, replaced, added or taken away since this was made."""
        try:
            return _stamps(self._record) != self._stamps
        except PluginLoadError:
            return True


def _stamps(record: PluginRecord) -> dict[str, tuple[int, int, int]]:
    try:
        found = {name: path.stat() for name, path in _paths(record).items()}
    except OSError as error:
        raise PluginLoadError(f"a file of {record.title} cannot be read: {error}") from error
    return {name: (one.st_mtime_ns, one.st_size, one.st_ino) for name, one in found.items()}


class LoadedFiles:
    """The Python files of a plugin's content that this process has loaded as modules, by their names."""

    def __init__(self, record: PluginRecord) -> None:
        """Raises PluginLoadError where the content cannot be listed."""
        self._names = {os.path.realpath(path): name for name, path in _paths(record).items()}
        self._seen: set[str] = set()
        self._found: set[str] = set()

    def names(self) -> list[str]:
        """Their names so far, sorted."""
        for module in set(sys.modules) - self._seen:
            self._seen.add(module)
            place = _place(sys.modules.get(module))
            name = self._names.get(os.path.realpath(place)) if place else None
            if name is not None and name.endswith(_PYTHON):
                self._found.add(name)
        return sorted(self._found)


def _place(module: object) -> str | None:
    """The file of a module, without loading one that loads itself when an attribute is asked for."""
    try:
        place = object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:  # anything may stand among the modules
        return None
    return place if isinstance(place, str) else None
