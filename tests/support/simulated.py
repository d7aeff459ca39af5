"""The simulated accelerator of ``tests/simulated``: built once, and used in child processes only.

A device type is registered with torch for good and for the whole process, and ``torch.accelerator`` changes its answers
then; other tests are not to notice.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tests.support import forked

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = ROOT / "tests" / "simulated"
_PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]


CACHE = Path.home() / ".cache" / "hardpoint-tests"
"""Outlives sessions: building takes half a minute."""

HANG = 240
"""Seconds that one test in a child process may take; the slowest takes a few."""


def installed(cache: Path = CACHE) -> Path:
    """A folder of packages with the simulated accelerator in it, below ``cache``; built where it is not there yet.

    Sources, torch and Python are part of the folder's name. Several processes may call this at once. Skips the test
    where nothing can be compiled.
    """
    cache.mkdir(parents=True, exist_ok=True)
    sources = sorted(p for p in SOURCE.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {sys.platform}".encode())
    for path in sources:
        digest.update(f"{path.relative_to(SOURCE)}\n".encode() + path.read_bytes())
    site = cache / digest.hexdigest()[:16]
    with FileLock(cache / "lock"):
        if not site.is_dir():
            _require_compiler()
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                _build(sources, Path(scratch))
                (Path(scratch) / "site").rename(site)
    return site


def _require_compiler() -> None:
    compiler = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    if shutil.which(compiler.split()[0]) is None:
        pytest.skip(f"the simulated accelerator needs a C++ compiler, and {compiler} is not installed")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        pytest.skip("the simulated accelerator needs Python's header files (the package python3-dev, or its like)")


def _build(sources: Sequence[Path], scratch: Path) -> None:
    for path in sources:
        copy = scratch / "source" / path.relative_to(SOURCE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    command = [*_PIP, "--no-build-isolation", "--target", str(scratch / "site"), str(scratch / "source")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(f"building the simulated accelerator failed:\n{done.stdout}\n{done.stderr}")


def environment(site: Path) -> dict[str, str]:
    """The variables of a child process that has the packages in ``site``."""
    kept: Mapping[str, str] = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "OMP_NUM_THREADS": "1"}


def run_tests(site: Path, scratch: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with ``arguments`` in a child process whose engines run on the simulated accelerator.

    A test that hangs ends the process after ``HANG`` seconds, and the output says where each thread stood.
    """
    options = ["-p", "tests.support.on_simulated", "-p", "no:cacheprovider", "-q", f"--basetemp={scratch / 'child'}"]
    options += ["-W", "ignore:Module already imported so cannot be rewritten"]  # its process began with core imported
    options += ["-o", f"faulthandler_timeout={HANG}", "-o", "faulthandler_exit_on_timeout=true"]
    return forked.run_module("pytest", [*options, *arguments], ROOT, 900, environment(site))
