"""Which platform an engine runs on: asked of every installed platform once, decided here and nowhere else.

The user's flag decides; else an accelerator comes before a CPU. Two accelerators and no flag are an error that names
both. A platform that is broken, or whose devices are there but unusable, is never passed over in favour of a CPU:
that is how a failed plugin becomes a slow server that nobody notices. One whose ``detect`` hangs is passed over with a
warning: whether its devices are there, nobody knows.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import cast

from hardpoint.plugin_host import Offer, PluginRecord, PluginSet
from hardpoint.plugin_host.loading import describe
from hardpoint.plugin_host.registry import WHERE_PLUGINS_ARE
from hardpoint.selection.plan import Plan, PlanEntry, Rejection, Rule, StepRange
from hardpoint.selection.settings import Settings
from hardpoint_plugin_api import (
    NO_DEVICE,
    CheckContext,
    ConfigError,
    DeviceInfo,
    Platform,
    PlatformError,
    PlatformWorkload,
    PluginError,
    Reason,
    Request,
    SelectionError,
    UnknownNameError,
)

logger = logging.getLogger(__name__)

DETECT_SECONDS = 30.0
"""Seconds that a platform may take to look for its devices; drivers of hosts with many take some seconds."""
HANGS = "detect-hangs"
"""The code of the Reason against a platform that takes longer."""


@dataclass(frozen=True)
class PlatformChoice:
    """The platform that was chosen, its devices, and the verdict as a plan."""

    platform: type[Platform]
    device: DeviceInfo
    plan: Plan


def choose_platform(plugins: PluginSet, settings: Settings) -> PlatformChoice:
    """Ask every platform for its devices and choose one.

    Raises UnknownNameError for a name that no plugin offers, SelectionError where the one asked for cannot serve, and
    PlatformError where nothing can, several could, or the fallback to a CPU would hide a failure.
    """
    choice = settings.choice("platform", None)
    offers = plugins.offers("platform")
    if choice:
        names = {o.contribution.name for o in offers}
        if choice.name not in names:
            where = plugins.told_unused("platform", name=choice.name) or WHERE_PLUGINS_ARE
            raise UnknownNameError("platform", choice.name, names, where)
        offers = [o for o in offers if o.contribution.name == choice.name]
    answers = {offer: _ask(plugins, offer) for offer in offers}
    found = {o: a[1] for o, a in answers.items() if isinstance(a, tuple)}
    refused = {o: a for o, a in answers.items() if isinstance(a, Reason)}
    if choice and not found:
        raise SelectionError(
            f"--platform {choice.name}: it cannot be used here",
            {o.contribution.name: [reason] for o, reason in refused.items()},
        )
    winner = _automatic(plugins, found, refused)
    rule: Rule = "flag" if choice else "only candidate" if len(offers) == 1 else "priority"
    rejected = [Rejection.because(o, reason) for o, reason in refused.items()]
    if choice:
        others = (o for o in plugins.offers("platform") if o != winner)
        rejected += [Rejection.because(o, _not_asked_for(choice.name)) for o in others]
    else:
        after = Reason(
            "comes-after", f"an accelerator or a platform of higher priority is here: {winner.contribution.name}"
        )
        rejected += [Rejection.because(o, after) for o in found if o != winner]
    plan = Plan(PlatformWorkload(), (PlanEntry(StepRange(), winner, rule),), tuple(rejected))
    platform_class, device = cast(tuple[type[Platform], DeviceInfo], answers[winner])
    return PlatformChoice(platform_class, device, plan)


def preset_choice(plugins: PluginSet, settings: Settings, name: str) -> PlatformChoice:
    """Answer as if the device that the preset ``name`` describes were here.

    Raises UnknownNameError for no preset, ConfigError where the user asked for another platform.
    """
    presets = plugins.devices()
    if name not in presets:
        raise _unknown_preset(name, presets, plugins.told_unused_device(name) or WHERE_PLUGINS_ARE)
    device = presets[name]
    choice = settings.choice("platform", None)
    if choice and choice.name != device.platform:
        raise ConfigError(
            f"--device {name} is a device of the platform {device.platform!r}, and {choice.flag} asks for "
            f"{choice.name!r}; leave one of them out"
        )
    offers = plugins.offers("platform")
    winner = next((o for o in offers if o.contribution.name == device.platform), None)
    if winner is None:
        raise UnknownNameError("platform", device.platform, (o.contribution.name for o in offers))
    rejected = tuple(Rejection.because(o, _not_asked_for(f"--device {name}")) for o in offers if o is not winner)
    plan = Plan(PlatformWorkload(), (PlanEntry(StepRange(), winner, "flag"),), rejected)
    return PlatformChoice(cast(type[Platform], plugins.load(winner)), device, plan)


def _not_asked_for(name: str) -> Reason:
    return Reason("not-asked-for", f"{name} was asked for")


def detect(plugins: PluginSet, offer: Offer) -> tuple[type[Platform], DeviceInfo] | Reason:
    """Load a platform and let it detect its devices; a failure of the platform becomes the reason against it.

    A ``detect`` that does not return within DETECT_SECONDS is left alone, in a thread that nobody waits for. One that
    keeps Python's lock meanwhile cannot be left alone.
    """
    try:
        platform = plugins.load(offer)
    except PluginError as error:
        return Reason("load-failed", str(error), fix="hardpoint plugins list")
    if not (isinstance(platform, type) and issubclass(platform, Platform)):
        return Reason("load-failed", f"{offer.contribution.target} is no Platform")
    who, answers = f"detect() of {platform.__qualname__}, plugin {offer.plugin},", SimpleQueue[object]()

    def ask() -> None:
        try:
            answers.put(platform.detect())
        except Exception as error:  # a plugin's own bug must not stop the others
            answers.put(Reason("detect-failed", f"{who} raised {describe(error)}"))
        except BaseException as error:  # an exit, of this thread alone
            answers.put(Reason("detect-failed", f"{who} raised {type(error).__name__}"))

    thread = threading.Thread(target=ask, name=f"detect {offer.contribution.name}", daemon=True)
    thread.start()
    try:
        info = answers.get(timeout=DETECT_SECONDS)
    except Empty:
        return Reason(HANGS, f"{who} did not return within {DETECT_SECONDS:g} s; it is at {_place_of(thread)}")
    if isinstance(info, DeviceInfo):
        return platform, info
    if isinstance(info, Reason):
        return info
    return Reason("detect-failed", f"{who} must return DeviceInfo or Reason, got {info!r}")


def _place_of(thread: threading.Thread) -> str:
    """Where a thread is now: its innermost line of Python."""
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}" if frame else "its end"


def _ask(plugins: PluginSet, offer: Offer) -> tuple[type[Platform], DeviceInfo] | Reason:
    """The device that ``detect`` finds, unless the offer's own requirements exclude it."""
    answer = detect(plugins, offer)
    if isinstance(answer, Reason):
        return answer
    context = CheckContext(Request(answer[1], PlatformWorkload()), offer.api)
    reasons = (requirement.check(context) for requirement in offer.contribution.requirements)
    return next((reason for reason in reasons if reason), answer)


