"""The device's own kernels, and core's references on tensors that the host cannot touch."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch

from hardpoint.ops import get, names
from hardpoint.ops.base import functional_from_out
from hardpoint.ops.judge import judge
from hardpoint.ops.rms_norm import rms_norm
from hardpoint.reference.attention import ReferenceAttention
from hardpoint_plugin_api import AttentionBackend, AttentionSpec, BuildContext, LinearCall, LinearWorkload
from hardpoint_sim.attention import SimAttention
from hardpoint_sim.linear import SimLinear
from hardpoint_sim.norm import rms_norm_out
from tests.support.attention import MIXED, Piece, brute_force, run_backend

SIM = torch.device("sim", 0)
NO_CONTEXT = cast(BuildContext, None)  # these kernels ask nothing of theirs
SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=16, scale=0.3, dtype="float32", kv_dtype="float32", block_size=16
)
VARIATIONS = {
    "plain": SPEC,
    "mqa": replace(SPEC, num_heads=7, num_kv_heads=1),
    "window": replace(SPEC, window=11),
    "chunk": replace(SPEC, chunk=14),
    "soft-cap": replace(SPEC, soft_cap=1.5, window=20),
    "head-80": replace(SPEC, head_size=80, block_size=32),
}


@pytest.mark.parametrize("name", names())
def test_references_run_where_the_host_cannot_reach(name: str) -> None:
    """Every op's reference passes its own cases on the device, with nothing left on the host."""
    op = get(name)
    for case in op.cases(torch.Generator().manual_seed(0), torch.float32, SIM):
        verdict = judge(op, op.reference, case, dtype=torch.float32)
        assert verdict.passed, f"{case.name}: {verdict}"


@pytest.mark.parametrize("pieces", [MIXED, (Piece(1, 40),), (Piece(8, 33),)], ids=["mixed", "decode", "chunk"])
@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("backend", [SimAttention, ReferenceAttention])
def test_attention_is_the_definitions(
    backend: type[AttentionBackend], variation: str, pieces: tuple[Piece, ...]
) -> None:
    spec = VARIATIONS[variation]
    out, requests = run_backend(backend, spec, pieces, device=SIM)
    assert (out - brute_force(spec, requests)).abs().max() < 1e-5


def test_the_layout_round_trips() -> None:
    spec, layout = SPEC.cache_spec, SimAttention.layout
    size = layout.page_bytes(spec, 16)
    assert size % layout.alignment == 0
    views = layout.views(torch.zeros(4 * size, dtype=torch.uint8, device=SIM), 4, spec, 16)
    k, v, pages = (x.to(SIM) for x in (torch.randn(2, 16, 2, 16), torch.randn(2, 16, 2, 16), torch.tensor([3, 1])))
    layout.from_logical(views, pages, {"k": k, "v": v})
    got = layout.to_logical(views, pages)
    assert torch.equal(got["k"], k)
    assert torch.equal(got["v"], v)


@pytest.mark.parametrize("out_features", [16, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_matmul(dtype: str, out_features: int) -> None:
    kernel = SimLinear(NO_CONTEXT, LinearWorkload(dtype=dtype, in_features=32, out_features=out_features))
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(getattr(torch, dtype))
        for shape in ((5, 32), (out_features, 32), (out_features,))
    )
    packed = kernel.prepack({"weight": weight.to(SIM)})
    assert torch.equal(kernel.unpack(packed).cpu(), weight)
    ids = torch.tensor([3, out_features - 1, 0])
    assert torch.equal(kernel.rows(packed, ids.to(SIM)).cpu(), weight[ids])
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    error = (kernel.apply(LinearCall(x.to(SIM), packed, bias.to(SIM))).cpu() - expected).abs().max()
    assert error < 8 * torch.finfo(x.dtype).eps * float(expected.abs().max())
    assert kernel.apply(LinearCall(x[:0].to(SIM), packed, None)).shape == (0, out_features)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm(dtype: torch.dtype) -> None:
    assert rms_norm.allocate is not None
    implementation = functional_from_out(rms_norm_out, rms_norm.allocate, rms_norm.reference)
    for case in rms_norm.cases(torch.Generator().manual_seed(0), dtype, SIM):
        verdict = judge(rms_norm, implementation, case, dtype=dtype)
        assert verdict.passed, f"{case.name}: {verdict}"
