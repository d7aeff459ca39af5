"""Builds the extension against the torch that is installed: pip install --no-build-isolation."""

from setuptools import Extension, setup  # type: ignore[import-untyped]  # it ships no types
from torch.utils.cpp_extension import include_paths, library_paths

setup(
    ext_modules=[
        Extension(
            "hardpoint_sim._C",
            ["csrc/module.cpp"],
            depends=["csrc/memory.h", "csrc/runtime.h", "csrc/operators.h"],
            library_dirs=library_paths(),
            libraries=["c10", "torch_cpu"],
            # Torch's headers as system headers: their warnings are not ours.
            extra_compile_args=["-std=c++20", "-O1", "-g0", *(f"-isystem{path}" for path in include_paths())],
        )
    ]
)
