"""All-to-alls between ranks in threads, over gloo: each token gets what all of its experts make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from hardpoint.conformance.site import Site
from hardpoint.context import Context
from hardpoint.experts.prepare_finalize import PrepareFinalize
from hardpoint.numerics import fake_quantize
from hardpoint.parallel.groups import Group, alone
from hardpoint.parallel.process_group import Store
from hardpoint.plugin_host import discover
from hardpoint.reference.all2all import AllGatherReduceScatter, AllToAll, NaiveAll2All, Replicated
from hardpoint.reference.experts import ReferenceExperts
from hardpoint.reference.local_all2all import LocalAll2All, LocalBatches
from hardpoint.reference.torch_distributed import GatherAndSum, TorchDistributed
from hardpoint_plugin_api import (
    All2All,
    All2AllWorkload,
    Communicator,
    CommunicatorWorkload,
    Dispatched,
    ExpertsCall,
    ExpertsWorkload,
    Parallel,
    QuantSpec,
    Scale,
)
from tests.parallel.ranks import on_each

EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 3, 16, 24
AMONG_RANKS = [AllGatherReduceScatter, NaiveAll2All, AllToAll]
T = TypeVar("T")


@pytest.fixture(scope="module")
def site() -> Site:
    return Site.open(discover(), "cpu")


def among(site: Site, world: int, communicator: type[Communicator], run: Callable[[Context], T]) -> list[T]:
    """The results of ``run`` on each of ``world`` ranks, given a context whose experts are divided among them."""

    def one(rank: int, store: Store) -> T:
        groups = alone()
        ctx = replace(site.context(torch.float32), parallel=Parallel(groups.tp, groups.ep, groups.expert_tp, groups.pp))
        made = communicator(ctx, CommunicatorWorkload())
        made.init(store, rank, world, "ep")
        ep = Group("ep", tuple(range(world)), rank, [(None, made)])
        try:
            with torch.inference_mode():
                return run(replace(ctx, parallel=Parallel(groups.tp, ep, groups.expert_tp, groups.pp)))
        finally:
            made.close()

    return on_each(world, one)


def workload(ranks: int) -> All2AllWorkload:
    return All2AllWorkload(ranks=ranks, num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, parallel="ep")


def draw(tokens: int, absent: float = 0.1) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Tokens of all ranks, and the weights of all experts."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K].int()
    ids[torch.rand(ids.shape, generator=generator) < absent] = -1
    w = {
        "w13.weight": torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator),
        "w2.weight": torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator),
    }
    return torch.randn(tokens, HIDDEN, generator=generator), ids, torch.rand(ids.shape, generator=generator), w


def own_rows(x: Tensor, rows: tuple[int, ...], rank: int) -> Tensor:
    start = sum(rows[:rank])
    return x[start : start + rows[rank]]


def own_experts(w: dict[str, Tensor], ranks: int, rank: int) -> dict[str, Tensor]:
    return {name: m.chunk(ranks)[rank] for name, m in w.items()}


def run_layer(
    ctx: Context, all2all: type[All2All], kernel: type[ReferenceExperts], rows: tuple[int, ...], steps: int = 1
) -> list[Tensor]:
    """This rank's part of ``steps`` steps of a layer."""
    ep = ctx.parallel.ep
    around = PrepareFinalize(
        ctx, all2all(ctx, workload(ep.size)), kernel(ctx, ExpertsWorkload(activation="silu_and_mul"))
    )
    x, ids, weights, w = draw(sum(rows))
    x, ids, weights = (own_rows(full, rows, ep.rank) for full in (x, ids, weights))
    scratch = torch.empty(0, dtype=torch.uint8)
    return [around.run(x, ids, weights, own_experts(w, ep.size, ep.rank), scratch) for _ in range(steps)]


def expected(site: Site, tokens: int) -> Tensor:
    """The same layer on one rank."""
    x, ids, weights, w = draw(tokens)
    out = torch.empty_like(x)
    kernel = ReferenceExperts(site.context(torch.float32), ExpertsWorkload(activation="silu_and_mul"))
    kernel.apply(ExpertsCall(x, ids, weights, w, out, torch.empty(0, dtype=torch.uint8)))
    return out


@pytest.mark.parametrize("rows", [(4, 4), (5, 2), (0, 3), (7, 0), (0, 0), (3, 0, 1, 6)], ids=str)
@pytest.mark.parametrize("all2all", AMONG_RANKS)
def test_ranks_get_their_own_tokens_back(site: Site, all2all: type[All2All], rows: tuple[int, ...]) -> None:
    results = among(
        site, len(rows), TorchDistributed, lambda ctx: run_layer(ctx, all2all, ReferenceExperts, rows, steps=2)
    )
    whole = expected(site, sum(rows))
    for rank, steps in enumerate(results):
        for out in steps:
            torch.testing.assert_close(out, own_rows(whole, rows, rank))


