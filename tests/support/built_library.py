"""A library that g++ must build: the module ``hp_built.library`` of a test plugin, which a build imports without torch.

HP_BUILD_FOLDER says where it is built. A build waits there for a file ``go``; its content is the source.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import time
from pathlib import Path

from hardpoint_plugin_api import KernelBuild

SOURCE = 'extern "C" { int calls = 0; int count() { return ++calls; } }'


def build(folder: str) -> None:
    """Compile the library, as soon as it is told to go."""
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    source, made = Path(folder, "kernel.cpp"), Path(folder, "made.so")
    source.write_text(Path(folder, "go").read_text())
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    made.rename(Path(folder, "kernel.so"))


def pending() -> KernelBuild | None:
    folder = Path(os.environ["HP_BUILD_FOLDER"])
    if (folder / "kernel.so").exists():
        return None
    return KernelBuild("the counting library", "hp_built.library:build", (str(folder),))


@functools.cache
def library(folder: str) -> ctypes.CDLL:
    """The library, built first where it must be."""
    if pending() is not None:
        build(folder)
    return ctypes.CDLL(str(Path(folder, "kernel.so")))


def counted() -> int:
    """How often kernels of the library were called, this one included."""
    return int(library(os.environ["HP_BUILD_FOLDER"]).count())
