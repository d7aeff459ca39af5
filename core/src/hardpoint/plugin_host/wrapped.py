"""The distributions that contributions require by name: as much a part of a kernel as the code that calls them.

A plugin that wraps a vendor's package names it in ``requires`` (``symbol ... from``, ``package``). Certificates and the
lock file keep each such distribution's version, whether it is editable, and two digests:

* ``sha256``, over the names and bytes of its files, as ``content_hash.py`` says for plugins;
* ``outline``, over the names and sizes of its files and the hashes that its RECORD has of them. It reads no file, so it
  takes a third of a second for torch.

``plugins lock``, ``plugins verify``, ``plugins doctor`` and ``conform`` read every byte. An engine's start reads
libraries of up to 32 MiB, and compares the outline of larger ones: an edit there that changes no size and no RECORD is
found by ``plugins verify``.

**Which files.** Each top-level package with an ``__init__.py`` in RECORD is walked, so that a file which was slipped in
counts; other recorded files count by themselves (namespace packages are shared by distributions). Of an editable
install, and of one without RECORD, the packages in ``top_level.txt``, else the one of the distribution's own name.
Where none of these is found, the version alone counts. The distribution's own dependencies do not count.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from importlib_metadata import Distribution, PackageNotFoundError
from packaging.requirements import Requirement as PackageSpec
from packaging.utils import canonicalize_name

from hardpoint.plugin_host.content_hash import counts, file_hash, hash_of, walk
from hardpoint_plugin_api import Contribution, PluginLoadError, Reason
from hardpoint_plugin_api.distributions import editable_source, locate_module
from hardpoint_plugin_api.requirements import PackageRequirement, SymbolRequirement

READ_AT_START = 32 * 2**20
"""Bytes. A library of up to as many is read whole wherever it is compared."""

_OURS = frozenset({"hardpoint-core", "hardpoint-plugin-api"})
"""Plugins themselves, or the contract: they have versions and hashes of their own."""


def required_by(contributions: Iterable[Contribution]) -> frozenset[str]:
    """The distributions that contributions name in ``requires``, by canonical name; Hardpoint's own are left out."""
    names = set()
    for requirement in (r for c in contributions for r in c.requires):
        if isinstance(requirement, PackageRequirement):
            names.add(PackageSpec(requirement.spec).name)
        elif isinstance(requirement, SymbolRequirement):
            names.add(requirement.distribution)
    return frozenset(map(canonicalize_name, names)) - _OURS


