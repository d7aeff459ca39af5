"""FlashInfer's product of 8-bit floats with scales of blocks, which is DeepGEMM's: many tokens on sm_90.

The weight has a scale for each tile of 128 rows and columns, activations one for each 128 columns of a row: the format
of DeepSeek's checkpoints. FlashInfer could round activations itself; core's op does it, as for all other kernels, so
that prompts and decodes take the same numbers, or what stands before writes them rounded.

Two promises of FlashInfer 0.6.14 are left aside: scales of a weight for single rows, which it takes and reads as those
of tiles; and output in float16, where it writes bfloat16.

Axes: M rows of x, N rows of the weight (out), K columns (in). Written from the sources of 0.6.14 and 0.6.18, whose
products are the same.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch

from hardpoint_cuda.flashinfer_builds import product_build
from hardpoint_cuda.flashinfer_library import PRODUCT, module, reasons
from hardpoint_cuda.linear import LibraryProduct
from hardpoint_plugin_api import DeviceInfo, KernelBuild, LinearWorkload, PlatformError, Reason

logger = logging.getLogger(__name__)

_GROUP = 128
_ALIGNMENT = 4
"""Scales of one group of columns, over rows, fill up whole 16 bytes."""

_TILE = 128
_MULTICAST_FROM, _MOST_ROWS = 1024, 2048
TRIED_ROWS = (*range(_TILE, _MOST_ROWS + 1, _TILE), _MULTICAST_FROM - 1)
"""DeepGEMM (``get_best_gemm_config``) cuts a product by the number of tiles of 128 rows, and from 1024 rows on loads
for two at a time: one number of each. For most widths there is no further way to cut more than 2048."""


class FlashInferBlockScaledLinear(LibraryProduct):
    """For at least 65 rows; with fewer, DeepGEMM cuts otherwise, and kernels would have to be compiled for that."""

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse sizes that FlashInfer does, and say what of it is not here."""
        n, k = workload.out_features, workload.in_features
        sizes = (("in-features", k, _GROUP), ("out-features", n, 64))
        found = [
            Reason(code, "FlashInfer's product takes whole blocks", wanted=str(size), supported=f"multiples of {of}")
            for code, size, of in sizes
            if size and size % of
        ]
        found += reasons(frozenset({PRODUCT}))
        if PRODUCT.compiler() is None and not any(PRODUCT.kernels.glob(f"cache/gemm_{n or '*'}_{k or '*'}_*/*.cubin")):
            message = "FlashInfer's product compiles a kernel for each weight's widths, and finds no nvcc"
            fix = "set CUDA_HOME to a CUDA toolkit, or have its nvcc on the PATH"
            wanted, supported = f"{n or 'any'} x {k or 'any'}", f"what was compiled into {PRODUCT.kernels}"
            found.append(Reason("nvcc", message, wanted=wanted, supported=supported, fix=fix))
        return found

    @classmethod
    def pending_build(cls, workload: LinearWorkload, device: DeviceInfo) -> KernelBuild | None:
        """The build that nvcc has to make first: some ten seconds for each size of weights."""
        return product_build(workload.out_features, workload.in_features)

    @classmethod
    def trial_sizes(cls, device: DeviceInfo) -> Sequence[tuple[int, int, int]]:
        """A tile that is not full, a width that is no multiple of 128, and loads for two tiles at a time."""
        return (65, 256, 256), (200, 576, 256), (1030, 384, 384)

    def product(
        self, codes: torch.Tensor, scale: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        weight = weights["weight"]
        y = codes.new_empty(codes.shape[0], weight.shape[0], dtype=torch.bfloat16)
        if codes.shape[0]:
            multiply = _product_for(weight.device, *weight.shape)
            multiply(codes, weight, y, by_columns(scale), weights["weight_scale"])
        return y if bias is None else y.add_(bias)


def by_columns(scale: torch.Tensor) -> torch.Tensor:
    """Scales [M, G] in the order in which the kernel reads them: [G, M], rows of whole 16 bytes.

    FlashInfer's documentation has them as [M, G]. The padding of a row may be any number: no row of x reads it.
    """
    m, groups = scale.shape
    columns = scale.new_empty(groups, -(-m // _ALIGNMENT) * _ALIGNMENT)
    columns[:, :m] = scale.t()
    return columns


class SizedProduct:
    """FlashInfer's product for weights [N, K], of all layers that have them. The first call compiles what it lacks.

    That is where an engine prepares graphs, or else its first prompt: no later step waits for a compiler, and no graph
    is captured while modules are loaded. It calls FlashInfer's runner without what ``fp8_blockscale_gemm_sm90`` does
    around it: that allocates memory for rounding both operands, as many bytes as they have, though both are rounded.
    """

    def __init__(self, device: torch.device, n: int, k: int) -> None:
        self._device, self._n, self._k = device, n, k
        self._runner: Any = None

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        y: torch.Tensor,
        x_scale: torch.Tensor,
        weight_scale: torch.Tensor,
    ) -> None:
        """Write the product of x [M, K] and the weight [N, K] to ``y``, bfloat16 [M, N]; ``x_scale`` as of
        ``by_columns``. Raises PlatformError where it cannot be had."""
        if self._runner is None:
            self.prepare(weight, weight_scale)
        self._runner.run_gemm(x, weight, y, x_scale, weight_scale)

    def prepare(self, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
        """Compile what is missing, by multiplying with ``weight``. Raises PlatformError."""
        n, k, kernels = self._n, self._k, PRODUCT.kernels
        logger.info("FlashInfer's product for weights of %d x %d: what is not yet in %s is compiled", n, k, kernels)
        PRODUCT.load()
        runner = module("flashinfer.gemm.gemm_base").get_fp8_blockscale_gemm_runner_sm90()
        runner.configure_workspace(torch.empty(1, dtype=torch.uint8, device=self._device))  # asked for, and not used
        x = torch.zeros(_MOST_ROWS, k, dtype=torch.uint8, device=self._device).view(torch.float8_e4m3fn)
        y = torch.empty(_MOST_ROWS, n, dtype=torch.bfloat16, device=self._device)
        try:
            for m in TRIED_ROWS:
                scale = weight_scale.new_ones(m, k // _GROUP)
                runner.run_gemm(x[:m], weight, y[:m], by_columns(scale), weight_scale)
            torch.cuda.synchronize(self._device)
        except Exception as error:  # of the compiler, whose words are on stderr; of tvm-ffi; of the device
            raise PlatformError(
                f"FlashInfer's product cannot be had for weights of {n} x {k}: {error}; its compiler is "
                f"{PRODUCT.compiler() or 'not found'}, its kernels are in {kernels}; choose another linear kernel"
            ) from error
        self._runner = runner


@functools.cache
def _product_for(device: torch.device, n: int, k: int) -> SizedProduct:
    return SizedProduct(device, n, k)
