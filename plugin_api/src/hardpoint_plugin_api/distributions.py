"""Where an installed distribution keeps a module, found without importing anything.

An import name proves nothing: two unrelated distributions may provide the same one, and a folder on ``sys.path`` may
shadow both. A module belongs to a distribution if it lies where that distribution's files were installed.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import sys
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from urllib.parse import unquote, urlparse

from importlib_metadata import Distribution, PackageNotFoundError, packages_distributions, version
from packaging.utils import canonicalize_name

from hardpoint_plugin_api.reasons import Reason


def installed_version(name: str) -> str | None:
    """The version of a distribution; None where it is not installed.

    Metadata is read once for each state of the folders on ``sys.path``: a start of an engine asks hundreds of times.
    """
    known = _versions(tuple(map(_state, sys.path)))
    if name not in known:
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            known[name] = None
    return known[name]


@lru_cache(maxsize=4)
def _versions(state: tuple[tuple[str, int], ...]) -> dict[str, str | None]:
    """The versions that were looked up while ``sys.path`` is in ``state``, by name."""
    return {}


def _state(entry: str) -> tuple[str, int]:
    """An entry of ``sys.path``, and when something was added to it or removed; 0 where it is not there."""
    try:
        return entry, os.stat(entry or ".").st_mtime_ns
    except OSError:
        return entry, 0


def locate_module(distribution: Distribution, top: str) -> Path | Reason:
    """Return the folder of the top-level package ``top`` of ``distribution`` (the file, if it is a plain module).

    Only the top-level name is looked up: a dotted one would import its parents. The Reason says that the module cannot
    be found, or that what would be imported lies outside the distribution's recorded files and, where it is installed
    editable, outside its source tree.
    """
    spec = _spec_of(top)
    found = [*(spec.submodule_search_locations or ())] if spec else []
    if spec and spec.has_location and spec.origin:
        found.append(spec.origin)
    reinstall = f"pip install --force-reinstall {distribution.name}"
    if not found:
        return Reason("module-missing", f"module {top} of {distribution.name} cannot be found", fix=reinstall)
    places = [Path(place).resolve() for place in found]
    owned = next((place for place in places if _owns(distribution, top, place)), None)
    if owned:
        return owned
    owner = owner_of(top, other_than=distribution.name)
    return Reason(
        "module-namesake",
        f"module {top} does not belong to {distribution.name}: a namesake is found in its place"
        + (f", from {owner}" if owner else ""),
        wanted=f"{top} from {distribution.name}",
        supported=str(places[0]),
        fix=f"pip uninstall {owner}; {reinstall}" if owner else f"remove that namesake, then {reinstall}",
    )


def owner_of(top: str, other_than: str) -> str | None:
    """Return the name of the installed distribution, ``other_than`` left out, that provides the top-level module.

    None where no such module is found; only where one is, all distributions are read, which takes a second.
    """
    if _spec_of(top) is None:
        return None
    wanted = canonicalize_name(other_than)
    names = (name for name in packages_distributions().get(top, ()) if canonicalize_name(name) != wanted)
    return next(names, None)


def _spec_of(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):  # ValueError: a module without a spec is imported under this name
        return None


def editable_source(distribution: Distribution) -> Path | None:
    """Return the source tree of an editable install, None for any other (PEP 610)."""
    text = distribution.read_text("direct_url.json")
    direct_url = json.loads(text) if text else {}
    url = urlparse(direct_url.get("url", ""))
    if url.scheme != "file" or not direct_url.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(url.path)).resolve()


def _owns(distribution: Distribution, top: str, place: Path) -> bool:
    """Say whether ``place`` is among what ``distribution`` installed for ``top``, or in its editable source tree."""
    record = distribution.read_text("RECORD")
    if record is None:  # a source tree on sys.path, or a system package
        recorded = {top, f"{top}.py"}
    else:  # read here: ``distribution.files`` asks the file system for each of what may be thousands
        firsts = {row[0].partition("/")[0] for row in csv.reader(record.splitlines()) if row}
        recorded = {first for first in firsts if first.partition(".")[0] == top}
    if any(place.is_relative_to(_absolute(distribution, part)) for part in recorded):
        return True
    source = editable_source(distribution)
    if source is None or not place.is_relative_to(source):
        return False
    # A virtual environment often lies in the source tree, and other distributions' modules in that.
    return not place.is_relative_to(_absolute(distribution, ""))


def _absolute(distribution: Distribution, part: str) -> Path:
    return Path(str(distribution.locate_file(part))).resolve()
