"""Derived forms, and ops bound through core's manifest: references, composites and what plugins add."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hardpoint.ops import get
from hardpoint.ops.add_rms_norm import add_rms_norm
from hardpoint.ops.base import CustomOp, by_tokens, functional_from_out, poisoned
from hardpoint.ops.qk_norm_rope_store import qk_norm_rope_store
from hardpoint.ops.rms_norm import rms_norm
from hardpoint.ops.store_kv import store_kv
from hardpoint_plugin_api import ConfigError, Contribution, OpWorkload, PluginLoadError, StoreCall, TokensRequirement
from tests.ops.judging import DTYPES, failures
from tests.ops.manifest_context import context

Tensor = torch.Tensor
SCALARS: Any = {"eps": 0.0, "interleaved": False}


def plugin_op(of: str, target: str, **fields: Any) -> Contribution:
    """A contribution of a plugin that outranks core's."""
    return Contribution(family="op", of=of, name=target, target=target, priority=100, **fields)


def test_a_bound_op_is_the_chosen_function_itself() -> None:
    assert rms_norm.bind(context()) is rms_norm.reference


def test_the_workload_carries_what_the_caller_says() -> None:
    ctx = context()
    rms_norm.bind(ctx, head_size=64)
    assert ctx.asked == [OpWorkload(of="rms_norm", dtype="float32", head_size=64)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["add_rms_norm", "qk_norm_rope_store"])
def test_composites_of_the_references_pass(name: str, dtype: torch.dtype) -> None:
    bound = get(name).bind(context())
    assert bound is not get(name).reference
    assert not failures(get(name), bound, dtype)


def counting(function: Callable[..., Any], calls: list[str], name: str) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    return counted


def test_composites_take_their_parts_as_selected() -> None:
    calls: list[str] = []
    ctx = context(
        plugin_op("rms_norm", "acme:norm"),
        targets={"acme:norm": counting(rms_norm.reference, calls, "selected")},
    )
    x = torch.randn(2, 8)
    add_rms_norm.bind(ctx)(x, x, x[0], eps=1e-6)
    assert calls == ["selected"]
    given = counting(rms_norm.reference, calls, "given")
    add_rms_norm.bind(ctx, parts={"rms_norm": given})(x, x, x[0], eps=1e-6)
    assert calls == ["selected", "given"]


def qkv_args() -> tuple[Any, ...]:
    q, k, v = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    return q, k, v, torch.randn(9, 8), torch.tensor([4, 5, 6])


def test_the_backends_own_store_fits_any_layout() -> None:
    """Here the cache is one tensor, keys and values side by side, that core knows nothing of."""
    cache = {"joint": torch.zeros(12, 2, 16)}

    def store(call: StoreCall) -> None:
        call.cache["joint"][call.slot_mapping.long()] = torch.cat([call.k, call.v], dim=-1)

    slots = torch.tensor([4, 5, 8], dtype=torch.int32)
    args = qkv_args()
    bound: Callable[..., Any] = qk_norm_rope_store.bind(context(), parts={"store": store}, layout="joint", head_size=8)
    q, k = bound(*args, cache, slots, **SCALARS)
    assert q.shape == (3, 4, 8)
    torch.testing.assert_close(cache["joint"][slots.long()], torch.cat([k, args[2]], dim=-1))
    assert int(cache["joint"].count_nonzero()) == 3 * 2 * 16


def test_another_layout_without_a_store_is_refused() -> None:
    with pytest.raises(PluginLoadError, match="layout 'joint' without the part 'store'"):
        qk_norm_rope_store.bind(context(), layout="joint")


def test_the_functional_form_is_derived_from_the_out_form() -> None:
    def norm_out(x: Tensor, weight: Tensor, out: Tensor, *, eps: float) -> None:
        out.copy_(rms_norm.reference(x, weight, eps=eps))

    ctx = context(plugin_op("rms_norm", "acme:norm_out", form="out"), targets={"acme:norm_out": norm_out})
    assert not failures(rms_norm, rms_norm.bind(ctx), torch.bfloat16)


def test_out_forms_find_their_outputs_after_defaults_too() -> None:
    """Two weights left out, one given by name: the outputs still come last."""
    seen: list[tuple[Any, ...]] = []

    def fused_out(*args: Any, eps: float, interleaved: bool) -> None:
        seen.append(args)
        q, k = qk_norm_rope_store.reference(*args[:9], eps=eps, interleaved=interleaved)
        args[9].copy_(q)
        args[10].copy_(k)

    assert qk_norm_rope_store.allocate is not None
    functional: Callable[..., Any] = functional_from_out(
        fused_out, qk_norm_rope_store.allocate, qk_norm_rope_store.reference
    )
    cache = {name: torch.zeros(3, 4, 2, 8) for name in ("k", "v")}
    slots, weight = torch.tensor([4, 5, 8], dtype=torch.int32), torch.randn(8)
    functional(*qkv_args(), cache, slots, **SCALARS)
    functional(*qkv_args(), cache, slots, **SCALARS, q_weight=weight)
    assert [(args[7] is None, args[8], len(args)) for args in seen] == [(True, None, 11), (False, None, 11)]
    assert not failures(qk_norm_rope_store, functional, torch.float32)


