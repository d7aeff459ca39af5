"""Kernels that need a library which g++ must build: the module of a test plugin, installed as ``hp_built.kernels``."""

from __future__ import annotations

import os

import torch
from hp_built.library import counted, library, pending  # type: ignore[import-not-found]  # installed by tests

from hardpoint.ops.rms_norm import rms_norm
from hardpoint.reference.attention import ReferenceAttention
from hardpoint.reference.linear import PlainLinear
from hardpoint_plugin_api import (
    AttentionCall,
    AttentionSpec,
    AttentionWorkload,
    BuildContext,
    DeviceInfo,
    KernelBuild,
    LinearCall,
    LinearWorkload,
    OpWorkload,
)


class BuiltAttention(ReferenceAttention):
    """The reference, which counts its calls."""

    @classmethod
    def pending_build(cls, workload: AttentionWorkload, device: DeviceInfo) -> KernelBuild | None:
        found: KernelBuild | None = pending()
        return found

    def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
        super().__init__(ctx, spec)
        ctx.resources.declare("built.scratch", 1024)
        library(os.environ["HP_BUILD_FOLDER"])

    def forward(self, call: AttentionCall) -> None:
        assert self.ctx.resources.get("built.scratch").numel() == 1024
        counted()
        super().forward(call)


class BuiltLinear(PlainLinear):
    """The reference, which counts its calls."""

    @classmethod
    def pending_build(cls, workload: LinearWorkload, device: DeviceInfo) -> KernelBuild | None:
        found: KernelBuild | None = pending()
        return found

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        library(os.environ["HP_BUILD_FOLDER"])

    def apply(self, call: LinearCall) -> torch.Tensor:
        counted()
        return super().apply(call)


class BuiltNorm:
    """The reference of rms_norm."""

    @classmethod
    def pending_build(cls, workload: OpWorkload, device: DeviceInfo) -> KernelBuild | None:
        found: KernelBuild | None = pending()
        return found

    def __init__(self, ctx: BuildContext, workload: OpWorkload, parts: object) -> None:
        library(os.environ["HP_BUILD_FOLDER"])

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        return rms_norm.reference(x, weight, eps=eps)
