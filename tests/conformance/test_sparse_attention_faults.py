"""Faults planted in sparse attention: in backends that read lists, in the ops of the indexer, and in its layer. Each is
caught, by the check that should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hardpoint.conformance.families.latent import LatentTrials
from hardpoint.conformance.families.layers import LayerTrials
from hardpoint.conformance.families.ops import OpTrials
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint.context import Context
from hardpoint.layers.sparse_indexer import SparseIndexer
from hardpoint.ops import get
from hardpoint.ops.index_scores import index_scores
from hardpoint.ops.store_index_keys import Cache, store_index_keys
from hardpoint.ops.topk_positions import topk_positions
from hardpoint.reference.latent_attention import ReferenceLatentAttention, attend_latent
from hardpoint_plugin_api import LatentCall, SparseIndexerArgs
from tests.conformance.trying import HEALTHY, Caught, first_failure, subject
from tests.ops.judging import failures

Tensor = torch.Tensor
score, choose, store = index_scores.reference, topk_positions.reference, store_index_keys.reference


# Backends that read lists.


class Listed(ReferenceLatentAttention):
    """A healthy backend, whose lists faults can change."""

    def listed(self, indices: Tensor, positions: Tensor) -> Tensor | None:
        """``indices`` [T, K] of queries at ``positions`` [T], as they are read."""
        return indices

    def forward(self, call: LatentCall) -> None:
        batch = call.metadata.batch
        starts = batch.query_start_host
        lengths = zip(batch.seq_lens_host, starts[1:], starts, strict=False)
        positions = torch.cat([torch.arange(total - (last - first), total) for total, last, first in lengths])
        if call.indices is not None:
            call = replace(call, indices=self.listed(call.indices[: starts[-1]], positions))
        super().forward(call)


class IgnoresLists(Listed):
    def listed(self, indices: Tensor, positions: Tensor) -> Tensor | None:
        return None


class Gathers(Listed):
    """A healthy backend that gathers what a query's list names."""

    def real(self, indices: Tensor) -> Tensor:
        """Of one query's list, the positions that are gathered."""
        return indices[indices >= 0]

    def forward(self, call: LatentCall) -> None:
        batch, block = call.metadata.batch, self.spec.block_size
        if call.indices is None:
            return super().forward(call)
        for i, length in enumerate(batch.seq_lens_host):
            planes = self.layout.to_logical(call.cache, batch.block_table[i, : -(-length // block)].long())
            for t in range(*batch.query_start_host[i : i + 2]):
                rows = self.real(call.indices[t]).long()
                latent, rope_key = (planes[name].flatten(0, 1)[rows] for name in ("latent", "rope_key"))
                one = slice(t, t + 1)
                call.out[one] = attend_latent(call.q_latent[one], call.q_rope[one], latent, rope_key, self.spec.scale)
        return None


class TakesFillersForTheFirst(Gathers):
    """Reads position 0 for each -1."""

    def real(self, indices: Tensor) -> Tensor:
        return indices.clamp(min=0)


class OneTooFew(Listed):
    """Leaves out the last place of full lists."""

    def listed(self, indices: Tensor, positions: Tensor) -> Tensor:
        return indices.index_fill(1, torch.tensor([indices.shape[1] - 1]), -1)


class ListsOfTheFirstQuery(Listed):
    """Gives a prompt's queries the list of the query before."""

    def listed(self, indices: Tensor, positions: Tensor) -> Tensor:
        behind = positions[1:] == positions[:-1] + 1
        return torch.cat([indices[:1], torch.where(behind[:, None], indices[:-1], indices[1:])])


class OwnPositionLeftOut(Listed):
    def listed(self, indices: Tensor, positions: Tensor) -> Tensor:
        return indices.where((indices != positions[:, None]) | (positions[:, None] == 0), -1)


BACKENDS = (IgnoresLists, TakesFillersForTheFirst, OneTooFew, ListsOfTheFirstQuery, OwnPositionLeftOut)
LISTED = "float32/kv-float32/*/listed-*"
"""The cases of latent attention in which queries have lists."""


def tried(site: Site, backend: type[Listed], every: int = 1, plan: Plan | None = None) -> Caught | None:
    keys: list[dict[str, Any]] = [{key: ["float32"]} for key in ("dtype", "kv_dtype")]
    claims = [*keys, {"latent_size": [16]}, {"rope_size": [8]}, {"block_size": [4]}, {"feature": ["index_lists"]}]
    made = subject(site, backend, "attention", "latent", requires=claims)
    return first_failure(made, LatentTrials(), LISTED, plan, every=every)


@pytest.mark.parametrize("backend", BACKENDS)
def test_faults_of_backends(site: Site, backend: type[Listed]) -> None:
    caught = tried(site, backend)
    assert caught
    assert caught.check == "values", str(caught)


@HEALTHY
@pytest.mark.parametrize("backend", [Listed, Gathers])
def test_a_healthy_backend_passes(site: Site, every: int, backend: type[Listed]) -> None:
    caught = tried(site, backend, every, Plan())
    assert caught is None, str(caught)


# Ops.


def without_relu(q: Tensor, weights: Tensor, cache: Cache, *places: Tensor) -> Tensor:
    """As relu(x) = x + relu(-x), summed with the sign of x."""
    return score(q, weights, cache, *places) - score(-q, weights, cache, *places)


def weights_of_the_next_head(q: Tensor, weights: Tensor, cache: Cache, *places: Tensor) -> Tensor:
    return score(q, weights.roll(1, dims=1), cache, *places)


def without_its_own_position(
    q: Tensor, weights: Tensor, cache: Cache, table: Tensor, starts: Tensor, positions: Tensor
) -> Tensor:
    return score(q, weights, cache, table, starts, positions - 1)


def past_its_own_position(
    q: Tensor, weights: Tensor, cache: Cache, table: Tensor, starts: Tensor, positions: Tensor
) -> Tensor:
    return score(q, weights, cache, table, starts, positions + 1)


def last_page_stale(
    q: Tensor, weights: Tensor, cache: Cache, table: Tensor, starts: Tensor, positions: Tensor
) -> Tensor:
    """The page of a decode's newest token is that which the request had before it got one."""
    tokens = torch.arange(q.shape[0])
    requests = (torch.searchsorted(starts, tokens.int(), right=True) - 1).clamp(max=max(0, len(table) - 1))
    stale, block = table.clone(), cache["index_key"].shape[1]
    for request, position in zip(requests.tolist(), positions.tolist(), strict=True):
        if position >= block:
            stale[request, position // block] = table[request, position // block - 1]
    return score(q, weights, cache, stale, starts, positions)


def scales_of_another_token(q: Tensor, weights: Tensor, cache: Cache, *places: Tensor) -> Tensor:
    scales = {name: x.roll(1, dims=1) for name, x in cache.items() if name == "index_key_scale"}
    return score(q, weights, cache | scales, *places)


def scale_of_the_first_group(q: Tensor, weights: Tensor, cache: Cache, *places: Tensor) -> Tensor:
    scales = {name: x[..., :1].expand_as(x) for name, x in cache.items() if name == "index_key_scale"}
    return score(q, weights, cache | scales, *places)


def request_before(
    q: Tensor, weights: Tensor, cache: Cache, table: Tensor, starts: Tensor, positions: Tensor
) -> Tensor:
    """A request's first token is counted to the one before."""
    later = starts + (starts > 0).int()
    return score(q, weights, cache, table, later, positions)


def later_of_equals(scores: Tensor, positions: Tensor, *, top_k: int) -> Tensor:
    size = scores.shape[1]
    there = torch.arange(size) <= positions[:, None]
    order = torch.where(there, scores, float("-inf")).flip(1).sort(dim=-1, descending=True, stable=True).indices
    found = size - 1 - order
    found = torch.where(found > positions[:, None], size, found)
    kept = found.masked_fill((found < size).cumsum(1) > top_k, size).sort(dim=-1).values[:, :top_k]
    kept = torch.nn.functional.pad(kept, (0, top_k - kept.shape[1]), value=size)
    return kept.masked_fill(kept == size, -1).int()


def by_falling_score(scores: Tensor, positions: Tensor, *, top_k: int) -> Tensor:
    """The right positions, not in rising order."""
    chosen = choose(scores, positions, top_k=top_k)
    return chosen.flip(1)


def one_too_few_at_the_edge(scores: Tensor, positions: Tensor, *, top_k: int) -> Tensor:
    """Where exactly ``top_k`` positions count, the last is left out."""
    chosen = choose(scores, positions, top_k=top_k).clone()
    chosen[positions + 1 == top_k, -1] = -1
    return chosen


def zeros_by_their_sign(scores: Tensor, positions: Tensor, *, top_k: int) -> Tensor:
    """Orders the bits of floats, where -0 is below 0."""
    negative = (scores == 0) & scores.signbit()
    return choose(torch.where(negative, -1e-45, scores), positions, top_k=top_k)


def reads_past_the_end(scores: Tensor, positions: Tensor, *, top_k: int) -> Tensor:
    return choose(scores, (positions + 1).clamp(max=scores.shape[1] - 1), top_k=top_k)


def stores_with_one_scale(k: Tensor, cache: Cache, slots: Tensor) -> None:
    """A key's groups share the scale of the largest."""
    store(k, cache, slots)
    if "index_key_scale" in cache:
        block = cache["index_key"].shape[1]
        where = (slots.long() // block, slots.long() % block)
        groups = k.reshape(-1, *cache["index_key"].shape[2:]).float()
        scale = groups.abs().amax((1, 2)) / 448.0
        cache["index_key_scale"][where] = scale[:, None].expand(-1, groups.shape[1])
        rounded = (groups / scale[:, None, None].where(scale[:, None, None] > 0, 1.0)).to(cache["index_key"].dtype)
        cache["index_key"].view(torch.uint8)[where] = rounded.view(torch.uint8)


def stores_to_the_slot_before(k: Tensor, cache: Cache, slots: Tensor) -> None:
    store(k, cache, (slots - 1).clamp(min=0))


OPS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "products without relu": (index_scores, without_relu),
    "weights of another head": (index_scores, weights_of_the_next_head),
    "own position left out": (index_scores, without_its_own_position),
    "one position past its own": (index_scores, past_its_own_position),
    "last page stale": (index_scores, last_page_stale),
    "scales of another token": (index_scores, scales_of_another_token),
    "scale of another group": (index_scores, scale_of_the_first_group),
    "pages of the request before": (index_scores, request_before),
    "the later of equals": (topk_positions, later_of_equals),
    "not in rising order": (topk_positions, by_falling_score),
    "top-k off by one at the edge": (topk_positions, one_too_few_at_the_edge),
    "zeros by their sign": (topk_positions, zeros_by_their_sign),
    "scores behind the end": (topk_positions, reads_past_the_end),
    "one scale for all groups": (store_index_keys, stores_with_one_scale),
    "stored to the slot before": (store_index_keys, stores_to_the_slot_before),
}


@pytest.mark.parametrize("title", OPS)
def test_faults_of_ops(title: str) -> None:
    op, fault = OPS[title]
    assert failures(op, fault, torch.float32), f"{title} was not caught"


@HEALTHY
@pytest.mark.parametrize("name", ["store_index_keys", "index_scores", "topk_positions"])
def test_the_references_pass(site: Site, every: int, name: str) -> None:
    caught = first_failure(subject(site, get(name).reference, "op", name), OpTrials(), every=every)
    assert caught is None, str(caught)


# The layer.


class Healthy(SparseIndexer):
    """Core's own layer, whose parts faults can change one of."""


class RotatesOtherPairs(Healthy):
    def __init__(self, ctx: Context, args: SparseIndexerArgs) -> None:
        super().__init__(ctx, replace(args, rope=replace(args.rope, interleaved=not args.rope.interleaved)))


class KeysWithoutTheirBias(Healthy):
    def bind(self) -> None:
        super().bind()
        self.weights["key_norm_bias"] = torch.zeros_like(self.weights["key_norm_bias"])


class RotatesNothing(Healthy):
    def bind(self) -> None:
        super().bind()
        self._rotary_embedding = lambda q, k, *rest, **scalars: (q, k)


class NormOfKeysLeftOut(Healthy):
    """A root-mean-square norm in place of the layer norm: the mean stays."""

    def bind(self) -> None:
        super().bind()
        project = self.k.forward
        self.k.forward = lambda x, step: project(x, step) + 3.0 * torch.arange(self.args.head_size)  # type: ignore[method-assign]


LAYERS = (RotatesOtherPairs, KeysWithoutTheirBias, RotatesNothing, NormOfKeysLeftOut)


def tried_layer(site: Site, layer: type[SparseIndexer]) -> Caught | None:
    made = subject(site, layer, "layer", "sparse_indexer", "default", requires=[{"dtype": ["float32"]}])
    return first_failure(made, LayerTrials(), "*/tokens-*")


@pytest.mark.parametrize("layer", LAYERS)
def test_faults_of_the_layer(site: Site, layer: type[Healthy]) -> None:
    caught = tried_layer(site, layer)
    assert caught
    assert caught.check == "values", str(caught)


def test_a_healthy_layer_passes(site: Site) -> None:
    caught = tried_layer(site, Healthy)
    assert caught is None, str(caught)
