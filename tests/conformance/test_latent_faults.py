"""Faults planted in backends of latent attention: each is caught, by the check that should."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hardpoint.conformance.families.latent import LatentTrials
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint.reference.latent_attention import ReferenceLatentAttention, attend_latent
from hardpoint_plugin_api import LatentCall, LatentStoreCall
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
}
CLAIMS: list[dict[str, Any]] = [
    {"dtype": ["float32"]},
    {"kv_dtype": ["float32"]},
    {"latent_size": [16]},
    {"rope_size": [8]},
    {"block_size": [4]},
]


def tried(site: Site, backend: type[object], cases: str, plan: Plan | None = None, every: int = 1) -> Caught | None:
    made = subject(site, backend, "attention", "latent", requires=CLAIMS)
    return first_failure(made, LatentTrials(), cases, plan, every=every)


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


def test_a_backend_of_another_kind_is_refused(site: Site) -> None:
    caught = tried(site, object, "declared")
    assert caught
    assert "is no LatentBackend" in str(caught)
