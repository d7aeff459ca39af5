"""The ops of a mixture of experts: against their definitions and Transformers' own routers; planted faults."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from hardpoint.ops import get
from hardpoint.ops.act_and_mul import act_and_mul
from hardpoint.ops.grouped_topk import grouped_topk
from hardpoint.ops.moe_permute import moe_permute
from hardpoint.ops.moe_unpermute import moe_unpermute
from hardpoint.ops.route_topk import route_topk, settings
from hardpoint.ops.routing import Routed, best, scores_of, weigh
from hardpoint.ops.topk_sigmoid import topk_sigmoid
from hardpoint.ops.topk_softmax import topk_softmax
from hardpoint_plugin_api import ConfigError, RouterArgs, UnknownNameError
from tests.ops.judging import DTYPES, failures
from tests.ops.manifest_context import context

softmax, sigmoid, grouped = topk_softmax.reference, topk_sigmoid.reference, grouped_topk.reference
permute, unpermute = moe_permute.reference, moe_unpermute.reference
ROUTERS = ("topk_softmax", "topk_sigmoid", "grouped_topk", "route_topk")

# Definitions


def by_hand(
    scores: list[float], choice: list[float], top_k: int, renormalize: bool, scaling: float
) -> dict[int, float]:
    """Weights of the chosen experts, of one token."""
    ids = sorted(range(len(choice)), key=lambda e: (-choice[e], e))[:top_k]
    total = sum(scores[e] for e in ids) if renormalize else 1.0
    return {e: scores[e] / total * scaling for e in ids}


@pytest.mark.parametrize(("renormalize", "scaling"), [(False, 1.0), (True, 1.0), (True, 2.5), (False, 0.5)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_topk_is_its_definition(scoring: str, biased: bool, renormalize: bool, scaling: float) -> None:
    logits, bias = torch.randn(6, 12, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    op = softmax if scoring == "softmax" else sigmoid
    ids, weights = op(logits, bias if biased else None, top_k=4, renormalize=renormalize, scaling=scaling)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float64)
    for row in range(6):
        exp = logits[row].exp()
        scores = exp / exp.sum() if scoring == "softmax" else exp / (1 + exp)
        expected = by_hand(scores.tolist(), (scores + bias if biased else scores).tolist(), 4, renormalize, scaling)
        assert ids[row].tolist() == list(expected)
        assert weights[row].tolist() == pytest.approx(list(expected.values()), rel=1e-12)


def router_config(**changes: Any) -> Any:
    """The config of Transformers' routers; their weight is to be the identity, so that logits are the input."""
    return SimpleNamespace(num_experts=32, num_local_experts=32, hidden_size=32, **changes)


def with_identity(router: nn.Module) -> Any:
    """A router whose logits are its input."""
    nn.init.eye_(cast(Tensor, router.weight))
    return router


def test_mixtrals_router_is_transformers_own() -> None:
    logits = torch.randn(30, 32)
    _, weights, ids = with_identity(MixtralTopKRouter(router_config(num_experts_per_tok=2)))(logits)
    got = softmax(logits, top_k=2, renormalize=True, scaling=1.0)
    assert torch.equal(got[0].long(), ids)
    torch.testing.assert_close(got[1], weights)


def test_deepseek_v3s_router_is_transformers_own() -> None:
    config = router_config(
        num_experts_per_tok=5, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5
    )
    router, logits, bias = with_identity(DeepseekV3TopkRouter(config)), torch.randn(40, 32) * 2, torch.rand(32)
    router.e_score_correction_bias = bias
    groups: dict[str, Any] = {"num_groups": 4, "top_groups": 2, "scoring": "sigmoid"}
    got = grouped(logits, bias, top_k=5, renormalize=True, scaling=2.5, **groups)
    check_same_choice(got, *router(logits)[1:])


