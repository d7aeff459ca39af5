"""The CPU plugin built and installed once more, aside from the one that tests import."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hardpoint_cpu
from hardpoint_cpu import compiled

SOURCE = Path(hardpoint_cpu.__file__).parents[2]


def copy_source(folder: Path) -> Path:
    """A copy of the plugin's sources below ``folder``, without what was built; skips where there are none."""
    if not (SOURCE / "setup.py").exists():
        pytest.skip("hardpoint-cpu is not installed from its sources here")
    ignored = shutil.ignore_patterns("build", "*.egg-info", "_native*.so", "__pycache__")
    return Path(shutil.copytree(SOURCE, folder / "source", ignore=ignored))


def needs_kernels() -> None:
    """Skip, a whole module where it calls this, where the compiled kernels are missing."""
    if reason := compiled.missing():
        pytest.skip(str(reason), allow_module_level=True)


def levels() -> list[str]:
    """The levels of this CPU and build."""
    if compiled.missing():
        return []
    from hardpoint_cpu import _native

    return _native.levels()


def needs_compiler() -> None:
    """Skip where there is no C++ compiler."""
    if not shutil.which("c++"):
        pytest.skip("there is no C++ compiler here")


def run(*command: str | Path, **environment: str) -> str:
    """Python's output for ``command``; fails with its errors."""
    done = subprocess.run(
        [sys.executable, *command], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def wheel(source: Path, into: Path, **environment: str) -> Path:
    """The wheel that pip builds from ``source``."""
    run("-m", "pip", "wheel", source, "--no-deps", "--no-build-isolation", "--wheel-dir", into, **environment)
    (built,) = into.iterdir()
    return built


def install(wheel: Path, site: Path) -> None:
    """Install a wheel into the folder ``site``, for PYTHONPATH."""
    run("-m", "pip", "install", "--no-deps", "--target", site, wheel)
