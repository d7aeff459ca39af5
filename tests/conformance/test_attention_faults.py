"""Faults planted in attention backends and cache layouts: each is caught, by the check that should."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import pytest
import torch

from hardpoint.conformance.families.attention import AttentionTrials
from hardpoint.conformance.families.steps import worst
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint.reference.attention import ReferenceAttention, attend, read_blocks
from hardpoint_plugin_api import (
    AttentionBatch,
    AttentionCall,
    AttentionMetadata,
    AttentionSpec,
    BuildContext,
    CacheLayout,
    CacheSpec,
    CaptureGrade,
    PlainLayout,
    Region,
    StoreCall,
)
from tests.conformance.trying import HEALTHY, Caught, EveryCheck, first_failure, subject

Tensor = torch.Tensor
Cache = dict[str, Tensor]


class Simple(ReferenceAttention):
    """A healthy backend in steps that faults can change one of."""

    def read_request(self, cache: Cache, batch: AttentionBatch, i: int) -> tuple[Tensor, Tensor, int]:
        """Keys and values [S, K, D] of request ``i``, and the position of the first."""
        pages, start = read_blocks(batch, i, self.spec)
        length = batch.seq_lens_host[i] - start
        keys, values = (x.flatten(0, 1)[:length].clone() for x in self.read(cache, pages))
        return keys, values, start

    def hidden(self, queries_at: Tensor, keys_at: Tensor) -> Tensor:
        return self.spec.span.hides(queries_at, keys_at)

    def by_heads(self, x: Tensor) -> Tensor:
        """[S, K, D] -> [S, H, D]: consecutive query heads share a KV head."""
        return x.repeat_interleave(self.spec.num_heads // self.spec.num_kv_heads, dim=1)

    def scaled(self, scores: Tensor) -> Tensor:
        scores = scores * self.spec.scale
        cap = self.spec.soft_cap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def weights(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores, dim=-1)

    def one(self, q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        keys, values = self.by_heads(keys).float(), self.by_heads(values).float()
        scores = self.scaled(torch.einsum("thd,shd->hts", q.float(), keys))
        keys_at = torch.arange(start, start + keys.shape[0])
        queries_at = keys_at[keys.shape[0] - q.shape[0] :, None]
        scores = scores.masked_fill(self.hidden(queries_at, keys_at), float("-inf"))
        return torch.einsum("hts,shd->thd", self.weights(scores), values).to(q.dtype)

    def forward(self, call: AttentionCall) -> None:
        q, cache, metadata, out = call.q, call.cache, call.metadata, call.out
        batch = metadata.batch
        for i in range(len(batch.seq_lens_host)):
            rows = slice(batch.query_start_host[i], batch.query_start_host[i + 1])
            out[rows] = self.one(q[rows], *self.read_request(cache, batch, i))


class BlockEdge(Simple):
    """A request that ends with a full block reads one block too few."""

    def read_request(self, cache: Cache, batch: AttentionBatch, i: int) -> tuple[Tensor, Tensor, int]:
        keys, values, start = super().read_request(cache, batch, i)
        length = keys.shape[0]
        if length > self.spec.block_size and length % self.spec.block_size == 0:
            keys[-self.spec.block_size :] = keys[: self.spec.block_size]
        return keys, values, start


class PastTheEnd(Simple):
    """A decode reads one position behind the last."""

    def read_request(self, cache: Cache, batch: AttentionBatch, i: int) -> tuple[Tensor, Tensor, int]:
        pages, start = read_blocks(batch, i, self.spec)
        keys, values = (x.flatten(0, 1)[: batch.seq_lens_host[i] - start + 1] for x in self.read(cache, pages))
        return keys, values, start


class PastTheEndMasked(PastTheEnd):
    """As above, with the score masked: but NaN times a weight of zero is NaN."""

    def one(self, q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        keys, values = self.by_heads(keys).float(), self.by_heads(values).float()
        keys_at = torch.arange(start, start + keys.shape[0])
        last = keys.shape[0] - (keys.shape[0] % self.spec.block_size != 0 or keys.shape[0] == 1)
        queries_at = keys_at[:last][last - q.shape[0] :, None]
        scores = self.scaled(torch.einsum("thd,shd->hts", q.float(), keys))
        scores = scores.masked_fill(self.hidden(queries_at, keys_at), float("-inf"))
        return torch.einsum("hts,shd->thd", self.weights(scores), values).to(q.dtype)


class ScaleIgnored(Simple):
    def scaled(self, scores: Tensor) -> Tensor:
        return scores / math.sqrt(self.spec.head_size)


class ScaleInverted(Simple):
    def scaled(self, scores: Tensor) -> Tensor:
        return scores / self.spec.scale


class CausalShifted(Simple):
    """Queries see the token behind them."""

    def hidden(self, queries_at: Tensor, keys_at: Tensor) -> Tensor:
        return super().hidden(queries_at + 1, keys_at)


class CausalTopLeft(Simple):
    """The mask is aligned with the first key, not with the last."""

    def hidden(self, queries_at: Tensor, keys_at: Tensor) -> Tensor:
        return super().hidden(queries_at - queries_at.min() + keys_at.min(), keys_at)


class WindowEdge(Simple):
    """A window of one token more."""

    def hidden(self, queries_at: Tensor, keys_at: Tensor) -> Tensor:
        window = self.spec.window
        if window is None:
            return super().hidden(queries_at, keys_at)
        return (keys_at > queries_at) | (keys_at < queries_at - window)


class HeadsTransposed(Simple):
    """Query head h takes KV head h modulo K."""

    def by_heads(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.spec.num_heads // self.spec.num_kv_heads, 1)


class ManyHeadsRolled(Simple):
    """Values are those of another head, where there are more heads of keys than a tile of four."""

    def read_request(self, cache: Cache, batch: AttentionBatch, i: int) -> tuple[Tensor, Tensor, int]:
        keys, values, start = super().read_request(cache, batch, i)
        return keys, values.roll(1, dims=1) if self.spec.num_kv_heads > 4 else values, start


class NoMaximum(Simple):
    """Exponentials without the maximum taken off."""

    def weights(self, scores: Tensor) -> Tensor:
        e = scores.exp()
        return e / e.sum(-1, keepdim=True)


class PowersOfTwo(Simple):
    """exp2 without the factor log2(e)."""

    def weights(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores * math.log(2), dim=-1)


class CapAfterMask(Simple):
    """The soft cap is left out."""

    def scaled(self, scores: Tensor) -> Tensor:
        return scores * self.spec.scale


class SplitsWithoutRescaling(Simple):
    """Two halves of the keys, merged as if their sums of exponentials were equal."""

    def weights(self, scores: Tensor) -> Tensor:
        if scores.shape[-1] < 40:
            return super().weights(scores)
        half = scores.shape[-1] // 2
        parts = [torch.softmax(part, dim=-1).nan_to_num() for part in scores.split([half, scores.shape[-1] - half], -1)]
        return torch.cat(parts, dim=-1) / 2


class HalfAccumulation(Simple):
    """Probabilities and values are summed in bfloat16."""

    def one(self, q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        wide = attend(
            q,
            keys,
            torch.eye(keys.shape[0])[:, None].expand(-1, self.spec.num_kv_heads, -1),
            self.spec,
            None,
            None,
            start,
        )
        total = torch.zeros(q.shape, dtype=torch.bfloat16)
        for s in range(keys.shape[0]):
            total += wide[..., s, None].bfloat16() * self.by_heads(values)[s].bfloat16()
        return total.to(q.dtype)


class WritesPadding(Simple):
    """Writes behind the output's last row of real tokens and behind the output itself."""

    def forward(self, call: AttentionCall) -> None:
        super().forward(call)
        out = call.out
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()


