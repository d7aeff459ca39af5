"""Loading the target of a contribution: the only import that choosing something causes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hardpoint.plugin_host import Offer, PluginSet, discover
from hardpoint_plugin_api import PluginLoadError
from tests.plugins.conftest import Installer


def offer(plugins: PluginSet, family: str, name: str) -> Offer:
    (found,) = [o for o in plugins.offers(family) if o.contribution.name == name]
    return found


def test_loading_activates_and_imports(installed: Installer) -> None:
    installed("kit")
    plugins = discover()
    fast = offer(plugins, "op", "kit_fast")
    assert "hp_kit.ops" not in sys.modules
    target = plugins.load(fast)
    assert target is sys.modules["hp_kit.ops"].Norms.fast
    assert plugins.load(fast) is target
    assert plugins.record("kit").status == "active"


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        (
            "no_module",
            ("'hp_targets.nowhere:Method'", "No module named 'hp_targets.nowhere'", "--upgrade targets-hard"),
        ),
        ("no_attribute", ("'hp_targets.methods.Methods' has no 'fastt'; did you mean 'fast'?",)),
        ("raising", ("OSError: no driver", "pip uninstall targets-hardpoint")),
    ],
)
def test_a_broken_target(installed: Installer, name: str, facts: tuple[str, ...]) -> None:
    installed("targets")
    plugins = discover()
    broken = offer(plugins, "linear", name)
    with pytest.raises(PluginLoadError) as caught:
        plugins.load(broken)
    for fact in (f"plugin targets (targets-hardpoint 1.0): linear: {name}: target", "; fix: ", *facts):
        assert fact in str(caught.value)
    assert caught.value.__cause__ is not None
    assert plugins.load(offer(plugins, "linear", "good")) == "fast"


def test_what_failed_is_not_tried_again(installed: Installer) -> None:
    site = installed("targets")
    plugins = discover()
    broken = offer(plugins, "linear", "raising")
    messages = set()
    for _ in range(3):
        with pytest.raises(PluginLoadError) as caught:
            plugins.load(broken)
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert (site / "hp_targets" / "broken.py.tries").read_text() == "x"


def test_a_broken_plugin_has_no_targets(installed: Installer) -> None:
    installed("raises")
    plugins = discover()
    chosen = offer(plugins, "linear", "of_raises")
    for _ in range(2):
        with pytest.raises(PluginLoadError, match=r"plugin raises .*RuntimeError: boom"):
            plugins.load(chosen)


def test_a_required_symbol(installed: Installer) -> None:
    installed("adapter", "vendor_kernels")
    plugins = discover()
    assert plugins.load(offer(plugins, "linear", "has")) == "hp_adapter"
    with pytest.raises(
        PluginLoadError,
        match=r"plugin adapter .*'vendor_lib:page' of vendor-kernels.*did you mean 'paged'.*fix: install a version",
    ):
        plugins.load(offer(plugins, "linear", "lacks"))


def test_a_symbol_of_a_namesake_is_not_imported(
    installed: Installer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("adapter", "vendor_kernels")
    namesake = tmp_path / "elsewhere" / "vendor_lib"
    namesake.mkdir(parents=True)
    (namesake / "__init__.py").write_text("def paged(): ...\n")
    monkeypatch.syspath_prepend(str(namesake.parent))
    plugins = discover()
    with pytest.raises(PluginLoadError, match="vendor_lib does not belong to vendor-kernels: a namesake"):
        plugins.load(offer(plugins, "linear", "has"))
    assert "vendor_lib" not in sys.modules


def test_a_symbol_of_a_package_that_is_not_installed(installed: Installer) -> None:
    installed("adapter")
    plugins = discover()
    with pytest.raises(PluginLoadError, match="package vendor-kernels is not installed; fix: pip install vendor-ke"):
        plugins.load(offer(plugins, "linear", "has"))
