"""Files whose numbers or nesting Python's own readers choke on: one clear error each."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint.conformance.certificate import read_certificate
from hardpoint.plugin_host.lock import LockFile
from hardpoint.selection.tuning import TuningFile
from hardpoint_plugin_api import ConfigError, ManifestError
from hardpoint_plugin_api.manifest import parse_manifest, read_manifest

NESTED = "[" * 100_000
DIGITS = "9" * 5_000
_WINNER = (
    '{"schema": 1, "winners": [{"device": "d", "family": "linear", "of": null, "workload": "w", "name": "n", %s}]}'
)


@pytest.mark.parametrize("text", [f"schema = {DIGITS}", f"schema = {NESTED}"], ids=["digits", "nested"])
def test_lock_files(tmp_path: Path, text: str) -> None:
    file = tmp_path / "hardpoint.lock"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"lock file .*hardpoint\.lock is not valid TOML: .*; write it anew"):
        LockFile.read(file)


@pytest.mark.parametrize(
    "part",
    [
        f'"measured": {{"1": {{"a": 1{"0" * 400}}}}}',
        f'"measured": {{"{DIGITS}": {{"a": 1}}}}',
        '"measured": {"0": {"a": 1}}',
        '"measured": {"1": {"a": NaN}}',
        '"measured": {"1": {"a": -1}}',
        '"measured": {"1": {"a": true}}',
        '"versions": {"": "1"}',
    ],
    ids=["time", "tokens", "no tokens", "NaN", "negative", "bool", "no package"],
)
def test_tuning_files(tmp_path: Path, part: str) -> None:
    file = tmp_path / "tuned.json"
    file.write_text(_WINNER % part)
    with pytest.raises(ConfigError, match=r"--tuning-file .*tuned\.json: entry 1"):
        TuningFile.read(file)


def test_nested_json(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(NESTED)
    with pytest.raises(ConfigError, match=r"--tuning-file .*x\.json: the tuning file cannot be read"):
        TuningFile.read(file)
    with pytest.raises(ConfigError, match=r"certificate .*x\.json: is no certificate"):
        read_certificate(file)


@pytest.mark.parametrize(
    "line",
    [f"schema = {DIGITS}", f"schema = {NESTED}", 'schema = 1\napi = "0.2"\ninclude = ["\\u0000"]'],
    ids=["digits", "nested", "NUL"],
)
def test_manifests(tmp_path: Path, line: str) -> None:
    file = tmp_path / "hardpoint.toml"
    file.write_text(line)
    with pytest.raises(ManifestError, match=r"hardpoint\.toml"):
        read_manifest(file)


def test_a_place_is_taken_in_every_step_or_none() -> None:
    """Else nothing, or a reference, would serve the steps that the replacing one leaves out."""
    text = """schema = 1
api = "0.2"
[plugin]
name = "acme"
[[contribution]]
family = "linear"
name = "small"
target = "acme:Small"
replaces = "torch"
requires = [{ tokens = { max = 8 } }]
"""
    with pytest.raises(ManifestError, match=r"'replaces' takes another's place in steps of every size, and 'tokens'"):
        parse_manifest(text, "here")
    assert parse_manifest(text.replace('replaces = "torch"', "priority = 9"), "here").contributions