class WritesTheCache(Simple):
    def forward(self, call: AttentionCall) -> None:
        super().forward(call)
        call.cache["k"][call.metadata.batch.block_table[0, 0].long()] += 1


class OneRowShort(Simple):
    """Leaves the last row of a request of several tokens as it was: stale."""

    def forward(self, call: AttentionCall) -> None:
        q, cache, metadata, out = call.q, call.cache, call.metadata, call.out
        for i, first in enumerate(metadata.batch.query_start_host[:-1]):
            last = metadata.batch.query_start_host[i + 1]
            last -= last - first > 2
            request = self.read_request(cache, metadata.batch, i)
            whole = self.one(q[first : metadata.batch.query_start_host[i + 1]], *request)
            out[first:last] = whole[: last - first]


class SharedScratch(Simple):
    """Puts the plan's block tables into memory that all groups of a step share, and reads them in forward."""

    def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
        super().__init__(ctx, spec)
        ctx.resources.declare("faulty", 65536, scope="step")
        self.resources = ctx.resources

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        count = batch.block_table.numel()
        scratch = self.resources.get("faulty").view(torch.int32)
        scratch[:count] = batch.block_table.flatten()
        table = scratch[:count].view(batch.block_table.shape)
        return AttentionMetadata(replace(batch, block_table=table))


class PlansForItself(Simple):
    """Works only with a plan that this very layer made, where a group's first layer plans for all."""

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        return AttentionMetadata(batch, token=None if batch is None else id(self))

    def forward(self, call: AttentionCall) -> None:
        if call.metadata.token == id(self):
            super().forward(call)


