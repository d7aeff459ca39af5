"""Requirements of the environment: packages, their versions, and symbols of distributions."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hardpoint_plugin_api import (
    FAMILIES,
    Requirement,
    distributions,
    parse_requirement,
)
from tests.plugin_api.requirement_checks import check, facts, parsed

Installer = Callable[..., Path]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installer:
    """Install a distribution made of a name, a version and modules; returns the folder it lies in."""

    def install(name: str, version: str, *modules: str, editable: Path | None = None) -> Path:
        site = tmp_path / f"site-{name}"
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for module in modules:
            (site / module).mkdir()
            (site / module / "__init__.py").write_text("raise AssertionError('imported')\n")
        (info / "RECORD").write_text("".join(f"{m}/__init__.py,,\n" for m in modules) + f"{info.name}/METADATA,,\n")
        if editable:
            url = {"url": editable.as_uri(), "dir_info": {"editable": True}}
            (info / "direct_url.json").write_text(json.dumps(url))
        monkeypatch.syspath_prepend(str(site))
        return site

    return install


@pytest.mark.parametrize(
    ("version", "spec", "code"),
    [
        ("2.1", "acme-kernels", None),
        ("2.1", "acme-kernels>=2", None),
        ("2.1", "acme-kernels>=2,<3", None),
        ("2.1", "Acme_Kernels==2.*", None),
        ("2.1", "acme-kernels~=2.0", None),
        ("2.1+cu126", "acme-kernels==2.1", None),
        ("2.2rc1", "acme-kernels>=2", None),
        ("2.1", "acme-kernels!=2.1", "package-version"),
        ("2.1", "acme-kernels<2", "package-version"),
        ("2.10", "acme-kernels<2.9", "package-version"),
        ("2.1rc1", "acme-kernels>=2.1", "package-version"),
    ],
)
def test_packages_and_their_versions(installed: Installer, version: str, spec: str, code: str | None) -> None:
    installed("acme-kernels", version, "acme_kernels")
    reason = check(parsed(package=spec))
    assert facts(reason) == (code and (code, spec, version))
    if reason:
        assert reason.fix == f"pip install '{spec}'"
    assert "acme_kernels" not in sys.modules


def test_a_package_that_is_not_there() -> None:
    reason = check(parsed(package="acme-kernels>=2"))
    assert facts(reason) == ("package-missing", "acme-kernels>=2", None)
    assert reason is not None
    assert reason.fix == "pip install 'acme-kernels>=2'"


def symbol(text: str = "vendor_lib.ops:paged", distribution: str = "vendor-kernels") -> Requirement:
    return parse_requirement({"symbol": text, "from": distribution}, FAMILIES["attention"], "here")


def test_a_symbol_of_the_distribution(installed: Installer) -> None:
    """Found without importing anything: the module would raise."""
    installed("vendor-kernels", "1.0", "vendor_lib")
    assert check(symbol()) is None
    assert "vendor_lib" not in sys.modules


def test_a_symbol_of_a_distribution_that_is_not_there(installed: Installer) -> None:
    installed("another", "1.0", "vendor_lib")
    reason = check(symbol())
    assert facts(reason) == ("package-missing", None, None)
    assert reason is not None
    assert reason.fix == "pip uninstall another; pip install vendor-kernels"


def test_a_module_that_is_not_there(installed: Installer) -> None:
    installed("vendor-kernels", "1.0")
    reason = check(symbol())
    assert reason is not None
    assert reason.code == "module-missing"
    assert reason.message == "module vendor_lib of vendor-kernels cannot be found"


def test_a_namesake_is_refused(installed: Installer) -> None:
    """Both are installed; the other one's module is what an import would find."""
    installed("vendor-kernels", "1.0", "vendor_lib")
    other = installed("helpers", "3.0", "vendor_lib")
    reason = check(symbol())
    assert facts(reason) == (
        "module-namesake",
        "vendor_lib from vendor-kernels",
        str(other / "vendor_lib"),
    )
    assert check(symbol(distribution="helpers")) is None
    assert "vendor_lib" not in sys.modules


def test_a_namesake_without_the_real_one(installed: Installer) -> None:
    installed("vendor-kernels", "1.0")
    installed("helpers", "3.0", "vendor_lib")
    reason = check(symbol())
    assert reason is not None
    assert reason.code == "module-namesake"
    stdlib = check(symbol("json:dumps"))
    assert stdlib is not None
    assert stdlib.code == "module-namesake"


def test_an_editable_install_owns_its_source_tree(
    installed: Installer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "checkout" / "src"
    (source / "vendor_lib").mkdir(parents=True)
    (source / "vendor_lib" / "__init__.py").write_text("")
    installed("vendor-kernels", "1.0", editable=tmp_path / "checkout")
    monkeypatch.syspath_prepend(str(source))
    assert check(symbol()) is None


def test_a_distribution_that_comes_or_goes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions are remembered as long as the folders on the path stay as they are."""
    monkeypatch.syspath_prepend(tmp_path)
    wanted = parsed(package="comes-and-goes>=2")
    codes = []
    for number, version in enumerate((None, "1.0", "2.0", None)):
        for old in tmp_path.iterdir():
            shutil.rmtree(old)
        if version is not None:
            folder = tmp_path / f"comes_and_goes-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: comes-and-goes\nVersion: {version}\n")
        os.utime(tmp_path, (number, number))  # a clock may be too coarse to tell
        found = check(wanted)
        assert found == check(wanted)
        codes.append(None if found is None else found.code)
    assert codes == ["package-missing", "package-version", None, "package-missing"]


def test_no_other_distribution_is_read_where_no_module_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them all takes a second, at each start of an engine."""
    monkeypatch.setattr(distributions, "packages_distributions", lambda: pytest.fail("every distribution is read"))
    assert distributions.owner_of("no_such_module", other_than="no-such-distribution") is None
