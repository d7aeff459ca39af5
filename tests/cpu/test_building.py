"""Building the kernels: for which levels, and what a second build compiles again."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hardpoint.platforms.testing import write_tree
from hardpoint_cpu import compiled
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


_LISTED = """
#include "levels.h"
const std::vector<const char*>& hardpoint::cpu_levels() {
    static const std::vector<const char*> names = {"avx512", "avx2", "plain"};
    return names;
}
"""


class Build:
    """A plugin of two small kernels, built by the CPU plugin's setup.py for the level ``plain``."""

    def __init__(self, folder: Path) -> None:
        self.folder = write_tree(folder / "with a space", _FILES)
        shutil.copy(SOURCE / "setup.py", self.folder)
        self._objects: dict[Path, int] = {}

    def __call__(self, levels: str = "plain") -> set[str]:
        """Build, and return which kernels were compiled, by level: ``plain/one``."""
        folders = ["--build-lib", "lib", "--build-temp", "temp"]
        command = [sys.executable, "setup.py", "-q", "build_ext", "--levels", levels, *folders]
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


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are those of x86-64")
def test_native_is_the_best_level_that_the_cpu_runs(build: Build) -> None:
    """Here the CPU is one that says so: no level better than avx512."""
    (build.folder / "csrc/levels.h").write_text(
        "#include <vector>\nnamespace hardpoint { const std::vector<const char*>& cpu_levels(); }\n"
    )
    (build.folder / "csrc/levels.cpp").write_text(_LISTED)
    assert build("native") == {"avx512/one", "avx512/two"}
    assert build("avx2") == {"avx2/one", "avx2/two", "plain/one", "plain/two"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are those of x86-64")
def test_tiles_share_the_objects_of_the_level_below(build: Build) -> None:
    assert build("amx") == {"avx512_bf16/one", "avx512_bf16/two", "plain/one", "plain/two"}
    assert build("amx,avx512_bf16") == set()
    assert build("avx512_bf16") == {"avx512_bf16/one", "avx512_bf16/two"}, "without the flags that tiles need"


def test_a_level_that_is_none(build: Build) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        build("avx3")
    assert b"levels must be native, all, or some of" in failed.value.stderr
    assert b"not avx3" in failed.value.stderr


def test_kernels_for_other_cpus_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    _native = pytest.importorskip("hardpoint_cpu._native")
    monkeypatch.setattr(_native, "built_levels", _native.cpu_levels)
    assert compiled.slower_than_it_could_be() is None
    monkeypatch.setattr(_native, "built_levels", lambda: ["sse2"])
    told = compiled.slower_than_it_could_be()
    assert told is not None
    assert f"built for sse2, and this CPU has {_native.cpu_levels()[0]}" in told
    assert compiled.REBUILD in told


@pytest.mark.nightly
def test_other_flags_are_another_build(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    monkeypatch.setenv("HARDPOINT_CPU_SANITIZE", "undefined")
    assert build() == {"plain/one", "plain/two"}
    monkeypatch.delenv("HARDPOINT_CPU_SANITIZE")
    assert build() == set()
