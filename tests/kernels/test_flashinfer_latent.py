"""FlashInfer's latent attention without a device, over a stand-in for its wrapper.

The stand-in has the wrapper's parameters, refuses what the wrapper refuses, and attends with the reference. It looks at
what was planned and at nothing else: lengths and the indices of pages.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hardpoint.reference.latent_attention import ReferenceLatentAttention
from hardpoint_cuda import flashinfer_latent, flashinfer_library, flashinfer_plan
from hardpoint_cuda.flashinfer_latent import FlashInferLatentAttention, FlashInferLatentMetadata
from hardpoint_cuda.flashinfer_library import LATENT_SIGNATURES
from hardpoint_cuda.platform import describe_arch
from hardpoint_plugin_api import BuildContext, CapacityError, LatentCall, LatentSpec
from tests.support.attention import MIXED, Piece
from tests.support.flashinfer import Event, WithDevice, decode_batch
from tests.support.latent import run_latent_backend

SPEC = LatentSpec(4, 32, 16, 0.2, "bfloat16", "bfloat16", 16)
STEPS: dict[str, tuple[Piece, ...]] = {
    "mixed": MIXED,
    "decodes": (Piece(1, 1), Piece(1, 16), Piece(1, 17), Piece(1, 90)),
    "prompts": (Piece(20, 20), Piece(4, 70), Piece(16, 32)),
}


class Wrapper:
    """BatchMLAPagedAttentionWrapper of 0.6.14, by its backends fa2 and fa3."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert backend in ("fa2", "fa3")
        assert float_workspace_buffer.dtype == torch.uint8
        self._int_workspace_buffer = torch.zeros(64, dtype=torch.uint8)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        given = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in given)
        if kv_data_type not in (torch.float16, torch.bfloat16):
            raise ValueError(f"MLA kv_data_type {kv_data_type} is not supported.")
        self.planned = [x.clone() for x in (qo_indptr, kv_indptr, kv_len_arr)]
        self.indices, self.causal, self.page_size = kv_indices, causal, page_size
        self.spec = replace(SPEC, num_heads=num_heads, scale=sm_scale, block_size=page_size)
        self.types = q_data_type, kv_data_type
        assert (head_dim_ckv, head_dim_kpe) == (SPEC.latent_size, SPEC.rope_size)
        self._plan_info = [1 if num_heads <= 64 else 2, 132]

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        kpe_scale: float | None = None,
    ) -> torch.Tensor:
        if (q_nope.dtype, ckv_cache.dtype) != self.types or (q_pe.dtype, kpe_cache.dtype) != self.types:
            raise ValueError("queries and cache have other dtypes than the plan")
        assert ckv_cache.shape[1:] == (self.page_size, SPEC.latent_size)
        assert kpe_cache.shape[1:] == (self.page_size, SPEC.rope_size)
        assert out is not None
        assert out.shape == q_nope.shape
        assert out.dtype == q_nope.dtype
        assert all(x.stride(2) == 1 for x in (q_nope, q_pe, out))
        queries, starts, lengths = self.planned
        for i, (a, b) in enumerate(pairwise(queries.tolist())):
            pages = self.indices[starts[i] : starts[i + 1]].long()
            latent, rope = (x[pages].flatten(0, 1)[: lengths[i]].float() for x in (ckv_cache, kpe_cache))
            scores = q_nope[a:b].float() @ latent.T + q_pe[a:b].float() @ rope.T
            position = torch.arange(int(lengths[i]))
            hidden = position > torch.arange(int(lengths[i]) - (b - a), int(lengths[i]))[:, None]
            assert self.causal
            scores = (scores * self.spec.scale).masked_fill(hidden[:, None], float("-inf"))
            out[a:b] = (scores.softmax(-1) @ latent).to(out.dtype)
        return out


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper)
    monkeypatch.setattr(flashinfer_latent, "module", {"flashinfer.mla": library}.__getitem__)
    monkeypatch.setattr(flashinfer_library.LatentKernel, "load", lambda kernel: None)
    monkeypatch.setattr(flashinfer_plan, "_pinned", lambda size: torch.empty(size, dtype=torch.int32))
    monkeypatch.setattr(flashinfer_latent, "alias", lambda memory: memory)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    h200 = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)


