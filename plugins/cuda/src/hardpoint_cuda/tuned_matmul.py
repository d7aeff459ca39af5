"""Plain weights times many tokens, by the algorithm of cuBLASLt's that was measured to be the fastest.

Axes: M rows of x, N rows of the weight (out), K columns (in).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch.nn.functional import linear

from hardpoint.kernels.launch import aligned
from hardpoint_cuda import cublaslt
from hardpoint_cuda.cublaslt import WORKSPACE_BYTES, Prepared, Product, prepared
from hardpoint_cuda.matmul_tables import Table, key_of, nearest, path_of, read
from hardpoint_plugin_api import (
    BuildContext,
    DeviceInfo,
    LinearCall,
    LinearKernel,
    LinearWorkload,
    PlatformError,
    Reason,
)

_WORKSPACE = "cublaslt_workspace"


class TunedMatmul(LinearKernel):
    """For weights whose shape stands in the table of the device; where that names no algorithm, cuBLAS chooses."""

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        self._choose = lru_cache(maxsize=256)(self._chosen)
        ctx.resources.declare(_WORKSPACE, WORKSPACE_BYTES, scope="step")

    @classmethod
    def supports(cls, workload: LinearWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse what was not measured on this device with this version of the library, or gained nothing."""
        if workload.in_features is None or workload.out_features is None or workload.dtype is None:
            return []
        if not device.present:
            message = "its table goes by the version of cuBLASLt, which only the device's machine knows"
            return [Reason("library", message)]
        try:
            table = _table(workload, device.name)
        except PlatformError as error:
            return [Reason("library", str(error))]
        if not any(table.values()):
            shape = f"{workload.out_features}x{workload.in_features}"
            message = "cuBLAS's own choice is as fast" if table else "no algorithms were tuned for this weight here"
            fix = "" if table else f"python -m hardpoint_cuda.tune_matmul --shape {shape}"
            return [Reason("not-tuned", message, wanted=shape, fix=fix)]
        return []

    @classmethod
    def trial_sizes(cls, device: DeviceInfo) -> Sequence[tuple[int, int, int]]:
        """The fewest rows that have an algorithm, for each weight of the device's table."""
        try:
            tables = read(path_of(device.name, cublaslt.version()))
        except PlatformError:
            return ()  # supports() says why
        sizes = []
        for key, table in tables.items():
            rows = [m for m, algorithm in table.items() if algorithm]
            if rows:
                n, k = map(int, key.rpartition(" ")[2].split("x"))
                sizes.append((min(rows), n, k))
        return sorted(sizes, key=prod)

    def apply(self, call: LinearCall) -> torch.Tensor:
        x, weight, bias = call.x, call.weights["weight"], call.bias
        rows = x.reshape(-1, x.shape[-1])
        is_plain = rows.is_contiguous() and weight.is_contiguous() and aligned(rows, weight)
        chosen = self._choose(rows.shape[0], *weight.shape, weight.device) if is_plain else None
        if chosen is None:
            return linear(x, weight, bias)
        product, algorithm = chosen
        y = product.run(rows, weight, algorithm, self.ctx.resources.get(_WORKSPACE))
        return (y if bias is None else y.add_(bias)).view(*x.shape[:-1], y.shape[1])

    def _chosen(self, m: int, n: int, k: int, device: torch.device) -> tuple[Product, Prepared] | None:
        """How to multiply ``m`` rows; None: as cuBLAS does."""
        table = _table(self.workload, self.ctx.device.name)
        algorithm = nearest(table, m) if m and table else None
        if algorithm is None:
            return None
        product = _product(m, n, k, self.ctx.dtype, device)
        return (product, prepared(algorithm)) if product.admits(algorithm) else None


@lru_cache(maxsize=1024)
def _product(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Product:
    """Layers alike share it."""
    return Product(m, n, k, dtype, device)


def _table(workload: LinearWorkload, device: str) -> Table:
    tables = read(path_of(device, cublaslt.version()))
    return tables.get(key_of(str(workload.dtype), workload.out_features or 0, workload.in_features or 0), {})
