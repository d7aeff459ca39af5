"""The experts' kernels, held to the family's reference in the interpreter, and compiled for other devices."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.cli.main import run
from hardpoint.conformance.families.experts import ERRORS, ExpertsProbe
from hardpoint.conformance.plan import Row
from hardpoint.conformance.site import Site, Subject
from hardpoint.experts.middle import names
from hardpoint.experts.reference import ReferenceExperts
from hardpoint.kernels import experts_tiling, experts_tuning, grouped_matmul
from hardpoint.kernels.experts_tiling import MatmulShape, Tiling, TilingTable
from hardpoint.kernels.grouped_matmul import TritonGroupedExperts
from hardpoint.ops.error_model import compare
from hardpoint.ops.judge import judge_call
from hardpoint.plugins import discover
from hardpoint_plugin_api import ConfigError, ExpertsKernel, ExpertsWorkload
from tests.kernels.compiling import TARGETS, Compiled, Job, compile_kernels

ROW: Row = {
    "dtype": "float32",
    "spec": "plain",
    "activation": "silu_and_mul",
    "format": "standard",
    "batch": "few",
    "mixture": "8x2",
    "widths": "even",
    "absent": "some-elsewhere",
}
ROWS: list[Row] = [
    ROW,
    ROW | {"dtype": "bfloat16", "batch": "many", "absent": "here"},
    ROW | {"batch": "one", "mixture": "60x4", "activation": "relu2"},
    ROW | {"dtype": "float16", "mixture": "5x5", "widths": "wide", "absent": "all-elsewhere"},
    ROW | {"batch": "none", "mixture": "1x1", "activation": "swiglu_oai"},
    ROW | {"dtype": "bfloat16", "batch": "many", "mixture": "5x5", "widths": "odd", "activation": "gelu_tanh_and_mul"},
]
LATER = ("sm_100", "gfx950")
"""Targets that the nightly tests compile for."""


@pytest.fixture(scope="module")
def site() -> Site:
    return Site.open(discover(), "cpu")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_meets_the_error_model(site: Site, row: Row) -> None:
    offer = next(o for o in site.plugins.offers("experts") if o.contribution.name == "reference")
    subject = replace(Subject.load(offer, site), target=TritonGroupedExperts)
    found = judge_call(ExpertsProbe(subject, row).call(3))
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
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.dtype, self.ctx = dtype, site.context(dtype)
        self.workload = ExpertsWorkload(
            activation=activation, num_experts=experts, top_k=top_k, hidden_size=hidden, intermediate_size=width
        )
        rows = width * 2 if activation.endswith(("_and_mul", "_oai")) else width
        self.x = torch.randn(tokens, hidden, generator=generator).to(device, dtype)
        self.ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top_k].int().to(device)
        self.weights = torch.rand(tokens, top_k, generator=generator).to(device)
        w13 = torch.randn(experts, rows, hidden, generator=generator) * hidden**-0.5
        w2 = torch.randn(experts, hidden, width, generator=generator) * width**-0.5
        self.w = {"w13.weight": w13.to(device, dtype), "w2.weight": w2.to(device, dtype)}

    def faults(self, tiling: Tiling | None = None) -> str:
        """What is wrong with the kernel's results, in the given tiles."""
        kernel = TritonGroupedExperts(self.ctx, self.workload)
        out, scratch = torch.full_like(self.x, float("nan")), torch.empty(kernel.workspace_bytes(len(self.x)) + 7)
        given = self.ids, self.weights, self.w, out, scratch.view(torch.uint8)
        if tiling is None:
            kernel.apply(self.x, *given)
        else:
            kernel.run(tiling, self.x, *given)
        wide = {name: w.double() for name, w in self.w.items()}
        own, truth = (self.run(ReferenceExperts, x, w) for x, w in ((self.x, self.w), (self.x.double(), wide)))
        return "\n".join(map(str, compare("out", out, own, truth, ERRORS, out.device).faults))

    def run(self, kind: type[ExpertsKernel], x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
        out = torch.empty_like(x)
        kind(self.ctx, self.workload).apply(x, self.ids, self.weights, w, out, torch.empty(0, dtype=torch.uint8))
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


@pytest.mark.parametrize("activation", ["silu_and_mul", "relu2"])
def test_weights_read_through_descriptors(site: Site, activation: str) -> None:
    """Blocks do not divide columns or depth."""
    layer = Layer(site, 5, 3, 2, dtype=torch.bfloat16, activation=activation, width=40)
    assert not layer.faults(Tiling(16, shape(32, 32, described=True), shape(32, 32, described=True)))


def test_pairs_of_many_programs_keep_their_order(site: Site) -> None:
    layer = Layer(site, 600, 5, 1, hidden=16, width=16)
    layer.ids[::3] = -1
    assert not layer.faults(Tiling(64, shape(16, 16), shape(16, 16)))


@pytest.mark.parametrize("activation", list(names()))
def test_every_activation(site: Site, activation: str) -> None:
    assert not Layer(site, 3, 4, 2, activation=activation).faults()


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
    kernel.run(tiling, layer.x, layer.ids, layer.weights, far, out, scratch)
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
    kernel.apply(layer.x, layer.ids, layer.weights, layer.w, out, scratch)
    x, ids, weights = layer.x, layer.ids, layer.weights
    for part in (slice(0, 50), slice(131_040, 131_100), slice(-50, None)):
        layer.ids, layer.weights = ids[part], weights[part]
        torch.testing.assert_close(out[part], layer.run(ReferenceExperts, x[part], layer.w), rtol=0.02, atol=0.02)


# Tiles


def test_tuned_tiles_are_those_of_the_exact_device_and_shape(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(experts_tiling, "DIRECTORY", tmp_path)
    ctx = site.context(torch.bfloat16)
    few, many = (Tiling(rows, shape(64, 64), shape(32, 128)) for rows in (16, 64))
    name = experts_tiling.file_name(ctx.device.name, 8, 768, torch.bfloat16)
    experts_tiling.write(tmp_path / name, {64: few, 4096: many})
    with caplog.at_level(logging.INFO):
        table = TilingTable.of(ctx, 8, 768, 2048)
        assert not caplog.records
        assert [table.of_pairs(n) for n in (1, 64, 500, 600, 10**6)] == [few, few, few, many, many]
        for _ in range(2):
            other = TilingTable.of(ctx, 8, 769, 2048)
        (record,) = caplog.records
    assert name.replace("768", "769") in record.getMessage()
    assert other.of_pairs(64) == experts_tiling.by_rule(64, 8, 769, 2048, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSONDecodeError"),
        ('{"schema": 2, "tilings": {}}', "schema 2 is not 1"),
        ('{"schema": 1, "tilings": {"8": {"rows": 16}}}', "w13"),
        ('{"schema": 1, "tilings": {}}', "got none"),
    ],
)
def test_a_file_that_is_not_right_is_named(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setattr(experts_tiling, "DIRECTORY", tmp_path)
    ctx = site.context(torch.bfloat16)
    path = tmp_path / experts_tiling.file_name(ctx.device.name, 8, 768, torch.bfloat16)
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        TilingTable.of(ctx, 8, 768, 2048)
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


# Compiled for other devices


def tile_job(target: str, tiling: Tiling, *, gated: bool, lanes: int = 0) -> Job:
    chosen = tiling.w13 if gated else tiling.w2
    pointers: dict[str, str] = dict.fromkeys(("x", "weight", "out"), "*bf16") | {"ids": "*i32", "listed": "*i32"}
    constexprs: dict[str, Any] = {
        "ACTIVATION": "silu" if gated else None,
        "GATED": gated,
        "LISTED_IN_PLACE": lanes,
        "DESCRIBED": chosen.described,
        "WHOLE_DEPTH": True,
        "HALF_ROWS": tiling.rows >= 128,
        "ROWS": tiling.rows,
        "COLUMNS": chosen.columns,
        "DEPTH": chosen.depth,
    }
    if chosen.described:
        pointers["weight"] = f"tensordesc<bf16[{chosen.columns},{chosen.depth}]>"
    numbers = {"num_pairs": "i32", "columns": "i32:16", "depth": "i32:16", "divisor": "i32"}
    name = f"{grouped_matmul.__name__}:_expert_tiles"
    return Job(name, pointers | numbers, constexprs, target, chosen.num_warps, chosen.num_stages)


@pytest.mark.parametrize("target", [pytest.param(t, marks=pytest.mark.nightly if t in LATER else ()) for t in TARGETS])
def test_compiles(target: str) -> None:
    """Qwen3-30B-A3B's experts at 8 and at 32768 pairs, and the lists of many."""
    few, many = (experts_tiling.by_rule(pairs, 128, 768, 2048, 2) for pairs in (8, 32768))
    described = Tiling(128, *(replace(shape, described=True) for shape in (many.w13, many.w2)))
    lists = {"ids": "*i32", "counts": "*i32", "listed": "*i32", "num_pairs": "i32", "size": "i32"}
    sizes = {"PAIRS": 512, "EXPERTS": 128}
    module = grouped_matmul.__name__
    found = compile_kernels(
        [
            *(tile_job(target, few, gated=gated, lanes=8) for gated in (True, False)),
            *(tile_job(target, many, gated=gated) for gated in (True, False)),
            Job(f"{module}:_count_pairs", lists, sizes, target),
            Job(f"{module}:_place_pairs", lists, sizes | {"ROWS": 128, "COUNTS": 16}, target, 8),
            *(tile_job(target, described, gated=gated) for gated in (True, False) if target.startswith("sm_")),
        ]
    )
    assert not [compiled for compiled in found if compiled.spilled]
    if target == "sm_90":
        assert [uses(compiled, "wgmma.mma_async") for compiled in found[:4]] == [False, False, True, True]
        assert all(uses(compiled, "cp.async") for compiled in found[:4])
        assert all(uses(compiled, "cp.async.bulk.tensor") for compiled in found[6:])


def uses(compiled: Compiled, mnemonic: str) -> bool:
    return compiled.count(mnemonic) > 0
