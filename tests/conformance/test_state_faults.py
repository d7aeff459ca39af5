"""Faults planted in a layer with a state in the cache: each is caught, by the check that should."""

from __future__ import annotations

import pytest
import torch

from hardpoint.conformance.families.layers import LayerTrials
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint.context import Context
from hardpoint.layers.linear_attention import LinearAttention
from hardpoint.layers.states import StateMetadata
from hardpoint_plugin_api import NULL_PAGE, AttentionBatch, LinearAttentionArgs
from tests.conformance.trying import Caught, first_failure, subject

Tensor = torch.Tensor


class Simple(LinearAttention):
    """A healthy layer in parts that faults can change one of. Prompts and decodes go the same way."""

    def __init__(self, ctx: Context, args: LinearAttentionArgs) -> None:
        super().__init__(ctx, args)
        self._block_size = ctx.block_size

    def pages(self, batch: AttentionBatch) -> Tensor:
        """Where states are written, [N]."""
        return batch.state_pages(self._block_size)

    def read(self, states: Tensor, pages: Tensor, batch: AttentionBatch, i: int) -> Tensor:
        """The state before the step's tokens of request ``i``, [1, H, D, D]."""
        first, last = batch.query_start_host[i : i + 2]
        state = states[pages[i : i + 1]]
        return torch.zeros_like(state) if batch.seq_lens_host[i] == last - first else state

    def rows(self, batch: AttentionBatch, i: int, count: int) -> range:
        """The tokens of request ``i``, of ``count`` rows."""
        return range(*batch.query_start_host[i : i + 2])

    def write(self, states: Tensor, pages: Tensor, batch: AttentionBatch, i: int, state: Tensor) -> None:
        states[pages[i : i + 1]] = state

    def _advance(self, qkv: Tensor, states: Tensor, plan: StateMetadata, out: Tensor) -> None:
        batch, pages = plan.batch, self.pages(plan.batch)
        for i in range(batch.num_requests):
            state = self.read(states, pages, batch, i)
            for token in self.rows(batch, i, len(qkv)):
                out[token : token + 1], state = self._token(qkv[token : token + 1].float(), state)
            self.write(states, pages, batch, i, state)


class NotReset(Simple):
    """A new request goes on from what its page holds."""

    def read(self, states: Tensor, pages: Tensor, batch: AttentionBatch, i: int) -> Tensor:
        return states[pages[i : i + 1]]


class OneTokenIsNoBeginning(Simple):
    """A prompt of one token is taken for a decode."""

    def read(self, states: Tensor, pages: Tensor, batch: AttentionBatch, i: int) -> Tensor:
        first, last = batch.query_start_host[i : i + 2]
        return states[pages[i : i + 1]] if last - first == 1 else super().read(states, pages, batch, i)


class ChunkBeginsAnew(Simple):
    """The later chunks of a prompt forget the earlier ones."""

    def read(self, states: Tensor, pages: Tensor, batch: AttentionBatch, i: int) -> Tensor:
        state, (first, last) = super().read(states, pages, batch, i), batch.query_start_host[i : i + 2]
        return torch.zeros_like(state) if last - first > 1 else state


