"""Kernels by matrix tiles (AMX): the instructions are compiled, and what is made of them computes the right thing.

Processors with AMX are rare: what runs here is an emulation, instruction by instruction (csrc/kernels/tiles.h).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.building import SOURCE, copy_source, install, needs_compiler, needs_kernels, wheel

HERE = Path(__file__).parent


def test_the_instructions_are_compiled() -> None:
    needs_kernels()
    from hardpoint_cpu import _native

    if "amx" not in _native.built_levels():
        pytest.skip("hardpoint-cpu was built without the level amx here")
    if not shutil.which("objdump"):
        pytest.skip("there is no objdump here")
    command = ["objdump", "-d", "--no-show-raw-insn", _native.__file__]
    code = subprocess.run(command, capture_output=True, check=True).stdout  # 100 MB and more: not decoded
    used = set(re.findall(rb"\t(ldtilecfg|tile\w+|tdp\w+)\s", code))
    wanted = {b"ldtilecfg", b"tilezero", b"tileloadd", b"tilestored", b"tdpbf16ps", b"tdpbssd", b"tilerelease"}
    assert used == wanted


@pytest.fixture(scope="module")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiles.cpp as a program."""
    needs_compiler()
    if not (SOURCE / "csrc").exists():
        pytest.skip("hardpoint-cpu is not installed from its sources here")
    program = tmp_path_factory.mktemp("tiles") / "tiles"
    flags = ["-std=c++20", "-O1", "-DHARDPOINT_LEVEL=amx", "-DHARDPOINT_EMULATE_TILES", f"-I{SOURCE / 'csrc'}"]
    subprocess.run(["c++", *flags, "-o", program, HERE / "tiles.cpp"], check=True)
    return program


@pytest.mark.parametrize("case", ["bfloat16", "small-numbers", "int8", "zeros-behind"])
def test_emulated_instructions_do_as_the_manual_says(emulation: Path, case: str) -> None:
    done = subprocess.run([emulation, case], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("no-shapes", "there are no shapes"),
        ("released", "there are no shapes"),
        ("unused-tile", "the tile has no shape"),
        ("too-many-rows", "a tile is too large"),
        ("rows", "sums have not as many rows as x"),
        ("columns", "w has not as many rows as x has columns"),
    ],
)
def test_what_would_fault_is_found(emulation: Path, case: str, told: str) -> None:
    done = subprocess.run([emulation, case], capture_output=True, text=True, check=False)
    assert done.returncode < 0
    assert told in done.stderr


@pytest.mark.nightly
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the level amx is one of x86-64")
def test_kernels_compute_with_emulated_instructions(tmp_path: Path) -> None:
    """All tests of linear, experts and latent attention kernels at the level amx, in a build of its own."""
    needs_compiler()
    source, site = copy_source(tmp_path), tmp_path / "site"
    (source / "setup.cfg").write_text("[build_ext]\nlevels = amx\nemulate_tiles = 1\n", encoding="utf-8")
    install(wheel(source, tmp_path / "wheel"), site)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "amx",
        str(HERE / "test_linear.py"),
        str(HERE / "test_latent_attention.py"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b1\d\d passed", done.stdout), done.stdout
