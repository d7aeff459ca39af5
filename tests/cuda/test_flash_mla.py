"""FlashMLA's latent attention through a stand-in, on tensors of the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from hardpoint import SamplingParams
from hardpoint.conformance.families.attention import ERRORS
from hardpoint.ops.error_model import compare
from hardpoint.reference.latent_attention import ReferenceLatentAttention
from hardpoint_cuda.flash_mla import FlashMlaAttention
from hardpoint_cuda.flash_mla_cache import token_bytes
from hardpoint_cuda.flash_mla_library import FLASH_MLA, split_into_powers
from hardpoint_cuda.flash_mla_sparse import FlashMlaSparse, FlashMlaSparse8Bit
from hardpoint_cuda.platform import CudaPlatform, describe_arch
from hardpoint_plugin_api import (
    AttentionBatch,
    BuildContext,
    DeviceInfo,
    EagerGraphEngine,
    LatentBackend,
    LatentCall,
    LatentSpec,
    LatentStoreCall,
)
from tests.support import flash_mla_stand_in as stand_in
from tests.support.allocations import LargestTensor
from tests.support.attention import MIXED, Piece, PluginConfigOnly
from tests.support.checkpoints import DEEPSEEK_V2, DEEPSEEK_V32, random_prompts, write_checkpoint
from tests.support.conformed import faults
from tests.support.engines import small_llm
from tests.support.flash_mla_reference import ReferenceOver8Bits
from tests.support.flash_mla_stand_in import ARCH, CALLS
from tests.support.installed_stand_in import installed
from tests.support.latent import run_latent_backend
from tests.support.on_host import HostModule
from tests.support.on_host_settings import without_triton

DENSE = LatentSpec(20, 512, 64, 192**-0.5, "bfloat16", "bfloat16", 64)
SPARSE = replace(DENSE, top_k=24)
SIZES: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 128, "num_hidden_layers": 2}
DEEPSEEKS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("deepseek_v2", DEEPSEEK_V2 | SIZES | {"head_dim": 64}),
    "sparse": ("deepseek_v32", DEEPSEEK_V32 | SIZES | {"head_dim": 64, "index_head_dim": 128}),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(autouse=True)
def flash_mla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    CALLS.clear()
    ARCH[0] = "sm_90"
    with installed(tmp_path / "site", monkeypatch, "flash_mla", "1.0.0", {"flash_mla": "flash_mla_stand_in"}):
        yield


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    described = describe_arch("NVIDIA H100 80GB HBM3", (9, 0))
    info: DeviceInfo = replace(
        described, torch_type="cpu", memory_bytes=2**30, features=described.features - {"pinned_memory"}
    )
    monkeypatch.setattr(CudaPlatform, "detect", classmethod(lambda cls: info))

    def activate(self: CudaPlatform, index: int) -> torch.device:
        self._memory = self.new_memory(HostModule(), 0)
        return torch.device("cpu")

    monkeypatch.setattr(CudaPlatform, "activate", activate)
    monkeypatch.setattr(CudaPlatform, "graph_engine", lambda self: EagerGraphEngine())


def check(
    kind: type[LatentBackend], reference: type[ReferenceLatentAttention], spec: LatentSpec, pieces: tuple[Piece, ...]
) -> None:
    """By the kit's error model: ``kind`` errs as ``reference`` does in the step's dtype, truth being its float64."""
    truth = []

    class Noted(reference):  # type: ignore[misc, valid-type]  # a class that is given
        def forward(self, call: LatentCall) -> None:
            wide = replace(call, q_latent=call.q_latent.double(), q_rope=call.q_rope.double(), out=call.out.double())
            super().forward(wide)
            super().forward(call)
            truth.append(wide.out)

    found, own = (run_latent_backend(one, spec, pieces) for one in (kind, Noted))
    (true,) = truth
    assert not compare("out", found, own, true, ERRORS, torch.device("cpu")).faults


@pytest.mark.parametrize(
    "pieces", [MIXED, MIXED[:4], (Piece(13, 200), Piece(70, 70))], ids=["mixed", "decodes", "long"]
)
@pytest.mark.parametrize("heads", [3, 20, 64])
@pytest.mark.parametrize("kind", [FlashMlaAttention, FlashMlaSparse])
def test_steps(kind: type[LatentBackend], heads: int, pieces: tuple[Piece, ...]) -> None:
    spec = replace(SPARSE if kind is FlashMlaSparse else DENSE, num_heads=heads)
    assert not kind.supports(spec.workload(), describe_arch("H100", (9, 0)))
    check(kind, ReferenceLatentAttention, spec, pieces)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("top_k", [3, 24, 200])
def test_steps_over_8_bits(arch: str, top_k: int) -> None:
    """Judged by the reference over the same cache; lists are shorter and longer than contexts."""
    ARCH[0] = arch
    spec = replace(SPARSE, kv_dtype="float8_e4m3fn", top_k=top_k)
    pieces = (*MIXED, Piece(2, 190), Piece(40, 150))
    check(FlashMlaSparse8Bit, ReferenceOver8Bits, spec, pieces)
    assert CALLS["sparse_decode_fwd"]
    assert CALLS["sparse_prefill_fwd"]


def test_a_context_is_widened_some_pages_at_a_time() -> None:
    """Its numbers, however long it is; and no tensor is larger than 4,096 tokens in float32."""
    spec = replace(SPARSE, kv_dtype="float8_e4m3fn")
    ctx = PluginConfigOnly({})
    backend = FlashMlaSparse8Bit(cast(BuildContext, ctx), spec)
    ctx.resources.allocate(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for length in (40, 4096, 9000):
        count = -(-length // spec.block_size)
        buffer = torch.zeros((count + 1) * backend.layout.page_bytes(backend.cache_spec, 64), dtype=torch.uint8)
        cache = backend.layout.views(buffer, count + 1, backend.cache_spec, 64)
        latent, rope = torch.randn(count * 64, 576, generator=generator).bfloat16().split([512, 64], dim=-1)
        table = (torch.randperm(count, generator=generator) + 1).int()[None]
        tokens = torch.arange(count * 64)
        slots = table[0, tokens // 64] * 64 + tokens % 64
        backend.store(LatentStoreCall(latent, rope, cache, slots))
        batch = AttentionBatch(
            query_start=torch.tensor([0, length], dtype=torch.int32),
            seq_lens=torch.tensor([length], dtype=torch.int32),
            block_table=table,
            slot_mapping=slots[:length],
            query_start_host=(0, length),
            seq_lens_host=(length,),
            num_decodes=0,
        )
        planned, none = backend.plan(batch), torch.empty(0)
        call = LatentCall(none, none, none, none, cache, planned, none)
        with LargestTensor() as largest:
            found = backend._widened(call, planned, 0, length)
        expected = stand_in._widened(cache["rows"][table[0].long()].flatten(0, 1)[:length])
        assert torch.equal(found, expected)
        assert largest.nbytes <= 4096 * 512 * 4


def test_bytes_of_a_token() -> None:
    """Scales are the least powers of two that fit, for rows of very unlike magnitudes."""
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.tensor([0.0, 1e-30, 2.0**-7 * 448, 449.0, 3e4])
    latent = torch.randn(5, 512, generator=generator) * magnitudes[:, None]
    latent[2:4, :128] = torch.tensor([2.0**-7 * 448, 449.0])[:, None]
    rope = torch.randn(5, 64, generator=generator).bfloat16()
    found = token_bytes(latent, rope)
    assert found.shape == (5, stand_in.TOKEN_BYTES)
    scales = found[:, 512:528].contiguous().view(torch.float32)
    assert scales[2:4, 0].tolist() == [2.0**-7, 2.0]
    assert torch.equal(found[:, 528:].contiguous().view(torch.bfloat16), rope)
    read = stand_in._widened(found)
    bound = latent.abs().unflatten(1, (4, 128)).amax(-1) / 14 + 1e-37  # half of the coarsest step
    assert ((read[:, :512].float() - latent).abs().unflatten(1, (4, 128)).amax(-1) <= bound).all()


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["part", "whole"])
@pytest.mark.parametrize("name", ["flash_mla", "flash_mla_sparse", "flash_mla_sparse_8bit"])
def test_the_kit_finds_nothing(h100: None, name: str, whole: bool) -> None:
    every = 61 if name.endswith("8bit") else 31
    assert not list(faults("cuda", name, 1 if whole else every))


def tokens_of(folder: Path, chosen: str, **more: Any) -> list[list[int]]:
    """Greedy tokens of prompts that are read in several steps, with two latent attentions of the same name."""
    settings = without_triton("cuda", dtype="bfloat16", block_size=64, max_num_batched_tokens=24, max_model_len=256)
    with small_llm(folder, **settings, use={"attention.latent": chosen}, **more) as llm:
        assert {row.chosen for row in llm.table.rows if row.of == "latent"} == {chosen}
        prompts = [{"prompt_token_ids": ids} for ids in random_prompts(4, 90, shortest=20)]
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize(("name", "model"), [("flash_mla", "dense"), ("flash_mla_sparse", "sparse")])
def test_an_engine(h100: None, tmp_path: Path, name: str, model: str) -> None:
    family, changes = DEEPSEEKS[model]
    write_checkpoint(tmp_path, family, **changes)
    found = tokens_of(tmp_path, name)
    assert CALLS["dense_decode_fwd" if model == "dense" else "sparse_prefill_fwd"]
    assert found == tokens_of(tmp_path, "reference")


def test_an_engine_with_latents_of_8_bits(h100: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, changes = DEEPSEEKS["sparse"]
    write_checkpoint(tmp_path, family, **changes)
    found = tokens_of(tmp_path, "flash_mla_sparse_8bit", kv_cache_dtype="fp8_e4m3")
    assert CALLS.keys() >= {"sparse_decode_fwd", "sparse_prefill_fwd"}
    monkeypatch.setattr(FlashMlaSparse8Bit, "forward", ReferenceLatentAttention.forward)
    assert found == tokens_of(tmp_path, "flash_mla_sparse_8bit", kv_cache_dtype="fp8_e4m3")


def test_a_schedule_is_computed_once_for_all_layers(h100: None, tmp_path: Path) -> None:
    """One launch for each step of decodes, two layers."""
    family, changes = DEEPSEEKS["dense"]
    write_checkpoint(tmp_path, family, **changes)
    settings = without_triton("cuda", dtype="bfloat16", block_size=64)
    with small_llm(tmp_path, **settings, use={"attention.latent": "flash_mla"}) as llm:
        llm.generate([{"prompt_token_ids": [7]}], GREEDY)
    assert CALLS["dense_decode_fwd"] == 2 * CALLS["schedules"] > 0


def test_a_layer_that_comes_again_has_a_new_schedule() -> None:
    """As in the run before a capture, whose results the recorded run must not rely on."""
    from hardpoint_cuda.flash_mla_library import Schedules

    schedules, layers = Schedules(), (object(), object())
    first = []
    for layer in layers:
        schedules.begin(layer)
        first.append(schedules.of(0))
    assert first[0] is first[1]
    schedules.begin(layers[0])
    assert schedules.of(0) is not first[0]
    assert schedules.of(1) is not schedules.of(0)


def test_pieces_of_prompts() -> None:
    found = split_into_powers([5, 0, 1, 8], 4)
    assert found == {4: [(0, 0), (3, 0), (3, 4)], 1: [(0, 4), (2, 0)]}


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = describe_arch("H100", (9, 0))
    assert not FLASH_MLA.reasons()
    workload = replace(DENSE, num_heads=129, kv_dtype="float16").workload()
    assert [r.code for r in FlashMlaSparse.supports(workload, device)] == ["num-heads", "index-lists"]
    assert [r.code for r in FlashMlaAttention.supports(workload, device)] == ["kv-dtype"]
    import flash_mla as library  # type: ignore[import-not-found]  # the stand-in, for as long as this test

    monkeypatch.setattr(library, "get_mla_metadata", lambda cache_seqlens, num_heads_per_head_k, num_heads_k: None)
    monkeypatch.delattr(library, "flash_mla_sparse_fwd")
    found = [(reason.code, reason.supported) for reason in FLASH_MLA.reasons()]
    before = "cache_seqlens, num_heads_per_head_k, num_heads_k"
    assert found == [("flash-mla-signature", before), ("flash-mla-function", None)]


def test_the_stand_in_refuses_what_the_real_one_does() -> None:
    """So that a test above could have failed."""
    dense: dict[str, Any] = {
        "q": torch.ones(2, 1, 20, 576, dtype=torch.bfloat16),
        "k_cache": torch.ones(3, 64, 1, 576, dtype=torch.bfloat16),
        "block_table": torch.zeros(2, 1, dtype=torch.int32),
        "cache_seqlens": torch.tensor([3, 64], dtype=torch.int32),
        "head_dim_v": 512,
        "softmax_scale": 0.1,
    }
    sparse = dense | {
        "q": torch.ones(2, 1, 64, 576, dtype=torch.bfloat16),
        "k_cache": torch.zeros(3, 64, 1, 656, dtype=torch.uint8),
        "block_table": None,
        "cache_seqlens": None,
        "indices": torch.full((2, 1, 64), -1, dtype=torch.int32),
        "is_fp8_kvcache": True,
    }

    def run(**call: Any) -> None:
        stand_in.flash_mla_with_kvcache(**{"tile_scheduler_metadata": stand_in.get_mla_metadata()[0], **call})

    run(**dense)
    run(**sparse)
    for good, change in (
        (dense, {"q": dense["q"].float()}),
        (dense, {"q": dense["q"].mT.contiguous().mT}),
        (dense, {"k_cache": dense["k_cache"].view(12, 16, 1, 576)}),
        (dense, {"cache_seqlens": dense["cache_seqlens"].long()}),
        (dense, {"block_table": torch.zeros(1, 2, dtype=torch.int32).T}),
        (sparse, {"q": dense["q"]}),
        (sparse, {"indices": sparse["indices"][..., :24]}),
        (sparse, {"indices": sparse["indices"].long()}),
        (sparse, {"k_cache": torch.zeros(3, 64, 1, 672, dtype=torch.uint8)[..., :656]}),
    ):
        with pytest.raises(RuntimeError):
            run(**(good | change))
    kept = stand_in.get_mla_metadata()[0]
    run(**dense, tile_scheduler_metadata=kept)
    for change in ({"cache_seqlens": torch.tensor([3, 63], dtype=torch.int32)}, {"is_fp8_kvcache": True}):
        with pytest.raises(AssertionError):
            run(**(dense | change), tile_scheduler_metadata=kept)
    with pytest.raises(TypeError):
        run(**dense, window=3)
    q, kv = sparse["q"][:, 0], torch.ones(9, 1, 576, dtype=torch.bfloat16)
    lists = torch.zeros(2, 1, 128, dtype=torch.int32)
    stand_in.flash_mla_sparse_fwd(q, kv, lists, 0.1)
    for call in ((q, kv.half(), lists), (q, kv, lists[..., :64]), (q[:, :20], kv, lists), (q, kv, lists[:1])):
        with pytest.raises(RuntimeError):
            stand_in.flash_mla_sparse_fwd(*call, 0.1)
