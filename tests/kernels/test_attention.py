"""Paged attention in Triton, interpreted: against the reference, on batches that meet every branch of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest
import torch

from hardpoint.attention.phases import sub_batch
from hardpoint.conformance.families.attention import AttentionTrials
from hardpoint.conformance.memory import Placement, place
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint.kernels.attention import TritonAttention, TritonNvfp4CacheAttention, TritonQuantizedCacheAttention
from hardpoint.kernels.attention_tuning import (
    DECODE,
    PREFILL,
    WIDE_DECODE,
    WIDE_PREFILL,
    DecodeTuning,
    PrefillTuning,
    Tables,
    Tiles,
)
from hardpoint.kernels.tables import Rule, Table
from hardpoint.plugin_host import discover
from hardpoint.reference.attention import ReferenceAttention
from hardpoint.reference.nvfp4_cache_attention import Nvfp4CacheAttention
from hardpoint.reference.quantized_cache_attention import QuantizedCacheAttention
from hardpoint_plugin_api import (
    NVFP4,
    AttentionBackend,
    AttentionBatch,
    AttentionCall,
    AttentionSpec,
    BuildContext,
    CaptureGrade,
    StoreCall,
)
from tests.conformance.trying import subject
from tests.kernels.compiling import SHARED_KIB, TARGETS, Job, compile_in_stages_that_fit, compile_kernels
from tests.kernels.test_launch import Variants
from tests.support.alternating import alternating
from tests.support.attention import MIXED, Piece, PluginConfigOnly, run_backend

Tensor = torch.Tensor
Cache = dict[str, Tensor]

PLAIN = AttentionSpec(4, 2, 64, 0.125, "bfloat16", "bfloat16", 16)
SPECS = {
    "plain": PLAIN,
    "float16": replace(PLAIN, dtype="float16", kv_dtype="float16", head_size=80),
    "other cache": replace(PLAIN, kv_dtype="float32", block_size=5),
    "odd head, window": replace(PLAIN, dtype="float32", kv_dtype="float32", head_size=33, window=7),
    "chunk, one page each": replace(PLAIN, num_heads=8, num_kv_heads=1, block_size=1, chunk=7),
    "cap": replace(PLAIN, soft_cap=2.0, head_size=128),
    "sinks, slopes": replace(PLAIN, sinks=True, alibi=True, num_heads=10),
    "int8": replace(PLAIN, kv_dtype="int8"),
    "float8": replace(PLAIN, kv_dtype="float8_e4m3fn", window=40),
    "float8_e5m2": replace(PLAIN, dtype="float32", kv_dtype="float8_e5m2", head_size=33),
    "nvfp4": replace(PLAIN, kv_dtype=NVFP4, head_size=48, window=40),
    "nvfp4, float32": replace(PLAIN, dtype="float32", kv_dtype=NVFP4, head_size=32, block_size=5, num_heads=6),
    "nvfp4, float16": replace(PLAIN, dtype="float16", kv_dtype=NVFP4, head_size=128, num_kv_heads=1),
}
SPLIT = (Piece(1, 300), Piece(1, 70), Piece(20, 90))
"""Decodes of which one is long enough for several splits, beside a chunk of a prompt."""
SCALED = ("int8", "float8_e4m3fn", "float8_e5m2")
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}
"""Of a row's norm: a few roundings of a dtype's size."""
FEW = Tables.fixed(
    DecodeTuning(16, 48, Tiles(rows=2, key_bytes=4096, num_warps=4, num_stages=3)),
    PrefillTuning(16, PREFILL.tiles),
    DecodeTuning(16, 48, Tiles(rows=2, key_bytes=8192, num_warps=4, num_stages=3)),
    PrefillTuning(16, WIDE_PREFILL.tiles),
)
"""The interpreter takes one program after the other."""
SIGNATURE = {
    **dict.fromkeys(("q_token_stride", "q_head_stride", "out_token_stride", "out_head_stride"), "i32:16"),
    **dict.fromkeys(("page_stride", "scale_page_stride"), "i32:16"),
    **dict.fromkeys(("block_table", "seq_lens", "query_start", "counters"), "*i32"),
    **dict.fromkeys(("block_table_stride", "first_request", "num_requests", "num_tiles"), "i32"),
    **dict.fromkeys(("k_scales", "v_scales", "sinks", "slopes", "partial"), "*fp32"),
    **dict.fromkeys(("score_factor", "cap_factor"), "fp32"),
}
TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int8": "i8",
    "float8_e4m3fn": "fp8e4nv",
    NVFP4: "u8",
}
LARGE = AttentionSpec(32, 8, 128, 0.1, "bfloat16", "bfloat16", 16)
COMPILED = {
    "plain": LARGE,
    "head size 64, window": replace(LARGE, head_size=64, window=1024),
    "head size 96": replace(LARGE, head_size=96),
    "head size 256": replace(LARGE, head_size=256),
    "float32": replace(LARGE, dtype="float32", kv_dtype="float32"),
    "float8": replace(LARGE, kv_dtype="float8_e4m3fn"),
    "int8": replace(LARGE, kv_dtype="int8"),
    "nvfp4": replace(LARGE, kv_dtype=NVFP4),
    "nvfp4, scales of the checkpoint": replace(LARGE, kv_dtype=NVFP4, head_size=80, static_cache_scales=True),
    "all features": replace(LARGE, chunk=8192, soft_cap=30.0, sinks=True, alibi=True),
}
TWO_STAGES = Tables.fixed(
    replace(DECODE, tiles=replace(DECODE.tiles, num_stages=2)),
    replace(PREFILL, tiles=tuple(replace(tiles, num_stages=2) for tiles in PREFILL.tiles[:2])),
    replace(WIDE_DECODE, tiles=replace(WIDE_DECODE.tiles, num_stages=2)),
    replace(WIDE_PREFILL, tiles=tuple(replace(tiles, num_stages=2) for tiles in WIDE_PREFILL.tiles)),
)


class Attention(TritonAttention):
    tables = FEW


class QuantizedCache(TritonQuantizedCacheAttention):
    tables = FEW


class Nvfp4Cache(TritonNvfp4CacheAttention):
    tables = FEW


def on_device(spec: AttentionSpec) -> type[TritonAttention]:
    """The backend as plugins offer it."""
    if spec.kv_dtype == NVFP4:
        return TritonNvfp4CacheAttention
    return TritonQuantizedCacheAttention if spec.kv_dtype in SCALED else TritonAttention


def kinds(spec: AttentionSpec) -> tuple[type[AttentionBackend], type[AttentionBackend]]:
    if spec.kv_dtype == NVFP4:
        return Nvfp4Cache, Nvfp4CacheAttention
    if spec.kv_dtype in SCALED:
        return QuantizedCache, QuantizedCacheAttention
    return Attention, ReferenceAttention


def errors(
    spec: AttentionSpec, kind: type[AttentionBackend], pieces: tuple[Piece, ...], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Each head's error beside its norm."""
    sinks = torch.randn(spec.num_heads, generator=torch.Generator().manual_seed(1)) if spec.sinks else None
    slopes = torch.linspace(0.01, 0.3, spec.num_heads) if spec.alibi else None
    here = [None if x is None else x.to(device) for x in (sinks, slopes)]
    ours, _ = run_backend(kind, spec, pieces, sinks=here[0], alibi_slopes=here[1], device=device)
    reference, _ = run_backend(kinds(spec)[1], spec, pieces, sinks=sinks, alibi_slopes=slopes)
    found: torch.Tensor = (ours.double() - reference.double()).norm(dim=-1) / reference.double().norm(dim=-1)
    return found


