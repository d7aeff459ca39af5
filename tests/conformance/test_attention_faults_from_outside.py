"""Faults in attention that level quick once let pass, planted by plugins' authors: each is caught by its check.

Activations and cache are bfloat16.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from hardpoint.conformance.families.attention import AttentionTrials
from hardpoint.conformance.site import Site
from hardpoint.reference.attention import ReferenceAttention
from hardpoint_plugin_api import AttentionCall
from tests.conformance.test_attention_faults import Simple
from tests.conformance.trying import HEALTHY, QUICK, Caught, first_failure, subject

Tensor = torch.Tensor
Weights = dict[str, Tensor]


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
