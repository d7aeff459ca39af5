"""Faults planted in what steps of several tokens for each request need, as they verify drafts: each is caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hardpoint.conformance.families.ops import OpTrials
from hardpoint.conformance.site import Site
from hardpoint.ops.slot_mapping import slot_mapping
from hardpoint.ops.verify_drafts import verify_drafts
from hardpoint_plugin_api import LatentCall
from tests.conformance import test_attention_faults, test_latent_faults
from tests.conformance.trying import first_failure, subject

Tensor = torch.Tensor
MOST_DRAFTS = 4


class DraftsSeeLaterOnes(test_attention_faults.Simple):
    """No mask among the few newest tokens."""

    def hidden(self, queries_at: Tensor, keys_at: Tensor) -> Tensor:
        few = 1 < len(queries_at) <= MOST_DRAFTS < len(keys_at)
        return super().hidden(queries_at.max().expand_as(queries_at) if few else queries_at, keys_at)


class DraftsSeeWhatTheFirstSees(test_attention_faults.Simple):
    """All of few queries have the position of the first, as if each were a request's one query."""

    def hidden(self, queries_at: Tensor, keys_at: Tensor) -> Tensor:
        few = 1 < len(queries_at) <= MOST_DRAFTS < len(keys_at)
        return super().hidden(queries_at.min().expand_as(queries_at) if few else queries_at, keys_at)


class LatentDraftsSeeLaterOnes(test_latent_faults.Simple):
    """The newest token is seen by the few queries before it, too: they get its result."""

    def forward(self, call: LatentCall) -> None:
        super().forward(call)
        starts = call.metadata.batch.query_start_host
        for i, length in enumerate(call.metadata.batch.seq_lens_host):
            count = starts[i + 1] - starts[i]
            if 1 < count <= MOST_DRAFTS < length:
                planes = self.layout.to_logical(call.cache, call.metadata.batch.block_table[i].long())
                latent, rope_key = (planes[name].flatten(0, 1)[:length] for name in ("latent", "rope_key"))
                last = slice(starts[i + 1] - 2, starts[i + 1] - 1)
                call.out[last] = self.one(call.q_latent[last], call.q_rope[last], latent, rope_key)


class LatentThatClaimsThatBoundsDo(test_latent_faults.Simple):
    """Reads lengths on the host all the same."""

    exact_lengths = False


@pytest.mark.parametrize("backend", [DraftsSeeLaterOnes, DraftsSeeWhatTheFirstSees])
def test_a_fault_in_attention_is_caught_by_values(site: Site, backend: type[test_attention_faults.Simple]) -> None:
    caught = test_attention_faults.tried(site, backend, "float32/*")
    assert caught, "it was not caught"
    assert caught.check == "values", str(caught)


@pytest.mark.parametrize(
    ("backend", "check"), [(LatentDraftsSeeLaterOnes, "values"), (LatentThatClaimsThatBoundsDo, "bounds")]
)
def test_a_fault_in_latent_attention_is_caught(
    site: Site, backend: type[test_latent_faults.Simple], check: str
) -> None:
    caught = test_latent_faults.tried(site, backend, test_latent_faults.STEPS)
    assert caught, "it was not caught"
    assert caught.check == check, str(caught)


def all_that_are_alike(drawn: Tensor, drafts: Tensor, row_start: Tensor) -> Tensor:
    """Right drafts behind a wrong one count."""
    counts = torch.zeros(len(row_start) - 1, dtype=torch.int64)
    request = torch.bucketize(torch.arange(len(drawn)), row_start[1:].long(), right=True)
    return counts.index_add(0, request, (drawn == drafts).long()) + 1


def without_the_draw(drawn: Tensor, drafts: Tensor, row_start: Tensor) -> Tensor:
    """The token behind the right drafts is not counted where there are some."""
    counts = verify_drafts.reference(drawn, drafts, row_start)
    return counts - (counts > 1).long()


def a_few(drawn: Tensor, drafts: Tensor, row_start: Tensor) -> Tensor:
    """More right drafts than a kernel has places for are dropped."""
    return verify_drafts.reference(drawn, drafts, row_start).clamp(max=MOST_DRAFTS + 1)


def on_into_the_next(drawn: Tensor, drafts: Tensor, row_start: Tensor) -> Tensor:
    """A request without a wrong draft counts one more."""
    counts = verify_drafts.reference(drawn, drafts, row_start)
    return counts + (counts == row_start.diff()).long() * (counts > 1).long()


def equally_many(
    positions: Tensor, request_index: Tensor, query_start: Tensor, block_tables: Tensor, *, block_size: int
) -> Tensor:
    """All requests are taken to have as many tokens as the first."""
    count = int(query_start[1]) if len(query_start) > 1 else 0
    starts = (torch.arange(len(query_start)) * count).clamp(max=int(query_start[-1])).to(query_start.dtype)
    starts[-1] = query_start[-1]
    return slot_mapping.reference(positions, request_index, starts, block_tables, block_size=block_size)


def in_the_newest_block(
    positions: Tensor, request_index: Tensor, query_start: Tensor, block_tables: Tensor, *, block_size: int
) -> Tensor:
    """All tokens of a request are stored in the page of its newest."""
    newest = positions.clone()
    for first, last in zip(query_start.tolist(), query_start[1:].tolist(), strict=False):
        page = positions[first:last].max() // block_size * block_size
        newest[first:last] = page + positions[first:last] % block_size
    return slot_mapping.reference(newest, request_index, query_start, block_tables, block_size=block_size)


def padding_has_a_page(
    positions: Tensor, request_index: Tensor, query_start: Tensor, block_tables: Tensor, *, block_size: int
) -> Tensor:
    """Padding is stored to the last request's pages."""
    ends = query_start.clone()
    ends[-1] = len(positions) if len(query_start) > 1 else 0
    return slot_mapping.reference(positions, request_index, ends, block_tables, block_size=block_size)


@pytest.mark.parametrize(
    ("op", "kernel"),
    [
        ("verify_drafts", all_that_are_alike),
        ("verify_drafts", without_the_draw),
        ("verify_drafts", a_few),
        ("verify_drafts", on_into_the_next),
        ("slot_mapping", equally_many),
        ("slot_mapping", in_the_newest_block),
        ("slot_mapping", padding_has_a_page),
    ],
)
def test_a_fault_in_an_op_is_caught_by_values(site: Site, op: str, kernel: Callable[..., Tensor]) -> None:
    caught = first_failure(subject(site, kernel, "op", op, requires=[{"dtype": ["float32"]}]), OpTrials())
    assert caught, "it was not caught"
    assert caught.check == "values", str(caught)
