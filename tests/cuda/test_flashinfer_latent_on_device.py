"""FlashInfer's kernels of latent attention on a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from hardpoint.reference.latent_attention import ReferenceLatentAttention
from hardpoint_cuda.flashinfer_latent import FlashInferLatentAttention
from hardpoint_cuda.platform import CudaPlatform
from hardpoint_plugin_api import BuildContext, DeviceInfo, LatentCall, LatentSpec
from tests.support.attention import MIXED, Piece
from tests.support.flashinfer import WithDevice, decode_batch, needs_flashinfer
from tests.support.latent import run_latent_backend

pytestmark = [pytest.mark.accelerator, needs_flashinfer]

SPEC = LatentSpec(128, 512, 64, 0.1, "bfloat16", "bfloat16", 16)
STEPS: dict[str, tuple[Piece, ...]] = {
    "mixed": MIXED,
    "decodes": tuple(Piece(1, 1 + 97 * i) for i in range(40)),
    "prompts": (Piece(300, 300), Piece(4, 700), Piece(129, 1000)),
    "long": (Piece(1, 20000), Piece(40, 9000)),
}
PAGES, WIDTH = 400, 200


@pytest.fixture(scope="module")
def platform() -> CudaPlatform:
    info = CudaPlatform.detect()
    assert isinstance(info, DeviceInfo), info
    found = CudaPlatform(info)
    found.activate(0)
    if reasons := FlashInferLatentAttention.supports(SPEC.workload(), info):
        pytest.skip(str(reasons[0]))
    return found


def agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    """To a few roundings of the dtype, of a row's norm: partial results are rounded, too."""
    errors = (found.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    assert errors.max() < 6 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("step", STEPS)
def test_steps_match_the_reference(platform: CudaPlatform, heads: int, step: str) -> None:
    spec = replace(SPEC, num_heads=heads)

    class OnDevice(FlashInferLatentAttention):
        def __init__(self, ctx: BuildContext, spec: LatentSpec) -> None:
            given = WithDevice(cast(Any, ctx).resources, 256, device=platform.info)
            super().__init__(cast(BuildContext, given), spec)

    out = run_latent_backend(OnDevice, spec, STEPS[step], device="cuda")
    agree(out, run_latent_backend(ReferenceLatentAttention, spec, STEPS[step]))


@pytest.mark.parametrize("n", [1, 5, 64])
def test_a_captured_decode_is_replayed_as_contexts_grow(platform: CudaPlatform, n: int) -> None:
    ctx, device = WithDevice(workspace_mib=256, device=platform.info), torch.device("cuda", 0)
    backend = FlashInferLatentAttention(cast(BuildContext, ctx), SPEC)
    reference = ReferenceLatentAttention(cast(BuildContext, None), SPEC)
    ctx.resources.allocate(device)
    buffer = torch.zeros(PAGES * backend.layout.page_bytes(backend.cache_spec, 16), dtype=torch.uint8, device=device)
    cache = backend.layout.views(buffer, PAGES, backend.cache_spec, 16)
    for view in cache.values():
        view.normal_()
        view[0] = float("nan")
    q, rope = (torch.randn(n, 128, size, device=device).bfloat16() for size in (512, 64))
    out, expected = torch.empty_like(q), torch.empty_like(q)
    fixed = [
        torch.zeros(n, dtype=torch.int32, device=device),
        torch.zeros(n, WIDTH, dtype=torch.int32, device=device),
    ]

    def batch_of(lengths: list[int]) -> Any:
        table = (torch.rand(n, PAGES - 1).argsort(-1)[:, :WIDTH] + 1).int()
        for row, length in zip(table, lengths, strict=True):
            row[-(-length // 16) :] = 0
        fixed[0].copy_(torch.tensor(lengths))
        fixed[1].copy_(table)
        batch = decode_batch(lengths, fixed[1])
        return replace(batch, query_start=batch.query_start.to(device), seq_lens=fixed[0])

    with torch.inference_mode():
        metadata = backend.plan(batch_of([1] * n))

        def forward(**_: Any) -> torch.Tensor:
            backend.forward(LatentCall(q, rope, q, rope, cache, metadata, out))
            return out

        graph = platform.graph_engine().prepare("decode", forward, {"q": q})
        for longest in (1, 2, 16, 17, 300, 301, 3000, 5):
            q.normal_()
            batch = batch_of([1 + (longest - 1) * (i + 1) // n for i in range(n)])
            assert backend.plan(batch).token == metadata.token
            reference.forward(LatentCall(q, rope, q, rope, cache, reference.plan(batch), expected))
            agree(graph.run(), expected)
