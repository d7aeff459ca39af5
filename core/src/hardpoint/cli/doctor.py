"""The working and the broken contributions of each installed plugin, and the command that mends each.

Unlike listing, this runs plugins' code: platforms look for their devices, and what fits a device that is here is
imported, though not called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from importlib_metadata import PackageNotFoundError, version

from hardpoint.plugin_host import Offer, PluginRecord, PluginSet
from hardpoint.plugin_host.wrapped import Installed, required_by
from hardpoint.selection.platform_choice import detect
from hardpoint_plugin_api import (
    NO_DEVICE,
    CheckContext,
    DeviceInfo,
    PlatformWorkload,
    PluginLoadError,
    Reason,
    Request,
)
from hardpoint_plugin_api.requirements import (
    ArchRequirement,
    DeviceFeatureRequirement,
    PackageRequirement,
    SymbolRequirement,
)

State = Literal["works", "missing", "not for this machine", "broken", "namesake", "edited"]
"""``edited``: a library that the plugin requires is not as it was installed."""
_OF_THE_MACHINE = (PackageRequirement, SymbolRequirement, ArchRequirement, DeviceFeatureRequirement)
"""Requirements that a machine meets or not, whatever is asked of it later."""
_MOST_NAMES = 5


@dataclass(frozen=True)
class Finding:
    """One thing about a plugin. ``about`` is what of it, ``fix`` a command where there is one."""

    plugin: str
    about: str
    state: State
    note: str
    fix: str = ""


def examine(plugins: PluginSet, names: Sequence[str] = ()) -> list[Finding]:
    """Try every plugin, or those of these names, on this machine. Raises UnknownNameError."""
    records = [plugins.record(name) for name in names] if names else list(plugins.records)
    found: dict[Offer, DeviceInfo | Reason] = {}
    for offer in plugins.offers("platform"):
        answer = detect(plugins, offer)
        found[offer] = answer if isinstance(answer, Reason) else answer[1]
    devices = [answer for answer in found.values() if isinstance(answer, DeviceInfo)]
    return [finding for record in records for finding in _of_plugin(plugins, record, found, devices)]


def _of_plugin(
    plugins: PluginSet, record: PluginRecord, found: dict[Offer, DeviceInfo | Reason], devices: list[DeviceInfo]
) -> Iterator[Finding]:
    offers = plugins.offers_of(record)
    verdicts = {offer: _verdict(plugins, offer, devices) for offer in offers if offer not in found}
    if record.reason is not None:  # of the plugin as a whole, perhaps found out a moment ago
        yield Finding(record.name, "the plugin", "broken", record.reason.message, record.reason.fix or "")
        yield from _namesakes(record)
        return
    yield from _libraries(record)
    for offer in offers:
        if offer in found:
            yield _of_platform(offer, found[offer])
    for state in ("works", "not for this machine"):
        families = Counter(o.contribution.family for o, verdict in verdicts.items() if verdict == state)
        if families:
            about = ", ".join(f"{family} {count}" for family, count in families.items())
            yield Finding(record.name, about, state, "")
    yield from _together(verdict for verdict in verdicts.values() if isinstance(verdict, Finding))
    yield from _namesakes(record)


def _together(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings; the ones that one remedy mends are joined to one."""
    alike: dict[Finding, list[str]] = {}
    for finding in findings:
        alike.setdefault(replace(finding, about=""), []).append(finding.about)
    yield from (replace(finding, about=", ".join(about)) for finding, about in alike.items())


def _of_platform(offer: Offer, answer: DeviceInfo | Reason) -> Finding:
    about = str(offer.contribution)
    if isinstance(answer, DeviceInfo):
        return Finding(offer.plugin, about, "works", f"{answer.count} x {answer.name} ({answer.arch})")
    state: State = "not for this machine" if answer.code == NO_DEVICE else "broken"
    return Finding(offer.plugin, about, state, answer.message, answer.fix or "")


def _verdict(plugins: PluginSet, offer: Offer, devices: Iterable[DeviceInfo]) -> State | Finding:
    """Reasons that keep a contribution from serving any device here: a state where there is nothing to mend."""
    contribution = offer.contribution
    able = [d for d in devices if not contribution.platforms or d.platform in contribution.platforms]
    reasons = [_unmet(offer, device) for device in able]
    if not able or all(reason is not None and reason.code in ("arch", "device-feature") for reason in reasons):
        return "not for this machine"
    if None not in reasons:
        reason = next(r for r in reasons if r is not None and r.code not in ("arch", "device-feature"))
        wanted = f" (wanted {reason.wanted})" if reason.wanted else ""
        return Finding(offer.plugin, str(contribution), "missing", reason.message + wanted, reason.fix or "")
    try:
        plugins.load(offer)
    except PluginLoadError as error:
        note, _, fix = str(error).partition("; fix: ")
        return Finding(offer.plugin, str(contribution), "broken", note, fix)
    return "works"


def _unmet(offer: Offer, device: DeviceInfo) -> Reason | None:
    context = CheckContext(Request(device, PlatformWorkload()), offer.api)
    requirements = [r for r in offer.contribution.requires if isinstance(r, _OF_THE_MACHINE)]
    return next((reason for r in requirements if (reason := r.check(context))), None)


def _libraries(record: PluginRecord) -> Iterator[Finding]:
    """The installed distributions that the plugin requires: versions, and whether their files are as RECORD says."""
    installed = Installed()
    for name in sorted(required_by(record.contributions)):
        library = installed.find(name)
        if library is None:
            continue  # a contribution's own finding says so
        about, fix = f"library {name} {library.version}", f"pip install --force-reinstall {name}=={library.version}"
        try:
            edited, digest = library.edited(), library.sha256
        except OSError as error:
            yield Finding(record.name, about, "broken", f"a file of it cannot be read: {error}", fix)
            continue
        if edited:
            named = ", ".join(edited[:_MOST_NAMES]) + (", ..." if len(edited) > _MOST_NAMES else "")
            yield Finding(record.name, about, "edited", f"changed since it was installed: {named}", fix)
        else:
            editable = ", editable" if library.editable else ""
            yield Finding(record.name, about, "works", f"sha256 {digest[:12]}{editable}")


def _namesakes(record: PluginRecord) -> Iterator[Finding]:
    """Packages that are installed, and were perhaps meant to be others."""
    for namesake in record.manifest.namesakes if record.manifest else ():
        here, meant = _version(namesake.package), _version(namesake.meant)
        if here is None:
            continue
        what = f": {namesake.summary}" if namesake.summary else ""
        note = f"{namesake.package} {here} is installed{what}; "
        fix = f"pip uninstall {namesake.package}; pip install --force-reinstall {namesake.meant}"
        if meant is not None:
            note += f"{namesake.meant} {meant} is too, and one may have overwritten the other"
        else:
            note += f"what this plugin uses is {namesake.meant}, which is not"
        yield Finding(record.name, f"package {namesake.package}", "namesake", note, fix)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