class StoresShifted(Simple):
    """Tokens go one slot further within their block."""

    def store(self, call: StoreCall) -> None:
        slots, block = call.slot_mapping, self.spec.block_size
        super().store(replace(call, slot_mapping=slots // block * block + (slots % block + 1) % block))


class StoresPaddingAnywhere(Simple):
    """Padding rows go to the last page instead of the null page."""

    def store(self, call: StoreCall) -> None:
        slots, block = call.slot_mapping, self.spec.block_size
        last = call.cache["k"].shape[0] * block - 1
        super().store(replace(call, slot_mapping=torch.where(slots < block, last, slots)))


class DeclaresNoGrade(Simple):
    capture: ClassVar[Any] = 2


class OverlappingRegions(PlainLayout):
    def regions(self, spec: CacheSpec, block_size: int) -> tuple[Region, ...]:
        k, v = super().regions(spec, block_size)
        return k, Region("v", v.offset - 16, v.nbytes, v.shape, v.dtype)


class SwapsKeysAndValues(PlainLayout):
    def to_logical(self, views: Mapping[str, Tensor], pages: Tensor) -> Cache:
        return {"k": views["v"][pages], "v": views["k"][pages]}


class TransposesInside(PlainLayout):
    """Writes blocks by heads, reads them by tokens."""

    def from_logical(self, views: Mapping[str, Tensor], pages: Tensor, planes: Mapping[str, Tensor]) -> None:
        views["k"][pages] = planes["k"].transpose(1, 2).reshape(planes["k"].shape)
        views["v"][pages] = planes["v"]


class TouchesTheNextPage(PlainLayout):
    def from_logical(self, views: Mapping[str, Tensor], pages: Tensor, planes: Mapping[str, Tensor]) -> None:
        views["k"][(pages + 1) % views["k"].shape[0]] = 0
        super().from_logical(views, pages, planes)


class MisalignedRegion(PlainLayout):
    def regions(self, spec: CacheSpec, block_size: int) -> tuple[Region, ...]:
        k, v = super().regions(spec, block_size)
        return k, Region("v", v.offset + 1, v.nbytes, v.shape, v.dtype)


def with_layout(kind: type[CacheLayout]) -> type[Simple]:
    return type(f"With{kind.__name__}", (Simple,), {"layout": kind()})


class ClaimsThatBoundsDo(Simple):
    """Reads lengths on the host all the same."""

    exact_lengths = False


STEPS = "float32/*"
PLANTED: dict[str, tuple[type[Simple], str, str]] = {
    "block-edge off by one": (BlockEdge, "values", STEPS),
    "reads past the end": (PastTheEnd, "values", STEPS),
    "reads past the end, masked": (PastTheEndMasked, "values", STEPS),
    "scale ignored": (ScaleIgnored, "values", STEPS),
    "scale inverted": (ScaleInverted, "values", STEPS),
    "causal mask shifted": (CausalShifted, "values", STEPS),
    "causal mask top-left": (CausalTopLeft, "values", STEPS),
    "window edge": (WindowEdge, "values", STEPS),
    "heads transposed": (HeadsTransposed, "values", STEPS),
    "many heads rolled": (ManyHeadsRolled, "values", STEPS),
    "no maximum": (NoMaximum, "values", STEPS),
    "log2 for ln": (PowersOfTwo, "values", STEPS),
    "soft cap left out": (CapAfterMask, "values", STEPS),
    "split without rescaling": (SplitsWithoutRescaling, "values", STEPS),
    "half-precision accumulation": (HalfAccumulation, "values", STEPS),
    "guard band overwritten": (WritesPadding, "values", STEPS),
    "cache written in forward": (WritesTheCache, "values", STEPS),
    "stale row": (OneRowShort, "values", STEPS),
    "race in shared scratch": (SharedScratch, "interleaved", STEPS),
    "lengths of the host": (ClaimsThatBoundsDo, "bounds", STEPS),
    "plans for itself": (PlansForItself, "group", STEPS),
    "stores one slot further": (StoresShifted, "values", "store/*"),
    "padding outside the null page": (StoresPaddingAnywhere, "values", "store/*padding*"),
    "declares a number for a grade": (DeclaresNoGrade, "declarations", "declared"),
    "regions overlap": (with_layout(OverlappingRegions), "regions", "layout/*"),
    "region misaligned": (with_layout(MisalignedRegion), "regions", "layout/*"),
    "keys and values swapped": (with_layout(SwapsKeysAndValues), "round-trip", "layout/*"),
    "wrong layout": (with_layout(TransposesInside), "round-trip", "layout/*"),
    "touches the next page": (with_layout(TouchesTheNextPage), "round-trip", "layout/*"),
}
CLAIMS: list[dict[str, Any]] = [
    {"dtype": ["float32"]},
    {"kv_dtype": ["float32"]},
    {"head_size": [16]},
    {"block_size": [4]},
    {"feature": ["sliding_window", "soft_cap"]},
]


def tried(site: Site, backend: type[Simple], cases: str, plan: Plan | None = None, every: int = 1) -> Caught | None:
    made = subject(site, backend, "attention", requires=CLAIMS)
    return first_failure(made, AttentionTrials(), cases, plan, every=every)


@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_fault_is_caught_by_its_check(site: Site, title: str) -> None:
    backend, check, cases = PLANTED[title]
    caught = tried(site, backend, cases)
    assert caught, f"{title} was not caught"
    assert caught.check == check, str(caught)


@HEALTHY
def test_a_healthy_backend_passes(site: Site, every: int) -> None:
    caught = tried(site, Simple, "*", Plan(), every)
    assert caught is None, str(caught)


def test_what_is_not_claimed_is_unsupported_and_never_tried(site: Site) -> None:
    """Without the window among its claims, the fault at the window's edge is none of the backend's."""
    backend = subject(site, WindowEdge, "attention", requires=CLAIMS[:-1])
    trials = [t.case for t in AttentionTrials().trials(backend, Plan())]
    assert trials
    assert not any("window" in case for case in trials)


def test_the_references_own_error_is_as_large_along_a_row_as_across_it() -> None:
    """Which way it points is luck: beside an evaluation that is off across, a kernel's may be off along the row."""
    truth = torch.tensor([[3.0, 4.0], [float("inf"), 1.0], [float("nan"), 1.0]], dtype=torch.float64)
    across, along = truth + 0.1 * torch.tensor([-0.8, 0.6]), truth + 0.05 * torch.tensor([0.6, 0.8])
    found = worst(truth, [truth.float(), along.float(), across.float()])
    torch.testing.assert_close(found[0], (across + along - truth)[0].float())
    assert found[1:].tolist()[0] == [float("inf"), 1.0]
    assert found[2, 0].isnan()
    coarse = [x[:1].bfloat16() for x in (truth, truth * 1.0001, across)]
    assert torch.equal(worst(truth[:1], coarse), coarse[2])  # what rounding hides is no error


class ReadsLengthsOnTheDevice(Simple):
    """Healthy at every grade: ``forward`` takes nothing but the number of requests from the host."""

    capture: ClassVar[CaptureGrade] = CaptureGrade.ANY

    def forward(self, call: AttentionCall) -> None:
        batch = call.metadata.batch
        starts, lengths = tuple(batch.query_start.tolist()), tuple(batch.seq_lens.tolist())
        told = replace(batch, query_start_host=starts, seq_lens_host=lengths)
        for i in range(len(lengths)):
            rows = slice(starts[i], starts[i + 1])
            if starts[i] < starts[i + 1]:
                call.out[rows] = self.one(call.q[rows], *self.read_request(call.cache, told, i))


class KeepsTheFirstLongest(ReadsLengthsOnTheDevice):
    """Reads no more keys than the longest request had when the step was captured."""

    def forward(self, call: AttentionCall) -> None:
        batch = call.metadata.batch
        most = torch.tensor(max(batch.seq_lens_host), dtype=torch.int32)
        short = replace(batch, seq_lens=torch.minimum(batch.seq_lens, most))
        super().forward(replace(call, metadata=AttentionMetadata(short)))


def by_grade(kind: type[Simple], grade: CaptureGrade) -> type[Simple]:
    return type(f"{kind.__name__}At{grade.name}", (kind,), {"capture": grade})


def replayed(site: Site, backend: type[Simple], every: int = 1) -> Caught | None:
    """The first failure of ``replay``, where a plugin's calls are repeated as an engine repeats them."""
    made = subject(site, backend, "attention", requires=CLAIMS)
    made = replace(made, offer=replace(made.offer, plugin="acme"))
    for trial in islice(AttentionTrials().trials(made, EveryCheck()), 0, None, every):
        for check in trial.checks:
            if check.name == "replay" and (finding := check.run()).faults:
                return Caught(trial.case, check.name, finding)
    return None


@pytest.mark.parametrize(
    "backend",
    [
        by_grade(Simple, CaptureGrade.SINGLE_TOKEN),
        by_grade(Simple, CaptureGrade.ANY),
        by_grade(KeepsTheFirstLongest, CaptureGrade.SINGLE_TOKEN),
    ],
)
def test_a_false_grade_is_caught_by_replay(site: Site, backend: type[Simple]) -> None:
    caught = replayed(site, backend)
    assert caught, f"{backend.__name__} was not caught"


@HEALTHY
def test_a_true_grade_passes(site: Site, every: int) -> None:
    caught = replayed(site, ReadsLengthsOnTheDevice, every)
    assert caught is None, str(caught)
