"""Build FlashInfer's kernels and copy them to a folder, for machines without a compiler or without time.

    python3 scripts/flashinfer_kernels.py FOLDER bfloat16:128 float16:64:window:soft_cap comm fp8 fp8:4096x14336 ...

Each argument is a dtype and head size, with the features that the attention kernels must have; both kernels of a Hopper
GPU are built, unless ``fa2`` or ``fa3`` names one. ``latent:bfloat16`` stands for latent attention, ``comm`` for what
ranks share, four minutes on two cores.
``fp8`` stands for the product of 8-bit floats, two minutes. It compiles more where it runs: ``fp8:NxK`` does that for a
weight of those sizes and a GPU of 132 multiprocessors, into FOLDER/deep_gemm: TRTLLM_DG_CACHE_DIR is to name it there.
With FLASHINFER_CUDA_ARCH_LIST=9.0a no GPU is needed; nvcc and ninja are. MAX_JOBS says how many compilers run for one.
``KERNELS=FOLDER make device-bundle`` packs the folder, and scripts/device_run.sh puts it where FlashInfer looks.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from hardpoint_cuda.flashinfer_library import COMMUNICATION, PRODUCT, Kernel, LatentKernel, Library, module
from hardpoint_cuda.flashinfer_linear import TRIED_ROWS

FEATURES = ("window", "soft_cap")
BACKENDS = ("fa2", "fa3")
HEADERS = ("curand.h", "cublasLt.h", "nvrtc.h")
"""Headers that FlashInfer includes and a compiler alone lacks."""

DEEP_GEMM = """
#include "tensorrt_llm/deep_gemm/compiler.cuh"