@pytest.mark.parametrize("all2all", [AllGatherReduceScatter, NaiveAll2All])
def test_ranks_that_know_do_not_ask(site: Site, all2all: type[All2All]) -> None:
    """The expected counts hold for one dispatch; no numbers are exchanged for it, so that it can be recorded."""
    rows, asked = (2, 3), [0, 0]

    def one(ctx: Context) -> None:
        class Counting(all2all):  # type: ignore[misc, valid-type]  # the parameter is a class
            def _rows(self, x: Tensor) -> list[int]:
                asked[rank] += self._expected is None
                found: list[int] = super()._rows(x)
                return found

        rank, made = ctx.parallel.ep.rank, Counting(ctx, workload(2))
        x, ids, weights, _ = draw(sum(rows))
        given = [own_rows(full, rows, rank) for full in (x, ids, weights)]
        for expects in (True, False, True):
            if expects:
                made.expect(rows)
            sent = made.dispatch(given[0], None, *given[1:])
            assert torch.equal(sent.x, x)
            made.combine(sent.x, sent.handle, torch.empty_like(given[0]))
        made.expect((3, 2))
        with pytest.raises(RuntimeError, match=f"{(3, 2)[rank]} tokens were to be dispatched here, not {rows[rank]}"):
            made.dispatch(given[0], None, *given[1:])

    among(site, 2, TorchDistributed, one)
    assert asked == [1, 1]
    assert all2all.capturable
    assert not AllToAll.capturable


def test_a_share_is_not_taken_for_all_tokens(site: Site) -> None:
    """A layer that routes shares whatever the all2all is would lose what other ranks' experts make of them."""

    def one(ctx: Context) -> None:
        made = Replicated(ctx, workload(2))
        x, ids, weights, _ = draw(5)
        made.expect((5, 5))
        with pytest.raises(RuntimeError, match="all of the 5 tokens were to be dispatched here, not 2"):
            made.dispatch(x[:2], None, ids[:2], weights[:2])
        assert made.dispatch(x, None, ids, weights).x is x

    among(site, 2, TorchDistributed, one)


@pytest.mark.parametrize("all2all", AMONG_RANKS)
def test_a_tokens_bits_do_not_depend_on_who_else_is_there(site: Site, all2all: type[All2All]) -> None:
    """With a communicator that sums in the order of the ranks, whichever rank routes the token."""
    x, ids, weights, w = draw(9)

    def run(rows: tuple[int, ...], tokens: list[int]) -> Tensor:
        def one(ctx: Context) -> Tensor:
            kernel = ReferenceExperts(ctx, ExpertsWorkload(activation="silu_and_mul"))
            around = PrepareFinalize(ctx, all2all(ctx, workload(2)), OneByOne(ctx, kernel.workload))
            rank = ctx.parallel.ep.rank
            mine = (own_rows(full[tokens], rows, rank) for full in (x, ids, weights))
            own_x, own_ids, own_weights = mine
            scratch = torch.empty(0, dtype=torch.uint8)
            return around.run(own_x, own_ids, own_weights, own_experts(w, 2, rank), scratch)

        return torch.cat(among(site, 2, GatherAndSum, one))

    whole = run((5, 4), list(range(9)))
    assert torch.equal(run((0, 1), [3]), whole[3:4])
    assert torch.equal(run((3, 1), [8, 0, 3, 5]), whole[[8, 0, 3, 5]])


class OneByOne(ReferenceExperts):
    """The reference on one token at a time."""

    def apply(self, call: ExpertsCall) -> None:
        for i in range(call.x.shape[0]):
            row = slice(i, i + 1)
            one = {name: getattr(call, name)[row] for name in ("x", "ids", "weights", "out")}
            super().apply(replace(call, **one))


class TakesInt8(ReferenceExperts):
    """Wants its input quantized, with a scale for each token."""

    input_spec = QuantSpec("int8", scales=(Scale("float32", (1, -1)),), static=False)

    def apply(self, call: ExpertsCall) -> None:
        assert call.x.dtype == torch.int8
        assert call.scales is not None
        super().apply(replace(call, x=call.x.float() * call.scales))


