"""Experts of 4-bit weights in tiles, held to the reference in the interpreter, and compiled for other devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hardpoint.conformance.families.experts import ERRORS
from hardpoint.conformance.site import Site
from hardpoint.dtypes import dtype_name
from hardpoint.kernels.expert_layouts import LaidOutExperts
from hardpoint.kernels.tables import FOLDER, Table, table
from hardpoint.kernels.tiled_experts import ExpertTiles, TritonTiledExperts
from hardpoint.numerics import quantize_weight
from hardpoint.ops.error_model import compare
from hardpoint.plugin_host import discover
from hardpoint.reference.experts import ReferenceExperts
from hardpoint_plugin_api import ExpertsCall, ExpertsWorkload, QuantSpec, Scale
from tests.kernels.compiling import SHARED_KIB, Job, compile_in_stages_that_fit, compile_kernels

MXFP4 = QuantSpec("float4_e2m1", scales=(Scale("float8_e8m0fnu", (1, 32)),))
NVFP4 = QuantSpec("float4_e2m1", scales=(Scale("float8_e4m3fn", (1, 16)), Scale("float32", (1, -1))))
_EXPERTS, _TOP_K = 5, 2


def _int4(element: str, group: int, zero_point: bool = False) -> QuantSpec:
    return QuantSpec(element, scales=(Scale("float32", (1, group)),), zero_point=zero_point)


@pytest.fixture(scope="module")
def site() -> Site:
    return Site.open(discover(), "cpu")


class Case:
    """Random experts with biases, as they are stored and as a kernel of ``kind`` packs them.

    ``w2`` is the second matrix' spec where it is not ``spec``.
    """

    def __init__(
        self,
        site: Site,
        spec: QuantSpec,
        activation: str,
        dtype: torch.dtype,
        hidden: int,
        width: int,
        kind: type[LaidOutExperts[Any, Any]] = TritonTiledExperts,
        w2: QuantSpec | None = None,
    ) -> None:
        self.dtype, self.hidden = dtype, hidden
        plain = QuantSpec(dtype_name(dtype))
        self.workload = ExpertsWorkload(
            dtype=dtype_name(dtype),
            spec=(spec, plain),
            w2_spec=None if w2 is None else (w2, plain),
            activation=activation,
            num_experts=_EXPERTS,
            top_k=_TOP_K,
            hidden_size=hidden,
            intermediate_size=width,
        )
        generator = torch.Generator().manual_seed(0)
        self.stored: dict[str, torch.Tensor] = {}
        rows = width if activation == "relu2" else 2 * width
        for name, (n, k) in {"w13": (rows, hidden), "w2": (hidden, width)}.items():
            matrices = torch.randn(_EXPERTS, n, k, generator=generator) * k**-0.5
            each = [quantize_weight(matrix, spec if name == "w13" or w2 is None else w2) for matrix in matrices]
            self.stored |= {f"{name}.{slot}": torch.stack([one[slot] for one in each]) for slot in each[0]}
            self.stored[f"{name}.bias"] = torch.randn(_EXPERTS, n, generator=generator).to(dtype)
        ctx = site.context(dtype)
        self.kernel, self.reference = kind(ctx, self.workload), ReferenceExperts(ctx, self.workload)
        assert not kind.supports(self.workload, site.platform.info)
        self.packed = self.kernel.prepack(self.stored)

    def check(self, tokens: int, cut: object | None) -> None:
        """One step, with a pair of another rank's expert, within the family's error model."""
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, self.hidden, generator=generator).to(self.dtype)
        ids = torch.rand(tokens, _EXPERTS, generator=generator).argsort(-1)[:, :_TOP_K].int()
        ids[0, 1] = -1
        weights = torch.rand(tokens, _TOP_K, generator=generator)
        scratch = torch.empty(self.kernel.workspace_bytes(tokens), dtype=torch.uint8)
        call = ExpertsCall(x, ids, weights, self.packed, torch.full_like(x, float("nan")), scratch)
        if cut is None:
            self.kernel.apply(call)
        else:
            self.kernel.run(cut, call)
        own, truth = (self._by_reference(call, dtype) for dtype in (self.dtype, torch.float64))
        faults = compare("out", call.out, own, truth, ERRORS, call.out.device).faults
        assert not faults, "\n".join(map(str, faults))

    def _by_reference(self, call: ExpertsCall, dtype: torch.dtype) -> torch.Tensor:
        w = {name: x.to(dtype) if name.endswith("bias") else x for name, x in self.stored.items()}
        x = call.x.to(dtype)
        found = replace(call, x=x, w=w, out=torch.empty_like(x), workspace=torch.empty(0, dtype=torch.uint8))
        self.reference.apply(found)
        return found.out


_CASES = {
    "mxfp4": (MXFP4, "swiglu_oai", torch.float16, 96, 64),
    "nvfp4": (NVFP4, "relu2", torch.float16, 96, 80),
    "int4": (_int4("int4", 32), "silu_and_mul", torch.bfloat16, 96, 64),
    "uint4 with zero points": (_int4("uint4", 64, True), "silu_and_mul", torch.bfloat16, 128, 64),
    "rows": (_int4("int4", -1), "silu_and_mul", torch.float32, 96, 72),
}


@pytest.mark.parametrize("name", _CASES)
def test_equals_the_reference(site: Site, name: str) -> None:
    """One token, and several by the table, which lists pairs in place and by launches."""
    case = Case(site, *_CASES[name])
    found, wanted = case.kernel.unpack(case.packed), case.reference.unpack(case.stored)
    assert all(torch.equal(found[matrix].double(), wanted[matrix].double()) for matrix in wanted)
    for tokens in (1, 30):
        case.check(tokens, None)


@pytest.mark.parametrize(
    "cut",
    [ExpertTiles(1, 16, 4, 1, True), ExpertTiles(8, 32, 2, 1, True), ExpertTiles(32, 64, 4, 1)],
    ids=["rows of one", "split", "many"],
)
def test_cuts(site: Site, cut: ExpertTiles) -> None:
    Case(site, *_CASES["mxfp4"]).check(9, cut)


def test_sizes_that_tiles_do_not_divide_are_refused(site: Site) -> None:
    case = Case(site, *_CASES["mxfp4"])
    for workload, wanted in (
        (replace(case.workload, hidden_size=80), "32 of 80"),
        (replace(case.workload, intermediate_size=40), "32 of 40"),
    ):
        (reason,) = TritonTiledExperts.supports(workload, site.platform.info)
        assert reason.wanted == wanted
    rows = replace(case.workload, spec=(_int4("int4", -1), QuantSpec("bfloat16")), hidden_size=72, intermediate_size=76)
    found = TritonTiledExperts.supports(rows, site.platform.info)
    assert [(reason.wanted, reason.supported) for reason in found] == [
        ("72", "multiples of 16"),
        ("76", "multiples of 8"),
    ]


def _job(target: str, cut: ExpertTiles, gated: bool) -> Job:
    pointers = {"x": "*bf16", "words": "*i32", "scales": "*u8", "out": "*bf16", "bias": "*bf16"}
    constexprs = {
        "zero_points": None,
        "outer": None,
        "ACTIVATION": "swiglu_oai" if gated else None,
        "GATED": gated,
        "GROUP": 32,
        "ZERO_POINT": 0,
        "STEP": 1.0,
        "E2M1": True,
        "TILE": 128,
        "WHOLE": False,
        "EVEN": True,
        "SPLIT": cut.num_warps if cut.split else 1,
        "LISTED_IN_PLACE": 1 if cut.rows == 1 else 128 if cut.rows <= 16 else 0,
        "BLOCK_M": cut.rows,
        "BLOCK_N": cut.columns,
        "STAGES": cut.num_stages,
    }
    sizes = dict.fromkeys(("N", "K", "T", "words_stride", "scales_stride"), "i32:16")
    signature = {**pointers, "ids": "*i32", "listed": "*i32", "num_pairs": "i32", **sizes, "divisor": "i32"}
    kernel = "hardpoint.kernels.tiled_experts:multiply_tiles"
    return Job(kernel, signature, constexprs, target, cut.num_warps, cut.num_stages)


def _cuts() -> list[ExpertTiles]:
    found: Table[ExpertTiles] = table("experts_int4", ExpertTiles, (("rows", int), ("pairs", int), ("itemsize", int)))
    assert (FOLDER / "experts_int4.toml").is_file()
    return [cut for cut in found.uses if cut.num_stages > 1]


def test_compiles() -> None:
    """In the tiles of the table, without spills; codes go from memory to matrix units."""
    jobs = [_job("sm_90", cut, gated) for cut in _cuts()[::2] for gated in (True, False)]
    for compiled in compile_kernels(jobs):
        assert not compiled.spilled, compiled
        assert compiled.shared <= SHARED_KIB["sm_90"] << 10
        unit = "mma.sync" if compiled.job.constexprs["SPLIT"] > 1 else "wgmma.mma_async"
        assert compiled.count(unit), compiled.assembly


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_100", "sm_120", "gfx942", "gfx950"])
def test_compiles_for_others(target: str) -> None:
    """With fewer stages where shared memory is small."""
    for cut in _cuts():
        (compiled,) = compile_in_stages_that_fit([_job(target, cut, True)], 300)
        assert compiled.shared <= SHARED_KIB[target] << 10
