"""Every distribution of the catalog is installed once by pip; a test sees the ones that it names."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from hardpoint.plugin_host.wrapped import Installed, Library
from tests.out_of_tree.build import install_by_pip, install_editable
from tests.plugins.catalog import ALL

Installer = Callable[..., Path]
"""``installed(*names)``: put these distributions on ``sys.path``; returns the folder they are installed in."""


_find = Installed.find


@cache
def _large(name: str) -> Library | None:
    return _find(Installed(), name)


@pytest.fixture(autouse=True)
def large_libraries_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our plugins require torch and Triton: 14,000 files of 1.4 GB, which no test changes."""
    large = ("torch", "triton")
    monkeypatch.setattr(Installed, "find", lambda self, name: _large(name) if name in large else _find(self, name))


@pytest.fixture(scope="session")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every distribution of the catalog installed. It is on no path: many exclude each other."""
    folder = tmp_path_factory.mktemp("warehouse")
    install_by_pip(ALL.values(), folder, tmp_path_factory.mktemp("wheels"))
    return folder


@pytest.fixture(scope="session")
def editable_kit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The distribution ``kit``, installed editable once: the folder that pip installed it into, and its packages."""
    folder = tmp_path_factory.mktemp("editable")
    install_editable(ALL["kit"], folder / "site", folder / "source")
    return folder / "site", folder / "source" / "src"


@pytest.fixture
def installed(warehouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installer]:
    """An environment that holds what the test names beside what is installed anyway; forgotten afterwards."""
    site = tmp_path / "site"
    site.mkdir()

    def put(*names: str) -> Path:
        for item in [item for name in names for item in ALL[name].installed_names]:
            shutil.copytree(warehouse / item, site / item)
        monkeypatch.syspath_prepend(str(site))
        return site

    before = set(sys.modules)
    yield put
    for module in set(sys.modules) - before:
        if module.partition(".")[0].startswith(("hp_", "vendor_lib")):
            del sys.modules[module]