@pytest.mark.parametrize("all2all", [*AMONG_RANKS, LocalAll2All])
def test_tokens_travel_quantized_where_the_kernel_wants_them_so(site: Site, all2all: type[All2All]) -> None:
    rows = (6,) if all2all is LocalAll2All else (1, 5)
    results = among(site, len(rows), TorchDistributed, lambda ctx: run_layer(ctx, all2all, TakesInt8, rows))
    x, ids, weights, w = draw(6)
    out, ctx = torch.empty_like(x), site.context(torch.float32)
    kernel = ReferenceExperts(ctx, ExpertsWorkload(activation="silu_and_mul"))
    rounded = fake_quantize(x, TakesInt8.input_spec, {})
    kernel.apply(ExpertsCall(rounded, ids, weights, w, out, torch.empty(0, dtype=torch.uint8)))
    torch.testing.assert_close(torch.cat([step for steps in results for step in steps]), out)
    assert not torch.allclose(out, expected(site, 6), atol=1e-4), "quantizing shows"


def test_a_token_goes_only_to_ranks_that_have_experts_of_it(site: Site) -> None:
    """Ids [T, K]: the first rank's tokens want experts of the second alone; the second's want nothing."""

    def one(ctx: Context) -> Dispatched:
        all2all = AllToAll(ctx, workload(2))
        ids = torch.tensor([[5, 4, -1], [7, 5, 6]] if ctx.parallel.ep.rank == 0 else [[-1, -1, -1]]).int()
        x = torch.arange(ids.shape[0] * HIDDEN).view(-1, HIDDEN).float()
        sent = all2all.dispatch(x, None, ids, torch.ones(ids.shape))
        out = torch.full_like(x, float("nan"))
        all2all.combine(sent.x * 2, sent.handle, out)
        assert torch.equal(out, x * 2 if ctx.parallel.ep.rank == 0 else torch.zeros_like(x))
        return sent

    first, second = among(site, 2, TorchDistributed, one)
    assert first.x.shape == (0, HIDDEN)
    assert second.x.shape == (2, HIDDEN)
    assert second.ids is not None
    assert second.ids.tolist() == [[1, 0, -1], [3, 1, 2]]
    assert second.ids.dtype == torch.int32


@pytest.mark.parametrize("all2all", [LocalAll2All, LocalBatches, *AMONG_RANKS])
def test_a_handle_dies_with_its_combine(site: Site, all2all: type[All2All]) -> None:
    def one(ctx: Context) -> str:
        made = all2all(ctx, workload(ctx.parallel.ep.size))
        x, ids, weights, _ = draw(3)
        sent = made.dispatch(x, None, ids, weights)
        out = torch.empty_like(x)
        made.combine(sent.x.clone(), sent.handle, out)
        with pytest.raises(RuntimeError, match="combined once") as caught:
            made.combine(sent.x.clone(), sent.handle, out)
        return str(caught.value)

    assert len(among(site, 2 if all2all in AMONG_RANKS else 1, TorchDistributed, one)) in (1, 2)


def test_what_is_not_implemented_raises(site: Site) -> None:
    class Half(All2All):
        def dispatch(self, x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor) -> Dispatched:
            return super().dispatch(x, scales, ids, weights)  # type: ignore[safe-super]  # that is what is tested

        def combine(self, y: Tensor, handle: object, out: Tensor) -> None:
            super().combine(y, handle, out)  # type: ignore[safe-super]

    half = Half(site.context(torch.float32), workload(2))
    x, ids, weights, _ = draw(3)
    with pytest.raises(NotImplementedError, match="Half cannot dispatch"):
        half.dispatch(x, None, ids, weights)
    with pytest.raises(NotImplementedError, match="Half cannot combine"):
        half.combine(x, None, x)
    with pytest.raises(TypeError, match="abstract"):
        All2All(site.context(torch.float32), workload(2))  # type: ignore[abstract]


@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_batches_hold_each_experts_tokens(site: Site, tokens: int) -> None:
    made = LocalBatches(site.context(torch.float32), workload(1))
    x, ids, weights, _ = draw(tokens)
    before = x.clone(), ids.clone()
    sent = made.dispatch(x, None, ids, weights)
    assert sent.counts is not None
    assert made.most_rows(tokens) == sent.x.shape[0] * sent.x.shape[1]
    for expert in range(EXPERTS):
        mine = (ids == expert).any(-1)
        assert int(sent.counts[expert]) == int(mine.sum())
        assert torch.equal(sent.x[expert, : int(mine.sum())], x[mine])
    garbage = torch.where(sent.x.abs().sum(-1, keepdim=True) > 0, sent.x, float("nan"))
    out = torch.full_like(x, float("nan"))
    made.combine(garbage, sent.handle, out)
    torch.testing.assert_close(out, x * (weights * (ids >= 0)).sum(-1, keepdim=True))
    assert torch.equal(x, before[0])
    assert torch.equal(ids, before[1])
