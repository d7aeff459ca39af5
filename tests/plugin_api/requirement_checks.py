"""Requirements as a manifest writes them, checked against a device and a workload."""

from __future__ import annotations

from hardpoint_plugin_api import (
    FAMILIES,
    ApiVersion,
    CheckContext,
    DeviceInfo,
    PlatformWorkload,
    Reason,
    Request,
    Requirement,
    Workload,
    parse_requirement,
)

TOY = DeviceInfo("toy", "Toy 1", "cpu", "sm_90", features=frozenset({"tensor_cores", "graphs"}))


def parsed(family: str = "attention", **table: object) -> Requirement:
    return parse_requirement(table, FAMILIES[family], "here")


def check(
    requirement: Requirement, workload: Workload | None = None, device: DeviceInfo = TOY, api: ApiVersion | None = None
) -> Reason | None:
    request = Request(device, PlatformWorkload() if workload is None else workload)
    return requirement.check(CheckContext(request, api or ApiVersion(0, 2)))


def facts(reason: Reason | None) -> tuple[str, str | None, str | None] | None:
    return (reason.code, reason.wanted, reason.supported) if reason else None
