"""Build FlashInfer's kernels and copy them to a folder, for machines without a compiler or without time.

    python3 scripts/flashinfer_kernels.py FOLDER bfloat16:128 float16:64:window:soft_cap comm ...

Each argument is a dtype and head size, with the features that the attention kernels must have; both kernels of a Hopper
GPU are built, unless ``fa2`` or ``fa3`` names one. ``comm`` stands for what ranks share, four minutes on two cores.
With FLASHINFER_CUDA_ARCH_LIST=9.0a no GPU is needed; nvcc and ninja are. MAX_JOBS says how many compilers run for one.
``KERNELS=FOLDER make device-bundle`` packs the folder, and scripts/device_run.sh puts it where FlashInfer looks.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from hardpoint_cuda.flashinfer_library import COMMUNICATION, Kernel, Library, module

FEATURES = ("window", "soft_cap")
BACKENDS = ("fa2", "fa3")


def kernels_of(text: str) -> list[Library]:
    """The kernels that an argument names."""
    if text == "comm":
        return [COMMUNICATION]
    dtype, size, *words = text.split(":")
    if unknown := set(words).difference(FEATURES, BACKENDS):
        raise SystemExit(f"{text}: unknown {', '.join(sorted(unknown))}; there are {', '.join(FEATURES + BACKENDS)}")
    backends = [backend for backend in BACKENDS if backend in words] or BACKENDS
    return [Kernel(backend, dtype, int(size), "window" in words, "soft_cap" in words) for backend in backends]


@contextmanager
def toolkit() -> Iterator[None]:
    """Complete a CUDA toolkit that consists of the compiler alone, for the compilers started inside.

    FlashInfer takes the folder above that of ``nvcc`` for the toolkit, though it may be a wrapper. cuRAND's headers
    come with torch's own packages, and a library with the driver's name is all that linking needs of the driver.
    """
    if Path("/usr/local/cuda").is_dir():
        os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    headers = [str(x.parent) for place in site.getsitepackages() for x in Path(place).glob("nvidia/*/include/curand.h")]
    with tempfile.TemporaryDirectory() as stubs:
        command = ["cc", "-shared", "-x", "c", os.devnull, "-Wl,-soname,libcuda.so.1", "-o", f"{stubs}/libcuda.so"]
        subprocess.run(command, check=True)
        for name, folders in (("CPATH", headers), ("LIBRARY_PATH", [stubs])):
            os.environ[name] = os.pathsep.join(filter(None, [os.environ.get(name), *folders]))
        yield


def build(kernel: Library, folder: Path) -> str:
    """Build one and copy it; returns a line about it."""
    began = time.perf_counter()
    kernel.load()
    places = module("flashinfer.jit.env")
    ahead, built = (
        x / kernel.name / f"{kernel.name}.so" for x in (places.FLASHINFER_AOT_DIR, places.FLASHINFER_JIT_DIR)
    )
    library = ahead if ahead.is_file() else built
    shutil.copy(library, folder)
    return f"{kernel.name}: {library.stat().st_size / 2**20:.1f} MiB in {time.perf_counter() - began:.0f} s"


def main(folder: Path, *wanted: str) -> None:
    """See the top of this file."""
    kernels = [kernel for text in wanted for kernel in kernels_of(text)]
    folder.mkdir(parents=True, exist_ok=True)
    with toolkit(), ThreadPoolExecutor(4) as pool:  # each waits for compilers of its own
        module("flashinfer.jit")  # imported once, before there are threads
        for line in pool.map(lambda kernel: build(kernel, folder), kernels):
            print(line, flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), *sys.argv[2:])
