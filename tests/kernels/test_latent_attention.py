"""Latent attention in Triton, interpreted: against the reference, on batches that meet every branch of the kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import pytest
import torch

from hardpoint.attention.phases import sub_batch
from hardpoint.conformance.families.latent import LatentTrials
from hardpoint.conformance.memory import Placement, place
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint.kernels.attention_tuning import DecodeTuning, PrefillTuning, Tables, Tiles
from hardpoint.kernels.latent_attention import (
    TritonBatchInvariantLatentAttention,
    TritonBatchInvariantQuantizedLatentAttention,
    TritonLatentAttention,
    TritonQuantizedLatentAttention,
)
from hardpoint.plugin_host import discover
from hardpoint.reference.latent_attention import ReferenceLatentAttention
from hardpoint.reference.quantized_latent_attention import QuantizedLatentAttention
from hardpoint_plugin_api import BuildContext, CaptureGrade, LatentBackend, LatentCall, LatentSpec, LatentStoreCall
from hardpoint_plugin_api.elements import BUILT_IN
from tests.conformance.trying import subject
from tests.kernels.compiling import SHARED_KIB, TARGETS, Job, compile_kernels
from tests.kernels.test_attention import SIGNATURE, SPLIT, TOLERANCE, TYPES
from tests.kernels.test_launch import Variants
from tests.support.alternating import alternating
from tests.support.attention import MIXED, Piece, PluginConfigOnly
from tests.support.latent import run_latent_backend

PLAIN = LatentSpec(6, 64, 16, 0.1, "bfloat16", "bfloat16", 16)
SPECS = {
    "plain": PLAIN,
    "float16": replace(PLAIN, dtype="float16", kv_dtype="float16", latent_size=40, rope_size=8),
    "other cache, one page each": replace(PLAIN, kv_dtype="float32", block_size=1),
    "odd sizes": replace(PLAIN, num_heads=1, latent_size=33, rope_size=6, dtype="float32", kv_dtype="float32"),
    "many heads": replace(PLAIN, num_heads=40, block_size=5),
    "lists": replace(PLAIN, top_k=21),
    "short lists, odd sizes": replace(
        PLAIN, num_heads=7, latent_size=33, rope_size=6, dtype="float32", kv_dtype="float32", block_size=5, top_k=3
    ),
}
TILES = Tiles(rows=16, key_bytes=2048, num_warps=4, num_stages=2)
FEW = Tables.fixed(DecodeTuning(16, 48, replace(TILES, rows=4)), PrefillTuning(4, (TILES, replace(TILES, rows=32))))
"""The interpreter takes one program after the other."""
DEEPSEEK = LatentSpec(128, 512, 64, 0.1, "bfloat16", "bfloat16", 16)
SMALL = Tables.fixed(
    DecodeTuning(256, 128, Tiles(16, 16384, 4, 1)),
    PrefillTuning(256, (Tiles(rows=16, key_bytes=16384, num_warps=4, num_stages=1),)),
)
"""For devices with 64 KiB of shared memory."""


class Latent(TritonLatentAttention):
    tables = FEW


def errors(
    spec: LatentSpec, kind: type[LatentBackend], pieces: Sequence[Piece], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Each head's error beside its norm."""
    ours = run_latent_backend(kind, spec, pieces, device=device)
    reference = run_latent_backend(ReferenceLatentAttention, spec, pieces)
    found: torch.Tensor = (ours.double() - reference.double()).norm(dim=-1) / reference.double().norm(dim=-1)
    return found


@pytest.mark.parametrize(("pieces", "name"), alternating({"mixed": MIXED, "split": SPLIT}, {n: n for n in SPECS}))
def test_computes_what_the_reference_does(name: str, pieces: tuple[Piece, ...]) -> None:
    spec = SPECS[name]
    assert errors(spec, Latent, pieces).max() < TOLERANCE[spec.dtype]


class HeadsFarApart(Latent):
    """Queries and results whose last head lies 2^31 elements behind the first, as in steps of very many tokens.

    The memory between them is never touched, so it takes none.
    """

    def forward(self, call: LatentCall) -> None:
        def far(x: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(x.shape, (x.shape[2], 2**31 // (x.shape[1] - 1) + 16, 1), dtype=x.dtype)

        q_latent, q_rope, out = (
            far(call.q_latent).copy_(call.q_latent),
            far(call.q_rope).copy_(call.q_rope),
            far(call.out),
        )
        super().forward(replace(call, q_latent=q_latent, q_rope=q_rope, out=out))
        call.out.copy_(out)


@pytest.mark.parametrize(("name", "pieces"), [("plain", MIXED), ("plain", SPLIT), ("lists", MIXED)])
def test_heads_that_lie_far_apart(name: str, pieces: tuple[Piece, ...]) -> None:
    """Places do not fit 32 bits."""
    spec = SPECS[name]
    assert errors(spec, HeadsFarApart, pieces).max() < TOLERANCE[spec.dtype]


class Quantized(TritonQuantizedLatentAttention):
    tables = FEW


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("name", ["plain", "float16", "odd sizes", "short lists, odd sizes"])
def test_latents_of_8_bits(name: str, kv_dtype: str) -> None:
    """Beside the reference over the same elements: both round latents alike."""
    spec = replace(SPECS[name], kv_dtype=kv_dtype)
    for pieces in (MIXED, SPLIT):
        ours = run_latent_backend(Quantized, spec, pieces).double()
        reference = run_latent_backend(QuantizedLatentAttention, spec, pieces).double()
        assert ((ours - reference).norm(dim=-1) / reference.norm(dim=-1)).max() < TOLERANCE[spec.dtype]


class Apart(TritonBatchInvariantLatentAttention):
    tables = FEW


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name == "many heads")) for name in SPECS]
)
def test_a_query_by_itself(name: str) -> None:
    spec = SPECS[name]
    assert errors(spec, Apart, MIXED).max() < TOLERANCE[spec.dtype]


