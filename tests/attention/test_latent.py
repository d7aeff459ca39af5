"""The reference of latent attention against keys and values that are really made, and several backends joined."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hardpoint.attention.phases import PhasedLatentBackend
from hardpoint.conformance.families.latent import LatentTrials
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint.plugin_host import discover
from hardpoint.reference import attention as reference
from hardpoint.reference.latent_attention import ReferenceLatentAttention, attend_latent
from hardpoint.selection import StepRange
from hardpoint_plugin_api import AttentionBatch, AttentionMetadata, BuildContext, LatentSpec
from tests.conformance.trying import first_failure, subject


def test_the_absorbed_form_is_attention_over_the_keys_and_values_of_each_head() -> None:
    """Axes: T queries, S tokens, H heads, N and V sizes of a head, L and R of a latent and a rotated key."""
    torch.manual_seed(0)
    queries, tokens, heads, nope, value, latent_size, rope = 5, 9, 3, 7, 6, 8, 4
    q_nope, q_rope = torch.randn(queries, heads, nope).double(), torch.randn(queries, heads, rope).double()
    latent, rope_key = torch.randn(tokens, latent_size).double(), torch.randn(tokens, rope).double()
    up_keys, up_values = torch.randn(heads, nope, latent_size).double(), torch.randn(heads, latent_size, value).double()
    keys = torch.cat([torch.einsum("sl,hnl->hsn", latent, up_keys), rope_key.expand(heads, -1, -1)], dim=-1)
    values = torch.einsum("sl,hlv->hsv", latent, up_values)
    visible = torch.ones(queries, tokens).tril(tokens - queries).bool()
    wanted = scaled_dot_product_attention(
        torch.cat([q_nope, q_rope], dim=-1).transpose(0, 1), keys, values, attn_mask=visible, scale=0.3
    )
    absorbed = attend_latent(torch.einsum("thn,hnl->thl", q_nope, up_keys), q_rope, latent, rope_key, 0.3)
    torch.testing.assert_close(torch.einsum("thl,hlv->htv", absorbed, up_values), wanted)


class Decodes(ReferenceLatentAttention):
    """Serves decodes alone."""

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        assert batch.num_tokens == batch.num_requests == batch.num_decodes
        return super().plan(batch)


class Prompts(ReferenceLatentAttention):
    """Serves what is no decode."""

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        assert batch.num_decodes == 0
        return super().plan(batch)


class Both(PhasedLatentBackend):
    """As a plan of two winners joins them."""

    layout = ReferenceLatentAttention.layout

    def __init__(self, ctx: BuildContext, spec: LatentSpec) -> None:
        decodes, prompts = StepRange(phase="decode"), StepRange(phase="prefill")
        super().__init__(ctx, spec, [(decodes, Decodes(ctx, spec)), (prompts, Prompts(ctx, spec))])


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    threads = torch.get_num_threads()
    yield Site.open(discover(), "cpu", {"cpu": {"threads": 1}})
    torch.set_num_threads(threads)


@pytest.mark.parametrize("batch", ["mixed", "decode", "chunked"])
def test_decodes_and_prompts_of_a_step_go_to_backends_of_their_own(site: Site, batch: str) -> None:
    claims = [{key: ["float32"]} for key in ("dtype", "kv_dtype")] + [{"latent_size": [16]}, {"block_size": [4]}]
    joined = subject(site, Both, "attention", "latent", requires=claims)
    caught = first_failure(joined, LatentTrials(), f"float32/*/{batch}/*", Plan())
    assert caught is None, str(caught)


def test_the_reference_is_the_same_when_queries_take_turns(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_MOST_SCORES", 64)  # the judge has a reference of its own
    claims = [{key: ["float32"]} for key in ("dtype", "kv_dtype")] + [{"latent_size": [16]}, {"block_size": [4]}]
    parted = subject(site, ReferenceLatentAttention, "attention", "latent", requires=claims)
    caught = first_failure(parted, LatentTrials(), "float32/*/mixed/*", Plan())
    assert caught is None, str(caught)
