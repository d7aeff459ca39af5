"""Latent attention of FlashInfer, FlashMLA and the plugin's own kernel for Hopper, on a device."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from hardpoint import SamplingParams
from hardpoint.reference.latent_attention import ReferenceLatentAttention
from hardpoint_cuda.flash_mla import FlashMlaAttention
from hardpoint_cuda.flash_mla_sparse import FlashMlaSparse, FlashMlaSparse8Bit
from hardpoint_cuda.flashinfer_latent import FlashInferLatentAttention
from hardpoint_cuda.hopper_latent import HopperLatentAttention
from hardpoint_cuda.platform import CudaPlatform
from hardpoint_plugin_api import BuildContext, DeviceInfo, LatentBackend, LatentCall, LatentSpec
from tests.support.attention import MIXED, Piece
from tests.support.checkpoints import DEEPSEEK_V2, DEEPSEEK_V32, random_prompts, write_checkpoint
from tests.support.engines import small_llm
from tests.support.flash_mla_reference import ReferenceOver8Bits
from tests.support.flashinfer import WithDevice, decode_batch, needs_flashinfer
from tests.support.latent import run_latent_backend

needs_flash_mla = pytest.mark.skipif(
    importlib.util.find_spec("flash_mla") is None, reason="FlashMLA is not installed: scripts/flash_mla_wheel.py"
)
pytestmark = pytest.mark.accelerator

SPEC = LatentSpec(128, 512, 64, 0.1, "bfloat16", "bfloat16", 64)
DENSE = [
    pytest.param(FlashInferLatentAttention, marks=needs_flashinfer, id="flashinfer"),
    pytest.param(FlashMlaAttention, marks=needs_flash_mla, id="flash_mla"),
    pytest.param(HopperLatentAttention, id="hopper"),
]
STEPS: dict[str, tuple[Piece, ...]] = {
    "mixed": MIXED,
    "decodes": tuple(Piece(1, 1 + 97 * i) for i in range(40)),
    "prompts": (Piece(300, 300), Piece(4, 700), Piece(129, 1000)),
    "long": (Piece(1, 20000), Piece(40, 9000)),
}
PAGES, WIDTH = 120, 60


@pytest.fixture(scope="module")
def platform() -> CudaPlatform:
    info = CudaPlatform.detect()
    assert isinstance(info, DeviceInfo), info
    found = CudaPlatform(info)
    found.activate(0)
    return found


def on_device(platform: CudaPlatform, kind: type[LatentBackend], spec: LatentSpec) -> type[LatentBackend]:
    """``kind`` in a context of its own, over the resources of the one that it is given. Skips where it is refused."""
    if reasons := kind.supports(spec.workload(), platform.info):
        pytest.skip(str(reasons[0]))
    if kind is HopperLatentAttention and platform.info.arch != "sm_90":
        pytest.skip("a kernel for sm_90")

    class OnDevice(kind):  # type: ignore[misc, valid-type]  # a class that is given
        def __init__(self, ctx: Any, spec: LatentSpec) -> None:
            super().__init__(cast(BuildContext, WithDevice(ctx.resources, 256, device=platform.info)), spec)

    return OnDevice


def agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    """To a few roundings of the dtype, of a row's norm: partial results are rounded, too."""
    errors = (found.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    assert errors.max() < 6 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", DENSE)
def test_steps_match_the_reference(platform: CudaPlatform, kind: type[LatentBackend], step: str, heads: int) -> None:
    spec = replace(SPEC, num_heads=heads)
    out = run_latent_backend(on_device(platform, kind, spec), spec, STEPS[step], device="cuda")
    agree(out, run_latent_backend(ReferenceLatentAttention, spec, STEPS[step]))


@pytest.mark.parametrize(
    ("heads", "block_size", "dtype"),
    [(64, 16, "float16"), (128, 32, "bfloat16"), (192, 128, "bfloat16"), (64, 64, "float16")],
)
@pytest.mark.parametrize("step", ["mixed", "edges", "splits"])
def test_pages_and_heads_of_the_kernel_for_hopper(
    platform: CudaPlatform, step: str, heads: int, block_size: int, dtype: str
) -> None:
    """Contexts that end in, behind and before a block of 64; whole ones beside ones that are split."""
    steps = STEPS | {
        "edges": tuple(Piece(1, length) for length in (1, 2, 63, 64, 65, 127, 128, 129, 1000, 4095)),
        "splits": (Piece(1, 9000), Piece(1, 31), Piece(1, 4096)),
    }
    spec = replace(SPEC, num_heads=heads, block_size=block_size, dtype=dtype, kv_dtype=dtype)
    out = run_latent_backend(on_device(platform, HopperLatentAttention, spec), spec, steps[step], device="cuda")
    agree(out, run_latent_backend(ReferenceLatentAttention, spec, steps[step]))


@needs_flash_mla
@pytest.mark.parametrize("heads", [20, 128])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("top_k", [24, 2048])
@pytest.mark.parametrize("kind", [FlashMlaSparse, FlashMlaSparse8Bit])
def test_sparse_steps_match_the_reference(
    platform: CudaPlatform, kind: type[LatentBackend], top_k: int, step: str, heads: int
) -> None:
    """Lists shorter and longer than contexts, over both caches."""
    spec, judge = replace(SPEC, num_heads=heads, top_k=top_k), ReferenceLatentAttention
    if kind is FlashMlaSparse8Bit:
        spec, judge = replace(spec, kv_dtype="float8_e4m3fn"), ReferenceOver8Bits
    out = run_latent_backend(on_device(platform, kind, spec), spec, STEPS[step], device="cuda")
    agree(out, run_latent_backend(judge, spec, STEPS[step]))


@pytest.mark.parametrize("n", [1, 5, 64])
@pytest.mark.parametrize("kind", DENSE)
def test_a_captured_decode_is_replayed_as_contexts_grow(
    platform: CudaPlatform, kind: type[LatentBackend], n: int
) -> None:
    ctx, device = WithDevice(workspace_mib=256, device=platform.info), torch.device("cuda", 0)
    backend = on_device(platform, kind, SPEC)(cast(BuildContext, ctx), SPEC)
    reference = ReferenceLatentAttention(cast(BuildContext, None), SPEC)
    ctx.resources.allocate(device)
    buffer = torch.zeros(PAGES * backend.layout.page_bytes(backend.cache_spec, 64), dtype=torch.uint8, device=device)
    cache = backend.layout.views(buffer, PAGES, backend.cache_spec, 64)
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
            row[-(-length // 64) :] = 0
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


SIZES: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "hidden_size": 128,
    "num_hidden_layers": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "flash_mla": ("deepseek_v2", DEEPSEEK_V2 | SIZES),
    "flash_mla_sparse": ("deepseek_v32", DEEPSEEK_V32 | SIZES | {"index_head_dim": 128}),
    "flash_mla_sparse_8bit": ("deepseek_v32", DEEPSEEK_V32 | SIZES | {"index_head_dim": 128}),
}


@needs_flash_mla
@pytest.mark.parametrize("name", MODELS)
def test_an_engine_with_captured_steps_gives_the_tokens_of_one_without(name: str, tmp_path: Path) -> None:
    """Prompts are read in chunks beside decodes; the first tokens of 16-bit caches are also the reference's."""
    family, changes = MODELS[name]
    write_checkpoint(tmp_path, family, **changes)

    def tokens(chosen: str, **more: Any) -> list[list[int]]:
        settings: dict[str, Any] = {
            "platform": "cuda",
            "plugins": ("cuda",),
            "plugin_config": {},
            "dtype": "bfloat16",
            "block_size": 64,
            "max_num_batched_tokens": 64,
            "max_model_len": 512,
            "kv_cache_memory": "64MiB",
        }
        if name.endswith("8bit"):
            settings["kv_cache_dtype"] = "fp8_e4m3"
        with small_llm(tmp_path, **(settings | more), use={"attention.latent": chosen}) as llm:
            assert {row.chosen for row in llm.table.rows if row.of == "latent"} == {chosen}
            prompts = [{"prompt_token_ids": ids} for ids in random_prompts(6, 200, shortest=20)]
            sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, sampling)]

    captured = tokens(name)
    assert captured == tokens(name, enforce_eager=True)
    if not name.endswith("8bit"):
        expected = tokens("reference", enforce_eager=True)
        assert sum(a[0] == b[0] for a, b in zip(captured, expected, strict=True)) >= 5
