"""Faults of attention backends that only certain scores, values, head sizes and numbers of queries show."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from hardpoint.conformance.families.attention import AttentionTrials
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint_plugin_api import AttentionBatch, AttentionCall
from tests.conformance.test_attention_faults import CLAIMS, Cache, Simple, tried
from tests.conformance.trying import first_failure, subject

Tensor = torch.Tensor


class NanAmongValuesLost(Simple):
    def read_request(self, cache: Cache, batch: AttentionBatch, i: int) -> tuple[Tensor, Tensor, int]:
        keys, values, start = super().read_request(cache, batch, i)
        return keys, values.nan_to_num(0.0), start


class MaximumFromZero(Simple):
    """The running maximum begins at 0."""

    def weights(self, scores: Tensor) -> Tensor:
        e = (scores - scores.amax(-1, keepdim=True).clamp(min=0)).exp()
        return e / e.sum(-1, keepdim=True).clamp(min=1e-30)


class MaskOfTenThousand(Simple):
    def weights(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores.masked_fill(scores == float("-inf"), -10_000.0), dim=-1)


class RequestsBehind(Simple):
    """Requests behind the first ``most`` are halved."""

    most = 64

    def read_request(self, cache: Cache, batch: AttentionBatch, i: int) -> tuple[Tensor, Tensor, int]:
        keys, values, start = super().read_request(cache, batch, i)
        return keys, values * (0.5 if i >= self.most else 1.0), start


class RequestsBehind128(RequestsBehind):
    most = 128


class HeadSize96(Simple):
    def scaled(self, scores: Tensor) -> Tensor:
        return super().scaled(scores) * (1.1 if self.spec.head_size == 96 else 1.0)


class BetweenTilesOfQueries(Simple):
    """Prompts of 65 to 127 queries lose the last."""

    def forward(self, call: AttentionCall) -> None:
        super().forward(call)
        starts = call.metadata.batch.query_start_host
        for first, last in pairwise(starts):
            if 65 <= last - first <= 127:
                call.out[last - 1] = 0


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        (NanAmongValuesLost, "nan"),
        (MaximumFromZero, "low"),
        (MaskOfTenThousand, "low"),
        (RequestsBehind, "dozens"),
        (RequestsBehind128, "hundreds"),
        (BetweenTilesOfQueries, "prompt"),
    ],
)
def test_a_fault_of_certain_inputs_is_caught(site: Site, backend: type[Simple], case: str) -> None:
    assert tried(site, backend, f"float32/*/{case}/*", Plan()), f"{backend.__name__} was not caught"


def test_a_fault_of_one_head_size_is_caught_where_any_is_claimed(site: Site) -> None:
    claims = [claim for claim in CLAIMS if "head_size" not in claim]
    caught = first_failure(
        subject(site, HeadSize96, "attention", requires=claims), AttentionTrials(), "float32/*", Plan()
    )
    assert caught
    assert "size-96" in caught.case.split("/"), str(caught)


def test_other_seeds_try_other_head_sizes(site: Site) -> None:
    claims = [claim for claim in CLAIMS if "head_size" not in claim]
    tried = subject(site, Simple, "attention", requires=claims)

    def sizes(seed: int) -> set[str]:
        parts = (part for t in AttentionTrials().trials(tried, Plan(seed=seed)) for part in t.case.split("/"))
        return {part for part in parts if part.startswith("size-")}

    assert sizes(0) != sizes(1)
    assert sizes(0) == sizes(0)
