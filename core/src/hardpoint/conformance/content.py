"""The files that a certificate speaks of: a plugin's own, and those of core's packages that its contributions stand in.

**Of the whole plugin.** ``Content.hash`` is over the names and bytes of all these files.

**Of one contribution.** Its results depend on some of them. A certificate keeps of each contribution (``Sources``):

* the Python files whose code ran in the processes of its trials, and the modules that were sought there in vain,
* its entry in the manifest and the plugin's config keys, as a digest; entries of other contributions do not count.

Files that are not Python, such as compiled libraries and tuning tables, count for every contribution: nothing tells
which code reads them. Type stubs (``.pyi``, ``py.typed``) do not count.

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
_PYTHON, _PACKAGE = ".py", "__init__.py"
_STUBS = (".pyi", "/py.typed")
_DIGITS = 16


@dataclass(frozen=True)
class Loaded:
    """The part of a plugin's content that processes loaded: the names of ``files`` whose code ran, and the names of
    modules that were sought and are ``absent``."""

    files: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()

    def __or__(self, other: Loaded) -> Loaded:
        return Loaded(self.files | other.files, self.absent | other.absent)

    def to_json(self) -> dict[str, list[str]]:
        """Plain data."""
        return {"files": sorted(self.files), "absent": sorted(self.absent)}

    @classmethod
    def from_json(cls, data: Mapping[str, Iterable[str]]) -> Loaded:
        """Read what ``to_json`` wrote."""
        return cls(frozenset(data["files"]), frozenset(data["absent"]))


@dataclass(frozen=True)
class Sources:
    """The sources of one contribution's results: the digest of its manifest's ``entry``, and the content that its
    trials ``loaded``."""

    key: Key
    entry: str
    loaded: Loaded

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        family, of, name = self.key
        data = {"family": family, "of": of, "name": name, "entry": self.entry, "loaded": sorted(self.loaded.files)}
        return {**data, "absent": sorted(self.loaded.absent)} if self.loaded.absent else data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sources:
        """Read what ``to_json`` wrote."""
        loaded = Loaded(frozenset(data["loaded"]), frozenset(data.get("absent", ())))
        return cls((data["family"], data["of"], data["name"]), data["entry"], loaded)


@dataclass(frozen=True)
class Content:
    """A plugin's content as it is installed.

    ``files`` has the SHA-256 of each file by its name. ``manifests`` are the names of the manifest and of the files
    that it includes. ``entries`` has the digest of each contribution's entry, and ``targets`` the module of its target.
    ``packages`` are the plugin's own top-level packages and modules, sorted.
    """

    files: Mapping[str, str] = field(repr=False)
    manifests: frozenset[str] = field(repr=False)
    entries: Mapping[Key, str] = field(repr=False)
    targets: Mapping[Key, str] = field(repr=False)
    packages: tuple[str, ...] = ()

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of all files, in hexadecimal."""
        return hash_of(self.files)

    @cached_property
    def always(self) -> Mapping[str, str]:
        """The files that count for every contribution."""
        return _counting({name: digest for name, digest in self.files.items() if name not in self.manifests})

    def sources(self, key: Key, loaded: Loaded) -> Sources | None:
        """The sources of a contribution; None where ``loaded`` lacks its target's own file, and so is not all, and
        where it has a file that is not here."""
        files = self._files_of(self.targets[key])
        if not files <= loaded.files or not loaded.files <= self.files.keys():
            return None
        return Sources(key, self.entries[key], loaded)

    def of(self, sources: Iterable[Sources]) -> Mapping[str, str]:
        """The files that a certificate with ``sources`` keeps."""
        return {**self.always, **{name: self.files[name] for one in sources for name in sorted(one.loaded.files)}}

    def difference(self, sources: Sources, files: Mapping[str, str]) -> str | None:
        """How a contribution's sources, with ``files`` of its certificate, differ from what is installed; None where
        they do not."""
        if self.entries.get(sources.key) != sources.entry:
            return "its entry in the manifest, or a config key of the plugin, has changed"
        always, loaded = _counting(files), sources.loaded
        if not loaded.files:
            return "it names no files"
        for file in (*sorted(always.keys() | self.always), *sorted(loaded.files)):
            here, there = self.files.get(file), files.get(file)
            if here != there or here is None:
                return f"{file} {'is missing' if here is None else 'is new' if there is None else 'has changed'}"
        platforms = [self._files_of(self.targets[key]) for key in self.targets if key[0] == "platform"]
        if any(platforms) and not any(files & loaded.files for files in platforms):
            return "the target of the plugin's platform has changed"
        new = [name for file in sorted(loaded.files) if (name := self._hiding(file, loaded))]
        new += [name for module in sorted(loaded.absent) if (name := self._found(module))]
        return f"{new[0]} is new" if new else None

    def _files_of(self, module: str) -> frozenset[str]:
        return frozenset(_candidates(module)) & self.files.keys()

    def _hiding(self, name: str, loaded: Loaded) -> str | None:
        """An installed file that was not loaded, and would be found in place of a loaded file or of a folder above."""
        path = PurePosixPath(name)
        folders = [folder for folder in path.parents if folder.parts]
        bare = [folder for folder in folders if f"{folder}/{_PACKAGE}" not in loaded.files]
        around = [f"{folder}{end}" for folder in bare for end in (f"/{_PACKAGE}", _PYTHON)]
        places = (f"{path.with_suffix('')}/{_PACKAGE}", *around)
        return next((place for place in places if place in self.files and place not in loaded.files), None)

    def _found(self, module: str) -> str | None:
        """A file as which, or below which, a module would be found: a folder of files is a package, too."""
        path = module.replace(".", "/")
        return next((name for name in self.files if name == f"{path}{_PYTHON}" or name.startswith(f"{path}/")), None)


