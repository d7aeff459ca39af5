"""Whole plugins under the kit, as their authors would run it; slow, so nightly."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint.conformance.certify import certify
from hardpoint.conformance.kit import Order
from hardpoint.plugin_host import discover
from tests.out_of_tree.build import install_project

ACME = Path(__file__).parent.parent / "out_of_tree" / "acme_plugin"


@pytest.mark.nightly
@pytest.mark.parametrize("plugin", ["acme", "cpu", "core"])
def test_nothing_fails(plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if plugin == "acme":
        install_project(ACME, tmp_path / "site", tmp_path / "source")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
    order = Order(plugin, platform="cpu", settings={"cpu": {"threads": 1}})
    results = certify(discover(), order).results
    assert [f"{r.name}, {r.case}, {r.check}: {fault}" for r in results for fault in r.faults] == []
    assert any(r.outcome == "passed" for r in results)
