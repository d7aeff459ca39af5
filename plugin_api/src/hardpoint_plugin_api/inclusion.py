"""Inclusion of contribution tables from other files, with defaults and overrides, as plain TOML data.

Example: a platform offers core's portable kernels, but for one, and with another priority for a second.

    [[include]]
    file = "hardpoint:kernels/portable.toml"
    platforms = ["acme"]
    requires = [{ package = "triton-acme>=3.6" }]

    [[override]]
    family = "attention"
    name = "triton_paged_quantized_cache"
    remove = true

    [[override]]
    family = "linear"
    name = "triton_int4"
    priority = 20
    requires = [{ arch = ["acme2"] }]
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hardpoint_plugin_api.errors import ManifestError, nearest
from hardpoint_plugin_api.families import FAMILIES

Data = Mapping[str, Any]
Placed = tuple[Data, str]
"""A contribution's table, and the file where it stands."""

_DEFAULTED = ("platforms", "priority")
_FRAGMENT = ("defaults", "contribution")
_KEYS_OF_SLOT = ("family", "of", "name")
_CORE = "hardpoint"


@dataclass(frozen=True)
class IncludedFile:
    """A file that a manifest includes, and its text."""

    place: str
    text: str


def parsed(text: str, source: str) -> Data:
    """``text`` as TOML, which its readers do not change; raises ManifestError, which names ``source``."""
    try:
        return _toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ManifestError(f"{source}: not valid TOML: {error}") from error


@lru_cache(maxsize=64)
def _toml(text: str) -> Data:
    """TOML takes a millisecond for 20 lines, and each engine and each test asks for the same manifests again."""
    return tomllib.loads(text)


def included_files(data: Data, source: str) -> tuple[IncludedFile, ...]:
    """The files that a manifest includes, in its order; raises ManifestError where one cannot be read."""
    return tuple(_read(entry, source) for entry in _list(data, "include", source))


def contribution_tables(data: Data, source: str, files: Sequence[IncludedFile]) -> list[Placed]:
    """The tables of all contributions of a manifest: its own, then what it includes, with overrides applied.

    ``files`` are its ``included_files``. Raises ManifestError, naming the file: for a section of the wrong type, for a
    key that an included file must not have, and for an override of a contribution that no file has.
    """
    own = [(table, source) for table in _filled(data, source)]
    entries = zip(_list(data, "include", source), files, strict=True)
    included = [placed for entry, file in entries for placed in _included(entry, file)]
    for entry in _list(data, "override", source):
        included = _overridden(included, entry, source)
    return own + included


def _filled(data: Data, source: str) -> Iterator[Data]:
    """The contributions of one file, with what its ``[defaults]`` say of those that say nothing."""
    defaults = data.get("defaults", {})
    if not isinstance(defaults, dict):
        raise ManifestError(f"{source}: 'defaults' must be a table: write [defaults]")
    for table in _list(data, "contribution", source):
        yield _with(defaults, table)


def _with(defaults: Data, table: Data) -> Data:
    """``table`` with ``defaults``; what both require is required."""
    filled = {key: defaults[key] for key in _DEFAULTED if key in defaults} | dict(table)
    first, second = defaults.get("requires", []), table.get("requires", [])
    if isinstance(first, list) and isinstance(second, list) and first:
        filled["requires"] = [*first, *second]
    return filled


def _read(entry: Data, source: str) -> IncludedFile:
    place = _located(entry.get("file"), source)
    try:
        return IncludedFile(str(place), place.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{source}: [[include]] {entry['file']!r} cannot be read: {error}") from error


def _included(entry: Data, file: IncludedFile) -> Iterator[Placed]:
    data = parsed(file.text, file.place)
    for key in data:
        if key not in _FRAGMENT:
            raise ManifestError(f"{file.place}: a file that is included holds {' and '.join(_FRAGMENT)}, not {key!r}")
    for table in _filled(data, file.place):
        yield _with(entry, table), file.place


def _located(file: object, source: str) -> Path:
    """The path of a file of the plugin's own package, where the manifest stands, or of core. Imports nothing."""
    if not isinstance(file, str):
        raise ManifestError(f"{source}: [[include]] needs 'file', such as \"hardpoint:kernels/portable.toml\"")
    package, _, path = file.rpartition(":")
    own = Path(source).parent
    if package not in ("", own.name, _CORE) or ".." in Path(path).parts or Path(path).is_absolute():
        raise ManifestError(
            f"{source}: [[include]] {file!r}: lock files and certificates count the files of {own.name!r} and of "
            f"{_CORE!r}, so only these can be included; copy the file into {own.name!r}"
        )
    if package != _CORE:
        return own / path
    found = find_spec(_CORE)
    if found is None or not found.submodule_search_locations:
        raise ManifestError(f"{source}: [[include]] {file!r}: pip install hardpoint-core, whose file it is")
    return Path(found.submodule_search_locations[0]) / path


def _overridden(included: Sequence[Placed], entry: Data, source: str) -> list[Placed]:
    """``included`` with one override: ``requires`` adds to the contribution's, other keys take the place of its own."""
    slot = _slot(entry)
    title = " ".join(str(part) for part in slot if part is not None)
    known = {_slot(table) for table, _ in included}
    if slot not in known:
        names = {" ".join(str(part) for part in each if part is not None) for each in known}
        guess = nearest(title, names)
        hint = f"did you mean {guess!r}?" if guess else f"included are: {', '.join(sorted(names)) or 'none'}"
        raise ManifestError(f"{source}: [[override]] {title!r} is of no included contribution; {hint}")
    changes = {key: value for key, value in entry.items() if key not in (*_KEYS_OF_SLOT, "remove")}
    return [
        (
            _with(
                {"requires": table.get("requires", [])}, {**table, **changes, "requires": changes.get("requires", [])}
            ),
            at,
        )
        if _slot(table) == slot
        else (table, at)
        for table, at in included
        if not (entry.get("remove") and _slot(table) == slot)
    ]


def _slot(table: Data) -> tuple[Any, Any, Any]:
    """Family, ``of`` (with the family's default) and name of a contribution, or of an override."""
    family, of, name = (table.get(key) for key in _KEYS_OF_SLOT)
    known = FAMILIES.get(family) if isinstance(family, str) else None
    return family, known.default_of if of is None and known else of, name


def _list(data: Data, key: str, source: str) -> list[dict[str, Any]]:
    values = data.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ManifestError(f"{source}: {key!r} must be an array of tables: write [[{key}]]")
    return values
