"""A linear kernel that nvcc must build: the module of a test plugin, installed as ``hp_nvcc.kernels``.

A build imports it without torch. HP_BUILD_FOLDER says where the library is built.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from hardpoint_plugin_api import BuildContext, DeviceInfo, KernelBuild, LinearCall, LinearKernel, LinearWorkload

if TYPE_CHECKING:
    import torch

SOURCE = r"""
// y[t, o] = sum over i of x[t, i] * w[o, i]: a block for each element.
__global__ void product(const float* x, const float* w, float* y, int in_size, long x_stride) {
    __shared__ float sums[128];
    const float* row = x + blockIdx.x * x_stride;
    const float* column = w + (long)blockIdx.y * in_size;
    float sum = 0;
    for (int i = threadIdx.x; i < in_size; i += 128) sum += row[i] * column[i];
    sums[threadIdx.x] = sum;
    for (int half = 64; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) y[(long)blockIdx.x * gridDim.y + blockIdx.y] = sums[0];
}
extern "C" int launch(const float* x, const float* w, float* y, int tokens, int out_size, int in_size, long x_stride,
                      cudaStream_t stream) {
    if (tokens) product<<<dim3(tokens, out_size), 128, 0, stream>>>(x, w, y, in_size, x_stride);
    return cudaGetLastError();
}
"""


def build(folder: str) -> None:
    """Compile the library."""
    source, made = Path(folder, "kernel.cu"), Path(folder, "made.so")
    source.write_text(SOURCE)
    subprocess.run(["nvcc", "-shared", "-Xcompiler", "-fPIC", "-arch=native", "-o", made, source], check=True)
    made.rename(Path(folder, "kernel.so"))


@functools.cache
def library(folder: str) -> ctypes.CDLL:
    """The library, built first where it must be."""
    if not Path(folder, "kernel.so").exists():
        build(folder)
    found = ctypes.CDLL(str(Path(folder, "kernel.so")))
    pointer, number = ctypes.c_void_p, ctypes.c_int
    found.launch.argtypes = [pointer, pointer, pointer, number, number, number, ctypes.c_long, pointer]
    return found


class NvccLinear(LinearKernel):
    """float32 products on the current stream."""

    @classmethod
    def pending_build(cls, workload: LinearWorkload, device: DeviceInfo) -> KernelBuild | None:
        folder = os.environ["HP_BUILD_FOLDER"]
        if Path(folder, "kernel.so").exists():
            return None
        return KernelBuild("the product by nvcc", "hp_nvcc.kernels:build", (folder,))

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        self._launch = library(os.environ["HP_BUILD_FOLDER"]).launch

    def apply(self, call: LinearCall) -> torch.Tensor:
        import torch

        x, weight = call.x, call.weights["weight"]
        y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        sizes = (*y.shape, weight.shape[1])
        code = self._launch(x.data_ptr(), weight.data_ptr(), y.data_ptr(), *sizes, x.stride(0), stream)
        assert code == 0, f"error {code} of CUDA"
        return y if call.bias is None else y + call.bias
