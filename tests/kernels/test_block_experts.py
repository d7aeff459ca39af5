"""Experts in GGUF's blocks, held to the reference in the interpreter, and compiled for other devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hardpoint.checkpoint.gguf.blocks import SPECS
from hardpoint.conformance.families.experts import ExpertsProbe
from hardpoint.conformance.plan import Row
from hardpoint.conformance.site import Site, Subject
from hardpoint.conformance.trials import Finding
from hardpoint.kernels.block_experts import BlockExpertTiles, TritonBlockExperts
from hardpoint.kernels.tables import Table, table
from hardpoint.ops.judge import judge_call
from hardpoint.plugin_host import discover
from hardpoint_plugin_api import ExpertsCall, QuantSpec
from tests.kernels.compiling import SHARED_KIB, Job, compile_in_stages_that_fit, compile_kernels
from tests.kernels.test_tiled_experts import Case

_TYPES = {
    "Q4_K": ("silu_and_mul", torch.bfloat16, 256, 256),
    "Q6_K": ("silu_and_mul", torch.float16, 256, 256),
    "Q5_0": ("relu2", torch.bfloat16, 96, 160),
    "Q8_0": ("relu2", torch.bfloat16, 96, 160),
}
_MORE = {
    "Q5_K": ("swiglu_oai", torch.bfloat16, 256, 256),
    "Q2_K": ("silu_and_mul", torch.float32, 256, 256),
    "Q3_K": ("silu_and_mul", torch.bfloat16, 256, 256),
    "Q4_0": ("silu_and_mul", torch.bfloat16, 64, 96),
    "Q4_1": ("silu_and_mul", torch.float16, 64, 96),
    "Q5_1": ("silu_and_mul", torch.bfloat16, 96, 64),
}
_ROW: Row = {
    "dtype": "bfloat16",
    "spec": "Q4_K",
    "activation": "silu_and_mul",
    "format": "standard",
    "batch": "few",
    "mixture": "5x5",
    "widths": "blocks",
    "absent": "some-elsewhere",
    "bias": "no-bias",
}


@pytest.fixture(scope="module")
def site() -> Site:
    return Site.open(discover(), "cpu")


def _case(site: Site, name: str) -> Case:
    return Case(site, SPECS[name].spec, *(_TYPES | _MORE)[name], kind=TritonBlockExperts)


@pytest.mark.parametrize("name", [*_TYPES, *(pytest.param(name, marks=pytest.mark.nightly) for name in _MORE)])
def test_equals_the_reference(site: Site, name: str) -> None:
    """One token, and several by the table, which lists pairs in place and by launches."""
    case = _case(site, name)
    found, wanted = case.kernel.unpack(case.packed), case.reference.unpack(case.stored)
    assert all(torch.equal(found[matrix], wanted[matrix].to(found[matrix].dtype)) for matrix in wanted)
    for tokens in (1, 30):
        case.check(tokens, None)


@pytest.mark.parametrize(
    ("w2", "width", "dtype"),
    [("Q6_K", 256, torch.bfloat16), ("Q5_0", 96, torch.float16)]
    + [("Q8_0", 96, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)],
)
def test_matrices_of_two_types(site: Site, w2: str, width: int, dtype: torch.dtype) -> None:
    """As files of Q4_K_M have them: Q6_K, and Q5_0 or Q8_0 where rows of w2 are no whole blocks of 256 columns."""
    spec = SPECS["Q4_K"].spec
    case = Case(site, spec, "silu_and_mul", dtype, 256, width, kind=TritonBlockExperts, w2=SPECS[w2].spec)
    found, wanted = case.kernel.unpack(case.packed), case.reference.unpack(case.stored)
    assert all(torch.equal(found[matrix], wanted[matrix].to(found[matrix].dtype)) for matrix in wanted)
    for tokens in (1, 30):
        case.check(tokens, None)


def test_columns_are_checked_by_each_matrix_own_spec(site: Site) -> None:
    workload = replace(_case(site, "Q4_K").workload, w2_spec=(SPECS["Q5_0"].spec, QuantSpec("bfloat16")))
    assert not TritonBlockExperts.supports(replace(workload, intermediate_size=96), site.platform.info)
    (reason,) = TritonBlockExperts.supports(replace(workload, hidden_size=96), site.platform.info)
    assert (reason.wanted, reason.supported) == ("96", "multiples of 256")


@pytest.mark.parametrize(
    "cut",
    [BlockExpertTiles(1, 16, 1, 1), BlockExpertTiles(8, 64, 4, 1), BlockExpertTiles(32, 64, 4, 1, numbers_first=True)],
    ids=["rows of one", "scaled sums", "numbers first"],
)
def test_cuts(site: Site, cut: BlockExpertTiles) -> None:
    _case(site, "Q4_K").check(3, cut)


def test_blocks_that_end_within_a_row_are_refused(site: Site) -> None:
    workload = replace(_case(site, "Q4_K").workload, intermediate_size=384)
    (reason,) = TritonBlockExperts.supports(workload, site.platform.info)
    assert (reason.wanted, reason.supported) == ("384", "multiples of 256")


class ScalesOfTheFirst(TritonBlockExperts):
    """Takes the first expert's outer scales for all."""

    def apply(self, call: ExpertsCall) -> None:
        first = {n: w[:1].expand_as(w).contiguous() for n, w in call.w.items() if n.endswith("weight_scale_2")}
        super().apply(replace(call, w=call.w | first))


