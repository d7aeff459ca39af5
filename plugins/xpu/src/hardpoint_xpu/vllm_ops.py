"""Norms and gated activations of vllm-xpu-kernels. Nothing of it ran on hardware.

Its operators round as core's ops do: ``csrc/layernorm.cpp`` (0a292c3b) and ``csrc/activation.cpp`` (0fce58b6) of
github.com/vllm-project/vllm-xpu-kernels.

Axes: T tokens, H heads, n columns of a row, I columns of one half.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hardpoint_plugin_api import BuildContext, DeviceInfo, OpWorkload, Reason
from hardpoint_xpu.vllm_library import operator, reasons_against

_GATED = {
    "silu": ("_C.silu_and_mul", "result"),
    "gelu": ("_C.gelu_and_mul", "out"),
    "gelu_tanh": ("_C.gelu_tanh_and_mul", "out"),
}
"""The operator of each activation, and the name of its output."""


class _XpuOp(ABC):
    """An op by one operator of the library, which is loaded when the op is first called."""

    def __init__(self, ctx: BuildContext, workload: OpWorkload, parts: Mapping[str, Callable[..., Any]]) -> None:
        self._operator = self.operator_for(workload)

    @staticmethod
    @abstractmethod
    def operator_for(workload: OpWorkload) -> str:
        """The operator's module and name."""

    @classmethod
    def supports(cls, workload: OpWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse a library that has another operator."""
        return reasons_against(cls.operator_for(workload))


class XpuRmsNorm(_XpuOp):
    """The op ``rms_norm``, of rows [T, n] or [T, H, n], which may be apart."""

    @staticmethod
    def operator_for(workload: OpWorkload) -> str:
        return "_C.rms_norm"

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        """See core's op."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if out.numel():
            operator(self._operator)(result=out, input=_neighbours(x), weight=weight, epsilon=eps)
        return out


class XpuAddRmsNorm(_XpuOp):
    """The op ``add_rms_norm``. The operator writes the norm to its input, which is copied first.

    The sum takes the residual's place.
    """

    @staticmethod
    def operator_for(workload: OpWorkload) -> str:
        return "_C.fused_add_rms_norm"

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See core's op."""
        out, total = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x), residual.contiguous()
        if out.numel():
            operator(self._operator)(input=out, residual=total, weight=weight, epsilon=eps)
        return out, total


class XpuActAndMul(_XpuOp):
    """The op ``act_and_mul`` for activations that the manifest names."""

    @staticmethod
    def operator_for(workload: OpWorkload) -> str:
        assert workload.activation is not None
        return _GATED[workload.activation][0]

    def __call__(self, x: torch.Tensor, *, activation: str) -> torch.Tensor:
        """x [T, 2I] -> [T, I]. See core's op."""
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        if out.numel():
            operator(self._operator)(**{_GATED[activation][1]: out, "input": x.contiguous()})
        return out


def _neighbours(x: torch.Tensor) -> torch.Tensor:
    """Rows whose elements lie one by one."""
    return x if x.stride(-1) == 1 else x.contiguous()
