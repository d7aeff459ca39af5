"""What a certificate's file holds, as far as somebody reads it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from hardpoint.conformance.plan import Level
from hardpoint.conformance.trials import Outcome
from hardpoint.ops.error_model import Fault
from hardpoint_plugin_api import ConfigValue


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class Plugin(_Strict):
    """The plugin that was tried."""

    name: str
    version: str | None
    content_hash: str


class Measured(_Strict):
    """An error, and how large it may be."""

    error: float
    limit: float


class Line(_Strict):
    """What one check found."""

    family: str
    of: str | None
    name: str
    case: str
    check: str
    outcome: Outcome
    faults: list[Fault] = []
    reason: str = ""
    measured: dict[str, Measured] = {}


class CertificateFile(_Strict):
    """The whole; what else stands in it is ignored."""

    schema_: Literal[1] = Field(alias="schema")
    kit_version: int
    created: str
    plugin: Plugin
    api_version: str
    device: dict[str, str | None]
    libraries: dict[str, str]
    settings: dict[str, dict[str, ConfigValue]]
    level: Level
    seed: int
    scope: dict[str, str | None]
    shards: list[int]
    num_shards: int
    case_list: str
    results: list[Line]
