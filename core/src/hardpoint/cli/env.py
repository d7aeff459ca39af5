"""``hardpoint env``: what this machine has, for bug reports and for the question what is missing."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import click
import importlib_metadata
from packaging.requirements import Requirement

from hardpoint.bytecode import missing_bytecode
from hardpoint.cli.plugins import describe
from hardpoint.platforms import host
from hardpoint.plugin_host import Offer, PluginSet, discover
from hardpoint.selection.platform_choice import detect
from hardpoint.terminal.output import print_json, print_table
from hardpoint_plugin_api import (
    FAMILIES,
    CheckContext,
    DeviceInfo,
    PlatformWorkload,
    Reason,
    Request,
)
from hardpoint_plugin_api.requirements import PackageRequirement, SymbolRequirement

Report = dict[str, Any]
_PLATFORM_KEYS = ("platform", "plugin", "name", "count", "arch", "isa", "memory_gib", "driver", "problem", "fix")


@click.command(short_help="Report versions, devices and what is missing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def env(as_json: bool) -> None:
    """Report versions, devices and plugins, and what is missing to enable more. Creates no device context."""
    report = collect(discover())
    if as_json:
        print_json(report)
        return
    print_table(["machine", "what it is"], report["machine"].items())
    print_table(["package", "version"], report["packages"].items())
    print_table(
        [
            *("platform", "plugin", "device", "count", "architecture", "kernels for", "memory GiB", "driver"),
            *("problem", "fix"),
        ],
        [[p.get(key) for key in _PLATFORM_KEYS] for p in report["platforms"]],
    )
    print_table(
        ["plugin", "version", "status", "note"],
        [[p["name"], p["version"], p["status"], p["note"]] for p in report["plugins"]],
    )
    if report["missing"]:
        print_table(["to enable", "of plugin", "missing", "fix"], [list(m.values()) for m in report["missing"]])


def collect(plugins: PluginSet) -> Report:
    """The whole report as plain data."""
    offers = [
        offer for family in FAMILIES for offer in plugins.offers(family)
    ]  # first: a plugin that fails loses its own
    found = {offer: _detect(plugins, offer) for offer in plugins.offers("platform")}
    devices = [answer for answer in found.values() if isinstance(answer, DeviceInfo)]
    return {
        "machine": _machine(),
        "packages": _packages(offers),
        "platforms": [_platform(offer, answer) for offer, answer in found.items()],
        "plugins": [describe(record) for record in plugins.records],
        "missing": _missing(offers, devices),
    }


def _machine() -> dict[str, str]:
    cpu = host.read_fields(host.ROOT / "proc/cpuinfo", ":")
    memory = host.memory()
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        system = platform.system()
    return {
        "os": f"{system}, kernel {platform.release()}, {platform.machine()}",
        "python": f"{platform.python_version()} ({sys.executable})",
        "bytecode": missing_bytecode() or "Python keeps it",
        "cpu": cpu.get("model name", platform.processor() or "unknown"),
        "cores": str(host.available_cores()),
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available",
    }


def _packages(offers: Iterable[Offer]) -> dict[str, str | None]:
    """Versions of what Hardpoint and its plugins need, None where it is not installed."""
    own = {"hardpoint-core", "hardpoint-plugin-api", *(offer.distribution for offer in offers)}
    needed = {name: Requirement(text) for dist in own for text in _requires(dist) for name in [Requirement(text).name]}
    names = own | {name for name, requirement in needed.items() if "extra" not in str(requirement.marker)}
    for offer in offers:
        names |= {name for requirement in offer.contribution.requires if (name := _package(requirement))}
    return {name: _version(name) for name in sorted(names)}


def _package(requirement: object) -> str | None:
    if isinstance(requirement, PackageRequirement):
        return Requirement(requirement.spec).name
    return requirement.distribution if isinstance(requirement, SymbolRequirement) else None


def _requires(distribution: str) -> list[str]:
    try:
        return importlib_metadata.requires(distribution) or []
    except importlib_metadata.PackageNotFoundError:
        return []


def _version(name: str) -> str | None:
    try:
        return importlib_metadata.version(name)
    except importlib_metadata.PackageNotFoundError:
        return None


def _detect(plugins: PluginSet, offer: Offer) -> DeviceInfo | Reason:
    answer = detect(plugins, offer)
    return answer if isinstance(answer, Reason) else answer[1]


def _platform(offer: Offer, answer: DeviceInfo | Reason) -> Report:
    title = {"platform": offer.contribution.name, "plugin": f"{offer.plugin} {offer.version}"}
    if isinstance(answer, Reason):
        return {**title, "problem": answer.message, "fix": answer.fix}
    data = {key: sorted(value) if isinstance(value, frozenset) else value for key, value in asdict(answer).items()}
    report = {**title, **data, "memory_gib": round(answer.memory_bytes / 2**30, 1)}
    if reasons := [reason for _, reason in answer.absent_features]:
        report["problem"] = "; ".join(reason.message for reason in reasons)
        report["fix"] = "; ".join(reason.fix for reason in reasons if reason.fix)
    return report


def _missing(offers: Iterable[Offer], devices: Iterable[DeviceInfo]) -> list[dict[str, str]]:
    """Contributions for devices that are here, and the packages that keep them from serving."""
    missing = {}
    for device in devices:
        for offer in offers:
            contribution = offer.contribution
            if contribution.platforms and device.platform not in contribution.platforms:
                continue
            context = CheckContext(Request(device, PlatformWorkload()), offer.api)
            for requirement in contribution.requires:
                if _package(requirement) and (reason := requirement.check(context)):
                    text = reason.message + (f" (wanted {reason.wanted})" if reason.wanted else "")
                    missing[contribution] = {
                        "contribution": str(contribution),
                        "plugin": offer.plugin,
                        "reason": text,
                        "fix": reason.fix or "",
                    }
    return list(missing.values())
