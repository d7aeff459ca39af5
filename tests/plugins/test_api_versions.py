"""The plugin API as data: what may change, what would break a plugin, and what serves a plugin of the major before."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

import pytest

from hardpoint.authoring.api_diff import Change, compare
from hardpoint.authoring.api_surface import Surface, describe_api, frozen, frozen_versions, layer_classes
from hardpoint.cli.main import run
from hardpoint.layers.mla import MLA
from hardpoint.plugin_host import discover, shims
from hardpoint.plugin_host.record import CORE
from hardpoint.plugin_host.shims import Shim
from hardpoint_plugin_api import (
    API_VERSION,
    ApiVersion,
    ManifestError,
    PluginLoadError,
    UnknownNameError,
    parse_manifest,
)
from tests.plugins.conftest import Installer

DRAFT_RULE = "set API_VERSION in versions.py to a new version, or freeze the draft again: make reference"


@pytest.mark.parametrize("version", frozen_versions(), ids=str)
def test_nothing_that_was_promised_breaks(version: ApiVersion) -> None:
    old, new = frozen(version), describe_api()
    changes = compare(old, new)
    broken = [f"{c.kind} {c.path}: was {c.was}, now {c.now}: {c.breaks}" for c in changes if c.breaks]
    same_major = version.major == API_VERSION.major
    assert not (broken and same_major), "\n".join([DRAFT_RULE, *broken])
    if old.released and version == API_VERSION:
        assert not changes, "\n".join([DRAFT_RULE, *(f"{c.kind} {c.path}" for c in changes)])


def test_every_frozen_file_reads_and_writes_alike() -> None:
    assert frozen_versions()
    for version in frozen_versions():
        surface = frozen(version)
        assert surface.version == version
        assert json.loads(surface.to_json())["entries"] == surface.entries
    with pytest.raises(UnknownNameError, match=r"unknown frozen API version '7\.0'"):
        frozen(ApiVersion(7, 0))


def test_the_description_is_the_same_in_every_process() -> None:
    text = describe_api().to_json()
    assert " at 0x" not in text
    entries = describe_api().entries
    assert (
        entries["DeviceInfo"]["params"][7] == "dtypes: frozenset[str] = frozenset({'bfloat16', 'float16', 'float32'})"
    )
    assert entries["op add_rms_norm"] == {
        "kind": "op",
        "params": ["x: Tensor", "residual: Tensor", "weight: Tensor", "*", "eps: float"],
        "returns": "tuple[Tensor, Tensor]",
        "mutates": [],
        "aliases": [[1, "residual"]],
    }
    assert entries["AttentionBackend.plan"]["abstract"]
    assert entries["layer norm"]["args"] == "NormArgs"


def test_a_layer_with_several_implementations_is_described_by_its_default() -> None:
    found = layer_classes()
    assert found["mla"] is MLA
    offers = [o for o in discover([]).offers("layer") if o.plugin == CORE]
    assert found.keys() == {o.contribution.of for o in offers}, "each layer has a default"


def surface(**entries: dict[str, Any]) -> Surface:
    paths = {path.replace("__", " ").replace("_dot_", "."): entry for path, entry in entries.items()}
    return Surface(ApiVersion(0, 2), True, paths)


INTERFACE = {"kind": "interface"}
RUN = {"kind": "method", "params": ["x: Tensor"], "returns": "Tensor", "abstract": True}
CALL = {"kind": "function", "params": ["a: int", "*", "b: str"], "returns": "int"}
HOOK = {"kind": "hook", "params": ["config: Mapping"], "returns": "None"}
OP = {"kind": "op", "params": ["x: Tensor"], "returns": "Tensor", "mutates": [], "aliases": []}


@pytest.mark.parametrize(
    ("old", "new", "breaks"),
    [
        ({}, {"Name": {"kind": "class"}}, False),
        ({"Name": {"kind": "class"}}, {}, True),
        ({"Name": {"kind": "class"}}, {"Name": {"kind": "protocol"}}, True),
        ({"f": CALL}, {"f": {**CALL, "params": ["a: int", "c: int = 0", "*", "b: str"]}}, False),
        ({"f": CALL}, {"f": {**CALL, "params": ["a: int", "*", "b: str = ''", "c: int = 0"]}}, False),
        ({"f": CALL}, {"f": {**CALL, "params": ["a: int", "b: str"]}}, False),
        ({"f": CALL}, {"f": {**CALL, "params": ["a: int", "*", "b: str", "c: int"]}}, True),
        ({"f": CALL}, {"f": {**CALL, "params": ["c: int = 0", "a: int", "*", "b: str"]}}, True),
        ({"f": CALL}, {"f": {**CALL, "params": ["*", "a: int", "b: str"]}}, True),
        ({"f": CALL}, {"f": {**CALL, "params": ["a: float", "*", "b: str"]}}, True),
        ({"f": CALL}, {"f": {**CALL, "params": ["a: int"]}}, True),
        ({"f": CALL}, {"f": {**CALL, "returns": "float"}}, True),
        ({"I": INTERFACE}, {"I": INTERFACE, "I_dot_run": RUN}, True),
        ({"I": INTERFACE}, {"I": INTERFACE, "I_dot_run": {**RUN, "abstract": False}}, False),
        ({}, {"I": INTERFACE, "I_dot_run": RUN}, False),
        (
            {"I": INTERFACE, "I_dot_run": RUN},
            {"I": INTERFACE, "I_dot_run": {**RUN, "params": ["x: Tensor", "y: int = 0"]}},
            True,
        ),
        ({"I": INTERFACE, "I_dot_run": RUN}, {"I": INTERFACE, "I_dot_run": {**RUN, "abstract": False}}, False),
        ({"hook__h": HOOK}, {"hook__h": {**HOOK, "params": ["device: DeviceInfo", "config: Mapping"]}}, False),
        ({"hook__h": HOOK}, {"hook__h": {**HOOK, "params": []}}, True),
        ({"op__o": OP}, {"op__o": {**OP, "params": ["x: Tensor", "*", "eps: float = 0"]}}, True),
        ({"op__o": OP}, {"op__o": {**OP, "aliases": [[0, "x"]]}}, True),
        ({"E": {"kind": "enum", "members": {"A": 1}}}, {"E": {"kind": "enum", "members": {"A": 1, "B": 2}}}, False),
        ({"E": {"kind": "enum", "members": {"A": 1}}}, {"E": {"kind": "enum", "members": {"A": 2}}}, True),
        ({"T": {"kind": "alias", "options": ["'a'"]}}, {"T": {"kind": "alias", "options": ["'a'", "'b'"]}}, False),
        ({"T": {"kind": "alias", "options": ["'a'", "'b'"]}}, {"T": {"kind": "alias", "options": ["'a'"]}}, True),
        (
            {"requirement__r": {"kind": "requirement", "families": ["op", "layer"]}},
            {"requirement__r": {"kind": "requirement", "families": ["op"]}},
            True,
        ),
        (
            {"family__f": {"kind": "family", "has_of": True, "stability": "provisional"}},
            {"family__f": {"kind": "family", "has_of": True, "stability": "stable"}},
            False,
        ),
        ({"family__f": {"kind": "family", "has_of": True}}, {"family__f": {"kind": "family", "has_of": False}}, True),
        ({"C": {"kind": "constant", "value": 1}}, {"C": {"kind": "constant", "value": 2}}, True),
    ],
)
def test_what_breaks_a_plugin(old: dict[str, Any], new: dict[str, Any], breaks: bool) -> None:
    changes = compare(surface(**old), surface(**new))
    assert changes
    assert any(change.breaks for change in changes) == breaks


def test_what_is_the_same_is_no_change() -> None:
    same = surface(f=CALL, hook__h=HOOK)
    assert compare(same, replace(same, version=ApiVersion(0, 2))) == []


def test_a_change_says_what_was_and_what_is() -> None:
    (change,) = compare(surface(f=CALL), surface(f={**CALL, "returns": "str"}))
    assert change == Change(
        "changed",
        "f",
        "function (a: int, *, b: str) -> int",
        "function (a: int, *, b: str) -> str",
        "its returns is another",
    )


def test_api_diff_prints_what_changed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    new = describe_api()
    old = {path: entry for path, entry in new.entries.items() if path != "Reason"} | {"Gone": {"kind": "class"}}
    monkeypatch.setattr("hardpoint.authoring.api_surface.frozen", lambda version: Surface(version, True, old))
    assert run(["plugins", "api-diff"]) == 0
    out = capsys.readouterr().out
    assert "added    Reason\n         now    dataclass (code: str, message: str," in out
    assert "removed  Gone\n         was    class\n         breaks it is gone\n" in out
    assert out.endswith(f"plugin API {frozen_versions()[-1]} -> {API_VERSION}: 2 changes, 1 of them break plugins\n")
    assert run(["plugins", "api-diff", "--since", "0.2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [c["path"] for c in data["changes"]] == ["Gone", "Reason"]


@pytest.mark.parametrize(
    ("since", "message"), [("0.99", "unknown frozen API version '0.99'"), ("x", "--since: API version 'x' is not")]
)
def test_api_diff_of_no_version(since: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugins", "api-diff", "--since", since]) == 2
    assert message in capsys.readouterr().err


def test_a_plugin_of_the_major_before_goes_through_shims(installed: Installer, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("kit")
    monkeypatch.setattr("hardpoint_plugin_api.versions.API_VERSION", ApiVersion(1, 0))
    monkeypatch.setattr(
        shims,
        "SHIMS",
        (
            Shim("op", ApiVersion(0, 2), lambda target: ("too early", target)),
            Shim("layer", ApiVersion(1, 0), lambda target: ("another family", target)),
            Shim("op", ApiVersion(1, 0), lambda target: ("first", target)),
            Shim("op", ApiVersion(1, 0), lambda target: ("second", target)),
        ),
    )
    plugins = discover(["kit"])
    offer = next(o for o in plugins.offers("op", "kit_norm") if o.contribution.name == "kit_fast")
    outer = cast(Any, plugins.load(offer))
    assert (outer[0], outer[1][0]) == ("second", "first")
    assert outer[1][1](3) == 3


NEWER = """
schema = 1
api = "9.1"
moon = "full"
[plugin]
name = "acme"
"""


def test_what_a_newer_manifest_says_is_no_misspelling() -> None:
    with pytest.raises(ManifestError, match=r"acme: the plugin needs a newer plugin API .*wanted 9\.1.*pip install"):
        parse_manifest(NEWER, "acme")
    with pytest.raises(ManifestError, match="unknown key 'moon'"):
        parse_manifest(NEWER.replace("9.1", str(API_VERSION)), "acme")


def test_a_plugin_that_uses_what_its_api_does_not_have(installed: Installer) -> None:
    installed("eager")
    plugins = discover(["eager"])
    (offer,) = (o for o in plugins.offers("linear") if o.plugin == "eager")
    fix = rf"pip install --upgrade hardpoint-plugin-api .*: eager-hardpoint uses what plugin API {API_VERSION} does not"
    with pytest.raises(PluginLoadError, match=fix):
        plugins.load(offer)
