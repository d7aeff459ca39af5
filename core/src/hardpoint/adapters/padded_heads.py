"""The adapter behind ``NAME+padN``: heads are padded with zeros to the multiple that a backend needs.

Zeros add nothing to a dot product, and the padded part of the values is cut off, so the result is the same. It costs
cache and bandwidth in the ratio of the sizes.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch.nn import functional

from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionBatch,
    AttentionCall,
    AttentionMetadata,
    AttentionSpec,
    AttentionWorkload,
    BuildContext,
    CacheSpec,
    CaptureGrade,
    DeviceInfo,
    Phase,
    Reason,
    StepLimits,
    StoreCall,
)


@functools.cache
def pad_heads(inner: type[AttentionBackend], multiple: int) -> type[AttentionBackend]:
    """Return a backend class that serves any head size through ``inner``, which needs a multiple of ``multiple``."""

    class PaddedHeads(AttentionBackend):
        layout, capture = inner.layout, inner.capture
        exact_lengths, traceable, keeps_drafts = inner.exact_lengths, inner.traceable, inner.keeps_drafts

        def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
            super().__init__(ctx, spec)
            self._pad = -spec.head_size % multiple
            self._inner = inner(ctx, replace(spec, head_size=spec.head_size + self._pad))

        @classmethod
        def supports(cls, workload: AttentionWorkload, device: DeviceInfo) -> list[Reason]:
            assert workload.head_size is not None
            return inner.supports(replace(workload, head_size=-(-workload.head_size // multiple) * multiple), device)

        @property
        def cache_spec(self) -> CacheSpec:
            return self._inner.cache_spec

        def set_head_constants(self, sinks: torch.Tensor | None, alibi_slopes: torch.Tensor | None) -> None:
            self._inner.set_head_constants(sinks, alibi_slopes)

        def set_cache_scales(self, k: torch.Tensor, v: torch.Tensor) -> None:
            self._inner.set_cache_scales(k, v)

        def grade(self, phase: Phase, tokens: int) -> CaptureGrade:
            return self._inner.grade(phase, tokens)

        def step_limits(self) -> StepLimits:
            return self._inner.step_limits()

        def store(self, call: StoreCall) -> None:
            self._inner.store(replace(call, k=self._padded(call.k), v=self._padded(call.v)))

        def plan(self, batch: AttentionBatch) -> AttentionMetadata:
            return self._inner.plan(batch)

        def forward(self, call: AttentionCall) -> None:
            q, k, v = self._padded(call.q), self._padded(call.k), self._padded(call.v)
            wide = torch.empty_like(q)
            self._inner.forward(replace(call, q=q, k=k, v=v, out=wide))
            call.out.copy_(wide[..., : self.spec.head_size])

        def _padded(self, x: torch.Tensor) -> torch.Tensor:
            return functional.pad(x, (0, self._pad))

    PaddedHeads.__name__ = f"{inner.__name__}Pad{multiple}"
    return PaddedHeads
