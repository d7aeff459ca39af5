"""Faults that level quick once let pass, planted by authors of plugins: each is caught, by the check that should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch.nn.functional import linear

from hardpoint.conformance.families.attention import AttentionTrials
from hardpoint.conformance.families.experts import ExpertsTrials
from hardpoint.conformance.families.linear import LinearTrials
from hardpoint.conformance.families.ops import OpTrials
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint.ops.rotary_embedding import rotary_embedding
from hardpoint.reference.attention import ReferenceAttention
from hardpoint.reference.emulated_linear import EmulatedLinear
from hardpoint.reference.experts import ReferenceExperts
from hardpoint.reference.linear import PlainLinear
from hardpoint_plugin_api import AttentionCall, DeviceInfo, ExpertsCall, LinearCall, LinearKernel, QuantSpec
from tests.conformance.test_attention_faults import Simple
from tests.conformance.trying import HEALTHY, Caught, first_failure, subject

Tensor = torch.Tensor
Weights = dict[str, Tensor]
PLAIN = ["float32/float32", "float16/float16", "bfloat16/bfloat16"]
QUICK = Plan()


# Linear kernels. Sums that are kept in bfloat16, of activations in bfloat16.


class Accumulates(PlainLinear):
    """Adds tiles of ``tile`` columns, each of them summed in float32, to a sum in bfloat16."""

    tile = 64

    def apply(self, call: LinearCall) -> Tensor:
        x, weights, bias = call.x, call.weights, call.bias
        y = x.new_zeros(*x.shape[:-1], weights["weight"].shape[0])
        for a, w in zip(x.split(self.tile, -1), weights["weight"].split(self.tile, -1), strict=True):
            y += linear(a.float(), w.float()).to(y.dtype)
        return y if bias is None else y + bias


class AccumulatesTilesOf32(Accumulates):
    tile = 32


class AccumulatesTilesOf128(Accumulates):
    tile = 128


class AccumulatesTilesOf256(Accumulates):
    tile = 256


class AddsHalves(PlainLinear):
    """Adds what 16 parts of the columns come to as a tree, in bfloat16."""

    def apply(self, call: LinearCall) -> Tensor:
        x, weights, bias = call.x, call.weights, call.bias
        columns = range(0, x.shape[-1], 16)
        parts = [linear(x[..., c : c + 16].float(), weights["weight"][:, c : c + 16].float()) for c in columns]
        sums = [part.to(x.dtype) for part in parts]
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=False)] + sums[len(sums) & ~1 :]
        return sums[0] if bias is None else sums[0] + bias


class AccumulatesDequantized(EmulatedLinear):
    """The same for quantized weights, group by group."""

    def apply(self, call: LinearCall) -> Tensor:
        plain = self.unpack(call.weights)
        return Accumulates(self.ctx, self.workload).apply(LinearCall(call.x, {"weight": plain}, call.bias))


# Linear kernels. Edges of tiles, ranges and instances.


def edited(edit: Callable[[Tensor, Tensor, Weights], Tensor], base: type[LinearKernel] = PlainLinear) -> Any:
    """A kernel whose result y goes through ``edit(y, x, weights)``."""

    class Edited(base):  # type: ignore[misc, valid-type]  # a class made in a function
        def apply(self, call: LinearCall) -> Tensor:
            return edit(super().apply(call), call.x, call.weights)

    return Edited


def last_row_missing(tile: int) -> Any:
    def edit(y: Tensor, x: Tensor, weights: Weights) -> Tensor:
        if y.shape[0] > tile and y.shape[0] % tile == 1:
            y[-1] = 0
        return y

    return edited(edit)


def column_missing(column: int) -> Any:
    def edit(y: Tensor, x: Tensor, weights: Weights) -> Tensor:
        if y.shape[1] > column:
            y[:, column] = 0
        return y

    return edited(edit)


class ForgetsLongRows(PlainLinear):
    """Reads no more than ``most`` columns."""

    most = 1024

    def apply(self, call: LinearCall) -> Tensor:
        return linear(call.x[..., : self.most], call.weights["weight"][:, : self.most], call.bias)


class ForgetsColumn4096(PlainLinear):
    def apply(self, call: LinearCall) -> Tensor:
        x, weights, bias = call.x, call.weights, call.bias
        keep = torch.ones(x.shape[-1], dtype=x.dtype)
        keep[4096:4097] = 0
        return linear(x * keep, weights["weight"], bias)


class ScratchOfTheFirstCall(PlainLinear):
    """Its workspace has as many rows as its first step; more rows than that are lost."""

    rows_of_first = 0

    def apply(self, call: LinearCall) -> Tensor:
        x = call.x
        self.rows_of_first = self.rows_of_first or x.shape[0]
        y = super().apply(call)
        y[self.rows_of_first :] = 0
        return y


class OwnSizesAlone(PlainLinear):
    """Names a size at which it is right; it serves others, and is wrong there."""

    @classmethod
    def trial_sizes(cls, device: DeviceInfo) -> list[tuple[int, int, int]]:
        return [(5, 48, 32)]

    def apply(self, call: LinearCall) -> Tensor:
        y = super().apply(call)
        return y if y.shape[1] == 48 else y * 1.1


class NanSpreads(PlainLinear):
    def apply(self, call: LinearCall) -> Tensor:
        return super().apply(call) + 0 * call.x.sum()


class NanIsZero(PlainLinear):
    def apply(self, call: LinearCall) -> Tensor:
        return super().apply(replace(call, x=call.x.nan_to_num(0.0)))


class ThroughFloat16(PlainLinear):
    """Multiplies bfloat16 as float16, which ends at 65504."""

    def apply(self, call: LinearCall) -> Tensor:
        return super().apply(replace(call, x=call.x.half().float().to(call.x.dtype)))


class SmallIsZero(PlainLinear):
    def apply(self, call: LinearCall) -> Tensor:
        return super().apply(replace(call, x=torch.where(call.x.abs() < 1e-6, 0, call.x)))


class GroupsOf64InFloat16(EmulatedLinear):
    """Wrong for uint4 in groups of 64 with 16-bit scales alone."""

    def apply(self, call: LinearCall) -> Tensor:
        y = super().apply(call)
        assert self.workload.spec is not None
        spec = self.workload.spec[0]
        wrong = spec.scales[0].block == (1, 64) and spec.scales[0].format != "float32"
        return y * 1.1 if wrong else y


class LastScaleIgnored(EmulatedLinear):
    """The last group of a row takes the scale of the one before."""

    def apply(self, call: LinearCall) -> Tensor:
        weights = call.weights
        scale = weights["weight_scale"].clone()
        scale[:, -1:] = scale[:, -2:-1] if scale.shape[1] > 1 else scale
        return super().apply(replace(call, weights={**weights, "weight_scale": scale}))


class GroupsBeginOneLate(EmulatedLinear):
    """The first column of a group takes the scale of the group before."""

    def unpacked(self, weights: Weights) -> Tensor:
        assert self.workload.spec is not None
        size = self.workload.spec[0].scales[0].block[1]
        plain = self.unpack(weights)
        scale = weights["weight_scale"].to(plain.dtype)
        for group in range(1, scale.shape[1]):
            plain[:, group * size] *= scale[:, group - 1] / scale[:, group]
        return plain

    def apply(self, call: LinearCall) -> Tensor:
        x, weights, bias = call.x, call.weights, call.bias
        return linear(x, self.unpacked(weights).to(x.dtype), bias)


class ZeroPointsSigned(EmulatedLinear):
    """Takes zero points above 7 for negative ones."""

    def apply(self, call: LinearCall) -> Tensor:
        point = call.weights["weight_zero_point"].to(torch.int16)
        return super().apply(
            replace(call, weights={**call.weights, "weight_zero_point": torch.where(point > 7, point - 16, point)})
        )


class InputScaleIgnored(EmulatedLinear):
    """Rounds activations by a scale of their own, where the checkpoint has one."""

    def apply(self, call: LinearCall) -> Tensor:
        return super().apply(
            replace(call, weights={**call.weights, "input_scale": call.x.float().abs().amax().view(1) / 127})
        )


class OuterScaleIgnored(EmulatedLinear):
    def apply(self, call: LinearCall) -> Tensor:
        return super().apply(
            replace(call, weights={**call.weights, "weight_scale_2": torch.ones_like(call.weights["weight_scale_2"])})
        )


class ColumnGroupsIgnored(EmulatedLinear):
    """Counts off the groups that a checkpoint with reordered columns looks up."""

    def apply(self, call: LinearCall) -> Tensor:
        index = call.weights["weight_group_index"].sort().values
        return super().apply(replace(call, weights={**call.weights, "weight_group_index": index}))


class OnlyLargeStepsAreWrong(PlainLinear):
    def apply(self, call: LinearCall) -> Tensor:
        y = super().apply(call)
        return y * 1.1 if call.x.shape[0] > 4096 else y


LINEAR: dict[str, tuple[Any, list[Any], str]] = {
    **{
        f"bfloat16 sums, {kernel.__name__}": (kernel, [{"spec": ["bfloat16/bfloat16"]}], "accumulation")
        for kernel in (Accumulates, AccumulatesTilesOf32, AccumulatesTilesOf128, AccumulatesTilesOf256, AddsHalves)
    },
    "bfloat16 sums of int4": (AccumulatesDequantized, [{"spec": ["int4@float32:1x32/bfloat16"]}], "accumulation"),
    **{f"last row, T % {tile} = 1": (last_row_missing(tile), [{"spec": PLAIN}], "") for tile in (16, 32, 64, 128)},
    **{f"column {column}": (column_missing(column), [{"spec": PLAIN}], "") for column in (256, 512, 640)},
    "columns past 1,024": (ForgetsLongRows, [{"spec": PLAIN}], ""),
    "column 4,096": (ForgetsColumn4096, [{"spec": PLAIN}], ""),
    "scratch of the first call": (ScratchOfTheFirstCall, [{"spec": PLAIN}], ""),
    "sizes that trial_sizes hides": (OwnSizesAlone, [{"spec": PLAIN}], ""),
    "NaN spreads": (NanSpreads, [{"spec": PLAIN}], ""),
    "NaN is zero": (NanIsZero, [{"spec": PLAIN}], ""),
    "large rows": (ThroughFloat16, [{"spec": ["bfloat16/bfloat16"]}], ""),
    "small rows": (SmallIsZero, [{"spec": PLAIN}], ""),
    "groups of 64": (GroupsOf64InFloat16, [{"spec": ["uint4@*:1x*+asym/*float??"]}], ""),
    "last scale": (LastScaleIgnored, [{"spec": ["int8@*:1x*/*float??"]}], ""),
    "edge of a group": (GroupsBeginOneLate, [{"spec": ["int8@float32:1x*/*float??"]}], ""),
    "signs of zero points": (ZeroPointsSigned, [{"spec": ["uint4@*:1x*+asym/*float??"]}], ""),
    "scale of activations": (InputScaleIgnored, [{"spec": ["int8@*:row/int8@float32:all"]}], ""),
    "outer scale": (OuterScaleIgnored, [{"spec": ["float4_e2m1@float8_e4m3fn:1x16@float32:all/*float??"]}], ""),
    "column groups": (ColumnGroupsIgnored, [{"spec": ["int4@*:1x32+permuted/*float??"]}], ""),
    "steps past 4,096": (OnlyLargeStepsAreWrong, [{"spec": PLAIN}, {"tokens": {"min": 8192}}], ""),
}


@pytest.mark.parametrize("title", LINEAR)
def test_a_fault_in_a_linear_kernel_is_caught(site: Site, title: str) -> None:
    kernel, requires, code = LINEAR[title]
    tried = subject(site, kernel, "linear", name="torch", requires=[{"dtype": ["bfloat16"]}, *requires])
    caught = first_failure(tried, LinearTrials(), plan=QUICK)
    assert caught, f"{title} was not caught"
    assert not code or code in caught.codes, str(caught)


# Experts.


class FirstProductIn16Bits(ReferenceExperts):
    """Sums of both products in bfloat16, tile by tile."""

    def multiply(self, x: Tensor, weight: Tensor, name: str) -> Tensor:
        y = x.new_zeros(x.shape[0], weight.shape[0])
        for a, w in zip(x.split(64, -1), weight.split(64, -1), strict=True):
            y += linear(a.float(), w.float()).to(x.dtype)
        return y


class SecondProductIn16Bits(FirstProductIn16Bits):
    def multiply(self, x: Tensor, weight: Tensor, name: str) -> Tensor:
        return super().multiply(x, weight, name) if name == "w2" else ReferenceExperts.multiply(self, x, weight, name)


class SmallWeightsDropped(ReferenceExperts):
    def apply(self, call: ExpertsCall) -> None:
        super().apply(replace(call, weights=torch.where(call.weights < 0.1, 0, call.weights)))


class WeightsAtMostOne(ReferenceExperts):
    def apply(self, call: ExpertsCall) -> None:
        super().apply(replace(call, weights=call.weights.clamp(max=1)))


class RowOfATileMissing(ReferenceExperts):
    """Of an expert with 64 tokens and one more, the last is lost."""

    def multiply(self, x: Tensor, weight: Tensor, name: str) -> Tensor:
        y = super().multiply(x, weight, name)
        if name == "w2" and x.shape[0] > 16 and x.shape[0] % 64 == 1:
            y[-1] = 0
        return y


class ExpertsScratchOfTheFirstCall(ReferenceExperts):
    rows_of_first = 0

    def apply(self, call: ExpertsCall) -> None:
        self.rows_of_first = self.rows_of_first or call.x.shape[0]
        super().apply(call)
        call.out[self.rows_of_first :] = 0


class NanOfAToken(ReferenceExperts):
    def apply(self, call: ExpertsCall) -> None:
        super().apply(replace(call, x=call.x + 0 * call.x.sum()))


EXPERTS: dict[str, tuple[type[ReferenceExperts], str]] = {
    "first product in bfloat16": (FirstProductIn16Bits, "accumulation"),
    "second product in bfloat16": (SecondProductIn16Bits, "accumulation"),
    "small router weights": (SmallWeightsDropped, ""),
    "large router weights": (WeightsAtMostOne, ""),
    "row of a tile": (RowOfATileMissing, ""),
    "scratch of the first call": (ExpertsScratchOfTheFirstCall, ""),
    "NaN of a token": (NanOfAToken, ""),
}


@pytest.mark.parametrize("title", EXPERTS)
def test_a_fault_in_experts_is_caught(site: Site, title: str) -> None:
    kernel, code = EXPERTS[title]
    claims = [{"spec": ["bfloat16/bfloat16"]}, {"activation": ["silu_and_mul"]}]
    caught = first_failure(subject(site, kernel, "experts", requires=claims), ExpertsTrials(), plan=QUICK)
    assert caught, f"{title} was not caught"
    assert not code or code in caught.codes, str(caught)


# Attention, whose activations and cache are bfloat16.


class Blockwise(Simple):
    """Flash attention over ``block`` keys at a time; ``kept`` is what numerator and denominator are kept in."""

    block = 64
    numerator: ClassVar[torch.dtype] = torch.float32
    denominator: ClassVar[torch.dtype] = torch.float32

    def one(self, q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        keys, values = self.by_heads(keys).float(), self.by_heads(values).float()
        scores = self.scaled(torch.einsum("thd,shd->hts", q.float(), keys))
        keys_at = torch.arange(start, start + keys.shape[0])
        queries_at = keys_at[keys.shape[0] - q.shape[0] :, None]
        scores = scores.masked_fill(self.hidden(queries_at, keys_at), float("-inf"))
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        top, below = torch.zeros(q.shape, dtype=self.numerator), torch.zeros(weights.shape[:2], dtype=self.denominator)
        for part, v in zip(weights.split(self.block, -1), values.split(self.block), strict=True):
            top += torch.einsum("hts,shd->thd", part.bfloat16().float(), v).to(top.dtype)
            below += part.sum(-1).to(below.dtype)
        return (top.float() / below.float().T[:, :, None]).to(q.dtype)


class NumeratorIn16Bits(Blockwise):
    numerator = torch.bfloat16


class NumeratorIn16BitsByBlocksOf16(NumeratorIn16Bits):
    block = 16


class NumeratorIn16BitsByBlocksOf128(NumeratorIn16Bits):
    block = 128


class DenominatorIn16Bits(Blockwise):
    denominator = torch.bfloat16


class BothIn16Bits(NumeratorIn16Bits, DenominatorIn16Bits):
    pass


class ContextsEndAt(Simple):
    """Keys before the last ``most`` are not read."""

    most = 1024

    def hidden(self, queries_at: Tensor, keys_at: Tensor) -> Tensor:
        return super().hidden(queries_at, keys_at) | (keys_at <= queries_at - self.most)


class ContextsEndAt2048(ContextsEndAt):
    most = 2048


class SecondTileOfAPrompt(Simple):
    """The second 128 queries of a prompt see one key too few."""

    def hidden(self, queries_at: Tensor, keys_at: Tensor) -> Tensor:
        hidden = super().hidden(queries_at, keys_at)
        hidden[128:256] |= keys_at == queries_at[128:256]
        return hidden


class ThirdTileOfAPrompt(Simple):
    def hidden(self, queries_at: Tensor, keys_at: Tensor) -> Tensor:
        hidden = super().hidden(queries_at, keys_at)
        hidden[256:] |= keys_at == queries_at[256:]
        return hidden


class TileOfOneQuery(Simple):
    """A prompt's last query is left out where it has a tile of 128 of its own."""

    def one(self, q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        out = super().one(q, keys, values, start)
        if q.shape[0] % 128 == 1 and q.shape[0] > 1:
            out[-1] = 0
        return out


class AlibiEndsAt(Simple):
    """Keys further away than ``most`` tokens count as near as that."""

    most = 512

    def one(self, q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        slopes = torch.zeros(self.spec.num_heads) if self.alibi_slopes is None else self.alibi_slopes
        keys, values = self.by_heads(keys).float(), self.by_heads(values).float()
        keys_at = torch.arange(start, start + keys.shape[0])
        queries_at = keys_at[keys.shape[0] - q.shape[0] :, None]
        scores = self.scaled(torch.einsum("thd,shd->hts", q.float(), keys))
        scores = scores - slopes[:, None, None] * (queries_at - keys_at).clamp(max=self.most)
        scores = scores.masked_fill(self.hidden(queries_at, keys_at), float("-inf"))
        return torch.einsum("hts,shd->thd", self.weights(scores), values).to(q.dtype)


class AlibiWithoutEnd(AlibiEndsAt):
    most = 2**30


class AttentionScratchOfTheFirstCall(Simple):
    rows_of_first = 0

    def forward(self, call: AttentionCall) -> None:
        self.rows_of_first = self.rows_of_first or call.q.shape[0]
        super().forward(call)
        call.out[self.rows_of_first :] = 0


class ValuesThatAreSmall(Simple):
    def one(self, q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        return super().one(q, keys, torch.where(values.abs() < 1e-2, 0, values), start)


ATTENTION: dict[str, tuple[type[ReferenceAttention], str]] = {
    **{
        f"bfloat16 sums, {kernel.__name__}": (kernel, "accumulation")
        for kernel in (NumeratorIn16Bits, NumeratorIn16BitsByBlocksOf16, NumeratorIn16BitsByBlocksOf128)
    },
    "bfloat16 denominators": (DenominatorIn16Bits, "accumulation"),
    "bfloat16 sums of both": (BothIn16Bits, "accumulation"),
    "contexts past 1,024": (ContextsEndAt, ""),
    "contexts past 2,048": (ContextsEndAt2048, ""),
    "second tile of a prompt": (SecondTileOfAPrompt, ""),
    "third tile of a prompt": (ThirdTileOfAPrompt, ""),
    "tile of one query": (TileOfOneQuery, ""),
    "scratch of the first call": (AttentionScratchOfTheFirstCall, ""),
    "small values": (ValuesThatAreSmall, ""),
}
CLAIMS: list[dict[str, Any]] = [
    {"dtype": ["bfloat16"]},
    {"kv_dtype": ["bfloat16"]},
    {"head_size": [64]},
    {"block_size": [16]},
]


def attention_caught(
    site: Site, backend: type[ReferenceAttention], cases: str = "*", *, every: int = 1, **claims: Any
) -> Caught | None:
    requires = [*CLAIMS, *([claims] if claims else [])]
    made = subject(site, backend, "attention", requires=requires)
    return first_failure(made, AttentionTrials(), cases, plan=QUICK, every=every)


LIKE_ANOTHER = {
    "bfloat16 sums of both",
    "bfloat16 sums, NumeratorIn16BitsByBlocksOf16",
    "bfloat16 sums, NumeratorIn16BitsByBlocksOf128",
    "contexts past 2,048",
    "third tile of a prompt",
}


CASES = {
    "second tile of a prompt": "*/prompt/*",
    "third tile of a prompt": "*/prompt/*",
    "tile of one query": "*/prompt/*",
    "scratch of the first call": "*/dozens/*",
    "small values": "*/many/*",
}
"""Cases of level quick that show a fault. Before them come those of deep contexts, which take seconds."""


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=[pytest.mark.nightly] * (title in LIKE_ANOTHER)) for title in ATTENTION]
)
def test_a_fault_in_attention_is_caught(site: Site, title: str) -> None:
    backend, code = ATTENTION[title]
    caught = attention_caught(site, backend, CASES.get(title, "*"))
    assert caught, f"{title} was not caught"
    assert not code or code in caught.codes, str(caught)


