"""Building FlashInfer's libraries, and DeepGEMM's kernels, in a child process while an engine serves with others.

Without this an engine's start would wait for ``nvcc``: a minute or two. FlashInfer keeps libraries at
``BASE/.cache/flashinfer/VERSION/ARCH/cached_ops/NAME/NAME.so`` (its jit/env.py, 0.6.14 and 0.6.18).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import importlib_metadata

from hardpoint_cuda.flashinfer_library import (
    COMMUNICATION,
    DISTRIBUTION,
    PRODUCT,
    Kernel,
    LatentKernel,
    Library,
    is_ahead_of_time,
)
from hardpoint_plugin_api import KernelBuild, Reason
from hardpoint_plugin_api.distributions import locate_module

if TYPE_CHECKING:
    import torch

_HERE = __name__


def attention_build(kernels: Sequence[Kernel]) -> KernelBuild | None:
    """The build of those of ``kernels`` that are nowhere yet."""
    missing = [kernel for kernel in dict.fromkeys(kernels) if not is_built(kernel)]
    if not missing:
        return None
    title = "FlashInfer's " + " and ".join(kernel.name for kernel in missing)
    return KernelBuild(title, f"{_HERE}:build_attention", tuple(json.dumps(asdict(kernel)) for kernel in missing))


def latent_build(kernel: LatentKernel) -> KernelBuild | None:
    """The build of ``kernel``, where it is nowhere yet."""
    if is_built(kernel):
        return None
    return KernelBuild(f"FlashInfer's {kernel.name}", f"{_HERE}:build_latent", (json.dumps(asdict(kernel)),))


def communication_build() -> KernelBuild | None:
    """The build of the library of what ranks share, where it is nowhere yet."""
    if is_built(COMMUNICATION):
        return None
    return KernelBuild(f"FlashInfer's {COMMUNICATION.name}", f"{_HERE}:build_communication")


def product_build(n: int | None, k: int | None) -> KernelBuild | None:
    """The build of the product of 8-bit floats for weights [N, K], where anything of it is missing."""
    if n is None or k is None:
        return None
    if is_built(PRODUCT) and any(PRODUCT.kernels.glob(f"cache/gemm_{n}_{k}_*/*.cubin")):
        return None
    title = f"FlashInfer's {PRODUCT.name} for weights of {n} x {k}"
    return KernelBuild(title, f"{_HERE}:build_product", (str(n), str(k)))


def is_built(library: Library) -> bool:
    """Whether a library is there ahead of time, or in the user's cache. FlashInfer is not imported."""
    distribution = importlib_metadata.Distribution.from_name(DISTRIBUTION)
    package = locate_module(distribution, "flashinfer")
    if not isinstance(package, Reason) and is_ahead_of_time(library, package):
        return True
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
    cached = base / ".cache" / "flashinfer" / distribution.version
    return any(cached.glob(f"*/cached_ops/{library.name}/{library.name}.so"))


def build_attention(*kernels: str) -> None:
    """Build attention kernels, given as JSON; in a child process."""
    for text in kernels:
        Kernel(**json.loads(text)).generate().build(verbose=False)


def build_latent(kernel: str) -> None:
    """Build a kernel of latent attention, given as JSON; in a child process."""
    LatentKernel(**json.loads(kernel)).generate().build(verbose=False)


def build_communication() -> None:
    """Build the library of what ranks share; in a child process."""
    COMMUNICATION.generate().build(verbose=False)


def build_product(n: str, k: str) -> None:
    """Build the product for weights [N, K]; in a child process, on the device that it finds first."""
    import torch

    from hardpoint_cuda.flashinfer_linear import SizedProduct

    rows, columns, device = int(n), int(k), torch.device("cuda")
    weight: torch.Tensor = torch.zeros(rows, columns, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scale = torch.ones(-(-rows // 128), columns // 128, device=device)
    SizedProduct(device, rows, columns).prepare(weight, scale)
