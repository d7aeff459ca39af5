"""Releases: packages of one version that ask for each other, and whose wheels run without the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import hardpoint
from scripts.release import PACKAGES, ROOT, ReleaseError, set_version, version, version_files


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


@pytest.mark.nightly
def test_what_is_built_runs_without_the_checkout(tmp_path: Path) -> None:
    for command in ("build", "check"):
        subprocess.run(
            [sys.executable, ROOT / "scripts" / "release.py", command, tmp_path / "dist"], env=os.environ, check=True
        )