@pytest.mark.parametrize("name", ["__init__", "plan", "run"])
def test_the_stand_in_has_the_recorded_parameters(name: str) -> None:
    recorded = LATENT_SIGNATURES[f"mla/_core.py:BatchMLAPagedAttentionWrapper.{name}"]
    assert " ".join(inspect.signature(getattr(Wrapper, name)).parameters) in recorded


class InDeviceContext(FlashInferLatentAttention):
    """In a context of its own, over the resources of the one that it is given."""

    def __init__(self, ctx: BuildContext, spec: LatentSpec) -> None:
        super().__init__(cast(BuildContext, WithDevice(cast(Any, ctx).resources)), spec)


@pytest.mark.parametrize("changes", [{}, {"num_heads": 1}, {"dtype": "float16", "kv_dtype": "float16"}], ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_steps_through_the_wrapper(step: str, changes: dict[str, Any]) -> None:
    spec = replace(SPEC, **changes)
    out = run_latent_backend(InDeviceContext, spec, STEPS[step])
    expected = run_latent_backend(ReferenceLatentAttention, spec, STEPS[step])
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def step_of(lengths: Sequence[int], pages: int, width: int, generator: torch.Generator) -> Any:
    table = (torch.rand(len(lengths), pages - 1, generator=generator).argsort(-1) + 1).int()[:, :width].contiguous()
    return decode_batch(lengths, table)


def test_captured_steps_keep_their_place_of_pages() -> None:
    """Steps of two sizes take turns, the larger last; a graph holds on to the first metadata of its size."""
    ctx, generator, pages = WithDevice(), torch.Generator().manual_seed(0), 41
    backend = FlashInferLatentAttention(cast(BuildContext, ctx), SPEC)
    reference = ReferenceLatentAttention(cast(BuildContext, None), SPEC)
    ctx.resources.allocate(torch.device("cpu"))
    buffer = torch.zeros(pages * backend.layout.page_bytes(backend.cache_spec, 16), dtype=torch.uint8)
    cache = backend.layout.views(buffer, pages, backend.cache_spec, 16)
    for view in cache.values():
        view.copy_(torch.randn(view.shape, generator=generator))
    captured: dict[int, tuple[FlashInferLatentMetadata, torch.Tensor]] = {}
    for lengths in ((5,), (300,), (1, 90, 17), (17,), (6, 91, 18), (320,)):
        batch = step_of(lengths, pages, 20, generator)
        planned = backend.plan(batch)
        metadata, place = captured.setdefault(len(lengths), (planned, planned.wrapper.indices))
        assert planned.token == metadata.token
        assert planned.wrapper.indices.data_ptr() == place.data_ptr()
        q, rope = (torch.randn(len(lengths), 4, n, generator=generator).bfloat16() for n in (32, 16))
        out, expected = torch.empty_like(q), torch.empty_like(q)
        backend.forward(LatentCall(q, rope, q, rope, cache, planned, out))
        reference.forward(LatentCall(q, rope, q, rope, cache, reference.plan(batch), expected))
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_a_workspace_that_is_too_small() -> None:
    ctx = WithDevice(workspace_mib=1)
    backend = FlashInferLatentAttention(cast(BuildContext, ctx), SPEC)
    ctx.resources.allocate(torch.device("cpu"))
    with pytest.raises(CapacityError, match=r"--cuda\.flashinfer_workspace_mib to 2 or more"):
        backend.plan(step_of((3,), 5, 4, torch.Generator().manual_seed(0)))


def test_what_it_refuses() -> None:
    device = describe_arch("H100", (9, 0))
    workload = replace(SPEC, num_heads=256, kv_dtype="float16").workload()
    codes = [reason.code for reason in FlashInferLatentAttention.supports(replace(workload, latent_size=None), device)]
    assert codes == ["kv-dtype", "num-heads"]
