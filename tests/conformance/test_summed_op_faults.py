"""Faults planted in an op that sums over ranks: each is caught, by the check that should."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from hardpoint.conformance.families.ops import OpTrials
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint.context import Context
from hardpoint.ops.add_rms_norm import add_rms_norm
from hardpoint.ops.allreduce_add_rms_norm import compose
from hardpoint.parallel.process_group import Store
from hardpoint.reference.torch_distributed import GatherAndSum
from hardpoint_plugin_api import CommunicatorWorkload, GroupMember, OpWorkload
from tests.conformance.trying import Caught, first_failure, subject

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]


class Summed(GroupMember):
    """Right, through a group of its own."""

    def __init__(self, ctx: Context, workload: OpWorkload, parts: Mapping[str, Callable[..., Any]]) -> None:
        self.inner = GatherAndSum(ctx, CommunicatorWorkload(dtype=workload.dtype, ranks=workload.ranks))

    def init(self, store: Store, rank: int, world: int, group: str) -> None:
        self.rank = rank
        self.inner.init(store, rank, world, group)

    def close(self) -> None:
        self.inner.close()

    def abort(self) -> None:
        self.inner.abort()

    def total(self, x: Tensor) -> Tensor:
        return self.inner.all_reduce(x.clone())

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Pair:
        return add_rms_norm.reference(self.total(x), residual, weight, eps=eps)


class OwnAlone(Summed):
    def total(self, x: Tensor) -> Tensor:
        return x


class TwoRanksAlone(Summed):
    """Right for two ranks."""

    def total(self, x: Tensor) -> Tensor:
        return self.inner.all_gather(x[None])[:2].sum(0)


class OwnFirst(Summed):
    """Each rank begins with its own numbers, so ranks round differently."""

    def total(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for part in self.inner.all_gather(x[None]).roll(-self.rank, 0):
            total += part
        return total


class ResidualOfEach(Summed):
    """Every rank adds the residual to its partial sum."""

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Pair:
        return add_rms_norm.reference(self.total(x + residual), torch.zeros_like(residual), weight, eps=eps)


class ResidualIsWritten(Summed):
    """And the second output is another tensor."""

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Pair:
        normed, total = super().__call__(x, residual, weight, eps=eps)
        residual.copy_(total)
        return normed, total


class PartialSumIsKept(Summed):
    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Pair:
        normed, total = super().__call__(x, residual, weight, eps=eps)
        return x.copy_(normed), total


class OneBuffer(Summed):
    """Every result lies in the same memory."""

    def init(self, store: Store, rank: int, world: int, group: str) -> None:
        super().init(store, rank, world, group)
        self.buffer = torch.empty(1 << 20, dtype=torch.uint8)

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Pair:
        normed, total = super().__call__(x, residual, weight, eps=eps)
        return self.buffer[: normed.nbytes].view(normed.dtype).view(normed.shape).copy_(normed), total


class AnotherEachTime(Summed):
    count = 0

    def total(self, x: Tensor) -> Tensor:
        self.count += 1
        parts = self.inner.all_gather(x[None])
        total = torch.zeros_like(x)
        for part in parts.roll(self.count, 0):
            total += part
        return total


def never_sums(ctx: Context, workload: OpWorkload, parts: Mapping[str, Callable[..., Any]]) -> Callable[..., Pair]:
    return compose(ctx, workload, {"all_reduce": lambda x: x})


PLANTED: dict[str, tuple[Any, str, str]] = {
    "own alone": (OwnAlone, "*", "values"),
    "never sums": (never_sums, "*", "values"),
    "two ranks alone": (TwoRanksAlone, "*/3/*", "values"),
    "own first": (OwnFirst, "*/3/*", "agree"),
    "residual of each": (ResidualOfEach, "*", "values"),
    "residual is written": (ResidualIsWritten, "*", "inputs"),
    "partial sum is kept": (PartialSumIsKept, "*", "inputs"),
    "one buffer": (OneBuffer, "*", "inputs"),
    "another each time": (AnotherEachTime, "bfloat16/3/*", "repeat"),
}


def try_out(site: Site, target: Any, cases: str = "*", **changes: Any) -> Caught | None:
    tried = subject(site, target, "op", "allreduce_add_rms_norm", "composed", **changes)
    return first_failure(tried, OpTrials(), cases)


@pytest.mark.parametrize("fault", PLANTED)
def test_planted(fault: str, site: Site) -> None:
    target, cases, check = PLANTED[fault]
    caught = try_out(site, target, cases)
    assert caught is not None
    assert caught.check == check, str(caught)


@pytest.mark.parametrize(
    ("target", "cases"), [pytest.param(Summed, "*/3/*", marks=pytest.mark.nightly), (compose, "*/2/*")]
)
def test_what_is_right_passes(target: Any, cases: str, site: Site) -> None:
    assert try_out(site, target, cases, requires=[{"dtype": ["bfloat16"]}, {"feature": ["batch_invariant"]}]) is None


def test_what_is_not_claimed_is_not_tried(site: Site) -> None:
    """Neither more tokens than the range has, nor a form that cannot know the group."""
    limited = subject(site, OwnAlone, "op", "allreduce_add_rms_norm", "composed", requires=[{"tokens": {"max": 4}}])
    refused = {t.case.rpartition("/")[2] for t in OpTrials().trials(limited, Plan()) if t.unsupported}
    assert {"33x1024", "300x1024", "random"} <= refused
    assert "1x4096" not in refused
    plain = subject(site, add_rms_norm.reference, "op", "allreduce_add_rms_norm", "composed", form="functional")
    assert {t.unsupported.code for t in OpTrials().trials(plain, Plan()) if t.unsupported} == {"form"}
