"""In batch-invariant mode every op gives a row the same bits whatever the other rows are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch.nn import functional

from hardpoint.config import EngineConfig
from hardpoint.context import Context
from hardpoint.engine.blueprint import draw
from hardpoint.ops import get, names
from hardpoint.ops.act_and_mul import GATED
from hardpoint.ops.activation import ACTIVATIONS
from hardpoint.ops.decode_inputs import allocate_step
from hardpoint.reference import batch_invariant_linear
from hardpoint.reference.batch_invariant_linear import BatchInvariantLinear, rows_are_alike
from hardpoint_plugin_api import NO_DRAFT, BuildContext, LinearCall, LinearWorkload, QuantSpec, Scale, SelectionError
from tests.ops.judging import failures
from tests.ops.manifest_context import OPS, load_target
from tests.support.row_invariance import RowFunction, check_rows

DTYPES = ("float32", "bfloat16")
COUNTS = (1, 2, 7, 33)
WIDTHS = (16, 33, 1000)
BLOCK = 16


@pytest.fixture(scope="module", params=DTYPES)
def ctx(request: pytest.FixtureRequest) -> Context:
    """An engine's own context, with everything selected but nothing loaded."""
    return draw(EngineConfig.create(model="demo", platform="cpu", dtype=request.param, batch_invariant=True)).ctx


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch's kernels split their work between so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


