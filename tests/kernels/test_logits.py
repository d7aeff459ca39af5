"""The kernels over logits: the ops' own cases in the interpreter, and other devices' code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hardpoint.kernels import logits
from hardpoint.ops.apply_logit_bias import apply_logit_bias
from hardpoint.ops.apply_penalties import apply_penalties
from hardpoint.ops.judge import judge
from hardpoint.ops.mask_tokens import mask_tokens
from hardpoint.ops.token_logprobs import token_logprobs
from tests.kernels.compiling import TARGETS, Job, compile_kernels
from tests.ops.judging import INTERPRETED, cases

OPS: dict[str, Any] = {
    "apply_logit_bias": apply_logit_bias,
    "apply_penalties": apply_penalties,
    "mask_tokens": mask_tokens,
    "token_logprobs": token_logprobs,
}
PENALTIES = ("repetition", "presence", "frequency")


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("name", OPS)
def test_meets_the_error_model(name: str, dtype: torch.dtype) -> None:
    chosen = [case for case in cases(OPS[name], dtype) if case.name != "wide" or dtype == torch.float32]
    found = [judge(OPS[name], getattr(logits, name), case, dtype=dtype) for case in chosen]
    assert found
    assert not [str(verdict) for verdict in found if not verdict.passed]


def test_logprobs_of_rows_that_several_programs_share() -> None:
    x, tokens = torch.randn(2, 40_000), torch.tensor([39_999, 17])
    x[0, 5] = x[0, 39_999]
    ids, logprobs, ranks = logits.token_logprobs(x, tokens, top_n=2)
    wanted = token_logprobs.reference(x, tokens, top_n=2)
    assert torch.equal(ids, wanted[0])
    torch.testing.assert_close(logprobs, wanted[1])
    assert torch.equal(ranks, wanted[2])


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target: str) -> None:
    def job(name: str, constexprs: dict[str, int], num_warps: int, **signature: str) -> Job:
        return Job(f"{logits.__name__}:{name}", signature, constexprs, target, num_warps)

    rows = {"logits": "*bf16", "stride": "i32:16", "vocabulary": "i32:16"}
    history = {"in_prompt": "*i1", "prompt_stride": "i32:16", "counts": "*i32", "counts_stride": "i32:16"}
    scores = {"tokens": "*i64", "found": "*fp32"}
    ranked = {"top": "*bf16", "top_ids": "*i64", "ids": "*i64", "logprobs": "*fp32", "ranks": "*i64", "top_n": "i32"}
    bias = {"tokens": "*i64", "tokens_stride": "i32", "values": "*fp32", "values_stride": "i32", "count": "i32"}
    block = {"BLOCK": 2048}
    found = compile_kernels(
        [
            job("_mask", block, 8, **rows, forbidden="*i1", forbidden_stride="i32:16", out="*bf16"),
            job("_penalize", block, 8, **rows, **history, out="*fp32", **dict.fromkeys(PENALTIES, "*fp32")),
            job("_add_bias", {"BLOCK": 256}, 4, **bias, out="*fp32", vocabulary="i32:16"),
            job("_weigh_parts", block | {"BLOCKS": 8}, 8, **rows, **scores),
            job("_score_row", {"PARTS": 16, "BLOCK": 64}, 4, **rows, **scores, **ranked, parts="i32"),
        ]
    )
    assert not [compiled for compiled in found if compiled.spilled]
