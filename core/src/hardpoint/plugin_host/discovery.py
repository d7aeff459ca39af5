"""Find the installed plugins and read their manifests. Nothing of a plugin is imported here.

Order of checks: selected by config, in the lock file, manifest, API range, conflicts. A plugin that fails a check is
recorded with the reason. Raises only where the user asked for that plugin by name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from email.parser import HeaderParser

from importlib_metadata import Distribution, EntryPoint
from packaging.utils import canonicalize_name

from hardpoint.plugin_host.conflicts import refuse_conflicts
from hardpoint.plugin_host.lock import LockFile
from hardpoint.plugin_host.order import load_order
from hardpoint.plugin_host.record import PluginRecord
from hardpoint.plugin_host.registry import PluginSet
from hardpoint.plugin_host.wrapped import Installed
from hardpoint_plugin_api import ENTRY_POINT_GROUP, MANIFEST_NAME, ManifestError, Reason, check_api, read_manifest
from hardpoint_plugin_api.distributions import editable_source, locate_module

logger = logging.getLogger(__name__)

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")


def discover(allow: Sequence[str] | None = None, lock: LockFile | None = None, *, quiet: bool = False) -> PluginSet:
    """Return the installed plugins; with ``allow``, only core and the plugins of these names are used, with ``lock``
    only what is to the byte as the lock file says.

    Raises the error of the first name in ``allow`` that is not usable: UnknownNameError where none has it, else
    ManifestError, PluginConflictError or PluginLoadError with the reason and its fix; and PluginLoadError where core
    is not as ``lock`` says. Else nothing raises: a plugin that cannot be used is logged (unless ``quiet``, for a look
    ahead of the real one), and stands in the records.
    """
    records, libraries = list(_installed()), Installed()
    for record in records:
        if allow is not None and record.name not in allow and not record.is_core:
            record.status = "not-selected"
            record.reason = Reason(
                "not-selected", "it is not on the list of --plugins", fix=f"add {record.name} to --plugins"
            )
        elif lock is not None and (objection := lock.objection(record, libraries)):
            record.status, record.reason = "refused", objection  # whatever else is wrong comes after this
            if record.is_core:
                raise record.error()
    refuse_conflicts(records)
    plugins = PluginSet(load_order(records))
    if allow is not None:
        plugins.require(allow)
    if quiet:
        return plugins
    if lock is not None:
        _warn_of_missing(lock, records)
    for record in plugins.records:
        if record.status == "refused":
            logger.warning("plugin %s is not used: %s", record.title, record.reason)
    return plugins


def _warn_of_missing(lock: LockFile, records: Sequence[PluginRecord]) -> None:
    installed = {(record.distribution, record.entry_value) for record in records}
    for key, locked in lock.plugins.items():
        if key not in installed:
            logger.warning("plugin %s is in %s, and is not installed", locked.title, lock.path)


def _installed() -> Iterator[PluginRecord]:
    """A record for each entry point of the group, in no particular order.

    As fast as ``importlib_metadata.entry_points``, but one distribution's damaged metadata does not hide the others.
    """
    seen = set()
    for distribution in Distribution.discover():
        try:
            if ENTRY_POINT_GROUP not in (distribution.read_text("entry_points.txt") or ""):
                continue
        except (OSError, UnicodeDecodeError):
            continue
        name, version = _identity(distribution)
        if name not in seen:  # the first on sys.path is the one that imports find
            seen.add(name)
            yield from _plugins_of(distribution, name, version)


def _identity(distribution: Distribution) -> tuple[str, str]:
    try:
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        metadata = HeaderParser().parsestr(text)  # a long description may stand behind the headers
        return canonicalize_name(metadata["Name"]), metadata["Version"] or "of unknown version"
    except Exception:  # absent or damaged metadata: the plugin is still worth a record
        return "unnamed-distribution", "of unknown version"


def _plugins_of(distribution: Distribution, name: str, version: str) -> Iterator[PluginRecord]:
    try:
        entries = list(distribution.entry_points.select(group=ENTRY_POINT_GROUP))
    except Exception as error:  # each version of importlib_metadata raises something else
        record = PluginRecord(name, name, version, entry_value="")
        record.refuse(_damaged(record, f"its entry_points.txt cannot be read: {error}"))
        yield record
        return
    for entry in entries:
        record = PluginRecord(entry.name, name, version, entry.value, installation=distribution)
        try:
            _read(record, distribution, entry)
        except Exception as error:  # one damaged installation must not stop the others
            record.refuse(_damaged(record, f"its installation cannot be read: {type(error).__name__}: {error}"))
        yield record


def _read(record: PluginRecord, distribution: Distribution, entry: EntryPoint) -> None:
    """Fill ``record`` with what can be known without an import; refuse it where that does not do."""
    record.editable = editable_source(distribution) is not None
    if not _MODULE.match(entry.value):
        record.refuse(_damaged(record, f"its entry point must name a module, got {entry.value!r}"))
        return
    top = entry.value.partition(".")[0]
    place = locate_module(distribution, top)
    if isinstance(place, Reason):
        record.refuse(place)
        return
    if not (place / MANIFEST_NAME).is_file():
        author = f"declare {MANIFEST_NAME} as package data of {top}, then reinstall {record.distribution}"
        record.refuse(Reason("manifest", f"there is no {MANIFEST_NAME} in {place}", fix=author))
        return
    record.folder = place
    try:
        record.manifest = read_manifest(place / MANIFEST_NAME)
    except ManifestError as error:
        newer = f"pip install --upgrade hardpoint-core {record.distribution}"
        fix = f"correct {place / MANIFEST_NAME}" if record.editable else f"{newer}, or tell its author"
        record.refuse(Reason("manifest", str(error), fix=fix))
        return
    record.name = record.manifest.name
    unfit = check_api(record.manifest.api)
    if unfit:
        record.refuse(unfit)


def _damaged(record: PluginRecord, message: str) -> Reason:
    return Reason("damaged", message, fix=f"pip install --force-reinstall {record.distribution}")
