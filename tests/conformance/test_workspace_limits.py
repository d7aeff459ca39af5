"""Right kernels whose workspaces are as large as ``BuildContext.limits`` says: no trial goes beyond."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hardpoint.conformance.families.attention import AttentionTrials
from hardpoint.conformance.families.linear import LinearTrials
from hardpoint.conformance.generators import Generator
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site, Subject
from hardpoint.reference.attention import ReferenceAttention
from hardpoint.reference.linear import PlainLinear
from hardpoint_plugin_api import (
    AttentionBatch,
    AttentionCall,
    AttentionMetadata,
    AttentionSpec,
    BuildContext,
    LinearCall,
    LinearWorkload,
)
from tests.conformance.trying import subject


class SizedLinear(PlainLinear):
    """Has a copy of the activations in a workspace with a row for each token that a step may hold."""

    def __init__(self, ctx: BuildContext, workload: LinearWorkload) -> None:
        super().__init__(ctx, workload)
        self._rows = torch.empty(ctx.limits.max_tokens, workload.in_features or 0, dtype=ctx.dtype)

    def apply(self, call: LinearCall) -> torch.Tensor:
        rows = self._rows[: call.x.shape[0]]
        rows.copy_(call.x)
        return super().apply(replace(call, x=rows))


class SizedAttention(ReferenceAttention):
    """Has workspaces for the queries and the lengths of the largest step, and for the block table of the longest."""

    def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
        super().__init__(ctx, spec)
        limits = ctx.limits
        self._queries = torch.empty(limits.max_tokens, spec.num_heads, spec.head_size, dtype=ctx.dtype)
        self._lengths = torch.empty(limits.max_sequences, dtype=torch.int32)
        self._longest = limits.max_model_len

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        self._lengths[: batch.num_requests].copy_(batch.seq_lens)
        if max(batch.seq_lens_host) > self._longest:
            raise ValueError(f"a sequence of {max(batch.seq_lens_host)} tokens, of at most {self._longest}")
        return super().plan(batch)

    def forward(self, call: AttentionCall) -> None:
        self._queries[: call.q.shape[0]].copy_(call.q)
        super().forward(call)


def faults_of_first(tried: Subject, generator: Generator, part: str) -> list[str]:
    """The objections of the check ``values`` in the first trial that has ``part`` in its name."""
    trial = next(trial for trial in generator.trials(tried, Plan()) if part in trial.case)
    finding = next(finding for check, finding in trial.run() if check == "values")
    assert finding.compared
    return [f"{trial.case}: {fault}" for fault in finding.faults]


def test_a_matmul_for_steps_of_many_tokens(site: Site) -> None:
    claims = [{"spec": ["float32/float32"]}, {"tokens": {"min": 9000}}]
    tried = subject(site, SizedLinear, "linear", name="torch", requires=claims)
    assert not faults_of_first(tried, LinearTrials(), "/narrow/9000/")


@pytest.mark.parametrize(
    ("tokens", "batch"),
    [({}, "hundreds"), ({"min": 600, "phase": "decode"}, "tokens-600")],
    ids=["hundreds", "decodes"],
)
def test_attention_for_steps_of_many_requests(site: Site, tokens: dict[str, object], batch: str) -> None:
    claims: list[dict[str, object]] = [{"dtype": ["float32"]}, {"head_size": [16]}, {"block_size": [16]}]
    claims += [{"tokens": tokens}] if tokens else []
    tried = subject(site, SizedAttention, "attention", requires=claims)
    assert not faults_of_first(tried, AttentionTrials(), f"/{batch}/")