def test_deepseek_v2s_router_is_transformers_own() -> None:
    config = router_config(
        num_experts_per_tok=6, n_group=8, topk_group=3, topk_method="group_limited_greedy", routed_scaling_factor=16.0
    )
    router, logits = with_identity(DeepseekV2TopkRouter(config)), torch.randn(40, 32) * 2
    groups: dict[str, Any] = {"num_groups": 8, "top_groups": 3, "scoring": "softmax"}
    got = grouped(logits, top_k=6, renormalize=False, scaling=16.0, **groups)
    check_same_choice(got, *router(logits)[1:])


def check_same_choice(got: Routed, weights: Tensor, ids: Tensor) -> None:
    """Transformers leaves the order open."""
    order, other = got[0].argsort(-1), ids.argsort(-1)
    assert torch.equal(got[0].gather(-1, order).long(), ids.gather(-1, other))
    torch.testing.assert_close(got[1].gather(-1, order), weights.gather(-1, other))


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize(
    ("bias", "what"),
    [
        (torch.zeros(8, dtype=torch.bfloat16), r"must be float32 of shape \[8\], got bfloat16 of shape \[8\]"),
        (torch.zeros(8, dtype=torch.float64), "got float64"),
        (torch.zeros(1, 8), r"of shape \[1, 8\]"),
        (torch.zeros(16), r"of shape \[16\]"),
    ],
)
def test_a_bias_of_another_kind_is_refused(name: str, bias: Tensor, what: str) -> None:
    keywords: dict[str, Any] = {"top_k": 2, "renormalize": True, "scaling": 1.0}
    if name in ("grouped_topk", "route_topk"):
        keywords |= {"scoring": "sigmoid", "num_groups": 2, "top_groups": 1}
    with pytest.raises(ConfigError, match=what):
        get(name).reference(torch.randn(3, 8), bias, **keywords)


@pytest.mark.parametrize(("top_k", "num_groups", "top_groups"), [(2, 3, 1), (5, 4, 2), (1, 4, 5), (1, 4, 0)])
def test_groups_that_cannot_be(top_k: int, num_groups: int, top_groups: int) -> None:
    with pytest.raises(ConfigError, match="groups must divide the experts, and hold enough of them"):
        grouped(
            torch.randn(3, 8),
            top_k=top_k,
            num_groups=num_groups,
            top_groups=top_groups,
            scoring="softmax",
            renormalize=False,
            scaling=1.0,
        )


@pytest.mark.parametrize(
    ("router", "part"),
    [
        (RouterArgs(8, 2), "topk_softmax"),
        (RouterArgs(8, 2, "sigmoid", bias=True), "topk_sigmoid"),
        (RouterArgs(8, 2, num_groups=2), "grouped_topk"),
        (RouterArgs(8, 2, "sigmoid", num_groups=2, bias=True), "grouped_topk"),
    ],
)
def test_the_composition_binds_the_one_part_that_it_needs(router: RouterArgs, part: str) -> None:
    ctx = context()
    assert router.routing == part
    route = route_topk.bind(ctx, routing=router.routing)
    assert [(w.of, w.routing) for w in ctx.asked] == [("route_topk", part), (part, None)]
    logits, bias = torch.randn(5, 8), torch.rand(8) if router.bias else None
    expected = route_topk.reference(logits, bias, **settings(router))
    assert all(map(torch.equal, route(logits, bias, **settings(router)), expected))


def test_a_routing_that_does_not_exist() -> None:
    keywords = settings(RouterArgs(8, 2)) | {"scoring": "sofmax"}
    with pytest.raises(UnknownNameError, match="did you mean 'softmax'"):
        route_topk.reference(torch.randn(3, 8), **keywords)
    with pytest.raises(UnknownNameError, match="did you mean 'softmax'"):
        grouped_topk.reference(torch.randn(3, 8), **(keywords | {"num_groups": 2}))


