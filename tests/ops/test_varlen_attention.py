"""Attention over keys side by side: parts that are merged, and planted faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from hardpoint.ops.varlen_attention import merge_attention, varlen_attention
from tests.ops.judging import failures

Tensor = torch.Tensor
attend, merge = varlen_attention.reference, merge_attention.reference


@pytest.mark.parametrize("cuts", [(0, 30), (0, 1, 30), (0, 7, 7, 19, 30)])
def test_merged_parts_are_attention_over_all_keys(cuts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 3, size).double() for n, size in ((5, 8), (30, 8), (30, 6)))

    def part(begin: int, end: int) -> tuple[Tensor, Tensor]:
        keys = (0, end - begin)
        arrays = (torch.tensor(x, dtype=torch.int32) for x in ((0, 5), keys))
        starts: dict[str, Any] = {"query_starts": (0, 5), "key_starts": keys}
        return attend(q, k[begin:end], v[begin:end], *arrays, **starts, scale=0.4, causal=False)

    parts = [part(begin, end) for begin, end in pairwise(cuts)]
    out, sums = parts[0]
    for other in parts[1:]:
        merge(out, sums, *other)
    scores = torch.einsum("thd,shd->ths", q, k) * 0.4
    torch.testing.assert_close(out, torch.einsum("ths,shv->thv", scores.softmax(-1), v))
    torch.testing.assert_close(sums, scores.logsumexp(-1))


def sums_in_base_2(*args: Any, **scalars: Any) -> tuple[Tensor, Tensor]:
    out, sums = attend(*args, **scalars)
    return out, sums / math.log(2)


def sums_without_the_highest_score(q: Tensor, k: Tensor, *args: Any, **scalars: Any) -> tuple[Tensor, Tensor]:
    out, sums = attend(q, k, *args, **scalars)
    return out, sums.clamp(max=5.0)


def without_its_own_key(q: Tensor, k: Tensor, v: Tensor, *args: Any, **scalars: Any) -> tuple[Tensor, Tensor]:
    """A causal query reads the key before its own once more, in place of its own."""
    if not scalars["causal"]:
        return attend(q, k, v, *args, **scalars)
    return attend(q, k.roll(1, 0), v.roll(1, 0), *args, **scalars)


def keys_of_the_next_head(q: Tensor, k: Tensor, *args: Any, **scalars: Any) -> tuple[Tensor, Tensor]:
    return attend(q, k.roll(1, 1), *args, **scalars)


def one_request_too_far(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, key_start: Tensor, **scalars: Any
) -> tuple[Tensor, Tensor]:
    """The last key of a request is the first of the next one."""
    starts = scalars["key_starts"]
    ends = {end - 1 for end in starts[1:-1] if end < len(k)}
    rows = torch.tensor([row + 1 if row in ends else row for row in range(len(k))], dtype=torch.int64)
    return attend(q, k[rows], v[rows], query_start, key_start, **scalars)


def nothing_said_without_keys(*args: Any, **scalars: Any) -> tuple[Tensor, Tensor]:
    out, sums = attend(*args, **scalars)
    return out, sums.where(sums.isfinite(), 0)


def merged_by_base_2(out: Tensor, sums: Tensor, other: Tensor, other_sums: Tensor) -> None:
    mine, theirs = (x * math.log(2) for x in (sums, other_sums))
    merge(out, mine, other, theirs)
    sums.copy_(mine)


def merged_without_shift(out: Tensor, sums: Tensor, other: Tensor, other_sums: Tensor) -> None:
    """Exponentials of large sums overflow."""
    mine, theirs = sums.exp(), other_sums.exp()
    total = mine + theirs
    out.copy_((out * (mine / total).unsqueeze(-1) + other * (theirs / total).unsqueeze(-1)).to(out.dtype))
    sums.copy_(total.log())


def kept_sums(out: Tensor, sums: Tensor, other: Tensor, other_sums: Tensor) -> None:
    merge(out, sums.clone(), other, other_sums)


ATTENDED: list[Callable[..., Any]] = [
    sums_in_base_2,
    sums_without_the_highest_score,
    without_its_own_key,
    keys_of_the_next_head,
    one_request_too_far,
    nothing_said_without_keys,
]
MERGED: list[Callable[..., Any]] = [merged_by_base_2, merged_without_shift, kept_sums]


@pytest.mark.parametrize("fault", ATTENDED)
def test_planted_faults_of_attention_are_caught(fault: Callable[..., Any]) -> None:
    assert failures(varlen_attention, fault, torch.bfloat16)


@pytest.mark.parametrize("fault", MERGED)
def test_planted_faults_of_merging_are_caught(fault: Callable[..., Any]) -> None:
    assert failures(merge_attention, fault, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_references_pass(dtype: torch.dtype) -> None:
    assert not failures(varlen_attention, attend, dtype)
    assert not failures(merge_attention, merge, dtype)