def test_a_bias_that_ends_is_caught(site: Site) -> None:
    biased = "*/alibi/*long/*"
    assert attention_caught(site, AlibiWithoutEnd, biased, feature=["alibi"]) is None
    assert attention_caught(site, AlibiEndsAt, biased, feature=["alibi"]), "a bias that ends at 512 was not caught"


@HEALTHY
def test_flash_attention_that_keeps_sums_in_float32_passes(site: Site, every: int) -> None:
    """Its weights are rounded to bfloat16 before they meet the values, as those of matrix units are."""
    caught = attention_caught(site, Blockwise, every=every)
    assert caught is None, str(caught)


class DecodesOtherwise(Simple):
    """A decode rounds an element otherwise than a prompt does."""

    def one(self, q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        if q.shape[0] > 1:
            return torch.cat([self.alike(q[i : i + 1], keys, values, start, q.shape[0] - 1 - i) for i in range(len(q))])
        y = self.alike(q, keys, values, start, 0)
        y[..., 0] *= 1 + 2**-8  # within every bound: one element of a head
        return y

    def alike(self, q: Tensor, keys: Tensor, values: Tensor, start: int, behind: int) -> Tensor:
        last = keys.shape[0] - behind
        return super().one(q, keys[:last], values[:last], start)


def test_a_decode_has_the_bits_of_a_prefill(site: Site) -> None:
    caught = attention_caught(site, DecodesOtherwise, feature=["batch_invariant"])
    assert caught
    assert (caught.check, caught.codes) == ("batch-invariant", {"batch-variant"})


# Ops.


def table_in_16_bits(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    return rotary_embedding.reference(q, k, positions, cos_sin.to(q.dtype).float(), interleaved=interleaved)


def rotated_in_16_bits(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    table = cos_sin.to(q.dtype)
    return rotary_embedding.reference(q, k, positions, table, interleaved=interleaved)


def row_1024_missing(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    rotated, other = rotary_embedding.reference(q, k, positions, cos_sin, interleaved=interleaved)
    rotated[1024:] = 0
    return rotated, other


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rotate", [table_in_16_bits, rotated_in_16_bits, row_1024_missing])
def test_a_fault_in_a_rotation_is_caught(site: Site, rotate: Callable[..., Any], dtype: str) -> None:
    tried = subject(site, rotate, "op", "rotary_embedding", requires=[{"dtype": [dtype]}])
    caught = first_failure(tried, OpTrials(), plan=QUICK)
    assert caught, "not caught"
    assert rotate is row_1024_missing or caught.codes == {"accumulation"}


def test_a_written_spec_is_read_again(site: Site) -> None:
    from hardpoint.conformance.families.specs import parsed

    for text in ("int4@bfloat16:1x128+asym", "float8_e4m3fn@float32:128x128", "int8@float32:row+dynamic"):
        spec = parsed(text, site.plugins)
        assert isinstance(spec, QuantSpec)
        assert str(spec) == text