@pytest.mark.parametrize("absent", [0.0, 0.4, 1.0])
def test_there_and_back(absent: float) -> None:
    x, weights = torch.randn(50, 6), torch.rand(50, 3)
    ids = torch.stack([torch.randperm(8)[:3] for _ in range(50)]).int()
    ids[torch.rand(50, 3) < absent] = -1
    before = ids.clone()
    rows, starts, places = permute(x, ids, num_experts=8)
    assert torch.equal(ids, before)
    assert (rows.shape, starts.dtype, places.dtype) == ((150, 6), torch.int64, torch.int64)
    assert starts.diff().tolist() == [int((ids == e).sum()) for e in range(8)]
    for e in range(8):
        tokens = (ids == e).any(-1).nonzero().flatten()
        assert torch.equal(rows[starts[e] : starts[e + 1]], x[tokens]), "in the order of the tokens"
    assert not rows[starts[-1] :].any()
    assert torch.equal(places < 0, ids < 0)
    expected = x * (weights * (ids >= 0)).sum(-1, keepdim=True)
    torch.testing.assert_close(unpermute(rows, places, weights), expected)


def test_a_map_of_experts_is_applied_to_ids_of_all_ranks() -> None:
    x, ids = torch.randn(20, 4), torch.randint(0, 8, (20, 2)).int()
    here = torch.tensor([-1, 0, -1, 1, -1, 2, -1, 3]).int()
    mapped = permute(x, ids, here, num_experts=4)
    assert all(map(torch.equal, mapped, permute(x, here[ids], num_experts=4)))


