"""Importing a plugin and its hooks: what is accepted, what is refused as a whole, and what failing costs."""

from __future__ import annotations

import logging
import sys

import pytest

from hardpoint.config import EngineConfig
from hardpoint.engine.explain import explain
from hardpoint.plugin_host import discover
from hardpoint_plugin_api import ConfigChange, DeviceInfo, EngineInfo, PluginLoadError, UnknownNameError
from tests.plugins.conftest import Installer

DEVICE = DeviceInfo("toy", "toy-1", "cpu", "toy")
ENGINE = EngineInfo("demo", DEVICE, "digest")


def test_activation_imports_once(installed: Installer) -> None:
    installed("kit")
    plugins = discover()
    assert "hp_kit" not in sys.modules
    plugins.activate("kit")
    record, module = plugins.record("kit"), sys.modules["hp_kit.plugin"]
    assert record.status == "active"
    assert record.import_seconds is not None
    plugins.activate("kit")
    assert sys.modules["hp_kit.plugin"] is module
    assert {o.plugin for o in plugins.offers("op", "kit_norm")} == {"kit"}


def test_an_unknown_plugin_cannot_be_activated(installed: Installer) -> None:
    installed("kit")
    with pytest.raises(UnknownNameError, match="did you mean 'kit'"):
        discover().activate("kitt")


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("raises", ("importing hp_raises.plugin failed after 0.", "RuntimeError: boom", "uninstall raises-hardpoint")),
        ("exits", ("SystemExit: 3",)),
        ("lacks_vendor", ("No module named", "install the package that provides the module 'a_vendor_library'")),
        (
            "wrong_arguments",
            (
                "hardpoint_configure(config, devise) takes devise",
                "it offers config, device",
                "--upgrade wrong-arguments",
            ),
        ),
        ("unknown_hook", ("no hook 'hardpoint_engine_startet'; did you mean 'hardpoint_engine_started'?",)),
        ("unmarked", ("hardpoint_engine_started is named like a hook", "write @hookimpl above it")),
        ("with_default", ("hardpoint_configure: device would never be passed", "without a default")),
        ("one_good_hook", ("no hook 'hardpoint_engine_halting'",)),
    ],
)
def test_what_fails_is_withdrawn_as_a_whole(installed: Installer, name: str, facts: tuple[str, ...]) -> None:
    installed("kit", name)
    plugins = discover([name, "kit"])
    with pytest.raises(PluginLoadError) as caught:
        plugins.activate(name)
    record = plugins.record(name)
    for fact in (f"plugin {record.title}: ", "; fix: ", *facts):
        assert fact in str(caught.value)
    assert record.status == "failed"
    assert record.cause is not None
    assert record.cause is caught.value.__cause__
    assert record.import_seconds is not None
    assert not [o for o in plugins.offers("linear") if o.plugin == name]
    plugins.activate("kit")
    assert plugins.record("kit").status == "active"
    with pytest.raises(PluginLoadError) as repeated:
        plugins.activate(name)
    assert str(repeated.value) == str(caught.value)


def test_nothing_is_registered_of_a_module_with_one_wrong_hook(
    installed: Installer, caplog: pytest.LogCaptureFixture
) -> None:
    installed("one_good_hook")
    plugins = discover()
    with pytest.raises(PluginLoadError):
        plugins.activate("one_good_hook")
    plugins.engine_started(ENGINE)
    assert not caplog.records


def test_a_hook_may_take_fewer_arguments(installed: Installer) -> None:
    installed("fewer", "kit")
    plugins = discover()
    assert plugins.configure({}, DEVICE) == []
    plugins.activate("fewer")
    plugins.activate("kit")
    assert plugins.configure({}, DEVICE) == [ConfigChange("seed", 1, "toy-1")]


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("configure_raises", "hardpoint_configure raised KeyError: 'tile'"),
        ("configure_exits", "hardpoint_configure raised SystemExit: 0"),
        ("configure_answers", "list of ConfigChange"),
    ],
)
def test_a_failing_configure_names_its_plugin(installed: Installer, name: str, fact: str) -> None:
    installed(name)
    plugins = discover()
    plugins.activate(name)
    with pytest.raises(PluginLoadError, match=f"plugin {name}: .*{fact}"):
        plugins.configure({}, DEVICE)


@pytest.mark.parametrize("name", ["a_started_raises", "a_started_exits"])
def test_a_failing_lifecycle_hook_stops_nobody(
    installed: Installer, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    installed(name, "listener")
    plugins = discover()
    plugins.activate("listener")
    plugins.activate(name)
    plugins.engine_started(ENGINE)
    plugins.engine_stopping(ENGINE)
    assert sys.modules["hp_listener.plugin"].heard == ["demo", "stopping"]
    (report,) = caplog.records
    assert f"plugin {name}: hardpoint_engine_started raised" in report.message
    assert report.exc_info is not None


def test_a_slow_import_is_reported_once_with_its_time(installed: Installer, caplog: pytest.LogCaptureFixture) -> None:
    installed("slow")
    plugins = discover()
    with caplog.at_level(logging.WARNING):
        plugins.activate("slow")
        plugins.activate("slow")
    (report,) = caplog.records
    assert report.message.startswith("plugin slow (slow-hardpoint 1.0) took 1.")
    assert report.message.endswith(" s to import")
    seconds = plugins.record("slow").import_seconds
    assert seconds is not None
    assert seconds > 1


def test_a_plugin_on_the_allowlist_is_activated_even_where_nothing_of_it_is_chosen(installed: Installer) -> None:
    pytest.importorskip("hardpoint_cpu")
    installed("raises", "listener")
    config = EngineConfig.create(model="demo", platform="cpu", plugins=("cpu", "listener"))
    assert explain(config).rows
    assert "hp_listener.plugin" in sys.modules
    assert explain(EngineConfig.create(model="demo", platform="cpu")).rows, "not asked for, it stops nobody"
    with pytest.raises(PluginLoadError, match=r"plugin raises .*RuntimeError: boom; fix: "):
        explain(EngineConfig.create(model="demo", platform="cpu", plugins=("cpu", "raises")))
