"""Core's reference, the CPU backend, and what core generates around backends, against the definition of attention."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch

from hardpoint.adapters.padded_heads import pad_heads
from hardpoint.attention.phases import PhasedBackend
from hardpoint.layers.attention import alibi_slopes
from hardpoint.reference import attention as reference
from hardpoint.reference.attention import ReferenceAttention
from hardpoint.reference.batch_invariant_attention import BatchInvariantAttention
from hardpoint.selection import StepRange
from hardpoint_cpu.attention import CpuAttention
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    BuildContext,
    CaptureGrade,
    Phase,
    PlainLayout,
    StepPlanner,
)
from tests.support.attention import MIXED, Piece, brute_force, run_backend

SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=16, scale=0.3, dtype="float32", kv_dtype="float32", block_size=16
)


class Phased(PhasedBackend):
    """The reference for prefills, the CPU backend for decodes, behind one."""

    layout = PlainLayout()

    def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
        entries = [
            (StepRange(phase="prefill"), cast(AttentionBackend, ReferenceAttention(ctx, spec))),
            (StepRange(max=2, phase="decode"), CpuAttention(ctx, spec)),
            (StepRange(min=3, phase="decode"), CpuAttention(ctx, spec)),
        ]
        super().__init__(ctx, spec, entries)


BACKENDS: dict[str, type[AttentionBackend]] = {
    "reference": ReferenceAttention,
    "reference_batch_invariant": BatchInvariantAttention,
    "cpu_paged": CpuAttention,
    "cpu_paged+pad32": pad_heads(CpuAttention, 32),
    "phased": Phased,
}

VARIATIONS: dict[str, AttentionSpec] = {
    "plain": SPEC,
    "mha": replace(SPEC, num_kv_heads=4),
    "mqa-odd": replace(SPEC, num_heads=7, num_kv_heads=1),
    "window": replace(SPEC, window=11),
    "window-1": replace(SPEC, window=1),
    "chunk": replace(SPEC, chunk=14),
    "chunk-1": replace(SPEC, chunk=1),
    "chunk-page": replace(SPEC, chunk=32),
    "soft-cap": replace(SPEC, soft_cap=1.5),
    "sinks": replace(SPEC, sinks=True),
    "alibi": replace(SPEC, alibi=True),
    "everything": replace(SPEC, window=20, soft_cap=2.0, sinks=True, alibi=True),
    "window-sinks-alibi": replace(SPEC, window=20, sinks=True, alibi=True),
    "chunk-everything": replace(SPEC, chunk=20, soft_cap=2.0, sinks=True, alibi=True),
    "chunk-sinks-alibi": replace(SPEC, chunk=20, sinks=True, alibi=True),
    "block-1": replace(SPEC, block_size=1),
    "head-80": replace(SPEC, head_size=80),
}

BATCHES = {
    "mixed": MIXED,
    "one-token": (Piece(1, 1),),
    "one-decode": (Piece(1, 40),),
    "equal-decodes": (Piece(1, 20), Piece(1, 22), Piece(1, 17)),
    "unequal-decodes": (Piece(1, 1), Piece(1, 200), Piece(1, 2), Piece(1, 1)),
    "one-prompt": (Piece(33, 33),),
    "chunk": (Piece(8, 33),),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_the_definition(backend: str, variation: str, batch: str) -> None:
    spec = VARIATIONS[variation]
    generator = torch.Generator().manual_seed(5)
    sinks = torch.randn(spec.num_heads, generator=generator) if spec.sinks else None
    slopes = alibi_slopes(spec.num_heads, torch.device("cpu")) if spec.alibi else None
    out, requests = run_backend(BACKENDS[backend], spec, BATCHES[batch], sinks=sinks, alibi_slopes=slopes)
    expected = brute_force(spec, requests, sinks, slopes)
    assert (out - expected).abs().max() < 1e-5


@pytest.mark.parametrize("variation", ["plain", "everything", "chunk-everything"])
def test_the_reference_is_the_same_when_queries_take_turns(variation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_MOST_SCORES", 4 * 50 * 3)  # three queries of the longest request
    spec = VARIATIONS[variation]
    sinks = torch.linspace(-1, 1, spec.num_heads) if spec.sinks else None
    slopes = alibi_slopes(spec.num_heads, torch.device("cpu")) if spec.alibi else None
    out, requests = run_backend(ReferenceAttention, spec, MIXED, sinks=sinks, alibi_slopes=slopes)
    assert (out - brute_force(spec, requests, sinks, slopes)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", ["reference", "cpu_paged"])
def test_lower_precision_errs_like_its_rounding(backend: str, dtype: str) -> None:
    spec = replace(SPEC, dtype=dtype, kv_dtype=dtype, window=30)
    out, requests = run_backend(BACKENDS[backend], spec, MIXED)
    expected = brute_force(spec, requests)
    unit = torch.finfo(getattr(torch, dtype)).eps
    assert (out - expected).abs().max() < 4 * unit * float(expected.abs().max())


def test_a_cache_of_another_dtype_is_converted() -> None:
    out, requests = run_backend(CpuAttention, replace(SPEC, kv_dtype="bfloat16"), MIXED)
    rounded = [(q, k.bfloat16(), v.bfloat16()) for q, k, v in requests]
    own_step = brute_force(SPEC, requests)
    assert (out - brute_force(SPEC, rounded)).abs().max() < 2e-2
    assert (out - own_step).abs().max() > 0, "the cache is meant to round"


def test_alibi_slopes_of_a_power_of_two_and_between() -> None:
    device = torch.device("cpu")
    assert alibi_slopes(8, device).tolist() == [2.0**-i for i in range(1, 9)]
    between = alibi_slopes(12, device).tolist()
    assert between[:8] == [2.0**-i for i in range(1, 9)]
    assert between[8:] == pytest.approx([2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5])


def test_plain_layout_round_trips_and_keeps_its_bounds() -> None:
    layout, spec = PlainLayout(), SPEC.cache_spec
    size = layout.page_bytes(spec, 16)
    assert size % layout.alignment == 0
    assert size >= 2 * 16 * 2 * 16 * 4
    buffer = torch.zeros(5 * size, dtype=torch.uint8)
    views = layout.views(buffer, 5, spec, 16)
    k, v = torch.randn(2, 16, 2, 16), torch.randn(2, 16, 2, 16)
    pages = torch.tensor([3, 1])
    layout.from_logical(views, pages, {"k": k, "v": v})
    got = layout.to_logical(views, pages)
    assert torch.equal(got["k"], k)
    assert torch.equal(got["v"], v)
    untouched = [0, 2, 4]
    assert not any(buffer[p * size : (p + 1) * size].any() for p in untouched)


NEVER, SINGLE_TOKEN, ANY = CaptureGrade.NEVER, CaptureGrade.SINGLE_TOKEN, CaptureGrade.ANY


@pytest.mark.parametrize(
    ("decode", "prefill", "grade"),
    [(ANY, NEVER, SINGLE_TOKEN), (SINGLE_TOKEN, ANY, SINGLE_TOKEN), (NEVER, ANY, NEVER)],
)
def test_decodes_decide_what_may_be_captured_of_phases(
    decode: CaptureGrade, prefill: CaptureGrade, grade: CaptureGrade
) -> None:
    class Decoding(CpuAttention):
        capture = decode

    class Prefilling(CpuAttention):
        capture = prefill

    ctx = cast(BuildContext, None)
    entries = [(StepRange(phase="prefill"), Prefilling(ctx, SPEC)), (StepRange(phase="decode"), Decoding(ctx, SPEC))]
    assert PhasedBackend(ctx, SPEC, entries).capture == grade


def test_phases_plan_a_step_of_decodes_over_the_batchs_own_arrays() -> None:
    """The captured steps read them there."""
    starts, lengths, slots = (torch.arange(n, dtype=torch.int32) for n in (4, 3, 3))
    table = torch.ones(3, 2, dtype=torch.int32)
    batch = AttentionBatch(starts, lengths + 1, table, slots, (0, 1, 2, 3), (1, 2, 3), 3, graph_key=3)
    ((_, rows, planned),) = Phased(cast(BuildContext, None), SPEC).plan(batch).parts
    assert (rows, planned.batch.graph_key) == (slice(0, 3), 3)
    for name in ("query_start", "seq_lens", "block_table", "slot_mapping"):
        own, given = getattr(planned.batch, name), getattr(batch, name)
        assert (own.data_ptr(), own.shape) == (given.data_ptr(), given.shape), name


def test_padded_heads_pass_on_whatever_a_backend_may_declare() -> None:
    """A method or an attribute that the adapter left to the base would hide the backend's own."""
    declared = {
        name
        for base in (StepPlanner, AttentionBackend)
        for name in (*vars(base), *base.__annotations__)
        if not name.startswith("_")
    }
    assert {"grade", "traceable", "set_cache_scales"} <= declared
    assert declared - set(vars(pad_heads(CpuAttention, 32))) == set()


def test_padded_heads_have_the_grades_of_their_backend() -> None:
    class Graded(CpuAttention):
        capture = ANY
        traceable = True

        def grade(self, phase: Phase, tokens: int) -> CaptureGrade:
            return SINGLE_TOKEN if phase == "decode" else NEVER

    padded = pad_heads(Graded, 32)(cast(BuildContext, None), SPEC)
    assert (padded.grade("decode", 4), padded.grade("prefill", 4)) == (SINGLE_TOKEN, NEVER)
    assert (padded.capture, padded.traceable) == (ANY, True)
