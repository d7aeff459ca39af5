"""Discovery: the plugins found, the ones refused before any conflict, and the errors of ones asked for by name."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from hardpoint.cli.main import run
from hardpoint.plugin_host import PluginSet, discover
from hardpoint_plugin_api import ManifestError, PluginLoadError, UnknownNameError
from tests.plugins.catalog import SOUND, UNREADABLE
from tests.plugins.conftest import Installer


def refusal(plugins: PluginSet, name: str) -> str:
    record = plugins.record(name)
    assert record.status == "refused"
    return str(record.reason)


def test_a_sound_plugin(installed: Installer) -> None:
    site = installed("kit")
    plugins = discover()
    record = plugins.record("kit")
    assert (record.status, record.reason, record.import_seconds) == ("ready", None, None)
    assert (record.distribution, record.version, record.entry_value) == ("kit-hardpoint", "1.0", "hp_kit.plugin")
    assert (record.editable, record.folder) == (False, site / "hp_kit")
    assert [str(o.contribution) for o in plugins.offers("op", "kit_norm")] == [
        "op kit_norm: reference",
        "op kit_norm: kit_fast",
    ]
    assert {o.plugin for o in plugins.offers("op") if o.contribution.name == "kit_fast"} == {"kit"}
    assert {"kit_fast", "reference"} <= set(plugins.names("op"))
    assert plugins.config_keys()["kit"]["tile"].default == 8
    assert plugins.devices()["kit-1"].arch == "toy"


def test_core_is_the_first_plugin(installed: Installer) -> None:
    installed("kit")
    plugins = discover()
    assert (plugins.records[0].name, plugins.records[0].status) == ("core", "ready")
    assert "reference" in plugins.names("attention")
    for plugin in plugins.records:
        assert plugin.status == "ready", plugin.reason


def test_load_order_follows_after_then_names(installed: Installer) -> None:
    installed("kit", "last", "middle", "zebra", "malformed")
    names = [r.name for r in discover().records if r.distribution.endswith("-hardpoint")]
    assert names == ["kit", "zebra", "middle", "last", "malformed"]


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("newer_api", ("newer plugin API", "wanted 9.1", "pip install --upgrade hardpoint-plugin-api hardpoint-core")),
        ("newer_schema", ("schema 2 is newer", "pip install --upgrade")),
        ("malformed", ("hardpoint.toml: not valid TOML", "at line 7")),
        ("unknown_key", ("unknown requirement 'moon_phase'", "[[contribution]] 'q'", "newer than this Hardpoint")),
        ("bare", ("no hardpoint.toml in", "package data of hp_bare")),
        ("object", ("must name a module, got 'hp_object:Plugin'",)),
        ("absent_module", ("module hp_absent of absent-hardpoint cannot be found", "--force-reinstall")),
    ],
)
def test_refused_before_import(installed: Installer, name: str, facts: tuple[str, ...]) -> None:
    installed("kit", "absent" if name == "absent_module" else name)
    plugins = discover()
    for fact in facts:
        assert fact in refusal(plugins, name)
    assert plugins.record("kit").is_usable
    with pytest.raises((ManifestError, PluginLoadError), match=facts[0].replace("[", r"\[")):
        discover([name])


def test_one_bad_plugin_never_stops_the_others(installed: Installer, caplog: pytest.LogCaptureFixture) -> None:
    bad = [next(iter(dist.plugins)) for dist in UNREADABLE]
    good = [next(iter(dist.plugins)) for dist in SOUND if dist.plugins]
    installed(*good, *("absent" if name == "absent_module" else name for name in bad))
    with caplog.at_level(logging.WARNING):
        plugins = discover()
    assert [name for name in good if not plugins.record(name).is_usable] == []
    assert [name for name in bad if plugins.record(name).status != "refused"] == []
    assert len([r for r in caplog.records if "is not used" in r.message]) == len(bad)


def test_damaged_metadata_is_contained(installed: Installer) -> None:
    site = installed("kit", "zebra", "middle")
    (site / "zebra_hardpoint-1.0.dist-info" / "entry_points.txt").write_text("[hardpoint.plugins]\nzebra\n")
    (site / "middle_hardpoint-1.0.dist-info" / "METADATA").unlink()
    stray = site / "stray-1.0.dist-info"
    stray.mkdir()
    (stray / "entry_points.txt").write_bytes(b"\xff\xfe hardpoint.plugins")
    plugins = discover()
    assert plugins.record("kit").is_usable
    assert "entry_points.txt cannot be read" in refusal(plugins, "zebra-hardpoint")
    assert plugins.record("middle").distribution == "unnamed-distribution"


def test_only_selected_plugins_are_used(installed: Installer) -> None:
    installed("kit", "zebra", "malformed")
    plugins = discover(["kit"])
    assert [r.name for r in plugins.records if r.is_usable] == ["core", "kit"]
    for name in ("zebra", "malformed"):
        record = plugins.record(name)
        assert record.status == "not-selected"
        assert record.reason is not None
        assert record.reason.fix == f"add {name} to --plugins"
        with pytest.raises(PluginLoadError, match=f"{name} .*not on the list of --plugins; fix: add {name}"):
            plugins.activate(name)
    assert [r.name for r in discover([]).records if r.is_usable] == ["core"]


def test_plugins_that_are_not_used_and_have_a_name(installed: Installer) -> None:
    installed("kit", "squatter", "twin_a", "twin_b")
    plugins = discover([])
    left_out = "Plugin {0} has it, and is left out by --plugins: add {0} to --plugins."
    assert plugins.told_unused("op", "kit_norm", "kit_fast") == left_out.format("kit")
    assert plugins.told_unused("op", "kit_norm") == left_out.format("kit")
    assert plugins.told_unused("op", "kit_norm", "kit_slow") == ""
    assert plugins.told_unused("op", "rms_norm", "kit_fast") == ""
    assert plugins.told_unused("linear", name="squatted") == left_out.format("squatter")
    assert plugins.told_unused_device("kit-1") == left_out.format("kit")
    assert plugins.told_unused_device("kit-2") == ""
    every = discover()
    assert every.told_unused("op", "kit_norm", "kit_fast") == ""
    refused = every.told_unused("linear", name="squatted")
    assert refused.startswith("Plugin squatter (squatter-hardpoint 1.0) has it, and is not used: ")
    assert refused.endswith(f"{every.record('squatter').reason}.")


def test_a_distribution_stands_for_the_one_plugin_that_it_brings(installed: Installer) -> None:
    installed("zebra")
    plugins = discover()
    zebra = plugins.record("zebra")
    assert plugins.record(zebra.distribution.replace("-", "_").upper()) is zebra
    with pytest.raises(PluginLoadError, match="fix: add zebra to --plugins"):
        discover([zebra.distribution])


def test_an_unknown_name_is_an_error_with_the_nearest(installed: Installer) -> None:
    installed("zebra")
    with pytest.raises(UnknownNameError, match=r"'zebar'; did you mean 'zebra'.* names the packages of this project"):
        discover(["zebar"])
    with pytest.raises(UnknownNameError, match="known: core"):
        discover(["qqq"])
    with pytest.raises(UnknownNameError) as caught:
        discover(["qqq"])
    assert "hardpoint-qqq" not in str(caught.value), "a guessed name is anybody's to publish"


def test_a_namesake_outside_its_distribution(
    installed: Installer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("kit", "shadowed")
    package = tmp_path / "elsewhere" / "hp_shadowed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "hardpoint.toml").write_text('schema = 1\napi = "0.2"\n[plugin]\nname = "shadowed"\n')
    monkeypatch.syspath_prepend(str(package.parent))
    message = refusal(discover(), "shadowed")
    assert "hp_shadowed does not belong to shadowed-hardpoint" in message
    assert str(package) in message
    assert "hp_shadowed" not in sys.modules


def test_content_hash(installed: Installer) -> None:
    site = installed("kit")
    record = discover().record("kit")
    first = record.content_hash()
    (site / "hp_kit" / "__pycache__").mkdir()
    (site / "hp_kit" / "__pycache__" / "ops.pyc").write_bytes(b"cache")
    assert record.content_hash() == first
    (site / "hp_kit" / "ops.py").rename(site / "hp_kit" / "opz.py")
    renamed = record.content_hash()
    (site / "hp_kit" / "opz.py").write_text("changed = True")
    assert len({first, renamed, record.content_hash()}) == 3


def test_nothing_to_hash(installed: Installer) -> None:
    installed("object")
    with pytest.raises(PluginLoadError, match="no package folder"):
        discover().record("object").content_hash()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--plugins", "newer_api"], "newer_api"),
        (["--platform", "absent"], "plugin newer_api"),
        (["--newer_api.fast", "1"], "plugin newer_api"),
    ],
    ids=["asked for", "passed over", "a flag of it"],
)
def test_a_command_says_once_what_is_not_used(
    installed: Installer,
    args: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    installed("newer_api")
    assert run(["explain", "demo", *args]) == 2
    lines = [*caplog.messages, *capsys.readouterr().err.splitlines()]
    assert len([line for line in lines if said in line and "9.1" in line]) == 1, lines
