"""The batch-invariant mode as the selector sees it: a feature of every workload that computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hardpoint.config import EngineConfig
from hardpoint.engine.explain import explain
from hardpoint_plugin_api import FAMILIES, AttentionWorkload, Feature, SelectionError, TokensRequirement
from hardpoint_plugin_api.requirements import FeatureRequirement
from tests.selection.fakes import MATMUL, offer, reasons, select, served

CLAIM = FeatureRequirement(("batch_invariant",))
INVARIANT = replace(MATMUL, features=frozenset({Feature.BATCH_INVARIANT}))
FAST = offer("fast", priority=100)
SLOW = offer("slow", requires=(CLAIM,))


def config(**settings: object) -> EngineConfig:
    """The demo model on the CPU."""
    return EngineConfig.create(model="demo", platform="cpu", **settings)


def test_only_what_claims_it_can_win() -> None:
    assert served(select(FAST, SLOW)) == [("any", "fast")]
    plan = select(FAST, SLOW, workload=INVARIANT)
    assert served(plan) == [("any", "slow")]
    assert reasons(plan) == {"fast": ["feature"]}
    with pytest.raises(SelectionError, match=r"fast: batch_invariant not supported") as caught:
        select(FAST, SLOW, workload=INVARIANT, choice="fast")
    assert "Can serve: slow." in str(caught.value)
    with pytest.raises(SelectionError, match=r"nothing can serve linear \(features=batch_invariant .*\) on Toy 1"):
        select(FAST, workload=INVARIANT)


@pytest.mark.parametrize(
    "need", [TokensRequirement(max=8), TokensRequirement(min=9), TokensRequirement(phase="decode")]
)
def test_a_row_must_not_meet_another_kernel_in_a_larger_step(need: TokensRequirement) -> None:
    """Each of two kernels may be batch-invariant, and yet a plan of both is not."""
    workload = AttentionWorkload(head_size=64, features=INVARIANT.features)
    some = offer("some", family="attention", priority=9, tokens=need, requires=(CLAIM,))
    every = offer("every", family="attention", requires=(CLAIM,))
    assert len(served(select(some, every, workload=replace(workload, features=frozenset())))) > 1
    plan = select(some, every, workload=workload)
    assert served(plan) == [("any", "every")]
    assert reasons(plan) == {"some": ["tokens"]}
    with pytest.raises(SelectionError, match="it is for some steps only"):
        select(some, workload=workload)


def test_all_that_computes_is_asked_for_it_and_nothing_else() -> None:
    rows = explain(config(batch_invariant=True)).rows
    asked = {row.family for row in rows if "batch_invariant" in row.workload}
    assert asked == {"model", "layer", "op", "linear", "attention"}
    assert {row.family for row in rows} - asked == {"platform"}
    assert all(FAMILIES[row.family].numeric == (row.family in asked) for row in rows)
    assert {row.range for row in rows} == {"any"}
    assert not [row for row in explain(config()).rows if "batch_invariant" in row.workload]


def test_explain_says_why_the_fast_ones_were_passed_over() -> None:
    (fast,) = (row for row in explain(config()).rows if row.family == "attention")
    assert fast.chosen == "cpu_native"
    (row,) = (row for row in explain(config(batch_invariant=True)).rows if row.family == "attention")
    assert row.chosen == "reference_batch_invariant"
    against = {
        r.offer.contribution.name: [reason.code for reason in r.reasons]
        for r in row.rejected
        if "platform" not in {reason.code for reason in r.reasons}  # what other platforms' plugins offer
    }
    assert against == {
        "cpu_native": ["feature"],
        "cpu_native_nvfp4_cache": ["kv-dtype", "feature"],
        "cpu_native_quantized_cache": ["kv-dtype", "feature"],
        "cpu_paged": ["feature"],
        "reference": ["feature"],
        "reference_nvfp4_cache": ["kv-dtype", "feature"],
        "reference_quantized_cache": ["kv-dtype", "feature"],
    }


def test_it_needs_no_kernels() -> None:
    rows = explain(config(batch_invariant=True, custom_ops=("none",))).rows
    assert {row.chosen for row in rows if row.family == "op"} <= {"reference", "row_by_row", "composed"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"linear_backend": "torch"}, r"--linear-backend torch: .*Can serve: .*torch_batch_invariant"),
        ({"attention_backend": "cpu_paged"}, r"--attention-backend cpu_paged: .*Can serve: reference_batch_invariant"),
        ({"use": {"op.rms_norm": "reference"}}, r"--use op.rms_norm reference: .*Can serve: .*row_by_row"),
    ],
)
def test_flags_that_contradict_it(settings: dict[str, object], message: str) -> None:
    explain(config(**settings))
    with pytest.raises(SelectionError, match=message):
        explain(config(batch_invariant=True, **settings))