class ApartQuantized(TritonBatchInvariantQuantizedLatentAttention):
    tables = FEW


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_a_query_by_itself_over_8_bits(kv_dtype: str) -> None:
    spec = replace(SPECS["odd sizes"], kv_dtype=kv_dtype)
    ours = run_latent_backend(ApartQuantized, spec, MIXED).double()
    reference = run_latent_backend(QuantizedLatentAttention, spec, MIXED).double()
    assert ((ours - reference).norm(dim=-1) / reference.norm(dim=-1)).max() < TOLERANCE[spec.dtype]


def test_bits_do_not_depend_on_the_batch() -> None:
    """By the kit's check, which finds a backend that splits decodes."""
    claims = [{"feature": ["index_lists", "batch_invariant"]}]
    for kind, kv_dtypes in ((Apart, ("float32", "float16", "bfloat16")), (ApartQuantized, ("float8_e4m3fn", "int8"))):
        found = findings(kind, claims, ("batch-invariant", "values"), every=30, kv_dtypes=kv_dtypes)
        assert found["passed"]
        assert not found["failed"]
    assert findings(Latent, claims[:1], ("batch-invariant",), every=25)["failed"]


@pytest.mark.accelerator
@pytest.mark.parametrize("name", [*SPECS, "deepseek", "deepseek-lite"])
def test_computes_what_the_reference_does_on_the_device(name: str) -> None:
    spec = {**SPECS, "deepseek": DEEPSEEK, "deepseek-lite": replace(DEEPSEEK, num_heads=16)}[name]
    pieces = (*MIXED[:4], *(Piece(1, total) for total in (300, 5000, 1)), *MIXED[4:], Piece(70, 500))
    device = torch.accelerator.current_accelerator()
    assert device is not None
    assert errors(spec, TritonLatentAttention, pieces, device).max() < TOLERANCE[spec.dtype]


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_stores_what_the_reference_does(kv_dtype: str) -> None:
    spec = replace(PLAIN, dtype="float32", kv_dtype=kv_dtype, latent_size=33, rope_size=6)
    latent, rope_key = torch.randn(40, 50).split([44, 6], dim=-1)
    slots, buffers = torch.arange(16, 56, dtype=torch.int32), []
    kinds: tuple[type[LatentBackend], ...] = (Latent, ReferenceLatentAttention)
    if kv_dtype in BUILT_IN:
        kinds = Quantized, QuantizedLatentAttention
    for kind in kinds:
        backend = kind(cast(BuildContext, PluginConfigOnly({})), spec)
        buffer = torch.zeros(4 * backend.layout.page_bytes(backend.cache_spec, 16), dtype=torch.uint8)
        cache = backend.layout.views(buffer, 4, backend.cache_spec, 16)
        backend.store(LatentStoreCall(latent[:, :33], rope_key, cache, slots))
        buffers.append(buffer)
    assert torch.equal(*buffers)


class Bound(TritonLatentAttention):
    """Launches nothing, but sees which variant each call wants, and whether a known one would do."""

    launched_again = 0

    def __init__(self, ctx: BuildContext, spec: LatentSpec) -> None:
        super().__init__(ctx, spec)
        self.launchers = (self._store, *(cut.launcher for cut in (*self.decodes.values(), *self.prefills)))
        for launcher in self.launchers:
            launcher._kernel = Variants(launcher._kernel)

    def forward(self, call: LatentCall) -> None:
        out, batch = call.out, call.metadata.batch
        for number, placement in enumerate([*Placement][:3] * 2):
            lying = place(call.q_latent, out.device, placement)
            super().forward(replace(call, q_latent=lying))
            part = sub_batch(batch, number % 3, batch.num_requests)
            rows = slice(batch.query_start_host[number % 3], None)
            super().forward(
                replace(call, q_latent=lying[rows], q_rope=call.q_rope[rows], metadata=self.plan(part), out=out[rows])
            )
        Bound.launched_again = sum(launcher._kernel.launched_again for launcher in self.launchers)


def test_a_known_variant_is_the_right_one() -> None:
    """Wherever queries and parts of a batch lie. ``Variants`` raises where it is not."""
    run_latent_backend(Bound, PLAIN, MIXED)
    assert Bound.launched_again > 10


