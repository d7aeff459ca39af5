"""The experts' kernels, held to the family's reference in the interpreter, and compiled for other devices."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hardpoint.bench.experts_compiling import CompilingProcesses
from hardpoint.cli.main import run
from hardpoint.conformance.families.experts import ERRORS, ExpertsProbe
from hardpoint.conformance.plan import Row
from hardpoint.conformance.site import Site, Subject
from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.experts.middle import names
from hardpoint.kernels import experts_tiling, experts_tuning, grouped_matmul, pair_lists
from hardpoint.kernels.experts import TritonGroupedExperts
from hardpoint.kernels.experts_tiling import LayerShape, MatmulShape, Tiling, TilingTable
from hardpoint.numerics import quantize_weight
from hardpoint.ops.error_model import compare
from hardpoint.ops.judge import judge_call
from hardpoint.plugin_host import discover
from hardpoint.reference.experts import ReferenceExperts
from hardpoint_plugin_api import (
    BuildContext,
    ConfigError,
    ExpertsCall,
    ExpertsKernel,
    ExpertsWorkload,
    QuantSpec,
    Scale,
)
from tests.kernels.compiling import SHARED_KIB, TARGETS, Compiled, Job, compile_in_stages_that_fit, compile_kernels
from tests.support.attention import PluginConfigOnly
from tests.support.specs import SPECS

ROW: Row = {
    "dtype": "float32",
    "spec": "plain",
    "activation": "silu_and_mul",
    "format": "standard",
    "batch": "few",
    "mixture": "8x2",
    "widths": "even",
    "absent": "some-elsewhere",
    "bias": "no-bias",
}
ROWS: list[Row] = [
    ROW,
    ROW | {"dtype": "bfloat16", "batch": "many", "absent": "here"},
    ROW | {"batch": "one", "mixture": "60x4", "activation": "relu2"},
    ROW | {"dtype": "float16", "mixture": "5x5", "widths": "wide", "absent": "all-elsewhere"},
    ROW | {"batch": "none", "mixture": "1x1", "activation": "swiglu_oai"},
    ROW | {"dtype": "bfloat16", "mixture": "5x5", "widths": "odd", "activation": "gelu_tanh_and_mul"},
    ROW | {"spec": "int8-rows", "mixture": "5x5", "widths": "odd", "activation": "relu2"},
    ROW | {"spec": "int8-dynamic", "dtype": "bfloat16"},
    ROW | {"spec": "fp8-tiles", "dtype": "bfloat16", "widths": "wide"},
    ROW | {"spec": "uint4-groups", "dtype": "float16", "absent": "here"},
    ROW | {"spec": "mxfp4", "dtype": "float16", "bias": "bias"},
    ROW | {"spec": "nvfp4", "dtype": "float16"},
    ROW | {"spec": "nvfp4", "batch": "many", "activation": "relu2", "bias": "bias"},
    ROW | {"mixture": "60x4", "activation": "relu2", "bias": "bias"},
]
LARGE = [
    ROW | {"spec": "mxfp4", "dtype": "float16", "widths": "wide", "bias": "bias"},
    ROW | {"batch": "many", "mixture": "60x4", "activation": "relu2", "bias": "bias"},
]
"""Rows that take seconds: others have the same widths, or as many tokens, with other specs and mixtures."""
MIXTRAL, QWEN3 = LayerShape(8, 14336, 4096, 2, "bfloat16"), LayerShape(128, 768, 2048, 2, "bfloat16")
SMALL = ExpertsWorkload(
    dtype="bfloat16",
    activation="silu_and_mul",
    num_experts=3,
    top_k=1,
    hidden_size=48,
    intermediate_size=32,
)
LATER = ("sm_100", "gfx942", "gfx950")
"""Targets that the nightly tests compile for."""


@pytest.fixture(scope="module")
def site() -> Site:
    return Site.open(discover(), "cpu")


@pytest.mark.parametrize(
    "row",
    [*ROWS, *(pytest.param(row, marks=pytest.mark.nightly) for row in LARGE)],
    ids=lambda row: "-".join(map(str, row.values())),
)
def test_meets_the_error_model(site: Site, row: Row) -> None:
    offer = next(o for o in site.plugins.offers("experts") if o.contribution.name == "reference")
    subject = replace(Subject.load(offer, site), target=TritonGroupedExperts)
    found = judge_call(ExpertsProbe(subject, row, SPECS).call(3))
    assert not found.faults, "\n".join(map(str, found.faults))


class Layer:
    """One layer's experts with random weights, and a step's tokens."""

    def __init__(
        self,
        site: Site,
        tokens: int,
        experts: int,
        top_k: int,
        *,
        dtype: torch.dtype = torch.float32,
        activation: str = "silu_and_mul",
        hidden: int = 48,
        width: int = 32,
        device: torch.device | None = None,
        specs: tuple[QuantSpec, QuantSpec] | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.dtype, self.ctx = dtype, site.context(dtype)
        self.workload = ExpertsWorkload(
            dtype=dtype_name(dtype),
            spec=specs,
            activation=activation,
            num_experts=experts,
            top_k=top_k,
            hidden_size=hidden,
            intermediate_size=width,
        )
        rows = width * 2 if activation.endswith(("_and_mul", "_oai")) else width
        self.x = torch.randn(tokens, hidden, generator=generator).to(device, dtype)
        self.ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top_k].int().to(device)
        self.weights = torch.rand(tokens, top_k, generator=generator).to(device)
        w13 = torch.randn(experts, rows, hidden, generator=generator) * hidden**-0.5
        w2 = torch.randn(experts, hidden, width, generator=generator) * width**-0.5
        self.w: dict[str, torch.Tensor] = {}
        for name, matrices in (("w13", w13), ("w2", w2)):
            each = [quantize_weight(m, specs[0]) if specs else {"weight": m.to(dtype)} for m in matrices]
            self.w |= {f"{name}.{slot}": torch.stack([one[slot] for one in each]).to(device) for slot in each[0]}

    def faults(self, tiling: Tiling | None = None) -> str:
        """Faults of the kernel's results, in the given tiles."""
        kernel = TritonGroupedExperts(self.ctx, self.workload)
        out, scratch = torch.full_like(self.x, float("nan")), torch.empty(kernel.workspace_bytes(len(self.x)) + 7)
        call = ExpertsCall(self.x, self.ids, self.weights, self.w, out, scratch.view(torch.uint8))
        if tiling is None:
            kernel.apply(call)
        else:
            kernel.run(tiling, call)
        wide = self.w if self.workload.spec else {name: w.double() for name, w in self.w.items()}
        own, truth = (self.run(ReferenceExperts, x, w) for x, w in ((self.x, self.w), (self.x.double(), wide)))
        return "\n".join(map(str, compare("out", out, own, truth, ERRORS, out.device).faults))

    def run(self, kind: type[ExpertsKernel], x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
        out = torch.empty_like(x)
        scratch = torch.empty(0, dtype=torch.uint8)
        kind(self.ctx, self.workload).apply(ExpertsCall(x, self.ids, self.weights, w, out, scratch))
        return out


def shape(columns: int, depth: int, described: bool = False) -> MatmulShape:
    return MatmulShape(columns, depth, 4, 2, described)


@pytest.mark.parametrize(("rows", "dtype"), [(16, torch.float32), (32, torch.bfloat16), (128, torch.bfloat16)])
def test_every_way_to_bring_pairs_together(site: Site, rows: int, dtype: torch.dtype) -> None:
    """In place and listed; tiles of one, some and more rows than there are, the last one whole and half."""
    tokens = 190 if rows == 128 else 40
    layer = Layer(site, tokens, 3, 2, dtype=dtype)
    layer.ids[: tokens // 4, 0] = -1
    layer.ids[tokens // 4 :] = torch.tensor([1, 2])
    layer.ids[tokens // 2 :, 1] = -1
    assert not layer.faults(Tiling(rows, shape(64, 32), shape(16, 16)))


@pytest.mark.parametrize("garbage", [-7, -(2**30), 2**30])
def test_a_list_that_nobody_made_is_not_followed(site: Site, garbage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where kernels are compiled ahead, and the launches that make the list are left out."""
    layer = Layer(site, 100, 4, 2)
    kernel = TritonGroupedExperts(layer.ctx, layer.workload)
    monkeypatch.setattr(kernel._lists, "_write", lambda ids, listed, size, rows: listed.fill_(garbage))
    scratch = torch.full((kernel.workspace_bytes(100),), 5, dtype=torch.uint8)
    before = scratch.clone()
    kernel.run(
        experts_tiling.of_height(32, 200, kernel.shape),
        ExpertsCall(layer.x, layer.ids, layer.weights, layer.w, torch.empty_like(layer.x), scratch),
    )
    results = 200 * (32 + 48) * 4
    assert torch.equal(scratch[:results], before[:results]), "rows were written, or read, at places out of any list"


@pytest.mark.parametrize("activation", ["silu_and_mul", "relu2"])
def test_weights_read_through_descriptors(site: Site, activation: str) -> None:
    """Blocks do not divide columns or depth."""
    layer = Layer(site, 5, 3, 2, dtype=torch.bfloat16, activation=activation, width=40)
    assert not layer.faults(Tiling(16, shape(32, 32, described=True), shape(32, 32, described=True)))


def test_weights_that_were_read_are_not_kept(site: Site) -> None:
    """Sleep and new weights drop them while their kernel lives on."""
    layer, tiling = Layer(site, 5, 3, 2, dtype=torch.bfloat16), Tiling(16, *[shape(32, 32, described=True)] * 2)
    kernel, out = TritonGroupedExperts(layer.ctx, layer.workload), torch.empty_like(layer.x)
    scratch = torch.empty(kernel.workspace_bytes(5), dtype=torch.uint8)
    kernel.run(tiling, ExpertsCall(layer.x, layer.ids, layer.weights, layer.w, out, scratch))
    storages = [StorageWeakRef(weight.untyped_storage()) for weight in layer.w.values()]
    layer.w.clear()
    gc.collect()
    assert all(storage.expired() for storage in storages)


def test_pairs_of_many_programs_keep_their_order(site: Site) -> None:
    layer = Layer(site, 600, 5, 1, hidden=16, width=16)
    layer.ids[::3] = -1
    assert not layer.faults(Tiling(64, shape(16, 16), shape(16, 16)))


@pytest.mark.parametrize("activation", list(names()))
def test_every_activation(site: Site, activation: str) -> None:
    assert not Layer(site, 3, 4, 2, activation=activation).faults()


def scaled(element: str, rows: int, columns: int, static: bool = True) -> QuantSpec:
    return QuantSpec(element, scales=(Scale("float32", (rows, columns)),), static=static)


FP8 = "float8_e4m3fn"
BFLOAT16 = QuantSpec("bfloat16")
QUANTIZED = {
    "fp8 rows, rounded": (scaled(FP8, 1, -1), scaled(FP8, 1, -1, static=False)),
    "fp8 tiles, rounded by groups": (scaled(FP8, 32, 32), scaled(FP8, 1, 32, static=False)),
    "fp8 tensor": (scaled(FP8, -1, -1), BFLOAT16),
    "int8 groups": (scaled("int8", 1, 32), BFLOAT16),
    "int4 rows": (scaled("int4", 1, -1), BFLOAT16),
    "int4 groups": (scaled("int4", 1, 32), BFLOAT16),
    "mxfp4": (QuantSpec("float4_e2m1", scales=(Scale("float8_e8m0fnu", (1, 32)),)), BFLOAT16),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_specs_that_the_kit_does_not_try(site: Site, name: str) -> None:
    layer = Layer(site, 2, 3, 2, dtype=torch.bfloat16, hidden=96, width=80, specs=QUANTIZED[name])
    assert not TritonGroupedExperts.supports(layer.workload, site.platform.info)
    assert not layer.faults()


def test_what_it_cannot_multiply_is_refused(site: Site) -> None:
    rounded = scaled(FP8, 1, -1, static=False)
    for specs, dtype, wanted in (
        ((scaled("uint4", 1, 2), BFLOAT16), "bfloat16", "2"),
        ((scaled("int4", 1, 16), BFLOAT16), "bfloat16", "16"),
        ((scaled("float4_e2m1", 1, 16), BFLOAT16), "bfloat16", "16"),
        ((scaled(FP8, 1, 16), rounded), "bfloat16", "16"),
        ((scaled("int8", 1, 48), BFLOAT16), "bfloat16", "48"),
        ((scaled(FP8, 1, -1), rounded), "float32", "float32"),
    ):
        (reason,) = TritonGroupedExperts.supports(ExpertsWorkload(dtype=dtype, spec=specs), site.platform.info)
        assert reason.wanted == wanted


def test_weights_beyond_32_bits(site: Site) -> None:
    """Only the last expert's are ever touched: the others take no memory."""
    hidden, width, experts = 2048, 1024, 520
    layer = Layer(site, 1, 1, 1, dtype=torch.bfloat16, hidden=hidden, width=width)
    few = layer.w
    far = {name: torch.empty(experts, *w.shape[1:], dtype=w.dtype) for name, w in few.items()}
    assert far["w13.weight"][:-1].numel() > 2**31
    for name, w in few.items():
        far[name][-1] = w[0]
    layer.workload = replace(layer.workload, num_experts=experts)
    layer.w, layer.ids = far, torch.full((1, 1), experts - 1, dtype=torch.int32)
    kernel = TritonGroupedExperts(layer.ctx, layer.workload)
    out, scratch = torch.empty_like(layer.x), torch.empty(kernel.workspace_bytes(1), dtype=torch.uint8)
    tiling = Tiling(16, shape(1024, 1024), shape(1024, 1024))
    kernel.run(tiling, ExpertsCall(layer.x, layer.ids, layer.weights, far, out, scratch))
    layer.ids = torch.zeros_like(layer.ids)
    torch.testing.assert_close(out, layer.run(ReferenceExperts, layer.x, few), rtol=0.05, atol=0.02)


@pytest.mark.accelerator
def test_results_beyond_32_bits() -> None:
    """Of more than 2**31 elements, on a device: too many pairs for the interpreter."""
    here = Site.open(discover())
    layer = Layer(here, 140_000, 16, 8, dtype=torch.bfloat16, hidden=2048, width=16, device=here.device)
    kernel = TritonGroupedExperts(layer.ctx, layer.workload)
    scratch = torch.empty(kernel.workspace_bytes(len(layer.x)), dtype=torch.uint8, device=here.device)
    out = torch.full_like(layer.x, float("nan"))
    kernel.apply(ExpertsCall(layer.x, layer.ids, layer.weights, layer.w, out, scratch))
    x, ids, weights = layer.x, layer.ids, layer.weights
    for part in (slice(0, 50), slice(131_040, 131_100), slice(-50, None)):
        layer.ids, layer.weights = ids[part], weights[part]
        torch.testing.assert_close(out[part], layer.run(ReferenceExperts, x[part], layer.w), rtol=0.02, atol=0.02)


# Tiles


def with_tables(ctx: Context, folder: Path) -> Context:
    return replace(ctx, config=ctx.config.model_copy(update={"tuning_tables": str(folder)}))


def test_tuned_tiles_are_those_of_the_exact_device_and_shape(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ctx = with_tables(site.context(torch.bfloat16), tmp_path)
    few, many = (Tiling(rows, shape(64, 64), shape(32, 128)) for rows in (16, 64))
    name = experts_tiling.file_name(ctx.device.name, MIXTRAL)
    experts_tiling.write(tmp_path / name, {64: few, 4096: many})
    with caplog.at_level(logging.INFO):
        table = TilingTable.of(ctx, MIXTRAL)
        assert not caplog.records
        assert [table.of_pairs(n) for n in (1, 64, 500, 600, 10**6)] == [few, few, few, many, many]
        for _ in range(2):
            other = TilingTable.of(ctx, replace(MIXTRAL, width=1792))
        (record,) = caplog.records
    assert name.replace("14336", "1792") in record.getMessage()
    assert other.of_pairs(64) == experts_tiling.by_rule(64, replace(MIXTRAL, width=1792))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSONDecodeError"),
        ('{"schema": 2, "tilings": {}}', "schema 2 is not 1"),
        ('{"schema": 1, "tilings": {"8": {"rows": 16}}}', "w13"),
        ('{"schema": 1, "tilings": {}}', "got none"),
        ('{"schema": 1, "tilings": {"8": {"rows": 16, "w31": {}}}}', "8 pairs: unknown key 'w31'; did you mean 'w13'"),
    ],
)
def test_a_file_that_is_not_right_is_named(site: Site, tmp_path: Path, text: str, message: str) -> None:
    ctx = with_tables(site.context(torch.bfloat16), tmp_path)
    path = tmp_path / experts_tiling.file_name(ctx.device.name, MIXTRAL)
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        TilingTable.of(ctx, MIXTRAL)
    assert str(path) in str(raised.value)


def test_tuning_writes_the_fastest_that_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experts_tuning, "_RECORDED", 1)
    monkeypatch.setattr(experts_tuning, "_RUNS", 1)
    monkeypatch.setattr(experts_tuning, "_CHOICES", {"columns": (16, 32), "depth": (128,)})
    shape_of_layer = ["--experts", "3", "--top-k", "1", "--hidden-size", "48", "--intermediate-size", "32"]
    arguments = ["tune", "experts", *shape_of_layer, "--platform", "cpu", "--tokens", "2", "--output", str(tmp_path)]
    assert run(arguments) == 0
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("E=3,N=32,device_name=")
    assert path.name.endswith(",dtype=bfloat16.json")
    ((pairs, tiling),) = experts_tiling.read(path).items()
    assert pairs == 2
    assert tiling.rows == 16
    assert {tiling.w13.columns, tiling.w2.columns} <= {16, 32}
    assert str(path) in capsys.readouterr().out.replace("\n", "")


def test_what_is_measured_is_announced_for_compilation(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_tuning, "_RECORDED", 1)
    monkeypatch.setattr(experts_tuning, "_RUNS", 1)
    monkeypatch.setattr(experts_tuning, "_CHOICES", {"columns": (16, 32), "depth": (128,)})
    layer = experts_tuning.RandomLayer(site.context(torch.bfloat16), SMALL)
    announced: list[Tiling] = []
    tried: list[None] = []

    def announce(tokens: int, tilings: Sequence[Tiling]) -> None:
        assert tokens == 2
        announced.extend(tilings)

    found = experts_tuning.Tuner(site.platform, layer, announce).tune(2, lambda: tried.append(None))
    assert found.tiling in announced
    assert len(tried) == len(announced) == len(set(announced))


def test_processes_that_compile_may_die(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    tilings = [Tiling(16, shape(columns, 32), shape(32, 32)) for columns in (16, 32)]
    with CompilingProcesses(site.platform.name, SMALL) as compile_ahead:
        compile_ahead(2, [*tilings, Tiling(16, shape(17, 32), shape(32, 32))])  # no such tile: found out when measured
        assert compile_ahead._pool is not None
        for process in list(compile_ahead._pool._processes.values()):
            process.kill()
        assert not caplog.records
        compile_ahead(2, tilings)
        assert "a process that compiles tiles died" in caplog.text
        compile_ahead(2, tilings)


@pytest.mark.accelerator
def test_tuning_on_a_device(tmp_path: Path) -> None:
    shape_of_layer = ["--experts", "8", "--top-k", "2", "--hidden-size", "256", "--intermediate-size", "128"]
    assert run(["tune", "experts", *shape_of_layer, "--tokens", "16", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    assert list(experts_tiling.read(path)) == [32]


def test_tuning_where_no_kernel_runs_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    shape_of_layer = ["--experts", "3", "--hidden-size", "48", "--intermediate-size", "32", "--platform", "cpu"]
    assert run(["tune", "experts", *shape_of_layer, "--top-k", "4"]) == 2
    assert "--top-k 4 is more than the 3 of --experts" in capsys.readouterr().err
    child = [sys.executable, "-m", "hardpoint.cli", "tune", "experts", *shape_of_layer, "--top-k", "1"]
    done = subprocess.run(child, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "hardpoint: error: platform cpu runs no Triton kernels" in done.stderr


# Compiled for other devices


def tile_job(target: str, tiling: Tiling, *, gated: bool, lanes: int = 0, **form: Any) -> Job:
    """``form``: the pointers to weights and activations, and constexprs, of a pair of specs."""
    chosen = tiling.w13 if gated else tiling.w2
    pointers: dict[str, str] = dict.fromkeys(("x", "weight", "out"), "*bf16") | {"ids": "*i32", "listed": "*i32"}
    if chosen.described:
        pointers["weight"] = f"tensordesc<bf16[{chosen.columns},{chosen.depth}]>"
    constexprs: dict[str, Any] = {
        "ACTIVATION": "silu" if gated else None,
        "GATED": gated,
        **dict.fromkeys(("x_scale", "weight_scale", "zero_point", "outer", "bias")),
        **dict.fromkeys(("SCALE_ROWS", "GROUP", "SHORT", "X_GROUP", "NIBBLES", "FLIP", "E2M1"), 0),
        "LISTED_IN_PLACE": lanes,
        "DESCRIBED": chosen.described,
        "WHOLE_DEPTH": True,
        "HALF_ROWS": tiling.rows >= 128,
        "ROWS": tiling.rows,
        "COLUMNS": chosen.columns,
        "DEPTH": chosen.depth,
    }
    for name, value in form.items():
        (pointers if isinstance(value, str) else constexprs)[name] = value
    constexprs = {name: value for name, value in constexprs.items() if name not in pointers}
    numbers = {"num_pairs": "i32", "columns": "i32:16", "depth": "i32:16", "divisor": "i32"}
    name = f"{grouped_matmul.__name__}:expert_tiles"
    return Job(name, pointers | numbers, constexprs, target, chosen.num_warps, chosen.num_stages)


@pytest.mark.parametrize("target", [pytest.param(t, marks=pytest.mark.nightly if t in LATER else ()) for t in TARGETS])
def test_compiles(target: str) -> None:
    """Qwen3-30B-A3B's experts at 8 and at 32768 pairs, and the lists of many."""
    few, many = (experts_tiling.by_rule(pairs, QWEN3) for pairs in (8, 32768))
    described = Tiling(128, *(replace(shape, described=True) for shape in (many.w13, many.w2)))
    lists = {"ids": "*i32", "counts": "*i32", "listed": "*i32", "num_pairs": "i32", "size": "i32"}
    sizes = {"PAIRS": 256, "EXPERTS": 128}
    module = pair_lists.__name__
    found = compile_kernels(
        [
            *(tile_job(target, few, gated=gated, lanes=8) for gated in (True, False)),
            *(tile_job(target, many, gated=gated) for gated in (True, False)),
            Job(f"{module}:count_pairs", lists, sizes, target),
            Job(f"{module}:place_pairs", lists, sizes | {"ROWS": 128, "COMPARED": 32, "COUNTS": 64}, target, 8),
            *(tile_job(target, described, gated=gated) for gated in (True, False) if target.startswith("sm_")),
        ]
    )
    assert not [compiled for compiled in found if compiled.spilled]
    if target == "sm_90":
        assert [uses(compiled, "wgmma.mma_async") for compiled in found[:4]] == [False, False, True, True]
        assert all(uses(compiled, "cp.async") for compiled in found[:4])
        assert all(uses(compiled, "cp.async.bulk.tensor") for compiled in found[6:])


@pytest.mark.nightly
@pytest.mark.parametrize("layer", [QWEN3, MIXTRAL], ids=["qwen3", "mixtral"])
def test_compiled_where_shared_memory_is_small(layer: LayerShape) -> None:
    """With fewer stages."""
    tilings = {experts_tiling.by_rule(pairs, layer) for pairs in (2, 100, 512, 4096, 32768)}
    jobs = [tile_job("sm_89", tiling, gated=gated) for tiling in tilings for gated in (True, False)]
    for compiled in compile_in_stages_that_fit(jobs, seconds=400):
        assert compiled.shared <= SHARED_KIB["sm_89"] << 10, compiled


FP8_TILES: dict[str, Any] = {"weight": "*fp8e4nv", "weight_scale": "*fp32", "SCALE_ROWS": 128, "GROUP": 128}
FORMS: dict[str, dict[str, Any]] = {
    "fp8 tiles": FP8_TILES,
    "fp8 tiles, rounded by groups": FP8_TILES | {"x": "*fp8e4nv", "x_scale": "*fp32", "X_GROUP": 128},
    "int8 rows": {"weight": "*i8", "weight_scale": "*fp32", "SCALE_ROWS": 1},
    "int8 rows, rounded": {"weight": "*i8", "weight_scale": "*fp32", "SCALE_ROWS": 1, "x": "*i8", "x_scale": "*fp32"},
    "uint4 groups": FP8_TILES | {"weight": "*u8", "zero_point": "*u8", "SCALE_ROWS": 1, "NIBBLES": True},
    "mxfp4": {
        "weight": "*u8",
        "weight_scale": "*u8",
        "bias": "*bf16",
        "SCALE_ROWS": 1,
        "SHORT": 32,
        "NIBBLES": True,
        "E2M1": True,
        "DEPTH": 64,
    },
    "mxfp4 by rounds": {
        "x": "*fp16",
        "weight": "*u8",
        "weight_scale": "*u8",
        "SCALE_ROWS": 1,
        "GROUP": 32,
        "NIBBLES": True,
        "E2M1": True,
        "DEPTH": 32,
    },
    "nvfp4": {
        "weight": "*u8",
        "weight_scale": "*u8",
        "outer": "*fp32",
        "SCALE_ROWS": 1,
        "SHORT": 16,
        "NIBBLES": True,
        "E2M1": True,
        "DEPTH": 64,
    },
}


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
def test_quantized_forms_compile(form: str) -> None:
    layer = replace(QWEN3, by_round=True)
    jobs = [
        tile_job("sm_90", experts_tiling.by_rule(pairs, layer), gated=gated, lanes=lanes, **FORMS[form])
        for pairs, lanes in ((256, 256), (32768, 0))
        for gated in (True, False)
    ]
    assert not [compiled for compiled in compile_kernels(jobs) if compiled.spilled]


def test_nvfp4_compiles_for_rdna() -> None:
    """In the tiles of the ROCm plugin's table. In core's, Triton 3.7.1 fails at the layouts of WMMA."""
    device = discover().devices()["rx9070xt"]
    ctx = PluginConfigOnly({}, device=device, tuning_folders=discover().tuning_folders("rocm"))
    layer = replace(QWEN3, element="float4_e2m1", by_round=True)
    tiling = experts_tiling.by_rule(256, layer, experts_tiling.rule_table(cast(BuildContext, ctx)))
    jobs = [tile_job(device.arch, tiling, gated=gated, **FORMS["nvfp4"]) for gated in (True, False)]
    for compiled in compile_kernels(jobs):
        assert not compiled.spilled, compiled
        assert uses(compiled, "v_wmma"), compiled


def uses(compiled: Compiled, mnemonic: str) -> bool:
    return compiled.count(mnemonic) > 0
