"""The context of the FlashInfer backend outside an engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from hardpoint.resources import EngineResources
from hardpoint_cuda.platform import describe_arch
from hardpoint_plugin_api import AttentionBackend, AttentionBatch, AttentionSpec, BuildContext, DeviceInfo

needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed"
)


@dataclass
class WithDevice:
    """A build context as far as the backend asks; by default for an H200."""

    resources: EngineResources = field(default_factory=EngineResources)
    workspace_mib: int = 32
    tuning_folders: tuple[str, ...] = ()
    device: DeviceInfo = field(default_factory=lambda: describe_arch("H200", (9, 0)))

    def plugin_config(self, plugin: str) -> dict[str, int]:
        return {"flashinfer_workspace_mib": self.workspace_mib}


def backend_class(**context: Any) -> type[AttentionBackend]:
    """For ``run_backend``: the backend in a context of its own, over the resources of the one that it is given."""
    from hardpoint_cuda.flashinfer_attention import FlashInferAttention  # it imports Triton

    def build(ctx: Any, spec: AttentionSpec) -> AttentionBackend:
        return FlashInferAttention(cast(BuildContext, WithDevice(ctx.resources, **context)), spec)

    return cast(type[AttentionBackend], build)


def needs_kernels(spec: AttentionSpec, device: DeviceInfo) -> None:
    """Skip the test where the backend refuses ``spec``: its kernels are not compiled, and cannot be here."""
    from hardpoint_cuda.flashinfer_attention import FlashInferAttention  # it imports Triton

    if found := FlashInferAttention.supports(spec.workload(), device):
        pytest.skip(str(found[0]))


class Event:
    """torch.cuda.Event on a machine without a device."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


def decode_batch(lengths: Sequence[int], table: torch.Tensor) -> AttentionBatch:
    """A captured step of one token for each request."""
    n = len(lengths)
    return AttentionBatch(
        query_start=torch.arange(n + 1, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.zeros(n, dtype=torch.int32),
        query_start_host=tuple(range(n + 1)),
        seq_lens_host=tuple(lengths),
        num_decodes=n,
        graph_key=n,
    )