def jobs(spec: LatentSpec, target: str) -> list[Job]:
    """As the backend would call them: for lists, for decodes, and for prompts with each of its tiles."""
    scaled = TYPES[spec.kv_dtype] in ("i8", "fp8e4nv")
    kind: Any = TritonQuantizedLatentAttention if scaled else TritonLatentAttention
    if not target.startswith("sm_"):
        kind = type(kind.__name__, (kind,), {"tables": SMALL})
    backend = kind(cast(BuildContext, PluginConfigOnly({})), replace(spec, top_k=2048))
    strides = (f"{name}_{axis}_stride" for name in ("q_latent", "q_rope", "out") for axis in ("token", "head"))
    types = {"q_latent": spec.dtype, "q_rope": spec.dtype, "out": spec.dtype}
    types |= {"latents": spec.kv_dtype, "rope_keys": spec.dtype if scaled else spec.kv_dtype}
    signature = {
        **SIGNATURE,
        "indices": "*i32",
        **({"scales": "*fp32"} if scaled else {}),
        "index_stride": "i32:16",
        **dict.fromkeys((*strides, "latent_page_stride", "rope_page_stride"), "i32:16"),
        **{name: f"*{TYPES[dtype]}" for name, dtype in types.items()},
    }
    found = []
    cuts = [("latent_listed:attend_listed_latents", backend.one_by_one)]
    cuts += [("latent_decode:decode_latent_attention", backend.decodes[32])]
    cuts += [("latent_prefill:prefill_latent_attention", cut) for cut in backend.prefills]
    for kernel, cut in cuts:
        constants = {**cut.constants, "STAGES": cut.tiles.num_stages, **({} if scaled else {"scales": None})}
        module = f"hardpoint.kernels.{kernel}"
        found.append(Job(module, signature, constants, target, cut.tiles.num_warps, cut.tiles.num_stages))
    return found


@pytest.mark.parametrize(
    ("heads", "kv_dtype"),
    [
        pytest.param(16, "bfloat16", marks=pytest.mark.nightly),
        (128, "bfloat16"),
        pytest.param(16, "float8_e4m3fn", marks=pytest.mark.nightly),
        pytest.param(128, "float8_e4m3fn", marks=pytest.mark.nightly),
    ],
)
def test_compiled_for_a_large_device(heads: int, kv_dtype: str) -> None:
    compiled = compile_kernels(jobs(replace(DEEPSEEK, num_heads=heads, kv_dtype=kv_dtype), "sm_90"), seconds=300)
    for one in compiled:
        # As much as the fastest tile for 128 heads, measured on an H100; tiles for 8 bits were not measured.
        assert one.spilled <= (144 if kv_dtype == "bfloat16" else 704), one
        assert one.shared <= SHARED_KIB["sm_90"] << 10, one
        assert one.count("cp.async.cg.shared") > 0, one
    assert compiled[-1].count("wgmma.mma_async") > 0


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_compiled_for_every_target(dtype: str, target: str) -> None:
    for one in compile_kernels(jobs(replace(DEEPSEEK, dtype=dtype, kv_dtype=dtype), target), seconds=400):
        assert one.shared <= SHARED_KIB[target] << 10, one


class NotRecorded(Latent):
    capture = CaptureGrade.NEVER


def findings(
    kind: type[LatentBackend],
    more: list[dict[str, Any]],
    checks: Sequence[str],
    every: int,
    kv_dtypes: Sequence[str] = ("float32", "float16", "bfloat16"),
) -> Mapping[str, list[str]]:
    """The outcomes of some of the kit's checks, and what they say, in each ``every``-th trial."""
    dtypes = ["float32", "float16", "bfloat16"]
    site = Site.open(discover(), "cpu", {"cpu": {"threads": 1}})
    requires = [{"dtype": dtypes}, {"kv_dtype": list(kv_dtypes)}, *more]
    found = defaultdict[str, list[str]](list)
    for trial in islice(
        LatentTrials().trials(subject(site, kind, "attention", "latent", requires=requires), Plan()), 0, None, every
    ):
        for check in trial.checks:
            if check.name in checks:
                finding = check.run()
                found[finding.outcome].append(f"{trial.case}: {finding.faults}")
    return found


@pytest.mark.nightly
def test_conforms() -> None:
    """The values of every trial; the other checks are for devices."""
    assert not findings(NotRecorded, [], ("values", "group"), every=1)["failed"]


class NotRecordedQuantized(Quantized):
    capture = CaptureGrade.NEVER


@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.nightly)], ids=["part", "whole"])
def test_latents_of_8_bits_conform(every: int) -> None:
    claims: list[dict[str, Any]] = [{"feature": ["index_lists"]}]
    kv_dtypes = ("float8_e4m3fn", "float8_e5m2", "int8")
    found = findings(NotRecordedQuantized, claims, ("values", "round-trip"), every, kv_dtypes)
    assert found["passed"]
    assert not found["failed"]
