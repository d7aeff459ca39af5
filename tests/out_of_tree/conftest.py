"""The third party's plugin, installed by pip once, and visible in the tests that ask for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.out_of_tree.build import install_project

SOURCE = Path(__file__).parent / "acme_plugin"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip installed the plugin."""
    site = tmp_path_factory.mktemp("acme-site")
    install_project(SOURCE, site, tmp_path_factory.mktemp("acme-source"))
    return site


@pytest.fixture
def acme(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plugin is installed for the length of a test."""
    monkeypatch.syspath_prepend(str(installed))
    return installed