def _counting(files: Mapping[str, str]) -> dict[str, str]:
    """The files among them that are neither Python nor stubs."""
    return {name: digest for name, digest in files.items() if not name.endswith((_PYTHON, *_STUBS))}


def _candidates(module: str) -> tuple[str, str]:
    """The names of the files that a module may be in."""
    path = module.replace(".", "/")
    return f"{path}{_PYTHON}", f"{path}/{_PACKAGE}"


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
        {(c.family, c.of, c.name): c.target.partition(":")[0] for c in record.contributions},
        tuple(sorted({name.partition("/")[0] for name in record.files()})),
    )


def _paths(record: PluginRecord) -> dict[str, Path]:
    """The path of each file of the content by its name, which is text that JSON can hold."""
    own = {name: path for name, path in record.files().items() if not _is_certificate(PurePosixPath(name))}
    both = own | dict(_of_core(record))
    return {os.fsencode(name).decode("utf-8", "backslashreplace"): path for name, path in both.items()}


def _is_certificate(path: PurePosixPath) -> bool:
    """Whether a file is a certificate in the folder for them of a package."""
    return len(path.parts) == 3 and path.parts[1] == SHIPPED_FOLDER and path.suffix == ".json"


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
    source = str(record.folder / MANIFEST_NAME)
    places = [file.place for file in included_files(parsed(Path(source).read_text(encoding="utf-8"), source), source)]
    return frozenset(map(os.path.realpath, (source, *places)))


def _digest(record: PluginRecord, contribution: Contribution) -> str:
    """The digest of a contribution's entry and of the keys that configure the plugin."""
    assert record.manifest is not None
    return hashlib.sha256(f"{contribution!r}\0{record.manifest.config!r}".encode()).hexdigest()[:_DIGITS]


class FileStamps:
    """Notices changes to the files of a plugin's content at the cost of a ``stat`` for each."""

    def __init__(self, record: PluginRecord) -> None:
        """Raises PluginLoadError where the content cannot be listed."""
        self._record, self._stamps = record, _stamps(record)

    def changed(self) -> str | None:
        """The name of a file that was written, replaced, added or taken away since this was made; None for no file."""
        try:
            now = _stamps(self._record)
        except PluginLoadError as error:
            return str(error)
        return next(
            (name for name in sorted(now.keys() | self._stamps) if now.get(name) != self._stamps.get(name)), None
        )


def _stamps(record: PluginRecord) -> dict[str, tuple[int, int, int, int]]:
    try:
        found = {name: path.stat() for name, path in _paths(record).items()}
    except OSError as error:
        raise PluginLoadError(f"a file of {record.title} cannot be read: {error}") from error
    return {name: (one.st_mtime_ns, one.st_ctime_ns, one.st_size, one.st_ino) for name, one in found.items()}


class LoadedFiles:
    """Sees which Python files of a plugin's content this process runs, and which modules of it are sought in vain.

    Python calls its audit hook before each module's code, also where that then fails, or takes itself out of
    ``sys.modules``. A hook cannot be taken out again: this is for processes of trials alone.
    """

    def __init__(self, record: PluginRecord) -> None:
        """Raises PluginLoadError where the content cannot be listed."""
        self._names: dict[str, set[str]] = {}
        for name, path in _paths(record).items():
            self._names.setdefault(os.path.realpath(path), set()).add(name)  # several, where links lead to it
        self._tops = {name.partition("/")[0] for names in self._names.values() for name in names}
        self._places = {place for module in list(sys.modules.values()) if (place := _place(module)) is not None}
        self._files: set[str] = set()
        self._sought: set[str] = set()
        sys.addaudithook(self._hear)
        sys.meta_path.append(_LastFinder(self._sought))

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "exec" and isinstance(place := getattr(args[0], "co_filename", None), str):
            self._places.add(place)

    def so_far(self) -> Loaded:
        """Of all that has happened in this process."""
        while self._places:
            names = self._names.get(os.path.realpath(self._places.pop()), ())
            self._files.update(name for name in names if name.endswith(_PYTHON))
        own = {module for module in self._sought.copy() if module.partition(".")[0] in self._tops}
        absent = frozenset(module for module in own if not self._files.intersection(_candidates(module)))
        return Loaded(frozenset(self._files), absent)


class _LastFinder:
    """Finds nothing, and notes the names of modules that no finder before it has found."""

    def __init__(self, sought: set[str]) -> None:
        self._sought = sought

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """See importlib.abc.MetaPathFinder."""
        self._sought.add(name)


def _place(module: object) -> str | None:
    """The file of a module, without loading one that loads itself when an attribute is asked for."""
    try:
        place = object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:  # anything may stand among the modules
        return None
    return place if isinstance(place, str) else None
