"""Experts over batches, held to the family's reference in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hardpoint.conformance.families.experts import ExpertsProbe
from hardpoint.conformance.plan import Row
from hardpoint.conformance.site import Site, Subject
from hardpoint.kernels.experts import TritonBatchedExperts
from hardpoint.kernels.paired_experts import BatchedPairs
from hardpoint.kernels.tiled_experts import TritonBatchedTiledExperts
from hardpoint.ops.judge import judge_call
from hardpoint.plugin_host import discover
from hardpoint.reference.batched_experts import BatchedMatmul
from hardpoint_plugin_api import BatchedExpertsCall, ExpertsWorkload
from tests.support.specs import SPECS

ROW: Row = {
    "dtype": "float32",
    "spec": "plain",
    "activation": "silu_and_mul",
    "format": "batched",
    "batch": "few",
    "mixture": "8x2",
    "widths": "even",
    "absent": "some-elsewhere",
    "bias": "no-bias",
}
ROWS = [
    (TritonBatchedExperts, ROW),
    (TritonBatchedExperts, ROW | {"dtype": "bfloat16", "widths": "odd", "mixture": "5x5", "bias": "bias"}),
    (TritonBatchedExperts, ROW | {"dtype": "bfloat16", "batch": "many", "mixture": "5x5", "absent": "some-elsewhere"}),
    (TritonBatchedExperts, ROW | {"batch": "none", "mixture": "1x1", "activation": "swiglu_oai"}),
    (TritonBatchedExperts, ROW | {"spec": "int8-dynamic", "dtype": "bfloat16", "absent": "here"}),
    (TritonBatchedExperts, ROW | {"spec": "fp8-tiles", "dtype": "bfloat16", "batch": "one", "activation": "relu2"}),
    (TritonBatchedTiledExperts, ROW | {"spec": "mxfp4", "dtype": "float16", "bias": "bias"}),
    (TritonBatchedTiledExperts, ROW | {"spec": "uint4-groups", "dtype": "bfloat16", "absent": "all-elsewhere"}),
]


@pytest.fixture(scope="module")
def site() -> Site:
    return Site.open(discover(), "cpu")


@pytest.mark.parametrize(
    ("kind", "row"), ROWS, ids=[f"{kind.__name__}-{'-'.join(map(str, row.values()))}" for kind, row in ROWS]
)
def test_meets_the_error_model(site: Site, kind: type[BatchedPairs], row: Row) -> None:
    offer = next(o for o in site.plugins.offers("experts") if o.contribution.name == "batched")
    found = judge_call(ExpertsProbe(replace(Subject.load(offer, site), target=kind), row, SPECS).call(3))
    assert not found.faults, "\n".join(map(str, found.faults))


@pytest.mark.parametrize("counts", [(0, 5, 1), (3, 0, 0), (0, 0, 0), (5, 5, 5)])
def test_padding_is_neither_read_nor_written(site: Site, counts: tuple[int, ...]) -> None:
    workload = ExpertsWorkload(
        dtype="float32",
        activation="silu_and_mul",
        format="batched",
        num_experts=3,
        top_k=2,
        hidden_size=40,
        intermediate_size=24,
    )
    generator = torch.Generator().manual_seed(1)
    w = {
        "w13.weight": torch.randn(3, 48, 40, generator=generator) * 0.1,
        "w2.weight": torch.randn(3, 40, 24, generator=generator) * 0.1,
    }
    is_token = torch.arange(5) < torch.tensor(counts)[:, None]
    x = torch.randn(3, 5, 40, generator=generator)
    given = x.masked_fill(~is_token[..., None], float("nan"))
    found, expected = torch.full_like(x, 7.0), torch.empty_like(x)
    for kind, source, out in ((TritonBatchedExperts, given, found), (BatchedMatmul, x, expected)):
        kernel = kind(site.context(torch.float32), workload)
        space = torch.empty(kernel.workspace_bytes(15), dtype=torch.uint8)
        kernel.apply(BatchedExpertsCall(source, torch.tensor(counts, dtype=torch.int32), w, out, space))
    assert (found[~is_token] == 7.0).all()
    torch.testing.assert_close(found[is_token], expected[is_token])
