"""Which platform the kit tries a plugin on, what it says of kernels for other hardware, and how its threads wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hardpoint.cli.main import run as hardpoint
from hardpoint.conformance.kit import Order, platforms_for
from hardpoint.conformance.processes import Nursery
from hardpoint.plugin_host import PluginSet, discover
from hardpoint_plugin_api import Reason
from tests.conformance.conftest import TRIED
from tests.conformance.test_processes import until
from tests.out_of_tree.build import Dist, install

_CONTRIBUTION = """
[[contribution]]
family = "op"
of = "rms_norm"
name = "roaming_{name}"
target = "hp_roaming.kernels:right"
form = "out"
platforms = {platforms}
priority = 1
summary = "A norm"
requires = [{{ dtype = ["float32"] }}]
"""
"""The kernel for hardware that is not here comes first, as in a plugin whose author has the accelerator."""
_MANIFEST = 'schema = 1\napi = "0.2"\n[plugin]\nname = "roaming"\n' + "".join(
    _CONTRIBUTION.format(name=name, platforms=json.dumps(platforms))
    for name, platforms in (("far", ["absent_gpu", "rocm"]), ("near", ["rocm", "cpu"]))
)
_ROAMING = Dist(
    "hp-roaming",
    {
        "hp_roaming/__init__.py": "",
        "hp_roaming/plugin.py": "",
        "hp_roaming/kernels.py": TRIED.files["hp_tried/kernels.py"],
        "hp_roaming/hardpoint.toml": _MANIFEST,
    },
    {"roaming": "hp_roaming.plugin"},
)
_NOT_TRIED = "not tried: roaming_far (op rms_norm): it is for absent_gpu, rocm; this run is on cpu"


@pytest.fixture(scope="module")
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hardpoint_rocm")
    pytest.importorskip("hardpoint_cpu")
    folder = tmp_path_factory.mktemp("roaming-site")
    install([_ROAMING], folder, tmp_path_factory.mktemp("roaming-wheel"))
    return folder


@pytest.fixture
def plugins(_installed: Path, monkeypatch: pytest.MonkeyPatch) -> PluginSet:
    """The plugin ``roaming`` is installed, here and in processes that are started; an AMD GPU is not here."""
    from hardpoint_rocm.platform import RocmPlatform

    if not isinstance(RocmPlatform.detect(), Reason):
        pytest.skip("its hardware is here")
    monkeypatch.syspath_prepend(str(_installed))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(_installed), os.environ.get("PYTHONPATH")])))
    return discover()


@pytest.mark.parametrize(
    ("name", "wanted", "found"),
    [
        (None, None, ("rocm", "cpu")),
        ("roaming_far", None, ("rocm",)),
        (None, "cpu", ("cpu",)),
    ],
)
def test_the_platforms_in_question(
    plugins: PluginSet, name: str | None, wanted: str | None, found: Sequence[str]
) -> None:
    assert platforms_for(plugins, Order("roaming", name=name).offers(plugins), wanted) == found


def test_a_kernel_for_any_platform_is_tried_where_an_engine_would_run(plugins: PluginSet) -> None:
    offers = [*Order("roaming").offers(plugins), *Order("core", "op", "reference").offers(plugins)]
    assert platforms_for(plugins, offers, None) == ("rocm", "cpu", None)
    assert platforms_for(plugins, offers[-1:], None) == (None,)


@pytest.mark.parametrize("in_process", [True, False])
def test_what_is_here_is_tried_and_the_rest_is_named(
    plugins: PluginSet, in_process: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["conform", "roaming", "--setting", "cpu.threads=1", "--case", "*random*"]
    assert hardpoint([*command, *["--in-process"] * in_process]) == 0
    assert _NOT_TRIED in capsys.readouterr().out.splitlines()


def test_where_nothing_is_here_nothing_is_tried(plugins: PluginSet, capsys: pytest.CaptureFixture[str]) -> None:
    assert hardpoint(["conform", "roaming", "--name", "roaming_far"]) == 1
    assert (
        "not tried: roaming_far (op rms_norm): the platform's hardware is not here: rocm: " in capsys.readouterr().out
    )


def test_pytest_chooses_likewise(plugins: PluginSet, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--hardpoint-plugin", "roaming"]
    done = subprocess.run(
        [*command, "-k", "random or all"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"hardpoint: {_NOT_TRIED}" in done.stdout
    assert "1 skipped" in done.stdout


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="environments are read by way of /proc")
@pytest.mark.parametrize(("given", "found"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_of_trials_leave_cores_to_others_while_they_wait(
    given: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    nursery = Nursery()
    try:
        nursery._open()
        assert nursery._process is not None
        of_process = Path(f"/proc/{nursery._process.pid}/environ")
        until(lambda: bool(of_process.read_text().strip("\0")))  # the new program has begun
        environment = of_process.read_text().split("\0")
    finally:
        nursery.close()
    assert f"OMP_WAIT_POLICY={found}" in environment