class MinimaLeftOut(TritonBlockExperts):
    """Adds no minima."""

    def apply(self, call: ExpertsCall) -> None:
        none = {name: torch.zeros_like(w) for name, w in call.w.items() if ".weight_min" in name}
        super().apply(replace(call, w=call.w | none))


@pytest.mark.parametrize("target", [TritonBlockExperts, ScalesOfTheFirst, MinimaLeftOut])
def test_the_kit_tells_right_from_wrong(site: Site, target: type[TritonBlockExperts]) -> None:
    offers = site.plugins.offers("experts")
    offer = next(o for o in offers if o.contribution.name == "triton_blocks" and o.plugin == "cuda")
    subject = replace(Subject.load(offer, site), target=target)
    probe = ExpertsProbe(subject, _ROW, {"Q4_K": (SPECS["Q4_K"].spec, None)})
    faults = Finding.of(judge_call(probe.call(3))).faults
    assert bool(faults) == (target is not TritonBlockExperts), faults


def _job(target: str, cut: BlockExpertTiles, name: str, gated: bool) -> Job:
    spec = SPECS[name].spec
    has_minima, is_high, is_nested = spec.minimum, spec.number_format.bits > 4, len(spec.scales) > 1
    group = spec.scales[0].block[1]
    record = "*i64" if spec.scales[0].format == "float16" or group == 16 else "*i32"
    there = {
        "high": (is_high, "*i16" if spec.number_format.bits <= 6 else "*i32"),
        "outer": (is_nested, "*fp16"),
        "minima": (has_minima, record),
        "outer_minima": (is_nested and has_minima, "*fp16"),
    }
    pointers = {"x": "*bf16", "words": "*i32", "scales": record, "bias": "*bf16", "out": "*bf16"}
    pointers |= {key: kind for key, (is_there, kind) in there.items() if is_there}
    constexprs = {key: None for key, (is_there, _) in there.items() if not is_there} | {
        "ACTIVATION": "silu" if gated else None,
        "GATED": gated,
        "GROUP": group,
        "BIAS": 1 << spec.number_format.bits - 1 if spec.number_format.storage == "int8" else 0,
        "SIGNED": spec.scales[0].format == "int8",
        "WHOLE": True,
        "LISTED_IN_PLACE": 1 if cut.rows == 1 else 128 if cut.rows <= 16 else 0,
        "BLOCK_M": cut.rows,
        "BLOCK_N": cut.columns,
        "NUMBERS_FIRST": cut.numbers_first,
        "STAGES": cut.num_stages,
    }
    sizes = dict.fromkeys(("N", "K", "T", "words_stride", "scales_stride", "outer_stride"), "i32:16")
    signature = {**pointers, "ids": "*i32", "listed": "*i32", "num_pairs": "i32", **sizes, "divisor": "i32"}
    kernel = "hardpoint.kernels.block_experts:multiply_blocks"
    return Job(kernel, signature, constexprs, target, cut.num_warps, cut.num_stages)


def _cuts() -> list[BlockExpertTiles]:
    facts = (("rows", int), ("pairs", int), ("itemsize", int))
    found: Table[BlockExpertTiles] = table("experts_blocks", BlockExpertTiles, facts)
    return [cut for cut in found.uses if cut.num_stages > 1]


def test_compiles() -> None:
    """In the tiles of the table; codes go from memory to matrix units."""
    jobs = [_job("sm_90", cut, "Q4_K", True) for cut in _cuts()]
    down = [_job("sm_90", cut, name, False) for cut in (_cuts()[0], _cuts()[-1]) for name in ("Q6_K", "Q8_0")]
    for compiled in compile_kernels([*jobs, *down]):
        assert compiled.spilled <= 64, compiled
        assert compiled.shared <= SHARED_KIB["sm_90"] << 10
        assert compiled.count("wgmma.mma_async") or compiled.count("mma.sync"), compiled.assembly


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_100", "sm_120", "gfx942", "gfx950"])
def test_compiles_for_others(target: str) -> None:
    """With fewer stages where shared memory is small."""
    for cut in _cuts():
        for name in ("Q4_K", "Q6_K", "Q8_0"):
            (compiled,) = compile_in_stages_that_fit([_job(target, cut, name, True)], 300)
            assert compiled.shared <= SHARED_KIB[target] << 10