def test_ids_are_copied_only_for_a_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a map the very storage of the ids is sorted."""
    sorted_storages = []
    real = torch.Tensor.sort

    def sort(self: Tensor, *args: Any, **options: Any) -> Any:
        sorted_storages.append(self.untyped_storage().data_ptr())
        return cast(Any, real)(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "sort", sort)
    x, ids = torch.randn(20, 4), torch.randint(-1, 8, (20, 2)).int()
    permute(x, ids, num_experts=8)
    permute(x, ids, torch.arange(8).int(), num_experts=8)
    assert [s == ids.untyped_storage().data_ptr() for s in sorted_storages] == [True, False]


@pytest.mark.nightly
def test_offsets_beyond_32_bits() -> None:
    """2.2e9 elements: token and row numbers times the width do not fit into 32 bits."""
    hidden, tokens = 2**17, 2**14 + 500
    x = torch.zeros(1, hidden, dtype=torch.int8).expand(tokens, hidden).clone()
    x[-1] = 7
    rows, starts, places = permute(x, torch.zeros(tokens, 1, dtype=torch.int32), num_experts=1)
    assert rows.numel() > 2**31
    assert int(starts[1]) == tokens
    assert (rows[-1] == 7).all()
    assert not rows[-2].any()
    assert torch.equal(places.flatten(), torch.arange(tokens))


def test_swiglu_oai_is_transformers_own() -> None:
    experts = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=2))
    gate, up = torch.randn(50, 32) * 6, torch.randn(50, 32) * 6
    expected = experts._apply_gate(torch.stack([gate, up], dim=-1).flatten(-2))  # its columns alternate
    got = act_and_mul.reference(torch.cat([gate, up], dim=-1), activation="swiglu_oai")
    torch.testing.assert_close(got, expected)


# Faults. Each is named by what it does wrong.

Router = Callable[..., Routed]


def router(name: str) -> Router:
    return get(name).reference


def softmax_over_the_chosen(logits: Tensor, bias: Tensor | None = None, **keywords: Any) -> Routed:
    ids, weights = softmax(logits, bias, **keywords)
    return ids, weights / weights.sum(-1, keepdim=True) * keywords["scaling"]


def renormalized_after_scaling(logits: Tensor, bias: Tensor | None = None, **keywords: Any) -> Routed:
    ids, weights = softmax(logits, bias, **(keywords | {"renormalize": False}))
    return ids, weights / weights.sum(-1, keepdim=True) if keywords["renormalize"] else weights


def scored_in_the_own_dtype(logits: Tensor, bias: Tensor | None = None, **keywords: Any) -> Routed:
    ids, _ = softmax(logits, bias, **keywords)
    low = logits if logits.dtype != torch.float32 else logits.bfloat16()
    _, weights = weigh(low.softmax(-1).float(), ids.long(), keywords["renormalize"], keywords["scaling"])
    return ids, weights


def ids_of_64_bits(logits: Tensor, bias: Tensor | None = None, **keywords: Any) -> Routed:
    ids, weights = softmax(logits, bias, **keywords)
    return ids.long(), weights


def weights_in_the_own_dtype(logits: Tensor, bias: Tensor | None = None, **keywords: Any) -> Routed:
    ids, weights = softmax(logits, bias, **keywords)
    return ids, weights.bfloat16().float()


def last_of_equals(logits: Tensor, bias: Tensor | None = None, **keywords: Any) -> Routed:
    flipped = None if bias is None else bias.flip(-1)
    ids, weights = softmax(logits.flip(-1), flipped, **keywords)
    return logits.shape[-1] - 1 - ids, weights


def lowest_first(logits: Tensor, bias: Tensor | None = None, **keywords: Any) -> Routed:
    ids, weights = softmax(logits, bias, **keywords)
    return ids.flip(-1), weights.flip(-1)


def bias_in_the_weights(logits: Tensor, bias: Tensor | None = None, **keywords: Any) -> Routed:
    scores = scores_of(logits, "sigmoid")
    choice = scores if bias is None else scores + bias
    return weigh(choice, best(choice, keywords["top_k"]), keywords["renormalize"], keywords["scaling"])


def bias_ignored(logits: Tensor, bias: Tensor | None = None, **keywords: Any) -> Routed:
    return sigmoid(logits, None, **keywords)


def bias_added_to_logits(logits: Tensor, bias: Tensor | None = None, **keywords: Any) -> Routed:
    scores = scores_of(logits, "sigmoid")
    choice = logits.float() if bias is None else logits.float() + bias
    return weigh(scores, best(choice, keywords["top_k"]), keywords["renormalize"], keywords["scaling"])


def scaling_ignored(logits: Tensor, bias: Tensor | None = None, **keywords: Any) -> Routed:
    return sigmoid(logits, bias, **(keywords | {"scaling": 1.0}))


def softmax_for_sigmoid(logits: Tensor, bias: Tensor | None = None, **keywords: Any) -> Routed:
    return softmax(logits, bias, **keywords)


def groups_ignored(logits: Tensor, bias: Tensor | None = None, **keywords: Any) -> Routed:
    return grouped(logits, bias, **(keywords | {"num_groups": 1, "top_groups": 1}))


def groups_by_their_best(logits: Tensor, bias: Tensor | None = None, **keywords: Any) -> Routed:
    scores = scores_of(logits, keywords["scoring"])
    choice = (scores if bias is None else scores + bias).unflatten(-1, (keywords["num_groups"], -1))
    top = best(choice.amax(-1), keywords["top_groups"])
    kept = torch.zeros(choice.shape[:-1], dtype=torch.bool).scatter_(-1, top, True).unsqueeze(-1)
    ids = best(choice.masked_fill(~kept, float("-inf")).flatten(-2), keywords["top_k"])
    return weigh(scores, ids, keywords["renormalize"], keywords["scaling"])


def other_groups_count_as_zero(logits: Tensor, bias: Tensor | None = None, **keywords: Any) -> Routed:
    """As in early DeepSeek-V3 code: with a negative bias, zero is better than the best."""
    scores = scores_of(logits, keywords["scoring"])
    choice = (scores if bias is None else scores + bias).unflatten(-1, (keywords["num_groups"], -1))
    two = choice.topk(min(2, choice.shape[-1]), dim=-1).values
    top = best(choice.amax(-1) if bias is None else two.sum(-1), keywords["top_groups"])
    kept = torch.zeros(choice.shape[:-1], dtype=torch.bool).scatter_(-1, top, True).unsqueeze(-1)
    ids = best(choice.masked_fill(~kept, 0.0).flatten(-2), keywords["top_k"])
    return weigh(scores, ids, keywords["renormalize"], keywords["scaling"])


def groups_that_alternate(logits: Tensor, bias: Tensor | None = None, **keywords: Any) -> Routed:
    """Group g is every G-th expert."""
    order = torch.arange(logits.shape[-1]).view(-1, keywords["num_groups"]).t().flatten()
    ids, weights = grouped(logits[:, order], None if bias is None else bias[order], **keywords)
    return order[ids.long()].int(), weights


def always_softmax(logits: Tensor, bias: Tensor | None = None, **keywords: Any) -> Routed:
    return route_topk.reference(logits, bias, **(keywords | {"scoring": "softmax"}))


def never_grouped(logits: Tensor, bias: Tensor | None = None, **keywords: Any) -> Routed:
    return route_topk.reference(logits, bias, **(keywords | {"num_groups": 1}))


Permuted = tuple[Tensor, Tensor, Tensor]


def absent_first(x: Tensor, ids: Tensor, expert_map: Tensor | None = None, *, num_experts: int) -> Permuted:
    rows, starts, places = permute(x, ids, expert_map, num_experts=num_experts)
    absent = int((places < 0).sum())
    return rows.roll(absent, 0), starts + absent, torch.where(places < 0, places, places + absent)


def absent_on_the_first_expert(
    x: Tensor, ids: Tensor, expert_map: Tensor | None = None, *, num_experts: int
) -> Permuted:
    return permute(x, ids.clamp(min=0), expert_map, num_experts=num_experts)


def map_ignored(x: Tensor, ids: Tensor, expert_map: Tensor | None = None, *, num_experts: int) -> Permuted:
    return permute(x, ids % num_experts if expert_map is not None else ids, num_experts=num_experts)


def unstable_order(x: Tensor, ids: Tensor, expert_map: Tensor | None = None, *, num_experts: int) -> Permuted:
    rows, starts, places = permute(x.flip(0), ids.flip(0), expert_map, num_experts=num_experts)
    return rows, starts, places.flip(0)


def counts_for_starts(x: Tensor, ids: Tensor, expert_map: Tensor | None = None, *, num_experts: int) -> Permuted:
    rows, starts, places = permute(x, ids, expert_map, num_experts=num_experts)
    return rows, starts.diff(prepend=starts[:1]), places


def ids_overwritten(x: Tensor, ids: Tensor, expert_map: Tensor | None = None, *, num_experts: int) -> Permuted:
    result = permute(x, ids, expert_map, num_experts=num_experts)
    ids.copy_(ids.flip(-1))
    return result


def starts_of_32_bits(x: Tensor, ids: Tensor, expert_map: Tensor | None = None, *, num_experts: int) -> Permuted:
    rows, starts, places = permute(x, ids, expert_map, num_experts=num_experts)
    return rows, starts.int(), places


def rows_left_as_they_were(x: Tensor, ids: Tensor, expert_map: Tensor | None = None, *, num_experts: int) -> Permuted:
    rows, starts, places = permute(x, ids, expert_map, num_experts=num_experts)
    rows[starts[-1] :] = float("nan")
    return rows, starts, places


def weights_ignored(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return unpermute(rows, places, torch.ones_like(weights))


def absent_read_and_cleared(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """0 * NaN is NaN."""
    return unpermute(rows, places % max(1, rows.shape[0]), weights * (places >= 0))


def summed_in_half_precision(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    low = rows.dtype if rows.dtype != torch.float32 else torch.bfloat16
    total = torch.zeros(places.shape[0], rows.shape[1], dtype=low)
    for k in range(places.shape[1] if rows.numel() else 0):
        part = rows[places[:, k].clamp(min=0)] * weights[:, k, None]
        total += part.masked_fill(places[:, k, None] < 0, 0.0).to(low)
    return total.to(rows.dtype)


def averaged(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return unpermute(rows, places, weights / weights.shape[1])


def last_expert_forgotten(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return unpermute(rows, places[:, :-1], weights[:, :-1])


def tokens_without_experts_left_out(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    y = unpermute(rows, places, weights)
    y[(places < 0).all(-1)] = float("nan")
    return y


WRONG: list[tuple[str, Callable[..., Any]]] = [
    *(("topk_softmax", f) for f in (softmax_over_the_chosen, renormalized_after_scaling, scored_in_the_own_dtype)),
    *(("topk_softmax", f) for f in (ids_of_64_bits, weights_in_the_own_dtype, last_of_equals, lowest_first)),
    *(("topk_sigmoid", f) for f in (bias_in_the_weights, bias_ignored, bias_added_to_logits, scaling_ignored)),
    ("topk_sigmoid", softmax_for_sigmoid),
    *(("grouped_topk", f) for f in (groups_ignored, groups_by_their_best, other_groups_count_as_zero)),
    ("grouped_topk", groups_that_alternate),
    *(("route_topk", f) for f in (always_softmax, never_grouped)),
    *(("moe_permute", f) for f in (absent_first, absent_on_the_first_expert, map_ignored, unstable_order)),
    *(("moe_permute", f) for f in (counts_for_starts, ids_overwritten, starts_of_32_bits, rows_left_as_they_were)),
    *(("moe_unpermute", f) for f in (weights_ignored, absent_read_and_cleared, summed_in_half_precision, averaged)),
    *(("moe_unpermute", f) for f in (last_expert_forgotten, tokens_without_experts_left_out)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "implementation"), WRONG, ids=lambda x: getattr(x, "__name__", x))
def test_planted_faults_are_found(name: str, implementation: Callable[..., Any], dtype: torch.dtype) -> None:
    assert failures(get(name), implementation, dtype)


def chosen_by_torchs_topk(logits: Tensor, bias: Tensor | None = None, **keywords: Any) -> Routed:
    """All in float32, as fused kernels do: softmax of the chosen alone where it is renormalised anyway."""
    scores = logits.float().softmax(-1)
    choice = scores if bias is None else scores + bias
    order = (choice + 0.0).sort(dim=-1, descending=True, stable=True).indices[:, : keywords["top_k"]]
    if keywords["renormalize"]:
        weights = logits.float().gather(-1, order).softmax(-1)
    else:
        weights = (logits.float().gather(-1, order) - logits.float().logsumexp(-1, keepdim=True)).exp()
    return order.int(), weights * keywords["scaling"]


def permuted_by_counting(x: Tensor, ids: Tensor, expert_map: Tensor | None = None, *, num_experts: int) -> Permuted:
    """Expert by expert, as a counting kernel goes."""
    local = ids if expert_map is None else torch.where(ids < 0, ids, expert_map[ids.clamp(min=0)])
    rows, places = x.new_zeros(ids.numel(), x.shape[1]), torch.full(ids.shape, -1)
    starts, row = [0], 0
    for e in range(num_experts):
        for token, k in (local == e).nonzero().tolist():
            rows[row], places[token, k] = x[token], row
            row += 1
        starts.append(row)
    return rows, torch.tensor(starts), places


def unpermuted_by_a_matmul(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """In another order, and rounded once."""
    y = torch.zeros(places.shape[0], rows.shape[1])
    for token, (row_places, row_weights) in enumerate(zip(places, weights, strict=True)):
        here = row_places >= 0
        y[token] = row_weights[here].flip(0) @ rows[row_places[here].flip(0)].float()
    return y.to(rows.dtype)


RIGHT: list[tuple[str, Callable[..., Any]]] = [
    ("topk_softmax", chosen_by_torchs_topk),
    ("moe_permute", permuted_by_counting),
    ("moe_unpermute", unpermuted_by_a_matmul),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "implementation"), RIGHT, ids=lambda x: getattr(x, "__name__", x))
def test_right_formulations_pass(name: str, implementation: Callable[..., Any], dtype: torch.dtype) -> None:
    assert not failures(get(name), implementation, dtype)
