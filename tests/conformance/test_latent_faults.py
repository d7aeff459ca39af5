"""Faults planted in backends of latent attention: each is caught, by the check that should."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hardpoint.conformance.families.latent import LatentTrials
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint.reference.latent_attention import ReferenceLatentAttention, attend_latent
from hardpoint.reference.quantized_latent_attention import QuantizedLatentAttention
from hardpoint_plugin_api import DeviceInfo, LatentCall, LatentStoreCall, LatentWorkload, Reason
from tests.conformance.trying import HEALTHY, Caught, first_failure, subject

Tensor = torch.Tensor


class Simple(ReferenceLatentAttention):
    """A healthy backend in steps that faults can change one of."""

    def num_read(self, length: int, queries: int) -> int:
        """How many of a request's tokens are read."""
        return length

    def one(self, q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope_key: Tensor) -> Tensor:
        return attend_latent(q_latent, q_rope, latent, rope_key, self.spec.scale)

    def forward(self, call: LatentCall) -> None:
        batch, block = call.metadata.batch, self.spec.block_size
        for i, length in enumerate(batch.seq_lens_host):
            rows = slice(batch.query_start_host[i], batch.query_start_host[i + 1])
            planes = self.layout.to_logical(call.cache, batch.block_table[i, : -(-length // block)].long())
            count = self.num_read(length, rows.stop - rows.start)
            latent, rope_key = (planes[name].flatten(0, 1)[:count] for name in ("latent", "rope_key"))
            call.out[rows] = self.one(call.q_latent[rows], call.q_rope[rows], latent, rope_key)


class ScaleOfTheLatent(Simple):
    """The scale that a head of the latent's size would have."""

    def one(self, q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope_key: Tensor) -> Tensor:
        return attend_latent(q_latent, q_rope, latent, rope_key, latent.shape[-1] ** -0.5)


class RopeLeftOut(Simple):
    def one(self, q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope_key: Tensor) -> Tensor:
        return super().one(q_latent, torch.zeros_like(q_rope), latent, rope_key)


class ManyHeads(Simple):
    """A backend that serves 128 heads and no other number, as kernels with a fixed tile do."""

    @classmethod
    def supports(cls, workload: LatentWorkload, device: DeviceInfo) -> list[Reason]:
        found = super().supports(workload, device)
        if workload.num_heads not in (None, 128):
            found.append(Reason("num-heads", "heads fill no tile", wanted=str(workload.num_heads), supported="128"))
        return found


class TokenByToken(ManyHeads):
    """A token's results do not depend on others."""

    def one(self, q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope_key: Tensor) -> Tensor:
        ends = range(latent.shape[0] - q_latent.shape[0] + 1, latent.shape[0] + 1)
        rows = [
            super(TokenByToken, self).one(q_latent[i : i + 1], q_rope[i : i + 1], latent[:end], rope_key[:end])
            for i, end in enumerate(ends)
        ]
        return torch.cat(rows)


class OneHeadByTheBatch(TokenByToken):
    """Head 77 differs in its last bits where there are several requests."""

    def forward(self, call: LatentCall) -> None:
        super().forward(call)
        if call.metadata.batch.num_requests > 1:
            call.out[:, 77] *= 1 + 2**-22


class LastTileOfHeadsSwapped(ManyHeads):
    """The last 16 of 128 heads have one another's results in steps with a prompt."""

    def forward(self, call: LatentCall) -> None:
        super().forward(call)
        if call.out.shape[0] > 200:
            call.out[:, 112:] = call.out[:, 112:].flip(1)


class LastPageIgnored(Simple):
    """Of several pages, the last is left out where it is not full."""

    def num_read(self, length: int, queries: int) -> int:
        whole = length // self.spec.block_size * self.spec.block_size
        return whole if queries <= whole else length


class OneTokenTooFew(Simple):
    """A decode does not read its own token."""

    def num_read(self, length: int, queries: int) -> int:
        return length - (queries == 1 and length > 1)


class PastTheEnd(Simple):
    """A decode reads one position behind the last."""

    def num_read(self, length: int, queries: int) -> int:
        return length + (queries == 1 and length % self.spec.block_size != 0)


class SumsInBfloat16(Simple):
    """Weights and latents are rounded to bfloat16 before they are multiplied."""

    def one(self, q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope_key: Tensor) -> Tensor:
        return super().one(q_latent, q_rope, latent.bfloat16().to(latent.dtype), rope_key)


class FirstHeadForAll(Simple):
    """All heads have the rotated queries of the first."""

    def one(self, q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope_key: Tensor) -> Tensor:
        return super().one(q_latent, q_rope[:, :1].expand_as(q_rope), latent, rope_key)


class StoresTheLatentTwice(Simple):
    """The rotated key of a token takes the place of the one before it."""

    def store(self, call: LatentStoreCall) -> None:
        super().store(call)
        slots = call.slot_mapping.long()
        block = self.spec.block_size
        pages, offsets = slots // block, (slots - 1) % block
        call.cache["rope_key"][pages, offsets] = call.rope_key.to(call.cache["rope_key"].dtype)


class Halves(Simple):
    """A healthy backend that reads the two halves of a decode's positions apart, and merges them by log-sum-exp."""

    def one(self, q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope_key: Tensor) -> Tensor:
        if len(latent) < 2 or len(q_latent) > 1:
            return super().one(q_latent, q_rope, latent, rope_key)
        parts = [slice(0, len(latent) // 2), slice(len(latent) // 2, None)]
        halves: list[Tensor] = [
            super(Halves, self).one(q_latent, q_rope, latent[part], rope_key[part]) for part in parts
        ]
        sums = [self.log_sum(q_latent, q_rope, latent[part], rope_key[part]) for part in parts]
        merged: Tensor = (torch.stack(halves) * self.weights(torch.stack(sums)).unsqueeze(-1)).sum(0)
        return merged

    def log_sum(self, q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope_key: Tensor) -> Tensor:
        """Of the exponentials of a query's scores, [T, H]."""
        scores = torch.cat([q_latent, q_rope], -1).double() @ torch.cat([latent, rope_key], -1).double().T
        log_sums: Tensor = (scores * self.spec.scale).logsumexp(-1)
        return log_sums.float()

    def weights(self, log_sums: Tensor) -> Tensor:
        """How much each half counts."""
        return log_sums.softmax(0)


class MergesInBase2(Halves):
    """Takes log-sum-exps for logarithms to the base 2."""

    def weights(self, log_sums: Tensor) -> Tensor:
        return (log_sums * 0.6931472).softmax(0)


class MergesByTheMean(Halves):
    """Gives both halves the same weight."""

    def weights(self, log_sums: Tensor) -> Tensor:
        return torch.full_like(log_sums, 0.5)


class Quantized(QuantizedLatentAttention):
    """A healthy backend over 8-bit latents."""

    def read(self, cache: dict[str, Tensor]) -> dict[str, Tensor]:
        """The cache as it is read."""
        return cache

    def forward(self, call: LatentCall) -> None:
        super().forward(replace(call, cache=self.read(call.cache)))


class ScalesOfAnotherToken(Quantized):
    """Reads each latent with the scale of the token before it in its block."""

    def read(self, cache: dict[str, Tensor]) -> dict[str, Tensor]:
        return cache | {"latent_scale": cache["latent_scale"].roll(1, dims=1)}


class ScalesLeftOut(Quantized):
    def read(self, cache: dict[str, Tensor]) -> dict[str, Tensor]:
        return cache | {"latent_scale": torch.ones_like(cache["latent_scale"])}


class RotatedKeysIn8Bits(Quantized):
    """Rounds rotated keys as latents are rounded."""

    def store(self, call: LatentStoreCall) -> None:
        super().store(replace(call, rope_key=call.rope_key.to(torch.float8_e4m3fn).to(call.rope_key.dtype)))


STEPS = "float32/kv-float32/*"
PLANTED: dict[str, tuple[type[Simple], str, str]] = {
    "wrong scale": (ScaleOfTheLatent, "values", STEPS),
    "rope part left out": (RopeLeftOut, "values", STEPS),
    "last page ignored": (LastPageIgnored, "values", STEPS),
    "decode reads one token too few": (OneTokenTooFew, "values", STEPS),
    "decode reads one token too many": (PastTheEnd, "values", STEPS),
    "sums of bfloat16": (SumsInBfloat16, "values", STEPS),
    "rotated queries of another head": (FirstHeadForAll, "values", STEPS),
    "stores to the slot before": (StoresTheLatentTwice, "values", "store/*"),
    "log-sum-exp in base 2": (MergesInBase2, "values", STEPS),
    "halves merged by their mean": (MergesByTheMean, "values", STEPS),
}
QUANTIZED: dict[str, tuple[type[Quantized], str, str]] = {
    "scales of another token": (ScalesOfAnotherToken, "values", "float32/kv-float8_e4m3fn/*"),
    "scales left out": (ScalesLeftOut, "values", "float32/kv-float8_e4m3fn/*"),
    "rotated keys in 8 bits": (RotatedKeysIn8Bits, "values", "store/*"),
}
CLAIMS: list[dict[str, Any]] = [
    {"dtype": ["float32"]},
    {"kv_dtype": ["float32"]},
    {"latent_size": [16]},
    {"rope_size": [8]},
    {"block_size": [4]},
]


def tried(site: Site, backend: type[object], cases: str, plan: Plan | None = None, every: int = 1) -> Caught | None:
    quantized = isinstance(backend, type) and issubclass(backend, Quantized)
    claims = [{"kv_dtype": ["float8_e4m3fn"]} if quantized and "kv_dtype" in claim else claim for claim in CLAIMS]
    name = "reference_quantized_cache" if quantized else "reference"
    made = subject(site, backend, "attention", "latent", name, requires=claims)
    return first_failure(made, LatentTrials(), cases, plan, every=every)


@pytest.mark.parametrize("title", [*PLANTED, *QUANTIZED])
def test_a_planted_fault_is_caught_by_its_check(site: Site, title: str) -> None:
    backend, check, cases = {**PLANTED, **QUANTIZED}[title]
    caught = tried(site, backend, cases)
    assert caught, f"{title} was not caught"
    assert caught.check == check, str(caught)


@HEALTHY
@pytest.mark.parametrize("backend", [Simple, Halves, Quantized])
def test_a_healthy_backend_passes(site: Site, every: int, backend: type[object]) -> None:
    caught = tried(site, backend, "*", Plan(), every)
    assert caught is None, str(caught)


def test_of_many_heads_some_are_judged_in_long_steps(site: Site) -> None:
    cases = "float32/kv-float32/*/prompt/*"
    assert tried(site, ManyHeads, cases) is None
    caught = tried(site, LastTileOfHeadsSwapped, cases)
    assert caught
    assert caught.check == "values", str(caught)


def test_bits_of_all_heads_are_compared_in_long_steps(site: Site) -> None:
    """Also of those that are not judged by values."""
    claims = [*CLAIMS, {"feature": ["batch_invariant"]}]
    for backend, check in ((TokenByToken, None), (OneHeadByTheBatch, "batch-invariant")):
        made = subject(site, backend, "attention", "latent", "reference", requires=claims)
        caught = first_failure(made, LatentTrials(), "float32/kv-float32/*/long/*")
        assert (caught and caught.check) == check, str(caught)


def test_a_backend_of_another_kind_is_refused(site: Site) -> None:
    caught = tried(site, object, "declared")
    assert caught
    assert "is no LatentBackend" in str(caught)
