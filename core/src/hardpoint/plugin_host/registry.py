"""The set of plugins that one engine, or one command, works with."""

from __future__ import annotations

import importlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from packaging.utils import canonicalize_name

from hardpoint.logs import log_once
from hardpoint.plugin_host.hooks import Hooks
from hardpoint.plugin_host.loading import IMPORT_ERRORS, describe, import_fix, load_target
from hardpoint.plugin_host.record import Offer, PluginRecord
from hardpoint.plugin_host.shims import fitted
from hardpoint.plugin_host.signatures import DECLARING, layer_misfit, misfit, op_misfit
from hardpoint_plugin_api import (
    ConfigChange,
    ConfigKey,
    DeviceInfo,
    EngineInfo,
    PluginLoadError,
    Reason,
    UnknownNameError,
)
from hardpoint_plugin_api.families import ANY

logger = logging.getLogger(__name__)

_SLOW_IMPORT_SECONDS = 1.0
WHERE_PLUGINS_ARE = (
    "A package brings it. docs/running.md, 'Install', names the packages of this project and how to install them. "
    "Install no package by a guessed name."
)
"""Ends an error about something that no installed plugin brings. A name made of the user's word would be an invitation
to whoever publishes a package of that name."""


class PluginSet:
    """The installed plugins and what became of them; imports a plugin when something of it is first used.

    ``records`` are the usable plugins in load order, then all others by name.
    """

    def __init__(self, records: Iterable[PluginRecord]) -> None:
        self.records: Sequence[PluginRecord] = tuple(records)
        self._hooks = Hooks()
        self._targets: dict[Offer, object] = {}
        self._failures: dict[Offer, PluginLoadError] = {}

    def tuning_folders(self, platform: str) -> list[Path]:
        """The folder ``tuning`` of each usable plugin, core aside, that contributes ``platform``, where it has one."""
        offering = {o.plugin for o in self.offers("platform") if o.contribution.name == platform}
        records = [r for r in self.records if r.name in offering and r.is_usable and not r.is_core]
        return [r.folder / "tuning" for r in records if r.folder and (r.folder / "tuning").is_dir()]

    def record(self, name: str) -> PluginRecord:
        """Return the plugin of this name, a usable one before one that is not; raises UnknownNameError.

        A distribution's name stands for the plugin that it brings, where that is one.
        """
        named = [r for r in self.records if r.name == name]
        if not named:
            brought = [r for r in self.records if canonicalize_name(r.distribution) == canonicalize_name(name)]
            named = brought if len(brought) == 1 else []
        if not named:
            raise UnknownNameError("plugin", name, {r.name for r in self.records}, WHERE_PLUGINS_ARE)
        return next((r for r in named if r.is_usable), named[0])

    def require(self, names: Iterable[str]) -> None:
        """Raise the first error of a plugin that was asked for by name and is not usable.

        UnknownNameError where none has the name; else ManifestError, PluginConflictError or PluginLoadError.
        """
        for name in names:
            record = self.record(name)
            if not record.is_usable:
                raise record.error()

    def offers(self, family: str, of: str | None = None) -> list[Offer]:
        """Return the contributions of usable plugins to ``family`` (to one op, layer or model, if ``of`` is given).

        A contribution whose ``of`` is ANY is among those to each.
        """
        found = self._by_family.get(family, ())
        usable = {record for record in self.records if record.is_usable}
        return [o for record, o in found if (of is None or o.contribution.of in (of, ANY)) and record in usable]

    def offers_of(self, record: PluginRecord) -> list[Offer]:
        """Return the contributions of one plugin, none where it is not usable."""
        return list(self._made[record]) if record.is_usable else []

    def told_unused(self, family: str, of: str | None = None, name: str | None = None) -> str:
        """Sentences about installed plugins that are not used and would contribute to ``family``: for ``of``, by
        ``name``, where these are given. Each says how to have the plugin used. Empty where there are none.
        """

        def has_it(record: PluginRecord) -> bool:
            return any(
                c.family == family and (of is None or c.of in (of, ANY)) and name in (None, c.name)
                for c in record.contributions
            )

        return _told(record for record in self.records if not record.is_usable and has_it(record))

    def told_unused_device(self, name: str) -> str:
        """The same about plugins with a device preset ``name``."""
        unused = (r for r in self.records if not r.is_usable and r.manifest)
        return _told(r for r in unused if r.manifest and any(device.name == name for device in r.manifest.devices))

    @cached_property
    def _made(self) -> Mapping[PluginRecord, Sequence[Offer]]:
        """The offers of each plugin, usable or not."""
        return {
            r: [Offer(c, r.name, r.manifest.api, r.distribution, r.version) for c in r.manifest.contributions]
            if r.manifest
            else []
            for r in self.records
        }

    @cached_property
    def _by_family(self) -> Mapping[str, Sequence[tuple[PluginRecord, Offer]]]:
        """All offers by family, in the order of their plugins: an engine's start asks for a hundred lists of them."""
        found = defaultdict[str, list[tuple[PluginRecord, Offer]]](list)
        for record, offers in self._made.items():
            for offer in offers:
                found[offer.contribution.family].append((record, offer))
        return found

    def identities(self) -> list[list[str | None]]:
        """The usable plugins in order, each as name, distribution, version, entry value: ranks compare these lists."""
        return [[r.name, r.distribution, r.version, r.entry_value] for r in self.records if r.is_usable]

    def names(self, family: str) -> list[str]:
        """Return the names that users may choose from in ``family``, sorted."""
        return sorted({offer.contribution.name for offer in self.offers(family)})

    def config_keys(self) -> dict[str, dict[str, ConfigKey]]:
        """Return the settings that each usable plugin owns, by plugin and key."""
        return {
            r.name: {key.name: key for key in r.manifest.config} for r in self.records if r.is_usable and r.manifest
        }

    def devices(self) -> dict[str, DeviceInfo]:
        """Return the device presets of usable plugins by name."""
        return {d.name: d for r in self.records if r.is_usable and r.manifest for d in r.manifest.devices}

    def activate(self, name: str) -> None:
        """Import the plugin's module and register its hooks; does nothing for a plugin that is active.

        Raises what ``require`` does, and PluginLoadError where the import or the hooks fail: then nothing of the
        plugin is registered, its record says why, and every later call raises the same.
        """
        self.require([name])
        record = self.record(name)
        if record.status == "active":
            return
        began = time.perf_counter()
        try:
            module = importlib.import_module(record.entry_value)
        except IMPORT_ERRORS as error:
            record.import_seconds = time.perf_counter() - began
            message = f"importing {record.entry_value} failed after {record.import_seconds:.1f} s: {describe(error)}"
            fix = import_fix(error, record.entry_value, record.distribution)
            record.fail(Reason("import-failed", message, fix=fix), error)
            raise record.error() from error
        record.import_seconds = time.perf_counter() - began
        try:
            self._hooks.register(name, module)
        except Exception as error:  # PluginLoadError, or whatever looking at the module's attributes raises
            fix = f"pip install --upgrade {record.distribution}, or correct {record.entry_value}"
            record.fail(Reason("wrong-hooks", f"{record.entry_value}: {error}", fix=fix), error)
            raise record.error() from error
        record.status = "active"
        if record.import_seconds > _SLOW_IMPORT_SECONDS:
            message = f"plugin {record.title} took {record.import_seconds:.1f} s to import"
            log_once(logger, logging.WARNING, ("slow-import", name), message, scope=self)

    def load(self, offer: Offer) -> object:
        """Return the target of ``offer``, imported on first use, with its plugin activated before.

        Raises PluginLoadError naming the plugin, the target, the cause and the fix: where it cannot be imported, and
        where its methods cannot be called as their interface says. A target that failed is not tried again.
        """
        if offer not in self._targets:
            if offer in self._failures:
                raise self._failures[offer].with_traceback(None)
            self.activate(offer.plugin)
            try:
                target = fitted(load_target(offer.contribution, offer.distribution), offer)
                self._check_signatures(offer, target)
                self._targets[offer] = target
            except PluginLoadError as error:
                failure = PluginLoadError(f"plugin {self.record(offer.plugin).title}: {error}")
                self._failures[offer] = failure
                raise failure from error.__cause__
        return self._targets[offer]

    def _check_signatures(self, offer: Offer, target: object) -> None:
        """Raise PluginLoadError where ``target`` cannot be called as what it implements."""
        c, fault = offer.contribution, misfit(target)
        if fault is None and (declaring := self._declaring(offer)) is not None:
            if c.family == "layer":
                fault = layer_misfit(target, declaring)
            elif callable(declaring):
                fault = op_misfit(target, declaring, c.form)
        if fault:
            fix = f"pip install --upgrade {offer.distribution}, or report this to its author"
            raise PluginLoadError(f"{c}: target {c.target!r}: {fault}; fix: {fix}")

    def _declaring(self, offer: Offer) -> object:
        """The target that declares the signature of what ``offer`` implements; None where that is itself, or broken."""
        c = offer.contribution
        name = DECLARING.get(c.family)
        found = (o for o in self.offers(c.family, c.of) if o.contribution.name == name) if name else iter(())
        declaring = next(found, None)
        if declaring is None or declaring == offer:
            return None
        try:
            return self.load(declaring)
        except PluginLoadError:  # whoever asks for that one is told
            return None

    def configure(self, config: Mapping[str, object], device: DeviceInfo) -> list[ConfigChange]:
        """Return the changes that active plugins wish; raises PluginLoadError naming the plugin whose hook fails."""
        return self._hooks.configure(self._active(), config, device)

    def conformance_generators(self, plugin: str) -> list[object]:
        """Return what makes conformance trials for what ``plugin`` brought into being; it must be active."""
        return self._hooks.conformance(plugin)

    def engine_started(self, engine: EngineInfo) -> None:
        """Tell the active plugins; what one raises is logged and does not stop the others."""
        self._hooks.notify(self._active(), "hardpoint_engine_started", engine)

    def engine_stopping(self, engine: EngineInfo) -> None:
        """Tell the active plugins; what one raises is logged and does not stop the others."""
        self._hooks.notify(self._active(), "hardpoint_engine_stopping", engine)

    def _active(self) -> list[str]:
        return [r.name for r in self.records if r.status == "active"]


def _told(unused: Iterable[PluginRecord]) -> str:
    """Sentences about plugins that have something asked for and are not used; see PluginSet.told_unused."""
    left_out, others = [], []
    for record in unused:
        if record.status == "not-selected":
            left_out.append(record.name)
        else:
            others.append(f"Plugin {record.title} has it, and is not used: {record.reason}.")
    if len(left_out) == 1:
        others.insert(0, f"Plugin {left_out[0]} has it, and is left out by --plugins: add {left_out[0]} to --plugins.")
    elif left_out:
        others.insert(
            0, f"Plugins {', '.join(left_out)} have it, and are left out by --plugins: add one of them to --plugins."
        )
    return " ".join(others)
