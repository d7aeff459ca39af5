"""What a second build compiles again: a kernel where something that it includes has changed, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hardpoint.platforms.testing import write_tree
from tests.cpu.building import SOURCE, needs_compiler

_FILES = {
    "csrc/extension.cpp": 'extern "C" void* PyInit__native() { return nullptr; }\n',
    "csrc/levels.cpp": "",
    "csrc/team.cpp": "",
    "csrc/kernels/one.cpp": '#include "one.h"\n#include "both.h"\n',
    "csrc/kernels/two.cpp": '#include "both.h"\n',
    "csrc/kernels/one.h": "",
    "csrc/kernels/both.h": "",
}


class Build:
    """A plugin of two small kernels, built by the CPU plugin's setup.py."""

    def __init__(self, folder: Path) -> None:
        self.folder = write_tree(folder / "with a space", _FILES)
        shutil.copy(SOURCE / "setup.py", self.folder)
        self._objects: dict[Path, int] = {}

    def __call__(self, *more: str) -> set[str]:
        """Build, and return which kernels were compiled, by level: ``plain/one``."""
        folders = ["--build-lib", "lib", "--build-temp", "temp"]
        command = [sys.executable, "setup.py", "-q", "build_ext", "--levels", "plain", *folders, *more]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True)
        made = {path: path.stat().st_mtime_ns for path in self.folder.glob("temp/*/csrc/kernels/*.o")}
        before, self._objects = self._objects, made
        return {
            f"{path.parts[-4].partition('-')[0]}/{path.stem}" for path, time in made.items() if before.get(path) != time
        }

    def write(self, name: str, text: str) -> None:
        (self.folder / "csrc/kernels" / name).write_text(text, encoding="utf-8")


@pytest.fixture
def build(tmp_path: Path) -> Build:
    needs_compiler()
    if not (SOURCE / "setup.py").exists():
        pytest.skip("hardpoint-cpu is not installed from its sources here")
    return Build(tmp_path)


def test_what_changed_is_compiled_again(build: Build) -> None:
    assert build() == {"plain/one", "plain/two"}
    module = next((build.folder / "lib").rglob("_native*"))
    linked = module.stat().st_mtime_ns
    assert build() == set()
    build.write("one.h", "// changed\n")
    assert build() == {"plain/one"}
    assert module.stat().st_mtime_ns > linked
    build.write("both.h", '#include "deep.h"\n')
    build.write("deep.h", "")
    assert build() == {"plain/one", "plain/two"}
    build.write("deep.h", "// changed\n")
    assert build() == {"plain/one", "plain/two"}
    build.write("two.cpp", "")
    assert build() == {"plain/two"}
    build.write("deep.h", "// changed again\n")
    assert build() == {"plain/one"}


@pytest.mark.nightly
def test_other_flags_are_another_build(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    monkeypatch.setenv("HARDPOINT_CPU_SANITIZE", "undefined")
    assert build() == {"plain/one", "plain/two"}
    monkeypatch.delenv("HARDPOINT_CPU_SANITIZE")
    assert build() == set()