def _automatic(plugins: PluginSet, found: dict[Offer, DeviceInfo], refused: dict[Offer, Reason]) -> Offer:
    """The winner among what was found, by the rules at the top of this file."""
    accelerators = [o for o, info in found.items() if info.accelerator]
    if len(accelerators) > 1:
        names = " and ".join(f"{o.contribution.name} ({found[o].name})" for o in accelerators)
        raise PlatformError(f"several accelerators are here: {names}; choose with --platform NAME")
    if accelerators:
        return accelerators[0]
    best = min(found, key=lambda o: (-o.contribution.priority, o.contribution.name), default=None)
    for offer, reason in refused.items():
        if reason.code == HANGS:
            name = offer.contribution.name
            logger.warning("platform %s is passed over: %s; ask for it with --platform %s", name, reason, name)
    failed = {o: reason for o, reason in refused.items() if reason.code not in (NO_DEVICE, HANGS)}
    if failed and best:
        lines = "\n".join(f"  {o.contribution.name}: {reason}" for o, reason in failed.items())
        fallback = best.contribution.name
        raise PlatformError(
            f"an installed platform cannot be used, and falling back to {fallback} would hide it:\n{lines}\n"
            f"Mend it, uninstall that plugin, or ask for --platform {fallback}"
        )
    if best is None:
        lines = "\n".join(f"  {o.contribution.name}: {reason}" for o, reason in refused.items())
        left_out = [r.name for r in plugins.records if r.status == "not-selected" and _has_platform(r)]
        remedy = (
            f"--plugins leaves out {', '.join(left_out)}; add the one to use"
            if left_out
            else "install a platform plugin (docs/running.md, 'Install')"
        )
        raise PlatformError(f"no platform can be used here; {remedy}" + (f"\n{lines}" if lines else ""))
    return best


def _has_platform(record: PluginRecord) -> bool:
    return any(c.family == "platform" for c in record.contributions)


def _unknown_preset(name: str, presets: Mapping[str, DeviceInfo], where: str) -> UnknownNameError:
    """The error about ``--device NAME``; for a platform's name it says which devices that platform has."""
    own = sorted(preset for preset, device in presets.items() if device.platform == name)
    if own:
        return UnknownNameError("device", name, own, f"{name!r} is a platform; on this machine: --platform {name}.")
    return UnknownNameError("device", name, presets, where)