def test_an_op_without_outputs_has_no_out_form() -> None:
    ctx = context(plugin_op("store_kv", "acme:store", form="out"), targets={"acme:store": print})
    with pytest.raises(PluginLoadError, match="'acme:store' of plugin 'core' cannot be of form 'out'"):
        store_kv.bind(ctx)


def test_poisoned_outputs_show_what_was_not_written() -> None:
    assert rms_norm.allocate is not None
    nothing = functional_from_out(lambda *args, eps: None, poisoned(rms_norm.allocate), rms_norm.reference)
    assert nothing(torch.ones(2, 2), torch.ones(2), eps=0.0).isnan().all()
    argmax = get("argmax_tokens")
    assert argmax.allocate is not None
    assert poisoned(argmax.allocate)(torch.ones(2, 3)).tolist() == [-(2**63)] * 2


def test_winners_of_ranges_stand_behind_one_comparison() -> None:
    calls: list[str] = []
    targets = {f"acme:{n}": counting(rms_norm.reference, calls, n) for n in ("few", "some", "many")}
    ranges = {"few": TokensRequirement(1, 4), "some": TokensRequirement(5, 64), "many": TokensRequirement(65)}
    contributions = [plugin_op("rms_norm", f"acme:{n}", requires=(r,)) for n, r in ranges.items()]
    bound = rms_norm.bind(context(*contributions, targets=targets))
    for tokens in (0, 1, 4, 5, 64, 65, 1000):
        bound(torch.ones(tokens, 2), torch.ones(2), eps=1e-6)
    assert calls == ["few", "few", "few", "some", "some", "many", "many"]


def test_one_winner_is_returned_as_it_is() -> None:
    assert by_tokens([None], [rms_norm.reference]) is rms_norm.reference


def raising_factory(ctx: Any, workload: Any, parts: Any) -> Any:
    raise KeyError("tile")


def refusing_factory(ctx: Any, workload: Any, parts: Any) -> Any:
    raise ConfigError("acme.tile: only 8 is compiled")


@pytest.mark.parametrize(
    ("form", "target", "fact"),
    [
        ("factory", raising_factory, "raised KeyError: 'tile'"),
        ("factory", lambda: None, "raised TypeError: .* takes 0 positional arguments but 3 were given"),
        ("factory", lambda ctx, workload, parts: None, "returned None, which cannot be called"),
        ("functional", 3, "is 3, which cannot be called"),
        ("out", 3, "is 3, which cannot be called"),
    ],
)
def test_a_misbehaving_implementation_is_blamed_by_name(form: str, target: object, fact: str) -> None:
    ctx = context(plugin_op("rms_norm", "acme:norm", form=form), targets={"acme:norm": target})
    with pytest.raises(PluginLoadError, match=rf"plugin core: .*acme:norm.*target 'acme:norm' {fact}; fix: "):
        rms_norm.bind(ctx)


def test_what_a_factory_says_in_our_words_passes_unchanged() -> None:
    contribution = plugin_op("rms_norm", "acme:norm", form="factory")
    with pytest.raises(ConfigError, match=r"^acme\.tile: only 8 is compiled$"):
        rms_norm.bind(context(contribution, targets={"acme:norm": refusing_factory}))


# Static arguments


def test_the_workload_says_the_static_arguments_and_composites_pass_them_on() -> None:
    ctx = context()
    qk_norm_rope_store.bind(ctx, parts={"store": print}, scalars={"interleaved": True, "eps": 1e-5})
    told = {workload.of: dict(workload.scalars) for workload in ctx.asked}
    assert told == {
        "qk_norm_rope_store": {"eps": 1e-5, "interleaved": True},
        "rms_norm": {"eps": 1e-5},
        "rotary_embedding": {"interleaved": True},
    }
    assert ctx.asked[0].key() == "dtype=float32 eps=1e-05 interleaved=True"
    with pytest.raises(TypeError, match=r"op rms_norm: epsilon not among its static arguments \(eps\)"):
        rms_norm.bind(ctx, scalars={"epsilon": 1e-5})


def test_only_an_argument_by_keyword_can_be_static() -> None:
    def times(x: Tensor, *, n: int) -> Tensor:
        return x * n

    with pytest.raises(ValueError, match="op times: static arguments must be keyword-only, got x"):
        CustomOp(times, cases=rms_norm.cases, errors=rms_norm.errors, static=["x", "n"])