@dataclass(frozen=True)
class Wrapped:
    """One required distribution as it was installed. Digests are SHA-256 in hexadecimal."""

    name: str
    version: str
    editable: bool
    outline: str
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the name."""
        return {key: value for key, value in asdict(self).items() if key != "name"}

    @classmethod
    def from_json(cls, name: str, data: Mapping[str, Any]) -> Wrapped:
        """Read what ``to_json`` wrote."""
        return cls(name, data["version"], data["editable"], data["outline"], data["sha256"])


@dataclass
class Library:
    """An installed distribution; files are looked at when first asked about."""

    name: str
    distribution: Distribution = field(repr=False)

    @property
    def version(self) -> str:
        """The version in the distribution's metadata."""
        return self.distribution.version or "of unknown version"

    @cached_property
    def editable(self) -> bool:
        """True where the distribution's code is a source tree."""
        return editable_source(self.distribution) is not None

    @cached_property
    def files(self) -> Mapping[str, Path]:
        """The distribution's files by name, sorted."""
        return dict(sorted(_files(self.distribution, self.editable)))

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each file."""
        return {name: path.stat().st_size for name, path in self.files.items()}

    @cached_property
    def recorded(self) -> Mapping[str, str]:
        """The digest that RECORD has of each file, as ``sha256=...`` in URL-safe base64; empty without RECORD."""
        rows = csv.reader((self.distribution.read_text("RECORD") or "").splitlines())
        return {row[0]: row[1] for row in rows if len(row) > 1}

    @cached_property
    def outline(self) -> str:
        """The digest that reads no file."""
        digest = hashlib.sha256(b"hardpoint-outline/1")
        for name, size in self.sizes.items():
            digest.update(f"{name}\0{size}\0{self.recorded.get(name, '')}\0".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    @cached_property
    def sha256(self) -> str:
        """The digest of every byte."""
        return hash_of({name: file_hash(path) for name, path in self.files.items()})

    def describe(self) -> Wrapped:
        """The facts that certificates and lock files keep. Reads every byte."""
        return Wrapped(self.name, self.version, self.editable, self.outline, self.sha256)

    def difference(self, known: Wrapped, *, thorough: bool) -> str | None:
        """How it differs from what was known of it; None where it does not."""
        if self.version != known.version:
            return f"{self.name} is {self.version}, and was {known.version}"
        if self.editable != known.editable:
            return (
                f"{self.name} is {'' if self.editable else 'not '}editable, and was {'not ' if self.editable else ''}so"
            )
        if thorough or sum(self.sizes.values()) <= READ_AT_START:
            changed = self.sha256 != known.sha256
        else:
            changed = self.outline != known.outline
        return f"the files of {self.name} {self.version} are not those that they were" if changed else None

    def edited(self) -> list[str]:
        """Names of the files that are not as RECORD says. Reads every byte."""
        from base64 import urlsafe_b64encode

        def as_recorded(path: Path) -> str:
            return "sha256=" + urlsafe_b64encode(bytes.fromhex(file_hash(path))).decode().rstrip("=")

        known = {
            name: said for name, said in self.recorded.items() if said.startswith("sha256=") and name in self.files
        }
        return [name for name, said in known.items() if as_recorded(self.files[name]) != said]


class Installed:
    """The installed distributions by name, each looked at once."""

    def __init__(self) -> None:
        self._libraries: dict[str, Library | None] = {}

    def find(self, name: str) -> Library | None:
        """The distribution of that name, or None."""
        if name not in self._libraries:
            try:
                self._libraries[name] = Library(name, Distribution.from_name(name))
            except PackageNotFoundError:
                self._libraries[name] = None
        return self._libraries[name]

    def difference(self, names: Collection[str], known: Mapping[str, Wrapped], *, thorough: bool = False) -> str | None:
        """The first difference between what is installed of ``names`` and what was known of them; None: there is none.

        Raises PluginLoadError where a file cannot be read.
        """
        return next(iter(self.differences(names, known, thorough=thorough)), None)

    def differences(
        self, names: Collection[str], known: Mapping[str, Wrapped], *, thorough: bool = False
    ) -> Iterator[str]:
        """Every difference; raises as ``difference`` does."""
        for name in sorted(names):
            library, was = self.find(name), known.get(name)
            if library is None:
                if was is not None:
                    yield f"{name} {was.version} is no longer installed"
            elif was is None:
                yield f"{name} {library.version} is installed, and was not"
            else:
                with _reading(name):
                    found = library.difference(was, thorough=thorough)
                if found:
                    yield found


def wrapped_by(names: Collection[str], installed: Installed | None = None) -> dict[str, Wrapped]:
    """The installed distributions of ``names``, all their bytes read. Raises PluginLoadError for an unreadable file.

    Calls that share ``installed`` read each distribution once.
    """
    installed, found = installed or Installed(), {}
    for name in sorted(names):
        library = installed.find(name)
        if library is not None:
            with _reading(name):
                found[name] = library.describe()
    return found


class _reading:  # noqa: N801  # a context manager
    """Turns an OSError into one that names the distribution and the remedy."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            fix = f"pip install --force-reinstall {self._name}"
            raise PluginLoadError(f"a file of {self._name} cannot be read: {error}; fix: {fix}") from error


def _files(dist: Distribution, editable: bool) -> Iterator[tuple[str, Path]]:
    recorded = [file for file in (dist.files or ()) if counts(file)] if not editable else []
    if recorded:
        packages = {file.parts[0] for file in recorded if file.parts[1:] == ("__init__.py",)}
        for file in recorded:
            if file.parts[0] not in packages and (path := Path(str(dist.locate_file(file)))).is_file():
                yield file.as_posix(), path
        for top in packages:
            yield from walk(Path(str(dist.locate_file(top))), top)
        return
    named = (dist.read_text("top_level.txt") or "").split() or [canonicalize_name(dist.name).replace("-", "_")]
    for top in named:
        place = locate_module(dist, top) if top.isidentifier() else Reason("module-missing", top)
        if not isinstance(place, Reason):
            yield from walk(place, top) if place.is_dir() else [(place.name, place)]
