"""The content of a distribution's plugin as one hash: for the lock file and for certificates.

**What counts.** The top-level package of each entry point of the group ``hardpoint.plugins``: every regular file in it
(the manifest, sources, compiled libraries, data), found by walking the folder, so that a file which was slipped in
counts too. Of an ordinary installation also every other file that it recorded beside its packages (a compiled module at
top level, a second package); of an editable one the packages that its ``top_level.txt`` names. Ignored are
``__pycache__``, which each machine writes itself, the ``.dist-info`` folder, and what lies outside ``site-packages``.

**The hash.** SHA-256 over ``hardpoint-content/1`` and then, for each file in the order of its name's bytes: the length
of the name (8 bytes, big-endian), the name (UTF-8, relative to the folder of packages, ``/`` between the parts) and the
SHA-256 of its bytes (32 bytes). It depends on names and contents only: not on the machine, the folder, times or modes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from importlib_metadata import Distribution

from hardpoint_plugin_api import ENTRY_POINT_GROUP, PluginLoadError, Reason
from hardpoint_plugin_api.distributions import editable_source, locate_module

_SCHEME = b"hardpoint-content/1"
_CACHE = "__pycache__"
_CHUNK = 2**20


def content_hash(distribution: Distribution) -> str:
    """Return the SHA-256, in hexadecimal, of the distribution's plugin files: names and bytes.

    Imports nothing. Raises PluginLoadError where a package cannot be found or a file cannot be read.
    """
    return hash_of(file_hashes(distribution))


def hash_of(files: Mapping[str, str]) -> str:
    """Return the hash of a listing: the SHA-256, in hexadecimal, of each file by its name."""
    digest = hashlib.sha256(_SCHEME)
    for name, content in sorted((_encoded(name), content) for name, content in files.items()):
        digest.update(len(name).to_bytes(8, "big") + name + bytes.fromhex(content))
    return digest.hexdigest()


def file_hashes(distribution: Distribution) -> dict[str, str]:
    """Return the SHA-256, in hexadecimal, of each of the distribution's plugin files by its name, sorted.

    Raises PluginLoadError where a package cannot be found or a file cannot be read.
    """
    try:
        return {name: file_hash(path) for name, path in content_files(distribution).items()}
    except OSError as error:
        raise _unreadable(distribution, error) from error


def content_files(distribution: Distribution) -> dict[str, Path]:
    """Return the path of each of the distribution's plugin files by its name, sorted. Raises as ``file_hashes``."""
    try:
        files = dict(_files(distribution))
    except OSError as error:
        raise _unreadable(distribution, error) from error
    if not files:
        raise PluginLoadError(f"{distribution.name} has no plugin files to hash; fix: {_reinstall(distribution)}")
    return {name: files[name] for name in sorted(files, key=_encoded)}


def _unreadable(distribution: Distribution, error: OSError) -> PluginLoadError:
    return PluginLoadError(f"a file of {distribution.name} cannot be read: {error}; fix: {_reinstall(distribution)}")


def package_hashes(folder: Path, name: str) -> dict[str, str]:
    """The same for a folder of code called ``name``, whoever's it is. Raises OSError."""
    return {file: file_hash(path) for file, path in sorted(walk(folder, name))}


def _files(distribution: Distribution) -> Iterator[tuple[str, Path]]:
    """Each file with its name. A file that two rules find has the same name by both."""
    editable = editable_source(distribution) is not None
    entries = distribution.entry_points.select(group=ENTRY_POINT_GROUP)
    walked = {entry.value.partition(":")[0].partition(".")[0] for entry in entries}
    if editable:
        walked |= {line for line in (distribution.read_text("top_level.txt") or "").split() if line.isidentifier()}
    for top in walked:
        package = locate_module(distribution, top)
        if isinstance(package, Reason):
            raise PluginLoadError(f"{distribution.name} cannot be hashed: {package}")
        yield from walk(package, top) if package.is_dir() else [(package.name, package)]
    for recorded in distribution.files or () if not editable else ():
        if counts(recorded) and (path := Path(str(distribution.locate_file(recorded)))).is_file():
            yield recorded.as_posix(), path


def counts(recorded: PurePosixPath) -> bool:
    """Whether a file that an installation recorded is content: no metadata, no bytecode, nothing outside."""
    top, *inner = recorded.parts
    return top != ".." and not recorded.is_absolute() and not top.endswith(".dist-info") and _CACHE not in (top, *inner)


def walk(folder: Path, name: str, above: frozenset[Path] = frozenset()) -> Iterator[tuple[str, Path]]:
    """The regular files of a folder. Linked folders are followed, as imports follow them, but not in circles."""
    real = folder.resolve()
    if real in above:
        return
    for path in folder.iterdir():
        if path.is_file():
            yield f"{name}/{path.name}", path
        elif path.is_dir() and path.name != _CACHE:
            yield from walk(path, f"{name}/{path.name}", above | {real})


def file_hash(path: Path) -> str:
    """The SHA-256, in hexadecimal, of a file's bytes. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _reinstall(distribution: Distribution) -> str:
    return f"pip install --force-reinstall {distribution.name}"