class ChunkLeavesItsFirst(Simple):
    """A chunk leaves the state after its first token."""

    def write(self, states: Tensor, pages: Tensor, batch: AttentionBatch, i: int, state: Tensor) -> None:
        super().write(states, pages, batch, i, state)
        first, last = batch.query_start_host[i : i + 2]
        if last - first > 1 and batch.seq_lens_host[i] > last - first:
            states[pages[i]] = self._second

    def _token(self, qkv: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, state = super()._token(qkv, state)
        self._second = getattr(self, "_second", state)
        return y, state


class ReadAfterTheWrite(Simple):
    """A decode writes its state, then computes its result from that as if it were the old one."""

    def _token(self, qkv: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        new = super()._token(qkv, state)[1]
        return super()._token(qkv, new)[0], new


class FirstPage(Simple):
    """A state stays in the page of its request's first block."""

    def pages(self, batch: AttentionBatch) -> Tensor:
        return batch.block_table[:, 0].long()


class ReadsTheOldPage(Simple):
    """A state is read in the page that it had before this step: the copy is not used."""

    def read(self, states: Tensor, pages: Tensor, batch: AttentionBatch, i: int) -> Tensor:
        first, last = batch.query_start_host[i : i + 2]
        old = max(0, batch.seq_lens_host[i] - (last - first) - 1) // self._block_size
        return super().read(states, replace_at(pages, i, batch.block_table[i, old]), batch, i)


class ChangesTheSharedPage(Simple):
    """A step writes the page that its state was copied from, too."""

    def write(self, states: Tensor, pages: Tensor, batch: AttentionBatch, i: int, state: Tensor) -> None:
        super().write(states, pages, batch, i, state)
        first, last = batch.query_start_host[i : i + 2]
        old = max(0, batch.seq_lens_host[i] - (last - first) - 1) // self._block_size
        states[batch.block_table[i, old].long()] = state[0]


class ByRow(Simple):
    """States are kept by the number of their request in the step, beside the cache."""

    kept: Tensor | None = None

    def pages(self, batch: AttentionBatch) -> Tensor:
        return torch.arange(batch.num_requests)

    def _advance(self, qkv: Tensor, states: Tensor, plan: StateMetadata, out: Tensor) -> None:
        if self.kept is None:
            self.kept = torch.zeros_like(states)
        super()._advance(qkv, self.kept, plan, out)


class DecodesBesidePrompts(Simple):
    """Where a step has a prompt, the states of its decodes stay as they were."""

    def write(self, states: Tensor, pages: Tensor, batch: AttentionBatch, i: int, state: Tensor) -> None:
        if i >= batch.num_decodes or batch.num_decodes == batch.num_requests:
            super().write(states, pages, batch, i, state)


class PaddingAdvances(Simple):
    """The last request's state goes on through the tokens that are padding."""

    def rows(self, batch: AttentionBatch, i: int, count: int) -> range:
        rows = super().rows(batch, i, count)
        return range(rows.start, count) if i == batch.num_requests - 1 else rows


class PaddingHasAPage(Simple):
    """The states of requests that are padding lie in the page of the first request."""

    def pages(self, batch: AttentionBatch) -> Tensor:
        pages = super().pages(batch)
        return torch.where(pages == NULL_PAGE, pages[0], pages)


class OneHeadForAll(Simple):
    """All heads fade as the first does."""

    def bind(self) -> None:
        super().bind()
        self._decays = self._decays[:1]


class RoundsTheState(Simple):
    """States are rounded to bfloat16 between steps."""

    def write(self, states: Tensor, pages: Tensor, batch: AttentionBatch, i: int, state: Tensor) -> None:
        super().write(states, pages, batch, i, state.bfloat16().float())


def replace_at(pages: Tensor, i: int, page: Tensor) -> Tensor:
    changed = pages.clone()
    changed[i] = page
    return changed


PLANTED: dict[str, type[Simple]] = {
    "state not reset for a new request": NotReset,
    "state not reset for a prompt of one token": OneTokenIsNoBeginning,
    "a chunk begins anew": ChunkBeginsAnew,
    "a chunk leaves the wrong state": ChunkLeavesItsFirst,
    "state read after it was overwritten": ReadAfterTheWrite,
    "state in the first block's page": FirstPage,
    "the copy not used": ReadsTheOldPage,
    "the page that was copied changed": ChangesTheSharedPage,
    "states by row": ByRow,
    "decodes beside a prompt": DecodesBesidePrompts,
    "padding advances a state": PaddingAdvances,
    "a padded request's state in a page": PaddingHasAPage,
    "one head's decay for all": OneHeadForAll,
    "states rounded": RoundsTheState,
}


def tried(site: Site, layer: type[Simple], cases: str, plan: Plan | None = None) -> Caught | None:
    claims = [{"dtype": ["float32"]}]
    return first_failure(
        subject(site, layer, "layer", "linear_attention", "default", requires=claims), LayerTrials(), cases, plan
    )


@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_fault_is_caught_by_its_check(site: Site, title: str) -> None:
    caught = tried(site, PLANTED[title], "*/tokens-*")
    assert caught, f"{title} was not caught"
    assert caught.check == "values", str(caught)


@pytest.mark.parametrize(
    ("layer", "cases"),
    [(Simple, "*/tokens-*"), (Simple, "*/life"), (LinearAttention, "*")],
    ids=["steps", "life", "core"],
)
def test_a_healthy_layer_passes(site: Site, layer: type[Simple], cases: str) -> None:
    """But for drafts, which the simple one does not keep: test_draft_faults.py."""
    caught = tried(site, layer, cases)
    assert caught is None, str(caught)
