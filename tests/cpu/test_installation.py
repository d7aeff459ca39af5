"""Installed as users do: without a compiler the plugin serves through torch's operators, and says what is missing."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from hardpoint import __version__
from tests.cpu.building import copy_source, install, run, wheel

pytestmark = pytest.mark.nightly


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return copy_source(tmp_path)


def test_without_a_compiler(source: Path, tmp_path: Path) -> None:
    built = wheel(source, tmp_path / "wheel", CC="false", CXX="false")
    assert not [name for name in zipfile.ZipFile(built).namelist() if name.endswith(".so")]
    site = tmp_path / "site"
    install(built, site)
    here = {"PYTHONPATH": str(site), "COLUMNS": "2000"}
    for report in (["plugins", "doctor", "cpu"], ["env"]):
        told = run("-m", "hardpoint.cli", *report, **here)
        assert "installed without its compiled kernels" in told
        assert "apt install g++" in told
    generate = ["generate", "--platform", "cpu", "--prompt", "It is", "--max-tokens", "2"]
    assert "installed without its compiled kernels" in run("-m", "hardpoint.cli", *generate, **here)


def test_a_wheel_serves_every_python(source: Path, tmp_path: Path) -> None:
    (source / "setup.cfg").write_text("[build_ext]\nlevels = plain\n")
    built = wheel(source, tmp_path / "wheel")
    assert built.name.startswith(f"hardpoint_cpu-{__version__}-cp311-abi3-")
    assert "hardpoint_cpu/_native.abi3.so" in zipfile.ZipFile(built).namelist()


def test_the_source_distribution_can_be_compiled(source: Path) -> None:
    subprocess.run([sys.executable, "setup.py", "-q", "sdist"], cwd=source, check=True, capture_output=True)
    (archive,) = (source / "dist").iterdir()
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    assert {str(path.relative_to(source)) for path in (source / "csrc").rglob("[!.]*.*")} <= packed