class Inputs:
    """Draws the inputs of an op: ``count`` rows, of ``width`` elements where the op leaves that open."""

    def __init__(self, ctx: Context, count: int, width: int) -> None:
        self.ctx, self.count, self.width = ctx, count, width
        self._generator = torch.Generator().manual_seed(count * 10_000 + width)

    def normal(self, *shape: int) -> torch.Tensor:
        """Numbers of the context's dtype."""
        return (torch.randn(shape, generator=self._generator) * 3).to(self.ctx.dtype)

    def floats(self, *shape: int) -> torch.Tensor:
        """Numbers in [0, 1)."""
        return torch.rand(shape, generator=self._generator)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Integers in [low, high), int64."""
        return torch.randint(low, high, shape, generator=self._generator)

    def distinct(self, below: int, count: int) -> torch.Tensor:
        """``count`` different integers, int64."""
        return torch.randperm(below, generator=self._generator)[:count]

    def slots(self) -> torch.Tensor:
        """A slot for each row, in a cache of ``count`` pages behind the null page."""
        return (self.distinct(self.count * BLOCK, self.count) + BLOCK).int()

    def cache(self) -> dict[str, torch.Tensor]:
        """An empty cache for those slots: two heads of 16."""
        return {name: torch.zeros(self.count + 1, BLOCK, 2, 16, dtype=self.ctx.dtype) for name in ("k", "v")}

    def table(self) -> torch.Tensor:
        """Cosines and sines of 50 positions, for heads of 16."""
        return torch.randn(50, 16, generator=self._generator)


Use = tuple[RowFunction, tuple[torch.Tensor, ...]]


def use_activation(i: Inputs, name: str) -> Use:
    op = get("activation").bind(i.ctx, activation=name)
    return lambda x: op(x, activation=name), (i.normal(i.count, i.width),)


def use_act_and_mul(i: Inputs, name: str) -> Use:
    op = get("act_and_mul").bind(i.ctx, activation=name)
    return lambda x: op(x, activation=name), (i.normal(i.count, 2 * i.width),)


def use_add_lora(i: Inputs) -> Use:
    op, a, b = get("add_lora").bind(i.ctx), i.normal(3, 4, i.width), i.normal(20, 3, 4)

    def added(y: torch.Tensor, x: torch.Tensor, adapters: torch.Tensor) -> torch.Tensor:
        op(mine := y.clone(), x, a, b, adapters)
        return mine

    return added, (i.normal(i.count, 20), i.normal(i.count, i.width), i.integers(-1, 3, i.count).int())


def use_rms_norm(i: Inputs, *heads: int) -> Use:
    op, weight = get("rms_norm").bind(i.ctx), i.normal(i.width)
    return lambda x: op(x, weight, eps=1e-6), (i.normal(i.count, *heads, i.width),)


def use_add_rms_norm(i: Inputs) -> Use:
    op, weight = get("add_rms_norm").bind(i.ctx), i.normal(i.width)
    rows = i.normal(i.count, i.width), i.normal(i.count, i.width)
    return lambda x, residual: op(x, residual, weight, eps=1e-6), rows


def use_allreduce_add_rms_norm(i: Inputs) -> Use:
    op, weight = get("allreduce_add_rms_norm").bind(i.ctx), i.normal(i.width)
    rows = i.normal(i.count, i.width), i.normal(i.count, i.width)
    return lambda x, residual: op(x, residual, weight, eps=1e-6), rows


_INT8_ROWS = QuantSpec("int8", scales=(Scale("float32", (1, -1)),), static=False)


def use_quantize_rows(i: Inputs) -> Use:
    op = get("quantize_rows").bind(i.ctx, spec=_INT8_ROWS)
    return lambda x: op(x, spec=_INT8_ROWS), (i.normal(i.count, i.width),)


def use_act_and_mul_quantized(i: Inputs) -> Use:
    op = get("act_and_mul_quantized").bind(i.ctx, activation="silu", spec=_INT8_ROWS)
    return lambda x: op(x, activation="silu", spec=_INT8_ROWS), (i.normal(i.count, 2 * i.width),)


def use_rms_norm_quantized(i: Inputs) -> Use:
    op, weight = get("rms_norm_quantized").bind(i.ctx, spec=_INT8_ROWS), i.normal(i.width)
    return lambda x: op(x, weight, eps=1e-6, spec=_INT8_ROWS), (i.normal(i.count, i.width),)


def use_add_rms_norm_quantized(i: Inputs) -> Use:
    op, weight = get("add_rms_norm_quantized").bind(i.ctx, spec=_INT8_ROWS), i.normal(i.width)
    rows = i.normal(i.count, i.width), i.normal(i.count, i.width)
    return lambda x, residual: op(x, residual, weight, eps=1e-6, spec=_INT8_ROWS), rows


def use_rotary_embedding(i: Inputs) -> Use:
    op, table = get("rotary_embedding").bind(i.ctx, head_size=16), i.table()
    rows = i.normal(i.count, 3, 16), i.normal(i.count, 2, 16), i.integers(0, 50, i.count)
    return lambda q, k, positions: op(q, k, positions, table), rows


def use_store_kv(i: Inputs) -> Use:
    op = get("store_kv").bind(i.ctx, layout="plain")

    def stored(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache = i.cache()
        op(k, v, cache["k"], cache["v"], slots)
        return tuple(x.flatten(0, 1)[slots.long()] for x in cache.values())

    return stored, (i.normal(i.count, 2, 16), i.normal(i.count, 2, 16), i.slots())


def use_qk_norm_rope_store(i: Inputs) -> Use:
    store = get("store_kv").bind(i.ctx, layout="plain")
    parts = {"store": lambda k, v, cache, slots: store(k, v, cache["k"], cache["v"], slots)}
    op = get("qk_norm_rope_store").bind(i.ctx, parts=parts, layout="plain", head_size=16)
    table, weights = i.table(), (i.normal(16), i.normal(16))

    def whole(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        cache = i.cache()
        q, k = op(q, k, v, table, positions, cache, slots, *weights, eps=1e-6, interleaved=False)
        return q, k, *(x.flatten(0, 1)[slots.long()] for x in cache.values())

    heads = (i.normal(i.count, 3, 16), i.normal(i.count, 2, 16), i.normal(i.count, 2, 16))
    return whole, (*heads, i.integers(0, 50, i.count), i.slots())


def use_slot_mapping(i: Inputs) -> Use:
    op, tables = get("slot_mapping").bind(i.ctx), i.integers(1, 99, 40, 8).int()

    def decodes(positions: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
        starts = torch.arange(positions.shape[0] + 1, dtype=torch.int32)
        slots: torch.Tensor = op(positions, requests, starts, tables, block_size=BLOCK)
        return slots

    return decodes, (i.integers(0, 8 * BLOCK, i.count), i.distinct(40, i.count).int())


def use_keep_tokens(i: Inputs) -> Use:
    op, kept = get("keep_tokens").bind(i.ctx), i.integers(0, 99, 40)

    def keep(slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        op(mine := kept.clone(), slots, tokens)
        return mine[slots]

    return keep, (i.distinct(40, i.count), i.integers(0, 1000, i.count))


def use_verify_drafts(i: Inputs) -> Use:
    op = get("verify_drafts").bind(i.ctx)

    def verify(drawn: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """Requests of three rows each, the last of which has no draft."""
        row_start = torch.arange(0, 3 * len(drawn) + 1, 3, dtype=torch.int32)
        counts: torch.Tensor = op(drawn.flatten(), functional.pad(drafts, (0, 1), value=NO_DRAFT).flatten(), row_start)
        return counts

    return verify, (i.integers(0, 2, i.count, 3), i.integers(0, 2, i.count, 2))


def use_decode_inputs(i: Inputs) -> Use:
    op, tables = get("decode_inputs").bind(i.ctx), i.integers(1, 99, 2, 41, 8).int()
    last = i.integers(0, 1000, 41)

    def decodes(lengths: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        no_page = torch.zeros_like(slots)
        step = allocate_step(2, len(slots), 8, slots.device)
        rows = torch.stack([slots, lengths, tokens, no_page, no_page]).int()
        op(rows, last, tables.clone(), step, block_size=BLOCK)
        return torch.stack([step["ids"], step["positions"], *step["slot_mapping"].long()], -1)

    return decodes, (i.integers(1, 8 * BLOCK, i.count), i.distinct(40, i.count), i.integers(-1, 9, i.count))


def use_apply_logit_bias(i: Inputs) -> Use:
    tokens = torch.stack([i.distinct(i.width, 5) for _ in range(i.count)])
    return get("apply_logit_bias").bind(i.ctx), (i.normal(i.count, i.width), tokens, i.floats(i.count, 5))


def use_apply_penalties(i: Inputs) -> Use:
    shape = i.count, i.width
    penalties = i.floats(i.count) + 0.5, i.floats(i.count) - 0.5, i.floats(i.count) - 0.5
    rows = i.normal(*shape), i.floats(*shape) < 0.3, i.integers(0, 4, *shape).int(), *penalties
    return get("apply_penalties").bind(i.ctx), rows


def use_mask_tokens(i: Inputs) -> Use:
    return get("mask_tokens").bind(i.ctx), (i.normal(i.count, i.width), i.floats(i.count, i.width) < 0.5)


def use_argmax_tokens(i: Inputs) -> Use:
    return get("argmax_tokens").bind(i.ctx), (i.normal(i.count, i.width),)


def use_embedding_lookup(i: Inputs) -> Use:
    op, weight = get("embedding_lookup").bind(i.ctx), i.normal(50, i.width)
    return lambda ids: op(ids, weight), (i.integers(0, 50, i.count),)


def use_philox_uniform(i: Inputs) -> Use:
    return get("philox_uniform").bind(i.ctx), (i.integers(0, 2**62, i.count), i.integers(0, 2**40, i.count))


def use_sample_tokens(i: Inputs) -> Use:
    temperature = i.floats(i.count) * 2
    temperature[::4] = 0.0
    top_k, top_p = i.integers(-1, 12, i.count).int(), i.floats(i.count).clamp(min=0.1)
    top_p[::3] = 1.0
    rows = i.normal(i.count, i.width), temperature, top_k, top_p, i.floats(i.count) * 0.1, i.floats(i.count)
    return get("sample_tokens").bind(i.ctx), rows


def use_token_logprobs(i: Inputs) -> Use:
    op = get("token_logprobs").bind(i.ctx)
    return lambda logits, tokens: op(logits, tokens, top_n=5), (
        i.normal(i.count, i.width),
        i.integers(0, i.width, i.count),
    )


def use_topk(i: Inputs, name: str, top_k: int, **settings: object) -> Use:
    op, bias = get(name).bind(i.ctx), i.floats(i.width)
    settings = {"top_k": top_k, "renormalize": True, "scaling": 1.5} | settings
    return lambda logits: op(logits, bias, **settings), (i.normal(i.count, i.width),)


def use_grouped_topk(i: Inputs) -> Use:
    i.width -= i.width % 4
    return use_topk(i, "grouped_topk", 3, scoring="sigmoid", num_groups=4, top_groups=2)


def use_route_topk(i: Inputs, scoring: str) -> Use:
    op = get("route_topk").bind(i.ctx, routing=f"topk_{scoring}")
    rest = {"renormalize": True, "scaling": 1.0, "num_groups": 1, "top_groups": 1}
    return lambda logits: op(logits, top_k=4, scoring=scoring, **rest), (i.normal(i.count, i.width),)


def use_moe_permute(i: Inputs) -> Use:
    """A token's rows are the same wherever they stand; back in the order of the tokens, that is."""
    op, ids = get("moe_permute").bind(i.ctx), torch.stack([i.distinct(8, 3) for _ in range(i.count)]).int()

    def there_and_back(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows, _, places = op(x, ids, num_experts=8)
        taken: torch.Tensor = rows[places]
        return taken

    return there_and_back, (i.normal(i.count, i.width), ids)


def use_moe_unpermute(i: Inputs) -> Use:
    op = get("moe_unpermute").bind(i.ctx)

    def of_own_rows(results: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """results [T, K, H]."""
        places = torch.arange(weights.numel()).view(weights.shape)
        y: torch.Tensor = op(results.flatten(0, 1), places, weights)
        return y

    return of_own_rows, (i.normal(i.count, 3, i.width), i.floats(i.count, 3))


def use_multiply_heads(i: Inputs) -> Use:
    op, weights = get("multiply_heads").bind(i.ctx), i.normal(3, i.width, 20)
    return lambda x: op(x, weights), (i.normal(i.count, 3, i.width),)


def use_store_index_keys(i: Inputs) -> Use:
    op = get("store_index_keys").bind(i.ctx, layout="plain", head_size=16)

    def stored(k: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        op(k, cache := {"index_key": torch.zeros(i.count + 1, BLOCK, 1, 16, dtype=i.ctx.dtype)}, slots)
        return cache["index_key"].flatten(0, 1)[slots.long(), 0]

    return stored, (i.normal(i.count, 16), i.slots())


def use_index_scores(i: Inputs, name: str) -> Use:
    """Decodes of requests that share pages; the table is as wide as the longest of those that are there."""
    op, keys = get("index_scores").bind(i.ctx, layout="plain", head_size=16), i.normal(40, BLOCK, 1, 16)
    if name == "row_by_row":
        op = load_target("hardpoint.ops.index_scores:row_by_row")

    def scores(q: torch.Tensor, weights: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        blocks = int(positions.max()) // BLOCK + 1
        starts = torch.arange(len(q) + 1, dtype=torch.int32)
        found = op(q, weights, {"index_key": keys}, table[:, :blocks].contiguous(), starts, positions)
        return functional.pad(found, (0, 20 * BLOCK - found.shape[1]), value=-torch.inf)

    table, positions = i.integers(0, 40, i.count, 20).int(), i.integers(0, 20 * BLOCK, i.count)
    return scores, (i.normal(i.count, 5, 16), i.normal(i.count, 5).float(), table, positions)


def use_topk_positions(i: Inputs) -> Use:
    op = get("topk_positions").bind(i.ctx, dtype="float32", scalars={"top_k": 9})
    return lambda scores, at: op(scores, at, top_k=9), (
        i.normal(i.count, i.width).float(),
        i.integers(0, i.width, i.count),
    )


USES: dict[str, Callable[[Inputs], Use]] = {
    **{f"act_and_mul {name}": partial(use_act_and_mul, name=name) for name in GATED},
    **{f"activation {name}": partial(use_activation, name=name) for name in ACTIVATIONS},
    "act_and_mul_quantized": use_act_and_mul_quantized,
    "add_lora": use_add_lora,
    "add_rms_norm": use_add_rms_norm,
    "add_rms_norm_quantized": use_add_rms_norm_quantized,
    "allreduce_add_rms_norm": use_allreduce_add_rms_norm,
    "apply_logit_bias": use_apply_logit_bias,
    "apply_penalties": use_apply_penalties,
    "argmax_tokens": use_argmax_tokens,
    "decode_inputs": use_decode_inputs,
    "embedding_lookup": use_embedding_lookup,
    "grouped_topk": use_grouped_topk,
    **{f"index_scores {name}": partial(use_index_scores, name=name) for name in ("selected", "row_by_row")},
    "keep_tokens": use_keep_tokens,
    "verify_drafts": use_verify_drafts,
    "mask_tokens": use_mask_tokens,
    "moe_permute": use_moe_permute,
    "moe_unpermute": use_moe_unpermute,
    "multiply_heads": use_multiply_heads,
    "philox_uniform": use_philox_uniform,
    "qk_norm_rope_store": use_qk_norm_rope_store,
    "quantize_rows": use_quantize_rows,
    "rms_norm": use_rms_norm,
    "rms_norm_quantized": use_rms_norm_quantized,
    "rms_norm of heads": lambda i: use_rms_norm(i, 3),
    "rotary_embedding": use_rotary_embedding,
    **{f"route_topk {scoring}": partial(use_route_topk, scoring=scoring) for scoring in ("softmax", "sigmoid")},
    "sample_tokens": use_sample_tokens,
    "slot_mapping": use_slot_mapping,
    "store_index_keys": use_store_index_keys,
    "store_kv": use_store_kv,
    "token_logprobs": use_token_logprobs,
    "topk_positions": use_topk_positions,
    "topk_sigmoid": partial(use_topk, name="topk_sigmoid", top_k=4),
    "topk_softmax": partial(use_topk, name="topk_softmax", top_k=4),
}
"""How each op is used, by its name and what else there is to say."""

RECURRENCE: dict[str, Any] = {
    "head_size": 16,
    "scalars": {"scale": 0.25, "delta_rule": True, "normalize": True, "channel_decay": False},
}
REFUSED: dict[str, dict[str, Any]] = {
    "causal_conv": {"activation": "silu"},
    "gated_rms_norm": {"activation": "silu", "scalars": {"eps": 1e-6, "gate_first": False}},
    "linear_recurrence_chunks": RECURRENCE,
    "linear_recurrence_step": RECURRENCE,
    "merge_attention": {},
    "recurrence_gates": {},
    "varlen_attention": {"head_size": 16, "scalars": {"scale": 0.25, "causal": True}},
}
"""Ops that no implementation offers in batch-invariant mode, which the unabsorbed form and states lack, and what binds
them."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_forms_of_their_own_are_right(dtype: str) -> None:
    forms = [c for c in OPS if c.name == "row_by_row"]
    assert forms
    for form in forms:
        assert not failures(get(str(form.of)), load_target(form.target), getattr(torch, dtype)), form.of


def test_every_op_is_here() -> None:
    assert {use.partition(" ")[0] for use in USES} | REFUSED.keys() == set(names())


@pytest.mark.parametrize("op", REFUSED)
def test_ops_without_a_form_for_it_are_refused(ctx: Context, op: str) -> None:
    with pytest.raises(SelectionError, match="batch_invariant not supported"):
        get(op).bind(ctx, **REFUSED[op])


@pytest.mark.parametrize("use", USES)
def test_rows_do_not_depend_on_each_other(ctx: Context, use: str) -> None:
    for count, width in ((count, width) for count in COUNTS for width in WIDTHS):
        function, rows = USES[use](Inputs(ctx, count, width))
        check_rows(function, *rows)


@pytest.mark.parametrize("use", ["argmax_tokens", "mask_tokens", "rms_norm", "sample_tokens", "token_logprobs"])
def test_rows_so_wide_that_threads_share_one(ctx: Context, use: str) -> None:
    function, rows = USES[use](Inputs(ctx, 4, 100_003))
    with threads(2):
        check_rows(function, *rows)


@pytest.mark.parametrize("top_n", [1, 5, 40])
def test_the_likeliest_tokens_do_not_depend_on_what_others_ask_for(ctx: Context, top_n: int) -> None:
    """Some row may ask for more of them; in low precision many are equally likely."""
    op = get("token_logprobs").bind(ctx)
    logits, tokens = torch.randint(0, 4, (3, 64)).to(ctx.dtype), torch.tensor([0, 5, 63])
    wanted, more = op(logits, tokens, top_n=top_n), op(logits, tokens, top_n=64)
    for some, all_of_them in zip(wanted, more, strict=True):
        assert torch.equal(some, all_of_them[:, : 1 + top_n])


# Matmul


def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The linear kernel over one weight."""
    kernel = BatchInvariantLinear(cast(BuildContext, None), LinearWorkload())
    weights = kernel.prepack({"weight": weight})
    return lambda x: kernel.apply(LinearCall(x, weights, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(3, 5), (64, 96), (129, 77), (512, 1536), (2048, 512)])
def test_a_row_times_a_weight(dtype: str, biased: bool, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs).to(getattr(torch, dtype))
    bias = torch.randn(outputs).to(weight) if biased else None
    for number in (1, 2):
        with threads(number):
            multiply = linear(weight, bias)
            for count in (1, 2, 16, 17, 40):
                check_rows(multiply, torch.randn(count, inputs).to(weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_multiplies(dtype: str) -> None:
    """Within what n float32 additions and two roundings to the dtype may cost (Higham 2002, section 3.1)."""
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(shape).to(getattr(torch, dtype)) for shape in ((77, 129), (77,), (40, 129)))
    y, (wide_x, wide_weight, wide_bias) = linear(weight, bias)(x), (t.double() for t in (x, weight, bias))
    assert y.dtype == weight.dtype
    share = 129 * torch.finfo(torch.float32).eps + 2 * torch.finfo(weight.dtype).eps
    most = share * functional.linear(wide_x.abs(), wide_weight.abs(), wide_bias.abs())
    assert ((y - functional.linear(wide_x, wide_weight, wide_bias)).abs() <= most).all()


def test_a_linear_takes_any_leading_shape() -> None:
    multiply = linear(torch.randn(5, 8), None)
    x = torch.randn(2, 3, 8)
    assert torch.equal(multiply(x).flatten(0, 1), multiply(x.flatten(0, 1)))
    assert multiply(x[:0]).shape == (0, 3, 5)


def test_a_kernel_that_treats_rows_of_a_tile_apart_gets_rows_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one might whose last rows go another way: found out when the weight is loaded, and avoided."""

    def planted(tile: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = functional.linear(tile, weight)
        y[12:] = functional.linear(tile[12:, :50], weight[:, :50]) + functional.linear(tile[12:, 50:], weight[:, 50:])
        return y

    weight, x = torch.randn(40, 100), torch.randn(30, 100)
    unaware = linear(weight, None)
    monkeypatch.setattr(batch_invariant_linear, "_matmul", planted)
    with pytest.raises(AssertionError, match="row"):
        check_rows(unaware, x)
    assert not rows_are_alike(weight, 16)
    check_rows(linear(weight, None), x)


# The check itself


@pytest.mark.parametrize("planted", ["number", "place", "neighbours", "strides"])
def test_the_check_finds_rows_that_depend(planted: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        if planted == "number" and x.shape[0] == 1:
            return y.nextafter(y + 1)
        if planted == "place":
            y[-1] = y[-1].nextafter(y[-1] + 1)
        if planted == "neighbours":
            return y + (x.sum() - x.sum(-1, keepdim=True)) * 1e-6
        if planted == "strides" and not x.is_contiguous():
            return y.nextafter(y + 1)
        return y

    check_rows(torch.Tensor.exp, torch.randn(9, 20).sign())
    with pytest.raises(AssertionError, match=r"row|place|strides"):
        check_rows(function, torch.randn(9, 20))
