"""Releases: packages of one version that ask for each other, and whose wheels run without the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import hardpoint
from scripts.release import PACKAGES, ROOT, ReleaseError, set_version, ship, version, version_files


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that state versions."""
    for file in version_files(ROOT):
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    return tmp_path


def own_requirements(root: Path) -> list[Requirement]:
    """In which ranges the packages below ``root`` ask for each other."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in version_files(root))
    return [Requirement(found) for found in re.findall(r"\bhardpoint-[a-z-]+(?:\[[a-z,]+\])?>=[\w.,<]+\b", text)]


def test_all_packages_have_one_version() -> None:
    assert version(ROOT) == hardpoint.__version__
    assert len(version_files(ROOT)) == len(PACKAGES) + 1
    requirements = own_requirements(ROOT)
    assert {requirement.name for requirement in requirements} == set(PACKAGES) - {"hardpoint"}
    assert all(hardpoint.__version__ in requirement.specifier for requirement in requirements)


@pytest.mark.parametrize(
    ("new", "admitted", "refused"),
    [("3.4.0", "3.9.1", "3.3.9"), ("3.4.0rc1", "3.4.0a1", "3.3.9"), ("3.4.0", "3.4.0", "4.0.0")],
)
def test_one_command_writes_a_version_everywhere(tree: Path, new: str, admitted: str, refused: str) -> None:
    set_version(tree, new)
    assert version(tree) == new
    assert len(own_requirements(tree)) == len(own_requirements(ROOT))
    for requirement in own_requirements(tree):
        assert new in requirement.specifier
        assert admitted in requirement.specifier
        assert refused not in requirement.specifier


def test_versions_that_differ_are_listed(tree: Path) -> None:
    pyproject = tree / "plugins" / "cpu" / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('version = "', 'version = "9.'))
    with pytest.raises(ReleaseError, match=rf"plugins/cpu/pyproject.toml: 9\.{re.escape(hardpoint.__version__)}, "):
        version(tree)


@pytest.mark.parametrize("new", ["3.4", "three"])
def test_what_is_no_version_is_refused(tree: Path, new: str) -> None:
    with pytest.raises(ReleaseError, match=f"'{new}' is no version of three numbers"):
        set_version(tree, new)
    assert version(tree) == hardpoint.__version__


def test_certificates_join_a_wheel(tmp_path: Path) -> None:
    """Its record lists them, and the files that it had stay."""
    package, info = tmp_path / "whole" / "hardpoint_cpu", tmp_path / "whole" / "hardpoint_cpu-0.2.0.dist-info"
    for folder, file, text in (
        (package, "__init__.py", ""),
        (info, "METADATA", "Metadata-Version: 2.1\nName: hardpoint-cpu\nVersion: 0.2.0\n"),
        (info, "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    subprocess.run([sys.executable, "-m", "wheel", "pack", "--dest-dir", tmp_path, tmp_path / "whole"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    made = tmp_path / "made.json"

    def write(
        isa: str | None, level: str, family: str | None, date: int, threads: str = "", *, whole: bool = True
    ) -> None:
        device, scope = {"arch": "x86_64", "isa": isa}, {"family": family, "name": None, "case": "*"}
        settings = {"cpu": {"threads": threads}} if threads else {}
        found = {"device": device, "scope": scope, "level": level, "settings": settings}
        made.write_text(json.dumps(found | {"complete": whole, "date": date}))

    for isa, level, family, date in (
        *(("avx2", "full", "op", 1), ("avx2", "full", None, 2), ("avx2", "full", "op", 3)),
        *((None, "full", "op", 4), ("avx2", "quick", "op", 5)),
    ):
        write(isa, level, family, date)
        name = ship(wheel, made)
        assert name == f"certificates/{'-'.join(filter(None, ('x86_64', isa, level, family)))}.json"
    write("avx2", "full", "op", 7, "1")
    assert ship(wheel, made) == "certificates/x86_64-avx2-full-op-cpu.threads=1.json"
    before = wheel.read_bytes()
    write("avx2", "full", "op", 6, whole=False)
    with pytest.raises(ReleaseError, match="leave out --shard and --case"):
        ship(wheel, made)
    assert wheel.read_bytes() == before
    with zipfile.ZipFile(wheel) as files:
        record = files.read("hardpoint_cpu-0.2.0.dist-info/RECORD").decode()
        found = {name: files.read(name) for name in files.namelist() if not name.endswith("/")}
    assert all(f"{name},sha256=" in record for name in found if not name.endswith("RECORD"))
    dates = {name.rpartition("/")[2]: json.loads(data)["date"] for name, data in found.items() if "certif" in name}
    assert dates == {
        "x86_64-avx2-full-op.json": 3,
        "x86_64-avx2-full.json": 2,
        "x86_64-full-op.json": 4,
        "x86_64-avx2-quick-op.json": 5,
        "x86_64-avx2-full-op-cpu.threads=1.json": 7,
    }
    assert "hardpoint_cpu/__init__.py" in found


@pytest.mark.nightly
def test_what_is_built_runs_without_the_checkout(tmp_path: Path) -> None:
    of_communicators = ["--", "--family", "communicator"]
    for command in (["build"], ["certify", "cpu"], ["check"]):
        arguments = [*command, tmp_path / "dist", *(of_communicators if len(command) > 1 else ())]
        subprocess.run([sys.executable, ROOT / "scripts" / "release.py", *arguments], env=os.environ, check=True)
    (wheel,) = (tmp_path / "dist").glob("hardpoint_cpu*.whl")
    with zipfile.ZipFile(wheel) as files:
        assert [name for name in files.namelist() if name.endswith("-communicator.json")]
