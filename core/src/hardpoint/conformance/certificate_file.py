"""The parts of a certificate's file that are read."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hardpoint.conformance.plan import Level
from hardpoint.conformance.trials import Outcome
from hardpoint.ops.comparison import Fault
from hardpoint_plugin_api import ConfigValue


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class Plugin(_Strict):
    """The plugin that was tried."""

    name: str
    version: str | None
    content_hash: str


class Measured(_Strict):
    """A measured error and its bound."""

    error: float
    limit: float


class Line(_Strict):
    """The result of one check."""

    family: str
    of: str | None
    name: str
    case: str
    check: str
    outcome: Outcome
    faults: list[Fault] = []
    reason: str = ""
    measured: dict[str, Measured] = {}
    compared: int = 0
    claims: list[str] = []


class TallyLine(_Strict):
    """The findings of one check in all cases of a contribution."""

    family: str
    of: str | None
    name: str
    check: str
    outcomes: dict[Outcome, int]
    compared: int = 0
    claims: list[str] = []
    met: list[str] = []
    reasons: dict[str, int] = {}
    faults: dict[str, int] = {}
    nearest: dict[str, Measured] = {}


class AskedLine(_Strict):
    """A contribution that was to be proved."""

    family: str
    of: str | None
    name: str
    claims: list[str]
    formats: list[str]


class SourcesLine(_Strict):
    """The sources of a contribution's results."""

    family: str
    of: str | None
    name: str
    entry: str
    loaded: list[str]
    absent: list[str] = []


class WrappedLine(_Strict):
    """A distribution that contributions require."""

    version: str
    editable: bool
    outline: str
    sha256: str


class CertificateFile(_Strict):
    """A whole certificate file; unknown keys are ignored."""

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
    results: list[Line] = []
    checks: list[TallyLine] = []
    asked: list[AskedLine] = []
    wrapped: dict[str, WrappedLine] = {}
    files: dict[str, str] = {}
    sources: list[SourcesLine] = []

    @model_validator(mode="after")
    def _has_one_form(self) -> CertificateFile:
        if not self.model_fields_set & {"results", "checks"}:
            raise ValueError("it has neither 'results' nor 'checks'")
        return self