@pytest.mark.parametrize(("pieces", "name"), alternating({"mixed": MIXED, "split": SPLIT}, {n: n for n in SPECS}))
def test_computes_what_the_reference_does(name: str, pieces: tuple[Piece, ...]) -> None:
    spec = SPECS[name]
    assert errors(spec, kinds(spec)[0], pieces).max() < TOLERANCE[spec.dtype]


@pytest.mark.parametrize("pieces", [(*SPLIT[:2], *MIXED), SPLIT[:1]], ids=["many", "one"])
def test_requests_are_found_among_many_or_alone(pieces: tuple[Piece, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if len(pieces) > 1:  # lengths are looked at two at a time, as if there were hundreds of requests
        monkeypatch.setattr("hardpoint.kernels.attention.SCANNED", (2,))
    assert errors(PLAIN, Attention, pieces).max() < TOLERANCE["bfloat16"]


class ByNumberOfDecodes(TritonAttention):
    """Splits one long request, but not several, and has other tiles where there are more than three."""

    tables = Tables(
        Table(
            "attention_decode",
            [
                Rule((), {"max_decodes": 1}, DecodeTuning(32, 16, Tiles(4, 4096, 4, 3))),
                Rule((), {"max_decodes": 3}, DecodeTuning(4, 48, Tiles(1, 8192, 4, 2))),
                Rule((), {}, DecodeTuning(16, 32, Tiles(2, 4096, 2, 3))),
            ],
        ),
        FEW.prefill,
    )


@pytest.mark.parametrize("pieces", [SPLIT[:1], SPLIT, MIXED], ids=["one", "two", "four"])
def test_one_backend_has_tiles_for_each_number_of_decodes(pieces: tuple[Piece, ...]) -> None:
    """Steps of all numbers share the memory of partial results."""
    assert errors(PLAIN, ByNumberOfDecodes, pieces).max() < TOLERANCE["bfloat16"]
    backend = ByNumberOfDecodes(cast(BuildContext, PluginConfigOnly({})), PLAIN)
    assert len({(one.splits, one.head_blocks, one.constants["BLOCK_N"]) for one in backend.decodes}) == 3


@pytest.mark.accelerator
@pytest.mark.parametrize("name", SPECS)
def test_computes_what_the_reference_does_on_the_device(name: str) -> None:
    spec = SPECS[name]
    kind = on_device(spec)
    pieces = (*MIXED[:4], *(Piece(1, total) for total in (300, 9000, 1, 20000)), *MIXED[4:], Piece(700, 1500))
    device = torch.accelerator.current_accelerator()
    assert device is not None
    assert errors(spec, kind, pieces, device).max() < TOLERANCE[spec.dtype]


STORED = [(dtype, False) for dtype in ("float32", "float16", "bfloat16", *SCALED, NVFP4)]
STORED += [(dtype, True) for dtype in (*SCALED, NVFP4)]


@pytest.mark.parametrize(("kv_dtype", "static"), STORED)
def test_stores_what_the_reference_does(kv_dtype: str, static: bool) -> None:
    size = 48 if kv_dtype == NVFP4 else 33
    spec = replace(PLAIN, dtype="float32", kv_dtype=kv_dtype, head_size=size, static_cache_scales=static)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 40, spec.num_kv_heads, spec.head_size, generator=generator)
    x *= torch.tensor([1e-9, 1e-3, 1.0, 1e3]).repeat(10)[:, None, None]
    x[0, 0], x[1, 1] = 0, x[1, 1].round()
    slots = torch.arange(16, 56, dtype=torch.int32)
    caches = []
    for kind in kinds(spec):
        backend = kind(cast(BuildContext, PluginConfigOnly({})), spec)
        if static:
            backend.set_cache_scales(torch.tensor([0.06]), torch.tensor([0.11]))
        buffer = torch.zeros(4 * backend.layout.page_bytes(backend.cache_spec, 16), dtype=torch.uint8)
        backend.store(StoreCall(x[0], x[1], backend.layout.views(buffer, 4, backend.cache_spec, 16), slots))
        caches.append(buffer)
    assert torch.equal(*caches)


def test_one_plan_serves_other_lengths_and_pages() -> None:
    """As a recorded step: nothing of the host's numbers is used but how many requests there are."""
    generator = torch.Generator().manual_seed(0)
    ctx = PluginConfigOnly({})
    backend = Attention(cast(BuildContext, ctx), PLAIN)
    ctx.resources.allocate(torch.device("cpu"))
    pages, block = 31, PLAIN.block_size
    buffer = torch.zeros(pages * backend.layout.page_bytes(backend.cache_spec, block), dtype=torch.uint8)
    cache = backend.layout.views(buffer, pages, backend.cache_spec, block)
    for view in cache.values():
        view.copy_(torch.randn(view.shape, generator=generator))
        view[0] = float("nan")  # what padding wrote to the null page
    batch = AttentionBatch(
        query_start=torch.arange(4, dtype=torch.int32),
        seq_lens=torch.ones(3, dtype=torch.int32),
        block_table=torch.zeros(3, 30, dtype=torch.int32),
        slot_mapping=torch.zeros(3, dtype=torch.int32),
        query_start_host=(0, 1, 2, 3),
        seq_lens_host=(1, 1, 1),
        num_decodes=3,
        graph_key=3,
    )
    q = torch.randn(3, PLAIN.num_heads, PLAIN.head_size, generator=generator).bfloat16()
    k = v = torch.empty(3, PLAIN.num_kv_heads, PLAIN.head_size, dtype=torch.bfloat16)
    metadata = backend.plan(batch)
    for lengths in ((5, 17, 1), (250, 333, 1)):
        batch.seq_lens.copy_(torch.tensor(lengths))
        batch.block_table[:2] = (torch.rand(2, 30, generator=generator).argsort(-1) + 1).int()
        assert backend.plan(replace(batch, seq_lens_host=lengths)).token == metadata.token
        out, expected = torch.empty_like(q), torch.empty_like(q)
        backend.forward(AttentionCall(q, k, v, cache, metadata, out))
        reference = ReferenceAttention(cast(BuildContext, ctx), PLAIN)
        reference.forward(
            AttentionCall(q, k, v, cache, reference.plan(replace(batch, seq_lens_host=lengths)), expected)
        )
        torch.testing.assert_close(out[:2], expected[:2], rtol=0.02, atol=0.01)


class Bound(TritonAttention):
    """Launches nothing, but sees which variant each call wants, and whether a known one would do."""

    launched_again = 0
    compiled: Sequence[int] = ()

    def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
        super().__init__(ctx, spec)
        self.launchers = (*(one.launcher for one in self.decodes), *self._prefill, self._store)
        for launcher in self.launchers:
            launcher._kernel = Variants(launcher._kernel)

    def forward(self, call: AttentionCall) -> None:
        q, out, batch = call.q, call.out, call.metadata.batch
        for number, placement in enumerate([*Placement][:3] * 2):
            lying = place(q, q.device, placement)
            super().forward(replace(call, q=lying))
            part = sub_batch(batch, number % 3, batch.num_requests)
            rows = slice(batch.query_start_host[number % 3], None)
            super().forward(replace(call, q=lying[rows], metadata=self.plan(part), out=out[rows]))
        Bound.launched_again = sum(launcher._kernel.launched_again for launcher in self.launchers)
        Bound.compiled = [len(launcher._kernel.compiled) for launcher in self.launchers]


def test_a_known_variant_is_the_right_one() -> None:
    """Wherever queries and parts of a batch lie. ``Variants`` raises where it is not."""
    run_backend(Bound, PLAIN, MIXED)
    assert Bound.launched_again > 10
    assert set(Bound.compiled) == {0, 1}  # some of the prefill kernels' tiles are for longer prompts


def jobs(spec: AttentionSpec, target: str) -> list[Job]:
    """The decode kernel, and the prefill kernel with each of its tiles, as the backend would call them."""
    scaled = spec.kv_dtype in SCALED or spec.static_cache_scales
    kind: Any = on_device(spec)
    if not target.startswith("sm_"):  # a third of the shared memory, and fewer registers for eight warps than for four
        kind = type(kind.__name__, (kind,), {"tables": TWO_STAGES})
    backend = kind(cast(BuildContext, PluginConfigOnly({})), spec)
    absent = {"sinks": spec.sinks, "slopes": spec.alibi, "k_scales": scaled, "v_scales": scaled}
    types = {"q": spec.dtype, "out": spec.dtype, "k_cache": spec.kv_dtype, "v_cache": spec.kv_dtype}
    signature = {**SIGNATURE, **{name: f"*{TYPES[dtype]}" for name, dtype in types.items()}}
    found = []
    for kernel, tiles, constants in (
        *(("decode", one.tuning.tiles, {**one.constants, "SCAN": 32}) for one in backend.decodes),
        *(("prefill", *one) for one in zip(backend.prefill_tiles, backend.prefill_constants, strict=True)),
    ):
        constants = {**constants, **{name: None for name, given in absent.items() if not given}}
        module = f"hardpoint.kernels.attention_{kernel}:{kernel}_attention"
        found.append(Job(module, signature, constants, target, tiles.num_warps, tiles.num_stages))
    return found


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_the_store_of_groups_is_compiled_where_there_are_no_such_floats(target: str) -> None:
    backend = TritonNvfp4CacheAttention(cast(BuildContext, PluginConfigOnly({})), replace(LARGE, kv_dtype=NVFP4))
    strides = ("k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride", "page_stride")
    signature = {**dict.fromkeys(strides, "i32:16"), "scale_page_stride": "i32:16", "slot_mapping": "*i32"}
    signature |= {"k": "*bf16", "v": "*bf16", "k_cache": "*u8", "v_cache": "*u8", "num_rows": "i32"}
    names = TritonNvfp4CacheAttention.store_kernel.arg_names
    constants = {name: value for name, value in backend._store_constants.items() if name in names}
    constants |= {"k_scales": None, "v_scales": None}
    check(compile_kernels([Job("hardpoint.kernels.attention_groups:store_groups", signature, constants, target, 4, 1)]))


def check(compiled: list[Any]) -> None:
    for one in compiled:
        assert one.spilled <= 64, one
        assert one.shared <= SHARED_KIB[one.job.target] << 10, one


def test_compiled_for_a_large_device() -> None:
    compiled = compile_kernels(jobs(LARGE, "sm_90"))
    check(compiled)
    decode, *prefill = compiled
    assert decode.registers <= 128, "four programs share a processor"
    assert decode.count("mma.sync") > 0 < decode.count("cp.async.cg.shared")
    assert prefill[-1].count("wgmma.mma_async") > 0 < prefill[-1].count("cp.async.cg.shared")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "target"),
    [pair for pair in product(COMPILED, TARGETS) if pair != ("float8", "gfx942")],  # whose 8-bit floats are others
)
def test_compiled_for_every_target(name: str, target: str) -> None:
    check(compile_kernels(jobs(COMPILED[name], target), seconds=400))


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_where_shared_memory_is_small(name: str) -> None:
    """With fewer stages, for prompts: decodes have room."""
    decode, *prefill = jobs(COMPILED[name], "sm_89")
    found = compile_in_stages_that_fit([decode, *prefill], seconds=400)
    assert decode in [compiled.job for compiled in found]
    for compiled in found:
        assert compiled.shared <= SHARED_KIB["sm_89"] << 10, compiled