int main(int, char** arguments) {  // folder of headers, N, K, numbers of rows
  using namespace deep_gemm;
  jit::Compiler::setIncludeDirs({*++arguments});
  int n = atoi(*++arguments), k = atoi(*++arguments);
  while (*++arguments) {
    auto [block_m, block_n, stages, multicast, bytes] = jit::get_best_gemm_config(atoi(*arguments), n, k, 1, 132);
    jit::getGlobalCompiler().build(n, k, block_m, block_n, 128, 1, stages, multicast, GemmType::Normal);
  }
}
"""
NO_DEVICE = """
int cudaGetDevice(int* device) { return *device = 0; }
int cudaDeviceGetAttribute(int* value, int what, int device) { *value = what == 75 ? 9 : 0; return device; }
int cuGetErrorString(void) { return 1; }
int cuLibraryUnload(void) { return 1; }
"""
"""DeepGEMM's own compiler, called as it is to multiply; what it asks of a device is answered as sm_90 would (75 stands
for the major version)."""


def kernels_of(text: str) -> list[Library]:
    """The kernels that an argument names."""
    if text in ("comm", "fp8"):
        return [COMMUNICATION if text == "comm" else PRODUCT]
    if text.startswith("latent:"):
        return [LatentKernel(backend, text.removeprefix("latent:"), 512, 64) for backend in BACKENDS]
    dtype, size, *words = text.split(":")
    if unknown := set(words).difference(FEATURES, BACKENDS):
        raise SystemExit(f"{text}: unknown {', '.join(sorted(unknown))}; there are {', '.join(FEATURES + BACKENDS)}")
    backends = [backend for backend in BACKENDS if backend in words] or BACKENDS
    return [Kernel(backend, dtype, int(size), "window" in words, "soft_cap" in words) for backend in backends]


@contextmanager
def toolkit() -> Iterator[None]:
    """Complete a CUDA toolkit that consists of the compiler alone, for the compilers started inside.

    FlashInfer takes the folder above that of ``nvcc`` for the toolkit, though it may be a wrapper. Headers of its
    libraries come with torch's own packages, and so does NVRTC; of the driver, a library with its name and functions is
    all that linking needs.
    """
    if Path("/usr/local/cuda").is_dir():
        os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    packages = [x for place in sys.path for x in Path(place).glob("nvidia/*")]
    headers = [str(x / "include") for x in packages if any((x / "include" / name).is_file() for name in HEADERS)]
    declared = Path(os.environ.get("CUDA_HOME", ""), "include", "cuda.h")
    names = set(re.findall(r"\bcu[A-Z]\w+", declared.read_text())) if declared.is_file() else set()
    with tempfile.TemporaryDirectory() as stubs:
        Path(stubs, "cuda.c").write_text("".join(f"void {name}(void) {{}}\n" for name in sorted(names)))
        soname = "-Wl,-soname,libcuda.so.1"
        subprocess.run(["cc", "-shared", "-fPIC", f"{stubs}/cuda.c", soname, "-o", f"{stubs}/libcuda.so"], check=True)
        for library in [library for x in packages for library in x.glob("lib/libnvrtc.so.*")][:1]:
            Path(stubs, "libnvrtc.so").symlink_to(library.resolve())
        for name, folders in (("CPATH", headers), ("LIBRARY_PATH", [stubs])):
            os.environ[name] = os.pathsep.join(filter(None, [os.environ.get(name), *folders]))
        yield


def build(kernel: Library, folder: Path) -> str:
    """Build one and copy it; returns a line about it. It is not loaded, for which a driver would be needed."""
    began = time.perf_counter()
    spec = kernel.generate()
    if not spec.is_compiled:
        spec.build(verbose=False)
    library = shutil.copy(spec.get_library_path(), folder)
    return f"{kernel.name}: {Path(library).stat().st_size / 2**20:.1f} MiB in {time.perf_counter() - began:.0f} s"


def build_for_weights(sizes: list[str], folder: Path) -> None:
    """Have DeepGEMM compile what it wants for weights of ``NxK``, and keep it in ``folder``."""
    spec, places = PRODUCT.generate(), module("flashinfer.jit.env")
    includes = [*spec.extra_include_dirs, places.FLASHINFER_CSRC_DIR, *places.CUTLASS_INCLUDE_DIRS]
    includes.append(places.SPDLOG_INCLUDE_DIR)
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    with tempfile.TemporaryDirectory() as scratch:
        for name, text in (("compile.cu", DEEP_GEMM), ("no_device.c", NO_DEVICE)):
            Path(scratch, name).write_text(text)
        sources = [*Path(scratch).iterdir(), *(x for x in spec.sources if Path(x).suffix == ".cpp")]
        # Optimized, because that drops the calls of NVRTC, which are never made.
        command = [home / "bin" / "nvcc", "-std=c++17", "-O2", "-arch=sm_90a", "--cudart=shared", "-w"]
        command += [
            *(f"-I{x}" for x in includes),
            *sources,
            "-Xlinker",
            f"-rpath={home / 'lib64'}",
            "-o",
            f"{scratch}/run",
        ]
        subprocess.run(command, check=True)
        for size in sizes:
            began = time.perf_counter()
            arguments = [places.FLASHINFER_CSRC_DIR / "nv_internal" / "tensorrt_llm", *size.split("x"), *TRIED_ROWS]
            environment = os.environ | {"TRTLLM_DG_CACHE_DIR": str(folder)}
            subprocess.run([f"{scratch}/run", *map(str, arguments)], env=environment, check=True)
            print(f"kernels for {size} in {time.perf_counter() - began:.0f} s", flush=True)


def main(folder: Path, *wanted: str) -> None:
    """See the top of this file."""
    sizes = [text.removeprefix("fp8:") for text in wanted if text.startswith("fp8:")]
    kernels = [kernel for text in wanted if not text.startswith("fp8:") for kernel in kernels_of(text)]
    folder.mkdir(parents=True, exist_ok=True)
    with toolkit(), ThreadPoolExecutor(4) as pool:  # each waits for compilers of its own
        module("flashinfer.jit")  # imported once, before there are threads
        for line in pool.map(lambda kernel: build(kernel, folder), kernels):
            print(line, flush=True)
        if sizes:
            build_for_weights(sizes, folder / "deep_gemm")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), *sys.argv[2:])