class NotRecorded(Attention):
    capture = CaptureGrade.NEVER


class QuantizedCacheNotRecorded(QuantizedCache):
    capture = CaptureGrade.NEVER


class Nvfp4CacheNotRecorded(Nvfp4Cache):
    capture = CaptureGrade.NEVER


FEATURES = ["sliding_window", "chunked_local", "soft_cap", "alibi", "sinks"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "name", "kv_dtypes"),
    [
        (NotRecorded, "reference", ["float32", "float16", "bfloat16"]),
        (QuantizedCacheNotRecorded, "reference_quantized_cache", [*SCALED]),
        (Nvfp4CacheNotRecorded, "reference_nvfp4_cache", [NVFP4]),
    ],
)
def test_conforms(kind: type[TritonAttention], name: str, kv_dtypes: list[str]) -> None:
    """The values of every trial; the other checks are for devices."""
    tried = subject(
        Site.open(discover(), "cpu", {"cpu": {"threads": 1}}),
        kind,
        "attention",
        name=name,
        requires=[
            {"dtype": ["float32", "float16", "bfloat16"]},
            {"kv_dtype": kv_dtypes},
            *([{"head_multiple": 16}] if kv_dtypes == [NVFP4] else []),
            {"feature": FEATURES if name == "reference" else [*FEATURES, "static_cache_scales"]},
        ],
    )
    faults = [
        f"{trial.case}: {fault}"
        for trial in AttentionTrials().trials(tried, Plan())
        for check in trial.checks
        if check.name in ("values", "group")
        for fault in check.run().faults
    ]
    assert not faults, "\n".join(faults)
